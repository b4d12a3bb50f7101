"""The check of a layout of your own, as one call.

``check_layout(Mine("x"))`` draws shapes and small simulated meshes, places tensors in the layout
and compares with dense: the ranks' blocks, the bytes moved, values and gradients.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import each_rank, holds_values, trace
from shardlib.data import from_local
from shardlib.errors import ShardError, UnevenSplit
from shardlib.layouts import Dim, Layout, LayoutFamily, LayoutLike, as_layout
from shardlib.layouts.orders import declared
from shardlib.mesh import Coord, Mesh, Sizes, coordinates, scope, simulate
from shardlib.ops.matmul.op import product
from shardlib.placing import reshard, shard, unshard
from shardlib.tensor import layout_of
from shardlib.testing.compare import alike, close, normal

__all__ = ["check_layout"]

# the most ranks of a mesh that is drawn
_MOST = 12
# sizes tried until one divides
_TRIED = 256


def check_layout(
    layout: LayoutLike, meshes: Sequence[Sizes] | None = None, *, seed: int = 0
) -> list[str]:
    """Check a layout on shapes and meshes that are drawn at random, and list those.

    - It is hashable, resolves to the same value every time, and its text parses back to it.
    - Its blocks tile the tensor: every element is on equally many ranks, each block has the shape
      that ``local_shape`` returns, and ``shard`` and ``from_local`` put it on the right rank.
    - ``unshard`` inverts ``shard``, for the gradient too.
    - Resharded to other layouts and back, values and gradients equal dense, and the bytes and
      messages counted equal those predicted by the plan (``a >> b``).
    - A sum, a norm and a product of it equal dense, with their gradients; the latter two may be
      refused.
    - Sizes that do not divide are refused with the dimension's number, and work with ``pad=True``.

    ``layout``  a Layout, its text, or a ``LayoutFamily``.
    ``meshes``  axis names and sizes, simulated.  By default some are drawn over the layout's axes
                and one more; inside ``with mesh:``, real or simulated, only that mesh is used.
    ``seed``    of the random draws.

    Raises: AssertionError naming the law, the shape and the mesh.  A layout that fits none fails.

    >>> import shardlib as sl
    >>> sl.testing.check_layout(sl.Ring("s", schedule="zigzag"), [{"s": 2}])
    ['. zigzag(s): [2, 8] on s=2', '. zigzag(s) .: [1, 8, 3] on s=2']
    """
    draw = random.Random(seed)
    inside = scope().mesh
    mesh = inside if not meshes else meshes[0]
    lay = _value(layout, mesh)
    layout = layout if isinstance(layout, LayoutFamily | str) else lay
    if meshes is None and inside is not None:
        if not holds_values(inside):
            text = "a recording mesh holds no values"
            fix = f"sl.testing.check_layout({str(lay)!r}, [{dict(inside.axes)}])"
            raise ShardError(text, op="check_layout", mesh=inside, fix=fix)
        found = list(_on(inside, layout, lay, draw))
    else:
        sizes = _meshes(lay, draw) if meshes is None else meshes
        each = (_on(simulate(device="cpu", **m), layout, lay, draw) for m in sizes)
        found = list(itertools.chain.from_iterable(each))
    checked = [case for case in found if not isinstance(case, ShardError)]
    if not checked:
        raise AssertionError(f"{lay} fits no mesh: {next(iter(found), 'none is given')}")
    return [str(case) for case in checked]


def _value(given: LayoutLike, mesh: Mesh | Sizes | None) -> Layout:
    """Return the layout, checked to be one hashable value that parses back from its text."""
    fix = "sl.testing.check_layout({})"
    lay, again = (as_layout(given, "check_layout", fix, mesh=mesh) for _ in range(2))
    alike(f"{given!r} has one layout", again, lay)
    if isinstance(given, LayoutFamily):
        alike(f"{given!r} has one hash", (hash(given), given), (hash(given), given))
    alike(f"the text of {lay} reads back as it", Layout.parse(str(lay)), lay)
    return lay


def _meshes(lay: Layout, draw: random.Random) -> list[dict[str, int]]:
    """Draw meshes for the layout's axes and one axis that it does not name."""
    named = lay.named
    spare = next(a for a in ("r", "r2", "r3", "r4", "r5") if a not in named)
    found = [dict.fromkeys(named, 2), {**dict.fromkeys(named, 1), spare: 2}]
    for _ in range(2):
        mesh: dict[str, int] = {}
        for axis in draw.sample([*named, spare], len(named) + 1):
            mesh[axis] = draw.randint(1, max(1, min(3, _MOST // math.prod(mesh.values()))))
        found.append(mesh)
    return [mesh for mesh in found if mesh]


def _on(
    mesh: Mesh, given: LayoutLike, lay: Layout, draw: random.Random
) -> Iterator[str | ShardError]:
    """Check the layout on a mesh; yield a text per case, or the error where it does not fit."""
    least = len(lay.dims)
    ranks = (least,) if lay.ellipsis is None else (max(1, least), max(1, least) + 1)
    for ndim in ranks:
        try:
            me = lay.resolve(ndim)
            units = [_unit(dim, mesh) for dim in me.aligned.dims]
            shape = tuple(
                n if declared(dim.order) is not None else n * draw.randint(1, 3 if n < 12 else 2)
                for dim, n in zip(me.dims, units, strict=True)
            )
            me.check(shape, mesh)
        except ShardError as e:
            yield e
            continue
        text = f"{me}: {list(shape)} on {mesh}"
        with mesh:
            _check_blocks(text, given, me, shape, mesh)
            _check_ways(text, given, me, shape, mesh)
            _check_computed(text, given, me, shape)
            _check_uneven(text, given, me, units, shape)
        yield text


def _unit(dim: Dim, mesh: Mesh) -> int:
    """Return the least size that divides.  Raises: ShardError."""
    length = declared(dim.order)
    reason: ShardError | None = None
    for n in range(1, _TRIED) if length is None else [length]:
        try:
            Layout((dim,)).check((n,), mesh)
        except UnevenSplit as e:
            reason = e
        else:
            return n
    assert reason is not None
    raise reason


# ---------------------------------------------------------------- blocks


def _check_blocks(
    text: str, given: LayoutLike, me: Layout, shape: tuple[int, ...], mesh: Mesh
) -> None:
    """Check that blocks tile the tensor, have the layout's shape, and are on the right rank."""
    x = normal(*shape, seed=1).requires_grad_()

    def places(coord: Coord) -> tuple[Tensor, ...]:
        """Return the position of each element of a rank's block, per dimension."""
        at = [torch.tensor(list(i), device="cpu").long() for i in me.indices(shape, mesh, coord)]
        return torch.meshgrid(*at, indexing="ij") if at else ()

    owners = torch.zeros(shape, dtype=torch.int64, device="cpu")
    for coord in coordinates(mesh.axes):
        at = places(coord)
        ones = torch.ones_like(x.detach()[at], dtype=torch.int64)
        law = f"{text}: the shape of the block at {coord}"
        alike(law, me.local_shape(shape, mesh), tuple(ones.shape))
        # counts the ranks that hold each element
        owners.index_put_(at, ones, accumulate=True)
    copies = math.prod(n for axis, n in mesh.axes.items() if axis not in me.axes)
    if bool((owners != copies).any()):
        wrong = (owners != copies).nonzero()[0].tolist()
        raise AssertionError(
            f"{text}: the blocks do not tile the tensor: {int(owners[tuple(wrong)])} ranks hold "
            f"element {wrong}, not {copies}"
        )

    def mine(coord: Coord) -> Tensor:
        block = x.detach()[places(coord)]
        return torch.zeros_like(block) if me.is_zero(coord) else block

    a = shard(x, given)
    alike(f"{text}: where it lies", layout_of(a), me)
    for coord, view in each_rank(mesh):
        block = view(a.raw.detach())
        alike(f"{text}: the block at {coord} has its shape", block.shape, mine(coord).shape)
        close(f"{text}: the block at {coord}", block, mine(coord), 0.0)
    whole, c = unshard(a), normal(*shape, seed=2).requires_grad_()
    close(f"{text}: what unshard gives back", whole, x, 0.0)
    (gradient,) = torch.autograd.grad((whole * c.to(whole.device)).sum(), [x])
    close(f"{text}: the gradient through shard and unshard", gradient, c, 0.0)
    if not me.partial:
        read = from_local(lambda: mine(mesh.coord or {}), given)
        close(f"{text}: what from_local joins", unshard(read), x, 0.0)


# ---------------------------------------------------------------- resharding


def _others(me: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[Layout]:
    """List other layouts: unsplit, and each of two axes in each dimension that it divides."""
    whole = [Dim()] * len(shape)
    found = [Layout(tuple(whole))]
    for axis, d in itertools.product(list(mesh.axes)[:2], range(len(shape))):
        if shape[d] % mesh.axes[axis] == 0:
            found.append(Layout((*whole[:d], Dim((axis,)), *whole[d + 1 :])))
    return [other for other in found if other != me]


def _check_ways(
    text: str, given: LayoutLike, me: Layout, shape: tuple[int, ...], mesh: Mesh
) -> None:
    """Reshard to other layouts and back: check values, gradients, and the plans' predictions."""
    x, c = normal(*shape, seed=3), normal(*shape, seed=4)
    for other in _others(me, shape, mesh):
        way = f"{text}: {me} >> {other}"
        a = shard(x, given).requires_grad_()
        with trace() as there:
            b = reshard(a, other)
        with torch.no_grad(), trace() as back:
            again = reshard(b.detach(), given)
        for name, plan, counted in (
            (way, me >> other, there),
            (f"{text}: {other} >> {me}", other >> me, back),
        ):
            alike(
                f"{name}: bytes and messages, counted and foretold",
                (counted.bytes, counted.messages),
                (plan.bytes(shape, mesh, 8), plan.messages(shape, mesh)),
            )
        close(way, unshard(b).detach(), x, 1e-15)
        close(f"{way} and back", unshard(again), x, 1e-15)
        b.backward(shard(c, other))
        assert a.grad is not None, f"{way}: there is no gradient"
        close(f"{way}: the gradient", unshard(a.grad), c, 1e-15)


# ---------------------------------------------------------------- computing


def _check_computed(text: str, given: LayoutLike, me: Layout, shape: tuple[int, ...]) -> None:
    """Check a sum, a norm and a product, with their gradients; a refusal passes."""
    x = normal(*shape, seed=5).requires_grad_()
    a = shard(x.detach(), given).requires_grad_()
    total: Callable[[Tensor], Tensor] = (
        (lambda t: t.sum()) if me.partial else lambda t: (t * t).sum()
    )
    _agree(f"{text}: a sum", total, x, a)
    if not shape:
        return
    tries: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        ("a norm", _norm(shape[-1]), _norm(shape[-1]))
    ]
    if len(shape) > 1:
        w = normal(shape[-1], 3, seed=6)
        rows = Layout((me.dims[-1], Dim()))
        tries.append(("a product", lambda t: t @ w, lambda t: product(t, shard(w, rows))))
    for name, dense, mine in tries:
        try:
            mine(a)
        except ShardError:
            continue
        _agree(f"{text}: {name}", dense, x, a, mine)


def _norm(n: int) -> Callable[[Tensor], Tensor]:
    return lambda t: F.layer_norm(t, (n,))


def _agree(
    law: str,
    dense: Callable[[Tensor], Tensor],
    x: Tensor,
    a: Tensor,
    mine: Callable[[Tensor], Tensor] | None = None,
) -> None:
    want, got = dense(x), (mine or dense)(a)
    close(law, unshard(got).detach(), want.detach(), 1e-11)
    c = normal(*want.shape, seed=7)
    (expected,) = torch.autograd.grad((want * c).sum(), [x])
    lies = layout_of(got).bare
    (found,) = torch.autograd.grad([got], [a], [shard(c, lies)])
    close(f"{law}: the gradient", unshard(found), expected, 1e-11)


# ---------------------------------------------------------------- uneven sizes


def _check_uneven(
    text: str, given: LayoutLike, me: Layout, units: Sequence[int], shape: tuple[int, ...]
) -> None:
    """Check sizes one larger: refused with the dimension's number, and equal when padded."""
    for d, unit in enumerate(units):
        if unit == 1:
            continue
        uneven = tuple(n + (d == e) for e, n in enumerate(shape))
        law, x = f"{text}: as {list(uneven)}", normal(*uneven, seed=8).requires_grad_()
        try:
            shard(x, given)
        except UnevenSplit as e:
            assert f"dimension {d} of size {uneven[d]}" in str(e), f"{law}: refused with {e}"
        else:
            raise AssertionError(f"{law}: a size that does not divide is accepted")
        if declared(me.dims[d].order) is not None:
            continue
        a = shard(x, given, pad=True)
        alike(f"{law} and padded: its shape", tuple(a.shape), uneven)
        close(f"{law} and padded", unshard(a), x, 0.0)
        close(f"{law} and padded: a sum", unshard(a.sum()).detach(), x.sum().detach(), 1e-11)
        if not me.partial:
            held = shard(x.detach(), given, pad=True).requires_grad_()
            (gradient,) = torch.autograd.grad([unshard((held * held).sum())], [held])
            close(f"{law} and padded: the gradient", unshard(gradient), 2 * x.detach(), 1e-11)
