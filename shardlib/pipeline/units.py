"""Units of a module: the parts that a stage may leave out, and how units are dealt to stages.

Blocks are the items of the outermost lists of alike modules; units are the blocks and the other
children of the modules around them.
"""

import math
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from itertools import pairwise

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from shardlib.errors import ShardError

SMALL = 0.2
"""Share of the largest list's parameters below which a list holds no blocks."""


def blocks_of(module: nn.Module) -> list[str]:
    """List the repeated blocks of a module, in order: the items of its outermost alike lists.

    A block that is a container, which is never called itself, counts as its items; a list of one
    item counts where there is no longer one, since its block may be called repeatedly.

    >>> blocks_of(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)))
    ['0', '1', '2']
    """
    if isinstance(module, nn.Sequential):
        return [n for n, _ in module.named_children()]
    lists = _lists(module, "", 2) or _lists(module, "", 1)
    sizes = {
        path: sum(p.numel() for p in module.get_submodule(path).parameters()) for path in lists
    }
    least = SMALL * max(sizes.values(), default=0)
    found = []
    for path, size in sizes.items():
        for n, block in module.get_submodule(path).named_children() if size >= least else ():
            inner = block.named_children() if isinstance(block, _UNCALLED) else ()
            found += [f"{path}.{n}.{i}" for i, _ in inner] or [f"{path}.{n}"]
    return found


_UNCALLED = (nn.ModuleDict, nn.ModuleList)


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


class Fitting:
    """Search of the fastest cut of a chain in which no place holds more bytes than it may.

    A place that holds too much with some runs is taken to do so with longer ones.  So cuts are tried
    from the fastest on, each without the runs that were too much: of one stage per place, one way
    at a time, else one for each stage of the place.

    ``costs``  of each block; ``ranks`` the place of each stage.
    ``peaks``  where the stages begin -> bytes that each place holds.

    >>> in_flight = lambda begins: [2 * begins[1], 4 - begins[1]]  # of four blocks at two places
    >>> chain = Fitting([1, 1, 1, 1], [0, 1], in_flight)
    >>> chain.within(4), chain.within(3), chain.within(2), chain.least()
    ([0, 2], [0, 1], [], (3, [0, 1]))
    """

    def __init__(
        self,
        costs: Sequence[float],
        ranks: Sequence[int],
        peaks: Callable[[list[int]], Sequence[int]],
    ) -> None:
        self.costs, self.ranks, self.peaks = costs, ranks, peaks
        # runs of the stages of a place -> its bytes
        self.held: dict[tuple[Run, ...], int] = {}

    def within(self, memory: float) -> list[int]:
        """Return where the stages begin; nothing where no cut fits."""
        waiting, seen = [self._slowest(frozenset())], set()
        while waiting:
            _, begins, refused = heappop(waiting)
            if not begins or refused in seen:
                continue
            seen.add(refused)
            over = self._over(begins, memory)
            if not over:
                return begins
            for run in over:
                heappush(waiting, self._slowest(refused | {run}))
        return []

    def least(self) -> tuple[int, list[int]]:
        """Return the least memory in which a cut fits, and that cut."""
        begins, most = self._slowest(frozenset())[1], 0
        while begins:
            found, most = begins, max(self.held_by(begins))
            begins = self.within(most - 1)
        return most, found

    def _slowest(self, refused: frozenset[Run]) -> tuple[float, list[int], frozenset[Run]]:
        begins = dealt(self.costs, len(self.ranks), refused)
        sums = [math.fsum(self.costs[a:b]) for _, a, b in _runs(begins, len(self.costs))]
        return max(sums, default=math.inf), begins, refused

    def _places(self, begins: list[int]) -> list[tuple[Run, ...]]:
        runs = _runs(begins, len(self.costs))
        return [
            tuple(run for run in runs if self.ranks[run[0]] == r) for r in sorted({*self.ranks})
        ]

    def held_by(self, begins: list[int]) -> list[int]:
        """Return the bytes that each place holds."""
        places = self._places(begins)
        if not all(p in self.held for p in places):
            self.held.update(zip(places, self.peaks(begins), strict=True))
        return [self.held[p] for p in places]

    def _over(self, begins: list[int], memory: float) -> tuple[Run, ...]:
        """Return the runs of a place that holds too much, one that was priced before if any."""
        places = self._places(begins)
        for known in (p for p, n in self.held.items() if n > memory):
            if any(_contains(p, known) for p in places):
                return known
        held = self.held_by(begins)
        return next((p for p, n in zip(places, held, strict=True) if n > memory), ())


def _runs(begins: Sequence[int], count: int) -> list[Run]:
    return [(s, a, b) for s, (a, b) in enumerate(pairwise([*begins, count]))]


def _contains(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Check whether each run of a place contains the other of the same stage."""
    pairs = zip(runs, others, strict=True)
    return all(s == t and a <= c and d <= b for (s, a, b), (t, c, d) in pairs)
