"""Windows of text and of files of numbers."""

from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib.command.datasets import Windows, documents, text, tokens


def test_windows_tile_the_numbers_and_labels_follow_them() -> None:
    numbers = torch.arange(23)
    for context in (1, 3, 7, 22):
        rows = Windows(numbers, context)
        seen = torch.cat([rows[i]["input_ids"] for i in range(len(rows))])
        assert torch.equal(seen, numbers[: len(rows) * context]) and len(rows) == 22 // context
        assert all(
            torch.equal(rows[i]["labels"], rows[i]["input_ids"] + 1) for i in range(len(rows))
        )


def test_text_is_its_bytes_in_the_order_of_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("efgh")
    (tmp_path / "a.txt").write_text("abcd")
    found = text(str(tmp_path / "*.txt"), context=7)
    assert bytes(found[0]["input_ids"].tolist()) == b"abcdefg"
    assert text([str(tmp_path / "b.txt")], context=1)[0]["input_ids"].tolist() == [ord("e")]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_numbers_are_read_as_they_were_written(dtype: str, tmp_path: Path) -> None:
    numbers = torch.tensor([1, 200, 3, 250, 5, 6, 7], dtype=getattr(torch, dtype))
    (tmp_path / "a.bin").write_bytes(bytes(numbers.view(torch.uint8).tolist()))
    torch.save(numbers, tmp_path / "a.pt")
    for file in ("a.bin", "a.pt"):
        rows = tokens(str(tmp_path / file), context=3, dtype=dtype)  # type: ignore[arg-type]
        assert rows[0]["input_ids"].tolist() == [1, 200, 3]
        assert rows[1]["labels"].tolist() == [5, 6, 7]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(sl.errors.BadArgument, match=r"nowhere.txt is no file"):
        text(str(tmp_path / "nowhere.txt"), context=4)
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(sl.errors.BadArgument, match="3 tokens have no window of context=4"):
        text(str(tmp_path / "a.txt"), context=4)


def test_documents_of_files_and_of_json_lines_are_packed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.jsonl").write_text('{"said": "de"}\n\n{"said": "f"}\n')
    rows = documents([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], 6, field="said")
    assert [bytes(r["input_ids"].tolist()) for r in rows] == [b"abcdef"]
    assert rows[0]["position_ids"].tolist() == [0, 1, 2, 0, 1, 0]
    assert rows[0]["labels"].tolist() == [*b"bc", -100, ord("e"), -100, -100]
    with pytest.raises(sl.ShardError, match=r"b\.jsonl:1 is no JSON object with a text"):
        documents(str(tmp_path / "b.jsonl"), 6)
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(sl.ShardError, match="holds no text"):
        documents(str(tmp_path / "c.txt"), 6)
