"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

For each matrix G [m, n], running means of G G^T and G^T G are kept; Adam's second moment and step
are computed in the basis of their eigenvectors.  One rank, the matrix's owner, holds its
statistics, bases and moments: gradients are sent to it and directions back, and matrices are dealt
to owners by flops.  Eigenvectors, which rounding may turn, are computed by the owner alone.  On
every layout, and for every cut of ``zero``, the step equals that of a single device; if statistics
lack rank, the basis is completed by vectors that do not depend on rounding.

Source: Vyas et al., arXiv 2409.11321, algorithm 3; Gupta et al., arXiv 1802.09568 (Shampoo).
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from shardlib.errors import Unsupported
from shardlib.kernels.adamw import AdamStep
from shardlib.optim.groups import Mask, of_matrices
from shardlib.optim.matrix_owners import (
    Kind,
    Laid,
    Owned,
    Patterns,
    Spread,
    deal,
    laid,
    listed,
    only_matrices,
    through_owners,
)
from shardlib.optim.transform import Schedule, Transform, by_directions, ranged
from shardlib.optim.trees import Tree, moments, pieces, spans


class SoapState(NamedTuple):
    """Steps taken, and the owner's state of each matrix.

    It has Adam's first moment, its second moment in the eigenbasis, the running means of G G^T and
    G^T G, and their eigenvectors.
    """

    count: int
    mu: Owned
    nu: Owned
    left: Owned
    right: Owned
    left_basis: Owned
    right_basis: Owned


@ranged()
def soap(
    lr: float | Schedule,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    every: int = 10,
    most: float = 10000,
    rest: Transform | None = None,
    matrices: Mask = None,
    kernels: Patterns | None = None,
) -> Transform:
    """Update by Adam in the eigenbasis of running means of G G^T and G^T G, on any layout.

    The first step computes a basis and updates nothing.
    ``every``     steps between two renewals of the bases, each one step of the power method and QR.
    ``most``      a side of more rows or columns keeps no statistics: its basis is the identity.
    ``rest``      the transform of all parameters that ``matrices`` does not select.
    ``matrices``  globs of paths, a tree of bools, or a function of the tree; see
                  ``recipes.matrices(model)``.  Leaves of three dimensions are stacks of matrices.
    ``kernels``   leaves that are one matrix [out, in x window], as in ``muon``.
    Holds:  2 m n + 2 m m + 2 n n numbers per matrix, on its owner alone.
    Moves:  each matrix to its owner and back, as Muon's "owners".
    Raises: Unsupported for a leaf that is not a matrix.

    >>> tx, params = soap(0.1, weight_decay=0.0), {"w": torch.zeros(2, 2)}
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     updates, state = tx.update({"w": torch.diag(torch.tensor([3.0, -2.0]))}, state, params)
    >>> updates["w"].diagonal().round(decimals=2)
    tensor([-0.1000,  0.1000])
    """

    def init(params: Tree) -> SoapState:
        only_matrices(params, "soap", kernels)
        items = _live(moments(params, "mu")["mu"], kernels)
        axes = {} if items[0].mesh is None else items[0].mesh.axes
        plan = deal(tuple(x.spread for x in items), tuple(axes.items()), _work)
        dtype = reduce(torch.promote_types, (x.runs[0].dtype for x in items))
        kinds: tuple[Kind, ...] = ("mn", "mn", "mm", "nn", "mm", "nn")
        return SoapState(0, *(Owned.zeros(items, plan, k, dtype, most) for k in kinds))

    def direct(
        grads: Tree, state: SoapState, params: Tree, way: Tree, rate: float
    ) -> tuple[SoapState, float]:
        for g, w in spans(*pieces(grads, way)):
            w.copy_(g)
        count = state.count
        hyper = AdamStep(rate, b1, b2, eps, weight_decay, count)
        _directed(_live(way, kernels), state, hyper, every)
        size = decay = 0.0  # in the first step
        if count:
            size = -rate * (1 - b2**count) ** 0.5 / (1 - b1**count)
            decay = -rate * weight_decay
        for (w,) in spans(*pieces(way)):
            w.mul_(size)
        return state._replace(count=count + 1), decay

    core = by_directions("soap", "matrix", init, lr, direct)
    return of_matrices(core, rest, matrices, "soap", 0.003)


def _directed(items: list[Laid], state: SoapState, hyper: AdamStep, every: int) -> None:
    """Replace gradients by directions, and update the owners' state with them, in place."""
    state.mu.check(items, "soap")
    kept = [[x.views(i) for x in state[1:]] for i in range(len(items[0].runs))]

    def compute(i: int, units: Sequence[int], batch: Tensor, side: tuple[int, int]) -> None:
        for unit, g in zip(units, batch.unbind(), strict=True):
            _step(g, [x[unit] for x in kept[i]], hyper, every)

    through_owners(items, state.mu.held.plan, compute, state.mu.vector.dtype)


def _live(tree: Tree, kernels: Patterns | None) -> list[Laid]:
    """List the matrices that have elements; they must share one mesh."""
    items = laid(tree, None, listed(kernels))
    if not items:
        raise Unsupported("there is no matrix", op="soap", fix="tx = sl.optim.adamw(3e-4)")
    if any(x.mesh is not items[0].mesh for x in items):
        raise Unsupported(
            "matrices of several meshes, or of one and of none, are kept in one state",
            op="soap",
            fix="params = sl.shard(params, '...')",
        )
    return items


def _work(s: Spread) -> int:
    """Count flops of a step: eight products of its size, and m^3 + n^3 for the bases."""
    m, n = s.shape[-2:]
    return 8 * m * n * (m + n) + m**3 + n**3


def _step(g: Tensor, own: Sequence[Tensor], h: AdamStep, every: int) -> None:
    """Step one matrix in place: ``g`` is overwritten with its direction.

    ``own``  its state, in the order of SoapState; empty for sides without statistics.
    """
    mu, nu, left, right, left_basis, right_basis = own
    sides = [(left, left_basis, 0), (right, right_basis, 1)]
    seen = g.clone()
    if h.count:
        mu.lerp_(g.to(mu.dtype), 1 - h.b1)
        turned = _turned(seen, left_basis, right_basis)
        nu.mul_(h.b2).addcmul_(turned, turned, value=1 - h.b2)
        way = _turned(mu, left_basis, right_basis) / nu.sqrt().add_(h.eps)
        g.copy_(_turned(way, left_basis.mT, right_basis.mT))
    else:
        g.zero_()
    for stats, basis, dim in sides:
        if not stats.numel():
            continue
        pairs = seen @ seen.mT if dim == 0 else seen.mT @ seen
        stats.lerp_(pairs.to(stats.dtype), 1 - h.b2)
        if not h.count:
            # eigh sorts ascending, bases are kept descending
            values, found = torch.linalg.eigh(stats)
            values, found = values.flip(0), found.flip(1)
            rank = int((values > _floor(values)).sum())
            basis.copy_(found if rank == len(values) else _completed(found, rank))
        # one power iteration and QR; nu follows its columns into the new order
        elif h.count % every == 0:
            values = (basis.mT @ stats @ basis).diagonal()
            some = values > _floor(values)
            order = values.where(some, 0).argsort(descending=True, stable=True)
            nu.copy_(nu.index_select(dim, order))
            basis.copy_(_completed(stats @ basis[:, order], int(some.sum())))


def _floor(values: Tensor) -> Tensor:
    """Return the size below which eigenvalues are rounding errors, and their vectors random."""
    return 2 * len(values) ** 0.5 * torch.finfo(values.dtype).eps * values.max()


def _completed(vectors: Tensor, rank: int) -> Tensor:
    """Make the first ``rank`` columns orthonormal, and complete them to a basis.

    For a matrix that lacks rank, the other columns of eigh and QR are made of rounding errors, so
    gradients that differ in their last bit (clipped by a norm that was summed in another order)
    would be updated differently.  Columns drawn from a fixed seed do not depend on rounding.
    """
    n = len(vectors)
    if not rank:
        return torch.eye(n, device="cpu").to(vectors)
    if rank < n:
        drawn = torch.randn(
            n, n - rank, generator=torch.Generator().manual_seed(n), device="cpu"
        ).to(vectors)
        vectors = torch.cat([vectors[:, :rank] / vectors[:, :rank].norm(dim=0), drawn], 1)
    return torch.linalg.qr(vectors)[0]


def _turned(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute left^T x right; sides without a basis are skipped."""
    x = left.mT @ x if left.numel() else x
    return x @ right if right.numel() else x
