"""Comparison of the last operations of each rank of a job that failed: where they first differ.

Each rank writes its last operations when the job fails (mesh/failures.py).  Every rank runs the
same program, so operation n of one rank is operation n of all.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from shardlib.errors import ShardError

__all__ = ["desync"]


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
    found: dict[int, dict[int, str]] = {}
    world = 0
    for path in sorted(Path(folder).glob("rank_*.json")):
        try:
            said = json.loads(path.read_text())
            world = int(said["world"])
            found[int(said["rank"])] = {int(e[0]): _spelled(e) for e in said["operations"]}
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ShardError(f"{path.name} is not what a rank writes: {e}", op="desync") from e
    if not found:
        raise ShardError(f"no rank_*.json in {folder}", op="desync")
    lines = [f"{len(found)} of {world} ranks wrote their last operations"]
    if missing := sorted(set(range(world)) - set(found)):
        lines.append(f"nothing of {_ranks(missing)}")
    begun = max(min(ops, default=0) for ops in found.values())
    ended = {r: max(ops, default=0) for r, ops in found.items()}
    common = 0
    for n in range(begun, max(ended.values()) + 1):
        said = {r: ops.get(n) for r, ops in found.items()}
        if len(set(said.values())) == 1:
            common = n
            continue
        lines.append(f"operation {common} is the last that all have in common" if common else "")
        lines += _parted(n, said)
        return "\n".join(line for line in lines if line)
    return "\n".join([*lines, f"all did the same up to operation {common}"])


def _parted(n: int, said: dict[int, str | None]) -> list[str]:
    places: dict[str | None, list[int]] = {}
    for rank, text in said.items():
        places.setdefault(text, []).append(rank)
    going = [text for text in places if text is not None]
    head = f"operation {n} differs:" if len(going) > 1 else f"not all came to operation {n}:"
    width = max(len(_ranks(ranks)) for ranks in places.values())
    usual = Counter(t for t in said.values() if t is not None).most_common()
    order = [*(t for t, _ in usual), *([None] if None in places else [])]
    return [head, *(f"  {_ranks(places[t]):<{width}}  {t or 'stopped before'}" for t in order)]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _spelled(entry: list[Any]) -> str:
    _, name, axes, shape, dtype, *line = entry
    text = f"{name} over {' '.join(axes)} of {dtype}{list(shape)}"
    return f"{text} at {line[0]}" if line and line[0] else text
