"""The benchmark's kernels and eager formulas are the same operations; it measures on a GPU alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardlib as sl
from benchmarks import kernels as benchmark
from tests.kernels.host import built, needs_host

SMALL: dict[str, Callable[[], benchmark.Case]] = {
    "layer": lambda: benchmark.norm(4, 16, True, False),
    "layer back": lambda: benchmark.norm(4, 16, True, True),
    "rms": lambda: benchmark.norm(4, 16, False, False),
    "rms back": lambda: benchmark.norm(4, 16, False, True),
    "columns": lambda: benchmark.packing(8, 16, 4),
}
IN_PLACE: dict[str, Callable[[], benchmark.Case]] = {
    "cross entropy": lambda: benchmark.cross_entropy(6, 40),
    "merge": lambda: benchmark.merging(3, 8),
    "sum": lambda: benchmark.summing(3, 8),
    "adamw": lambda: benchmark.stepping(50),
    "dropout": lambda: benchmark.dropping(64),
}


def parts(found: object) -> list[Tensor]:
    found = found if isinstance(found, tuple) else (found,)
    return [
        row
        for t in found
        if isinstance(t, Tensor)
        for row in (t if t.ndim == 2 and len(t) == 2 else [t])
    ]


@needs_host
@pytest.mark.parametrize("name", SMALL)
def test_both_ways_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built()
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    torch.manual_seed(0)
    case = SMALL[name]()
    with sl.kernels.use("native"):
        got = parts(case.kernel())
    for a, b in zip(got, parts(case.eager()), strict=True):
        assert torch.allclose(a.float(), b.float(), atol=3e-2, rtol=1e-2)


def held(case: benchmark.Case) -> dict[str, Tensor]:
    cells = zip(case.kernel.__code__.co_freevars, case.kernel.__closure__ or (), strict=True)
    return {n: c.cell_contents for n, c in cells if isinstance(c.cell_contents, Tensor)}


@needs_host
@pytest.mark.parametrize("name", ["merge", "sum", "adamw"])
def test_both_ways_write_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built()
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    results = []
    for way in ("kernel", "eager"):
        torch.manual_seed(0)
        case = IN_PLACE[name]()
        with sl.kernels.use("native"):
            getattr(case, way)()
        results.append(held(case))
    for key, a in results[0].items():
        assert torch.allclose(a.float(), results[1][key].float(), atol=1e-5, rtol=1e-2), key


@needs_host
@pytest.mark.parametrize("name", ["cross entropy", "dropout"])
def test_the_others_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built()
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    case = IN_PLACE[name]()
    with sl.kernels.use("native"):
        gradient = case.eager() if name == "cross entropy" else None
        case.kernel()
    if gradient is not None:  # over the logits
        assert torch.allclose(held(case)["x"].float(), gradient.float(), atol=1e-3)  # type: ignore[union-attr]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would measure")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out
