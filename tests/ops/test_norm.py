"""Layer and RMS norms over dimensions that may be split."""

import pytest
import torch
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


@pytest.mark.parametrize("eps", [0.0, -0.5])
def test_padded_rows_leave_gradients_finite_whatever_eps_is(eps: float) -> None:
    t, w = r(2, 2, 3), r(2, 3, seed=1)
    dense = w.clone().requires_grad_()
    F.layer_norm(t, (2, 3), dense, eps=eps).sum().backward()
    with sl.simulate(x=4), sl.implicit():
        v = sl.shard(w, ". .").requires_grad_()
        F.layer_norm(sl.shard(t, "x . .", pad=True), (2, 3), v, eps=eps).sum().backward()
        assert torch.allclose(sl.unshard(v.grad), dense.grad, equal_nan=True)


def test_a_weight_of_another_shape_is_refused_though_it_is_the_operand() -> None:
    with sl.simulate(x=2):
        x = sl.shard(r(4, 2, 4), "x . .")
        with pytest.raises(sl.errors.BadArgument, match="shape"):
            torch.layer_norm(x, [4], x)
