"""Real text that every machine has: CPython's help topics, its sources, or any file."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Windows", "batches", "load", "split", "windows"]


def load(name: str = "topics", most: int = 4_000_000) -> Tensor:
    """Bytes of a corpus as uint8: ``topics`` (English, 466 kB), ``stdlib`` (Python), or a path."""
    if name == "topics":
        from pydoc_data import topics

        text = "\n\n".join(topics.topics[k] for k in sorted(topics.topics)).encode()
    elif name == "stdlib":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"\n\n".join(f.read_bytes() for f in files)[:most]
    else:
        text = Path(name).read_bytes()[:most]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def split(data: Tensor, held_out: float = 0.1) -> tuple[Tensor, Tensor]:
    """(train, valid): the last part of the text is held out."""
    cut = len(data) - int(len(data) * held_out)
    return data[:cut], data[cut:]


def batches(data: Tensor, batch: int, ctx: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, targets) [batch, ctx] int64 forever; the same whatever the number of processes."""
    if len(data) < ctx + 2:
        raise ValueError(
            f"a corpus of {len(data)} bytes has no window of {ctx} and its next byte; take a "
            "smaller ctx"
        )
    draw = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(data) - ctx - 1, (batch,), generator=draw)
        rows = data[start.unsqueeze(1) + torch.arange(ctx + 1)].long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into windows of ``ctx`` bytes: row i is (ids, targets), each [ctx] int64."""

    def __init__(self, data: Tensor, ctx: int) -> None:
        self.data, self.ctx = data, ctx
        if ctx < 1 or len(data) < ctx + 1:
            raise ValueError(
                f"a corpus of {len(data)} bytes has no window of {ctx} and its next byte"
            )

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.ctx

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        row = self.data[i * self.ctx : (i + 1) * self.ctx + 1].long()
        return row[:-1], row[1:]


def windows(name: str = "topics", ctx: int = 128) -> Windows:
    """Make the rows of a corpus from plain values, as a configuration file has them."""
    return Windows(load(name), ctx)
