"""Pipeline stages: on real ranks the tree of each has the leaves of its own parameters alone.

Ranks of one stage have one tree, and the tree of a checkpoint is the union of all by name.  A name
on several stages is that of copies, of which the first stage's is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardlib.checkpoint.tree import read_place, said_of
from shardlib.collectives import spans_processes
from shardlib.tensor import ShardedTensor

Containers = dict[str, Any]
"""The containers of a tree in the manifest's form: kind and items."""

Described = Sequence[Any]
"""Path, step, name -> description of a leaf, and containers of a tree."""


def stage_of(leaves: Iterable[object]) -> list[int] | None:
    """Return the ranks of the stage whose mesh all sharded tensors have; none without such a tensor.

    None: they have another mesh, and every rank the same tree.
    """
    meshes = {x.mesh for x in leaves if isinstance(x, ShardedTensor)}
    if any(m.outer is None or not spans_processes(m) for m in meshes):
        return None
    return next((list(m.ranks) for m in meshes), [])


def groups_of(stages: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group all ranks by stage, given the one that each has named.

    >>> groups_of([[0, 2], [], [0, 2], []])
    [[0, 2], [1, 3]]
    """
    home = {rank: tuple(stage) for stage in stages for rank in stage}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(len(stages)):
        groups.setdefault(home.get(rank, ()), []).append(rank)
    return list(groups.values())


def refuse_difference(a: Described, b: Described, zero: int, rank: int) -> None:
    """Raise an error with the first difference of two ranks' trees.

    Raises: ValueError.
    """
    (path, step, said, *_), (other, step_there, said_there, *_) = a, b
    if path != other:
        raise ValueError(f"rank {rank} saves to {other}, rank {zero} to {path}")
    if step != step_there:
        raise ValueError(f"rank {rank} saves step {step_there}, rank {zero} step {step}")
    for name in sorted({*said, *said_there}):
        if said.get(name, ...) != said_there.get(name, ...):
            mine, theirs = (x.get(name, "nothing") for x in (said, said_there))
            raise ValueError(f"{name!r} is {theirs} on rank {rank} and {mine} on rank {zero}")


def union(trees: Mapping[tuple[int, ...], Described]) -> tuple[dict[str, Any], Any, dict[str, int]]:
    """Join the trees of stages, given the ranks of each.

    Return the descriptions, the containers, and name -> first rank of the first stage that has it,
    of each name on several stages.
    Raises: ValueError for another path, a name of two descriptions or containers of two kinds.
    """
    said: dict[str, Any] = {}
    first: dict[str, int] = {}
    copies: dict[str, int] = {}
    world = sum(map(len, trees))
    (zero, *_), (path, step, _, containers) = next(iter(trees.items()))
    for ranks, (other, step_there, tree, more) in trees.items():
        refuse_difference((path, step, {}), (other, step_there, {}), zero, ranks[0])
        containers = joined(containers, more)
        for name, about in tree.items():
            if name in said:
                one, two = ((path, step, {name: _bare(x)}) for x in (said[name], about))
                refuse_difference(one, two, first[name], ranks[0])
                copies[name] = first[name]
                continue
            said[name], first[name] = about, ranks[0]
            if isinstance(about, dict):
                place = read_place(about, world).among(ranks)
                if not set(ranks).issuperset(place.ranks):
                    raise ValueError(f"{name!r} is on ranks of several stages of a pipeline")
                said[name] = said_of(place)
    return said, containers, copies


def _bare(about: object) -> object:
    """Return a description without the ranks that hold the tensor."""
    if not isinstance(about, dict):
        return about
    return {key: x for key, x in about.items() if key not in ("mesh", "ranks")}


def joined(a: Containers, b: Containers, at: str = "the tree") -> Containers:
    """Join the containers of two trees.

    Raises: ValueError if they differ in kind.
    """
    kinds = [x.get("kind", "leaf") for x in (a, b)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{at} is a {kinds[0]} on one stage and a {kinds[1]} on another")
    items = dict(a.get("items", {}))
    for key, child in b.get("items", {}).items():
        items[key] = joined(items[key], child, f"{at}[{key}]") if key in items else child
    return {**a, "items": items} if items else a
