"""Operands of ``ring_attention``, checked, and their description as a case.

``entered`` takes DTensors, local blocks or sharded tensors.  An ``AttentionCase`` (positions, mask,
sizes and axes, no tensors) is the input of the engines' plans.  A bias and a sink are resharded
like the scores of this rank's queries.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import is_dtensor
from shardlib.collectives import Stacked, unwrap
from shardlib.dtensor_convert import as_dtensor, from_dtensor
from shardlib.errors import (
    ImplicitCommunication,
    NoImplementation,
    PlainTensor,
    RankMismatch,
    ShardError,
)
from shardlib.layouts import Dim, Layout, LayoutFamily, as_layout
from shardlib.layouts.dims import ring_runs
from shardlib.layouts.orders import Run
from shardlib.mesh import Link, current_mesh
from shardlib.ops.attention.kernels import acc_dtype
from shardlib.ops.attention.masks import Mask, as_mask
from shardlib.ops.elementwise import aligned
from shardlib.ops.registry import case_of
from shardlib.tensor import Place, ShardedTensor, call_error, refuse_sums, replicated, typeof

Runs = tuple[tuple[Run, ...], ...]
"""For each rank of the ring, the global positions of its rows."""

# assumed flops per second, to price compute
_RATE = {"cpu": 3e10, "meta": 3e10}
# about the bf16 peak of an A100, 312 Tflop/s
_ACCELERATED = 3e14


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
    ``device``  type of the device that the ranks compute on.

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
    device: str = "meta"

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
    p = mesh.axis_size(token.axes)
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
        rate=_RATE.get(mesh.device_type, _ACCELERATED),
        links=tuple(mesh.links.items()),
        device=mesh.device_type,
    )


def length(runs: tuple[Run, ...]) -> int:
    """Count the positions of some runs."""
    return sum(run.length for run in runs)


class Operands(NamedTuple):
    """q, k and v as sharded tensors, and the conversion back if they were of another kind."""

    q: ShardedTensor
    k: ShardedTensor
    v: ShardedTensor
    leave: Callable[[ShardedTensor], Tensor] | None


def entered(q: Tensor, k: Tensor, v: Tensor, layout: Any, kv_layout: Any) -> Operands:
    """Convert sharded tensors, DTensors, or local blocks split as the layouts state.

    Raises: PlainTensor, RankMismatch, ImplicitCommunication and others if they do not fit.
    """
    keys_layout = layout if kv_layout is None else kv_layout
    if any(is_dtensor(t) for t in (q, k, v)):
        values = [from_dtensor(t) if is_dtensor(t) else t for t in (q, k, v)]
        leave: Callable[[ShardedTensor], Tensor] | None = as_dtensor
    elif isinstance(q, ShardedTensor):
        values, leave = [q, k, v], None
    else:
        values, leave = _placed(q, k, v, layout, keys_layout), attrgetter("local")
        layout = keys_layout = None
    check(*values)
    _check_layout("q", values[0], layout)
    _check_layout("k", values[1], keys_layout)
    return Operands(*values, leave)  # type: ignore[arg-type]  # all of them sharded: check


@case_of("attention")
def attention_case(
    q: ShardedTensor,
    k: ShardedTensor,
    v: ShardedTensor,
    mask: Mask | None = None,
    biased: bool = False,
) -> AttentionCase:
    """Describe three operands as a case for the engines."""
    check(q, k, v)
    return case_of_values(q, k, v, as_mask(mask), biased)


def _placed(q: Any, k: Any, v: Any, layout: Any, keys_layout: Any) -> list[Tensor]:
    """Wrap local blocks as sharded values."""
    if layout is None:
        axis = next(iter(current_mesh().axes))
        why = "local blocks need their layout; a whole tensor is sharded first"
        fix = f"sl.ring_attention(*(sl.shard(t, sl.Ring({axis!r}, dim=2)) for t in (q, k, v)))"
        raise call_error(PlainTensor, why, "ring_attention", fix, q=q)
    mesh = q.mesh if type(q) is Stacked else current_mesh()
    out: list[Tensor] = []
    for x, asked in ((q, layout), (k, keys_layout), (v, keys_layout)):
        token = _token(asked, mesh)
        size = list(x.shape)
        size[2] *= mesh.axis_size(token.axes)
        out.append(
            ShardedTensor(
                unwrap(x), Place(Layout((Dim(), Dim(), token, Dim())), torch.Size(size), mesh)
            )
        )
    return out


def _token(layout: Any, mesh: Any) -> Dim:
    """Return the token of the sequence: dimension 2, or the only dimension a family splits."""
    fix = "sl.ring_attention(q, k, v, layout={})"
    found = as_layout(layout, "ring_attention", fix, shape=(1, 1, 1, 1), mesh=mesh)
    split = [d for d in found.dims if d.is_split]
    if isinstance(layout, LayoutFamily) and len(split) == 1:
        return split[0]
    return found.resolve(4).dims[2]


def _check_layout(name: str, x: Any, asked: Any) -> None:
    if asked is None:
        return
    dims, want = x.sharding.resolve(4).dims, _token(asked, x.mesh)
    if want != dims[2]:
        b, h, s, d = map(str, dims)
        why = f"{name}'s sequence is split {s}, not {want}"
        fix = f"sl.reshard({name}, {' '.join([b, h, str(want), d])!r})"
        raise call_error(ImplicitCommunication, why, "ring_attention", fix, **{name: x})


# ---------------------------------------------------------------- checks


def check(q: Any, k: Any, v: Any) -> None:
    """Raise the first error of the operands' kinds, sizes or layouts."""
    wrong = itertools.chain(_kinds(q, k, v), _sizes(q, k, v), _layouts(q, k, v), _heads(q, k))
    for kind, why, fix in itertools.islice(wrong, 1):
        raise call_error(kind, why, "ring_attention", fix, q=q, k=k, v=v)


_Wrong = Iterator[tuple[type[ShardError], str, str]]


def _kinds(q: Any, k: Any, v: Any) -> _Wrong:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, ShardedTensor):
            fix = f"sl.shard({name}, {str(q.sharding)!r})"
            yield PlainTensor, f"{name} is a plain tensor and q is sharded", fix
        n = len(t.padded_shape)
        if n != 4:
            why = f"{name} has {n} dimensions; attention takes [batch, heads, sequence, size]"
            yield RankMismatch, why, f"{name}[(None,) * {max(0, 4 - n)}]"
        refuse_sums("ring_attention", t)
    if not q.raw.dtype == k.raw.dtype == v.raw.dtype:
        fix = "sl.ring_attention(q, k.to(q.dtype), v.to(q.dtype))"
        yield ShardError, "q, k and v have different dtypes", fix


def _sizes(q: Any, k: Any, v: Any) -> _Wrong:
    (b, h, _, d), (kb, g, t, kd), (vb, vg, vt, _) = (x.shape for x in (q, k, v))
    alike = b == kb == vb and (g, t) == (vg, vt) and d == kd
    if not alike or g == 0 or h % g:
        why = "q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] with g a divisor of h"
        yield ShardError, f"sizes do not fit: {why}", "sl.ring_attention(q, q, q)"


def _layouts(q: Any, k: Any, v: Any) -> _Wrong:
    (qb, qh, qs, qd), (kb, kh, ks, kd), (vb, vh, vs, ve) = (
        t.sharding.resolve(4).dims for t in (q, k, v)
    )
    want = " ".join([str(qb), str(qh), str(ks), "."])
    whole = not (qd.is_split or kd.is_split or ve.is_split)
    if not whole or not (qb == kb == vb and qh == kh == vh and ks == vs):
        why = "batch and heads must be split alike, keys and values too, and the head size be whole"
        fix = f"sl.ring_attention(*(sl.reshard(t, {want!r}) for t in (q, k, v)))"
        yield ImplicitCommunication, why, fix
    grouped = qs.groups.parts or ks.groups.parts
    if grouped or (ks.is_split and ks.axes != qs.axes):
        split = f"the sequence of q is split {qs} and that of k {ks}"
        why = f"{split}: they must be split over the same axes"
        yield ImplicitCommunication, why, f"sl.reshard(q, {want!r})"


def _heads(q: Any, k: Any) -> _Wrong:
    """Refuse heads that are split so that a rank has queries without their keys."""
    qb, qh, qs, _ = q.sharding.resolve(4).dims
    n = math.prod(q.mesh.axes[a] for a in qh.axes)
    if (q.padded_shape[1] // n) % max(1, k.padded_shape[1] // n):
        why = "each rank's heads of queries must share its heads of keys"
        fix = f"sl.ring_attention(*(sl.reshard(t, '{qb} . {qs} .') for t in (q, k, v)))"
        yield ImplicitCommunication, why, fix


def bias_and_sink(
    q: ShardedTensor, k: ShardedTensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias and the sink, where given, as raw blocks in the layout of the scores."""
    return _bias(q, k, bias), _sink(q, sink)


def _bias(q: ShardedTensor, k: ShardedTensor, bias: Tensor | None) -> Tensor | None:
    """Align a bias [.., s, t] with this rank's queries, all keys: [b or 1, h or 1, lq or 1, t]."""
    if bias is None:
        return None
    s, t = q.shape[2], k.shape[2]
    fits = 2 <= bias.ndim <= 4 and bias.shape[-2] in (1, s) and bias.shape[-1] in (1, t)
    if not fits:
        why = f"a bias is [.., {s}, {t}], broadcast over batch and heads, not {list(bias.shape)}"
        fix = f"sl.ring_attention(q, k, v, bias=torch.zeros({s}, {t}))"
        raise call_error(ShardError, why, "ring_attention", fix, q=q, k=k, bias=bias)
    if not isinstance(bias, ShardedTensor):
        if bias.shape[-2] not in (1, q.padded_shape[2]):
            bias = F.pad(bias, (0, 0, 0, q.padded_shape[2] - s))
        bias = replicated(bias, q.mesh)
    bias = bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    (_, raw), *_ = aligned("ring_attention", [_scores(q, max(t, 2)), bias])  # type: ignore[list-item]
    return raw


def _sink(q: ShardedTensor, sink: Tensor | None) -> Tensor | None:
    """Align one score per local head: [1, h, 1], behind a dimension of ranks under simulate."""
    if sink is None:
        return None
    h = q.padded_shape[1]
    if tuple(sink.shape) != (h,):
        why = f"a sink is one score for each of {h} heads, not {list(sink.shape)}"
        fix = f"sl.ring_attention(q, k, v, sink=torch.zeros({h}))"
        raise call_error(ShardError, why, "ring_attention", fix, q=q, sink=sink)
    whole = replicated(sink, q.mesh)
    (_, raw), *_ = aligned("ring_attention", [_scores(q, 2), whole[:, None, None]])  # type: ignore[list-item]
    return raw.squeeze(-1).unsqueeze(-3)


def _scores(q: ShardedTensor, last: int) -> ShardedTensor:
    """Return a value with the layout of the scores [b, h, s, last]."""
    layout = Layout((*q.sharding.resolve(4).dims[:3], Dim()))
    return q.becomes(q.raw[..., :1], layout, torch.Size((*q.padded_shape[:3], last)))
