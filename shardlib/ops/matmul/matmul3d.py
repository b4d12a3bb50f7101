"""Three-axis product: gather X over n, gather W over m, multiply, scatter the sum of Y over k.

The mesh axes have three roles, m, k and n, of any sizes pm pk pn = P.  Y [M, N] = X [M, K] W [K,
N]:

    X   [M/(m n), K/k]  ->  gather over n  ->  [M/m, K/k]
    W   [K/(k m), N/n]  ->  gather over m  ->  [K/k, N/n]
    Y   [M/m, N/n] pending over k  ->  psum_scatter  ->  [M/(m k), N/n]

Forward, a rank receives [(pn-1) MK + (pm-1) KN + (pk-1) MN] / P words, which is the lower bound
on the matching grid (Al Daas et al., SPAA 2022).  Backward uses the same movements: dY is
gathered over k once, dX scattered over n while dW is multiplied (or, where W's side moves more,
dW over m while dX is), and X and W gathered again unless the gathered ones were saved; prefetch.py
starts W's gather one product early.  Special cases are Megatron's column with sequence parallelism
(P = pn) and row (P = pk), FSDP (P = pm), 2D (one axis of size 1), 2.5D and the cube; SUMMA, Cannon
and the rings are schedules that move the same words.

A layout may split either dimension of a block for a gather: X over n in its rows or in K (as 2D
blocks do), W over m in K or in N, Y over k in its rows or columns.  The gathered axes are the
minor ones of their dimension.

Source: Agarwal et al. 1995; arXiv 2105.14450, which saves the gathered operands (``mm3_xw``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from shardlib.collectives import Pending, all_gather, psum_scatter
from shardlib.cost import Cost, moving, summing
from shardlib.errors import Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.mesh import current_mesh
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import (
    NOWHERE,
    Axes,
    DimMove,
    Gradients,
    Product,
    partial_product,
    post,
    rounded,
    summed_product,
)
from shardlib.ops.matmul.prefetch import ALONE, Gather, next_gather
from shardlib.ops.matmul.shared_gather import ReadsShared, gathered
from shardlib.ops.registry import DoesNotFit, Match, algorithm
from shardlib.tensor import ShardedTensor


@dataclass(frozen=True)
class Cube:
    """Movements of each matrix in a three-axis product.

    ``save``     the gathered operands that backward keeps, of "x" and "w".
    ``summed``   further axes over which Y is summed, on every rank.
    ``w_first``  backward multiplies dW before dX: W's side moves more, and the second product hides
                 it.
    """

    x: tuple[DimMove, ...]
    w: tuple[DimMove, ...]
    y: tuple[DimMove, ...]
    save: str = ""
    summed: tuple[str, ...] = ()
    w_first: bool = False


def product(
    x: Tensor, w: Tensor, cube: Cube, gather: Gather = ALONE, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute Y (plus a bias); return it and the gathered X and W.

    x [M/(m n), K/k], w [K/(k m), N/n] -> [M/(m k), N/n].

    ``gather``  that of W, which may be under way; the next one runs during the product.
    """
    coming = gather.take() or post(all_gather, w, cube.w)
    x = post(all_gather, x, cube.x).wait()  # [M/m, K/k]
    w = coming.wait()  # [K/k, N/n]
    gather.start_next()
    return _scatter(x, w, cube.y, cube.summed, bias).wait(), x, w


def gradients(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    cube: Cube,
    need: tuple[bool, bool],
    over: tuple[Axes, Axes] = NOWHERE,
    gather: Gather = ALONE,
    wide: bool = False,
) -> Gradients:
    """Compute dX and dW: the first one's scatter runs during the second's product.

    The gather that the second needs runs during the first's product.

    ``over``    further axes over which each of them is summed.
    ``gather``  that of W, which may be under way; the one before runs during the second product.
    ``wide``    dX is left in fp32, for the sum of several.
    """
    needed = need[0] and "w" not in cube.save
    coming_w = gather.take() or post(all_gather, w, cube.w if needed else ())
    dy = post(all_gather, dy, cube.y).wait()  # [M/m, N/n]
    coming_x = post(all_gather, x, () if "x" in cube.save or not need[1] else cube.x)

    def of_x() -> Pending:  # [M/m, K/k] -> [M/(m n), K/k]
        if wide:
            out = partial_product(dy, coming_w.wait().mT)
            return Pending(lambda: out)
        return _scatter(dy, coming_w.wait().mT, cube.x, over[0])

    def of_w() -> Pending:  # [K/k, N/n] -> [K/(k m), N/n]
        return _scatter(coming_x.wait().flatten(0, -2).mT, dy.flatten(0, -2), cube.w, over[1])

    both = [(1, of_w), (0, of_x)] if cube.w_first else [(0, of_x), (1, of_w)]
    sums: dict[int, Pending] = {}
    for turn, (which, of) in enumerate(both):
        if turn == 1 and need[0]:
            # the product before needs its W for its dX, as this one did
            gather.start_previous()
        if need[which]:
            sums[which] = of()
    found = {which: coming.wait() for which, coming in sums.items()}
    return found.get(0), found.get(1)


def _scatter(
    a: Tensor, b: Tensor, moves: tuple[DimMove, ...], over: Axes, bias: Tensor | None = None
) -> Pending:
    """Compute a @ b, scattered and summed over further axes.

    In half precision a part is rounded before the sum only if it is sent.
    """
    if not moves:
        out = summed_product(a, b, over, bias)
        return Pending(lambda: out)
    coming = post(psum_scatter, partial_product(a, b), moves, wire=a.dtype)
    return Pending(lambda: rounded(coming.wait(), a.dtype, over, True, bias))


@dataclass(frozen=True)
class Matmul3D(ReadsShared):
    """Schedule of one three-axis product.

    ``gather``  gather of W, which may have been started early, and its neighbours: prefetch.py.
    """

    cube: Cube
    gather: Gather = ALONE

    @property
    def summed(self) -> Axes:
        """The axes over which Y is summed without a scatter."""
        return self.cube.summed

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute Y, and return backward's X and W: their blocks, or the gathered ones."""
        y, wide_x, wide_w = product(x, w, self.cube, self.gather, bias)
        x, w = self.blocks(x, w)
        save = self.cube.save
        return y, wide_x if "x" in save else x, wide_w if "w" in save else w

    @property
    def saves_blocks(self) -> bool:
        return not self.cube.save

    def gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool], over: tuple[Axes, Axes]
    ) -> Gradients:
        """Compute dX and dW by the same movements; the previous gather is started meanwhile."""
        x = self.whole(x, need[1])
        if torch.is_grad_enabled():
            if self.cube.save:
                raise Unsupported(
                    "a product that saved its gathered operands has no second derivative",
                    op="matmul",
                    mesh=current_mesh(),
                    fix="sl.algorithm(matmul='mm3')",
                )
            return gradients(dy, x, w, self.cube, need)
        wide = self.wide is not None
        dx, dw = gradients(dy, x, w, self.cube, need, over, self.gather, wide)
        return self.left(dx), dw


# ---------------------------------------------------------------- which layouts it fits


def _parted(dim: Dim, moving: set[str]) -> tuple[Dim, tuple[str, ...]]:
    """Split a dimension into the part without its gathered axes, and those axes."""
    kept = tuple(p for p in dim.parts if p not in moving)
    gone = tuple(str(p) for p in dim.parts if p in moving)
    return (Dim(kept), gone) if gone else (dim, ())


def _check_gathered(name: str, dim: Dim, moving: set[str]) -> None:
    """Raise DoesNotFit if these axes of an operand's dimension cannot be gathered."""
    kept, gone = _parted(dim, moving)
    if gone and (dim.order != "contiguous" or dim.parts != (*kept.parts, *gone)):
        raise DoesNotFit(f"{name} {dim}: the gathered axes must be the minor ones")
    if gone and any(isinstance(p, int) for p in kept.parts):
        raise DoesNotFit(f"{name} {dim}: axes inside a group cannot be gathered")


def _check_split(axes: set[str], why: str) -> None:
    if axes:
        raise DoesNotFit(why.format(", ".join(sorted(axes))))


def _roles(case: MatmulCase) -> tuple[set[str], set[str], list[str]]:
    """Return the axes over which X is gathered, W is gathered, and Y is summed."""
    rows = {a for d in case.x.dims[:-1] for a in d.axes}
    k_of_x, k_of_w, columns = (
        set(d.axes) for d in (case.x.dims[-1], case.w.dims[0], case.w.dims[1])
    )
    if case.out is not None:
        down, across = (
            {a for d in dims for a in d.axes} for dims in (case.out.dims[:-1], case.out.dims[-1:])
        )
    else:
        down, across = rows - columns, columns
    both = rows & columns
    _check_split(k_of_x - k_of_w - columns, "{} splits x's contraction and not w")
    _check_split(k_of_w - k_of_x - rows, "{} splits w's contraction and not x")
    _check_split(both - down - across, "the result is not split over {}")
    gather_x = (k_of_x & columns) | (both & across)
    gather_w = (k_of_w & rows) | (both & down)
    return gather_x, gather_w, [a for a in case.x.dims[-1].axes if a in k_of_w]


class Movements(NamedTuple):
    """Movements, Y's layout, also while its sum is pending, and axes summed without a scatter."""

    cube: Cube
    out: Layout
    unsummed: Layout
    summed: tuple[str, ...]


def movements(case: MatmulCase) -> Movements:
    """Find the movements for the layouts of X, W and Y.  Raises: DoesNotFit."""
    found = _found_or_refused(case)
    if isinstance(found, str):
        raise DoesNotFit(found)
    return found


# several algorithms ask for those of one case
@lru_cache(maxsize=64)
def _found_or_refused(case: MatmulCase) -> Movements | str:
    try:
        return _found(case)
    except DoesNotFit as e:
        return str(e)


def _found(case: MatmulCase) -> Movements:
    if len(case.w_shape) != 2:
        raise DoesNotFit("w has batch dimensions")
    gather_x, gather_w, summed = _roles(case)
    sides = [("x", d, gather_x) for d in case.x.dims] + [("w", d, gather_w) for d in case.w.dims]
    for side in sides:
        _check_gathered(*side)
    parts = [_parted(dim, gone) for _, dim, gone in sides]
    kept = [dim for dim, _ in parts]
    x_moves, w_moves = (
        tuple(DimMove(axes, dim) for dim, (_, axes) in enumerate(group) if axes)
        for group in (parts[:-2], parts[-2:])
    )
    x_k, w_k = kept[len(case.x.dims) - 1], kept[-2]
    if x_k != w_k or (x_k.is_split and x_k.order != "contiguous"):
        raise DoesNotFit(f"contraction split {x_k} in x and {w_k} in w once they are gathered")
    # Y's layout before the sum over k
    whole = (*kept[: len(case.x.dims) - 1], kept[-1])
    shape = (*case.x_shape[:-1], case.w_shape[-1])
    out, y_moves, psummed = _scattered(case, whole, summed, shape)
    return Movements(Cube(x_moves, w_moves, y_moves), out, Layout(dims=whole), psummed)


def _scattered(
    case: MatmulCase, whole: tuple[Dim, ...], summed: list[str], shape: tuple[int, ...]
) -> tuple[Layout, tuple[DimMove, ...], tuple[str, ...]]:
    """Return Y's layout, the scatters that produce it, and the axes summed without one."""
    wanted = case.out or _rows_scattered(case, whole, summed, shape)
    moves = []
    for d, (now, then) in enumerate(zip(whole, wanted.dims, strict=True)):
        kept, more = then.parts[: len(now.parts)], then.parts[len(now.parts) :]
        if kept != now.parts or then.order != now.order or not set(more) <= set(summed):
            over = " ".join(summed) or "nothing"
            raise DoesNotFit(f"gives {Layout(dims=whole)} summed over {over}, not {wanted}")
        if more and any(isinstance(p, int) for p in now.parts):
            raise DoesNotFit(f"y {then}: a sum cannot be scattered inside a group")
        if not _divides(then, [], shape[d], case.axes):
            raise DoesNotFit(f"dimension {d} of the result, {shape[d]}, does not divide as {then}")
        if more:
            moves.append(DimMove(tuple(map(str, more)), d))
    scattered = {a for move in moves for a in move.axes}
    return wanted, tuple(moves), tuple(a for a in summed if a not in scattered)


def _rows_scattered(
    case: MatmulCase, whole: tuple[Dim, ...], summed: list[str], shape: tuple[int, ...]
) -> Layout:
    """Return Y's layout with the first rows that divide split over ``summed`` as well."""
    if not summed:
        return Layout(dims=whole)
    for d, dim in enumerate(whole[:-1]):
        if dim.order == "contiguous" and _divides(dim, summed, shape[d], case.axes):
            return Layout(dims=(*whole[:d], Dim((*dim.parts, *summed)), *whole[d + 1 :]))
    raise DoesNotFit(f"no rows of {list(shape[:-1])} divide over {' '.join(summed)} as well")


def _divides(dim: Dim, more: list[str], n: int, mesh: dict[str, int]) -> bool:
    parts = math.prod(p if isinstance(p, int) else mesh[p] for p in dim.parts)
    return n % (parts * math.prod(mesh[a] for a in more)) == 0


def _match(case: MatmulCase, save: str) -> Match:
    found = movements(case)
    cube, out, _, psummed = found
    held, again = shared_gather(case, found)
    blocks = case.x_bytes, case.w_bytes, case.bytes_of(out, case.y_shape)
    moved = cube.x, cube.w, cube.y
    priced = [price_of_gather(n, moves, case.axes) for n, moves in zip(blocks, moved, strict=True)]
    more_x, more_w, more_y = (n - block for (_, n), block in zip(priced, blocks, strict=True))
    cube = replace(
        cube,
        save=save,
        summed=tuple(a for a in case.axes if a in psummed),
        w_first=more_w * (1 + ("w" not in save)) > more_x * (1 + ("x" not in save)),
    )
    temporary = more_w + more_y
    if not held:
        temporary += more_x
    forward, backward = price(case, found, [cost for cost, _ in priced], temporary, save)
    shared = bool(cube.x) and (held or bool(case.more) or (case.more is None and "x" in save))
    keeps_x = "x" in save and (not held or again)
    return Match(
        out,
        Matmul3D(cube),
        forward,
        backward,
        _moved(cube),
        gathers=True,
        gathered=temporary,
        # kept for other products as well
        shared=more_x if case.more and not held else 0,
        saved=more_x * keeps_x + more_w * ("w" in save),
        call=partial(_call, cube, shared),
    )


def shared_gather(case: MatmulCase, found: Movements) -> tuple[bool, bool]:
    """Return whether X was gathered for another product, and is again in backward for all."""
    moves, over = found.cube.x, case.over(found.out)[0]
    held = bool(moves) and ("gather", moves, over) in case.held
    return held, held and ("again", moves, over) in case.held


def price(
    case: MatmulCase,
    found: Movements,
    moved: Sequence[Cost],
    memory: int,
    save: str = "",
    shares: bool = True,
) -> tuple[Cost, Cost]:
    """Price forward and backward of an algorithm that moves what these movements do.

    ``moved``   the cost of gathering X, of gathering W and of scattering Y, however it is done.
    ``memory``  bytes of temporaries.
    ``shares``  whether it reads an X that was gathered for another product, whose gradient is
                scattered with that one's too.
    """
    cube, mesh, over = found.cube, case.axes, case.over(found.out)
    x, w, y = moved
    part = case.bytes_of(found.unsummed, case.y_shape)
    part //= math.prod(mesh[a] for move in cube.y for a in move.axes)
    sum_y, sum_x, sum_w = (
        summing(block, axes, mesh, case.width if moves else 1)
        for block, axes, moves in (
            (part, found.summed, cube.y),
            (case.x_bytes, over[0], cube.x),
            (case.w_bytes, over[1], cube.w),
        )
    )
    held, again = shared_gather(case, found) if shares else (False, False)
    once = Cost(memory=memory) if held else Cost(memory=memory) + x
    forward, backward = once + w + y + sum_y, y + once + w
    if not held:
        backward += sum_x
    backward += sum_w
    if not (again or "x" in save):
        backward += x
    if "w" not in save:
        backward += w
    return forward, backward


def _moved(cube: Cube) -> str:
    sides = (("X gathered", cube.x), ("W gathered", cube.w), ("Y scattered", cube.y))
    return ", ".join(
        f"{what} over {' '.join(a for m in moves for a in m.axes)}"
        for what, moves in sides
        if moves
    )


def _call(
    cube: Cube,
    shared: bool,
    x: ShardedTensor,
    w: ShardedTensor,
    over: tuple[Axes, Axes],
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply; W's gather may be under way already, and X gathered for several products."""
    again = (
        torch.is_grad_enabled() and x.raw.requires_grad and bool(cube.w) and "w" not in cube.save
    )
    gather = next_gather(w.raw, cube.w, x.mesh, again)
    if not shared:
        return Product.apply(Matmul3D(cube, gather), x.mesh, over, x.raw, w.raw, bias)  # type: ignore[return-value]
    whole, fields = gathered(x, cube.x, over[0], again="x" not in cube.save)
    rest = replace(cube, x=(), save=cube.save.replace("x", ""))
    schedule = Matmul3D(rest, gather, **fields)
    return Product.apply(schedule, x.mesh, ((), over[1]), whole, w.raw, bias)  # type: ignore[return-value]


N = TypeVar("N", int, Fraction)


def price_of_gather(nbytes: N, moves: tuple[DimMove, ...], mesh: dict[str, int]) -> tuple[Cost, N]:
    """Price gathering a block (or scattering back to it); return also its gathered bytes."""
    cost = Cost()
    for move in moves:
        p = math.prod(mesh[a] for a in move.axes)
        cost += moving(move.axes, (p - 1) * nbytes, p - 1)
        nbytes *= p
    return cost, nbytes


# which gathered operands backward keeps, by name; without one, it gathers them again
for _order, (_name, _save) in enumerate(
    {"mm3": "", "mm3_x": "x", "mm3_w": "w", "mm3_xw": "xw"}.items(), 6
):
    algorithm("matmul", _name, _order)(partial(_match, save=_save))
