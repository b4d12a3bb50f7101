"""What the library adds to the communication and arithmetic it must do anyway.

One process with torch's fake process group (collectives return at once) plays rank 0 of a 2x2
mesh; the block x + W2 gelu(W1 x) runs forward and backward on tiny blocks.  Contestants are
interleaved; figures are medians, ratios are medians of per-repetition ratios.

    python -m benchmarks.overhead [--repetitions 40]
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardlib as sl


class HandSumma(torch.autograd.Function):
    """C = A B on a 2x2 grid, written with torch.distributed alone: the floor to compare with."""

    row: Any
    col: Any

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return ab(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return abt(grads[0], b), atb(a, grads[0])


def bcast(x: Tensor, group: Any, root: int) -> tuple[Any, Tensor]:
    """Rank 0 is the first of each of its groups: at root 0 it sends, else it receives."""
    out = x.contiguous() if root == 0 else torch.empty_like(x)
    return dist.broadcast(out, group=group, group_src=root, async_op=True), out


def reduce_into(target: Tensor, x: Tensor, group: Any, root: int) -> None:
    """The other rank's part comes to the root by send and receive and is added there."""
    if root == 0:
        buffer = torch.empty_like(x)
        dist.recv(buffer, group=group, group_src=1)
        target.add_(x).add_(buffer)
    else:
        dist.send(x, group=group, group_dst=root)


def ab(a: Tensor, b: Tensor) -> Tensor:
    c = a.new_zeros(a.shape[0], b.shape[1])
    coming = bcast(a, HandSumma.col, 0), bcast(b, HandSumma.row, 0)
    for k in range(2):
        (wa, a_k), (wb, b_k) = coming
        if k == 0:
            coming = bcast(a, HandSumma.col, 1), bcast(b, HandSumma.row, 1)
        wa.wait(), wb.wait()
        c.addmm_(a_k, b_k)
    return c


def abt(c: Tensor, b: Tensor) -> Tensor:
    a = c.new_zeros(c.shape[0], b.shape[0])
    coming = bcast(b, HandSumma.row, 0)
    for k in range(2):
        wb, b_k = coming
        if k == 0:
            coming = bcast(b, HandSumma.row, 1)
        wb.wait()
        reduce_into(a, c @ b_k.T, HandSumma.col, k)
    return a


def atb(a: Tensor, c: Tensor) -> Tensor:
    b = c.new_zeros(a.shape[1], c.shape[1])
    coming = bcast(a, HandSumma.col, 0)
    for k in range(2):
        wa, a_k = coming
        if k == 0:
            coming = bcast(a, HandSumma.col, 1)
        wa.wait()
        reduce_into(b, a_k.T @ c, HandSumma.row, k)
    return b


def contestants(n: int, device: str = "cpu") -> dict[str, Callable[[], None]]:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("x", "y"))
    HandSumma.row, HandSumma.col = mesh.get_group("x"), mesh.get_group("y")
    blocks = [torch.randn(n // 2, n // 2, device=device).requires_grad_() for _ in range(3)]
    dense = [torch.randn(n, n, device=device) for _ in range(3)]
    where = [Shard(0), Shard(1)]
    dts = [
        DTensor.from_local(b.detach(), mesh, where, run_check=False).requires_grad_()
        for b in blocks
    ]
    with sl.use_mesh(mesh):
        ours = [sl.shard(t, sl.Layout2D("x", "y")).requires_grad_() for t in dense]
    ones = torch.ones_like(blocks[0])
    sharded_ones, dt_ones = torch.ones_like(ours[0].detach()), torch.ones_like(dts[0].detach())

    def raw() -> None:
        x, w1, w2 = blocks
        (x + F.gelu(x @ w1) @ w2).backward(ones)

    def hand() -> None:
        x, w1, w2 = blocks
        y: Any = x + HandSumma.apply(F.gelu(HandSumma.apply(x, w1)), w2)  # type: ignore[arg-type]
        y.backward(ones)

    def sharded() -> None:
        x, w1, w2 = ours
        (x + F.gelu(x @ w1) @ w2).backward(sharded_ones)

    def dtensor() -> None:
        x, w1, w2 = dts
        (x + F.gelu(x @ w1) @ w2).backward(dt_ones)

    return {
        "local, no communication": raw,
        "hand-written SUMMA": hand,
        "shardlib": sharded,
        "DTensor": dtensor,
    }


def measure(
    n: int, repetitions: int = 40, inner: int = 25, device: str = "cpu"
) -> dict[str, list[float]]:
    runs = contestants(n, device)
    for f in runs.values():
        for _ in range(20):
            f()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, f in runs.items():
            start = time.perf_counter()
            for _ in range(inner):
                f()
            times[name].append((time.perf_counter() - start) / inner * 1e6)
    return times


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--repetitions", type=int, default=40)
    repetitions = arguments.parse_args().repetitions
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    rows = []
    for n in (16, 64):
        times = measure(n, repetitions)
        print(f"\nx + W2 gelu(W1 x), forward and backward, [{n}, {n}] on 2x2, us")
        for name, t in times.items():
            print(f"  {name:<26} {statistics.median(t):8.1f}")
        ratios = {
            base: statistics.median(
                a / b for a, b in zip(times["shardlib"], times[base], strict=True)
            )
            for base in ("hand-written SUMMA", "DTensor")
        }
        print(f"  shardlib / hand-written    {ratios['hand-written SUMMA']:8.2f}   bar 1.3")
        print(f"  shardlib / DTensor         {ratios['DTensor']:8.2f}   bar 0.4", flush=True)
        rows += [[n, name, statistics.median(t)] for name, t in times.items()]
        rows += [[n, f"shardlib / {base}", ratio] for base, ratio in ratios.items()]
    out = Path("out")
    out.mkdir(exist_ok=True)
    with open(out / "overhead.csv", "w", newline="") as file:
        csv.writer(file).writerows([["n", "what", "us or ratio"], *rows])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
