"""Every rule beside matmul: value and gradients equal dense under each layout."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from tests.ops.cases import CASES, close, compare, ids, r, run_all, run_case


@pytest.mark.parametrize("name", CASES)
def test_rules_equal_dense(name: str) -> None:
    with sl.simulate(x=2, y=2):
        run_case(name)
    with sl.simulate(data=2, x=1, y=2):
        run_case(name)


def test_rules_equal_dense_on_real_processes(pool) -> None:
    assert pool.run(run_all, x=2, y=2) == [[]] * 4


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 4), (4, 1), (2, 2), (2, 3), (3, 3), (4, 4)]),
)
def test_a_transformer_layer_of_any_shape_equals_dense(b: int, s: int, h: int, grid: tuple[int, int]) -> None:
    row, col = grid
    unit = row * col
    width = unit * h * 2

    def layer(x, g, w1, b1, w2):
        y = F.layer_norm(x, (width,), g)
        return x + F.linear(F.gelu(F.linear(y, w1, b1)), w2)

    tensors = [
        r(row * b, s, width),
        r(width, seed=1),
        r(2 * width, width, seed=2),
        r(2 * width, seed=3),
        r(width, 2 * width, seed=4),
    ]
    with sl.simulate(x=row, y=col):
        compare(layer, tensors, ["x . y", "y", "y x", "y", "x y"], out="x . y")
        compare(layer, tensors, ["x . .", ".", "y .", "y", ". y"], out="x . .")


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([(1, 4), (4, 1), (2, 2), (2, 3), (3, 3)]), st.booleans())
def test_embedding_then_loss_of_any_shape_equals_dense(b: int, s: int, grid: tuple[int, int], two_d: bool) -> None:
    row, col = grid
    vocab, width = row * col * 2, row * col
    idx, target = ids(row * b, s, top=vocab), ids(row * b, s, top=vocab)

    def model(w):
        ours = isinstance(w, sl.ShardedTensor)
        i, t = (sl.shard(z, "x .") if ours else z for z in (idx, target))
        logits = F.linear(F.embedding(i, w), w)
        return F.cross_entropy(logits.view(-1, vocab), t.view(-1))

    with sl.simulate(x=row, y=col):
        compare(model, [r(vocab, width)], ["x y" if two_d else "y ."])


def test_layer_norm_keeps_its_digits_at_a_large_mean() -> None:
    x = r(4, 256) + 3000
    want = F.layer_norm(x, (256,))
    with sl.simulate(x=2, y=4):
        got = sl.unshard(F.layer_norm(sl.shard(x.float(), "x y"), (256,)))
    dense = F.layer_norm(x.float(), (256,))
    assert (got - want).abs().max() <= 4 * (dense - want).abs().max() + 1e-6


@settings(max_examples=50)
@given(
    st.sampled_from(["x . y", ". . .", "(x y) . .", ". y x", "x . (2 y)"]),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(0, 99),
)
def test_dropout_draws_the_same_under_every_layout(layout: str, p: float, seed: int) -> None:
    x = torch.ones(4, 6, 16)
    with sl.simulate(x=1, y=1):
        torch.manual_seed(seed)
        want = sl.unshard(F.dropout(sl.shard(x, ". . ."), p))
    with sl.simulate(x=2, y=2):
        torch.manual_seed(seed)
        got = sl.unshard(F.dropout(sl.shard(x, layout), p))
    assert torch.equal(got, want)
    assert set(got.unique().tolist()) <= {0.0, float(torch.tensor(1.0) * (1 / (1 - p)))}


def test_dropout_keeps_the_right_share_and_its_draws_are_independent() -> None:
    torch.manual_seed(0)
    with sl.simulate(x=2):
        x = sl.shard(torch.ones(1000, 400), "x .")
        a, b = (sl.unshard(F.dropout(x, 0.3)) > 0 for _ in range(2))
    assert abs(a.float().mean() - 0.7) < 3e-3
    assert abs((a & b).float().mean() - 0.49) < 4e-3
    assert abs((a[:, 1:] & a[:, :-1]).float().mean() - 0.49) < 4e-3
    assert abs((a[1:] & a[:-1]).float().mean() - 0.49) < 4e-3


def test_dropout_off_is_the_identity() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.ones(4), "x")
        assert F.dropout(x, 0.5, training=False) is x
        assert sl.unshard(F.dropout(x, 1.0)).sum() == 0


def test_loss_of_large_logits_is_finite() -> None:
    logits, target = torch.tensor([[1e4, 0.0, -1e4, 5.0]] * 2), torch.tensor([0, 2])
    with sl.simulate(x=2, y=2):
        got = F.cross_entropy(sl.shard(logits, "x y"), sl.shard(target, "x"))
    close(sl.unshard(got), F.cross_entropy(logits, target), 1e-6)
