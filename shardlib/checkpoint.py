"""Sharded values to safetensors files that any process can read, and back under any layout."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardlib.errors import RankMismatch, UnknownParameter
from shardlib.layouts import coordinates
from shardlib.placing import unshard
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["load", "save"]


def save(path: str | os.PathLike[str], params: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name to one safetensors file; every rank calls, rank 0 writes.

    One tensor at a time is gathered on every rank.  The file appears complete or not at all.
    Layouts are kept as text in the file's metadata.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d, sl.simulate(x=2):
    ...     save(d + "/w.safetensors", {"w": sl.shard(torch.arange(4), "x")})
    ...     load(d + "/w.safetensors", {"w": sl.shard(torch.zeros(4, dtype=torch.int64), ".")})["w"].tolist()
    [0, 1, 2, 3]
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    layouts = {n: str(p.sharding) for n, p in params.items() if isinstance(p, ShardedTensor)}
    whole = {}
    for name, p in sorted(params.items()):  # the same order on every rank, whatever each dict's is
        full = unshard(p.detach()) if isinstance(p, ShardedTensor) else p.detach()
        if writes:
            whole[name] = full.contiguous().cpu()
        del full
    if writes:
        part = f"{os.fspath(path)}.part"
        save_file(whole, part, metadata=layouts)
        os.replace(part, path)
    if any(isinstance(p, ShardedTensor) and p.mesh.kind == "dist" for p in params.values()):
        dist.barrier()


def load(path: str | os.PathLike[str], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors by name into the layouts and dtypes of ``like``; each rank reads its own blocks.

    Raises: UnknownParameter for missing or extra names, RankMismatch for another shape.
    """
    with safe_open(path, "pt") as file:
        held = set(file.keys())
        if held != set(like):
            missing, extra = sorted(set(like) - held), sorted(held - set(like))
            raise UnknownParameter(
                f"the file and the tree differ: missing {missing[:4]}, extra {extra[:4]}",
                op="load",
                operands={"file": os.fspath(path)},
                fix="sl.load(path, {n: like[n] for n in names})",
            )
        return {name: _read(file.get_slice(name), name, p) for name, p in like.items()}


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
    coords = [dict(p.mesh.coord or {})] if p.mesh.kind == "dist" else coordinates(p.mesh)
    blocks = []
    for c in coords:
        where = p.sharding.slices(shape, p.mesh, c)
        plain = tuple(w if isinstance(w, slice) and w.step == 1 else slice(None) for w in where)
        block = source[plain] if plain else source[...]
        for d, w in enumerate(where):
            if not (isinstance(w, slice) and w.step == 1):
                at = list(range(*w.indices(shape[d]))) if isinstance(w, slice) else w
                block = block.index_select(d, torch.tensor(at, dtype=torch.int64))
        blocks.append(block.to(p.dtype).to(p.device))
    raw = torch.stack(blocks) if p.mesh.kind == "stacked" else blocks[0].contiguous()
    return ShardedTensor(raw.requires_grad_(p.requires_grad), p.sharding, p.size_, p.mesh)
