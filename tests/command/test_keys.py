"""The keys that are listed are those that are taken; a file with all of them says the same."""

import inspect
import json
import tomllib
from pathlib import Path

import pytest

from shardlib.command import datasets, from_config, progress, train
from shardlib.command.config import Config, read
from shardlib.command.keys import listed, printed
from shardlib.command.main import main
from shardlib.data import data
from tests.command.test_train import DEMO

SOURCES = {
    "data": data,
    "data.text": datasets.text,
    "data.documents": datasets.documents,
    "log": progress.Log,
    "checkpoint": train.Checkpoints,
    "layout, megatron1d": from_config.recipes.megatron1d,
    "optimizer.zero": from_config.WRAPPERS["zero"],
}


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
    assert {k.table for k in rows} >= {"eval", "export", "data.documents"}


def test_a_key_is_told_by_a_whole_sentence() -> None:
    """Of its own definition, never from the middle of what is said of another."""
    for key in listed():
        doc = " ".join((inspect.getdoc(SOURCES.get(key.table, object)) or "").split())
        assert not key.text.endswith((",", ":", " or", " of", "(")), key
        assert key.text.count("(") == key.text.count(")") and key.text.count('"') % 2 == 0, key
        if key.text and doc and key.text in doc:  # it starts where a sentence or a definition does
            before = doc[: doc.index(key.text)].rstrip()
            assert not before or before.endswith((".", "``")), key
    told = {(k.table, k.name): k.text for k in listed()}
    assert told["layout, megatron1d", "sequence"].startswith("The residual stream is whole over")
    assert told["data", "seed"].startswith("``shuffle`` in an order drawn from ``seed``")
    assert ("model", "real") not in told


def test_one_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "checkpoint"]) == 0
    said = capsys.readouterr().out
    assert "[checkpoint]" in said and "path" in said and "[log]" not in said


@pytest.mark.parametrize(
    "one",
    [
        "steps=3",
        'loss="a \\" b\\u007f"',
        'remat={"h.*" = "full"}',
        "a.b=[1, [inf], {c = true}]",
        "x={}",
    ],
)
def test_what_is_printed_is_read_again_as_the_same(one: str, tmp_path: Path) -> None:
    config = read(DEMO, [one])
    again = tmp_path / "again.toml"
    again.write_text(printed(config))
    assert read(again).tables == config.tables


def test_a_default_is_a_comment_and_is_valid_in_its_table() -> None:
    """Without the mark it is a key that the file may have, unless it is given by leaving it out."""
    text = printed(read(DEMO))
    bare = [s.removeprefix("# ") for s in text.splitlines() if not s.endswith(" =")]
    found = tomllib.loads("\n".join(bare))
    assert found["optimizer"]["weight_decay"] == 0.01 and found["log"]["every"] == 10
    assert found["data"]["shuffle"] is True and found["optimizer"]["zero"]["stage"] == 1
    assert "sequence" not in found["layout"], "of another recipe"


def test_nothing_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sets = ["--set", f"checkpoint.path={tmp_path / 'run'}", "--print-config"]
    assert main(["train", str(DEMO), *sets]) == 0
    assert tomllib.loads(capsys.readouterr().out)["checkpoint"]["path"] == str(tmp_path / "run")
    assert main(["train", str(DEMO), *sets, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["steps"] == 50
    assert main(["train", str(DEMO), *sets, "--set", "steps=many"]) == 2
    assert "must be a whole number" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and printed(Config({})).startswith("# seed")
