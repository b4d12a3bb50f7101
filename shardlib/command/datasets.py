"""Datasets: windows of a text or of a file of token ids, or packed documents."""

import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardlib.errors import BadArgument
from shardlib.sequence import pack

Width = Literal["uint8", "uint16", "int32", "int64"]


class Windows(Dataset[dict[str, Tensor]]):
    """Token ids cut into windows of ``context``: ``{"input_ids": [n], "labels": [n]}``, int64.

    ``labels`` are shifted by one already.

    >>> Windows(torch.arange(9), 4)[1]
    {'input_ids': tensor([4, 5, 6, 7]), 'labels': tensor([5, 6, 7, 8])}
    """

    def __init__(self, numbers: Tensor, context: int) -> None:
        if context < 1 or len(numbers) < context + 1:
            text = f"{len(numbers)} tokens have no window of context={context} and the one after"
            fix = f"context = {max(len(numbers) - 1, 1)}"
            raise BadArgument(text, op="data", fix=fix)
        self.numbers, self.context = numbers, context

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // self.context

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = self.numbers[i * self.context : (i + 1) * self.context + 1].long()
        return {"input_ids": row[:-1], "labels": row[1:]}


def fields(row: object) -> tuple[Any, ...]:
    """List the fields of a row, or of a batch.

    >>> fields({"a": 1, "b": 2}), fields([1, 2]), fields(3)
    ((1, 2), (1, 2), (3,))
    """
    if isinstance(row, Mapping):
        return tuple(row.values())
    return tuple(row) if isinstance(row, tuple | list) else (row,)


def text(path: str | Sequence[str], context: int, tokenizer: str = "bytes") -> Windows:
    """Read text files, one after the other, as windows of ``context`` tokens.

    ``path``       a file, a pattern such as ``corpus/*.txt``, or several.
    ``tokenizer``  "bytes": a token is a byte, so a vocabulary of 256 is enough; else a directory
                   from which transformers reads a tokenizer.
    Raises: BadArgument if no file is found, or it is shorter than a window.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as d:
    ...     _ = Path(d, "a.txt").write_text("shardlib")
    ...     len(text(d + "/*.txt", context=3))
    2
    """
    files = _files(path)
    if tokenizer == "bytes":
        raw = b"".join(Path(f).read_bytes() for f in files)
        return Windows(torch.frombuffer(bytearray(raw), dtype=torch.uint8), context)
    encode = _tokenizer(tokenizer)
    numbers = [n for f in files for n in encode(Path(f).read_text())]
    return Windows(torch.tensor(numbers, device="cpu"), context)


def tokens(path: str | Sequence[str], context: int, dtype: Width = "uint16") -> Windows:
    """Map files of token ids into memory, and cut them into windows of ``context``.

    ``path``   a file, a pattern or several: plain numbers without a header, as
               ``numpy.ndarray.tofile`` writes them, or a tensor that ``torch.save`` wrote
               (``.pt``).
    ``dtype``  of the numbers in plain files.
    Raises: BadArgument if no file is found, or it is shorter than a window.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as d:
    ...     _ = Path(d, "a.bin").write_bytes(bytes([1, 0, 2, 0, 3, 0]))
    ...     tokens(d + "/a.bin", context=2)[0]
    {'input_ids': tensor([1, 2]), 'labels': tensor([2, 3])}
    """
    parts = [_numbers(f, dtype) for f in _files(path)]
    if len(parts) == 1:  # stays mapped into memory
        return Windows(parts[0], context)
    return Windows(torch.cat(parts), context)


def documents(
    path: str | Sequence[str], context: int, tokenizer: str = "bytes", field: str = "text"
) -> list[dict[str, Tensor]]:
    """Read documents, and pack them into rows of ``context`` tokens with ``sl.pack``.

    ``path``       a file, a pattern or several: each is a document; in ``.jsonl`` each line is one.
    ``tokenizer``  as of text; its end of text closes each document.
    ``field``      the key of a document's text in a line of ``.jsonl``.
    Raises: BadArgument if no file is found, or it has no text.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as d:
    ...     _ = Path(d, "a.jsonl").write_text('{"text": "ab"}\\n{"text": "c"}\\n')
    ...     documents(d + "/a.jsonl", context=4)[0]["position_ids"]
    tensor([0, 1, 0, 0])
    """
    encode = _tokenizer(tokenizer, ends=True)
    rows = pack((encode(words) for f in _files(path) for words in _texts(f, field)), context)
    if not rows:
        raise BadArgument(f"path={path} holds no text", op="data", fix='path = "corpus/*.txt"')
    return rows


def _texts(file: str, field: str) -> Iterator[str]:
    if not file.endswith(".jsonl"):
        yield Path(file).read_text()
        return
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)[field]
        except (ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, str):
            text = f"field={field}: {file}:{number} is no JSON object with a text of this name"
            fix = f'field = "{field}"'
            raise BadArgument(text, op="data", fix=fix)
        yield found


def _numbers(file: str, dtype: Width) -> Tensor:
    if file.endswith(".pt"):
        return torch.load(file, map_location="cpu", weights_only=True).flatten()
    kind = getattr(torch, dtype)
    width = torch.empty((), dtype=kind, device="cpu").element_size()
    return torch.from_file(file, False, os.path.getsize(file) // width, dtype=kind)


def _files(path: str | Sequence[str]) -> list[str]:
    """List the files of a pattern, or of several, in order.

    Raises: BadArgument.
    """
    patterns = fields(path)
    found = [f for p in patterns for f in ([p] if os.path.isfile(p) else sorted(glob.glob(p)))]
    files = [f for f in found if os.path.isfile(f)]
    if not files:
        raise BadArgument(
            f"path={', '.join(patterns)} is no file", op="data", fix='path = "corpus.txt"'
        )
    return files


def _tokenizer(directory: str, ends: bool = False) -> Callable[[str], list[int]]:
    if directory == "bytes":
        return lambda words: [*words.encode()]
    try:
        from transformers import AutoTokenizer
    except ImportError:
        text = "a tokenizer of a directory is read by transformers: pip install transformers"
        fix = 'tokenizer = "bytes"'
        raise BadArgument(text, op="data", fix=fix) from None
    made: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    end = [made.eos_token_id] if ends and made.eos_token_id is not None else []
    return lambda words: [*made.encode(words, add_special_tokens=False), *end]
