"""Ranks that part ways or end, drawn: what every other rank then says, and how soon.

    python -m tests.faults [--count 60] [--seed 0] [--check | --without] [--steps | --places]

Four forked processes on a 2x2 mesh run the same program.  At a drawn step one of them skips an
operation, swaps two, brings another shape, and so on; or, before, in or after the first draw, save
or comparison, or while a save is under way, it raises, leaves, returns, is killed or stopped,
hangs, seeds alone, or the job's store closes.  Every rank that still runs must end with one error
that names this first cause, the same on all, within the timeout and five seconds; nothing may wait
longer, and no wrong number may come out.
"""

import argparse
import atexit
import contextlib
import io
import multiprocessing as mp
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.errors import ShardError
from shardlib.mesh.launch import loopback_store
from shardlib.mesh.store import Client

WORLD = 4
STEPS = 4


@dataclass(frozen=True)
class Fault:
    """What one rank does; what the others then say, with check and without.

    ``quiet``  the pattern of what they say without check; None: they need not notice.
    ``alone``  the rank itself raises nothing (it is gone, or asleep).
    ``aborts`` without check, gloo ends a rank that is sent more than it expects.
    """

    act: Callable[["Steps"], Any]
    said: str
    quiet: str | None
    alone: bool = False
    aborts: bool = False


class Steps:
    """What every rank runs.  ``who`` acts at step ``when``."""

    def __init__(self, fault: str, who: int, when: int) -> None:
        self.rank = dist.get_rank()
        self.fault, self.who, self.when = fault, who, when
        self.ours = False
        torch.manual_seed(0)
        self.w = sl.shard(torch.arange(64.0).reshape(8, 8), "x y")
        self.params = {n: sl.shard(torch.full((8,), float(i)), "x") for i, n in enumerate("abc")}

    def run(self) -> list[float]:
        found = []
        for step in range(STEPS):
            self.ours = self.rank == self.who and step == self.when
            if self.ours:
                print("fault", flush=True)
            found += self.step()
        return found

    def is_(self, *names: str) -> bool:
        return self.ours and self.fault in names

    def step(self) -> list[float]:
        if self.ours:
            FAULTS[self.fault].act(self)
        shape = 6 if self.is_("other shape") else 4096 if self.is_("long") else 4
        dtype = torch.int32 if self.is_("other dtype") else torch.float32
        a = torch.zeros(1) if self.is_("skip") else sl.psum(torch.ones(shape, dtype=dtype), "x")
        if self.is_("swap"):
            c = sl.psum(torch.full((4,), 10.0), "y")
            b = sl.psum(torch.full((4,), 1.0), "y")
        else:
            b = sl.psum(torch.full((4,), 1.0), "y")
            c = sl.psum(torch.full((4,), 10.0), "y")
        if self.is_("other layout"):
            self.w = sl.shard(torch.arange(64.0).reshape(8, 8), "y x")
        d = sl.unshard(self.w @ self.w)
        order = reversed(self.params) if self.is_("reordered") else iter(self.params)
        e = [sl.unshard(self.params[n]) for n in order]
        self.set_up()
        factor = 1.0 + self.is_("other number")
        f = sl.unshard((self.w * factor).sum())
        return [float(t.double().sum()) for t in (a, b, c, d, *e, f)]

    def set_up(self) -> None:
        """What is verified without check too: weights, and values that are copied."""
        torch.manual_seed(7 + 100 * self.is_("unseeded weights"))
        sl.parallelize(torch.nn.Linear(8, 8), [("weight", "x y"), ("bias", ".")])
        sl.shard(torch.full((8,), 1.0 + self.is_("another batch")), "x")


def _kill(how: int) -> Callable[[Steps], None]:
    return lambda s: os.kill(os.getpid(), how)


def _raise(s: Steps) -> None:
    raise ZeroDivisionError("of this rank")


def _alone(s: Steps) -> None:
    sl.unshard(s.w)


def _threaded(s: Steps) -> None:
    mesh = sl.current_mesh()

    def aside() -> None:
        with sl.use_mesh(mesh), contextlib.suppress(ShardError, RuntimeError):
            sl.psum(torch.full((4,), 100.0), "x")

    thread = threading.Thread(target=aside)
    thread.start()
    thread.join(0.3)


def _nothing(s: Steps) -> None:
    pass


FAULTS: dict[str, Fault] = {
    "skip": Fault(_nothing, r"and rank \d at psum over 'x'|at psum over 'x'.*and rank", None),
    "swap": Fault(_nothing, "at faults.py:.*and rank", None),
    "other shape": Fault(_nothing, r"float32\[6\]", "rank", aborts=True),
    "long": Fault(_nothing, r"float32\[4096\]", "SIGABRT", aborts=True),
    "other dtype": Fault(_nothing, r"int32\[4\]", None),
    "other layout": Fault(_nothing, "and rank", None, aborts=True),
    "other number": Fault(_nothing, r"mul.*2\.0", None),
    "reordered": Fault(_nothing, "and rank", None),
    "unseeded weights": Fault(_nothing, "hold different values of bias", "same"),
    "another batch": Fault(_nothing, "hold different values of the f32", "same"),
    "raise": Fault(_raise, "rank {who} raised ZeroDivisionError: of this rank, at faults.py", "same"),
    "exit": Fault(lambda s: sys.exit(0), r"rank {who} left by SystemExit\(0\)|rank {who} left", "same"),
    "gone": Fault(lambda s: os._exit(0), "rank {who} died: its process is gone", "same", True),
    "killed": Fault(_kill(signal.SIGKILL), "rank {who} died: its process is gone", "same", True),
    "stopped": Fault(_kill(signal.SIGSTOP), "rank {who} is stopped", "same", True),
    "asleep": Fault(lambda s: time.sleep(600), "rank {who} did not come: it is at faults.py", "same", True),
    "alone": Fault(_alone, "and rank|rank {who}", None),
    "a thread": Fault(_threaded, "thread|and rank", None),
}  # fmt: skip


class Places(Steps):
    """A program that draws, saves and compares; ``who`` acts at a place of it."""

    def __init__(self, fault: str, who: int, place: str, folder: str, check: bool) -> None:
        super().__init__(fault, who, -1)
        self.place, self.folder = place, folder
        self.left = {"in draw": 1, "in save": 3, "in check": 2, "in thread": 1}
        self.listen()

    def at(self, place: str) -> None:
        if self.rank == self.who and self.place == place:
            self.place = ""
            print("fault", flush=True)
            ENDS[self.fault].act(self)

    def listen(self) -> None:
        """Act in the middle of an agreement: between two of its calls to the store."""
        for method in ("set", "add", "compare_set"):
            inner = getattr(Client, method)

            def run(client: Client, key: str, *args: Any, inner: Any = inner) -> Any:
                main = threading.current_thread() is threading.main_thread()
                for word, place in (
                    ("/came", "in draw"),
                    ("shardlib/checkpoint", "in save" if main else "in thread"),
                    ("check/", "in check"),
                ):
                    if word in key:
                        self.left[place] -= 1
                        if not self.left[place]:
                            self.at(place)
                return inner(client, key, *args)

            setattr(Client, method, run)

    def run(self) -> list[float]:
        found = [self.sum()]
        self.at("before draw")
        found.append(self.draw())
        self.at("after draw")
        found += [self.sum(), self.draw()]
        self.at("before mesh")
        with sl.make_mesh(a=2, b=2, device="cpu", timeout=sl.current_mesh().timeout):
            found.append(float(sl.psum(torch.ones(1), "a")))
        self.at("before save")
        sl.save(f"{self.folder}/c", self.params)
        self.at("after save")
        found += [self.draw(), self.sum()]
        self.at("before check")
        with sl.check():
            found += [self.sum(), float(sl.unshard((self.w @ self.w).sum()))]
        self.at("after check")
        found.append(self.draw())
        saving = sl.save(f"{self.folder}/d", self.params, wait=False)
        self.at("in async")
        found.append(self.sum())
        saving.wait()
        return [*found, self.draw(), self.sum()]

    def sum(self) -> float:
        return float(sl.psum(sl.psum(torch.ones(4), "x"), "y").sum())

    def draw(self) -> float:
        return float(sl.unshard(torch.dropout(self.w, 0.5, True).sum()))


class Returned(BaseException):
    """The program of a rank ends before that of the others."""


def _return(s: Steps) -> None:
    raise Returned


ENDS: dict[str, Fault] = {
    "killed": Fault(_kill(signal.SIGKILL), "rank {who} died: its process is gone", "same", True),
    "terminated": Fault(_kill(signal.SIGTERM), "rank {who} died: its process is gone", "same", True),
    "raise": Fault(_raise, "rank {who} raised ZeroDivisionError: of this rank|rank {who}: ZeroDivisionError", "same"),
    "exit": Fault(lambda s: sys.exit(0), "rank {who} left|rank {who} was interrupted|rank {who}: SystemExit", "same"),
    "return": Fault(_return, "rank {who} left|rank {who} was interrupted|rank {who}: Returned", "same"),
    "asleep": Fault(lambda s: time.sleep(600), "rank {who} (did not come|said nothing)", "same", True),
    "stopped": Fault(_kill(signal.SIGSTOP), "rank {who} (is stopped|said nothing)", "same", True),
    "store": Fault(lambda s: time.sleep(0.3), "the store of the job is gone", "same"),
    "seeds": Fault(lambda s: torch.manual_seed(9), "rank {who} waits in random", "same"),
}  # fmt: skip

PLACES = (
    "before draw", "in draw", "after draw", "before mesh", "before save", "in save", "after save", "before check",
    "in check", "after check", "in async", "in thread",
)  # fmt: skip


SET_UP = ("unseeded weights", "another batch")
"""Faults of the first step: what is verified once."""

# ---------------------------------------------------------------- processes


@dataclass
class Told:
    """How one rank ended: ``kind`` the class of its error, ``ok`` or ``silent``."""

    kind: str
    text: str
    seconds: float
    cause: str = ""


def play(fault: str, who: int, when: int | str, *, check: bool, timeout: float = 3.0) -> list[Told]:
    """Run the program with a fault on real processes; how each rank ended, seconds after the fault.

    ``when``  the step, or the place.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _play(fault, who, when, check, timeout, folder)


def _play(
    fault: str, who: int, when: int | str, check: bool, timeout: float, folder: str
) -> list[Told]:
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    pipes, processes = [], []
    for rank in range(WORLD):
        mine, its = context.Pipe()
        given = (rank, port, fault, who, when, check, timeout, folder, its)
        process = context.Process(target=_rank, args=given, daemon=True)
        process.start()
        its.close()
        pipes.append(mine)
        processes.append(process)
    found: dict[int, Told] = {}
    began: float | None = None
    until = time.monotonic() + 60
    while len(found) < WORLD and time.monotonic() < until:
        left = [p for r, p in enumerate(pipes) if r not in found]
        for pipe in wait(left, 0.2):
            rank = pipes.index(pipe)
            try:
                kind, text, at, cause = pipe.recv()
            except EOFError:
                kind, text, at, cause = "gone", "", time.monotonic(), ""
            if kind == "fault":
                began, until = at, at + timeout + 12
                if fault == "store":
                    server.kill()
            else:
                found[rank] = Told(kind, text, at - (began or at), cause)
    for process in [*processes, server]:
        process.kill()
        process.join()
    silent = Told("silent", "", time.monotonic() - (began or 0.0))
    return [found.get(r, silent) for r in range(WORLD)]


def serve(pipe: Connection) -> None:
    store, port = loopback_store()
    pipe.send(port)
    time.sleep(600)
    del store


class _Marks:
    """Tells of the fault when it happens."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def write(self, text: str) -> None:
        if text == "fault":
            self.pipe.send(("fault", "", time.monotonic(), ""))

    def flush(self) -> None:
        pass


def _rank(
    rank: int,
    port: int,
    fault: str,
    who: int,
    when: int | str,
    check: bool,
    timeout: float,
    folder: str,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    atexit._clear()  # what the process that forked this one does at its end is not ours to do
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.stdout = _Marks(pipe)  # type: ignore[assignment]
    sys.stderr = io.StringIO()  # what the ranks print is not what is tested
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    code = 0
    try:
        mesh = sl.make_mesh(x=2, y=2, device="cpu", timeout=timeout)
        with torch.device("cpu"), mesh, _mode(check):
            if isinstance(when, str):
                found = Places(fault, who, when, folder, check).run()
            else:
                found = Steps(fault, who, when).run()
        pipe.send(("ok", repr(found), time.monotonic(), ""))
        time.sleep(1.0)
    except BaseException as e:
        last = traceback.format_exc() if not isinstance(e, ShardError) else str(e)
        pipe.send((type(e).__name__, last, time.monotonic(), getattr(e, "message", "")))
        if isinstance(e, Exception):
            sys.excepthook(type(e), e, e.__traceback__)
        code = 1
    for thread in threading.enumerate():  # the interpreter waits for them too
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    os._exit(code)


def _mode(check: bool) -> Any:
    return sl.check() if check else contextlib.nullcontext()


def wrong(
    fault: str, who: int, told: list[Told], *, check: bool, timeout: float = 3.0
) -> list[str]:
    """What is wrong with how the ranks ended."""
    f = FAULTS[fault]
    quiet = f.said if f.quiet == "same" else f.quiet
    pattern = (f.said if check else quiet or "").format(who=who)
    bad = []
    for r, t in enumerate(told):
        if r == who and f.alone:
            continue
        itself = r == who and t.kind in ("ZeroDivisionError", "SystemExit")
        if t.kind == "silent" or t.seconds > timeout + 5:
            bad.append(f"rank {r}: {t.kind} after {t.seconds:.1f} s")
        elif t.kind == "gone" and f.aborts and not check:
            continue
        elif t.kind == "ok":
            if check or f.quiet is not None:
                bad.append(f"rank {r}: went on to the end")
        elif not itself and (check or f.quiet) and not re.search(pattern, t.text, re.DOTALL):
            bad.append(f"rank {r}: {t.kind}: {t.text[:400]}")
    return bad


def unlike(
    fault: str, who: int, place: str, told: list[Told], *, timeout: float = 3.0
) -> list[str]:
    """What is wrong with how the ranks ended after one of them did, at a place."""
    f, bad = ENDS[fault], []
    others = {r: t for r, t in enumerate(told) if r != who or fault in ("store", "seeds")}
    late = [r for r, t in others.items() if t.kind == "silent" or t.seconds > timeout + 5]
    bad += [f"rank {r}: {told[r].kind} after {told[r].seconds:.1f} s" for r in late]
    kinds = {t.kind for t in others.values()}
    # nobody needed it afterwards, or the save was done
    harmless = fault in ("store", "seeds") or (place == "in thread" and not f.alone)
    if kinds == {"ok"} and harmless:
        return bad + ["the numbers differ"] * (len({t.text for t in others.values()}) > 1)
    if kinds - {"RankFailed", "CheckpointError"}:
        bad += [f"rank {r}: {t.kind}: {t.text[-600:]}" for r, t in others.items()]
    causes = {t.cause for t in others.values()}
    if len(causes) > 1:
        bad += [f"rank {r} says {t.cause}" for r, t in others.items()]
    bad += [f"said {c!r}" for c in causes if not re.search(f.said.format(who=who), c)]
    if told[who].kind == "silent" and not f.alone:
        bad.append(f"rank {who} itself does not end")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Ranks that part ways or end, drawn.")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=[*FAULTS, *ENDS])
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument("--steps", action="store_true", help="ranks that part ways alone")
    parser.add_argument("--places", action="store_true", help="ranks that end alone")
    parser.add_argument("--check", action="store_true", help="with check mode only")
    parser.add_argument("--without", action="store_true", help="without check mode only")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    modes = [m for m in (True, False) if not (given.without and m) and not (given.check and not m)]
    cases = [
        *((f, p) for f in ENDS for p in PLACES if not given.steps and given.place in (None, p)),
        *((f, -1) for f in FAULTS if not given.places and not given.place),
    ]
    cases = [c for c in cases if given.fault in (None, c[0])]
    drawn = [
        c for _ in range(1 + given.count // len(cases)) for c in draw.sample(cases, len(cases))
    ]
    failed, slowest = 0, 0.0
    for i, (fault, place) in enumerate(drawn[: given.count]):
        who = draw.randrange(WORLD)
        check = modes[i % len(modes)]
        if isinstance(place, str):
            alone = ENDS[fault].alone
            told = play(fault, who, place, check=check)
            bad = unlike(fault, who, place, told)
        else:
            alone = FAULTS[fault].alone
            when = 0 if fault in SET_UP else draw.randrange(1, STEPS)
            told = play(fault, who, when, check=check)
            bad = wrong(fault, who, told, check=check)
        failed += bool(bad)
        slowest = max(slowest, *(t.seconds for r, t in enumerate(told) if r != who or not alone))
        kinds = ", ".join(f"{t.kind} {t.seconds:.1f}s" for t in told)
        name = f"{fault} {place}" if isinstance(place, str) else fault
        print(
            f"{'FAIL' if bad else 'ok  '} {name:<24} check={check!s:<5} rank {who}: {kinds}",
            flush=True,
        )
        for line in bad:
            print("    ", line)
        if given.show:
            for r, t in enumerate(told):
                print(f"  [{r}] {t.text}")
    print(f"{given.count} faults, {failed} wrong; the slowest rank ended after {slowest:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
