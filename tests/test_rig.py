"""The rig: its arithmetic anywhere, its links where namespaces are to be had."""

import importlib
from typing import Any

import pytest
import torch

import shardlib as sl
from benchmarks import all as bench
from benchmarks import rig


def test_a_ratio_pairs_repetitions() -> None:
    rows = [
        rig.Row(n, s, 10 * s)
        for n, s in (("a", 1.0), ("b", 2.0), ("a", 9.0), ("b", 3.0), ("a", 4.0), ("b", 2.0))
    ]
    assert rig.ratio(rows, "a", "b") == 2.0 and rig.ratio(rows, "b", "a", "sent") == 0.5


@pytest.mark.parametrize("part", bench.PARTS)
def test_a_part_of_make_bench_can_be_loaded(part: str) -> None:
    assert importlib.import_module(f"benchmarks.{part.split()[0]}").main


def traffic() -> list[float]:
    """Bytes counted and bytes on the wire of collectives over both axes of a 1 x 2 mesh."""
    mesh = sl.make_mesh(device="cpu", x=1, y=2)
    with sl.use_mesh(mesh):
        x = torch.zeros(1 << 18)

        def work() -> None:
            sl.all_gather(x, "y"), sl.psum_scatter(x, "y"), sl.collectives.shift(x, "y")

        with sl.trace() as t:
            work()
        rows = rig.compare({"work": work}, repeats=2)
    return [float(t.bytes), *(r.sent for r in rows)]


def fails() -> None:
    raise ValueError("a rank that fails")


@pytest.fixture(scope="module")
def here() -> None:
    if reason := rig.unavailable():
        pytest.skip(f"no rig here: {reason}")


def test_what_is_counted_is_on_the_wire(here: Any) -> None:
    """Headers and acknowledgements apart: within 8 percent, and never less."""
    *answers, control = rig.run("tests.test_rig:traffic", 2, 200.0, disturbed=10.0)
    assert all(c >= 1.0 for c in control)
    for counted, *sent in answers:
        assert all(1.0 <= s / counted <= 1.08 for s in sent), (counted, sent)


def test_a_failing_rank_is_reported_and_nothing_is_left(here: Any) -> None:
    with pytest.raises(RuntimeError, match="a rank that fails"):
        rig.run("tests.test_rig:fails", 2, 200.0, disturbed=10.0)
