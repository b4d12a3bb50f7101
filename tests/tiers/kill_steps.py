"""Kill training in memory tiers with a disk, and go on: ``python -m tests.tiers.kill_steps --count 60``.

A forked process trains, in a durable run, and sends itself SIGKILL before or after the nth call of a
named function of the step, or of a system call.  The next process takes the run up: it finds the
last step that had ended, or the one before it, which may be written while the next one is computed,
and reaches the end with the bits of an uninterrupted run.
"""

import argparse
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import shardlib as sl
from shardlib.optim import chunk_cache, tiered_room, tiered_step
from shardlib.tiers import disk, rows
from tests.optim.test_tiered import WIDE, Blocks
from tests.tiers.disk_cases import intercepted

o = sl.optim
LAST = 4

POINTS: dict[str, tuple[Any, str, int]] = {
    "load of a block": (rows.RowStore, "load", 20),
    "gradient sent": (tiered_room.TieredRoom, "send", 12),
    "update of a block": (tiered_step, "_updated", 12),
    "row read": (disk.DiskRows, "read", 60),
    "row written": (disk.DiskRows, "write", 60),
    "end of a step": (chunk_cache.ChunkCache, "end_step", 3),
    "commit": (disk.DiskRows, "commit", 3),
    "rows made": (rows.RowStore, "make", 9),
    "disk opened": (rows.RowStore, "open", 1),
}
"""Name -> where a function is, its name, and how often a run calls it, about."""

SYSTEM = {"pwrite": 60, "preadv": 60, "fdatasync": 6, "rename": 1, "fsync": 2}

TRANSFORMS: dict[str, Callable[[], Any]] = {
    "step": lambda: o.chain(o.clip_by_global_norm(0.05), o.adamw(0.01)),
    "value_and_step": lambda: o.adamw(o.warmup_cosine(0.01, 2, 5)),
}


class Kill(NamedTuple):
    """``when`` ("before", "after") the ``nth`` call of a point or system call a process dies."""

    when: str
    point: str
    nth: int


class Case(NamedTuple):
    """How a run is trained, on a mesh, with bytes of host memory beside the least."""

    verb: str
    dtype: torch.dtype
    master: str | None
    mesh: tuple[tuple[str, int], ...]
    more: int
    update: str = "host"


def trained(case: Case, path: str | None, said: Callable[[int], object] = lambda i: None) -> Any:
    """Train to the end, from the last completed step of the run in ``path``; return all bits."""
    torch.set_num_threads(1)
    with sl.simulate(**dict(case.mesh)):
        torch.manual_seed(0)
        net = Blocks(4).to(case.dtype)
        apply, params = sl.parallelize(net, [("*", "...")], inputs={"x": "data ."})
        tiers = None
        if path is not None:
            how: Any = {"host": HOST + case.more, "update": case.update}
            tiers = o.Tiers(disk=path, durable=True, resume=True, **how)
        tx = o.zero(TRANSFORMS[case.verb](), "data", 3, master=case.master, tiers=tiers)
        params = tx.shard(params)
        state = tx.init(params)
        both = o.value_and_step(apply, tx)
        begin = 0
        if path is not None:
            begin = params.generation
        said(begin)
        for i in range(begin, LAST):
            x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(i)).to(case.dtype)
            if case.verb == "value_and_step":
                _, params, state, _ = both(params, state, x)
            else:
                _, grads = sl.value_and_grad(apply, into=tx)(params, x)
                params, state, _ = o.step(tx, params, grads, state)
            said(i + 1)
        kept = {**o.state_dict(params), **o.state_dict(state)}
        whole = {n: sl.unshard(x) if isinstance(x, torch.Tensor) else x for n, x in kept.items()}
        if path is not None:
            assert params.generation == LAST
        return {
            n: x.reshape(-1).view(torch.uint8).tolist() if isinstance(x, torch.Tensor) else x
            for n, x in whole.items()
        }


HOST = 194_000


def killed(case: Case, path: str, kill: Kill | None, into: Any) -> None:
    """Train in a process of its own; send the number of each step, and the end's bits."""
    made = 0

    def at(when: str, name: str) -> None:
        nonlocal made
        made += when == "before" and kill is not None and name == kill.point
        if kill is not None and (when, name, made) == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def act(name: str, call: Any, args: Any, kw: Any) -> Any:
        at("before", name)
        out = call(*args, **kw)
        at("after", name)
        return out

    with pytest.MonkeyPatch.context() as patch, intercepted(act):
        for name, (owner, function, _) in POINTS.items():
            inner = getattr(owner, function)

            def run(*args: Any, name: str = name, inner: Any = inner, **kw: Any) -> Any:
                return act(name, inner, args, kw)

            patch.setattr(owner, function, run)
        into.send(trained(case, path, into.send))
    os._exit(0)


def attempt(case: Case, path: str, kill: Kill | None) -> list[Any]:
    """Train until it ends or is killed; return what it sent."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=killed, args=(case, path, kill, theirs))
    process.start()
    theirs.close()
    found = []
    try:
        while True:
            found.append(ours.recv())
    except EOFError:
        pass
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return found


def run(case: Case, kills: list[Kill], want: Any) -> tuple[str, list[int]]:
    """(what was wrong, the steps from which the run was taken up)."""
    seen: list[int] = []
    with tempfile.TemporaryDirectory() as path:
        least = 0
        for kill in [*kills, None]:
            begin, *found = attempt(case, path, kill) or [least]
            seen.append(begin)
            if begin < least:
                return f"step {least} had ended, {begin} was there", seen
            steps = [x for x in found if isinstance(x, int)]
            least = max([begin, *(i - 1 for i in steps)])
        if not found or not isinstance(found[-1], dict):
            return "it never ended", seen
        if wrong := [n for n in want if want[n] != found[-1][n]]:
            return f"other bits in {wrong[:3]}", seen
    return "", seen


CASES = [
    Case("step", torch.float32, None, (("data", 1),), 0),
    Case("step", torch.bfloat16, "bf16+rem", (("data", 2),), 0),
    Case("value_and_step", torch.float32, None, (("data", 2),), -60_000),
    Case("value_and_step", torch.bfloat16, "bf16+rem", (("data", 1),), 0),
    Case("step", torch.bfloat16, "fp32", (("data", 2),), 1_000_000),
    Case("step", torch.float32, None, (("data", 2),), 0, "device"),
    Case("value_and_step", torch.bfloat16, "bf16+rem", (("data", 1),), 0, "device"),
]

KILLS = [
    [Kill("before", "commit", 2)],
    [Kill("after", "update of a block", 6), Kill("before", "row written", 20)],
    [Kill("after", "pwrite", 40)],
]
"""For every run of the tests."""


def drawn(count: int, seed: int = 0) -> list[tuple[Case, list[Kill]]]:
    """Every point and moment in turn; the case, which call, and a second kill are drawn."""
    draw = random.Random(seed)
    most = {name: n for name, (_, _, n) in POINTS.items()} | SYSTEM
    points = [(when, name) for name in most for when in ("before", "after")]

    def one(when: str, name: str) -> Kill:
        return Kill(when, name, draw.randint(1, most[name]))

    found = []
    while len(found) < count:
        for when, name in draw.sample(points, len(points)):
            kills = [one(when, name)]
            if draw.random() < 0.3:
                kills.append(one(*draw.choice(points)))
            found.append((draw.choice(CASES), kills))
    return found[:count]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--count", type=int, default=60)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    wants = {case: trained(case, None) for case in CASES}
    bad, at = 0, Counter[int]()
    for case, kills in drawn(args.count, args.seed):
        wrong, seen = run(case, kills, wants[case])
        bad += bool(wrong)
        at.update(seen)
        if wrong:
            print(f"{case} {kills}: {wrong}", flush=True)
    where = ", ".join(f"{n} at {g}" for g, n in sorted(at.items()))
    print(f"{args.count} runs, taken up {where}: {bad} wrong")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
