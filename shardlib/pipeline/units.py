"""Units of a module: the parts that a stage may leave out, and how units are dealt to stages.

Blocks are the items of the outermost lists of alike modules; units are the blocks and the other
children of the modules around them.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

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
    paths = _lists(module, "", 2) or _lists(module, "", 1)
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


def _lists(module: nn.Module, path: str, least: int) -> list[str]:
    """List the outermost lists of at least so many modules, all of one class, with parameters."""
    found = []
    for name, child in module.named_children():
        at = f"{path}.{name}".lstrip(".")
        items = list(child.children())
        # parametrized modules, as by weight_norm, have a class each
        kinds = set(map(type_before_parametrizations, items))
        alike = len(items) >= least and len(kinds) == 1
        a_list = isinstance(child, nn.ModuleList | nn.Sequential)
        if a_list and alike and next(items[0].parameters(), None) is not None:
            found.append(at)
        else:
            found += _lists(child, at, least)
    return found


def units_of(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """List the units: the blocks, and the other children of the modules around them."""
    around = {""}
    for b in blocks:
        parts = b.split(".")
        around |= {".".join(parts[:i]) for i in range(len(parts))}
    names = [n for n, _ in module.named_modules()]
    return [n for n in names if n and n not in around and n.rpartition(".")[0] in around]


Run = tuple[int, int, int]
"""Stage, and the blocks that it has: the first, and the first that it has not."""


def dealt(costs: Sequence[float], parts: int, refused: Collection[Run] = ()) -> list[int]:
    """Return where each of ``parts`` runs of consecutive costs begins; the largest sum is least.

    ``refused``  runs that a stage cannot have, nor one that contains it; nothing is returned where
                 these leave no way.
    Raises: ShardError where there are fewer costs than parts.

    >>> dealt([3, 1, 1, 1], 2), dealt([3, 1, 1, 1], 2, [(1, 2, 4)])
    ([0, 1], [0, 3])
    """
    count = len(costs)
    if count < parts:
        why = f"{count} blocks cannot be {parts} stages"
        fix = f'sl.Stages("pipe", cut={count})'
        raise ShardError(why, op="parallelize", fix=fix)
    sums = [math.fsum(costs[:i]) for i in range(count + 1)]
    # best[end]: the least largest sum of the first ``end`` costs in so many parts, and the begins
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for part in range(parts):
        limits = [(a, b) for s, a, b in refused if s == part]
        best = {
            end: min(ways)
            for end in range(1, count + 1)
            if (
                ways := [
                    (max(worst, sums[end] - sums[begin]), [*begins, begin])
                    for begin, (worst, begins) in best.items()
                    if begin < end and not any(begin <= a and b <= end for a, b in limits)
                ]
            )
        }
    return best[count][1] if count in best else []


@dataclass
class Fitting:
    """Search of the fastest cut of a chain in which no stage holds more bytes than it may.

    The fastest cut is priced, and again without the runs that held too much, until one fits.  It is
    the fastest of all where a stage does not hold less with more blocks.

    ``costs``   of each block; ``stages`` how many.
    ``peaks``   where the stages begin -> bytes that each holds.

    >>> in_flight = lambda begins: [2 * begins[1], 4 - begins[1]]  # of four blocks in two stages
    >>> chain = Fitting([1, 1, 1, 1], 2, in_flight)
    >>> chain.within(4), chain.within(3), chain.within(2), chain.least()
    ([0, 2], [0, 1], [], ([0, 1], [2, 3]))
    """

    costs: Sequence[float]
    stages: int
    peaks: Callable[[list[int]], Sequence[int]]
    held: dict[Run, int] = field(default_factory=dict)

    def within(self, memory: float) -> list[int]:
        """Return where the stages begin; nothing where no cut fits."""
        refused = {run for run, held in self.held.items() if held > memory}
        while begins := dealt(self.costs, self.stages, refused):
            runs = self._runs(begins)
            if not self.held.keys() >= {*runs}:
                self.held.update(zip(runs, self.peaks(begins), strict=True))
            over = {run for run in runs if self.held[run] > memory}
            if not over:
                return begins
            refused |= over
        return []

    def least(self) -> tuple[list[int], list[int]]:
        """Return the cut whose largest stage holds least, and what each of its stages holds."""
        begins, held = self.within(math.inf), [0]
        while begins:
            found, held = begins, [self.held[run] for run in self._runs(begins)]
            begins = self.within(max(held) - 1)
        return found, held

    def _runs(self, begins: Sequence[int]) -> list[Run]:
        return [(s, a, b) for s, (a, b) in enumerate(pairwise([*begins, len(self.costs)]))]
