"""Drawn targets of every writer of directories: ``python -m tests.checkpoint.targets --count 200``.

Each case builds surroundings (files, links, full directories, checkpoints, runs), calls one writer on
one of them, and compares all that stood there before with what stands there after.  Only what a
manifest of ours described may have been replaced; else the call was refused, and named what stands
there.  ``--real N`` of the cases run again on two real ranks.
"""

import argparse
import contextlib
import hashlib
import os
import random
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardlib as sl
from shardlib.errors import CheckpointError

REPLACED, REFUSED = "replaced", "refused"


class Case(NamedTuple):
    """A writer, and the target that it is given."""

    writer: str
    target: str
    seed: int = 0


def tree(k: int = 1) -> dict[str, Any]:
    return {"params": {"w": sl.shard(torch.full((4, 4), float(k)), "x .")}, "k": k}


def save(path: str) -> None:
    sl.save(path, tree(2), timeout=30.0)


def later(path: str) -> None:
    sl.save(path, tree(2), wait=False, timeout=30.0).wait()


def step(path: str) -> None:
    sl.save(path, tree(2), step=1, timeout=30.0)


def keep(path: str) -> None:
    sl.save(path, tree(2), step=9, keep=1, timeout=30.0)


def save_hf(path: str) -> None:
    sl.save_hf(path, tree(2)["params"], overwrite=True, timeout=30.0)  # type: ignore[arg-type]


def alone(call: Callable[[], None]) -> None:
    """Convert on rank 0, in whose process converters run; the other ranks say as it does."""
    error: list[str] = [""]
    real = torch.distributed.is_initialized()
    if not real or torch.distributed.get_rank() == 0:
        try:
            call()
        except CheckpointError as e:
            error = [e.message]
    if real:
        torch.distributed.broadcast_object_list(error, 0)
    if error[0]:
        raise CheckpointError(error[0])


def reshard(path: str) -> None:
    alone(lambda: sl.checkpoint.reshard(SOURCE[0], path, {"x": 4}, overwrite=True))


def to_hf(path: str) -> None:
    alone(lambda: sl.checkpoint.to_hf(SOURCE[0], path, subtree="params", overwrite=True))


def from_hf(path: str) -> None:
    alone(lambda: sl.checkpoint.from_hf(SOURCE[1], path, overwrite=True))


WRITERS: dict[str, Callable[[str], None]] = {
    f.__name__: f for f in (save, later, step, keep, save_hf, reshard, to_hf, from_hf)
}
SOURCE = ["", ""]
"""A checkpoint and a Hugging Face directory that converters read."""


def fill(folder: Path, draw: random.Random) -> None:
    """Put something of the user's there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in draw.sample(["thesis.tex", ".hidden", "lock", "data/a/b.bin", "config.json"], 2):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} {draw.random()}")


def made(folder: Path, k: int = 1, at: int | None = None) -> None:
    with sl.simulate(x=2):
        sl.save(folder, tree(k), step=at)


def built(name: str, here: Path, draw: random.Random) -> tuple[str, str, str]:
    """Build a target; return it, what must happen, and words of a refusal."""
    c = here / "c"
    if name in ("absent", "deep", "slash"):
        return {"absent": "c", "deep": "a/b/c", "slash": "c//"}[name], REPLACED, ""
    if name in ("", ".", "..", "../.."):
        return name, REFUSED, {"": "empty", ".": "working"}.get(name, "holds")
    if name == "mount":
        return next(p for p in ("/dev/shm", "/proc", "/") if os.path.ismount(p)), REFUSED, "mounted"
    if name in ("file", "link to a file", "under a file"):
        (here / "file" if name == "link to a file" else c).write_text("mine")
        if name == "link to a file":
            c.symlink_to("file")
        return ("c/d", REFUSED, "c") if name == "under a file" else ("c", REFUSED, "no directory")
    if name == "fifo":
        os.mkfifo(c)
        return "c", REFUSED, "no directory"
    if name == "socket":
        with socket.socket(socket.AF_UNIX) as s, contextlib.chdir(here):
            s.bind("c")
        return "c", REFUSED, "no directory"
    if name == "empty":
        c.mkdir()
        return str(c), REPLACED, ""
    if name in ("full", "full through dots"):
        fill(c, draw)
        return {"full": "c", "full through dots": "./x/../c"}[name], REFUSED, "holds"
    if name == "folders only":
        (c / "a" / "b").mkdir(parents=True)
        return "c", REFUSED, "'a/'"
    if name == "ours":
        made(c)
        return "c", REPLACED, ""
    if name == "ours and a note":
        made(c)
        (c / "note.txt").write_text("mine")
        return "c", REFUSED, "note.txt"
    if name == "ours and a folder":
        made(c)
        (c / "plots").mkdir()
        return "c", REFUSED, "plots"
    if name == "ours, a file a link":
        made(c)
        (c / "lock").unlink()
        (c / "lock").symlink_to(here / "other")
        return "c", REFUSED, "lock"
    if name == "ours, manifest damaged":
        made(c)
        (c / "shardlib.json").write_text("{}\n")
        return "c", REFUSED, "shardlib.json"
    if name == "run":
        made(c, at=1)
        made(c, at=3)
        return "c", REFUSED, "step_00000001"
    if name == "read-only":
        fill(c, draw)
        c.chmod(0o555)
        return "c", REFUSED, "holds"
    if name == "loop":
        c.symlink_to("c")
        return "c", REFUSED, "c"
    if name == "broken link":
        c.symlink_to("disk/run")
        return "c", REPLACED, ""
    disk = here / "disk"
    if name == "link to a full one":
        fill(disk / "run", draw)
        c.symlink_to(disk / "run")
        return "c", REFUSED, "holds"
    if name == "link to an empty one":
        (disk / "run").mkdir(parents=True)
        c.symlink_to("disk/run")
        return "c", REPLACED, ""
    if name == "link to ours":
        made(disk / "run")
        c.symlink_to(disk / "run")
        return "c", REPLACED, ""
    if name == "under a link":
        disk.mkdir()
        (here / "r").symlink_to("disk")
        return "r/c", REPLACED, ""
    assert name == "named like a leftover", name
    fill(here / f".c.tmp-{'a' * 32}", draw)
    fill(here / f".c.old-{'b' * 32}", draw)
    fill(here / f".c.gone-{'c' * 32}", draw)
    (here / f".c.tmp-{'d' * 32}").symlink_to(here / "other")
    for old in here.glob(".c.*"):
        if not old.is_symlink():
            os.utime(old, (1e9, 1e9))
    return "c", REPLACED, ""


TARGETS = [
    *["absent", "deep", "slash", "", ".", "..", "../..", "mount", "file", "under a file", "fifo"],
    *["socket", "empty", "full", "full through dots", "folders only", "ours", "ours and a note"],
    *["ours and a folder", "ours, a file a link", "ours, manifest damaged", "run", "read-only"],
    *["loop", "broken link", "link to a file", "link to a full one", "link to an empty one"],
    *["link to ours", "under a link", "named like a leftover"],
]


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Each path below ``root``: what it is, its mode, and its content."""
    out = {}
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(folder, name)
            about = path.lstat()
            kind = stat.S_IFMT(about.st_mode)
            body = os.readlink(path) if path.is_symlink() else ""
            if stat.S_ISREG(about.st_mode):
                body = hashlib.sha256(path.read_bytes()).hexdigest()
            out[str(path.relative_to(root))] = (kind, stat.S_IMODE(about.st_mode), body)
    return out


def steps_of(case: Case, here: Path) -> set[str]:
    """What ``keep=1`` may remove: the steps of a run that are whole and hold nothing else."""
    run = here / "c"
    return {f"c/{p.name}" for p in run.glob("step_*")} if case.writer == "keep" else set()


def surroundings(case: Case, root: Path) -> tuple[Path, str, str, str]:
    """Build what stands there; return the working directory, the target, and what must happen."""
    draw = random.Random(case.seed)
    here = root / "up" / "here"
    here.mkdir(parents=True)
    fill(root / "up", draw)
    fill(here / "other", draw)
    (here / "mine.txt").write_text("mine")
    path, what, words = built(case.target, here, draw)
    if case.writer in ("step", "keep") and case.target:
        # the run's directory may hold anything: what counts is the step's own
        if case.target in ("file", "under a file", "fifo", "socket", "loop", "link to a file"):
            return here, path, REFUSED, "c" if case.target != "link to a file" else "file"
        if case.writer == "step" and draw.random() < 0.5:
            mine = Path(os.path.realpath(here / path), "step_00000001")
            if not mine.exists():
                fill(mine, draw)
                return here, path, REFUSED, "holds"
        what, words = REPLACED, ""
    return here, path, what, words


def judged(
    case: Case, root: Path, here: Path, path: str, what: str, words: str,
    before: dict[str, tuple[Any, ...]], said: str | None, old_steps: set[str],
) -> list[str]:  # fmt: skip
    """List what is wrong after the call."""
    wrong = []
    after = snapshot(root)
    if (said is not None) != (what == REFUSED):
        wrong.append(f"must be {what}, and said {said!r}")
    if said is not None and words not in said:
        wrong.append(f"{words!r} is not in {said!r}")
    target = os.path.relpath(os.path.realpath(here / path), root) if path else "?"
    if case.writer in ("step", "keep"):
        target = os.path.normpath(f"{target}/step_0000000{1 if case.writer == 'step' else 9}")
    changed = {n for n in before if after.get(n) != before[n]}
    if said is None:
        gone = {f"up/here/{s}" for s in old_steps}
        changed = {
            n for n in changed
            if not (n == target or n.startswith(f"{target}/"))
            and not any(n == s or n.startswith(f"{s}/") for s in gone)
        }  # fmt: skip
        if case.writer == "keep" and (left := [s for s in gone if s in after]):
            wrong.append(f"{left} of the run stay")
    if changed:
        wrong.append(f"missing or changed: {sorted(changed)}")
    new = {n for n in after if n not in before}
    parents = {str(p) for p in Path(target).parents} | {target}
    spare = {n for n in new if n not in parents and not n.startswith(f"{target}/")}
    if spare:
        wrong.append(f"left over: {sorted(spare)}")
    return wrong


def call(case: Case, path: str) -> str | None:
    """Call the writer; return what it said where it refused."""
    try:
        WRITERS[case.writer](path)
        return None
    except CheckpointError as e:
        return e.message


def sources(root: Path) -> None:
    SOURCE[:] = [str(root / "source"), str(root / "hf")]
    if not Path(SOURCE[0]).exists():
        made(Path(SOURCE[0]), 7)
        with sl.simulate(x=2):
            sl.save_hf(SOURCE[1], tree(7)["params"])  # type: ignore[arg-type]


def run(case: Case, real: bool = False) -> list[str]:
    """List what was wrong; on real ranks every rank calls, and rank 0 builds and judges."""
    first = not real or torch.distributed.get_rank() == 0
    share: list[Any] = [None]
    with tempfile.TemporaryDirectory() if first else contextlib.nullcontext("") as place:
        if first:
            root = Path(place, "root")
            sources(Path(place))
            here, path, what, words = surroundings(case, root)
            before, old = snapshot(root), steps_of(case, here)
            share = [(list(SOURCE), here, path)]
        if real:
            torch.distributed.broadcast_object_list(share, 0)
        SOURCE[:], here, path = share[0]
        with contextlib.chdir(here):
            if real:
                said = call(case, path)
                torch.distributed.barrier()
            else:
                with sl.simulate(x=2):
                    said = call(case, path)
        if not first:
            return []
        return judged(case, root, here, path, what, words, before, said, old)


def on_ranks(cases: list[Case]) -> list[tuple[Case, list[str]]]:
    return [(case, run(case, real=True)) for case in cases]


def drawn(count: int, seed: int = 0) -> list[Case]:
    """Every target under drawn writers, over and over."""
    draw = random.Random(seed)
    out: list[Case] = []
    while len(out) < count:
        for target in draw.sample(TARGETS, len(TARGETS)):
            writer = draw.choice(list(WRITERS))
            if target == "mount" and writer in ("step", "keep"):  # they write below it, for good
                writer = "save"
            out.append(Case(writer, target, draw.randrange(1 << 30)))
    return out[:count]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--real", type=int, default=60)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    began = time.monotonic()
    found = [(case, run(case)) for case in drawn(args.count, args.seed)]
    if args.real:
        found += sl.launch(on_ranks, drawn(args.real, args.seed + 1), x=2)[0]
    bad = [(case, wrong) for case, wrong in found if wrong]
    for case, wrong in bad:
        print(case, *wrong, sep="\n  ")
    print(
        f"{args.count} targets on simulated ranks, {args.real} on real ones: {len(bad)} wrong, "
        f"{time.monotonic() - began:.0f} s"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
