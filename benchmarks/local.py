"""What the library adds where nothing moves: to torch's operators, and to DTensor's dispatch.

At training size on a mesh of one rank, against the same operator on plain tensors: CPU time of
forward and backward, and the peak of what is allocated meanwhile.  On tiny blocks on four ranks of
torch's fake process group (collectives return at once), against DTensor with the same placements:
what a call costs.  Contestants are interleaved in one process on one thread; figures are medians of
each repetition's ratio.

    python -m benchmarks.local [name ...]
"""

import argparse
import csv
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardlib as sl
from shardlib.memory_tracker import Live

Run = Callable[..., Any]


class Op(NamedTuple):
    """An operator on operands of these shapes and kinds;
    ``bar`` of its CPU time over plain torch's.
    """

    run: Run
    shapes: tuple[tuple[int, ...], ...]
    bar: float = 1.2
    half: bool = True
    classes: int = 0  # of integers in the first operand, or, negative, in the last


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w)


TRAINING = {
    "layer_norm [8, 256, 256]": Op(_layer_norm, ((8, 256, 256), (256,), (256,))),
    "rms_norm [8, 256, 256]": Op(_rms_norm, ((8, 256, 256), (256,))),
    "dropout [8, 256, 256]": Op(lambda x: F.dropout(x, 0.1), ((8, 256, 256),)),
    "embedding [8, 256] of 1024 x 256": Op(F.embedding, ((8, 256), (1024, 256)), classes=1024),
    "linear + bias [2048, 256] to 1024": Op(_linear, ((2048, 256), (1024, 256), (1024,))),
    "cross_entropy [2048, 1024]": Op(
        F.cross_entropy, ((2048, 1024), (2048,)), bar=1.0, classes=-1024
    ),
    "cross_entropy [512, 32768]": Op(
        F.cross_entropy, ((512, 32768), (512,)), bar=1.0, classes=-32768
    ),
}


def _operands(op: Op, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    found = [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in op.shapes]
    if op.classes:
        at = 0 if op.classes > 0 else len(found) - 1
        found[at] = torch.randint(0, abs(op.classes), op.shapes[at], generator=draw)
    return found


def _step(run: Run, operands: list[Any], like: Callable[[Any], Any]) -> Callable[[], None]:
    need = [x for x in operands if x.requires_grad]
    with torch.no_grad():
        cotangent = like(run(*operands))

    def step() -> None:
        run(*operands).backward(cotangent)
        for x in need:
            x.grad = None

    return step


def paired(
    runs: dict[str, Callable[[], None]],
    seconds: float,
    repetitions: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """CPU time of each contestant per repetition, one after the
    other; a repetition lasts ``seconds`` or more.
    """
    inner = {}
    for name, f in runs.items():
        for _ in range(3):
            f()
        began = clock()
        f()
        inner[name] = max(1, int(seconds / max(clock() - began, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.disable()
    for turn in range(repetitions):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            f, n = runs[name], inner[name]
            began = clock()
            for _ in range(n):
                f()
            times[name].append((clock() - began) / n)
        gc.collect()
    gc.enable()
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> tuple[float, float, float]:
    """Median, least and most of a's figure over b's in the same repetition."""
    found = [x / y for x, y in zip(times[a], times[b], strict=True)]
    return statistics.median(found), min(found), max(found)


def peak(f: Callable[[], None]) -> int:
    """Bytes allocated at the peak of a step."""
    f()
    gc.collect()
    with Live() as live:
        f()
    return live.peak


def training(only: list[str], repetitions: int) -> list[list[Any]]:
    """Forward and backward on a mesh of one rank, over plain torch."""
    mesh = sl.make_mesh(device="cpu", x=1)
    rows = []
    print(
        f"{'forward and backward, one rank':<42}{'CPU / torch':>12}{'[range]':>16}{'bar':>6}{'MiB':>8}{'torch':>8}"
    )
    for name, op in TRAINING.items():
        for dtype in (torch.float32, torch.bfloat16):
            title = name + (" bf16" if dtype == torch.bfloat16 else "")
            if only and not any(o in title for o in only):
                continue
            plain = _operands(op, dtype)
            with sl.use_mesh(mesh):
                ours = [sl.shard(x.detach(), "...").requires_grad_(x.requires_grad) for x in plain]
                runs = {
                    "torch": _step(op.run, plain, torch.ones_like),
                    "shardlib": _step(op.run, ours, torch.ones_like),
                }
                times = paired(runs, 0.05, repetitions, time.thread_time)
                mine, theirs = (peak(runs[who]) / 2**20 for who in ("shardlib", "torch"))
            middle, low, high = ratio(times, "shardlib", "torch")
            where = f"[{low:.2f}-{high:.2f}]"
            print(f"{title:<42}{middle:>12.2f}{where:>16}{op.bar:>6.1f}{mine:>8.2f}{theirs:>8.2f}",
                  flush=True)  # fmt: skip
            rows.append(["training", title, middle, op.bar, mine, theirs])
    return rows


class Tiny(NamedTuple):
    """An operator on values laid out so (text, DTensor placements)."""

    run: Run
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[str, ...]
    classes: int = 0


_PLACE = {"x": Shard(0), ".": Replicate(), ". . x": Shard(2), ". x": Shard(1)}

TINY = {
    "add": Tiny(lambda a, b: a + b, ((4, 8, 16), (4, 8, 16)), ("x", "x")),
    "add bias": Tiny(lambda a, b: a + b, ((4, 8, 16), (16,)), ("x", ".")),
    "gelu": Tiny(F.gelu, ((4, 8, 16),), ("x",)),
    "view": Tiny(lambda a: a.view(4, 8, 4, 4), ((4, 8, 16),), ("x",)),
    "linear, columns": Tiny(_linear, ((4, 8, 16), (32, 16), (32,)), (".", "x", "x")),
    "linear, rows": Tiny(_linear, ((4, 8, 16), (32, 16), (32,)), ("x", ".", ".")),
    "layer_norm": Tiny(_layer_norm, ((4, 8, 16), (16,), (16,)), ("x", ".", ".")),
    "embedding": Tiny(F.embedding, ((4, 8), (64, 16)), ("x", "."), 64),
    "cross_entropy": Tiny(F.cross_entropy, ((32, 64), (32,)), ("x", "x"), -64),
    "cross_entropy, classes split": Tiny(F.cross_entropy, ((32, 64), (32,)), (". x", "."), -64),
}


def dispatch(only: list[str], repetitions: int) -> list[list[Any]]:
    """Calls on tiny blocks of four ranks, over DTensor's."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    rows = []
    print(
        f"\n{'tiny blocks, us of CPU':<42}{'shardlib':>9}{'DTensor':>9}{'ratio':>7}{'[range]':>16} "
        "  bar 1.0"
    )
    for name, op in TINY.items():
        if only and not any(o in name for o in only):
            continue
        dense = _operands(Op(op.run, op.shapes, classes=op.classes), torch.float32)
        with sl.use_mesh(mesh):
            ours = [
                sl.shard(
                    x.detach(), " ".join([text, *["."] * (x.ndim - len(text.split()))])
                ).requires_grad_(x.requires_grad)
                for x, text in zip(dense, op.places, strict=True)
            ]
        dts = [
            distribute_tensor(x.detach(), mesh, [_PLACE[text]]).requires_grad_(x.requires_grad)
            for x, text in zip(dense, op.places, strict=True)
        ]

        both: dict[str, dict[str, Callable[[], Any]]] = {
            "forward": {
                "shardlib": lambda run=op.run, a=ours: run(*a),
                "DTensor": lambda run=op.run, a=dts: _settled(run(*a)),
            },
            "forward, backward": {
                "shardlib": _step(op.run, ours, torch.ones_like),
                "DTensor": _dtensor_step(op.run, dts),
            },
        }
        split = op.places[0] == ". x"
        for what, runs in both.items():
            with loss_parallel() if split else nullcontext():
                times = paired(runs, 0.01, repetitions, time.thread_time)
            middle, low, high = ratio(times, "shardlib", "DTensor")
            us = [statistics.median(times[who]) * 1e6 for who in ("shardlib", "DTensor")]
            where = f"[{low:.2f}-{high:.2f}]"
            print(f"{name + ', ' + what:<42}{us[0]:>9.1f}{us[1]:>9.1f}{middle:>7.2f}{where:>16}",
                  flush=True)  # fmt: skip
            rows.append(["dispatch", f"{name}, {what}", middle, 1.0, *us])
    return rows


def _settled(x: Any) -> Any:
    """A DTensor whose sum is pending, summed: shardlib's results and gradients are whole."""
    if any(p.is_partial() for p in x.placements):
        return x.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in x.placements]
        )
    return x


def _dtensor_step(run: Run, operands: list[Any]) -> Callable[[], None]:
    need = [x for x in operands if x.requires_grad]
    with torch.no_grad():
        cotangent = torch.ones_like(_settled(run(*operands)))

    def step() -> None:
        _settled(run(*operands)).backward(cotangent)
        for x in need:
            _settled(x.grad)
            x.grad = None

    return step


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("only", nargs="*", help="parts of names of operators")
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--out", default="out")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    rows = training(args.only, args.repeats)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    rows += dispatch(args.only, args.repeats)
    dist.destroy_process_group()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "local.csv").open("w", newline="") as f:
        names = ["part", "what", "ratio", "bar", "shardlib MiB or us", "torch MiB or DTensor us"]
        csv.writer(f).writerows([names, *rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
