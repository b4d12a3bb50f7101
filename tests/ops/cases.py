"""Functions and layouts to compare with dense; shared by simulated and real ranks."""

from collections.abc import Callable
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.ops.attention.case import AttentionCase, Runs, Sizes, length


def case_on_paper(
    q_runs: Runs, k_runs: Runs, mask: sl.masks.Mask | None = None, sizes: Sizes | None = None
) -> AttentionCase:
    """Describe an attention over one axis by its positions alone, for a ring of any size."""
    lq, lk = (max(map(length, runs), default=0) for runs in (q_runs, k_runs))
    sizes = Sizes(1, 1, 1, lq, lk, 64, 64, 4, 4) if sizes is None else sizes
    mesh = (("s", len(q_runs)),)
    return AttentionCase(q_runs, k_runs, mask or sl.masks.Full(), sizes, lk, ("s",), mesh)


def cube_words(m: int, k: int, n: int, pm: int, pk: int, pn: int) -> Fraction:
    """Count the forward words that one rank receives for a three-axis product."""
    return Fraction((pn - 1) * m * k + (pm - 1) * k * n + (pk - 1) * m * n, pm * pk * pn)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    error = float((a - b).abs().max()) / scale if b.numel() else 0.0
    assert a.shape == b.shape and error <= tolerance, f"{error:.2e}"


def compare(
    f: Callable[..., Tensor],
    tensors: list[Tensor],
    layouts: list[str],
    tolerance: float = 1e-12,
    out: str | None = None,
) -> None:
    """f of sharded operands equals f of dense ones, and so does every gradient, in its layout.

    Runs on the mesh in scope; the cotangent has unit scale.
    """
    dense = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    torch.manual_seed(7)
    want = f(*dense)
    g = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(3))
    want.backward(g)
    ours = [
        sl.shard(t.detach(), lay).requires_grad_(t.is_floating_point())
        for t, lay in zip(tensors, layouts, strict=True)
    ]
    torch.manual_seed(7)
    got = f(*ours)
    assert isinstance(got, sl.ShardedTensor)
    if out is not None:
        assert got.sharding == sl.Layout.parse(out).resolve(got.ndim), (got.sharding, out)
    close(sl.unshard(got).detach(), want.detach(), tolerance)
    got.backward(sl.shard(g, got.sharding))
    for x, y in zip(ours, dense, strict=True):
        if y.grad is not None:
            assert x.grad is not None and x.grad.sharding == x.sharding
            close(sl.unshard(x.grad), y.grad, tolerance)


def r(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def ids(*shape: int, top: int = 12) -> Tensor:
    return torch.randint(top, shape, generator=torch.Generator().manual_seed(1))


def gpt_attention(qkv: Tensor) -> Tensor:
    b, t, c3 = qkv.shape
    q, k, v = qkv.split(c3 // 3, dim=2)
    q, k, v = (z.view(b, t, 4, c3 // 12).transpose(1, 2) for z in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).contiguous().view(b, t, c3 // 3)


def loss(smooth: float = 0.0, ignore: int = -100, reduction: str = "mean") -> Callable[..., Tensor]:
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, target, label_smoothing=smooth, ignore_index=ignore, reduction=reduction
        )

    return f


X = r(4, 6, 12)
# name -> (function, tensors, [layouts per operand, ...]) on a mesh data=1|2, x=2, y=2
Cases = dict[str, tuple[Callable[..., Tensor], list[Tensor], list[list[str]]]]

ELEMENTWISE: Cases = {
    "gelu": (F.gelu, [X], [["x . y"], ["(x y) . ."], ["x . (3 y)"]]),
    "silu times": (lambda a, b: F.silu(a) * b, [X, r(4, 6, 12, seed=2)], [["x . y", "x . y"], ["x . y", ". . y"]]),
    "bias": (lambda a, b: a + b, [X, r(12, seed=2)], [["x . y", "y"], ["x . y", "."], [". . y", "y"], ["x . .", "."]]),
    "column bias": (lambda a, b: a * b, [X, r(4, 1, 1, seed=2)], [["x . y", "x . ."], ["x . y", ". . ."]]),
    "scalar": (lambda a, s: (2 - a) * s / 3, [X, r(seed=2)], [["x . y", ""], [". . .", ""]]),
    "where": (lambda a: torch.where(a > 0, a, a * 0.1), [X], [["x . y"]]),
    "masked_fill": (lambda a: a.masked_fill(a > 1, 0.5), [X], [["x . y"]]),
}  # fmt: skip
REDUCE: Cases = {
    "sum": (lambda a: a.sum(-1), [X], [["x . y"], [". . ."]]),
    "mean all": (lambda a: (a * a).mean(), [X], [["x . y"], ["(x y) . ."]]),
    "mean keep": (lambda a: a - a.mean((0, 2), keepdim=True), [X], [["x . y"]]),
    "var": (lambda a: a.var(-1), [X], [["x . y"]]),
    "softmax": (lambda a: F.softmax(a, -1), [X], [["x . y"], ["x y ."]]),
    "log_softmax": (lambda a: F.log_softmax(a, dim=2), [X], [["x . y"]]),
    "logsumexp": (lambda a: a.logsumexp(-1), [X], [["x . y"]]),
}  # fmt: skip
NORM: Cases = {
    "layer_norm": (
        lambda a, w, b: F.layer_norm(a, (12,), w, b),
        [X, r(12, seed=2), r(12, seed=3)],
        [["x . y", "y", "y"], ["x . y", ".", "."], [". . .", ".", "."], ["x . .", ".", "."], ["x . (y)", "y", "."]],
    ),
    "layer_norm two dims": (
        lambda a, w: F.layer_norm(a, (6, 12), w), [X, r(6, 12, seed=2)], [["x . y", ". y"], [". x y", "x y"]]
    ),
    "rms_norm": (lambda a, w: F.rms_norm(a, (12,), w), [X, r(12, seed=2)], [["x . y", "y"], ["x . .", "."]]),
}  # fmt: skip
PRODUCTS: Cases = {
    "linear": (
        F.linear, [X, r(24, 12, seed=2), r(24, seed=3)],
        [["x . y", "y x", "y"], ["x . y", "x y", "y"], ["x . .", "y .", "y"], ["x . y", ". y", "."], [". . .", "(x y) .", "(x y)"]],
    ),
    "fused linear": (F.linear, [X, r(24, 12, seed=2)], [["x . y", "(3 y) x"], ["x . .", "(3 y) ."]]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), [r(8), r(12, 4, seed=2), r(4, 8, seed=3)], [["y", "x y", "x y"]]),
}  # fmt: skip
EMBEDDING: Cases = {
    "embedding": (
        lambda w: F.embedding(sl.shard(ids(4, 6), "x .") if isinstance(w, sl.ShardedTensor) else ids(4, 6), w),
        [r(12, 8, seed=2)], [["x y"], [". y"], [". ."], ["y ."]],
    ),
    "embedding over two axes": (
        lambda w: F.embedding(sl.shard(ids(4, 6), "(x y) .") if isinstance(w, sl.ShardedTensor) else ids(4, 6), w),
        [r(12, 8, seed=2)], [["(x y) ."]],
    ),
    "embedding of whole ids": (
        lambda w: F.embedding(sl.shard(ids(4, 6), "...") if isinstance(w, sl.ShardedTensor) else ids(4, 6), w),
        [r(12, 8, seed=2)], [["x ."], ["x y"], ["(y x) ."]],
    ),
    "embedding with a padding row": (
        lambda w: F.embedding(
            sl.shard(ids(4, 6), "x .") if isinstance(w, sl.ShardedTensor) else ids(4, 6), w, padding_idx=1
        ),
        [r(12, 8, seed=2)], [["x y"], [". y"], [". ."], ["y x"]],
    ),
    "embedding with hidden gathered": (
        lambda w: F.embedding(sl.shard(ids(4, 6), "(x y) .") if isinstance(w, sl.ShardedTensor) else ids(4, 6), w),
        [r(12, 8, seed=2)], [["y x"], [". (x y)"], [". y"]],
    ),
}  # fmt: skip
ATTENTION: Cases = {
    "attention of fewer heads of keys": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, is_causal=True, enable_gqa=True),
        [r(4, 4, 6, 3), r(4, 2, 6, 3, seed=2)], [["x y . .", "x y . ."], ["x y . .", "x . . ."], ["x . . .", "x . . ."]],
    ),
    "attention": (gpt_attention, [r(4, 6, 24)], [["x . (3 y)"], ["x . ."], [". . (3 x)"]]),
}  # fmt: skip
SPACE: Cases = {
    "conv2d of patches": (
        lambda a, w, b: F.conv2d(a, w, b, stride=2),
        [r(4, 3, 4, 4), r(8, 3, 2, 2, seed=2), r(8, seed=3)],
        [["x . . .", "y . . .", "y"], ["(x y) . . .", ". . . .", "."], [". . . .", "(x y) . . .", "(x y)"]],
    ),
}  # fmt: skip
LOSS: Cases = {
    "cross_entropy": (loss(), [r(8, 12), ids(8)], [["x y", "x"], [". y", "."], ["x .", "x"], ["(x y) .", "(x y)"]]),
    "cross_entropy smooth": (loss(0.1), [r(8, 12), ids(8)], [["x y", "x"], [". (x y)", "."], ["x y", "."]]),
    "cross_entropy ignore": (loss(0.1, 3), [r(8, 12), ids(8)], [["x y", "x"], [". y", "."]]),
    "cross_entropy sum": (loss(reduction="sum"), [r(8, 12), ids(8)], [["x y", "x"]]),
    "cross_entropy none": (loss(reduction="none"), [r(8, 12), ids(8)], [["x y", "x"]]),
    "mse": (F.mse_loss, [X, r(4, 6, 12, seed=2)], [["x . y", "x . y"]]),
}  # fmt: skip
ALONG: Cases = {
    "gather": (
        lambda a: torch.gather(a, 1, sl.shard(ids(4, 6, 12, top=6), "x . y") if isinstance(a, sl.ShardedTensor) else ids(4, 6, 12, top=6)),
        [X], [["x . y"]],
    ),
    "cumsum": (lambda a: a.cumsum(1), [X], [["x . y"]]),
}  # fmt: skip
VIEWS: Cases = {
    "view": (lambda a: a.view(4, 6, 4, 3).flatten(0, 1).transpose(0, 1), [X], [["x . y"], ["x . ."]]),
    "merge": (lambda a: a.reshape(-1) * 2, [X], [["x . ."], ["x . y"], [". . y"]]),
    "chunk": (lambda a: a.chunk(3, -1)[1], [X], [["x . (3 y)"], ["x . ."]]),
    "index": (lambda a: a[:, 2:5, None], [X], [["x . y"]]),
    "cat": (lambda a: torch.cat([a, a * 2], 1), [X], [["x . y"]]),
    "cat of whole and split": (lambda a, b: torch.cat([b.expand(4, 1, 12), a], 1), [X, r(1, 1, 12, seed=2)], [["x . y", ". . y"], ["x . y", ". . ."]]),
    "cat with an empty piece": (lambda a: torch.cat([sl.shard(torch.zeros(0, dtype=a.dtype), ".") if isinstance(a, sl.ShardedTensor) else a.new_zeros(0), a], 1), [X], [["x . y"]]),
    "stack": (lambda a: torch.stack([a, -a]).squeeze(0), [X], [["x . y"]]),
    "expand": (lambda a: a.unsqueeze(1).expand(4, 3, 6, 12) * 2, [X], [["x . y"]]),
    "squeeze": (lambda a: a.unsqueeze(0).squeeze(0).permute(2, 0, 1), [X], [["x . y"]]),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, 1).repeat_interleave(3, dim=-1), [X], [["x . y"]]),
}  # fmt: skip
PLACING: Cases = {
    "reshard": (lambda a: sl.reshard(a, ". y x") if isinstance(a, sl.ShardedTensor) else a, [X], [["x . y"]]),
}  # fmt: skip
CASES: Cases = {
    **ELEMENTWISE,
    **REDUCE,
    **NORM,
    **PRODUCTS,
    **EMBEDDING,
    **ATTENTION,
    **SPACE,
    **LOSS,
    **ALONG,
    **VIEWS,
    **PLACING,
}


def run_case(name: str) -> None:
    f, tensors, layouts = CASES[name]
    for texts in layouts:
        compare(f, tensors, texts)


def run_on_meshes(name: str) -> None:
    """One case on simulated ranks, with every mesh that the cases are written for."""
    with sl.simulate(x=2, y=2):
        run_case(name)
    with sl.simulate(data=2, x=1, y=2):
        run_case(name)


def run_all() -> list[str]:
    """Every case; the names of those that failed, with why."""
    failed = []
    for name in CASES:
        try:
            run_case(name)
        except Exception as e:
            failed.append(f"{name}: {type(e).__name__} {e}")
    return failed
