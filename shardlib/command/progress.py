"""Progress output: screen, JSON lines, TensorBoard; and the operations of a step for MFU."""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from shardlib.command.datasets import fields
from shardlib.dtypes import HALF
from shardlib.errors import BadArgument, clipped

Record = Callable[[dict[str, Any]], object]


@dataclass
class Log:
    """Log of a run's figures, of which only rank 0 writes: the table ``[log]``.

    ``every``        steps between two lines.
    ``jsonl``        a file that gets one JSON object per line.
    ``tensorboard``  a directory for TensorBoard's events: pip install tensorboard.
    ``flops``        peak operations per second of one rank, the denominator of MFU; by default that
                     of the GPU, if known.
    ``to``           "module:function", called on rank 0 with each record, a dict.

    >>> Log(every=5).every
    5
    """

    every: int = 10
    jsonl: str = ""
    tensorboard: str = ""
    flops: float | None = None
    to: Record | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise BadArgument(f"every={self.every}: lines are 1 step apart at least", op="log")
        if self.flops is not None and not 0 < self.flops < float("inf"):
            text = f"flops={self.flops}: a number of operations, more than 0"
            raise BadArgument(text, op="log")
        if os.path.isdir(self.jsonl):
            raise BadArgument(f"jsonl={self.jsonl} is a directory: write a file", op="log")
        if self.tensorboard and find_spec("tensorboard") is None:
            text = f"tensorboard={self.tensorboard} wants the package: pip install tensorboard"
            raise BadArgument(text, op="log")
        self.file: TextIO | None = None
        self.board: Any = None
        self.echo = self.lead = False

    def open(self, as_json: bool, first: int, lead: bool = True) -> None:
        """Open the files; unless ``lead``, nothing is written here.

        ``first``  the step to continue from: records of later steps are removed.
        """
        self.echo, self.lead = as_json, lead
        if not lead:
            return
        if self.jsonl:
            file = Path(self.jsonl)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            old = file.read_text().splitlines()
            foreign = [line for line in old if _step_of(line) is None]
            # the last record may be cut off, with nothing after it
            if foreign and (foreign != old[-1:] or not re.fullmatch(r'\{"[^}]*', foreign[0])):
                raise BadArgument(f"jsonl={self.jsonl} holds lines that no log wrote", op="log")
            # later records go: the continued run writes these steps again
            kept = [line for line in old if (_step_of(line) or first + 1) <= first]
            file.write_text("".join(f"{line}\n" for line in kept))
            self.file = file.open("a")
        if self.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.tensorboard, purge_step=first + 1 if first else None)

    def say(self, text: str) -> None:
        """Print text for a person; with ``--json``, nothing is printed."""
        if self.lead and not self.echo:
            print(clipped(text), flush=True)

    def record(self, row: Mapping[str, Any], steps: int) -> None:
        """Write one row of figures to every output."""
        if not self.lead:
            return
        line = json.dumps(row)
        shown = line
        if not self.echo:
            shown = _line(row, steps)
        print(shown, flush=True)
        if self.file is not None:
            self.file.write(f"{line}\n")
            self.file.flush()
        if self.board is not None:
            for key, value in row.items():
                if key != "step" and value is not None:
                    self.board.add_scalar(key, value, row["step"])
        if self.to is not None:
            self.to(dict(row))

    def close(self) -> None:
        """Close the files."""
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()


def _step_of(line: str) -> int | None:
    """Return the step of a record, None if the line is not a record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def _line(row: Mapping[str, Any], steps: int) -> str:
    width = len(str(steps))
    parts = [f"step {row['step']:>{width}}/{steps}"]
    if "eval_loss" in row:
        return "  ".join([*parts, f"eval loss {row['eval_loss']:.4f}"])
    parts.append(f"loss {row['loss']:.4f}")
    for key, scale, form in _FIGURES:
        if row.get(key) is not None:
            parts.append(form.format(row[key] * scale))
    return "  ".join(parts)


# key of a record, factor, and its text in a line
_FIGURES = (
    ("norm", 1, "norm {:.3g}"),
    ("lr", 1, "lr {:.2e}"),
    ("tokens_per_second", 1, "{:,.0f} tokens/s"),
    ("bytes", 2**-20, "{:.2f} MiB/step/rank"),
    ("mfu", 100, "MFU {:.1f} %"),
    ("memory", 2**-30, "{:.2f} GiB"),
)


# ---------------------------------------------------------------- operations of a step

# dense bfloat16, operations per second, from the vendors' data sheets
PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
}


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak operations per second of a device in half precision, if known."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    if named is None or dtype not in HALF:
        return None
    name = named(device)
    return next((value for key, value in PEAKS.items() if key in name), None)


def flops_of(module: nn.Module, row: object) -> float | None:
    """Count operations of a training step for one row: three times forward's, on the meta device.

    None if the module does not run on the meta device.

    >>> flops_of(nn.Linear(4, 8, bias=False), torch.zeros(4))  # 3 x 2 x 4 x 8
    192.0
    """
    from torch.utils.flop_counter import FlopCounterMode

    state = {n: x.detach().to("meta") for n, x in module.state_dict(keep_vars=True).items()}
    first = torch.as_tensor(fields(row)[0])
    given = torch.empty((1, *first.shape), dtype=first.dtype, device="meta")
    try:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as count:
            torch.func.functional_call(module, state, (given,), tie_weights=False)
    except Exception:
        # a foreign module's own code
        return None
    # backward has two products for each of forward's
    return 3.0 * count.get_total_flops() or None


def number(x: Tensor | float | None) -> float | None:
    """Convert a tensor or number to a float."""
    return None if x is None else float(x.item() if isinstance(x, Tensor) else x)
