"""The keys that are listed are those that are taken."""

import pytest

from shardlib.command.keys import listed
from shardlib.command.main import main


def test_every_key_has_a_table_and_what_its_function_says() -> None:
    rows = list(listed())
    tables = {k.table.partition(",")[0] for k in rows}
    assert {
        "",
        "mesh",
        "model",
        "data",
        "data.text",
        "layout",
        "optimizer",
        "optimizer.lr",
    } <= tables
    assert {"optimizer.zero", "precision", "checkpoint", "log", "remat", "init"} <= tables
    told = {(k.table, k.name): k.text for k in rows}
    assert told["checkpoint", "keep"] == "how many of them stay; None: all"
    assert told["log", "jsonl"] == "a file that gets one JSON object per line"


def test_one_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "checkpoint"]) == 0
    said = capsys.readouterr().out
    assert "[checkpoint]" in said and "path" in said and "[log]" not in said
