"""Output and every gradient are dense's, for any layout, mask, shape,
ring and algorithm; bytes are the plan's.
"""

import math
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardlib as sl
from shardlib.layouts import Ring
from shardlib.ops.attention import op
from shardlib.ops.attention.case import attention_case
from shardlib.ops.attention.engine import planned
from shardlib.ops.attention.engines import AllGather, Canonical, DoubleRing
from shardlib.ops.attention.masks import Full
from shardlib.random import next_key
from shardlib.testing import dense_attention as attention
from tests.ops.attention.test_pieces import masks
from tests.strategies import examples

ALGORITHMS = ["ring", "ring_bidirectional", "double_ring", "allgather", AllGather(1), "ulysses", "usp", "pass_q",
              "rsa", Canonical(8), "auto"]  # fmt: skip
SCHEDULES = ["contiguous", "zigzag", "striped", "documents", "runs"]


def ring(draw: Any, axes: tuple[str, ...], length: int, size: int) -> Ring:
    schedule = draw(st.sampled_from(SCHEDULES))
    if schedule == "documents":
        borders = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
        return Ring(axes, 2, schedule, (0, *borders, length))
    if schedule == "runs":
        cut = draw(st.integers(0, length))
        owners = [draw(st.integers(0, size - 1)) for _ in range(2)]
        ranges = [[r for r, o in zip((range(cut), range(cut, length)), owners, strict=True) if o == i]
                  for i in range(size)]  # fmt: skip
        return Ring(axes, 2, ranges)
    return Ring(axes, 2, schedule)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gap(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value; equal infinities are no difference."""
    got = got.detach()
    gone = (got - want).abs().masked_fill(got == want, 0)
    finite = want[want.isfinite()].abs()
    return (
        float(gone.max() / max(1.0, float(finite.max()) if finite.numel() else 1.0))
        if got.numel()
        else 0.0
    )


@examples(150)
@given(st.data())
def test_ring_attention_equals_dense(data: Any) -> None:
    """And its bytes and messages are the plan's, forward and backward."""
    draw = data.draw
    mesh = draw(
        st.sampled_from(
            [{"s": 1}, {"s": 2}, {"s": 3}, {"s": 4}, {"r": 2, "s": 2}, {"r": 2, "s": 3}, {"s": 8}]
        )
    )
    axes, p = tuple(mesh), math.prod(mesh.values())
    n = draw(st.sampled_from([1, 2, 3, 7, 16, 24, 33]) | st.integers(1, 40))
    t = n if draw(st.booleans()) else draw(st.integers(1, 40))
    g = draw(st.integers(1, 3))
    b, h, d = 2, g * draw(st.integers(1, 3)), draw(st.sampled_from([4, 8]))
    e = d if draw(st.booleans()) else 5
    mask = draw(masks(n, None if t == n else t)) if h == 3 or draw(st.booleans()) else Full()
    if draw(st.integers(0, 3)) == 0:
        mask &= sl.masks.ALiBi([0.5 ** (i + 1) for i in range(h)])
    if draw(st.integers(0, 3)) == 0:
        mask &= sl.masks.Bias(
            normal(*draw(st.sampled_from([(), (h,), (1, h), (b, 1)])), n, t, seed=8)
        )
    q, k, v = normal(b, h, n, d, seed=1), normal(b, g, t, d, seed=2), normal(b, g, t, e, seed=3)
    bias = None
    if draw(st.integers(0, 3)) == 0:
        lead = draw(st.sampled_from([(b, h), (1, h), (1, 1), ()]))
        bias = normal(*lead, draw(st.sampled_from([1, n])), t, seed=4)
        bias = bias > -0.5 if draw(st.booleans()) else bias
    sink = normal(h, seed=5) if draw(st.integers(0, 2)) == 0 else None
    lse_too = draw(st.booleans())
    p_drop = draw(st.sampled_from([0.0, 0.0, 0.3]))
    algorithm = draw(st.sampled_from(ALGORITHMS))
    if algorithm == "double_ring":
        algorithm = DoubleRing(draw(st.sampled_from([i for i in range(1, p + 1) if p % i == 0])))
    if algorithm == "usp" and len(mesh) < 2:
        algorithm = "ulysses"
    if bias is not None and algorithm in ("usp", "ulysses", "pass_q", Canonical(8)):
        algorithm = "auto"

    torch.manual_seed(0)
    with sl.simulate(s=1) as one:
        seed = next_key(one)
    learned = [
        x.requires_grad_() for x in (q, k, v, bias, sink) if x is not None and x.is_floating_point()
    ]
    want, want_lse = attention(q, k, v, mask, bias, sink, (p_drop, seed) if p_drop else None)
    c, c_lse = normal(*want.shape, seed=6), normal(*want_lse.shape, seed=7)
    loss = (want * c).sum()
    if lse_too:
        loss = loss + (want_lse * c_lse).masked_fill(want_lse == float("-inf"), 0).sum()
    dense = torch.autograd.grad(loss, learned)

    with sl.simulate(**mesh):
        ours, theirs = ring(draw, axes, n, p), ring(draw, axes, t, p)
        xs = [sl.shard(x.detach(), lay, pad=True).requires_grad_()
              for x, lay in ((q, ours), (k, theirs), (v, theirs))]  # fmt: skip
        extra = [
            None if x is None else x.detach().requires_grad_(x.requires_grad) for x in (bias, sink)
        ]
        torch.manual_seed(0)
        with sl.trace() as forward:
            out, lse = sl.ring_attention(*xs, mask=mask, bias=extra[0], sink=extra[1], dropout=p_drop, return_lse=True,
                                         algorithm=algorithm)  # fmt: skip
        case = attention_case(*xs, mask, bias is not None)
        plan = planned(case, algorithm).run
        cost = plan.forward
        assert (cost.bytes, cost.messages) == (forward.bytes, forward.messages)
        total = (out * sl.shard(c, ours, pad=True)).sum()
        if lse_too:
            kept = c_lse.masked_fill(want_lse == float("-inf"), 0)
            finite = lse.masked_fill(lse == float("-inf"), 0.0)
            total = total + (finite * sl.shard(kept, ours, pad=True)).sum()
        with sl.trace() as backward:
            total.backward()
        got = [sl.unshard(x.grad) for x in xs] + [
            x.grad for x in extra if x is not None and x.requires_grad
        ]
        cost = plan.backward
        if bias is None and sink is None and not lse_too:
            assert (cost.bytes, cost.messages) == (backward.bytes, backward.messages)
        assert gap(sl.unshard(out), want.detach()) < 1e-12
        assert gap(sl.unshard(lse), want_lse.detach()) < 1e-12
        for mine, its in zip(got, dense, strict=True):
            assert gap(mine, its) < 1e-12


def test_bf16_errors_do_not_grow_with_the_ring() -> None:
    """Ring of 8 against a ring of 1, both in bf16, relative Frobenius; bar 1.4."""
    q, k, v = (normal(1, h, 1024, 32, seed=h) for h in (4, 2, 2))
    q, c = 4 * q, normal(1, 4, 1024, 32, seed=7)
    for mask in (sl.masks.Full(), sl.masks.Causal()):
        want = []
        xs = [x.bfloat16().double().requires_grad_() for x in (q, k, v)]
        out = attention(*xs, mask)[0]
        want = [out.detach(), *torch.autograd.grad((out * c.bfloat16().double()).sum(), xs)]
        errors = {}
        for p in (1, 8):
            with sl.simulate(s=p):
                lay = Ring("s", 2, "zigzag")
                ys = [sl.shard(x.bfloat16(), lay).requires_grad_() for x in (q, k, v)]
                got = sl.ring_attention(*ys, mask=mask, algorithm="ring")
                (got * sl.shard(c.bfloat16(), lay)).sum().backward()
                values = [sl.unshard(got).detach(), *(sl.unshard(y.grad) for y in ys)]
            errors[p] = [
                float((x.double() - w).norm() / w.norm()) for x, w in zip(values, want, strict=True)
            ]
        assert all(a <= 1.4 * b for a, b in zip(errors[8], errors[1], strict=True)), errors


def test_fp32_errors_are_within_four_times_local_attention_s() -> None:
    q, k, v = (normal(2, h, 256, 32, seed=h) for h in (8, 2, 2))
    c = normal(2, 8, 256, 32, seed=7)
    for mask, causal in ((sl.masks.Full(), False), (sl.masks.Causal(), True)):
        xs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*xs, mask)[0]
        want = [out.detach(), *torch.autograd.grad((out * c).sum(), xs)]
        zs = [x.float().requires_grad_() for x in (q, k, v)]
        local = torch.nn.functional.scaled_dot_product_attention(
            *zs, is_causal=causal, enable_gqa=True
        )
        theirs = [local.detach(), *torch.autograd.grad((local * c.float()).sum(), zs)]
        for algorithm in ("ring", "ring_bidirectional", "allgather", "ulysses", "pass_q", "rsa"):
            with sl.simulate(s=4):
                lay = Ring("s", 2, "zigzag")
                ys = [sl.shard(x.float(), lay).requires_grad_() for x in (q, k, v)]
                got = sl.ring_attention(*ys, mask=mask, algorithm=algorithm)
                (got * sl.shard(c.float(), lay)).sum().backward()
                values = [sl.unshard(got).detach(), *(sl.unshard(y.grad) for y in ys)]
            for mine, its, w in zip(values, theirs, want, strict=True):
                assert (mine - w).abs().max() <= 4 * (its - w).abs().max(), algorithm


def entries(call: Any) -> list[tuple[str, str]]:
    """(from, to) of every call between files of ops/attention."""
    found, folder = [], str(Path(op.__file__).parent)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(folder)
            and frame.f_back is not None
        ):
            found.append((frame.f_back.f_code.co_filename, frame.f_code.co_filename))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [
        (a[len(folder) + 1 :] if a.startswith(folder) else "", b[len(folder) + 1 :])
        for a, b in found
        if a != b
    ]


def test_a_call_flows_one_way() -> None:
    """Entered, described, planned, carried out: each in its file,
    once, and no file calls one that called it.
    """
    with sl.simulate(s=4):
        x = sl.shard(normal(1, 2, 8, 4, seed=1), Ring("s", 2, "zigzag"))
        bias, sink = torch.zeros(8, 8), torch.zeros(2)

        def call() -> None:
            sl.ring_attention(
                x, x, x, mask=sl.masks.Causal(), bias=bias, sink=sink, algorithm="ring"
            )

        call()  # which plans: a second call is looked up
        found = entries(call)
    stages = ["op.py", "kernels.py", "engines/ring.py", "local.py"]
    assert list(dict.fromkeys(to for _, to in found if to in stages)) == stages
    assert not [came for came, to in found if to == "op.py" and came]
    below: dict[str, set[str]] = {}
    for came, to in found:
        below.setdefault(to, set()).add(came)
    list(TopologicalSorter(below).static_order())  # raises CycleError with the circle


@pytest.mark.parametrize("algorithm", ["ring", "ring_bidirectional", "halo", "double_ring", "auto"])
def test_keys_that_are_whole_do_not_travel(algorithm: str) -> None:
    q, k = normal(1, 2, 8, 4, seed=1), normal(1, 2, 6, 4, seed=2)
    want, want_lse = attention(q, k, k, Full())
    with sl.simulate(s=4), sl.trace() as t:
        out, lse = sl.ring_attention(
            sl.shard(q, Ring("s", 2)),
            *[sl.shard(k, "...")] * 2,
            return_lse=True,
            algorithm=algorithm,
        )
        assert t.bytes == 0
        assert gap(sl.unshard(out), want) < 1e-12 and gap(sl.unshard(lse), want_lse) < 1e-12


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("rows", [8, 10])
def test_a_gradient_left_pending_is_dense(which: int, rows: int) -> None:
    """Of padded queries it was counted once per rank of the pending axis."""
    x = normal(1, 2, rows, 4, seed=1)
    w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def scaled(x: Any, w: Any) -> list[Any]:
        given = [x, x, x]
        given[which] = given[which] * w
        return given

    F.scaled_dot_product_attention(*scaled(x, w)).square().sum().backward()
    with sl.simulate(s=4, y=2):
        xs = sl.shard(x, ". . s .", pad=True)
        leaf = {"w": sl.shard(w.detach(), "")}

        def loss(p: Any) -> Any:
            return sl.ring_attention(*scaled(xs, p["w"])).square().sum()

        for pending in ((), ("y",), ("s", "y")):
            _, g = sl.value_and_grad(loss, pending=pending)(leaf)
            assert torch.allclose(sl.unshard(g["w"]), w.grad, rtol=1e-10)
