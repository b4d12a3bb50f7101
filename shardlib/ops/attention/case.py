"""What the attention plans need to know of q, k and v: positions, mask, sizes; no tensors."""

import math
from dataclasses import dataclass
from typing import Any

from shardlib.errors import ImplicitCommunication, NoRule, PlainTensor, RankMismatch, ShardError
from shardlib.layouts import Layout
from shardlib.layouts.dims import ring_runs
from shardlib.layouts.orders import Run
from shardlib.mesh import Link
from shardlib.ops.attention.kernels import wide
from shardlib.ops.attention.masks import Full, Mask
from shardlib.ops.attention.plan import Sizes
from shardlib.ops.registry import case_of
from shardlib.tensor import PaddedTensor, ShardedTensor, partial_escape, typeof

__all__ = ["AttentionCase", "attention_case", "check", "true_shape"]

_RATE = {"cpu": 3e10, "meta": 3e10, "cuda": 3e14}  # flops per second that compute is priced at


@dataclass(frozen=True)
class AttentionCase:
    """Per rank the positions of q and of k, the mask, one rank's sizes; what else is asked for."""

    q_runs: tuple[tuple[Run, ...], ...]
    k_runs: tuple[tuple[Run, ...], ...]
    rows: int
    mask: Mask
    sizes: Sizes
    axes: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...]
    types: tuple[str, str, str] = ("q", "k", "v")
    biased: bool = False
    rate: float = _RATE["cpu"]
    links: tuple[tuple[str, Link], ...] = ()

    def operands(self) -> dict[str, str]:
        return {**dict(zip(("q", "k", "v"), self.types, strict=True)), "mask": repr(self.mask)[:200]}

    def fix(self) -> tuple[str, type[NoRule]]:
        return 'sl.ring_attention(q, k, v, algorithm="ring")', NoRule


@case_of("attention")
def attention_case(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, mask: Mask | None = None, biased: bool = False
) -> AttentionCase:
    """What the plans need to know of three operands."""
    check(q, k, v)
    mesh = q.mesh
    qs, ks = q.sharding.resolve(4).dims[2], k.sharding.resolve(4).dims[2]
    axes = qs.axes
    p = mesh.axis_size(axes) if axes else 1
    q_runs = tuple(ring_runs(qs, true_shape(q)[2], mesh.axes, r) for r in range(p))
    k_runs = tuple(ring_runs(ks, true_shape(k)[2], mesh.axes, r if ks.axes else 0) for r in range(p))
    (b, h, lq, d), (_, g, lk, _) = (
        Layout(t.sharding.resolve(4).dims).local_shape(tuple(t.size_), mesh) for t in (q, k)
    )
    item = q.raw.element_size()
    sizes = Sizes(b, h, g, lq, lk, d, v.size_[3], item, wide(q.raw.dtype).itemsize)
    types = typeof(q), typeof(k), typeof(v)
    rows = lk if ks.axes else 0  # whole keys need not travel
    rate = _RATE.get(q.raw.device.type, _RATE["cuda"])
    links = tuple(mesh.links.items())
    return AttentionCase(
        q_runs, k_runs, rows, mask or Full(), sizes, axes, tuple(mesh.axes.items()), types, biased, rate, links
    )


def true_shape(x: ShardedTensor) -> tuple[int, ...]:
    """Without padding."""
    return tuple(x.true) if isinstance(x, PaddedTensor) else tuple(x.size_)


def check(q: Any, k: Any, v: Any) -> None:
    """Raise what is wrong with the operands."""
    operands = {n: typeof(t) for n, t in (("q", q), ("k", k), ("v", v))}
    mesh = q.mesh
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, ShardedTensor):
            raise PlainTensor(
                f"{name} is a plain tensor and q is sharded", op="ring_attention", operands=operands, mesh=mesh,
                fix=f"sl.shard({name}, {str(q.sharding)!r})",
            )  # fmt: skip
        if len(t.size_) != 4:
            raise RankMismatch(
                f"{name} has {len(t.size_)} dimensions; attention takes [batch, heads, sequence, size]",
                op="ring_attention", operands=operands, mesh=mesh,
                fix=f"{name}[(None,) * {max(0, 4 - len(t.size_))}]",
            )  # fmt: skip
        if t.sharding.partial:
            raise partial_escape("ring_attention", t)
    if not q.raw.dtype == k.raw.dtype == v.raw.dtype:
        raise ShardError(
            "q, k and v have different dtypes", op="ring_attention", operands=operands, mesh=mesh,
            fix="sl.ring_attention(q, k.to(q.dtype), v.to(q.dtype))",
        )  # fmt: skip
    (qb, qh, qs, qd), (kb, kh, ks, kd), (vb, vh, vs, ve) = (t.sharding.resolve(4).dims for t in (q, k, v))
    shapes = [true_shape(t) for t in (q, k, v)]
    sizes = shapes[0][0] == shapes[1][0] == shapes[2][0] and shapes[1][1:3] == shapes[2][1:3]
    if not sizes or shapes[0][3] != shapes[1][3] or shapes[1][1] == 0 or shapes[0][1] % shapes[1][1]:
        raise ShardError(
            "sizes do not fit: q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] with g a divisor of h",
            op="ring_attention", operands=operands, mesh=mesh, fix="sl.ring_attention(q, q, q)",
        )  # fmt: skip
    local = qd.is_split or kd.is_split or ve.is_split
    if local or not (qb == kb == vb and qh == kh == vh and ks == vs):
        want = " ".join([str(qb), str(qh), str(ks), "."])
        raise ImplicitCommunication(
            "batch and heads must be split alike, keys and values too, and the head size be whole",
            op="ring_attention", operands=operands, mesh=mesh,
            fix=f"sl.ring_attention(*(sl.reshard(t, {want!r}) for t in (q, k, v)))",
        )  # fmt: skip
    grouped = qs.groups.parts or ks.groups.parts
    if grouped or (ks.is_split and ks.axes != qs.axes):
        want = " ".join([str(qb), str(qh), str(ks), "."])
        raise ImplicitCommunication(
            f"the sequence of q is split {qs} and that of k {ks}: they must be split over the same axes",
            op="ring_attention", operands=operands, mesh=mesh, fix=f"sl.reshard(q, {want!r})",
        )  # fmt: skip
    if qh.is_split and (q.size_[1] // math.prod(mesh.axes[a] for a in qh.axes)) % (
        k.size_[1] // math.prod(mesh.axes[a] for a in kh.axes)
    ):
        raise ImplicitCommunication(
            "each rank's heads of queries must share its heads of keys", op="ring_attention", operands=operands,
            mesh=mesh, fix=f"sl.ring_attention(*(sl.reshard(t, '{qb} . {qs} .') for t in (q, k, v)))",
        )  # fmt: skip
