"""Save and load on 4 gloo ranks against torch.distributed.checkpoint, in one interleaved run.

    python -m benchmarks.checkpoint [--megabytes 256] [--rounds 5] [--memory | --cold]

Both flush what they write to the disk, and both end a load with tensors that were not there before:
ours makes them, DCP's are made empty for it to fill, within its time.  Each comes first in every
other round, and neither finds memory that the other has left; what is free the machine has touched
before, but with ``--cold``, when a virtual machine's host may have taken it back.  A time is that of the slowest rank;
ratios are medians of the rounds' own.  CPU is that of all ranks together, which other load on
the machine stretches less.  ``--memory``: peak of anonymous memory beside what was there, sampled
every 2 ms.
"""

import argparse
import ctypes
import gc
import mmap
import multiprocessing as mp
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl

__all__ = ["main"]


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Anonymous:")) * 1024


class Peak:
    """The most anonymous memory within it, beside what was there before."""

    def __enter__(self) -> "Peak":
        gc.collect()
        self.before, self.bytes, self.over = anonymous(), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.over.wait(0.002):
            self.bytes = max(self.bytes, anonymous() - self.before)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.bytes = max(self.bytes, anonymous() - self.before)


trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
"""Gives what was freed back to the system: what is timed begins without the memory of what was
timed before, as a program does that resumes."""


def backed(nbytes: int) -> None:
    """Touch memory and give it back.

    A virtual machine's host takes back what was free for some seconds, and what is then touched
    first costs a trip to the host: as much as reading it, and in other rounds nothing.  So
    what is free is made the machine's own before either contestant is timed.
    """
    room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(room, dtype=torch.uint8).fill_(1)


def tree(megabytes: int, layout: str) -> dict[str, Any]:
    """Matrices of 4 MB under a layout, an eighth of all on every rank."""
    count = megabytes // 4
    split = [layout] * (count - count // 8) + ["..."] * (count // 8)
    g = torch.Generator().manual_seed(0)
    return {
        f"w{i}": sl.shard(torch.randn(1024, 1024, generator=g), lay) for i, lay in enumerate(split)
    }


def measure(
    megabytes: int, rounds: int, memory: bool, cold: bool, place: str
) -> dict[str, list[float]]:
    """Seconds (or bytes) of this rank, by what was done."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    warnings.simplefilter("ignore")
    ours = tree(megabytes, "x y")
    theirs = {n: sl.dtensor.to_dtensor(x) for n, x in ours.items()}
    other = {n: sl.reshard(x, ". (x y)") if x.sharding.axes else x for n, x in ours.items()}
    local = sum(x.raw.nbytes for x in ours.values())
    found: dict[str, list[float]] = {}

    def timed(what: str, run: Callable[[], Any]) -> Any:
        gc.collect()
        trim(0)
        dist.barrier()
        if not cold:
            backed(3 * local)
            dist.barrier()
        if memory:
            with Peak() as peak:
                out = run()
                dist.barrier()
            found.setdefault(what, []).append(peak.bytes)
            return out
        began, used = time.perf_counter(), time.process_time()
        out = run()
        found.setdefault(what, []).append(time.perf_counter() - began)
        found.setdefault(f"{what} cpu", []).append(time.process_time() - used)
        return out

    def theirs_read(folder: str) -> Any:
        into = {n: torch.empty_like(x) for n, x in theirs.items()}
        dcp.load(into, storage_reader=FileSystemReader(folder))
        return into

    def read(folder: str, like: dict[str, Any]) -> Any:
        out = sl.load(folder, like)
        found.setdefault("read", []).append(sl.load.bytes_read / local)  # type: ignore[attr-defined]
        return out

    def saved(a: str) -> None:
        timed("save", lambda: sl.save(a, ours))

    def dcp_saved(b: str) -> None:
        writer = FileSystemWriter(b, sync_files=True)
        timed("dcp save", lambda: dcp.save(theirs, storage_writer=writer))

    def loaded(a: str) -> None:
        got = timed("load", lambda: read(a, ours))
        assert all(torch.equal(got[n].raw, x.raw) for n, x in ours.items())

    def dcp_loaded(b: str) -> None:
        got = timed("dcp load", lambda: theirs_read(b))
        assert all(torch.equal(got[n].to_local(), x.to_local()) for n, x in theirs.items())

    def loaded_elsewhere(a: str) -> None:
        got = timed("load elsewhere", lambda: read(a, other))
        assert all(torch.equal(got[n].raw, x.raw) for n, x in other.items())

    for i in range(rounds + 1):  # the first warms up
        a, b = f"{place}/ours{i}", f"{place}/theirs{i}"
        for pair in ([(saved, a), (dcp_saved, b)], [(loaded, a), (dcp_loaded, b)]):
            for run, folder in pair if i % 2 else pair[::-1]:  # each comes first as often
                run(folder)
        loaded_elsewhere(a)
        if memory:
            timed("save later", lambda a=a: sl.save(a, ours, wait=False).wait())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(a)
            shutil.rmtree(b)
    found["local"] = [local]
    return found


def rank_main(
    rank: int, port: int, megabytes: int, rounds: int, memory: bool, cold: bool, place: str
) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 4, rank == 0)  # as under torchrun
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    with sl.make_mesh(x=2, y=2, device="cpu"):
        found = measure(megabytes, rounds, memory, cold, place)
    dist.destroy_process_group()
    return found


def report(ranks: list[dict[str, list[float]]], memory: bool) -> None:
    slowest = {
        what: [max(r[what][i] for r in ranks) for i in range(1, len(ranks[0][what]))]
        for what in ranks[0]
        if what not in ("local", "read") and not what.endswith("cpu")
    }
    local = ranks[0]["local"][0]
    if memory:
        for what, peaks in slowest.items():
            print(
                f"{what:<16} {max(peaks) / 2**20:8.1f} MiB beside {local / 2**20:.1f} MiB of blocks"
            )
        return
    total = {
        what: [sum(r[f"{what} cpu"][i] for r in ranks) for i in range(1, len(ranks[0][what]))]
        for what in slowest
    }
    for what, times in slowest.items():
        print(
            f"{what:<16} {statistics.median(times):7.3f} s ({min(times):.3f} to {max(times):.3f}), "
            f"CPU {statistics.median(total[what]):.3f} s ({min(total[what]):.3f} at least)"
        )
    for what in ("save", "load"):
        ratio, of_cpu = (
            statistics.median(a / b for a, b in zip(t[what], t[f"dcp {what}"], strict=True))
            for t in (slowest, total)
        )
        print(
            f"{what}: {ratio:.2f} of torch.distributed.checkpoint's time, {of_cpu:.2f} of its CPU"
        )
    most = max(max(r["read"]) for r in ranks)
    print(f"bytes read: at most {most:.3f} of the local bytes")


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--megabytes", type=int, default=256)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--memory", action="store_true")
    p.add_argument("--cold", action="store_true")
    args = p.parse_args()
    if args.memory:  # kept arenas would hide what is asked for
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    print(f"{args.megabytes} MB on 4 ranks, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        context = mp.get_context("fork")  # which imports nothing again
        with context.Pool(4) as pool:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            given = (args.megabytes, args.rounds, args.memory, args.cold, place)
            ranks = [(r, port, *given) for r in range(4)]
            found = pool.starmap(rank_main, ranks, chunksize=1)
    report(found, args.memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
