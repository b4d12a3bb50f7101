"""An algorithm written outside the library is as good as one within, whenever it is registered."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.ops import registry

PAGE = (Path(__file__).parent.parent / "docs" / "writing_an_algorithm.md").read_text()
BLOCK, MASK, LAYOUT = re.findall(r"```python\n(.*?)```", PAGE, re.S)
SMALL: list[dict[str, int]] = [{"x": 2}, {"x": 2, "y": 2}]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results() -> dict[str, tuple[str, str, int]]:
    """What is chosen for every pair of layouts on 2 x 2, where the result lies, and the bytes."""
    found = {}
    texts = [". .", "x .", ". x", "y .", "x y", "y x", "(x y) ."]
    with sl.simulate(x=2, y=2):
        for left in texts:
            for right in texts:
                a, b = sl.shard(torch.ones(8, 8), left), sl.shard(torch.ones(8, 8), right)
                try:
                    with sl.trace() as t:
                        c = a @ b
                except sl.ShardError:
                    continue
                assert torch.equal(sl.unshard(c), torch.full((8, 8), 8.0))
                found[f"{left} @ {right}"] = sl.why("matmul", a, b).chosen, sl.typeof(c), t.bytes
    return found


def test_the_page_s_algorithm_runs_and_keeps_the_laws(
    untouched: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "panel_by_panel.py"
    path.write_text(BLOCK)
    load(path)
    printed = capsys.readouterr().out
    assert "f32[12@x, 24] @ f32[24@x, 36] on x=2 y=2" in printed
    code = BLOCK[BLOCK.index("@dataclass") : BLOCK.index("print(")]
    assert len([line for line in code.splitlines() if line.strip()]) <= 35


@pytest.mark.parametrize("first", [True, False])
def test_registered_before_or_after_the_others_the_results_are_the_same(
    first: bool, untouched: None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BLOCK[: BLOCK.index("print(")])
    without = results()
    load(path)
    after = results()
    assert {k: v for k, v in after.items() if k in without} != {} and set(after) >= set(without)
    if first:
        others = [a for a in registry._ALGORITHMS["matmul"] if a.name != "panel_by_panel"]
        registry._ALGORITHMS["matmul"] = []
        load(path)
        for a in reversed(others):
            sl.extend.algorithm("matmul", a.name, a.order)(a.match)
    assert results() == after
    assert [a.name for a in registry._ALGORITHMS["matmul"]][-1] == "panel_by_panel"
    assert len(sl.testing.check_algorithm("matmul", "panel_by_panel", SMALL)) == 7


def test_every_schedule_is_one() -> None:
    with sl.simulate(x=2, y=2):
        a, b = sl.shard(torch.ones(8, 8), "x y"), sl.shard(torch.ones(8, 8), "y x")
        found: dict[str, Any] = dict(sl.why("matmul", a, a).verdicts) | dict(
            sl.why("matmul", a, b).verdicts
        )
    runs = [m.run for m in found.values() if isinstance(m, sl.extend.Match)]
    assert len(runs) >= 3 and all(isinstance(run, sl.extend.Schedule) for run in runs)
