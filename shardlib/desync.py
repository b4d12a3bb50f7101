"""Comparison of the last operations of each rank of a job that failed: where they first differ.

Each rank writes its last operations when the job fails (mesh/failures.py).  Every rank runs the
same program, so operation n of one rank is operation n of all.
"""

import json
from pathlib import Path
from typing import Any

from shardlib.errors import ShardError


def desync(folder: str | Path) -> str:
    """Report the first operation at which the ranks differ, or which of them stopped first.

    ``folder``  has the ranks' ``rank_0.json`` and so on; RankFailed's fix line names it.
    Raises: ShardError where there are no such files, or one is cut off.

    >>> import json, tempfile, pathlib
    >>> from shardlib.desync import desync
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for rank, last in enumerate(["psum", "psum", "all_gather"]):
    ...     done = [[1, "psum", ["x"], [4], "float32"], [2, last, ["x"], [4], "float32"]]
    ...     found = {"rank": rank, "world": 3, "operations": done}
    ...     _ = (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    >>> print(desync(folder))
    3 of 3 ranks wrote their last operations
    operation 1 is the last that all have in common
    operation 2 differs:
      ranks 0, 1  psum over x of float32[4]
      rank 2      all_gather over x of float32[4]
    """
    found, world = _written(Path(folder))
    lines = [f"{len(found)} of {world} ranks wrote their last operations"]
    if missing := sorted(set(range(world)) - set(found)):
        lines.append(f"nothing of {_ranks(missing)}")
    begun = max(min(ops, default=0) for ops in found.values())
    ended = max(max(ops, default=0) for ops in found.values())
    common = 0
    for n in range(begun, ended + 1):
        said = {rank: ops.get(n) for rank, ops in found.items()}
        if len(set(said.values())) > 1:
            before = f"operation {common} is the last that all have in common"
            return "\n".join([*lines, *([before] if common else []), *_differing(n, said)])
        common = n
    return "\n".join([*lines, f"all did the same up to operation {common}"])


def _written(folder: Path) -> tuple[dict[int, dict[int, str]], int]:
    """Read what the ranks wrote: rank -> number -> operation, and the number of ranks."""
    found: dict[int, dict[int, str]] = {}
    world = 0
    for path in sorted(folder.glob("rank_*.json")):
        try:
            said = json.loads(path.read_text())
            world = int(said["world"])
            found[int(said["rank"])] = {int(e[0]): _spelled(e) for e in said["operations"]}
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ShardError(f"{path.name} is not what a rank writes: {e}", op="desync") from e
    if not found:
        raise ShardError(f"no rank_*.json in {folder}", op="desync")
    return found, world


def _differing(n: int, said: dict[int, str | None]) -> list[str]:
    """List the operations of the ranks, the most frequent first, and who stopped before last."""
    ranks: dict[str | None, list[int]] = {}
    for rank, text in said.items():
        ranks.setdefault(text, []).append(rank)
    stopped = ranks.pop(None, [])
    head = f"operation {n} differs:" if len(ranks) > 1 else f"not all came to operation {n}:"
    rows = sorted(ranks.items(), key=lambda row: -len(row[1]))
    if stopped:
        rows.append(("stopped before", stopped))
    width = max(len(_ranks(which)) for _, which in rows)
    return [head, *(f"  {_ranks(which):<{width}}  {text}" for text, which in rows)]


def _ranks(ranks: list[int]) -> str:
    word = "ranks" if len(ranks) > 1 else "rank"
    return f"{word} {', '.join(map(str, ranks))}"


def _spelled(entry: list[Any]) -> str:
    _, name, axes, shape, dtype, *line = entry
    text = f"{name} over {' '.join(axes)} of {dtype}{list(shape)}"
    return text + "".join(f" at {where}" for where in line if where)
