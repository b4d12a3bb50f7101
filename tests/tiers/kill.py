"""Kill ranks that write rows to one directory, and go on: ``python -m tests.tiers.kill --count 60``.

Three forked processes share a directory.  At each generation each reads its rows, computes the next
ones and commits.  Those chosen send themselves SIGKILL before, after or within a system call; the
others are killed when one is gone.  Then all ranks must find one generation, not older than what
every rank had committed, with the bytes of an uninterrupted run; and they go on, are killed again,
and reach the end with the bytes of an uninterrupted run.
"""

import argparse
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.tiers.disk import DiskRows
from tests.tiers.disk_cases import CALLS, PAGE, intercepted, opened

WORLD, LAST = 3, 5
ROWS = {"a": 2 * PAGE + 1, "b": 5 * PAGE, "rare": 77, "none": 0}


class Kill(NamedTuple):
    """``ranks`` die ``when`` they make the ``nth`` ``call``: before, after, within (a torn write)."""

    ranks: tuple[int, ...]
    when: str
    call: str
    nth: int


def start(rank: int) -> dict[str, Tensor]:
    return {n: torch.arange(b).add(rank).to(torch.uint8) for n, b in ROWS.items()}


def updated(rows: dict[str, Tensor], rank: int, generation: int) -> dict[str, Tensor]:
    """Compute the rows of the next generation; one of them changes at every third alone."""
    return {
        n: x * 3 + rank + generation if n != "rare" or generation % 3 == 0 else x
        for n, x in rows.items()
    }


def uninterrupted(rank: int, generation: int) -> dict[str, Tensor]:
    rows = start(rank)
    for g in range(1, generation + 1):
        rows = updated(rows, rank, g)
    return rows


def found(rows: DiskRows) -> dict[str, Tensor]:
    out = {n: torch.empty(b, dtype=torch.uint8) for n, b in ROWS.items()}
    for ticket in [rows.read(n, x) for n, x in out.items()]:
        ticket.wait()
    return out


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in ROWS)


def train(path: str, rank: int, said: int, all_are_open: Any) -> None:
    """Go on to the last generation; write each that was committed to the pipe ``said``."""
    with opened(path, rank, WORLD, rows=ROWS) as rows:
        # as any collective of a job has it
        all_are_open.wait(60)
        if rows.generation < 0:
            for n, x in start(rank).items():
                rows.write(n, x)
            rows.commit(0)
            os.write(said, bytes([0]))
        while (g := (max(rows.generation, 0)) + 1) <= LAST:
            before = found(rows)
            for n, x in updated(before, rank, g).items():
                if x is not before[n]:
                    rows.write(n, x)
            rows.commit(g, {"rank": rank})
            os.write(said, bytes([g]))


def rank_main(path: str, rank: int, said: int, kill: Kill | None, all_are_open: Any) -> None:
    torch.set_num_threads(1)
    made: Counter[str] = Counter()

    def act(name: str, call: Any, args: Any, kw: Any) -> Any:
        made[name] += 1
        mine = (
            kill is not None and rank in kill.ranks and (name, made[name]) == (kill.call, kill.nth)
        )
        if mine and kill.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if mine and kill.when == "within" and name == "pwrite":
            fd, data, at = args
            call(fd, data[: len(data) // 2 // PAGE * PAGE], at)
            os.kill(os.getpid(), signal.SIGKILL)
        out = call(*args, **kw)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    with intercepted(act):
        train(path, rank, said, all_are_open)
    os._exit(0)


def attempt(path: str, kill: Kill | None) -> list[list[int]]:
    """Run all ranks until they end or one is gone; return what each had committed."""
    context, said, ranks = mp.get_context("fork"), [], []
    all_are_open = context.Barrier(WORLD)
    for rank in range(WORLD):
        out, into = os.pipe()
        process = context.Process(target=rank_main, args=(path, rank, into, kill, all_are_open))
        process.start()
        os.close(into)
        said.append(out)
        ranks.append(process)
    until = time.monotonic() + 60
    while any(p.exitcode is None for p in ranks) and time.monotonic() < until:
        if any(p.exitcode for p in ranks):
            time.sleep(0.01)
            break
        time.sleep(0.002)
    codes = [p.exitcode for p in ranks]
    for p in ranks:
        p.kill()
        p.join()
    assert set(codes) <= {None, 0, -signal.SIGKILL}, f"a rank raised: {codes}"
    assert time.monotonic() < until, "the ranks hang"
    done = []
    for out in said:
        done.append(list(os.read(out, 1 << 10)))
        os.close(out)
    return done


def check(path: str, done: list[list[int]]) -> tuple[str, int]:
    """Open the directory as the next attempt would; (what is wrong, the generation)."""
    order = random.Random(str(done)).sample(range(WORLD), WORLD)
    every: dict[int, DiskRows] = {}
    try:
        for rank in order:
            every[rank] = opened(path, rank, WORLD, rows=ROWS)
        numbers = {rows.generation for rows in every.values()}
        least = min(max(some, default=-1) for some in done)
        number = numbers.pop()
        if numbers:
            return f"ranks go on from {numbers | {number}}", number
        if number < least:
            return f"generation {least} was committed, {number} is there", number
        if number >= 0:
            for rank, rows in every.items():
                if not same(found(rows), uninterrupted(rank, number)):
                    return f"rank {rank} has other bytes at generation {number}", number
        return "", number
    finally:
        for rows in every.values():
            rows.close()


def run(kills: list[Kill]) -> tuple[str, list[int]]:
    """(what was wrong, the generations that were found after each kill)."""
    seen: list[int] = []
    with tempfile.TemporaryDirectory() as path:
        done: list[list[int]] = [[] for _ in range(WORLD)]
        for kill in [*kills, None]:
            for mine, more in zip(done, attempt(path, kill), strict=True):
                mine += more
            wrong, number = check(path, done)
            seen.append(number)
            # what was committed alone may be committed again
            done = [[g for g in mine if g <= number] for mine in done]
            if wrong:
                return wrong, seen
        if seen[-1] != LAST:
            return f"it ended at {seen[-1]}", seen
        if left := [n for n in os.listdir(path) if n.startswith(".")]:
            return f"left behind: {left}", seen
    return "", seen


MOST = {"open": 40, "pwrite": 28, "preadv": 120, "fdatasync": 24, "fsync": 3, "rename": 1,
        "allocate": 1, "ftruncate": 1, "lock_within": 1, "try_lock": 1, "close": 40}  # fmt: skip
"""How often a rank makes each call, about."""


def drawn(count: int, seed: int = 0) -> list[list[Kill]]:
    """Every call and moment in turn; ranks, which time it is made, and a second kill drawn."""
    draw = random.Random(seed)
    assert set(MOST) <= set(CALLS)
    points = [(when, call) for call in MOST for when in ("before", "after")]
    points += [("within", "pwrite")] * 6 + [
        (w, c) for w in ("before", "after") for c in ("pwrite", "fdatasync")
    ] * 3

    def one() -> Kill:
        when, call = draw.choice(points)
        return Kill(ranks(), when, call, draw.randint(1, MOST[call]))

    def ranks() -> tuple[int, ...]:
        return draw.choice([(0,), (1,), (2,), (0, 2), tuple(range(WORLD))])

    cases = []
    while len(cases) < count:
        for when, call in draw.sample(points, len(points)):
            first = Kill(ranks(), when, call, draw.randint(1, MOST[call]))
            cases.append([first, one()] if draw.random() < 0.5 else [first])
    return cases[:count]


CASES = [
    [Kill((0, 1, 2), "before", "rename", 1)],
    [Kill((1,), "within", "pwrite", 9), Kill((0,), "after", "pwrite", 14)],
    [Kill((0,), "after", "fdatasync", 8), Kill((2,), "within", "pwrite", 12)],
]
"""For every run of the tests."""


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--count", type=int, default=60)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    bad, at = 0, Counter[Any]()
    for kills in drawn(args.count, args.seed):
        wrong, seen = run(kills)
        bad += bool(wrong)
        at.update(seen[:-1])
        if wrong:
            print(f"{kills}: {wrong}", flush=True)
    where = ", ".join(f"{n} at {g}" for g, n in sorted(at.items(), key=str))
    print(f"{args.count} runs, {sum(at.values())} kills ({where}): {bad} wrong")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
