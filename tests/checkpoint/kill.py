"""Kill ranks between file operations of a save, and see what is left: ``python -m tests.checkpoint.kill``.

Four forked processes save over an older checkpoint; those chosen send themselves SIGKILL before
their n-th operation on files, locks or the job's store.  Afterwards a checkpoint must load, whole;
whoever raised must find the old one there, whoever returned the new one; nobody may wait long; and
the next save must leave nothing behind.
"""

import argparse
import contextlib
import fcntl
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.checkpoint import files, folder
from shardlib.errors import CheckpointError
from shardlib.mesh.store import Client

WORLD, TIMEOUT = 4, 8.0


class Case(NamedTuple):
    """``victims`` die before their ``nth`` operation; ``how``: a save in
    place, without an exchange of names, of a step, asynchronous, or of two stages of a pipeline.

    ``point``  where rank 0 dies instead, from the begin of its commit on: "after rename 2".
    """

    victims: tuple[int, ...]
    nth: int
    how: str = "place"
    point: str = ""


POINTS = {
    "place": "fsync 1, exchange 1, fsync 2, unlink 1, unlink 3, rmdir 1, set 1",
    "aside": "fsync 1, rename 1, rename 2, fsync 2, unlink 1, unlink 3, rmdir 1, set 1",
    "step": "fsync 1, rename 1, fsync 2, set 1, rename 2, unlink 1, unlink 3, rmdir 1",
}
"""Operations of a commit, by ``how``, and of what follows: the removal of the old one, a word."""
POINTS["later"] = POINTS["stages"] = POINTS["place"]


def tree(k: int) -> dict[str, Any]:
    mesh = sl.current_mesh()
    if "pipe" in mesh:
        assert mesh.coord is not None
        stage, own = mesh.without("pipe"), "wr"[mesh.coord["pipe"]]
        both = sl.shard(torch.full((30,), float(k)), "...", stage)
        return {own: sl.shard(torch.full((96, 64), float(k)), "x .", stage), "t": both, "step": k}
    return {
        "w": sl.shard(torch.full((96, 64), float(k)), "x y"),
        "r": sl.shard(torch.full((300, 300), float(k)), "..."),
        "step": k,
    }


def counting(before: Callable[[str], None], after: Callable[[str], None]) -> None:
    """Call these around every operation that others can see."""

    def wrap(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            before(name)
            out = inner(*args, **kwargs)
            after(name)
            return out

        setattr(owner, name, run)

    for name in ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir", "pwrite"):
        wrap(os, name)
    wrap(fcntl, "flock")
    wrap(folder, "exchange")
    wrap(files, "allocate")
    wrap(Client, "set")  # a word to the others
    wrap(folder.Work, "commit")


def save(path: str, k: int, how: str) -> None:
    step = k if how == "step" else None
    sl.save(path, tree(k), step=step, keep=step and 1, wait=how != "later", timeout=TIMEOUT).wait()


def rank_main(rank: int, place: str, case: Case) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{place}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    if case.how == "aside":
        folder.exchange = lambda a, b: False  # type: ignore[assignment]
    if case.nth % 2:
        folder._ALONE, folder._spare = 0, lambda: True  # the second thread writes, and dies
    folder._EARLY = 1 << 14
    done: list[str] = []
    since: list[str] = []  # the begin of the commit

    def before(name: str) -> None:
        done.append(name)
        if name == "commit" or since:
            since.append(name)
        if rank in case.victims and len(done) == case.nth:
            os.kill(os.getpid(), signal.SIGKILL)
        named("before", name)

    def named(when: str, name: str) -> None:
        if since and f"{when} {name} {since.count(name)}" == case.point:
            os.kill(os.getpid(), signal.SIGKILL)

    axes = {"pipe": 2, "x": 2} if case.how == "stages" else {"x": 2, "y": 2}
    with sl.make_mesh(device="cpu", **axes):
        save(f"{place}/c", 1, case.how)
        write = open
        counting(before, lambda name: named("after", name))
        began = time.monotonic()
        try:
            save(f"{place}/c", 2, case.how)
            said = ["returned", ""]
        except CheckpointError as e:
            said = ["raised", e.message]
    with write(f"{place}/said{rank}", "w") as f:
        json.dump([*said, time.monotonic() - began, done], f)
    os._exit(0)


def held(place: str) -> int:
    """Which checkpoint is there; it must be whole."""
    found = sl.load(f"{place}/c")
    k = found["step"]
    assert (found["w"] == k).all() and (found["r"] == k).all(), "a mix of two checkpoints"
    return k


def run(case: Case) -> tuple[list[str], dict[str, Any]]:
    """(what was wrong, what happened)."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        context = mp.get_context("fork")
        ranks = [context.Process(target=rank_main, args=(r, place, case)) for r in range(WORLD)]
        for p in ranks:
            p.start()
        until = time.monotonic() + 60
        for p in ranks:
            p.join(max(0.1, until - time.monotonic()))
        if hung := [r for r, p in enumerate(ranks) if p.is_alive()]:
            wrong.append(f"ranks {hung} hang")
            for p in ranks:
                p.kill()
                p.join()
        said = {}
        for r in range(WORLD):
            with contextlib.suppress(FileNotFoundError):
                said[r] = json.loads(Path(place, f"said{r}").read_text())
        if (
            silent := set(range(WORLD))
            - set(said)
            - set(case.victims)
            - ({0} if case.point else set())
        ):
            wrong.append(f"ranks {sorted(silent)} ended without a word")
        if case.point and 0 in said:
            wrong.append(f"rank 0 did not come to {case.point}")
        try:
            k = held(place)
        except Exception as e:
            return [*wrong, f"lost: {e}"], {}
        if k not in (1, 2):
            wrong.append(f"holds {k}")
        for r, (what, text, seconds, _) in said.items():
            if (what == "returned") != (k == 2):
                wrong.append(f"rank {r} {what} ({text}), and the checkpoint is {k}")
            if seconds > TIMEOUT + 5:
                wrong.append(f"rank {r} took {seconds:.1f} s")
        if len({text for _, text, *_ in said.values()}) > 1:
            wrong.append(f"ranks differ: {said}")
        with sl.simulate(x=2, y=2):
            save(f"{place}/c", 3, case.how)
        assert held(place) == 3
        ours = [*os.listdir(place), *(os.listdir(f"{place}/c") if case.how == "step" else [])]
        if left := [f for f in ours if f.startswith(".")]:
            wrong.append(f"left behind: {left}")
        slowest = max([s[2] for s in said.values()], default=0.0)
        ops = max([len(s[3]) for s in said.values()], default=0)
        return wrong, {"holds": k, "survivors": len(said), "slowest": slowest, "operations": ops}


def drawn(count: int, seed: int = 0) -> list[Case]:
    """Ranks, moments and ways, drawn; the number of operations is found by a run without a kill."""
    draw = random.Random(seed)
    most = run(Case((), 0))[1]["operations"]
    cases = []
    for _ in range(count):
        victims = draw.choice(
            [(0,), (draw.randrange(1, WORLD),), (1, 2), (0, 3), tuple(range(WORLD))]
        )
        how = draw.choice(["place", "place", "aside", "step", "later", "stages"])
        top = most if 0 in victims else most // 2
        cases.append(Case(victims, draw.randrange(1, top + 1), how))
    return cases


def in_commit(count: int, seed: int = 0) -> list[Case]:
    """Every named point of every way, over and over, in drawn order."""
    draw, cases = random.Random(seed), []
    every = [
        Case((), 0, how, f"{when} {point}")
        for how, points in POINTS.items()
        for point in points.split(", ")
        for when in ("before", "after")
    ]
    while len(cases) < count:
        cases += draw.sample(every, len(every))
    return cases[:count]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--count", type=int, default=60)
    p.add_argument("--commit", type=int, default=60, help="kills at named points of the commit")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    bad, slowest, held_by = 0, 0.0, {1: 0, 2: 0}
    cases = drawn(args.count, args.seed) if args.count else []
    cases += in_commit(args.commit, args.seed)
    for case in cases:
        wrong, found = run(case)
        bad += bool(wrong)
        slowest = max(slowest, found.get("slowest", 0.0))
        held_by[found.get("holds", 1)] += 1
        print(case, found, *wrong, flush=True)
    print(
        f"{len(cases)} kills, {bad} wrong; old {held_by[1]}, new {held_by[2]}; slowest survivor {slowest:.2f} s"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
