"""Sharded values to safetensors files that any process can read, and back under any layout."""

import json
import os
from typing import Any

import optree
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardlib.collectives import played, storage
from shardlib.errors import RankMismatch, ShardError, UnknownParameter
from shardlib.placing import unshard
from shardlib.tensor import Place, ShardedTensor, typeof

__all__ = ["load", "save"]


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Write whole tensors by name to one safetensors file; every rank calls, rank 0 writes.

    ``tree``  a dictionary of tensors, or any pytree: a leaf is named by its path, joined by dots.
              Numbers, text and None among the leaves are kept in the file's metadata, and so are
              the layouts.
    One tensor at a time is gathered on every rank.  The file appears complete or not at all.
    Raises: ShardError for two leaves of one name and for a leaf that is neither.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d, sl.simulate(x=2):
    ...     save(d + "/w.safetensors", {"w": sl.shard(torch.arange(4), "x"), "step": 3})
    ...     found = load(d + "/w.safetensors", {"w": sl.shard(torch.zeros(4, dtype=torch.int64), "."), "step": 0})
    ...     found["w"].tolist(), found["step"]
    ([0, 1, 2, 3], 3)
    """
    leaves, _ = _named("save", tree)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    tensors = {n: p for n, p in leaves.items() if isinstance(p, Tensor)}
    kept = {n: v for n, v in leaves.items() if not isinstance(v, Tensor)}
    layouts = {n: str(p.sharding) for n, p in tensors.items() if isinstance(p, ShardedTensor)}
    whole = {}
    for name, p in sorted(tensors.items()):  # the same order on every rank, whatever each dict's is
        full = unshard(p.detach()) if isinstance(p, ShardedTensor) else p.detach()
        if writes:
            whole[name] = full.contiguous().cpu()
        del full
    if writes:
        part = f"{os.fspath(path)}.part"
        save_file(whole, part, metadata=layouts | ({_KEPT: json.dumps(kept)} if kept else {}))
        os.replace(part, path)
    if any(
        isinstance(p, ShardedTensor) and p.mesh.device_mesh is not None for p in tensors.values()
    ):
        dist.barrier()


_KEPT = "shardlib.leaves"  # where the metadata holds what is no tensor


def _named(op: str, tree: Any) -> tuple[dict[str, Any], Any]:
    """Leaves by their paths, and the tree's shape."""
    paths, leaves, shape = optree.tree_flatten_with_path(tree, none_is_leaf=True)  # type: ignore[arg-type]
    names = [".".join(map(str, p)) for p in paths]
    twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
    odd = next(
        (n for n, v in zip(names, leaves, strict=True) if not isinstance(v, Tensor | _PLAIN)), None
    )
    if twice is not None or odd is not None:
        what = (
            f"two leaves are named {twice!r}"
            if twice is not None
            else f"{odd!r} is neither a tensor nor a number"
        )
        raise ShardError(what, op=op, fix="sl.save(path, {'params': params, 'step': step})")
    return dict(zip(names, leaves, strict=True)), shape


_PLAIN = int | float | str | None


def load(path: str | os.PathLike[str], like: Any) -> Any:
    """Read a tree's leaves by name into the layouts and dtypes of
    ``like``; each rank reads its own blocks.

    Raises: UnknownParameter for missing or extra names, RankMismatch for another shape.
    """
    wanted, tree = _named("load", like)
    with safe_open(path, "pt") as file:
        kept = json.loads((file.metadata() or {}).get(_KEPT, "{}"))
        held = {n: True for n in file.keys()} | {n: False for n in kept}  # noqa: SIM118  # no mapping
        if {n: isinstance(p, Tensor) for n, p in wanted.items()} != held:
            missing, extra = sorted(set(wanted) - set(held)), sorted(set(held) - set(wanted))
            raise UnknownParameter(
                f"the file and the tree differ: missing {missing[:4]}, extra {extra[:4]}",
                op="load",
                operands={"file": os.fspath(path)},
                fix="sl.load(path, {n: like[n] for n in names})",
            )
        found = [
            _read(file.get_slice(n), n, p) if isinstance(p, Tensor) else kept[n]
            for n, p in wanted.items()
        ]
    return optree.tree_unflatten(tree, found)


def _read(source: Any, name: str, p: Tensor) -> Tensor:
    shape = tuple(source.get_shape())
    if shape != tuple(p.shape):
        raise RankMismatch(
            f"{name!r} has shape {list(shape)} in the file",
            op="load",
            operands={"wanted": typeof(p)},
            fix=f"like[{name!r}]",
        )
    if not isinstance(p, ShardedTensor):
        return source[...].to(p.dtype).to(p.device).requires_grad_(p.requires_grad)
    blocks = []
    for c in played(p.mesh):
        where = p.sharding.slices(shape, p.mesh, c)
        plain = tuple(w if isinstance(w, slice) and w.step == 1 else slice(None) for w in where)
        block = source[plain] if plain else source[...]
        for d, w in enumerate(where):
            if not (isinstance(w, slice) and w.step == 1):
                at = list(range(*w.indices(shape[d]))) if isinstance(w, slice) else w
                block = block.index_select(d, torch.tensor(at, dtype=torch.int64))
        blocks.append(block.to(p.dtype).to(p.device))
    raw = storage(blocks, p.mesh).contiguous()
    return ShardedTensor(
        raw.requires_grad_(p.requires_grad), Place(p.sharding, p.padded_shape, p.mesh)
    )
