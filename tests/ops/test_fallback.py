"""What nothing else answers runs on whole operands: counted inside
sl.implicit, refused with a fix outside.
"""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.errors import ImplicitCommunication
from tests import fixes
from tests.ops.cases import close, r

X = r(4, 6)


def test_an_op_without_a_rule_is_never_answered_by_dtensor(pool: Any) -> None:
    assert all(all(r) for r in pool.run(_fallbacks, x=2, y=2))


def _fallbacks() -> list[bool]:
    x = torch.rand(8, 8)
    a = sl.shard(x, "x y")
    out = [torch.allclose(sl.unshard(torch.special.i0(a)), torch.special.i0(x))]
    try:
        torch.linalg.qr(a)
        out.append(False)
    except sl.ShardError as e:
        fixes.caught(e)
        out.append("bytes per rank would move unasked" in str(e) and "sl.reshard" in e.fix)
    return out


def test_gathering_is_counted_or_refused_with_a_fix_that_runs() -> None:
    with sl.simulate(x=2, y=2):
        x = sl.shard(X, "x y")
        with pytest.raises(ImplicitCommunication) as caught:
            torch.cumsum(x, 0)
        close(sl.unshard(eval(caught.value.fix, {"torch": torch, "sl": sl, "x": x})), X.cumsum(0))
        with sl.implicit(max_bytes=1), pytest.raises(ImplicitCommunication):
            torch.cumsum(x, 0)
        with sl.implicit(), sl.trace() as t:
            assert sl.layout_of(torch.cumsum(x, 0)) == sl.Layout.parse(". y")
        assert t.bytes == 2 * 3 * 8


def test_a_pending_gradient_is_not_summed_twice_by_a_function_without_a_rule() -> None:
    w = r(6, 6, seed=1)
    dense = w.clone().requires_grad_()
    torch.linalg.matrix_exp(dense).diagonal().sum().backward()
    with sl.simulate(data=2, x=2):
        p = sl.shard(w, ". .").requires_grad_()
        step = sl.value_and_grad(
            lambda q: torch.linalg.matrix_exp(q).diagonal().sum(), pending="data"
        )
        _, grad = step(p)
        close(sl.unshard(sl.reshard(grad, ". .")), dense.grad)
