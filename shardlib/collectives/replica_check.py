"""Replica checks, once at set-up: ranks that should hold the same values do; and agreed values.

Each rank stores a digest of its blocks in the job's store, or compares its own with the digest
stored by another rank that holds the same blocks: a few bytes for each value, without waiting.  The
rank that finds a difference raises, and the others do at their next transfer.  In check mode every
call is compared.
"""

import json
import zlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from shardlib.collectives.checked import checking, digest, line_of_user
from shardlib.errors import RankFailed
from shardlib.layouts import Layout
from shardlib.mesh import JobProcesses, Mesh, current_job

__all__ = ["agreed", "verify"]


def verify(
    op: str,
    mesh: Mesh,
    values: Mapping[str, tuple[Tensor, Layout]],
    fix: str,
    *,
    said: Mapping[str, object] | None = None,
) -> None:
    """Compare blocks with those of the ranks to which a layout gives the same ones.

    ``values``  name -> (this rank's block, its layout).
    ``said``    name -> a number or string that must be the same on every rank.
    Runs once for each line that calls ``op``; every time in check mode.
    Raises: RankFailed with the first name that differs.
    """
    job = _job_of(mesh)
    if job is None or mesh.coord is None:
        return
    always, line = checking() is not None, line_of_user()
    for copied, names in _groups(mesh, values, said or {}).items():
        held = [(n, *values[n]) for n in names if n in values]
        kinds = [(n, str(layout), raw.shape, raw.dtype) for n, raw, layout in held]
        site = f"{op} {line} {zlib.crc32(repr(kinds).encode()):08x}"
        apart = {a: mesh.coord[a] for a in mesh.names if a not in copied}
        key = f"alike/{mesh}/{apart}/{site}"
        n = job.turns[key] = job.turns.get(key, 0) + 1
        if n > 1 and not always:
            continue
        if n > _KEEP:
            job.store.delete(f"{key}/{n - _KEEP}")
        mine = [digest(values[n][0]) if n in values else repr((said or {})[n]) for n in names]
        first = job.store.compare_set(f"{key}/{n}", "", json.dumps([job.rank, mine]))
        other, theirs = json.loads(first)
        if mine != theirs:
            raise _differs(op, mesh, job, names, (mine, theirs), other, fix)


def _job_of(mesh: Mesh) -> JobProcesses | None:
    """Return the job of a mesh of several real ranks of which this process is one, or None."""
    alone = mesh.device_mesh is None or mesh.coord is None or mesh.size == 1
    return None if alone else current_job()


def _groups(
    mesh: Mesh, values: Mapping[str, tuple[Tensor, Layout]], said: Mapping[str, object]
) -> dict[tuple[str, ...], list[str]]:
    """Group the names of values, and of what is said, by the axes along which they are copies."""
    groups: dict[tuple[str, ...], list[str]] = {}
    if said:
        groups[_alike(mesh, Layout(()))] = list(said)
    for name, (raw, layout) in values.items():
        copied = _alike(mesh, layout)
        if copied and not raw.is_meta:
            groups.setdefault(copied, []).append(name)
    return groups


_KEEP = 16  # entries left in the store, for ranks that are some calls behind


def agreed(what: str, mesh: Mesh, mine: Sequence[int]) -> tuple[int, ...] | None:
    """Return the numbers of the first rank to call, on every rank of the mesh, without waiting.

    ``what``  names them; the n-th call with one name is matched with the n-th on every rank.
    None if no store connects the ranks.
    """
    if mesh.device_mesh is None or mesh.coord is None or mesh.size == 1:
        return tuple(mine)
    job = current_job()
    if job is None:
        return None
    key = f"agreed/{mesh}/{what}"
    n = job.turns[key] = job.turns.get(key, 0) + 1
    return tuple(json.loads(job.store.compare_set(f"{key}/{n}", "", json.dumps(list(mine)))))


def _alike(mesh: Mesh, layout: Layout) -> tuple[str, ...]:
    """List the axes of more than one rank along which a layout gives every rank the same block."""
    given = (*layout.axes, *layout.partial)
    return tuple(a for a in mesh.names if mesh.axes[a] > 1 and a not in given)


def _differs(
    op: str,
    mesh: Mesh,
    job: JobProcesses,
    names: Sequence[str],
    sides: tuple[Sequence[str], Sequence[str]],
    other: int,
    fix: str,
) -> RankFailed:
    mine, theirs = sides
    wrong = [(n, a, b) for n, a, b in zip(names, mine, theirs, strict=False) if a != b]
    wrong = wrong or [(op, f"{len(mine)} values", f"{len(theirs)}")]
    name, ours, other_side = wrong[0]
    more = f" and of {len(wrong) - 1} more" if len(wrong) > 1 else ""
    cause = (
        f"rank {job.rank} and rank {other} hold different values of {name}{more}, which the "
        f"layout says are the same; {op} was called at {line_of_user()}"
    )
    told = {f"rank {job.rank}": f"{name} {ours}", f"rank {other}": f"{name} {other_side}"}
    return RankFailed(job.report_cause(cause), op=op, operands=told, mesh=mesh, fix=fix)
