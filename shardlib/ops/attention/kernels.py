"""Attention kernels for one block of scores, with the log-sum-exp by which blocks are merged.

Every kernel is ``forward(block) -> out, lse`` and ``backward(block, ...) -> dq, dk, dv, dbias``.
Kernels differ in their result for rows without allowed keys; here such rows have out 0 and lse
-inf, and backward gets a finite lse for them.  The math block supports everything: dropout, learned
bias, a gradient of lse, values wider than keys, any dtype and device.

Source: the merge is the online softmax of arXiv 1805.02867; the backward is FlashAttention's,
arXiv 2205.14135, appendix B, with delta = rowsum(dO out) - dlse.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import attention_op
from shardlib.kernels import active
from shardlib.kernels.merge import merge_, mergeable
from shardlib.layouts.orders import Run
from shardlib.ops.attention.masks import Mask


@dataclass
class Block:
    """Input of a kernel: q [b, h, m, d], k [b, g, n, d], v [b, g, n, e]; h / g heads share keys.

    ``causal``  square and lower triangular.
    ``bias``    added to the scores, -inf where not allowed.
    ``keep``    rows -> factors of the probabilities of those rows (dropout).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    bias: Tensor | None
    scale: float
    keep: Callable[[int, int], Tensor] | None = None


class Grads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Kernel:
    """Kernel that computes a block and its gradient."""

    name: str
    forward: Callable[[Block], tuple[Tensor, Tensor]]
    backward: Callable[..., Grads]


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over blocks are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge a block's result into that of earlier blocks, in place.

    out [b, h, m, e] and lse [b, h, m] become those of the softmax over both.  Rows without allowed
    keys on either side stay 0 and -inf.

    >>> out, lse = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -math.inf)
    >>> merge(out, lse, torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1))
    >>> merge(out, lse, 3 * torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1))
    >>> out.item(), round(lse.exp().item(), 6)
    (2.0, 2.0)
    """
    if (not out.is_cpu or active.cpu) and mergeable(out, lse, new_out, new_lse):
        merge_(out, lse, new_out, new_lse)
        return
    both = torch.logaddexp(lse, new_lse)
    share = (new_lse - both).exp_().nan_to_num_(0.0)
    out.mul_((lse - both).exp_().nan_to_num_(0.0).unsqueeze(-1))
    out.addcmul_(new_out.to(out.dtype), share.to(out.dtype).unsqueeze(-1))
    lse.copy_(both)


# ---------------------------------------------------------------- the math block

# rows of scores held at once, a bound on memory
_ROWS = 256


def _heads(x: Tensor, groups: int) -> Tensor:
    """[.., h, m, n] -> [.., g, h / g, m, n]; a single head for all is left to broadcast."""
    if x.ndim < 3 or x.shape[-3] == 1:
        return x.unsqueeze(-3) if x.ndim > 2 else x
    return x.unflatten(-3, (groups, x.shape[-3] // groups))


def rows_of(bias: Tensor, first: int, end: int) -> Tensor:
    """Return a bias's part of some rows of scores; a single row for all is left to broadcast."""
    return bias if bias.shape[-2] == 1 else bias[..., first:end, :]


def _scores(b: Block, q: Tensor, k: Tensor, r0: int, r1: int) -> Tensor:
    s = torch.matmul(q[:, :, :, r0:r1] * b.scale, k.mT)  # [b, g, h/g, rows, n]
    if b.bias is not None:
        s = s + _heads(rows_of(b.bias, r0, r1).to(s.dtype), k.shape[1])
    if b.causal:
        s = s.masked_fill(_above(r0, r1, s), -math.inf)
    return s


def _above(r0: int, r1: int, s: Tensor) -> Tensor:
    return torch.arange(r0, r1, device=s.device)[:, None] < torch.arange(
        s.shape[-1], device=s.device
    )


def _math_forward(b: Block) -> tuple[Tensor, Tensor]:
    dtype, g = acc_dtype(b.q.dtype), b.k.shape[1]
    q, k, v = _heads(b.q.to(dtype), g), b.k.to(dtype).unsqueeze(2), b.v.to(dtype).unsqueeze(2)
    outs, lses = [], []
    for r0 in range(0, b.q.shape[2], _ROWS):
        r1 = min(r0 + _ROWS, b.q.shape[2])
        s = _scores(b, q, k, r0, r1)
        lse = torch.logsumexp(s, -1)
        # for a row without an allowed key, since -inf - (-inf) is nan
        p = (s - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
        if b.keep is not None:
            p = p * _heads(b.keep(r0, r1).to(dtype), g)
        outs.append(torch.matmul(p, v).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _math_backward(
    b: Block, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wants_bias: bool = False
) -> Grads:
    dtype, g = acc_dtype(b.q.dtype), b.k.shape[1]
    q, k, v = _heads(b.q.to(dtype), g), b.k.to(dtype).unsqueeze(2), b.v.to(dtype).unsqueeze(2)
    dout, out = _heads(dout.to(dtype), g), _heads(out.to(dtype), g)
    # rowsum(dO * O), algorithm 4 of FlashAttention (Dao et al. 2022); lse adds P * dlse to dS
    delta = (dout * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype).unflatten(1, (g, -1))
    lse = lse.masked_fill(lse == -math.inf, 0.0).to(dtype).unflatten(1, (g, -1))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dbias = None
    if wants_bias and b.bias is not None:
        dbias = b.bias.new_zeros(b.bias.shape, dtype=dtype)
    for r0 in range(0, b.q.shape[2], _ROWS):
        r1 = min(r0 + _ROWS, b.q.shape[2])
        p = (_scores(b, q, k, r0, r1) - lse[..., r0:r1, None]).exp_()
        used, dp = p, torch.matmul(dout[..., r0:r1, :], v.mT)
        if b.keep is not None:
            keep = _heads(b.keep(r0, r1).to(dtype), g)
            used, dp = p * keep, dp * keep
        dv += torch.matmul(used.mT, dout[..., r0:r1, :]).sum(2, keepdim=True)
        ds = p * (dp - delta[..., r0:r1, None])
        if dbias is not None:
            rows = rows_of(dbias, r0, r1)
            rows += ds.flatten(1, 2).sum_to_size(rows.shape)
        dq[..., r0:r1, :] = torch.matmul(ds, k) * b.scale
        dk += torch.matmul(ds.mT, q[..., r0:r1, :]).sum(2, keepdim=True) * b.scale
    return Grads(dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2), dbias)


# ---------------------------------------------------------------- aten's kernels


def without_keys(bias: Tensor | None) -> Tensor | None:
    """Return which rows have no allowed key: [.., m, n] -> [.., m]."""
    return None if bias is None else (bias == -math.inf).all(-1)


def settled(out: Tensor, lse: Tensor, empty: Tensor | None) -> tuple[Tensor, Tensor]:
    if empty is None:
        return out, lse
    return out.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, -math.inf)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)


_ATEN: dict[str, tuple[Any, Any]] = {
    name: (attention_op(op), attention_op(f"{op}_backward"))
    for name, op in (
        ("cpu", "_scaled_dot_product_flash_attention_for_cpu"),
        ("flash", "_scaled_dot_product_flash_attention"),
        ("efficient", "_scaled_dot_product_efficient_attention"),
        ("cudnn", "_scaled_dot_product_cudnn_attention"),
    )
}
"""Kernel -> aten's attention and its gradient; None for one whose arguments this torch changed."""


def _cpu_forward(b: Block) -> tuple[Tensor, Tensor]:
    out, lse = _ATEN["cpu"][0](b.q, b.k, b.v, 0.0, b.causal, attn_mask=_four(b.bias), scale=b.scale)
    return settled(out, lse, without_keys(b.bias))


def _cpu_backward(
    b: Block, dout: Tensor, dlse: None, out: Tensor, lse: Tensor, wants_bias: bool = False
) -> Grads:
    given = dout, b.q, b.k, b.v, out, _finite(lse), 0.0, b.causal
    return Grads(*_ATEN["cpu"][1](*given, attn_mask=_four(b.bias), scale=b.scale))


def on_paper(device: str, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Attend as F.scaled_dot_product_attention on the meta device, by the kernel values would use.

    torch's own choice on meta is the formula, which holds all scores, unlike the kernels.
    ``device``  type of the device that values would be on.
    """
    bias = how.get("attn_mask")
    asked = how.get("dropout_p") or q.ndim != 4
    asked = asked or not q.shape[-1] == k.shape[-1] == v.shape[-1]
    asked = asked or (q.shape[1] != k.shape[1] and not how.get("enable_gqa"))
    asked = asked or (bias is not None and (bias.requires_grad or how.get("is_causal")))
    if _unfused(device, q.dtype) or asked or not q.numel() or not k.numel():
        return F.scaled_dot_product_attention(q, k, v, **how)
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=q.dtype)
    return _ATEN["cpu"][0](
        q, k, v, 0.0, how.get("is_causal", False), attn_mask=_four(bias), scale=how.get("scale")
    )[0]


def _four(bias: Tensor | None) -> Tensor | None:
    """Return the bias with four dimensions; the kernels broadcast batch and heads."""
    return None if bias is None else bias[(None,) * (4 - bias.ndim)]


def _flash_forward(b: Block) -> tuple[Tensor, Tensor]:
    return _ATEN["flash"][0](b.q, b.k, b.v, 0.0, b.causal, scale=b.scale)[:2]


def _flash_backward(
    b: Block, dout: Tensor, dlse: None, out: Tensor, lse: Tensor, wants_bias: bool = False
) -> Grads:
    seed = torch.zeros(2, dtype=torch.int64, device=b.q.device)
    m, n = b.q.shape[2], b.k.shape[2]
    given = dout, b.q, b.k, b.v, out, _finite(lse), None, None, m, n, 0.0, b.causal, seed, seed
    return Grads(*_ATEN["flash"][1](*given, scale=b.scale))


def _shared(b: Block) -> tuple[Tensor, Tensor, int]:
    """Repeat keys and values for each head of queries, for kernels without grouped queries."""
    r = b.q.shape[1] // b.k.shape[1]
    if r == 1:
        return b.k, b.v, r
    return b.k.repeat_interleave(r, 1), b.v.repeat_interleave(r, 1), r


def _folded(x: Tensor, r: int) -> Tensor:
    return x if r == 1 else x.unflatten(1, (-1, r)).sum(2)


def _expanded(b: Block) -> Tensor | None:
    """Return the bias in the queries' dtype, its row stride a multiple of 16 for aligned loads."""
    if b.bias is None:
        return None
    n = b.bias.shape[-1]
    bias = F.pad(b.bias.to(b.q.dtype), (0, -n % 16))[..., :n]
    return bias.expand(b.q.shape[0], b.q.shape[1], b.q.shape[2], n)


def _efficient_forward(b: Block) -> tuple[Tensor, Tensor]:
    k, v, _ = _shared(b)
    out, lse, *_ = _ATEN["efficient"][0](
        b.q, k, v, _expanded(b), True, 0.0, b.causal, scale=b.scale
    )
    return settled(out, lse[..., : b.q.shape[2]], without_keys(b.bias))


def _efficient_backward(
    b: Block, dout: Tensor, dlse: None, out: Tensor, lse: Tensor, wants_bias: bool = False
) -> Grads:
    k, v, r = _shared(b)
    # the kernel reads lse in rows of 32
    lse = F.pad(_finite(lse), (0, -lse.shape[-1] % 32))
    seed = torch.zeros((), dtype=torch.int64, device=b.q.device)
    asked = [True, True, True, False]
    dq, dk, dv, _ = _ATEN["efficient"][1](
        dout, b.q, k, v, _expanded(b), out, lse, seed, seed, 0.0, asked, b.causal, scale=b.scale
    )
    return Grads(dq, _folded(dk, r), _folded(dv, r))


def _cudnn_forward(b: Block) -> tuple[Tensor, Tensor]:
    k, v, _ = _shared(b)
    out, lse, *_ = _ATEN["cudnn"][0](
        b.q, k, v, _expanded(b), True, 0.0, b.causal, False, scale=b.scale
    )
    return settled(out, lse.squeeze(-1) if lse.ndim == 4 else lse, without_keys(b.bias))


def _cudnn_backward(
    b: Block, dout: Tensor, dlse: None, out: Tensor, lse: Tensor, wants_bias: bool = False
) -> Grads:
    k, v, r = _shared(b)
    seed = torch.zeros((), dtype=torch.int64, device=b.q.device)
    m, n = b.q.shape[2], b.k.shape[2]
    dq, dk, dv = _ATEN["cudnn"][1](
        dout, b.q, k, v, out, _finite(lse).unsqueeze(-1), seed, seed, _expanded(b), None, None, m,
        n, 0.0, b.causal,
        scale=b.scale,
    )  # fmt: skip
    return Grads(dq, _folded(dk, r), _folded(dv, r))


KERNELS = {
    "math": Kernel("math", _math_forward, _math_backward),
    "cpu": Kernel("cpu", _cpu_forward, _cpu_backward),
    "flash": Kernel("flash", _flash_forward, _flash_backward),
    "efficient": Kernel("efficient", _efficient_forward, _efficient_backward),
    "cudnn": Kernel("cudnn", _cudnn_forward, _cudnn_backward),
}
_PRESENT = {name: None not in ops for name, ops in _ATEN.items()}


def _unfused(device: str, dtype: torch.dtype) -> str:
    """Return why the CPU's kernel does not stand for one of a device on paper; "" if it does."""
    if _ATEN["cpu"][0] is None:
        return "this torch has other arguments for it"
    fused = dtype != torch.float64 if device == "cuda" else device in ("cpu", "meta")
    return "" if fused else f"{device} has no such kernel"


def unfit(
    name: str, q: Tensor, v: Tensor, biased: bool, needs_math: bool, device: str = "meta"
) -> str:
    """Return why a kernel cannot compute such blocks; "" if it can.

    ``device``      type of the device that blocks on the meta device stand for.
    ``biased``      whether some block has a bias or a mask.
    ``needs_math``  whether dropout, a learned bias or a gradient of lse is needed.
    """
    if name == "math":
        return ""
    if not _PRESENT[name]:
        return "this torch has other arguments for it"
    if needs_math:
        return "dropout, a learned bias and a gradient of lse need the math block"
    if q.shape[-1] != v.shape[-1]:
        return "values must be as wide as keys"
    if name == "cpu" and q.device.type == "meta":
        return _unfused(device, q.dtype)
    if name == "cpu":
        return "" if q.device.type == "cpu" else "it runs on CPUs"
    if q.device.type != "cuda":
        return "it runs on CUDA"
    return _unfit_on_cuda(name, q, biased)


def _unfit_on_cuda(name: str, q: Tensor, biased: bool) -> str:
    half, size = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    if name == "efficient":
        fits = q.dtype != torch.float64 and size % 8 == 0
        return "" if fits else "it takes fp32 and less, heads a multiple of 8"
    if name == "cudnn":
        fits = half and size % 8 == 0 and size <= 128
        return "" if fits else "it takes half precision, heads up to 128"
    if not half:
        return "it takes half precision"
    if size % 8 or size > 256:
        return "it takes heads of a multiple of 8 up to 256"
    return "it takes no mask" if biased else ""


def pick(q: Tensor, v: Tensor, biased: bool, needs_math: bool, device: str = "meta") -> Kernel:
    """Return the fastest kernel that fits, see ``unfit``."""
    for name in ("cpu", "flash", "efficient", "math"):
        if not unfit(name, q, v, biased, needs_math, device):
            return KERNELS[name]
    raise AssertionError("the math block takes everything")


class ScorePiece(NamedTuple):
    """Rows q0:q1 of queries by rows k0:k1 of keys; kind: full, causal (then square) or masked."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str

    @property
    def area(self) -> int:
        """Number of scores that a kernel computes."""
        q, k = self.q1 - self.q0, self.k1 - self.k0
        return q * (q + 1) // 2 if self.kind == "causal" else q * k


# price of one more kernel call, in scores
_CALL = 1024
# rows of a masked tile, at least
_TILE = 64


@lru_cache(maxsize=4096)
def pieces(q: tuple[Run, ...], k: tuple[Run, ...], mask: Mask) -> tuple[ScorePiece, ...]:
    """List the calls for the queries at ``q`` and the keys at ``k``, in the order of the rows.

    >>> from shardlib.ops.attention.masks import Causal
    >>> pieces((Run(4, 1, 4),), (Run(0, 1, 4),), Causal())
    (ScorePiece(q0=0, q1=4, k0=0, k1=4, kind='full'),)
    >>> pieces((Run(0, 1, 2), Run(6, 1, 2)), (Run(0, 1, 2), Run(6, 1, 2)), Causal())
    (ScorePiece(q0=0, q1=4, k0=0, k1=4, kind='causal'),)
    """
    if not q or not k:
        return ()
    if q == k and _is_causal(q, mask):
        n = sum(run.length for run in q)
        return (ScorePiece(0, n, 0, n, "causal"),)
    cut_q, cut_k = mask.cuts()
    found: list[ScorePiece] = []
    for q0, q_run in _cut(q, cut_q):
        for k0, k_run in _cut(k, cut_k):
            found += [
                ScorePiece(a + q0, b + q0, c + k0, d + k0, kind)
                for a, b, c, d, kind in _cell(q_run, k_run, mask)
            ]
    return _boxed(_merged(found))


def _is_causal(runs: tuple[Run, ...], mask: Mask) -> bool:
    """Check whether several rising runs attend to themselves as one causal block."""
    if len(runs) < 2 or any(a.last >= b.start for a, b in itertools.pairwise(runs)):
        return False
    hull = Run(runs[0].start, 1, runs[-1].last - runs[0].start + 1)
    return mask.relation(hull, hull) == (0, math.inf, True)


def _boxed(found: list[ScorePiece]) -> tuple[ScorePiece, ...]:
    """Replace many small calls, which can cost more, by one masked call over their box."""
    if len(found) > 8:
        box = ScorePiece(min(p.q0 for p in found), max(p.q1 for p in found), min(p.k0 for p in found),
                    max(p.k1 for p in found), "masked")  # fmt: skip
        if sum(p.area + _CALL for p in found) > 1.25 * box.area:
            return (box,)
    return tuple(found)


def narrowed(runs: Sequence[Run], lo: int, hi: int) -> tuple[Run, ...]:
    """Return the runs of rows lo:hi of a block."""
    out, at = [], 0
    for run in runs:
        a, b = max(lo - at, 0), min(hi - at, run.length)
        if a < b:
            out.append(Run(run.start + run.stride * a, run.stride, b - a))
        at += run.length
    return tuple(out)


def _cut(runs: Sequence[Run], cuts: Sequence[int]) -> list[tuple[int, Run]]:
    """Cut runs before each position in ``cuts``; return the parts, each with its first row."""
    out, at = [], 0
    for run in runs:
        marks = {0, run.length}
        for c in cuts:
            if run.start < c <= run.last:
                marks.add(-(-(c - run.start) // run.stride))
        edges = sorted(marks)
        for a, b in itertools.pairwise(edges):
            out.append((at + a, Run(run.start + run.stride * a, run.stride, b - a)))
        at += run.length
    return out


def _cell(q: Run, k: Run, mask: Mask) -> list[ScorePiece]:
    lo, hi, exact = mask.relation(q, k)
    least, most = q.start - k.last, q.last - k.start
    if lo > most or hi < least:
        return []
    nq, nk = q.length, k.length
    if lo <= least and hi >= most:
        return [ScorePiece(0, nq, 0, nk, "full" if exact else "masked")]
    same = q.stride == k.stride or nq == 1 or nk == 1
    if not same:
        return [ScorePiece(0, nq, 0, nk, "masked")]
    stride = q.stride if nq > 1 else k.stride
    shift = k.start - q.start
    if exact and hi >= most:  # row - column >= down
        down = math.ceil((lo + shift) / stride)
        if down >= 0:
            return _square(down, nq, 0, nk)
        ahead = min(nk, -down)
        return [
            ScorePiece(0, nq, 0, ahead, "full"),
            *(_square(0, nq, ahead, nk) if ahead < nk else []),
        ]
    width = (min(hi, most) - max(lo, least)) // stride + 1
    tile = max(_TILE, int(width))
    out = []
    for a in range(0, nq, tile):
        b = min(nq, a + tile)
        first = max(0, a + math.ceil((-hi - shift) / stride)) if hi < most else 0
        last = min(nk, b + math.floor((-lo - shift) / stride)) if lo > least else nk
        if first < last:
            out.append(ScorePiece(a, b, first, last, "masked"))
    return out


def _square(q0: int, q1: int, k0: int, k1: int) -> list[ScorePiece]:
    """Split a causal region from (q0, k0) on: a square, and full rows below it.

    Kernels disagree on the diagonal of a block that is not square.
    """
    n = min(q1 - q0, k1 - k0)
    below = [ScorePiece(q0 + n, q1, k0, k0 + n, "full")] if q0 + n < q1 else []
    return [ScorePiece(q0, q0 + n, k0, k0 + n, "causal"), *below]


def _merged(found: list[ScorePiece]) -> list[ScorePiece]:
    """Join adjacent full pieces to one call: first along the keys, then along the queries."""
    out: list[ScorePiece] = []
    for p in found:
        if out and p.kind == "full" == out[-1].kind and out[-1][:2] == p[:2] and out[-1].k1 == p.k0:
            out[-1] = out[-1]._replace(k1=p.k1)
        else:
            out.append(p)
    rows: list[ScorePiece] = []
    for p in out:
        above = next(
            (
                i
                for i, r in enumerate(rows)
                if r.kind == p.kind == "full" and r.q1 == p.q0 and r[2:4] == p[2:4]
            ),
            -1,
        )
        if above >= 0:
            rows[above] = rows[above]._replace(q1=p.q1)
        else:
            rows.append(p)
    return rows
