"""Per-device code: a function of local blocks, lifted to sharded values.

Inside, ``psum(x, "x")`` and the other collectives move data by axis name, as in JAX.
Gradients are the exact adjoint of the program all ranks run together: a replicated input's
gradient is summed over the axes it is replicated on, a replicated output's cotangent is
shared among its copies.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import (
    Stacked,
    Varies,
    checking,
    differing,
    held,
    lead,
    real,
    verify,
    wrap,
)
from shardlib.errors import RankMismatch, ShardError, WrongAxes, lettered
from shardlib.layouts import Layout, LayoutLike, as_layout, is_layout
from shardlib.mesh import MeshLike, as_mesh, bind, simulate, within
from shardlib.tensor import Place, ShardedTensor, _Share, heard, lift, to_pending, typeof, vary

__all__ = ["shard_map"]

Layouts = LayoutLike | Sequence[LayoutLike]


def shard_map(
    f: Callable[..., Any],
    *,
    in_layouts: Layouts,
    out_layouts: Layouts,
    mesh: MeshLike | None = None,
) -> Callable[..., Any]:
    """Run ``f`` on each rank's blocks.

    ``in_layouts``   one layout per argument; an operand laid out otherwise is refused.
    ``out_layouts``  one layout, or one per output if ``f`` returns a tuple.
    Raises: ShardError where an operand or result does not have the stated layout.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     total = sl.shard_map(lambda v: sl.psum(v.sum(), "x"), in_layouts="x", out_layouts="")
    ...     sl.unshard(total(sl.shard(torch.arange(6.0), "x")))
    tensor(15.)
    """
    ins = _each(in_layouts, "in_layouts")

    result = _each(out_layouts, "out_layouts")

    def mapped(*args: Tensor) -> Any:
        return heard(run, mapped, *args)

    def run(*args: Tensor) -> Any:
        m = next((a.mesh for a in args if isinstance(a, ShardedTensor)), None) or as_mesh(mesh)
        if len(args) != len(ins):
            raise ShardError(
                f"{len(args)} operands and {len(ins)} layouts",
                op="shard_map",
                operands=_operands(args),
                mesh=m,
                fix=_line([getattr(a, "sharding", "...") for a in args], result, args),
            )
        blocks = []
        for i, (x, layout) in enumerate(zip(args, ins, strict=True)):
            x = lift(x, m, "shard_map")
            want = layout.resolve(len(x.padded_shape))
            if x.sharding != want:
                raise ShardError(
                    f"operand {i} is laid out {x.sharding}, not {want}",
                    op="shard_map",
                    operands={[*lettered(args)][i]: typeof(x)},
                    mesh=m,
                    fix=f"sl.reshard({[*lettered(args)][i]}, {str(want)!r})",
                )
            others = tuple(
                a
                for a in m.names
                if a not in want.axes and a not in want.partial and a not in x.deferred
            )
            block = wrap(vary(x.raw, m, others), m)
            if type(block) is Stacked:
                block.varies = Varies(real(m, (*want.axes, *want.partial)))
            blocks.append(block)
        if not lead(m) and checking() is not None:
            _rehearse(f, ins, result, blocks, m, args)
        with bind(m):
            out = f(*blocks)
        single = isinstance(out, Tensor)
        leaves, tree = optree.tree_flatten(out)
        outs = result * len(leaves) if is_layout(out_layouts) else result
        if len(outs) != len(leaves) or not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = ", ".join(type(leaf).__name__ for leaf in leaves)
            raise ShardError(
                f"the body returned ({kinds}), and out_layouts are for {len(outs)} tensors",
                op="shard_map",
                operands=_operands(args),
                mesh=m,
                fix=_line(ins, [*outs, *["..."] * len(leaves)][: len(leaves)], args)
                if all(isinstance(leaf, Tensor) for leaf in leaves)
                else "return torch.as_tensor(result)",
            )

        def line(i: int, layout: object) -> str:
            return _line(ins, [*outs[:i], layout, *outs[i + 1 :]], args)

        values = [
            _result(leaf, o, m, i, partial(line, i))
            for i, (leaf, o) in enumerate(zip(leaves, outs, strict=True))
        ]
        return values[0] if single else optree.tree_unflatten(tree, values)

    mapped.__name__ = "shard_map"
    return mapped


def _each(layouts: Layouts, name: str) -> list[Layout]:
    """Return one layout, or one per tensor."""
    several: Sequence[LayoutLike] = [layouts] if is_layout(layouts) else layouts  # type: ignore[assignment]
    return [as_layout(one, "shard_map", f"{name} = {{}}") for one in several]


def _line(ins: Sequence[object], outs: Sequence[object], args: Sequence[Tensor]) -> str:
    """Write the call with these layouts."""
    first, last = (
        repr(str(given[0])) if len(given) == 1 else repr(tuple(map(str, given)))
        for given in (ins, outs)
    )
    return f"sl.shard_map(f, in_layouts={first}, out_layouts={last})({', '.join(lettered(args))})"


def _operands(args: Sequence[Any]) -> dict[str, str]:
    return {
        n: typeof(a) if isinstance(a, Tensor) else type(a).__name__
        for n, a in lettered(args).items()
    }


def _result(
    block: Tensor, layout: Layout, mesh: Any, i: int, line: Callable[[object], str]
) -> ShardedTensor:
    """Make a block the sharded result.

    ``line``  writes the call with another layout of this result.
    """
    raw = held(block, mesh)  # a tensor made inside is the same for all
    local = list(block.shape)
    try:
        layout = layout.resolve(len(local))
    except RankMismatch as e:
        raise RankMismatch(
            f"result {i}: {e.message}",
            op="shard_map",
            operands={"result": str(local), "layout": str(layout)},
            mesh=mesh,
            fix=line(" ".join(["."] * len(local))),
        ) from None
    for d, token in enumerate(layout.dims):
        for axis in token.axes:
            local[d] *= mesh.axis_size(axis)
    copied = [
        a
        for a in mesh.names
        if a not in layout.axes and a not in layout.partial and mesh.axes[a] > 1
    ]
    if lead(mesh):
        _check_axes(block, layout, mesh, copied, i, line)
    elif copied and checking() is not None:
        fix = f"return sl.psum(result, {copied[0]!r})  # or name {copied[0]!r} in out_layouts"
        verify("shard_map", mesh, {f"result {i}": (raw, layout)}, fix)
    copies = math.prod(mesh.axes[a] for a in copied)
    if copies > 1 and raw.requires_grad:
        raw = _Share.apply(raw, copies)
    raw = to_pending(raw, mesh, (*layout.partial, *copied))  # type: ignore[arg-type]
    return ShardedTensor(raw, Place(layout, torch.Size(local), mesh))  # type: ignore[arg-type]


def _rehearse(
    f: Callable[..., Any],
    ins: Sequence[Layout],
    outs: Sequence[Layout],
    blocks: Any,
    mesh: Any,
    args: Sequence[Tensor],
) -> None:
    """Run a body of real ranks on the shapes of simulated ones, where what varies is followed.

    Raises: WrongAxes.  A body that needs values cannot be judged so, and is not.
    """
    stage, state = simulate(**mesh.axes), torch.random.get_rng_state()
    given = []
    for block, layout in zip(blocks, ins, strict=True):
        raw = torch.empty((stage.size, *block.shape), dtype=block.dtype, device="meta")
        seen = wrap(raw, stage)
        seen.varies = Varies(real(stage, (*layout.axes, *layout.partial)))  # type: ignore[attr-defined]
        given.append(seen)
    try:
        with bind(stage), within(traces=(), watcher=None), torch.no_grad():
            leaves = optree.tree_leaves(f(*given))
        outs = list(outs) * len(leaves) if len(outs) == 1 else outs
        for i, (leaf, layout) in enumerate(zip(leaves, outs, strict=False)):
            layout = layout.resolve(leaf.ndim)
            copied = [a for a in stage.names if a not in layout.axes and a not in layout.partial]
            other = [*outs[:i], None, *outs[i + 1 :]]
            _check_axes(
                leaf, layout, stage, copied, i,
                lambda right, other=other: _line(
                    ins, [right if o is None else o for o in other], args),
            )  # fmt: skip
    except WrongAxes:
        raise
    except Exception:
        return
    finally:
        torch.random.set_rng_state(state)


def _check_axes(
    block: Tensor,
    layout: Layout,
    mesh: Any,
    copied: list[str],
    i: int,
    line: Callable[[object], str],
) -> None:
    """Refuse a result that varies where its layout says that it is the same, or the reverse.

    The reverse: it is the same where its layout says that the ranks' parts are still to be summed.

    Only simulated ranks can be compared for nothing; the same body runs on real ones.
    """
    raw, text = held(block, mesh), str(layout)
    known = frozenset() if type(block) is not Stacked else block.varies and block.varies.axes
    wrong = [a for a in copied if known and a in known]
    wrong = wrong or [a for a in [differing(raw, mesh, copied)] if a]
    if wrong:
        axis = wrong[0]
        raise WrongAxes(
            f"result {i} varies along axis {axis!r}, and its layout {text!r} says that it is the "
            "same there",
            op="shard_map",
            operands={f"result {i}": f"{raw.dtype} {list(raw.shape[1:])} on each rank"},
            mesh=mesh,
            fix=f"return sl.psum(result, {axis!r})  # or name {axis!r} in out_layouts",
        )
    pending = real(mesh, layout.partial)
    if known is not None and (whole := sorted(pending - known, key=mesh.names.index)):
        raise WrongAxes(
            f"result {i} is the same along axis {whole[0]!r}, and its layout {text!r} would add "
            f"it up {mesh.axes[whole[0]]} times",
            op="shard_map",
            operands={f"result {i}": f"{raw.dtype} {list(raw.shape[1:])} on each rank"},
            mesh=mesh,
            fix=line(Layout(layout.dims, tuple(a for a in layout.partial if a not in whole))),
        )
