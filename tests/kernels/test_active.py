"""Which kernels serve a call: eager on CPUs unless asked, and nothing asked costs nothing."""

import dis
import threading

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.kernels import active
from shardlib.kernels.active import native, serving
from tests.kernels.host import built, needs_host


@needs_host
def test_cpus_are_eager_unless_asked() -> None:
    assert built()
    x = torch.ones(3)
    assert not serving(x)
    with sl.kernels.use("native"):
        assert serving(x) and native(x, None) and not native(x, x.double())
        with sl.kernels.use("eager"):
            assert not serving(x)
        assert serving(x) and not serving(x.to("meta"))
    assert not serving(x) and active.cpu == 0


def test_an_error_closes_what_was_opened() -> None:
    with pytest.raises(ZeroDivisionError), sl.kernels.use("native"):
        raise ZeroDivisionError
    assert active.cpu == 0


def test_another_name_is_refused() -> None:
    with pytest.raises(sl.errors.BadArgument, match="none of 'auto', 'native', 'apex', 'eager'"):
        sl.kernels.use("cuda")  # type: ignore[arg-type]


@needs_host
def test_a_thread_chooses_for_itself() -> None:
    assert built()
    seen = []
    with sl.kernels.use("native"):
        other = threading.Thread(target=lambda: seen.append(serving(torch.ones(1))))
        other.start()
        other.join()
        seen.append(serving(torch.ones(1)))
    assert seen == [False, True]


def test_a_cpu_asks_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame is added to an operation that runs eagerly on a CPU."""

    def asked(*_: object) -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(active, "serving", asked)
    monkeypatch.setattr(active, "native", asked)
    with sl.simulate(x=2):
        x = sl.shard(torch.randn(4, 8), ". x").requires_grad_()
        y = F.dropout(F.rms_norm(F.layer_norm(x, (8,)), (8,)), 0.5)
        F.cross_entropy(sl.reshard(y, "x ."), sl.shard(torch.arange(4), "x")).backward()
        F.cross_entropy(x, sl.shard(torch.arange(4), ".")).backward()
        q = sl.shard(torch.randn(1, 2, 8, 4), sl.Ring("x", 2)).requires_grad_()
        sl.ring_attention(q, q, q, algorithm="ring").sum().backward()
    tx = sl.optim.adamw(0.1)
    p = {"w": torch.ones(3)}
    sl.optim.step(tx, p, {"w": torch.ones(3)}, tx.init(p))
    assert "CALL" not in {i.opname for i in dis.get_instructions(lambda x: x.is_cpu or active.cpu)}
