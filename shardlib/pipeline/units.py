"""Units of a module: the parts that a stage may leave out, and how units are dealt to stages.

Blocks are the items of the outermost lists of alike modules; units are the blocks and the other
children of the modules around them.
"""

import math
from collections.abc import Sequence

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


def dealt(costs: Sequence[float], parts: int) -> list[int]:
    """Return where each of ``parts`` runs of consecutive costs begins; the largest sum is least.

    Raises: ShardError where there are fewer costs than parts.

    >>> dealt([3, 1, 1, 1], 2)
    [0, 1]
    """
    count = len(costs)
    if count < parts:
        why = f"{count} blocks cannot be {parts} stages"
        fix = f'sl.Stages("pipe", cut={count})'
        raise ShardError(why, op="parallelize", fix=fix)
    sums = [math.fsum(costs[:i]) for i in range(count + 1)]
    # best[end]: the least largest sum of the first ``end`` costs in so many parts, and the begins
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(parts):
        best = {
            end: min(
                (max(worst, sums[end] - sums[begin]), [*begins, begin])
                for begin, (worst, begins) in best.items()
                if begin < end
            )
            for end in range(1, count + 1)
            if any(begin < end for begin in best)
        }
    return best[count][1]
