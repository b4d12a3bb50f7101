"""DTensor's own product of two 2D-blocked matrices against ours, on 4 gloo processes.

Same placements in and out, forward and backward, gradients brought to the operands' placements.
Repetitions are interleaved in one run; time ratios are medians of per-repetition ratios.  Bytes are
what a rank receives if every collective is optimal: for ours by ``sl.trace``, for DTensor by
counting the sizes of the collectives it calls (gloo's reduce-scatter moves twice what is counted
here).  "saving" is ours within ``sl.saving()``, where gathered operands are kept for backward.
The wire is what the loopback device carried, for a machine that does nothing else.

    python -m benchmarks.matmul [--sizes 1024 2048] [--repetitions 9]
"""

import argparse
import csv
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl

WHERE = [Shard(0), Shard(1)]


# Bytes received per byte of input, in a group of p.
RECEIVED: dict[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda p: p - 1,
    "reduce_scatter_tensor": lambda p: (p - 1) / p,
    "all_to_all_single": lambda p: (p - 1) / p,
    "all_reduce": lambda p: 2 * (p - 1) / p,
}
STILL = {"wait_tensor", "_wrap_tensor_autograd"}  # move nothing


class Counter(TorchDispatchMode):
    """Bytes received by this rank in DTensor's collectives, if each moves only what it must."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # let it become collectives on blocks first
        name = func._opname
        if "c10d" in func.namespace and name not in STILL:
            n, p = args[0].numel() * args[0].element_size(), _resolve_process_group(args[-1]).size()
            self.bytes += n * RECEIVED[name](p)  # a collective it does not know: KeyError
        return func(*args, **(kwargs or {}))


def contestants(m: int, *widths: int) -> dict[str, Callable[[], Any]]:
    """x [m, widths[0]] times a chain of weights, forward and backward, on DTensors and on ours."""
    mesh: Any = sl.current_mesh().device_mesh
    draw = torch.Generator().manual_seed(0)
    shapes = [(m, widths[0]), *itertools.pairwise(widths)]
    dense = [torch.randn(s, generator=draw) / s[0] ** 0.5 for s in shapes]
    g = torch.randn(m, widths[-1], generator=draw)
    theirs, dg = (
        [distribute_tensor(t, mesh, WHERE) for t in dense],
        distribute_tensor(g, mesh, WHERE),
    )
    ours_, sg = (
        [sl.shard(t, sl.Layout2D("x", "y")) for t in dense],
        sl.shard(g, sl.Layout2D("x", "y")),
    )
    leaves = [t.clone().requires_grad_() for t in dense]
    torch.linalg.multi_dot(leaves).backward(g)

    def dtensor() -> list[Tensor]:
        x, *weights = leaves = [t.detach().requires_grad_() for t in theirs]
        for w in weights:
            x = (x @ w).redistribute(placements=WHERE)
        x.backward(dg)
        return [t.grad.redistribute(placements=WHERE).to_local() for t in leaves]  # type: ignore[union-attr]

    def shardlib() -> list[Tensor]:
        x, *weights = leaves = [t.detach().requires_grad_() for t in ours_]
        for w in weights:
            x = x @ w
        x.backward(sg)
        return [t.grad.local for t in leaves]  # type: ignore[union-attr]

    def saving() -> list[Tensor]:
        with sl.saving():
            return shardlib()

    for f in (dtensor, shardlib, saving):
        for got, want in zip(f(), leaves, strict=True):
            assert want.grad is not None
            assert (got - sl.shard(want.grad, "x y").local).abs().max() < 1e-2, f.__name__
    return {"DTensor": dtensor, "shardlib": shardlib, "saving": saving}


def wire() -> int:
    """Bytes that all processes of this machine have received on the loopback device."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1])
    return 0


COLUMNS = [
    "shapes", "ours", "DTensor MiB", "ours MiB", "ratio", "DTensor wire", "ours wire",
    "wire ratio", "DTensor s", "ours s", "time ratio",
]  # fmt: skip


def measure(cases: list[tuple[int, ...]], repetitions: int) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        runs = contestants(*case)
        with Counter() as theirs:
            runs["DTensor"]()
        times: dict[str, list[float]] = {name: [] for name in runs}
        wires: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repetitions):
            for name, f in runs.items():
                dist.barrier()
                before, start = wire(), time.perf_counter()
                f()
                dist.barrier()
                times[name].append(time.perf_counter() - start)
                time.sleep(0.02)  # a sender may return before its last bytes have left
                wires[name].append((wire() - before) / dist.get_world_size())
        both = {name: statistics.median(w) for name, w in wires.items()}
        for name in ("shardlib", "saving"):
            with sl.trace() as ours:
                runs[name]()
            rows.append(
                {
                    "shapes": " ".join(map(str, case)),
                    "ours": name,
                    "DTensor MiB": theirs.bytes / 2**20,
                    "ours MiB": float(ours.bytes) / 2**20,
                    "ratio": float(ours.bytes) / theirs.bytes,
                    "DTensor wire": both["DTensor"] / 2**20,
                    "ours wire": both[name] / 2**20,
                    "wire ratio": both[name] / max(1, both["DTensor"]),
                    "DTensor s": statistics.median(times["DTensor"]),
                    "ours s": statistics.median(times[name]),
                    "time ratio": statistics.median(
                        s / d for s, d in zip(times[name], times["DTensor"], strict=True)
                    ),
                }
            )
            if dist.get_rank() == 0:
                cells = (
                    f"{v:>18}" if isinstance(v, str) else f"{v:13.3f}" for v in rows[-1].values()
                )
                print("  ".join(cells), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--repetitions", type=int, default=9)
    args = parser.parse_args()
    cases = [*((n, n, n) for n in args.sizes), (2048, 256, 1024, 256)]
    print(
        "\nproducts in 2D blocks on 2x2, forward and backward, per rank; shapes: rows, then widths"
    )
    print(
        "ratio: bytes an optimal network would move; wire: bytes the loopback device counted  "
        "(bars: 0.5, time 1.0)"
    )
    print("  ".join(f"{k:>18}" if k == "shapes" else f"{k:>13}" for k in COLUMNS), flush=True)
    rows = sl.launch(measure, cases, args.repetitions, x=2, y=2)[0]
    out = Path("out")
    out.mkdir(exist_ok=True)
    with open(out / "matmul.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
