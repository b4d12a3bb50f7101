"""Every proof of a declaration under a memory checker: ``make memcheck``.

A declaration that is wrong may hand a kernel a block that is smaller than what it reads, and
torch's kernels do not all check.  So each tensor is put against a page that may not be touched
(guard.c): a load or a store past its end, by any kernel, vectorised or not, ends the process, and
the declaration is named.  All proofs run twice, for the second time with an untouchable page before
each tensor.  Found as well: use of freed memory, writes beside a block, and elements read before
they are written (new memory is NaN).  Not found: a read inside the memory of another rank of the
simulation, which lies in the same tensor, for all ranks but the last; so the proofs run on two real
ranks too.

    python -m tests.memcheck [samples of each operator]

First two faults are planted, one in memory and one in a declaration, and must be found.
"""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardlib as sl
from shardlib.ops.declare import DECLARED
from shardlib.ops.dims import rows_call
from tests import database as db
from tests.test_operators import SEED, tried
from tests.workers import Pool, WorkerError

FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
ENDS = {1: "a page after each tensor", 2: "a page before each tensor"}


def guard(on: int) -> None:
    ctypes.CDLL(None).guard(on)


def apart(
    work: Callable[[Callable[[str], Any]], None], on: int, stacks: bool = True
) -> tuple[int, list[str]]:
    """Run ``work`` in a process of its own under guard: the signal
    that ended it, and the lines that it told.
    """
    ours, theirs = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.close(ours)
        if stacks:
            faulthandler.enable()
        guard(on)
        try:
            work(lambda line: os.write(theirs, f"{line}\n".encode()))
        except BaseException as e:
            os.write(
                theirs, f"crash {type(e).__name__}: {str(e)[:300]}".replace("\n", " ").encode()
            )
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        told = pipe.read().splitlines()
    return os.WTERMSIG(os.waitpid(pid, 0)[1]), told


# ---------------------------------------------------------------- faults that must be found


def past_the_end(tell: Any) -> None:
    x = torch.ones(7, dtype=torch.float64)
    ctypes.c_double.from_address(x.data_ptr() + 8 * x.numel()).value  # noqa: B018


def before_the_start(tell: Any) -> None:
    x = torch.ones(7, dtype=torch.float64)
    ctypes.c_double.from_address(x.data_ptr() - 8).value  # noqa: B018


def written_beside(tell: Any) -> None:
    x = torch.ones(7, dtype=torch.float64)
    ctypes.c_double.from_address(x.data_ptr() - 8).value = 1.0
    del x


def wrongly_declared(tell: Any) -> None:
    """segment_reduce as if each segment had one row: the second
    rank's segments have more rows than its block.
    """
    rows, lengths = torch.rand(4, 2, dtype=torch.float64), torch.tensor([0, 0, 1, 3])
    with sl.simulate(x=2):
        given = {"lengths": sl.shard(lengths, "x"), "unsafe": True}
        labels = {0: ("segment", None), 1: ("segment",)}
        rows_call(torch.segment_reduce, (sl.shard(rows, "x ."), "sum"), given, lambda *_: labels)


PLANTED = [(past_the_end, 1), (before_the_start, 2), (written_beside, 1), (wrongly_declared, 1)]


# ---------------------------------------------------------------- the proofs


def every_call(samples: int) -> dict[str, list[tuple[Any, Any, Any]]]:
    """Calls of every declared name: the database's, and those written for it."""
    out = db.declared_calls(samples, SEED)
    for name, declared in DECLARED.items():
        if declared.functions:
            out.setdefault(name, []).extend(
                (declared.functions[0], args, {}) for args in tried(name)
            )
    return out


CALLS: dict[str, list[tuple[Any, Any, Any]]] = {}
"""Filled before the ranks are forked, which then need not be sent functions."""


def proved(name: str, tell: Callable[[str], Any]) -> None:
    for call in CALLS[name]:
        shown = [list(x.shape) if isinstance(x, torch.Tensor) else x for x in call[1]]
        tell(f"call {shown}".replace("\n", " "))
        for found in db.proofs(name, *call):
            tell(
                found.kind
                if found.kind in ("equal", "refused")
                else f"{found.kind} {found.note}".replace("\n", " ")
            )


def proved_on_ranks(name: str, on: int) -> list[str]:
    """Run on each of two real ranks."""
    guard(on)
    told = []
    for call in CALLS[name]:
        for split in db.alone(name, *call):
            if split.mesh == {"x": 2}:
                found = db.judge(split)
                told.append(
                    found.kind
                    if found.kind in ("equal", "refused")
                    else f"{found.kind} {found.note}"
                )
    guard(0)
    return told


class Report:
    """What the proofs said, by kind, and what is wrong."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.held: set[str] = set()
        self.wrong: list[str] = []

    def add(self, name: str, told: list[str], died: str = "") -> None:
        found = [t.partition(" ")[0] for t in told]
        self.kinds.update(k for k in found if k != "call")
        self.held |= {name} if "equal" in found else set()
        new = [f"{name}: {t}" for t in told if t.startswith(("wrong", "crash"))]
        if died:
            new.append(
                f"{name}: {died} in {next((t for t in reversed(told) if t.startswith('call')), '')}"
            )
        print(*new, sep="\n", end="\n" if new else "", flush=True)
        self.wrong += new

    def end(self, said: str) -> int:
        print(f"{said}: {len(self.held)} declarations, {dict(self.kinds)}", flush=True)
        return len(self.wrong)


def main() -> None:
    torch.set_num_threads(1)
    missed = [
        fault.__name__ for fault, on in PLANTED if apart(fault, on, stacks=False)[0] not in FAULTS
    ]
    print(f"planted faults: {len(PLANTED)}, not found: {', '.join(missed) or 'none'}", flush=True)
    CALLS.update(every_call(int((sys.argv[1:] or ["4"])[0])))
    wrong = len(missed)
    for on, said in ENDS.items():
        report = Report()
        for name in CALLS:
            died, told = apart(lambda tell, name=name: proved(name, tell), on)
            report.add(name, told, signal.Signals(died).name if died else "")
        wrong += report.end(f"{said}, simulated ranks")
    pool = Pool(2)
    for on, said in ENDS.items():
        report = Report()
        for name in CALLS:
            try:
                report.add(name, pool.run(proved_on_ranks, name, on, x=2)[0])
            except WorkerError as e:
                report.add(name, [], str(e))
        wrong += report.end(f"{said}, two real ranks")
    pool.close()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    if not hasattr(ctypes.CDLL(None), "guard"):
        with tempfile.TemporaryDirectory() as folder:
            library, source = str(Path(folder) / "guard.so"), str(Path(__file__).parent / "guard.c")
            subprocess.run(
                ["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source],
                check=True,
            )
            again = [sys.executable, "-m", "tests.memcheck", *sys.argv[1:]]
            sys.exit(subprocess.run(again, env=os.environ | {"LD_PRELOAD": library}).returncode)
    main()
