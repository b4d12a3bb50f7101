"""Collective verbs on local blocks, over named axes.

``axis`` is a mesh axis or a tuple of them, flattened major first; n is the bytes of x and p the
axis size in the costs below.  Gradients are exact adjoints of the map that all ranks compute
together.  A one-sized axis moves nothing.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from numbers import Number
from typing import Any, Literal

import torch
from torch import Tensor

from shardlib.collectives import posted
from shardlib.collectives.posted import Collective, Counts, Pending
from shardlib.collectives.simulate import Stacked, Varies
from shardlib.collectives.types import (
    after_move,
    differing,
    following,
    group,
    held,
    mesh_of,
    public_name,
    real,
)
from shardlib.errors import BadArgument, RankMismatch, ShardError, UnevenSplit, WrongAxes
from shardlib.mesh import Axes, Axis, current_mesh, uploaded


def _call(op: Collective, x: Tensor, axis: Axis, params: tuple) -> Tensor:
    if type(x) is not Tensor and type(x) is not Stacked:
        _check_block(op.name, x, axis)
    mesh = mesh_of(x)
    axes = _axes(axis, op.name)
    if mesh.axis_size(axes, *_named(op.name)) == 1 and params != ((),):
        # one rank keeps its block, except under ppermute without pairs, which gives zeros
        return x.to(params[0]) if op is posted.PSUM and params else x
    g = group(mesh, axes)
    if mesh.kind != "stacked":
        return posted.raw_call(op, x, g, params)
    varies = after_move(op.name, x, g, params)
    return following(posted.raw_call(op, held(x, mesh), g, params), mesh, varies)


def _axes(axis: Axis, op: str) -> Axes:
    """Return one axis or several as a tuple.  Raises: BadArgument."""
    if isinstance(axis, str):
        return (axis,)
    if isinstance(axis, tuple | list) and all(isinstance(a, str) for a in axis):
        return tuple(axis)
    name, line = _named(op)
    why = f"a mesh axis is a name, or a tuple of names, not {axis!r}"
    fix = line.format(repr(next(iter(current_mesh().names), "x")))
    raise BadArgument(why, op=name, fix=fix)


def _check_block(op: str, x: Any, axis: Axis) -> None:
    """Raise BadArgument for a number or a sharded value, which are not local blocks."""
    if not isinstance(x, Tensor):
        why = f"a collective takes a tensor, not {x!r}"
        fix = f"{public_name(op)}(torch.as_tensor(x), {axis!r})"
        raise BadArgument(why, op=op, fix=fix)
    if (layout := getattr(x, "sharding", None)) is not None:
        raise BadArgument(
            "a collective takes a rank's block, and this value is sharded",
            op=op,
            operands={"x": f"{x.dtype} {list(x.shape)} laid out {layout}"},
            fix=f"sl.shard_map(lambda x: {public_name(op)}(x, {axis!r}), in_layouts={str(layout)!r}, "
            "out_layouts='...')(x)",
        )


@cache
def _named(name: str) -> tuple[str, str]:
    """Return the collective's name for an error about the axis, and its line with the axis open."""
    return name, f"{public_name(name)}(x, {{}}{_MORE.get(name, '')})"


_MORE = {
    "all_to_all": ", split_dim, concat_dim", "ppermute": ", perm", "pcast": ", to='varying'"
}  # fmt: skip
"""Arguments of a call after the axis."""


def _dim(op: str, x: Tensor, axis: Axis, dim: int, splits: bool, new: int = 0) -> int:
    if type(x) is not Tensor and type(x) is not Stacked:
        _check_block(op, x, axis)
    ndim = x.ndim + new
    if not -ndim <= dim < ndim:
        why = f"dimension {dim} of a block with {ndim} dimensions"
        fix = f"{public_name(op)}(x, {axis!r}, dim=0)"
        if not ndim:
            fix = f"{public_name(op)}(x.unsqueeze(0), {axis!r})"
        raise RankMismatch(why, op=op, operands={"block": list(x.shape)}, fix=fix)
    if splits:
        mesh = mesh_of(x)
        p, n = mesh.axis_size(axis, *_named(op)), x.shape[dim]
        if n % p:
            raise UnevenSplit(
                f"dimension {dim} of size {n} does not divide over mesh axis {axis!r} (size {p}, "
                f"remainder {n % p})",
                op=op,
                operands={"block": list(x.shape)},
                mesh=mesh,
                fix=f"{public_name(op)}(torch.nn.functional.pad(x.movedim({dim}, -1), (0, {-n % p}))"
                f".movedim(-1, {dim}), {axis!r}, {dim})",
            )
    return dim % ndim


def psum(
    x: Tensor, axis: Axis, *, out: torch.dtype | None = None, wire: torch.dtype | None = None
) -> Tensor:
    """Sum over a mesh axis; every rank gets it.

    ``out``   the result's dtype, in which it is sent to all; the sum itself keeps x's.
    ``wire``  the dtype in which parts are sent to be summed; a rank's own part keeps x's.
    Moves:  2 (p-1)/p n bytes, 2 (p-1) messages; n of x, or half of n in each of these dtypes.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     psum(torch.ones(2), "x")
    tensor([2., 2.])
    """
    return _call(posted.PSUM, x, axis, _narrow(x, axis, out, wire))


def _narrow(
    x: Tensor, axis: Axis, out: torch.dtype | None = None, wire: torch.dtype | None = None
) -> tuple[torch.dtype, ...]:
    if not isinstance(x, Tensor):
        return ()  # call raises for it
    dtypes = out or x.dtype, wire or x.dtype
    return () if dtypes == (x.dtype, x.dtype) else dtypes


def pmean(x: Tensor, axis: Axis) -> Tensor:
    """Average over a mesh axis; every rank gets it.

    Moves what psum moves.
    Grad:   pmean.

    >>> import shardlib as sl
    >>> with sl.simulate(x=4):
    ...     pmean(axis_index("x") * 2.0, "x")  # of 0, 2, 4, 6
    tensor(3.)
    """
    if type(x) is not Stacked:
        return psum(x, axis) / axis_size(axis)
    # every rank counts once in the mean, so copies of a replicated value are meant to be summed
    return psum(pcast(x, axis, to="varying"), axis) / x.mesh.axis_size(axis)


def pmax(x: Tensor, axis: Axis) -> Tensor:
    """Take the elementwise maximum over a mesh axis; every rank gets it.

    Moves what psum moves.
    Grad:   to the maxima, shared.

    >>> import shardlib as sl
    >>> with sl.simulate(x=4):
    ...     pmax(axis_index("x") * torch.tensor([1, -1]), "x")  # of [0, 0] ... [3, -3]
    tensor([3, 0])
    """
    return _call(posted.PMAX, x, axis, ())


def all_gather(x: Tensor, axis: Axis, dim: int = 0, tiled: bool = True) -> Tensor:
    """Concatenate every rank's block along ``dim`` (``tiled=False``: stack them along a new one).

    Shapes: x [..., n, ...] -> [..., n p, ...].
    Moves:  (p-1) n bytes, p-1 messages.
    Grad:   psum_scatter.

    >>> import shardlib as sl
    >>> with sl.simulate(x=3), sl.trace() as t:
    ...     block = axis_index("x") * torch.ones(2)  # rank 1 holds [1., 1.]
    ...     all_gather(block, "x"), all_gather(block, "x", tiled=False).shape
    (tensor([0., 0., 1., 1., 2., 2.]), torch.Size([3, 2]))
    >>> t.bytes, t.messages  # twice two blocks of 8 bytes
    (32, 4)
    """
    at = _gathered(x, axis, dim, new=not tiled)
    return _call(posted.ALL_GATHER, x if tiled else x.unsqueeze(*at), axis, at)


def _gathered(x: Tensor, axis: Axis, dim: int = 0, new: int = 0) -> tuple[int]:
    return (_dim("all_gather", x, axis, dim, False, new),)


def psum_scatter(x: Tensor, axis: Axis, dim: int = 0, wire: torch.dtype | None = None) -> Tensor:
    """Sum over a mesh axis and keep this rank's block of the result.

    Shapes: x [..., n, ...] -> [..., n / p, ...] along ``dim``.
    ``wire``  send in this dtype; a rank's own part, and the sum, keep x's.
    Moves:  (p-1)/p n bytes, p-1 messages.
    Grad:   all_gather.
    Raises: UnevenSplit if the dimension is no multiple of the axis size; UnknownAxis.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     psum_scatter(torch.ones(4), "x")
    tensor([2., 2.])
    """
    return _call(posted.PSUM_SCATTER, x, axis, _scatter(x, axis, dim, wire))


def _scatter(x: Tensor, axis: Axis, dim: int = 0, wire: torch.dtype | None = None) -> tuple:
    at = _dim("psum_scatter", x, axis, dim, True)
    return (at,) if wire is None or wire == x.dtype else (at, wire)


def pslice(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's block of a tensor that all ranks hold.

    Moves nothing.

    Shapes: x [..., n, ...] -> [..., n / p, ...].
    Grad:   the block placed in zeros.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     pslice(torch.arange(6), "x")
    x=0: tensor([0, 1, 2])
    x=1: tensor([3, 4, 5])
    """
    return _call(posted.PSLICE, x, axis, (_dim("pslice", x, axis, dim, True),))


def ppermute(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> Tensor:
    """Send blocks along (source, destination) pairs; ranks that receive nothing get zeros.

    Moves:  n bytes per moving pair / p, 1 message.
    Grad:   the inverse.
    Raises: ShardError if a rank sends or receives twice, or is not on the axis.

    >>> import shardlib as sl
    >>> with sl.simulate(x=3):
    ...     ppermute(axis_index("x") + 10, "x", [(0, 1), (1, 2)])
    x=0: tensor(0)
    x=1: tensor(10)
    x=2: tensor(11)
    """
    return _call(posted.PPERMUTE, x, axis, _pairs(x, axis, perm))


def _pairs(
    x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]
) -> tuple[tuple[tuple[int, int], ...]]:
    pairs = tuple((int(s), int(d)) for s, d in perm)
    _check_pairs(pairs, axis, mesh_of(x).axis_size(axis, *_named("ppermute")))
    return (pairs,)


@lru_cache(maxsize=1024)
def _check_pairs(pairs: tuple[tuple[int, int], ...], axis: Axis, p: int) -> None:
    sources, targets = [s for s, _ in pairs], [d for _, d in pairs]
    outside = [r for r in (*sources, *targets) if not 0 <= r < p]
    twice = [r for ranks in (sources, targets) for r in set(ranks) if ranks.count(r) > 1]
    if outside or twice:
        what = [f"rank {r} is not among 0..{p - 1}" for r in outside]
        what += [f"rank {r} sends or receives twice" for r in twice]
        fix = f"sl.ppermute(x, {axis!r}, {[(i, (i + 1) % p) for i in range(p)]})"
        raise ShardError(what[0], op="ppermute", fix=fix)


def shift(x: Tensor, axis: Axis, by: int = 1) -> Tensor:
    """Send every rank's block ``by`` ranks further, cyclic: rank i's goes to rank i + by.

    Moves:  n bytes, 1 message.
    Grad:   shift by -by.

    >>> import shardlib as sl
    >>> with sl.simulate(x=3):
    ...     shift(axis_index("x"), "x")
    x=0: tensor(2)
    x=1: tensor(0)
    x=2: tensor(1)
    """
    return _call(posted.PPERMUTE, x, axis, _by(x, axis, by))


def _by(x: Tensor, axis: Axis, by: int = 1) -> tuple[tuple[tuple[int, int], ...]]:
    return (_cycle(mesh_of(x).axis_size(axis, *_named("shift")), by),)


@lru_cache(maxsize=1024)
def _cycle(p: int, by: int) -> tuple[tuple[int, int], ...]:
    return tuple((i, (i + by) % p) for i in range(p))


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Send block j of ``split_dim`` to rank j and concatenate received blocks along ``concat_dim``.

    Shapes: x [.., n, .., m, ..] -> [.., n / p, .., m p, ..].
    Moves:  (p-1)/p n bytes, p-1 messages.
    Grad:   all_to_all with the dims exchanged.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     rows = pslice(torch.arange(8).reshape(4, 2), "x")  # [4/x, 2]
    ...     all_to_all(rows, "x", 1, 0)  # [4, 2/x]: from rows to columns
    x=0: tensor([[0],
            [2],
            [4],
            [6]])
    x=1: tensor([[1],
            [3],
            [5],
            [7]])
    """
    return _call(posted.ALL_TO_ALL, x, axis, _dims(x, axis, split_dim, concat_dim))


def _dims(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> tuple[int, int]:
    return _dim("all_to_all", x, axis, split_dim, True), _dim(
        "all_to_all", x, axis, concat_dim, False
    )


def ragged_all_to_all(x: Tensor, axis: Axis, counts: Counts) -> Tensor:
    """Send ``counts[i][j]`` elements of rank i's vector to rank j, in the order of the ranks.

    Shapes: x [largest number sent by a rank] -> [largest number received by a rank]; elements
            beyond a rank's own count have no meaning.
    Moves:  on average over the ranks, the elements that change their rank; p-1 messages.
    Grad:   the same with ``counts`` transposed.
    Raises: ShardError if ``counts`` or x have other sizes.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     ragged_all_to_all(sl.axis_index("x") * 10 + torch.arange(3), "x", ((1, 2), (0, 3)))
    x=0: tensor([0, 0, 0, 0, 0])
    x=1: tensor([ 1,  2, 10, 11, 12])
    """
    mesh = mesh_of(x)
    line = "sl.collectives.ragged_all_to_all(x, {}, counts)"
    p, most = mesh.axis_size(axis, "ragged_all_to_all", line), max(map(sum, counts), default=0)
    if [len(row) for row in counts] != [p] * p or x.shape != (most,):
        why = f"counts {counts} on {p} ranks for a vector of {list(x.shape)}"
        given = {"block": list(x.shape)}
        fix = f"sl.collectives.ragged_all_to_all(x.new_zeros({p}), {axis!r}, {((1,) * p,) * p})"
        raise ShardError(why, op="ragged_all_to_all", operands=given, fix=fix)
    return _call(posted.RAGGED, x, axis, (counts, x.element_size()))


def pbroadcast(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """Copy the root's block to every rank.

    Moves:  (p-1)/p n bytes on average, 1 message.
    Grad:   preduce.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     pbroadcast(axis_index("x") * 10.0, "x", root=1)
    tensor(10.)
    """
    return _call(posted.PBROADCAST, x, axis, _root("pbroadcast", x, axis, root))


def preduce(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """Sum over a mesh axis at the root; the others get zeros.

    Moves:  (p-1)/p n bytes on average, 1 message.
    Grad:   pbroadcast.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     preduce(torch.ones(2), "x", root=1)
    x=0: tensor([0., 0.])
    x=1: tensor([2., 2.])
    """
    return _call(posted.PREDUCE, x, axis, _root("preduce", x, axis, root))


def _root(op: str, x: Tensor, axis: Axis, root: int = 0) -> tuple[int]:
    mesh = mesh_of(x)
    p = mesh.axis_size(axis, *_named(op))
    if not 0 <= root < p:
        why = f"root {root} is not among 0..{p - 1} of {axis!r}"
        fix = f"{public_name(op)}(x, {axis!r}, 0)"
        raise ShardError(why, op=op, mesh=mesh, fix=fix)
    return (root,)


def pvary(x: Tensor, axis: Axis) -> Tensor:
    """Mark a replicated value as combined with per-rank data: its gradient is summed over ``axis``.

    The value is the same and nothing moves forward.
    Grad:   psum.

    >>> import shardlib as sl
    >>> from shardlib.collectives import unwrap, wrap
    >>> with sl.simulate(x=4) as mesh:
    ...     copies = torch.ones(4, 1, requires_grad=True)  # of one weight, a row per rank
    ...     y = pvary(wrap(copies, mesh), "x") * axis_index("x")  # each rank's own number
    ...     unwrap(y).sum().backward()
    >>> copies.grad.flatten()  # 0 + 1 + 2 + 3 on every rank
    tensor([6., 6., 6., 6.])
    """
    return _call(posted.PVARY, x, axis, ())


def axis_size(axis: Axis) -> int:
    """Count the ranks along an axis, or along several together.

    Raises: UnknownAxis; NoMesh where no mesh is in scope.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=3):
    ...     axis_size("y"), axis_size(("x", "y"))
    (3, 6)
    """
    return current_mesh().axis_size(axis, "axis_size", "sl.axis_size({})")


def axis_index(axis: Axis) -> Any:
    """Return this rank's index along an axis: an int, or under simulate a block with each rank's.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     axis_index("x")
    x=0: tensor(0)
    x=1: tensor(1)
    """
    mesh = current_mesh()
    axes = _axes(axis, "axis_index")
    mesh.axis_size(axes, "axis_index", "sl.axis_index({})")
    index = group(mesh, axes).index
    if not isinstance(index, Tensor):
        return index
    return following(index.clone(), mesh, Varies(real(mesh, axes)))


def pick(table: Sequence[complex] | Tensor, axis: Axis) -> Any:
    """Return ``table[axis_index(axis)]`` without a branch: for one rank, or for all of them.

    ``table``  one number for each rank along the axis, or a tensor with a row for each.
    Raises: BadArgument for anything else, or more or fewer of them.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     pick([0.5, 2.0], "x") * torch.ones(2)
    x=0: tensor([0.5000, 0.5000])
    x=1: tensor([2., 2.])
    """
    index, p = axis_index(axis), current_mesh().axis_size(axis)
    numbers = isinstance(table, Tensor) or all(isinstance(n, Number) for n in table)
    if not numbers or len(table) != p:
        what = f"{len(table)} entries" if numbers else "entries that are no numbers"
        why = f"a table of {what}, and {axis!r} has {p} ranks"
        fix = f"sl.collectives.pick([0.0] * {p}, {axis!r})"
        raise BadArgument(why, op="pick", mesh=current_mesh(), fix=fix)
    if not isinstance(index, Stacked):
        return table[index]
    where = index.ranks.device
    if not isinstance(table, Tensor):
        table = uploaded(tuple(table), where, torch.as_tensor(table).dtype)
    return following(table.to(where)[index.ranks], index.mesh, index.varies)


def pcast(x: Tensor, axis: Axis, *, to: Literal["varying", "replicated"]) -> Tensor:
    """Override whether a block counts as varying along an axis in a body of shard_map.

    ``"replicated"``  every rank along the axis holds the same values, though they were computed
                      from varying ones: a ring that gathers passes every block to every rank.
    ``"varying"``     treat the ranks' copies as separate values, so that they may be summed.
    Moves nothing.  Grad: the identity.
    Raises: WrongAxes for "replicated" where simulated ranks hold different values.
    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):
    ...     f = lambda v: sl.psum(sl.collectives.pcast(v, "x", to="varying"), "x")
    ...     x = sl.shard(torch.ones(2), ".")
    ...     sl.unshard(sl.shard_map(f, in_layouts=".", out_layouts=".")(x))
    tensor([2., 2.])
    """
    if to not in ("varying", "replicated"):
        why = f"to={to!r} is neither 'varying' nor 'replicated'"
        fix = f"sl.collectives.pcast(x, {axis!r}, to='varying')"
        raise ShardError(why, op="pcast", fix=fix)
    mesh = mesh_of(x)
    axes = _axes(axis, "pcast")
    mesh.axis_size(axes, *_named("pcast"))
    if type(x) is not Stacked:
        return x
    over = real(mesh, axes)
    order = sorted(over, key=mesh.names.index)
    if to == "replicated" and (wrong := differing(x.ranks, mesh, order)):
        why = f"the block differs along axis {wrong!r}"
        given = {"block": f"{x.dtype} {list(x.shape)}"}
        fix = f"sl.psum(x, {wrong!r})"
        raise WrongAxes(why, op="pcast", operands=given, mesh=mesh, fix=fix)
    known, now = x.varies and x.varies.axes, None
    if known is not None:
        now = Varies(known - over if to == "replicated" else known | over)
    return following(x.ranks.view_as(x.ranks), mesh, now)


_POSTABLE: dict[Callable[..., Tensor], tuple[Collective, Callable[..., tuple]]] = {
    psum: (posted.PSUM, _narrow),
    pmax: (posted.PMAX, lambda x, axis: ()),
    all_gather: (posted.ALL_GATHER, _gathered),
    psum_scatter: (posted.PSUM_SCATTER, _scatter),
    ppermute: (posted.PPERMUTE, _pairs),
    shift: (posted.PPERMUTE, _by),
    all_to_all: (posted.ALL_TO_ALL, _dims),
    pbroadcast: (posted.PBROADCAST, partial(_root, "pbroadcast")),
    preduce: (posted.PREDUCE, partial(_root, "preduce")),
}
"""Verb -> its record, and the function of its arguments that checks them."""


def start(f: Callable[..., Tensor], x: Tensor, axis: Axis, *args: Any, **kwargs: Any) -> Pending:
    """Post a collective and continue: ``later = start(pbroadcast, x, "y", 0); ...; later.wait()``.

    For code that writes its own gradient.  Raises: ShardError if autograd would have to record it.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     block = sl.axis_index("x") * torch.ones(2)
    ...     later = start(sl.collectives.shift, block, "x")  # the neighbour's block is on its way
    ...     own = block @ block  # meanwhile
    ...     own + later.wait().sum()
    tensor(2.)
    """
    mesh = mesh_of(x)
    why = ""
    if x.requires_grad and torch.is_grad_enabled():
        why = "the asynchronous form has no gradient"
    elif f not in _POSTABLE:
        why = f"no asynchronous form; these have one: {', '.join(g.__name__ for g in _POSTABLE)}"
    if why:
        raise ShardError(why, op=f.__name__, fix=f"{public_name(f.__name__)}(x, {axis!r})")
    op, checked = _POSTABLE[f]
    params = checked(x, axis, *args, **kwargs)
    axes = _axes(axis, f.__name__)
    if mesh.axis_size(axes) == 1:
        out = _call(op, x, axis, params)
        return Pending(lambda: out)
    return posted.post(op, x, group(mesh, axes), params)
