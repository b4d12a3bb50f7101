"""Normalisation over batches, groups and instances."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
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
