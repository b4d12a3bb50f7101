"""Attention over a split sequence on 4 gloo processes: peak
memory, CPU time and its balance, elapsed time.

Forward and backward of one attention.  Memory is the growth of a rank's high-water mark (the
largest over ranks), beside what ``plan.peak`` says on paper; CPU time is a rank's own, so it tells
of balance however busy the machine is; elapsed times are medians of per-repetition ratios,
interleaved in one run.  Last, where namespaces are to be had, causal attention with two heads of
keys for eight of queries behind links of 50 Mbit/s (benchmarks/rig.py), where time follows bytes.

``--torch`` adds torch's own context_parallel where it runs, else its reason; on CPUs torch 2.13
searches for a sharding of its attention for minutes.

    python -m benchmarks.attention [--length 8192] [--heads 4] [--size 64] [--repetitions 5] [--torch]
"""

import argparse
import csv
import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from benchmarks import rig
from shardlib.layouts import Ring
from shardlib.ops.attention.engine import peak

CASES = [  # name, order, causal, algorithm
    ("ring, full", "contiguous", False, "ring"),
    ("both ways, full", "contiguous", False, "ring_bidirectional"),
    ("all-gather, full", "contiguous", False, "allgather"),
    ("ulysses, full", "contiguous", False, "ulysses"),
    ("rsa, full", "contiguous", False, "rsa"),
    ("ring, causal, contiguous", "contiguous", True, "ring"),
    ("ring, causal, striped", "striped", True, "ring"),
    ("ring, causal, zigzag", "zigzag", True, "ring"),
    ("both ways, causal, zigzag", "zigzag", True, "ring_bidirectional"),
    ("all-gather, causal, zigzag", "zigzag", True, "allgather"),
    ("ulysses, causal, zigzag", "zigzag", True, "ulysses"),
]


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def _growth(work: Callable[[], Any]) -> int:
    """Bytes by which this process's resident memory rises at most while it works."""
    gc.collect()
    dist.barrier()
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the high-water mark starts anew
    work()
    return _resident("VmHWM") - before


def _blocks(order: str, length: int, heads: int, size: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    p = dist.get_world_size()
    return [torch.randn(1, heads, length // p, size, generator=draw) for _ in range(3)]


def _ours(
    case: tuple[str, str, bool, str], length: int, heads: int, size: int
) -> Callable[[], Any]:
    _, order, causal, algorithm = case
    lay, mask = Ring("s", 2, order), sl.masks.Causal() if causal else sl.masks.Full()
    blocks = _blocks(order, length, heads, size)

    def work() -> None:
        q, k, v = (x.detach().requires_grad_() for x in blocks)
        out = sl.ring_attention(q, k, v, layout=lay, mask=mask, algorithm=algorithm)
        out.backward(torch.ones_like(out))

    return work


def _paper(case: tuple[str, str, bool, str], length: int, heads: int, size: int) -> int:
    """Bytes that the plan says a rank needs at most, the gradients that it returns included."""
    _, order, causal, algorithm = case
    with sl.record(s=dist.get_world_size()):
        x = sl.shard(torch.empty(1, heads, length, size, device="meta"), Ring("s", 2, order))
        mask = sl.masks.Causal() if causal else sl.masks.Full()
        found = peak(
            sl.planning.attention_plan(x, x, x, mask, algorithm), torch.float32, dist.get_rank()
        )
    block = heads * length // dist.get_world_size() * size * 4
    return max(found.forward, found.backward + block)  # the cotangent of ones


def _torchs(length: int, heads: int, size: int, causal: bool) -> Callable[[], Any]:
    """torch's context_parallel over the same ranks."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh: Any = sl.current_mesh().device_mesh
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, length, size, generator=draw) for _ in range(3)]

    def work() -> None:
        q, k, v = (x.clone() for x in whole)
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            out.backward(torch.ones_like(out))

    return work


def measure(
    length: int, heads: int, size: int, repetitions: int, with_torch: bool
) -> dict[str, Any]:
    """On one rank: {case: {growth, paper, cpu, seconds}} and why
    torch's own does not run, where it does not.
    """
    torch.set_num_threads(1)
    works = {case[0]: _ours(case, length, heads, size) for case in CASES}
    for case in CASES:
        works[case[0]]()  # libraries load, buffers of the network are made
    out: dict[str, Any] = {name: {"cpu": [], "seconds": []} for name in works}
    for case in CASES:
        out[case[0]]["growth"] = _growth(works[case[0]])
        out[case[0]]["paper"] = _paper(case, length, heads, size)
        rig.say(f"on rank 0: {case[0]:<28} peak {out[case[0]]['growth'] / 1e6:8.1f} MB")
    out["reasons"] = {}
    for name, causal in (("torch, full", False), ("torch, causal", True)) if with_torch else ():
        try:
            _torchs(256, heads, size, causal)()
            works[name], out[name] = (
                _torchs(length, heads, size, causal),
                {"cpu": [], "seconds": []},
            )
            out[name]["growth"] = _growth(works[name])
        except Exception as error:
            out["reasons"][name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    for turn in range(repetitions):
        for name, work in works.items():
            dist.barrier()
            cpu, begun = time.process_time(), time.perf_counter()
            work()
            out[name]["cpu"].append(time.process_time() - cpu)
            dist.barrier()
            out[name]["seconds"].append(time.perf_counter() - begun)
            rig.say(
                f"turn {turn + 1} of {repetitions}: {name:<28} {out[name]['seconds'][-1]:.2f} s"
            )
    return out


def behind_links(length: int, repeats: int) -> list[tuple[str, float, float]]:
    """On one rank of the rig: (name, seconds, bytes sent) of every repetition."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    with sl.use_mesh(sl.make_mesh(device="cpu", s=dist.get_world_size())):
        n = length // dist.get_world_size()
        blocks = [torch.randn(1, heads, n, 64, generator=draw) for heads in (8, 2, 2)]

        def work(algorithm: str) -> Callable[[], Any]:
            def step() -> None:
                q, k, v = (x.detach().requires_grad_() for x in blocks)
                lay = Ring("s", 2, "zigzag")
                out = sl.ring_attention(
                    q, k, v, layout=lay, mask=sl.masks.Causal(), algorithm=algorithm
                )
                out.backward(torch.ones_like(out))

            return step

        names = ("ring", "ring_bidirectional", "allgather", "ulysses", "pass_q", "rsa")
        return [
            (r.name, r.seconds, r.sent)
            for r in rig.compare({a: work(a) for a in names}, repeats, told=True)
        ]


def _rig(length: int, repeats: int) -> None:
    if reason := rig.unavailable():
        print(f"behind links: not measured: {reason}")
        return
    try:
        *answers, control = rig.run("benchmarks.attention:behind_links", 4, 50.0, length, repeats)
    except rig.Disturbed as error:
        print(f"behind links: {error}")
        return
    rows = [rig.Row(*r) for r in answers[0]]
    print(
        f"behind links of 50 Mbit/s, {length} positions, over all-gather (control "
        f"{max(control):.2f}):"
    )
    for name in dict.fromkeys(r.name for r in rows):
        print(f"  {name:<20} bytes {rig.ratio(rows, name, 'allgather', 'sent'):.2f}, "
              f"time {rig.ratio(rows, name, 'allgather'):.2f}")  # fmt: skip


def _ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("length", 8192), ("heads", 4), ("size", 64), ("repetitions", 5)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    arguments.add_argument("--torch", action="store_true", help="torch's context_parallel, too")
    arguments.add_argument("--out", type=Path, default=Path("out"))
    args = arguments.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed tensors leave the process
    print(
        f"sequence {args.length}, {args.heads} heads of {args.size}, fp32, 4 processes on "
        f"{os.cpu_count()} cores",
        flush=True,
    )
    ranks = sl.launch(
        measure, args.length, args.heads, args.size, args.repetitions, args.torch, s=4, timeout=1200
    )
    rows = []
    print(
        f"{'':<28}{'peak MB':>9}{'paper MB':>10}{'ratio':>7}{'CPU s':>8}{'max/mean':>10}{'time s':>8}"
    )
    for name in (n for n in ranks[0] if n != "reasons"):
        growth = max(r[name]["growth"] for r in ranks)
        paper = max((r[name].get("paper", 0) for r in ranks), default=0)
        cpu = [statistics.median(r[name]["cpu"]) for r in ranks]
        seconds = statistics.median(ranks[0][name]["seconds"])
        balance = max(cpu) / statistics.mean(cpu)
        rows.append((name, growth, paper, max(cpu), balance, seconds))
        on_paper = f"{paper / 1e6:>10.1f}{growth / paper:>7.2f}" if paper else f"{'':>17}"
        print(
            f"{name:<28}{growth / 1e6:>9.1f}{on_paper}{max(cpu):>8.2f}{balance:>10.3f}{seconds:>8.2f}"
        )
    peaks = {row[0]: row[1] for row in rows}
    print(f"peak: ring / all-gather {peaks['ring, full'] / peaks['all-gather, full']:.2f} (bar 0.60), "
          f"ring / rsa {peaks['ring, full'] / peaks['rsa, full']:.3f} (bar 0.15)")  # fmt: skip
    balance = {row[0]: row[4] for row in rows}
    print(f"balance of causal zigzag {balance['ring, causal, zigzag']:.3f} (bar 1.05), "
          f"both ways {balance['both ways, causal, zigzag']:.3f}, "
          f"contiguous {balance['ring, causal, contiguous']:.3f}")  # fmt: skip
    times = {row[0]: ranks[0][row[0]]["seconds"] for row in rows}
    for ours, theirs in (
        ("ring, full", "all-gather, full"), ("both ways, full", "all-gather, full"),
        ("ring, full", "rsa, full"),
        ("ring, causal, zigzag", "all-gather, causal, zigzag"), ("ring, full", "torch, full"),
        ("ring, causal, zigzag", "torch, causal"),
    ):  # fmt: skip
        if theirs in times:
            print(f"time: {ours} / {theirs} {_ratio(times[ours], times[theirs]):.2f}")
    for name, reason in ranks[0]["reasons"].items():
        print(f"{name}: does not run here: {reason}")
    _rig(args.length // 4, args.repetitions)
    args.out.mkdir(exist_ok=True)
    with open(args.out / "attention.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["case", "peak bytes", "bytes on paper", "cpu seconds", "cpu max/mean", "seconds"]
        )
        writer.writerows(rows)


if __name__ == "__main__":
    main()
