"""Layer and RMS norms over dimensions that may be split."""

import pytest
import torch.nn.functional as F

import shardlib as sl
from tests.ops.cases import NORM, r, run_on_meshes


def test_layer_norm_keeps_its_digits_at_a_large_mean() -> None:
    x = r(4, 256) + 3000
    want = F.layer_norm(x, (256,))
    with sl.simulate(x=2, y=4):
        got = sl.unshard(F.layer_norm(sl.shard(x.float(), "x y"), (256,)))
    dense = F.layer_norm(x.float(), (256,))
    assert (got - want).abs().max() <= 4 * (dense - want).abs().max() + 1e-6


@pytest.mark.parametrize("name", NORM)
def test_norms_equal_dense(name: str) -> None:
    run_on_meshes(name)
