"""Each kernel, compiled by g++, against torch in fp64, on drawn inputs.

Drawn are dtypes, sizes around the width of a pack and the change from a warp to a block, splits into
parts of which some are empty, NaN and infinities, rows that see nothing, and where in memory every
operand begins, with guards around it that must not change.

The bar is 1e-6 of what the result is summed from, in fp64, and of halves half a unit in the last
place beside: they are rounded once.

    python -m tests.kernels.properties --count 1000
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.kernels import library
from shardlib.kernels.bits import bits, signed
from shardlib.kernels.dropout import bar
from shardlib.kernels.library import code
from shardlib.kernels.pack import at_front
from shardlib.ops.counter_rng import kept
from tests.kernels.host import built

TYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = math.inf
COUNT = 40
"""Draws of each property that the tests take; ``make kernels`` takes 1,000."""
GUARD = 7
_ROUNDING = {
    torch.float32: (0.0, 0.0),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 0.0),
}


DEVICE = ["cpu"]
"""Where kernels are launched: operands are made on the CPU, and taken to another device as they lie."""


def call(name: str, *args: Any) -> None:
    """Launch on ``DEVICE``; what a kernel wrote is afterwards in the operands, guards included."""
    if DEVICE == ["cpu"]:
        library.call(name, *args)
        return
    there: dict[int, tuple[Tensor, Tensor]] = {}

    def taken(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [taken(y) for y in x]
        if not isinstance(x, Tensor):
            return x
        at = x.untyped_storage().data_ptr()
        if at not in there:
            memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            there[at] = memory, memory.to(DEVICE[0])
        return torch.empty(0, dtype=x.dtype, device=DEVICE[0]).set_(
            there[at][1].untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )

    library.call(name, *taken(args))
    for memory, copy in there.values():
        memory.copy_(copy)


def drawn(seed: int) -> random.Random:
    torch.manual_seed(seed)
    return random.Random(seed)


def placed(x: Tensor, off: int) -> Tensor:
    """The same values ``off`` elements into a buffer, between guards."""
    flat = torch.full((x.numel() + off + 8,), GUARD, dtype=x.dtype)
    view = flat[off : off + x.numel()].view(x.shape)
    view.copy_(x)
    return view


def guarded(*tensors: Tensor | None) -> bool:
    for x in tensors:
        if x is None:
            continue
        base, at = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()), x.storage_offset()
        if not ((base[:at] == GUARD).all() and (base[at + x.numel() :] == GUARD).all()):
            return False
    return True


def close(got: Tensor, want: Tensor, scale: Tensor | float, what: str = "") -> None:
    """Within 1e-6 of ``scale`` and half a unit in the last place of ``want``, in fp64."""
    share, least = _ROUNDING[got.dtype]
    wide, want = got.double(), want.double()
    most = {torch.float16: 65504.0, torch.bfloat16: 3.39e38}.get(got.dtype, 3.4e38)
    over = want.abs() >= most
    assert torch.equal(wide.isnan() & ~over, want.isnan() & ~over), (what, wide, want)
    fine = wide.isfinite() & want.isfinite()
    assert torch.equal(fine | over, want.isfinite() | over), (what, wide, want)
    room = 1e-6 * torch.as_tensor(scale, dtype=torch.float64) + share * want.abs() * 1.01 + least
    error = ((wide - want).abs() / room.expand_as(want).clamp(min=1e-30))[fine]
    assert not error.numel() or error.max() <= 1, (what, float(error.max()))


# ---------------------------------------------------------------- cross entropy


def cross_entropy(seed: int) -> None:
    r = drawn(seed)
    dtype, rows, p = r.choice(TYPES), r.randint(0, 4), r.choice([1, 1, 2, 3, 4])
    block = r.choice([1, 3, 7, 8, 9, 17, 64, 129, 300, 1023, 1024, 1025, 2049])
    least = block * (p - 1) + 1 if r.random() < 0.7 else 1  # else the last blocks are all padding
    classes = r.randint(max(1, least), block * p)
    pad, smooth = r.choice([0, 0, 3]), r.choice([0.0, 0.0, 0.1])
    x = (torch.randn(rows, block * p) * r.choice([1, 10, 60])).to(dtype)
    if rows and r.random() < 0.3:
        x[r.randrange(rows), r.randrange(block * p)] = r.choice([-INF, INF, math.nan])
    if rows and p > 1 and not smooth and r.random() < 0.2:
        x[0, :block] = -INF
    target = torch.randint(0, classes, (rows,))
    if rows and r.random() < 0.3:
        target[r.randrange(rows)] = -100
    clean = x[:, :classes].double().requires_grad_()
    how: dict[str, Any] = {"reduction": "none", "label_smoothing": smooth}
    want = F.cross_entropy(clean, target, **how)
    one = r.random() < 0.5
    g = torch.randn(1 if one else rows)
    (grad,) = torch.autograd.grad(want, clean, g.double().expand(rows))
    parts, blocks = torch.empty(p, rows, 4), []
    for i in range(p):
        local = torch.full((rows, block + pad), 5.0, dtype=dtype)
        local[:, :block] = x[:, i * block : (i + 1) * block]
        blocks.append(placed(local, r.randint(0, 9)))
        cols = min(max(classes - i * block, 0), block)
        call("ce_stats", code(x), blocks[i], target, parts[i], rows, cols, block + pad, i * block)
    loss, kept_ = torch.empty(rows), torch.empty(rows, 2)
    call("ce_loss", parts, p, target, loss, kept_, rows, -100, smooth, classes)
    even = smooth * clean.detach().abs().mean(-1).nan_to_num(1.0, 1.0, 1.0)
    close(loss, want.detach(), want.detach().abs().nan_to_num(1, 1, 1).clamp(min=1) + even, "loss")
    skip = target == -100
    for i in range(p):
        cols = min(max(classes - i * block, 0), block)
        inplace, wide = r.random() < 0.5, block + pad
        out = (
            blocks[i]
            if inplace
            else placed(torch.full((rows, wide), 5.0, dtype=dtype), r.randint(0, 9))
        )
        call("ce_back", code(x), blocks[i], out, target, kept_, g, int(not one), rows, cols, block, wide,
             wide, i * block, -100, smooth, classes)  # fmt: skip
        part, got = grad[:, i * block : i * block + cols], out[:, :cols]
        assert (got[skip] == 0).all(), "torch gives NaN where an ignored row holds one"
        size = g.abs().expand(rows).unsqueeze(-1)[~skip]
        close(got[~skip], part[~skip], size, "gradient")
        assert (out[:, cols:block] == 0).all() and (out[:, block:] == 5).all() and guarded(out)


def cross_entropy_of_no_class(seed: int) -> None:
    """A target that is no class makes its loss NaN, and no other."""
    r = drawn(seed)
    x, classes = torch.randn(3, 9), 9
    target = torch.tensor([r.choice([-1, 9, 10**9]), 4, -100])
    parts, loss, kept_ = torch.empty(1, 3, 4), torch.empty(3), torch.empty(3, 2)
    call("ce_stats", 0, x, target, parts, 3, classes, 9, 0)
    call("ce_loss", parts, 1, target, loss, kept_, 3, -100, 0.0, classes)
    assert loss.isnan().tolist() == [True, False, False] and loss[2] == 0


# ---------------------------------------------------------------- norms


def norms(seed: int) -> None:
    r = drawn(seed)
    dtype, rows, p, centre = r.choice(TYPES), r.randint(0, 5), r.choice([1, 2, 3]), r.random() < 0.6
    w_dtype = r.choice([dtype, torch.float32])
    each, eps = r.choice([1, 2, 5, 8, 17, 63, 64, 200, 1024, 1031]), 1e-5
    count, shift = each * p, r.choice([0, 0, 3, 30])
    x, g = (torch.randn(rows, count) + shift).to(dtype), torch.randn(rows, count).to(dtype)
    if rows and r.random() < 0.1:
        x[0, 0] = r.choice([math.nan, INF])
    w = (1 + torch.randn(count) / 4).to(w_dtype) if r.random() < 0.8 else None
    b = torch.randn(count).to(w_dtype) if centre and r.random() < 0.7 else None
    wide = x.double().requires_grad_()
    factors = [None if t is None else t.double().requires_grad_() for t in (w, b)]
    norm = F.layer_norm if centre else F.rms_norm
    want = norm(wide, (count,), *(factors if centre else factors[:1]), eps=eps)
    given = [t for t in (wide, *factors) if t is not None]
    dx, *more = torch.autograd.grad(want, given, g.double())

    def cut(t: Tensor | None) -> list[Any]:
        if t is None:
            return [None] * p
        return [placed(s.contiguous(), r.randint(0, 9)) for s in t.split(each, -1)]

    xs, gs, ys, ws, bs = cut(x), cut(g), cut(torch.zeros_like(x)), cut(w), cut(b)
    kinds = code(x), code(x if w is None and b is None else w_dtype)
    parts = torch.empty(p, rows, 2 if centre else 1)
    for i in range(p):
        call("norm_stats", code(x), centre, xs[i], parts[i], rows, each, each)
    mean, scale = torch.empty(rows) if centre else None, torch.empty(rows)
    call("norm_settle", parts, p, mean, scale, rows, each, eps)
    sums = torch.zeros(rows, 2)
    for i in range(p):
        call("norm_apply", *kinds, xs[i], ys[i], ws[i], bs[i], mean, scale, rows, each, each)
        part = torch.empty(rows, 2)
        if w is not None or b is None:
            call("norm_back_sums", *kinds, xs[i], gs[i], ws[i], mean, scale, part, rows, each, each)
        else:
            call(
                "norm_back_sums",
                code(x),
                code(x),
                xs[i],
                gs[i],
                None,
                mean,
                scale,
                part,
                rows,
                each,
                each,
            )
        sums += part
    fine = x.isfinite().all(-1)
    X = x.double()[fine]
    true_mean = X.mean(-1, keepdim=True) if centre else torch.zeros(len(X), 1, dtype=torch.float64)
    by = ((X - true_mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    # a mean of 30 deviations costs 30 times as many digits of what is left of it
    hard = 1 + true_mean.abs() * by + (X.abs().amax(-1, keepdim=True) * by if centre else 0) * 0
    if centre and mean is not None:
        close(mean[fine, None], true_mean, X.abs().mean(-1, keepdim=True), "mean")
    close(scale[fine, None], by, by * hard, "scale")
    normal = (X - true_mean) * by
    size = (normal.abs() + hard) * (1 if w is None else w.double().abs())
    close(
        torch.cat(ys, -1)[fine],
        want.detach()[fine],
        size + (0 if b is None else b.double().abs()),
        "out",
    )
    assert guarded(*ys)
    columns, made = [], []
    for i in range(p):
        chunk = r.choice([1, 2, 3, 64])
        work, out = torch.empty(-(-rows // chunk), 2, each), torch.zeros(2, each)
        call("norm_columns", code(x), xs[i], gs[i], mean, scale, work, out, rows, each, each, chunk)
        columns.append(out)
        into = gs[i] if r.random() < 0.5 else placed(torch.zeros_like(xs[i]), r.randint(0, 9))
        kind = kinds if w is not None or b is None else (code(x), code(x))
        call(
            "norm_back",
            *kind,
            xs[i],
            gs[i],
            into,
            ws[i],
            mean,
            scale,
            sums,
            count,
            rows,
            each,
            each,
        )
        made.append(into)
    assert guarded(*made)
    gw = g.double()[fine] * (1 if w is None else w.double())
    reach = gw.abs() + (normal.abs() + hard) * (gw.abs() * (normal.abs() + hard)).mean(
        -1, keepdim=True
    )
    close(
        torch.cat(made, -1)[fine],
        dx[fine],
        (reach + gw.abs().mean(-1, keepdim=True)) * by * hard,
        "dx",
    )
    if fine.all():
        found = torch.cat(columns, -1)
        G, spread = g.double().abs(), normal.abs() + hard
        if w is not None:
            close(found[0], more[0], (G * spread).sum(0), "weight")
        if b is not None:
            close(found[1], more[-1], G.sum(0), "shift")


# ---------------------------------------------------------------- attention


def merges(seed: int) -> None:
    r = drawn(seed)
    kinds = [(torch.float32, t) for t in TYPES] + [(t, t) for t in TYPES[1:]]
    out_t, part_t = r.choice(kinds)
    batch, each, rows = r.randint(1, 2), r.randint(1, 3), r.randint(1, 12)
    heads = batch * each
    cols = r.choice([1, 5, 8, 32, 33, 64, 65, 80, 128, 129, 257, 1025])
    runs: Any = []
    total = r.randint(0, 3)
    source = 0
    while source < rows:  # runs of the part's rows, with gaps between them in out
        n = r.randint(1, rows - source)
        runs.append([source, total, n])
        source, total = source + n, total + n + r.randint(0, 3)
    total += r.randint(0, 3)
    if r.random() < 0.3:
        runs, total = None, rows
    at = torch.arange(rows)
    if runs is not None:
        at = torch.cat([torch.arange(to, to + n) for _, to, n in runs])
    out, part = torch.randn(heads, total, cols).to(out_t), torch.randn(heads, rows, cols).to(part_t)
    lse, part_lse = (torch.randn(heads, n) * r.choice([1, 8, 40]) for n in (total, rows))
    lse[torch.rand(heads, total) < 0.3] = -INF
    part_lse[torch.rand(heads, rows) < 0.3] = -INF
    if r.random() < 0.1:
        part_lse[0, 0] = r.choice([math.nan, INF])
    if r.random() < 0.1:
        lse[0, int(at[-1])] = r.choice([math.nan, INF])
    out[lse == -INF] = 0
    part[part_lse == -INF] = 0
    full, full_lse = out.double(), lse.double()
    both = torch.logaddexp(full_lse[:, at], part_lse.double())
    old, new = (
        (v - both).exp().nan_to_num(0.0).unsqueeze(-1) for v in (full_lse[:, at], part_lse.double())
    )
    size = torch.ones_like(full)
    size[:, at] += full[:, at].abs() * old + part.double().abs() * new
    full[:, at] = full[:, at] * old + part.double() * new
    full_lse[:, at] = both
    out[lse == -INF] = math.nan  # not read: it may be anything
    part[part_lse == -INF] = math.nan
    seen = torch.zeros(heads, total, dtype=torch.bool)
    seen[:, at] = True
    a, b = placed(out, r.randint(0, 9)), placed(part, r.randint(0, 9))
    strides = [each * total * cols, total * cols, cols, each * total, total, 1]
    if r.random() < 0.5:
        strides += [each * rows * cols, rows * cols, cols]
    else:  # heads of a row beside each other, as torch's flash kernel leaves them
        b = placed(part.view(batch, each, rows, cols).transpose(1, 2), r.randint(0, 9))
        strides += [each * rows * cols, cols, each * cols]
    strides += [each * rows, rows, 1]
    table = None if runs is None else torch.tensor(runs)
    call("merge", code(a), code(b), a, lse, b, part_lse, table, 0 if runs is None else len(runs),
         batch, each, rows, cols, strides)  # fmt: skip
    close(a[seen], full[seen], size[seen], "out")
    close(lse, full_lse, full_lse.abs().nan_to_num(1, 1, 1).clamp(min=1), "lse")
    assert torch.equal(a[~seen].nan_to_num(9), out[~seen].nan_to_num(9)) and guarded(a)


def sums(seed: int) -> None:
    r = drawn(seed)
    dtype, batch, heads, rows = r.choice(TYPES), r.randint(1, 2), r.randint(1, 3), r.randint(0, 9)
    cols, gap = r.choice([1, 5, 8, 64, 65, 80, 128, 1025]), r.randint(0, 5)
    whole = placed(torch.randn(batch, heads, rows + gap, cols), r.randint(0, 3))
    x = placed(torch.randn(batch, rows, heads, cols).to(dtype), r.randint(0, 9)).transpose(1, 2)
    want = whole.clone()
    want[:, :, :rows] += x.float()
    strides = [*whole.stride()[:3], *x.stride()[:3]]
    call("add", code(x), whole, x, batch, heads, rows, cols, strides)
    assert torch.equal(whole, want) and guarded(whole)


# ---------------------------------------------------------------- the optimizer's step


def adamw(seed: int) -> None:
    r = drawn(seed)
    in_halves, n, t = (
        r.random() < 0.5,
        r.choice([0, 1, 5, 7, 8, 9, 31, 64, 200, 1000, 1003]),
        r.randint(1, 100),
    )
    g_t = r.choice([TYPES[0], TYPES[2]] if in_halves else TYPES)
    out_t = None if in_halves else r.choice([None, r.choice(TYPES[1:]) if g_t == TYPES[0] else g_t])
    lr, decay, eps = 10 ** r.uniform(-5, -1), r.choice([0.0, 0.1]), 1e-8
    b1, b2 = 0.9, r.choice([0.95, 0.999])
    p, m, v = torch.randn(n), torch.randn(n) / 10, torch.rand(n) / 10 + 1e-3
    g = torch.randn(n).to(g_t)
    if n and r.random() < 0.1:
        g[r.randrange(n)] = r.choice([math.nan, INF])
    scale = r.choice([None, torch.rand(1) + 0.5, torch.tensor([65536.0])])
    G = g.double() if scale is None else g.double() / scale.double()
    M = m.double() + (G - m.double()) * (1 - b1)
    N = v.double() * b2 + (1 - b2) * G * G
    step = lr / (1 - b1**t) * M / (N.sqrt() / math.sqrt(1 - b2**t) + eps)
    P = p.double() * (1 - lr * decay) - step
    off = r.choice([(0,) * 6, (1,) * 6, (3,) * 6, tuple(r.randint(0, 9) for _ in range(6))])
    mine, mm, vv, gg = (placed(x, o) for x, o in zip((p, m, v, g), off, strict=False))
    hyper = (1 - lr * decay, 1 - b1, b2, 1 - b2, eps, lr / (1 - b1**t), math.sqrt(1 - b2**t), scale)
    if in_halves:
        high, low = cut_in_halves(p)
        high, low = placed(high, off[4]), placed(low, off[5])
        call("adamw_halves", code(g), 1, [n], [gg, high, low, mm, vv], *hyper)
        mine.copy_(glued(high, low))
        assert torch.equal(high.isnan(), mine.isnan()) and guarded(high, low)
    else:
        out = None if out_t is None else placed(torch.zeros(n, dtype=out_t), off[4])
        call(
            "adamw",
            code(g),
            0 if out is None else code(out),
            1,
            [n],
            [gg, mine, mm, vv, out],
            *hyper,
        )
        if out is not None:
            same = torch.equal(out.nan_to_num(9), mine.to(out.dtype).nan_to_num(9))
            assert same and guarded(out)
    finite = lambda x: x.abs().nan_to_num(1, 1, 1)  # noqa: E731
    close(mine, P, p.double().abs() + finite(step), "parameter")
    close(mm, M, m.double().abs() + finite(G), "first moment")
    close(vv, N, finite(N), "second moment")
    assert guarded(mine, mm, vv, gg)


def cut_in_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    from shardlib.optim.precision import halves

    return halves(x)


def glued(high: Tensor, low: Tensor) -> Tensor:
    from shardlib.optim.precision import joined

    return joined(high, low)


def halves(seed: int) -> None:
    """A step of nothing keeps every bit pattern that is a number; rounding is torch's; NaN stays."""
    torch.manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (1031,), dtype=torch.int64).to(torch.int32)
    edges = [0x7FFFFFFF, -1, 0x7F7FFFFF, 0x7F800000, -0x800000, 0x00008000, 0x7F800001, 0x18000]
    x[: len(edges)] = torch.tensor(edges, dtype=torch.int64).to(torch.int32)
    y = x.view(torch.float32)
    nothing = (1.0, 0.1, 0.9, 0.1, 1.0, 0.0, 1.0, None)

    def rest(n: int) -> list[Tensor]:
        return [torch.zeros(n), torch.ones(n)]

    fine = ~y.isnan() & (y.abs() < 3.3e38)
    high, low = cut_in_halves(y[fine])
    n, before = len(high), (high.clone(), low.clone())
    call("adamw_halves", 0, 1, [n], [torch.zeros(n), high, low, *rest(n)], *nothing)
    assert torch.equal(high.view(torch.int16), before[0].view(torch.int16))
    assert torch.equal(low, before[1])
    assert torch.equal(glued(high, low).view(torch.int32), y[fine].view(torch.int32))
    nan = y[y.isnan()]
    n = len(nan)
    high, low = cut_in_halves(torch.zeros(n))
    call(
        "adamw_halves",
        0,
        1,
        [n],
        [nan, high, low, *rest(n)],
        1.0,
        0.1,
        0.9,
        0.1,
        1.0,
        1.0,
        1.0,
        None,
    )
    assert high.isnan().all() and glued(high, low).isnan().all()
    for dtype in TYPES[1:]:
        out = torch.empty(1031, dtype=dtype)
        drawn_ = torch.randn(1031) * 10.0 ** torch.randint(-8, 6, (1031,))
        p = torch.where(y.isnan(), 0.0, y) if seed % 2 else drawn_
        want = p.to(dtype)
        call("adamw", 0, code(dtype), 1, [1031], [torch.zeros(1031), p, *rest(1031), out], *nothing)
        assert torch.equal(out.view(torch.int16), want.view(torch.int16))


# ---------------------------------------------------------------- places


def places(r: random.Random, dims: int, least: int = 0) -> tuple[list[int], Any, Tensor, int]:
    """A block somewhere in a larger tensor: its size, what says so, every index, the tensor's size."""
    size = [r.randint(least if r.random() < 0.05 else 1, 6) for _ in range(dims - 1)]
    size.append(r.choice([1, 3, 8, 16, 17, 64, 130, 1025]))
    stride, index = 1, torch.zeros((), dtype=torch.int64)
    start: list[int] = []
    step: list[int] = []
    table: list[Tensor | None] = []
    for d, n in enumerate(reversed(size)):
        whole = n + r.randint(0, 3) if r.random() < 0.7 else 3 * n + 5
        run = r.random() < 0.6
        first = r.randint(0, whole - n)
        at = torch.arange(first, first + n) if run else torch.randperm(whole)[:n]
        start.insert(0, first * stride if run else 0)
        step.insert(0, stride if run else 0)
        table.insert(0, None if run else at * stride)
        index = (at * stride).reshape(-1, *[1] * d) + index
        stride *= whole
    return size, (start, step, table), index.reshape(size), stride


def boxes(seed: int) -> None:
    r = drawn(seed)
    dtype = r.choice([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64])
    size, where, index, total = places(r, r.randint(1, 4))
    x = placed(torch.randint(0, 200, (total,)).to(dtype), r.randint(0, 9))
    block = placed(torch.zeros(size, dtype=dtype), r.randint(0, 9))
    front = at_front(size)
    call("copy", x.element_size(), x, block, len(size), size, *where, *front)
    assert torch.equal(block, x[index]) and guarded(block)
    back = placed(torch.zeros(total, dtype=dtype), r.randint(0, 9))
    call("copy", x.element_size(), block, back, len(size), size, *front, *where)
    want = torch.zeros(total, dtype=dtype)
    want[index] = block
    assert torch.equal(back, want) and guarded(back)


def dropout(seed: int) -> None:
    """The bits of the eager draw, for blocks anywhere in a larger tensor."""
    r = drawn(seed)
    dtype, p = r.choice(TYPES), r.choice([0.0, 0.1, 0.5, 0.9, 1.0, r.random()])
    size, where, index, _ = places(r, r.randint(1, 4), least=0)
    far = r.choice([0, 0, 2**33 + 1, 2**40])
    where[0][0] += far if where[2][0] is None else 0
    index = index + far if where[2][0] is None else index
    key = r.randint(-(2**63), 2**63 - 1)
    x = torch.randn(size).to(dtype)
    if x.numel() and r.random() < 0.2:
        x.view(-1)[0] = r.choice([INF, math.nan, -0.0])
    both = kept(p).make(bits(index.reshape(-1) >> 1, key))
    keep = both.gather(1, (index.reshape(-1) & 1)[:, None]).reshape(size)
    scale = 1 / (1 - p) if p < 1 else 0.0
    want = (x * keep).mul_(scale)
    y = placed(x, r.randint(0, 9))
    source = y if r.random() < 0.5 else placed(x, r.randint(0, 9))
    call("dropout", code(x), source, y, len(size), size, *where, signed(key), bar(p), p == 1, scale)
    word = torch.int32 if dtype == torch.float32 else torch.int16
    nan = want.isnan()
    assert torch.equal(y.isnan(), nan) and torch.equal(y.view(word)[~nan], want.view(word)[~nan])
    assert guarded(y)


def many_tensors(seed: int) -> None:
    """A launch of many tensors steps each as a launch of its own, empty ones and all."""
    r = drawn(seed)
    count = r.choice([1, 2, 63, 64, 65, 130])
    sizes = [r.choice([0, 1, 7, 8, 33]) for _ in range(count)]
    rows = [
        [torch.rand(n) for _ in range(4)] + [torch.zeros(n, dtype=torch.bfloat16)] for n in sizes
    ]
    alone = [[t.clone() for t in row] for row in rows]
    hyper = (0.99, 0.1, 0.95, 0.05, 1e-8, 1e-2, 0.5, None)
    call("adamw", 0, 2, count, sizes, [t for row in rows for t in row], *hyper)
    for row, n in zip(alone, sizes, strict=True):
        call("adamw", 0, 2, 1, [n], row, *hyper)
    assert all(
        torch.equal(a, b)
        for x, y in zip(rows, alone, strict=True)
        for a, b in zip(x, y, strict=True)
    )


PROPERTIES: list[Callable[[int], None]] = [
    cross_entropy, cross_entropy_of_no_class, norms, merges, sums, adamw, many_tensors, halves, boxes, dropout,
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every property on as many draws."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--count", type=int, default=1000)
    p.add_argument("--start", type=int, default=0)
    p.add_argument("--device", default="cpu", help="cuda: the kernels that nvcc built")
    given = p.parse_args(arguments)
    torch.set_num_threads(1)
    DEVICE[:] = [given.device]
    assert built() if given.device == "cpu" else sl.kernels.build()
    for f in PROPERTIES:
        for seed in range(given.start, given.start + given.count):
            try:
                f(seed)
            except AssertionError as e:
                raise AssertionError(f"{f.__name__}({seed}): {e}") from e
        print(f"{f.__name__}: {given.count} draws hold", flush=True)


if __name__ == "__main__":
    main()
