"""What nothing else answers runs on whole operands: counted inside
sl.implicit, refused with a fix outside.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.errors import ImplicitCommunication, NoImplementation, Unsupported
from shardlib.ops import fallback
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


CALLS: dict[str, tuple[Callable[..., Any], type[Exception] | None]] = {
    "refuse_no_value": (lambda x: x.data_ptr(), NoImplementation),
    "write_out": (lambda x: torch.special.i0(x, out=torch.zeros_like(x)), None),
    "write_plain": (lambda x: torch.zeros(4, 6, dtype=x.dtype).copy_(x), None),
    "open_body": (lambda x: F.normalize(x), None),
    "refuse_draws": (lambda x: torch.binomial(x, x), Unsupported),
    "refuse_sparse_gradients": (
        lambda x: x.gather(0, torch.zeros(1, 6).long(), sparse_grad=True), Unsupported
    ),
    "refuse_new_shape": (lambda x: x.unsqueeze_(0), Unsupported),
    "compute_apart": (lambda x: x.cumsum_(0), None),
    "refuse_moves": (lambda x: torch.histc(x), ImplicitCommunication),
    "run_whole": (lambda x: torch.histc(x), None),
}  # fmt: skip


def sharded(x: Any) -> bool:
    return isinstance(x, sl.ShardedTensor)


@pytest.mark.parametrize("name", CALLS)
def test_each_handler_serves_its_calls_and_none_before_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of the fallback is answered, or refused, by the handler of this name."""
    ended: list[str] = []

    def noted(handler: fallback.Handler) -> fallback.Handler:
        def run(call: fallback.FallbackCall) -> Any:
            try:
                answer = handler(call)
            except sl.ShardError:
                ended.append(handler.__name__)
                raise
            if answer is not fallback.NEXT:
                ended.append(handler.__name__)
            return answer

        return run

    monkeypatch.setattr(fallback, "HANDLERS", tuple(map(noted, fallback.HANDLERS)))
    monkeypatch.setattr(fallback, "run_whole", noted(fallback.run_whole))
    call, error = CALLS[name]
    budget = sl.implicit() if name != "refuse_moves" else nullcontext()
    with sl.simulate(x=2, y=2), sl.constants(), budget, torch.no_grad():
        x = sl.shard(X, ". y")
        if error is None:
            found = call(x)
            close(sl.unshard(found) if sharded(found) else found, call(X.clone()))
        else:
            with pytest.raises(error):
                call(x)
    assert name in ended
    assert set(ended) <= {name, "run_whole", "compute_apart"}


def test_every_handler_has_a_call_in_the_test_above() -> None:
    handlers = [*fallback.HANDLERS, fallback.run_whole]
    assert [h.__name__ for h in handlers] == [*CALLS]
