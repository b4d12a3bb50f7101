"""Adafactor: the second moment of a matrix from the means of its rows and columns.

A matrix of m n elements has m + n numbers of state, which every rank holds; each rank adds up the
rows and columns of its part of the gradient, and one psum for all matrices completes the sums, for
any layout and any cut into runs.

Source: Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import played
from shardlib.dtypes import wider
from shardlib.mesh import Mesh
from shardlib.optim.matrix_owners import Laid, Spread, laid
from shardlib.optim.norms import firsts, norms, over_ranks, scale_in_place
from shardlib.optim.transform import Range, Schedule, Transform, by_directions, keep, ranged
from shardlib.optim.trees import (
    SPAN,
    Tree,
    by_tensor,
    cleared,
    merged,
    moments,
    named,
    of_others,
    only,
    pieces,
    ready,
    spans,
    trainable,
)


class FactoredState(NamedTuple):
    """The state of Adafactor.

    ``count``  steps taken.
    ``rows``   path of a matrix -> running means of squared gradients by row, [stack, m].
    ``cols``   the same by column, [stack, n].
    ``full``   the full second moments of all other leaves.
    """

    count: int
    rows: dict[str, Tensor]
    cols: dict[str, Tensor]
    full: Tree


@ranged(
    decay=Range("0 or less, and finite", lambda n: -math.inf < n <= 0),
    clip=Range("1 or more", lambda n: n >= 1),
)
def adafactor(
    lr: float | Schedule = 1e-2,
    decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    clip: float = 1.0,
    weight_decay: float = 0.0,
) -> Transform:
    """Update as torch.optim.Adafactor: Adam's second moment in m + n numbers for a matrix of m n.

    ``decay``  the weight of a new gradient in the running means is ``step**decay``.
    ``eps1``   the least root mean square that a gradient is divided by; None: the dtype's epsilon.
    ``eps2``   the least root mean square of a tensor, to which its steps are proportional.
    ``clip``   the most that an update's root mean square may be; torch calls it d.
    Leaves of more than two dimensions are stacks of matrices; those of fewer have a full moment.
    Moves: one psum of 8 (m + n) bytes per matrix, one of two scalars per tensor.

    >>> import torch
    >>> tx = adafactor(0.1)
    >>> params = {"w": torch.ones(2, 2)}
    >>> tx.update({"w": torch.ones(2, 2)}, tx.init(params), params)[0]
    {'w': tensor([[-0.1000, -0.1000],
            [-0.1000, -0.1000]])}
    """

    def init(params: Tree) -> FactoredState:
        live = trainable(params)
        rows, cols = {}, {}
        for (path, x), view in zip(named(live, once=True).items(), by_tensor(live), strict=True):
            if view is not None and _is_matrix(x):
                *lead, m, n = x.shape
                how: Any = {"dtype": wider(view.like.dtype), "device": view.like.device}
                rows[path] = torch.zeros(math.prod(lead), m, **how)
                cols[path] = torch.zeros(math.prod(lead), n, **how)
        return FactoredState(0, rows, cols, **moments(_others(params), "full"))

    def direct(
        grads: Tree, state: FactoredState, params: Tree, way: Tree, rate: float
    ) -> tuple[FactoredState, float]:
        count = state.count + 1
        share = float(count) ** decay
        flat = _others(grads)
        _check_state(grads, flat, state)
        for g, v, u in spans(*pieces(flat, state.full, _others(way))):
            v.lerp_((g * g).to(v.dtype), share)
            u.copy_(_unit(v, g, eps1))
        matrices = laid(cleared(_matrices(grads)))
        rows, cols = keep((state.rows, state.cols), _means(matrices, state, share))
        _directions(matrices, laid(_matrices(way)), rows, cols, eps1)
        scale_in_place(way, _lengths(params, way, min(rate, 1 / count**0.5), eps2, clip))
        return FactoredState(count, rows, cols, state.full), -rate * weight_decay

    def like(grads: Tree, state: FactoredState) -> Tree:
        return merged(grads, _parted(grads), {True: grads, False: state.full})

    def groups(params: Tree) -> list[str]:
        return ["matrix" if found else "vector" for found in _parted(params).values()]

    return by_directions("adafactor", "rows", init, lr, direct, like=like, groups=groups)


def _check_state(grads: Tree, flat: Tree, state: FactoredState) -> None:
    """Refuse a state that was made for other parameters.

    Raises: ShardError.
    """
    ready(flat, "adafactor", state.full)
    sizes = {path: x.shape for path, x in named(grads).items() if _is_matrix(x)}
    kept = {path: (rows.shape[1], state.cols[path].shape[1]) for path, rows in state.rows.items()}
    other = [path for path, size in sizes.items() if size[-2:] != kept.get(path)]
    if other:
        raise of_others(", ".join(sorted(other)[:4]), op="adafactor")


def _is_matrix(x: object) -> bool:
    return isinstance(x, Tensor) and x.ndim > 1


def _parted(tree: Tree) -> dict[str, bool]:
    return {path: _is_matrix(x) for path, x in named(tree).items()}


def _matrices(tree: Tree) -> Tree:
    return only(tree, _parted(tree), True)


def _others(tree: Tree) -> Tree:
    return only(trainable(tree), _parted(tree), False)


def _unit(variance: Tensor, g: Tensor, eps1: float | None) -> Tensor:
    """Divide a gradient by the root of its running mean square."""
    least = torch.finfo(g.dtype).eps if eps1 is None else eps1
    return variance.clamp(min=least * least).rsqrt_().mul_(g)


def _lengths(params: Tree, way: Tree, rho: float, eps2: float, clip: float) -> list[Tensor | None]:
    """Compute the factor of each tensor's direction."""
    out: list[Tensor | None] = []
    long, step = norms(params, way)
    for x, p, u in zip(named(way, once=True).values(), long, step, strict=True):
        if p is None or u is None:
            out.append(None)
            continue
        size = max(x.numel(), 1) ** 0.5
        # algorithm 5: length max(eps2, RMS(p)) rho, and the update clipped to an RMS of ``clip``
        out.append(-(p / size).clamp(min=eps2) * rho / (u / (size * clip)).clamp(min=1.0))
    return out


# ---------------------------------------------------------------- rows and columns


class _Slab(NamedTuple):
    """A run of a block as whole rows: the matrix and row number of each, and the columns.

    ``first``  elements of the first row that come before the run.
    """

    stack: Tensor
    rows: Tensor
    cols: Tensor
    first: int
    count: int


def _slab(spread: Spread, mesh: Mesh | None, i: int, device: torch.device) -> _Slab:
    """Compute the slab of the i-th rank in this process."""
    sizes = {} if mesh is None else mesh.axes
    coord = {} if mesh is None else played(mesh)[i]
    # padding along the stack is summed into an extra matrix
    numbers, rows, cols = spread.block(coord, sizes)
    width = max(len(cols), 1)
    lo, hi, _ = spread.run(coord, sizes).indices(len(numbers) * len(rows) * width)
    # the rows that the run touches, its cut first and last row included
    top, bottom = lo // width, -(-hi // width) if hi > lo else lo // width
    stack, row, col = (
        torch.tensor(places, dtype=torch.int64, device="cpu")
        for places in (numbers, list(rows), list(cols))
    )
    stack = stack.repeat_interleave(len(rows))[top:bottom]
    row = row.repeat(len(numbers))[top:bottom]
    return _Slab(stack.to(device), row.to(device), col.to(device), lo - top * width, bottom - top)


def _slabs(one: Laid) -> list[_Slab]:
    spread, mesh, device = one.spread, one.mesh, one.runs[0].device

    def make() -> list[_Slab]:
        return [_slab(spread, mesh, i, device) for i in range(len(one.runs))]

    return make() if mesh is None else mesh.memo("slabs", (spread, device), make)


def _bands(run: Tensor, slab: _Slab) -> Iterator[tuple[Tensor, _Slab, slice]]:
    """Cut the run into bands of about ``SPAN`` elements, as rows, with their places in the run.

    The first and the last row of the run have zeros where it lacks an end.
    """
    width = max(len(slab.cols), 1)
    by = max(SPAN // width, 1)
    for top in range(0, slab.count, by):
        n, first = min(by, slab.count - top), 0 if top else slab.first
        part = slice(max(top * width - slab.first, 0), (top + n) * width - slab.first)
        rows = run[part]
        if len(rows) != n * width:
            rows = F.pad(rows, (first, n * width - len(rows) - first))
        at = slice(top, top + n)
        yield rows.view(n, width), _Slab(slab.stack[at], slab.rows[at], slab.cols, first, n), part


def _means(
    matrices: list[Laid], state: FactoredState, share: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Update the running means with these gradients."""
    rows, cols = dict(state.rows), dict(state.cols)
    meshes: dict[Mesh | None, list[Laid]] = {}
    for one in matrices:
        meshes.setdefault(one.mesh, []).append(one)
    for mesh, group in meshes.items():
        ranks = range(len(group[0].runs))
        shares = [[x for one in group for x in _sums(one, i)] for i in ranks]
        total = over_ranks(list(map(torch.cat, shares)), mesh)
        sums = iter(total.split(list(map(len, shares[0]))))
        for one in group:
            stack, (m, n) = one.spread.count, one.spread.shape[-2:]
            row = next(sums).view(stack + 1, -1)[:stack, :m] / max(n, 1)
            col = next(sums).view(stack + 1, -1)[:stack, :n] / max(m, 1)
            rows[one.path] = rows[one.path].lerp(row.to(rows[one.path].dtype), share)
            cols[one.path] = cols[one.path].lerp(col.to(cols[one.path].dtype), share)
    return rows, cols


def _sums(one: Laid, i: int) -> tuple[Tensor, Tensor]:
    """Sum the squares of one rank's part by row and by column, in fp64; zeros if it is a copy.

    There is one matrix more, for padding, and rows and columns have their padding.
    """
    k, (m, n) = one.spread.count + 1, one.spread.tiled[-2:]
    how: Any = {"dtype": torch.float64, "device": one.runs[i].device}
    by_row, by_col = torch.zeros(k * m, **how), torch.zeros(k * n, **how)
    split = (*one.spread.layout.axes, *one.spread.cut)
    if not len(one.runs[i]) or not firsts(one.mesh, split)[i]:
        return by_row, by_col
    slab = _slabs(one)[i]
    held = torch.zeros(k, len(slab.cols), **how)
    for part, band, _ in _bands(one.runs[i], slab):
        squares = part.square()
        by_row.index_add_(0, band.stack * m + band.rows, squares.sum(1, dtype=torch.float64))
        held.index_add_(0, band.stack, squares.double())
    by_col.view(k, n).index_add_(1, slab.cols, held)
    return by_row, by_col


def _directions(
    matrices: list[Laid],
    into: list[Laid],
    rows: dict[str, Tensor],
    cols: dict[str, Tensor],
    eps1: float | None,
) -> None:
    """Divide gradients by the root of the factored second moment: row x column / mean."""
    for given, out in zip(matrices, into, strict=True):
        row, col = rows[given.path], cols[given.path]
        least = torch.finfo(given.runs[0].dtype).eps if eps1 is None else eps1
        mean = row.mean(1, keepdim=True).clamp(min=least)
        most = given.spread.count, *given.spread.shape[-2:]
        for i, (run, to) in enumerate(zip(given.runs, out.runs, strict=True)):
            for part, band, at in _bands(run, _slabs(given)[i]) if len(run) else ():
                k, r, c = (x.clamp(max=end - 1) for x, end in zip(band[:3], most, strict=True))
                # algorithm 4: V = R C / mean(R), of this band alone
                estimate = (row[k, r] / mean[k, 0])[:, None] * col[k][:, c]
                unit = estimate.clamp_(min=least * least).rsqrt_().to(run.dtype)
                to[at] = unit.mul_(part).view(-1)[band.first :][: len(to[at])]
