"""Units of a module: the parts that a stage may leave out, and how units are dealt to stages.

Blocks are the items of the outermost lists of alike modules; units are the blocks and the other
children of the modules around them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from shardlib.errors import ShardError


def blocks_of(module: nn.Module) -> list[str]:
    """List the repeated blocks of a module, in order: the items of its outermost alike lists.

    A block that is a container, which is never called itself, counts as its items; a list of one
    item counts where there is no longer one, since its block may be called repeatedly.

    >>> blocks_of(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)))
    ['0', '1', '2']
    """
    if isinstance(module, nn.Sequential):
        return [n for n, _ in module.named_children()]
    paths = _lists(module, 2) or _lists(module, 1)
    lists = {path: module.get_submodule(path) for path in paths}
    sizes = {path: sum(p.numel() for p in m.parameters()) for path, m in lists.items()}
    found = []
    for path, size in sizes.items():
        # a list of few parameters holds no blocks
        if size < 0.2 * max(sizes.values()):
            continue
        for n, block in lists[path].named_children():
            uncalled = isinstance(block, nn.ModuleDict | nn.ModuleList)
            inner = [f"{path}.{n}.{i}" for i, _ in block.named_children() if uncalled]
            found += inner or [f"{path}.{n}"]
    return found


def _lists(module: nn.Module, least: int) -> list[str]:
    """List the outermost lists of at least so many modules, all of one class, with parameters."""
    found: list[str] = []
    for path, m in module.named_modules():
        items = list(m.children())
        # parametrized modules, as by weight_norm, have a class each
        alike = len(items) >= least and len(set(map(type_before_parametrizations, items))) == 1
        a_list = path and alike and isinstance(m, nn.ModuleList | nn.Sequential)
        outermost = not any(path.startswith(f"{around}.") for around in found)
        if a_list and outermost and next(items[0].parameters(), None) is not None:
            found.append(path)
    return found


def units_of(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """List the units: the blocks, and the other children of the modules around them."""
    around = {"", *(b[:i] for b in blocks for i in range(len(b)) if b[i] == ".")}
    names = [n for n, _ in module.named_modules()]
    return [n for n in names if n and n not in around and n.rpartition(".")[0] in around]


Block = TypeVar("Block")
Run = tuple[int, int, int]
"""Stage, and the blocks that it has: the first, and the first that it has not."""


def dealt(
    costs: Sequence[float], parts: int, refused: Collection[tuple[Run, ...]] = ()
) -> list[int]:
    """Return where each of ``parts`` runs of consecutive costs begins; the largest sum is least.

    ``refused``  runs that stages cannot all have, in order, nor runs that contain them; nothing is
                 returned where these leave no way.
    Raises: ShardError where there are fewer costs than parts.

    >>> dealt([3, 1, 1, 1], 2), dealt([3, 1, 1, 1], 2, [((1, 2, 4),)])
    ([0, 1], [0, 3])
    """
    count = len(costs)
    if count < parts:
        why = f"{count} blocks cannot be {parts} stages"
        fix = f'sl.Stages("pipe", cut={count})'
        raise ShardError(why, op="parallelize", fix=fix)
    sums = [math.fsum(costs[:i]) for i in range(count + 1)]
    # (end, runs that later stages cannot all have) -> the least largest sum of the first ``end``
    # costs in so many parts, and the begins
    best: dict[tuple[int, frozenset[tuple[Run, ...]]], tuple[float, list[int]]] = {}
    best[0, frozenset()] = 0.0, []
    for part in range(parts):
        ways, first = best, [runs for runs in refused if runs[0][0] == part]
        best = {}
        for (begin, later), (worst, begins) in ways.items():
            for end in range(begin + 1, count + part - parts + 2):
                left = _left([*first, *later], (part, begin, end))
                if () not in left:
                    way = max(worst, sums[end] - sums[begin]), [*begins, begin]
                    best[end, left] = min(way, best.get((end, left), way))
    return best.get((count, frozenset()), (0.0, []))[1]


def _left(refused: Iterable[tuple[Run, ...]], run: Run) -> frozenset[tuple[Run, ...]]:
    """Return which of the refused runs are left for later stages to avoid where one has this run."""
    part, begin, end = run
    here = {runs for runs in refused if runs[0][0] == part}
    met = {runs[1:] for runs in here if begin <= runs[0][1] and runs[0][2] <= end}
    return frozenset({*refused} - here | met)


def fitting(
    chain: Mapping[Block, float], ranks: Sequence[int], peaks: Callable[[list[Block]], list[int]]
) -> Callable[[float], tuple[list[Block], list[int]]]:
    """Return a search: bytes -> the fastest cut of a chain in which no rank holds more.

    A cut is where the stages begin, and the bytes that each rank holds; both are empty where none
    fits.  The fastest cut is priced, and again without the runs of ranks that held too much, until
    one fits.  It is the fastest of all where a rank does not hold less with more blocks.

    ``chain``   block -> its cost; ``ranks`` that of each stage.
    ``peaks``   where the stages begin -> bytes that each rank holds.

    >>> in_flight = lambda begins: [2 * begins[1], 4 - begins[1]]  # of four blocks in two stages
    >>> within = fitting(dict.fromkeys(range(4), 1), [0, 1], in_flight)
    >>> within(4), within(3), within(2)
    (([0, 2], [4, 2]), ([0, 1], [2, 3]), ([], []))
    """
    blocks, costs = [*chain], [*chain.values()]
    held: dict[tuple[Run, ...], int] = {}

    def within(memory: float) -> tuple[list[Block], list[int]]:
        while begins := dealt(costs, len(ranks), {own for own, n in held.items() if n > memory}):
            runs = [(s, a, b) for s, (a, b) in enumerate(pairwise([*begins, len(costs)]))]
            rows = [tuple(run for run in runs if ranks[run[0]] == r) for r in sorted({*ranks})]
            at = [blocks[i] for i in begins]
            if not held.keys() >= {*rows}:
                held.update(zip(rows, peaks(at), strict=True))
            if max(each := [held[row] for row in rows]) <= memory:
                return at, each
        return [], []

    return within
