"""Saving: each rank writes the blocks that it owns, all agree, and one rename commits."""

import atexit
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.checkpoint.agree import Group
from shardlib.checkpoint.boxes import Box, chunk, coordinate, held, length
from shardlib.checkpoint.files import WrittenPart, write_file
from shardlib.checkpoint.folder import (
    FORMAT,
    Directory,
    Work,
    folder_of,
    remove,
    steps_pattern,
    write_manifest,
)
from shardlib.checkpoint.stages import groups_of, refuse_difference, stage_of, union
from shardlib.checkpoint.steps import remove_old
from shardlib.checkpoint.tree import (
    Content,
    LateValues,
    Leaves,
    alone,
    blocks,
    fingerprint,
    place_of,
    ranks_of,
)
from shardlib.errors import BadArgument, user_line
from shardlib.optional import optional_text


class Saving:
    """A save in progress or finished.

    ``path``  the directory that it makes.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d:
    ...     saving = sl.save(d + "/c", {"w": torch.ones(3)}, wait=False)
    ...     saving.wait()
    ...     saving.done, sl.load(saving.path)
    (True, {'w': tensor([1., 1., 1.])})
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._result = _ENDED
        self._group: Group | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, with success or not."""
        return self._result.done()

    def wait(self) -> None:
        """Wait until it is written.

        Raises: CheckpointError, once, if it failed, or if nothing was written for longer than the
        timeout of the save.
        """
        while self._group is not None and not self.done:
            futures.wait([self._result], 0.5)
            quiet = time.monotonic() - self._group.said
            if quiet > self._group.timeout + _SLACK and not self.done:
                raise self._group.error(f"{self.path}: nothing was written for {quiet:.0f} s")
        result, self._result = self._result, _ENDED
        result.result(0)  # it is done

    def _start(self, run: Callable[[], None], group: Group) -> None:
        # the copies may have taken long
        group.said = time.monotonic()
        group.line = user_line()
        self._group = group
        thread = futures.ThreadPoolExecutor(1, "shardlib save")
        self._result = thread.submit(run)
        thread.shutdown(wait=False)


_ENDED: futures.Future[None] = futures.Future()
_ENDED.set_result(None)

_SLACK = 10.0
"""Extra seconds in which other ranks, or the disk, may report the failure themselves."""

_UNDER_WAY: list[Saving] = []
"""At most one save in the background, not yet waited for."""


@atexit.register
def _unheard() -> None:
    for saving in _UNDER_WAY:
        if (error := saving._result.exception()) is not None:
            print(f"shardlib: a save failed and nobody asked\n{error}", file=sys.stderr)


def save(
    path: Directory,
    tree: Any,
    *,
    step: int | None = None,
    keep: int | None = None,
    overwrite: bool = True,
    wait: bool = True,
    timeout: float | None = None,
) -> Saving:
    """Write a pytree into a directory; every rank calls, and each writes only the blocks it owns.

    ``tree``       tensors, sharded or the same on every rank, numbers, text and None, in any nested
                   containers.  Replicas are written once, in equal parts.  Each stage of a pipeline
                   gives the tree of its own parameters, and the union of all is written.
    ``step``       write ``path/step_00000100``; ``keep``  only the newest N up to this one.
    ``overwrite``  replace an existing checkpoint.  A directory with other contents, a file, a mount
                   point and the working directory are refused; of a link, the target is replaced.
    ``wait``       False: copy this rank's data and return while it is written.  At most one such
                   save is in progress; its error is raised by ``wait()`` and by the next save.
    ``timeout``    seconds of silence after which a rank, or the disk, counts as lost; the mesh's by
                   default.

    At any moment the path has the previous checkpoint or the new one, each complete.
    Needs two strips of 4 MiB of memory at most (with ``wait=False`` a copy of this rank's data).
    Raises: CheckpointError, the same on every rank, and then nothing was written, unless the
    message is that the disk did not confirm; ShardError for errors of the tree itself.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d, sl.simulate(x=2, y=2):
    ...     w = sl.shard(torch.arange(16.0).reshape(4, 4), "x y")
    ...     _ = sl.save(d + "/run", {"w": w, "epoch": 1}, step=100)
    ...     like = {"w": sl.shard(torch.zeros(4, 4), "(y x) ."), "epoch": 0}
    ...     found = sl.load(d + "/run", like)
    >>> sl.typeof(found["w"]), found["epoch"], sl.unshard(found["w"]).sum()
    ('f32[4@(y x), 4]', 1, tensor(120.))
    """
    path = os.fspath(path)
    _check(path, step, keep)
    while _UNDER_WAY:
        _UNDER_WAY.pop().wait()
    target = folder_of(path, step)
    error = None
    try:
        leaves = Leaves.of(tree, "save")
    except Exception as e:
        leaves, error = Leaves.of({}, "save"), e
    group = Group("save", timeout, alone(leaves.leaves), "sl.save(path, tree", _FIXES)
    stage = stage_of(leaves.leaves) or []
    places = {n: place_of(x, group.world) for n, x in leaves.tensors.items()}
    content = Content(places, leaves.values, leaves.skeleton)
    job = SaveJob(group, target, step, overwrite)
    with job.leaving():
        claims = partial(_claims, group, leaves, stage)
        job.begin(content.leaves, leaves.skeleton, claims, error, stage)
        late = LateValues(leaves.tensors)
        files = _parts(job, leaves, late)
        if not wait:
            # the caller changes its tensors while the copy is written
            files = {rank: [_copied(p) for p in parts] for rank, parts in files.items()}
            late.rest()

    def finish() -> None:
        job.write(files, late)
        if keep is not None and step is not None and group.rank == 0:
            remove_old(path, keep, step)

    saving = Saving(target)
    if wait:
        finish()
    else:
        _UNDER_WAY.append(saving)
        saving._start(finish, group)
    return saving


_FIXES = [
    ("holds 'step_", "sl.save(path, tree, step=100)"),
    ("is not replaced", "sl.save('checkpoints/new', tree)"),
    ("the path is empty", "sl.save('checkpoints/new', tree)"),
]


def _check(path: str, step: object, keep: object) -> None:
    if path.endswith(".safetensors"):
        text = "a checkpoint is a directory; whole tensors in one file are what save_hf writes"
        fix = f"sl.save_hf({path.removesuffix('.safetensors')!r}, params)"
        raise BadArgument(text, op="save", fix=fix)
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        text = f"a step is a number from 0 on, not {step!r}"
        fix = "sl.save(path, tree, step=100)"
        raise BadArgument(text, op="save", fix=fix)
    if keep is not None and (step is None or not isinstance(keep, int) or keep < 1):
        text = "keep= says how many steps stay, so it needs step= and is 1 at least"
        fix = "sl.save(path, tree, step=100, keep=3)"
        raise BadArgument(text, op="save", fix=fix)


Claims = dict[str, Any]
"""Block with several holders -> name -> fingerprint, of its tensors; "" -> the whole call."""


class SaveJob:
    """A save in phases, after each of which all ranks agree."""

    def __init__(self, group: Group, target: str, step: int | None, overwrite: bool) -> None:
        self.group, self.target = group, target and os.path.abspath(target)
        self.step, self.overwrite = step, overwrite
        self.name: str = ""
        self.work: Work | None = None
        self.team = list(range(group.world))
        self.leaves: dict[str, Any] = {}
        self.containers: object = {}
        self.copies: dict[str, int] = {}

    def writes(self, name: str) -> bool:
        """Return whether this rank's stage of a pipeline, and not an earlier one, writes a leaf."""
        return self.copies.get(name, self.team[0]) == self.team[0]

    def begin(
        self,
        leaves: dict[str, Any],
        containers: object = None,
        claims: Callable[[Collection[str] | None], Claims] = lambda copies: {},
        error: Exception | None = None,
        stage: Sequence[int] = (),
        everywhere: bool = False,
    ) -> None:
        """Agree on one tree and path, and on the work directory that rank 0 makes.

        ``leaves``      name -> description, in the manifest's form as the ``containers`` are.
        ``claims``      gives fingerprints of this rank's replicas, or of copies of other stages'.
        ``stage``       the ranks of this rank's stage; the others of the pipeline have other trees.
        ``everywhere``  each rank needs the leaves of all stages, and not only rank 0.
        """
        self.leaves, self.containers = leaves, containers or {}
        said = [self.target, self.step, leaves, self.containers]
        found = self._compared("the tree", {"": said[:3], **claims(None)}, error, stage)
        if isinstance(found, list):
            self.team = next(ranks for ranks in found if self.group.rank in ranks)

            def join(every: list[Any]) -> Any:
                trees = {tuple(ranks): every[ranks[0]] for ranks in found}
                self.leaves, self.containers, copies = union(trees)
                return (self.leaves if everywhere else None), copies

            mine = said if self.group.rank == self.team[0] else None
            whole, self.copies = self.group.agree("the stages", mine, decide=join)
            self.leaves = whole or self.leaves
            found = self._compared("the copies", claims(self.copies))
        self.name = found

    def _compared(
        self,
        phase: str,
        said: Claims,
        error: Exception | None = None,
        stage: Sequence[int] = (),
    ) -> Any:
        """Agree that ranks with one key say the same under it, and under "" the ranks of a stage.

        Return the name of the work directory that rank 0 makes then, or several stages' ranks.
        """
        texts = {key: json.dumps(claim, sort_keys=True) for key, claim in said.items()}
        digests = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}

        def compare(every: list[Any]) -> Any:
            stages, sums = zip(*every, strict=True)
            groups = groups_of(stages)
            if odd := _unlike(sums, groups):
                return {"odd": odd}
            return groups if len(groups) > 1 else self.make()

        found: Any = self.group.agree(phase, [stage, digests], error, compare)
        if isinstance(found, dict):
            key, *pair = found["odd"]
            differ = _differ_in if key else refuse_difference

            def decide(every: list[Any]) -> None:
                differ(*(every[r] for r in pair), *pair)

            mine = said[key] if self.group.rank in pair else None
            self.group.agree("the difference", mine, decide=decide)
        return found

    def make(self) -> str:
        """Make the work directory, on rank 0, and return its name."""
        # leftovers of other steps are removed too
        siblings = "" if self.step is None else steps_pattern
        # the other ranks wait for it
        seconds = self.group.timeout / 2
        self.work = Work.make(self.target, self.overwrite, siblings, seconds)
        self.name = self.work.name
        return self.name

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Leave if the ``with`` raises: notify other ranks, remove the work directory."""
        try:
            yield
        except BaseException as e:
            if self.name:
                self._give_up(e)
                remove(os.path.join(os.path.dirname(os.path.realpath(self.target)), self.name))
            if self.work is not None:
                self.work.close()
            raise

    def _give_up(self, e: BaseException) -> None:
        if not self.group.given_up:
            said = f": {type(e).__name__}: {e}" if isinstance(e, Exception) else " was interrupted"
            self.group.give_up(f"rank {self.group.rank}{said}")

    def write(self, files: Mapping[int, list[WrittenPart]], late: LateValues | None = None) -> None:
        """Write these files, by rank; rank 0 then renames the directory to the target."""
        group = self.group

        def put(work: Work) -> list[Any]:
            about = {"checkpoint": work.id}
            how = group.progress, group.timeout
            try:
                return [
                    write_file(work.fd, f"rank_{rank:05d}.safetensors", parts, about, *how)
                    for rank, parts in sorted(files.items())
                ]
            finally:
                # also where the write failed: the other ranks fetch them too
                if late is not None:
                    late.rest()

        def commit(work: Work, said: list[list[Any]]) -> str:
            manifest = {
                "format": FORMAT,
                "id": work.id,
                "step": self.step,
                "tensors": {n: x for n, x in self.leaves.items() if isinstance(x, dict)},
                "values": {n: x for n, x in self.leaves.items() if not isinstance(x, dict)},
                "tree": self.containers,
                "files": [file for files in said for file in files],
            }
            write_manifest(work.fd, manifest)
            return work.commit(self.overwrite)

        self.finish(put, commit, together=late is not None and bool(late.coming))

    def finish(
        self,
        put: Callable[[Work], list[Any]],
        commit: Callable[[Work, Any], str],
        together: bool = False,
    ) -> None:
        """Fill the work directory, and commit it on rank 0 once all ranks have written.

        ``put``       writes this rank's files, and returns what it says of them.
        ``commit``    returns a warning if the disk did not confirm.
        ``together``  ``put`` has collectives, so no rank begins it unless all do.
        Raises: CheckpointError, the same on every rank.
        """
        group = self.group
        error, unsure = None, ""
        with self.leaving():
            try:
                if self.work is None:
                    self.work = Work(self.target, self.name)
            except Exception as e:
                error = e
            if together or error is not None:
                group.agree("opening" if together else "writing", [], error)
        work = self.work
        assert work is not None, "its error was raised"
        try:
            with group.phase("writing", lambda said: commit(work, said)) as phase:
                phase.value = put(work)
            unsure = phase.answer
        except BaseException as e:
            if not isinstance(e, Exception):
                self._give_up(e)
            if not work.committed():
                raise
        finally:
            work.close()
        if unsure:
            raise group.error(unsure)


def _unlike(sums: Sequence[dict[str, str]], groups: Sequence[list[int]]) -> list[Any] | None:
    """Return (key, rank, rank) of two holders with different sums, or None; the call comes first."""
    home = {rank: i for i, ranks in enumerate(groups) for rank in ranks}
    first: dict[str | int, tuple[int, str]] = {}
    odd = []
    for rank, said in enumerate(sums):
        for key, value in said.items():
            holder, theirs = first.setdefault(key or home[rank], (rank, value))
            if value != theirs:
                odd.append([key, holder, rank])
    return min(odd, key=lambda found: bool(found[0]), default=None)


def _differ_in(a: dict[str, int], b: dict[str, int], one: int, other: int) -> None:
    names = [n for n in a if a[n] != b.get(n)]
    more = optional_text(", and {} more", len(names) - 1)
    raise ValueError(f"{names[0]!r} has other values on rank {other} than on rank {one}{more}")


# ---------------------------------------------------------------- the parts of a rank


def _claims(
    group: Group,
    leaves: Leaves,
    stage: Sequence[int] = (),
    copies: Collection[str] | None = None,
) -> Claims:
    """Fingerprint this rank's replicas, which must be equal on every holder.

    ``copies``  instead, the tensors that other stages of a pipeline have too.
    """
    out: Claims = {}
    if group.world == 1:
        return out
    for name in leaves.tensors if copies is None else leaves.tensors.keys() & copies:
        x = leaves.tensors[name]
        place = place_of(x, group.world)
        free = [a for a, n in place.mesh if a not in place.layout.axes and n > 1]
        if not free and copies is None:
            continue
        for rank, block in blocks(x, group.rank):
            where = coordinate(rank, dict(place.mesh))
            apart = {a: i for a, i in where.items() if a not in free}
            holders = [place.mesh, place.ranks, *stage] if copies is None else [name]
            key = json.dumps([*holders, apart])
            out.setdefault(key, {})[name] = fingerprint(_cut(block, held(place, rank)))
    return out


def _parts(job: SaveJob, leaves: Leaves, late: LateValues) -> dict[int, list[WrittenPart]]:
    """List the parts to write for each rank in this process, also for one that writes none."""
    group = job.group
    out: dict[int, list[WrittenPart]] = {group.rank: []}
    for name, x in leaves.tensors.items():
        if not job.writes(name):
            continue
        place = place_of(x, group.world).among(job.team)
        mine = job.team.index(group.rank)
        held = [] if name in late.tensors else blocks(x, mine)
        for i, rank in enumerate(ranks_of(x, mine)):
            file = out.setdefault(place.ranks[rank], [])
            box = chunk(name, place, rank)
            if box is not None:
                get = partial(_late, late, name, i, box)
                if held:
                    get = partial(_cut, held[i][1], box)
                file.append(WrittenPart(name, box, place.shape, place.dtype, get))
    return out


def _late(late: LateValues, name: str, i: int, box: Box) -> Tensor:
    return _cut(late.block(name, i), box)


def _cut(block: Tensor, box: Box) -> Tensor:
    """Return the box's part of a block, without a copy if it is contiguous."""
    for d, runs in enumerate(box):
        begin = min((r.at for r in runs), default=0)
        end = max((r.at + r.length for r in runs), default=0)
        if end - begin == length(runs):
            block = block.narrow(d, begin, end - begin)
        else:
            block = torch.cat([block.narrow(d, r.at, r.length) for r in runs], d)
    return block


def _copied(part: WrittenPart) -> WrittenPart:
    """Copy a part's present values to the CPU."""
    found = part.get()
    blank = torch.empty_like(found, device="cpu", memory_format=torch.contiguous_format)
    copy = blank.copy_(found)
    return replace(part, get=lambda: copy)
