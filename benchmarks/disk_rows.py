"""Rows on a disk against plain sequential direct I/O on the same file system, interleaved.

    python -m benchmarks.disk_rows [--megabytes 256] [--rows 16] [--rounds 7] [--path .]

Rows are copied to buffers, checksummed and committed; the plain side transfers the same bytes from
one buffer and flushes them.  Each comes first in every other round; ratios are medians of the
rounds' own.  Seconds of the processor count both threads.
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from shardlib.filesystem import allocate, open_file, read_all, write_all
from shardlib.tiers.disk import DiskRows

__all__ = ["main"]

PIECE = 4 << 20


def timed(job: Callable[[], None]) -> tuple[float, float]:
    """(seconds, seconds of the processor)."""
    began, used = time.perf_counter(), time.process_time()
    job()
    return time.perf_counter() - began, time.process_time() - used


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--megabytes", type=int, default=256)
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--path", default=".")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    nbytes = (args.megabytes << 20) // args.rows // PIECE * PIECE or PIECE
    total, held = nbytes * args.rows, mmap.mmap(-1, PIECE)
    names = [f"row {i}" for i in range(args.rows)]
    x = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    into = [torch.empty_like(x), torch.empty_like(x)]
    with (
        tempfile.TemporaryDirectory(dir=args.path) as path,
        DiskRows(path, dict.fromkeys(names, nbytes)) as rows,
    ):
        folder = os.open(path, os.O_RDONLY)
        fd = open_file(folder, "plain", flags=os.O_RDWR | os.O_CREAT, direct=True)
        allocate(fd, total)

        def write() -> None:
            for name in names:
                rows.write(name, x)
            rows.commit((max(rows.generation, 0)) + 1)

        def plain_write() -> None:
            for at in range(0, total, PIECE):
                write_all(fd, memoryview(held), at)
            os.fdatasync(fd)

        def read() -> None:
            for ticket in [rows.read(name, into[i % 2]) for i, name in enumerate(names)]:
                ticket.wait()

        def plain_read() -> None:
            for at in range(0, total, PIECE):
                read_all(fd, memoryview(held), at, "plain")

        for what, ours, plain in (("write", write, plain_write), ("read", read, plain_read)):
            ours(), plain()
            found = []
            for i in range(args.rounds):
                jobs = [ours, plain] if i % 2 else [plain, ours]
                times = {job: timed(job) for job in jobs}
                found.append((*times[ours], times[plain][0]))
            mine, used, theirs = (statistics.median(some) for some in zip(*found, strict=True))
            ratio = statistics.median(a / b for a, _, b in found)
            print(
                f"{what:<6} rows {total / 1e9 / mine:.2f} GB/s ({used / total * 1e9:.2f} s of the "
                f"processor per GB), plain {total / 1e9 / theirs:.2f} GB/s, time {ratio:.2f}"
            )
        os.close(fd)
        os.close(folder)
    return 0


if __name__ == "__main__":
    main()
