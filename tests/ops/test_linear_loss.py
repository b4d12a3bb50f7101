"""The chunked loss equals torch's on whole logits, in value and every gradient, under any layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardlib as sl
from shardlib.memory_tracker import Live
from tests.tensor.test_weight_gradients import leaves_of, split

MESHES: list[tuple[dict[str, int], str, str, str | None]] = [  # mesh, input, weight, bias
    ({"data": 2}, "data . .", "...", "..."),
    ({"x": 2}, "...", "x .", "x"),
    ({"data": 2, "x": 2}, "data . .", "x .", "x"),
    ({"data": 2, "s": 2}, "data s .", ". .", None),
    ({"x": 2, "y": 2}, "x . y", "y x", None),
    ({"s": 2, "x": 2}, ". zigzag(s) .", "x .", "x"),
    ({"data": 3}, "(data) . .", "data .", "data"),
]


def dense(x: Tensor, w: Tensor, b: Tensor | None, t: Tensor, **more: Any) -> tuple[Tensor, Any]:
    leaves = [v.clone().requires_grad_() for v in (x, w, b) if v is not None]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if b is not None else None)
    loss = F.cross_entropy(logits.reshape(-1, w.shape[0]), t.reshape(-1), **more)
    return loss, torch.autograd.grad(loss * 1.5, leaves)


@settings(max_examples=25)
@given(
    st.sampled_from(MESHES), st.integers(1, 7), st.sampled_from(["mean", "sum"]),
    st.sampled_from([0.0, 0.1]), st.sampled_from([None, "data"]), st.integers(0, 1000),
)  # fmt: skip
def test_it_is_the_loss_of_whole_logits(
    case: Any, chunks: int, how: str, smooth: float, pending: str | None, seed: int
) -> None:
    axes, of_x, of_w, of_b = case
    torch.manual_seed(seed)
    x, w = (torch.randn(*s, dtype=torch.float64) for s in ((6, 4, 8), (12, 8)))
    b = None if of_b is None else torch.randn(12, dtype=torch.float64)
    t = torch.randint(12, (6, 4)).masked_fill(torch.rand(6, 4) < 0.2, -100)
    t[0, 0] = 3
    more: Any = dict(reduction=how, label_smoothing=smooth)
    want, grads = dense(x, w, b, t, **more)
    with sl.simulate(**axes):
        params = {"x": sl.shard(x, of_x), "w": sl.shard(w, of_w)}
        if b is not None and of_b is not None:
            params["b"] = sl.shard(b, of_b)

        def loss(p: Any) -> Tensor:
            return 1.5 * sl.linear_cross_entropy(
                p["x"], p["w"], t, p.get("b"), chunks=chunks, **more
            )

        over = pending if pending in axes and "data" not in of_w else None
        value, found = sl.value_and_grad(
            lambda p: loss({**params, **p}), **({"pending": over} if over else {})
        )({n: p for n, p in params.items() if n != "x" or not over})
        assert torch.allclose(sl.unshard(value), 1.5 * want, rtol=1e-12)
        for (n, g), d in zip([(n, found.get(n)) for n in params], grads, strict=True):
            assert g is None or torch.allclose(sl.unshard(g), d, rtol=1e-12, atol=1e-12), n


def test_targets_of_one_class_and_a_padded_vocabulary() -> None:
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.randn(13, 8, dtype=torch.float64)
    t = torch.tensor([12, 0, 5, 12])
    want, grads = dense(x, w, None, t)
    with sl.simulate(x=2):
        params = {"x": sl.shard(x, "..."), "w": sl.shard(w, "x .", pad=True)}
        value, found = sl.value_and_grad(
            lambda p: 1.5 * sl.linear_cross_entropy(p["x"], p["w"], t, chunks=3)
        )(params)
        assert torch.allclose(sl.unshard(value), 1.5 * want, rtol=1e-12)
        for g, d in zip((found["x"], found["w"]), grads, strict=True):
            assert torch.allclose(sl.unshard(g), d, rtol=1e-12, atol=1e-12)


def test_padded_rows_take_no_part() -> None:
    x, w = torch.randn(5, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    t = torch.tensor([0, 1, 5, 2, 2])
    want, grads = dense(x, w, None, t)
    with sl.simulate(data=2):
        padded = sl.shard(x, "data .", pad=True)
        raw = padded.raw.clone()
        raw[-1, -1] = float("nan")  # what padding holds is never read
        params = {"x": padded.becomes(raw), "w": sl.shard(w, "...")}
        value, found = sl.value_and_grad(
            lambda p: 1.5 * sl.linear_cross_entropy(p["x"], p["w"], t, chunks=2)
        )(params)
        assert torch.allclose(sl.unshard(value), 1.5 * want, rtol=1e-12)
        for g, d in zip((found["x"], found["w"]), grads, strict=True):
            assert torch.allclose(sl.unshard(g), d, rtol=1e-12, atol=1e-12)


def test_plain_tensors_take_the_same_way() -> None:
    x, w, b = torch.randn(7, 8), torch.randn(6, 8), torch.randn(6)
    t = torch.tensor([0, 1, -100, 2, 2, 3, 4])
    want, grads = dense(x, w, b, t)
    leaves = [v.requires_grad_() for v in (x, w, b)]
    loss = sl.linear_cross_entropy(leaves[0], leaves[1], t, leaves[2], chunks=3)
    torch.testing.assert_close(loss, want)
    for g, d in zip(torch.autograd.grad(loss * 1.5, leaves), grads, strict=True):
        torch.testing.assert_close(g, d)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, t = torch.randn(32, 8), torch.randn(6, 8), torch.randint(6, (32,))
    want, grads = dense(x.to(dtype).double(), w.to(dtype).double(), None, t)
    with sl.simulate(data=2):
        params = {"x": sl.shard(x.to(dtype), "data ."), "w": sl.shard(w.to(dtype), "...")}
        value, found = sl.value_and_grad(
            lambda p: 1.5 * sl.linear_cross_entropy(p["x"], p["w"], t, chunks=4)
        )(params)
        assert value.dtype == dtype and all(g.dtype == dtype for g in found.values())
        assert abs(float(value.detach()) / float(1.5 * want.detach()) - 1) < 0.02
        for g, d in zip((found["x"], found["w"]), grads, strict=True):
            assert float((sl.unshard(g).double() - d).abs().max() / d.abs().max()) < 0.02


def test_memory_of_logits_is_one_chunk() -> None:
    x, w, t = torch.randn(512, 8), torch.randn(2048, 8), torch.randint(2048, (512,))
    with sl.simulate(data=1):
        params = {"x": sl.shard(x, "..."), "w": sl.shard(w, "...")}
        peaks = {}
        for chunks in (1, 16):
            step = sl.value_and_grad(
                lambda p, c=chunks: sl.linear_cross_entropy(p["x"], p["w"], t, chunks=c)
            )
            step(params)
            with Live() as live:
                step(params)
            peaks[chunks] = live.peak
        logits = 4 * 512 * 2048
        assert peaks[1] > 2 * logits and peaks[16] < peaks[1] / 8


def test_weights_are_summed_once_for_all_chunks() -> None:
    """Bytes do not depend on how many chunks there are, but for the loss's own few numbers."""
    x, w, t = torch.randn(64, 8), torch.randn(32, 8), torch.randint(32, (64,))
    with sl.simulate(data=4):
        params = {"x": sl.shard(x, "data ."), "w": sl.shard(w, "...")}
        moved = []
        for chunks in (1, 8):
            step = sl.value_and_grad(
                lambda p, c=chunks: sl.linear_cross_entropy(p["x"], p["w"], t, chunks=c)
            )
            with sl.trace() as events:
                step(params)
            moved.append(events.bytes)
    assert moved[0] == moved[1]


@pytest.mark.parametrize("case", MESHES, ids=str)
def test_gradients_of_its_factors_may_wait_for_a_second_pass(case: Any) -> None:
    axes, of_x, of_w, of_b = case
    t = torch.randint(12, (6, 4), generator=torch.Generator().manual_seed(0))
    given = (("x", (6, 4, 8), of_x), ("w", (12, 8), of_w), ("b", (12,), of_b))
    with sl.simulate(**axes):
        held: Any = leaves_of(
            {n: sl.shard(torch.randn(*s, dtype=torch.float64), lay) for n, s, lay in given if lay},
            tuple(axes),
        )
        x, *factors = [p.raw for p in held.values()]
        found = split(
            lambda: sl.linear_cross_entropy(held["x"], held["w"], t, held.get("b")).raw,
            [x],
            factors,
        )
    assert found.gap < 1e-12
    # a weight that was moved is the result of a Function, which only a saved operand keeps
    assert found.count == (0 if of_w in ("y x", "data .") else len(factors))


def on_ranks(moved: bool) -> float:
    torch.manual_seed(0)
    x, w, t = torch.randn(8, 6), torch.randn(10, 6), torch.randint(10, (8,))
    want, grads = dense(x, w, None, t)
    params = {"x": sl.shard(x, "data ."), "w": sl.shard(w, "x .")}
    value, found = sl.value_and_grad(
        lambda p: 1.5 * sl.linear_cross_entropy(p["x"], p["w"], t, chunks=3)
    )(params)
    errors = [(sl.unshard(value) - 1.5 * want).detach().abs().max()]
    errors += [(sl.unshard(found[n]) - d).abs().max() for n, d in zip("xw", grads, strict=True)]
    return float(max(errors))


def test_real_ranks_agree(pool: Any) -> None:
    assert max(pool.run(on_ranks, True, data=2, x=2)) < 1e-5


def test_mistakes_name_the_line_to_write() -> None:
    x, w, t = torch.randn(4, 8), torch.randn(6, 8), torch.tensor([0, 1, 2, 3])
    with sl.simulate(data=2):
        a, b = sl.shard(x, "data ."), sl.shard(w, "...")
        for bad in (
            lambda: sl.linear_cross_entropy(a, b, t, reduction="none"),
            lambda: sl.linear_cross_entropy(a, b, t, chunks=0),
            lambda: sl.linear_cross_entropy(a, b, t.float()),
            lambda: sl.linear_cross_entropy(a, b.mT, t),
            lambda: sl.linear_cross_entropy(a, b, t[:2]),
        ):
            with pytest.raises(sl.errors.BadArgument, match="linear_cross_entropy"):
                bad()
        with pytest.raises(sl.ShardError, match="lie otherwise") as caught:
            sl.linear_cross_entropy(a, b, sl.shard(t, "..."))
        assert caught.value.fix == "sl.reshard(target, 'data')"
        leaf = sl.shard(x, "data .").requires_grad_()
        with pytest.raises(sl.errors.Unsupported, match="computed in forward"):
            value = sl.linear_cross_entropy(leaf, b, t)
            ones = torch.ones_like(value.raw)  # type: ignore[attr-defined]
            torch.autograd.grad(value.raw, leaf.raw, ones, create_graph=True)  # type: ignore[attr-defined]
