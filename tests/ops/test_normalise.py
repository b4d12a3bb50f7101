"""Normalisation over batches, groups and instances."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.tensor import promoting
from tests.ops.cases import r

X = r(4, 6)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_that_ask_for_a_gradient_are_refused_as_torch_does(
    training: bool,
) -> None:
    parts = [X.reshape(4, 6), *(r(6, seed=k).abs() for k in (11, 12))]
    with sl.simulate(x=2):
        x, mean, var = (
            sl.shard(t.clone(), lay) for t, lay in zip(parts, ("x .", ".", "."), strict=True)
        )
        mean.requires_grad_()
        with pytest.raises(sl.errors.BadArgument):
            F.batch_norm(x, mean, var, training=training)
        with torch.no_grad():
            want = F.batch_norm(*parts, training=training)
            assert torch.allclose(sl.unshard(F.batch_norm(x, mean, var, training=training)), want)


@pytest.mark.parametrize("name", ["mean", "var"])
def test_running_statistics_that_share_memory_are_refused_and_unchanged(name: str) -> None:
    with sl.simulate(x=2):
        x = sl.shard(X.reshape(4, 6), "x .")
        stats = {k: sl.shard(r(6, seed=k).abs(), ".") for k in (1, 2)}
        at = 1 + (name == "var")
        once = sl.shard(torch.full((1,), 3.0, dtype=X.dtype), ".")
        stats[at] = once.expand(6)
        with pytest.raises(sl.errors.Unsupported, match="share memory"):
            F.batch_norm(x, stats[1], stats[2], training=True)
        assert torch.equal(sl.unshard(once), torch.full((1,), 3.0, dtype=X.dtype))
        assert torch.equal(sl.unshard(stats[3 - at]), r(6, seed=3 - at).abs())


STATISTICS = {
    "F.batch_norm": lambda x, m, v, on: F.batch_norm(x, m, v, training=on, momentum=0.5),
    "torch.batch_norm": lambda x, m, v, on: torch.batch_norm(
        x, None, None, m, v, on, 0.5, 1e-5, False
    ),
    "F.instance_norm": lambda x, m, v, on: F.instance_norm(x, m, v, None, None, on, 0.5),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_plain_running_statistics_are_written_to_in_a_module(name: str) -> None:
    """Where plain tensors count as the same on every rank, as in a parallelized module's forward."""
    f, t = STATISTICS[name], r(4, 6, 3)
    dense = r(6, seed=1), r(6, seed=2).abs()
    want = f(t, *dense, True)
    plain = r(6, seed=1), r(6, seed=2).abs()
    with sl.simulate(x=2), promoting(), sl.implicit():
        assert torch.allclose(f(sl.shard(t, "x . ."), *plain, True), want)
    for a, b in zip(plain, dense, strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_that_are_only_read_move_nothing(name: str) -> None:
    f, t = STATISTICS[name], r(4, 6, 3)
    stats = r(6, seed=1), r(6, seed=2).abs()
    with sl.simulate(x=2, y=3):
        placed = (sl.shard(s, "y") for s in stats)
        got = f(sl.shard(t, "x y ."), *placed, False)
    assert torch.allclose(sl.unshard(got), f(t, *stats, False))
