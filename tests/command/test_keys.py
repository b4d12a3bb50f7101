"""The keys that are listed are those that are taken."""

import inspect

import pytest

from shardlib.command import datasets, from_config, progress, train
from shardlib.command.keys import listed
from shardlib.command.main import main
from shardlib.data import data

SOURCES = {
    "data": data,
    "data.text": datasets.text,
    "data.documents": datasets.documents,
    "log": progress.log,
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
