"""Dropout draws by global position: one mask for every layout and mesh."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardlib as sl


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


def test_initial_values_and_dropout_do_not_depend_on_the_layout() -> None:
    """DTensor's random numbers differ by layout and number of devices (pytorch 168058)."""
    seen = []
    for axes, text in [({"x": 1}, ". ."), ({"x": 4}, "x ."), ({"x": 2, "y": 2}, "y x")]:
        torch.manual_seed(11)
        with sl.simulate(**axes):
            seen.append(sl.unshard(F.dropout(sl.shard(torch.ones(8, 8), text), 0.5)))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_whole_channels_drop() -> None:
    with sl.simulate(x=2, y=2):
        x = sl.shard(torch.ones(16, 8, 4, 4), "x y . .")
        for layer in (nn.Dropout2d(0.5), nn.FeatureAlphaDropout(0.5)):
            y = sl.unshard(layer(x)).flatten(2)
            assert (y == y[..., :1]).all() and 0.3 < (
                y[..., 0] == y[..., 0].max()
            ).double().mean() < 0.7
