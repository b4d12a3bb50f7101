"""What a run says of itself."""

from pathlib import Path

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.command.progress import Log, flops_of, peak_of


def test_operations_are_three_forwards() -> None:
    mlp = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
    assert flops_of(mlp, torch.zeros(5, 8)) == 3 * 2 * 5 * (8 * 32 + 32 * 8)


def test_of_a_module_that_does_not_run_on_shapes_nothing_is_said() -> None:
    class Asks(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input if input.sum().item() else super().forward(input)

    assert flops_of(Asks(4, 4), torch.zeros(4)) is None


def test_a_peak_is_of_a_gpu_in_half_precision() -> None:
    assert peak_of(torch.device("cpu"), torch.bfloat16) is None


def test_records_are_of_this_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "a" / "log.jsonl"
    writer = Log(jsonl=str(file))
    row = {"loss": 1.0, "norm": None, "lr": None, "tokens_per_second": 1.0, "bytes": 0, "mfu": 0.5}
    for first, steps in ((0, (1, 2, 3)), (2, (3, 4)), (0, (1,))):
        writer.open(as_json=True, first=first)
        for step in steps:
            writer.record(row | {"step": step}, 4)
        writer.close()
        lines = file.read_text().splitlines()
        assert len(lines) == first + len(steps)


def test_a_file_that_no_log_wrote_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "thesis.tex"
    for text in (
        *("mine", "mine\n", '{"step": 1}\nmine\n{"step": 2}\n', '{"a": 1}\n'),
        *('{"step": 1}\nmine', '{"step": 1}\n{"a": 1}\n'),
    ):
        file.write_text(text)
        with pytest.raises(sl.ShardError, match="no log wrote"):
            Log(jsonl=str(file)).open(False, 0)
        assert file.read_text() == text
    file.write_text('{"step": 1}\n{"loss": 0.')  # of a run that was killed
    writer = Log(jsonl=str(file))
    writer.open(False, 1)
    writer.close()
    assert file.read_text() == '{"step": 1}\n'
