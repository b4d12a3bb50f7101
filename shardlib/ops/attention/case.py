"""AttentionCase: positions, mask, sizes and axes, the input of the engines' plans; no tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from shardlib.errors import NoImplementation
from shardlib.layouts import Layout
from shardlib.layouts.dims import ring_runs
from shardlib.layouts.orders import Run
from shardlib.mesh import Link
from shardlib.ops.attention.kernels import acc_dtype
from shardlib.ops.attention.masks import Full, Mask
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["AttentionCase", "Runs", "Sizes", "case_of_values", "case_on_paper", "length"]

Runs = tuple[tuple[Run, ...], ...]
"""For each rank of the ring, the global positions of its rows."""

_RATE = {"cpu": 3e10, "meta": 3e10}  # assumed flops per second, to price compute
_ACCELERATED = 3e14  # about the bf16 peak of an A100, 312 Tflop/s


class Sizes(NamedTuple):
    """Sizes of one rank's block: q [b, h, lq, d], k [b, g, lk, d], v [b, g, lk, e].

    ``itemsize``, ``acc_itemsize``  bytes per element, and per element of a sum over blocks.
    """

    b: int
    h: int
    g: int
    lq: int
    lk: int
    d: int
    e: int
    itemsize: int
    acc_itemsize: int


@dataclass(frozen=True)
class AttentionCase:
    """Description of one attention without its tensors: positions, mask, sizes, axes.

    ``q_runs``, ``k_runs``  per rank of the ring, the positions of its rows of queries and of keys.
    ``sizes``   of a rank's block.
    ``rows``    of a rank's block of keys that would have to be sent: 0 where every rank holds all
                keys.
    ``axes``    the mesh axes of the ring, major first; ``mesh`` all axes and their sizes.
    ``biased``  whether a bias tensor is given, whose rows are split like the queries.
    ``types``   of q, k and v, for messages.
    ``rate``    flops per second; ``links`` of mesh axes whose speed is known.

    >>> import torch, shardlib as sl
    >>> with sl.record(s=2):
    ...     q = sl.shard(torch.empty(1, 4, 8, 16, device="meta"), sl.Ring("s", 2, "zigzag"))
    ...     case = sl.planning.attention_plan(q, q, q, sl.masks.Causal()).case
    >>> case.axes, case.sizes.lq, [list(run.positions) for run in case.q_runs[0]]
    (('s',), 4, [[0, 1], [6, 7]])
    """

    q_runs: Runs
    k_runs: Runs
    mask: Mask
    sizes: Sizes
    rows: int
    axes: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...]
    types: tuple[str, str, str] = ("q", "k", "v")
    biased: bool = False
    rate: float = _RATE["cpu"]
    links: tuple[tuple[str, Link], ...] = ()

    @property
    def p(self) -> int:
        """Count the ranks of the ring."""
        return len(self.q_runs)

    def unsplit(self) -> str:
        """Return why no keys need to be moved; "" if they do, or if there is one rank."""
        return "" if self.rows or self.p == 1 else "the keys are whole already"

    def operands(self) -> dict[str, str]:
        names = dict(zip(("q", "k", "v"), self.types, strict=True))
        return {**names, "mask": repr(self.mask)[:200]}

    def fix(self) -> tuple[str, type[NoImplementation]]:
        return 'sl.ring_attention(q, k, v, algorithm="ring")', NoImplementation


def case_of_values(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, mask: Mask, biased: bool = False
) -> AttentionCase:
    """Describe checked operands as a case."""
    mesh = q.mesh
    token, key_token = (t.sharding.resolve(4).dims[2] for t in (q, k))
    p = mesh.axis_size(token.axes) if token.axes else 1
    shape, key_shape = q.shape, k.shape  # without padding
    mask.check(shape[0], shape[1], shape[2], key_shape[2])
    b, h, lq, d = Layout(q.sharding.resolve(4).dims).local_shape(tuple(q.padded_shape), mesh)
    _, g, lk, _ = Layout(k.sharding.resolve(4).dims).local_shape(tuple(k.padded_shape), mesh)
    item, acc_item = q.raw.element_size(), acc_dtype(q.raw.dtype).itemsize
    return AttentionCase(
        q_runs=tuple(ring_runs(token, shape[2], mesh.axes, r) for r in range(p)),
        k_runs=tuple(
            ring_runs(key_token, key_shape[2], mesh.axes, r if key_token.axes else 0)
            for r in range(p)
        ),
        mask=mask,
        sizes=Sizes(b, h, g, lq, lk, d, v.padded_shape[3], item, acc_item),
        rows=lk if key_token.axes else 0,
        axes=token.axes,
        mesh=tuple(mesh.axes.items()),
        types=(typeof(q), typeof(k), typeof(v)),
        biased=biased,
        rate=_RATE.get(q.raw.device.type, _ACCELERATED),
        links=tuple(mesh.links.items()),
    )


def case_on_paper(
    q_runs: Runs,
    k_runs: Runs,
    mask: Mask | None = None,
    sizes: Sizes | None = None,
    axis: str = "s",
) -> AttentionCase:
    """Describe an attention over one axis by its positions alone, for a ring of any size.

    >>> from shardlib.layouts.orders import dealt
    >>> zigzag = dealt("zigzag", 64, 4)
    >>> case_on_paper(zigzag, zigzag).sizes.lk
    16
    """
    lq, lk = (max(map(length, runs), default=0) for runs in (q_runs, k_runs))
    sizes = Sizes(1, 1, 1, lq, lk, 64, 64, 4, 4) if sizes is None else sizes
    return AttentionCase(q_runs, k_runs, mask or Full(), sizes, lk, (axis,), ((axis, len(q_runs)),))


def length(runs: tuple[Run, ...]) -> int:
    """Count the positions of some runs."""
    return sum(run.length for run in runs)
