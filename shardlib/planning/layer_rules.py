"""Rules for the layouts and the remat of layers that are alike: patterns of names, most usual last."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from shardlib.planning.parts import Part
from shardlib.planning.program import Solution

WHOLE = ("...",)
"""Layout in the rule of a parameter that is whole on all ranks."""

Rules = tuple[tuple[str, ...], ...]
Remat = tuple[tuple[str, str], ...]


def rules_and_remat(
    found: Solution, parts: Sequence[Part], parameters: Mapping[int, str]
) -> tuple[Rules, Remat]:
    """Write a solution's layouts and remat as rules; what most layers of a stack have, last.

    Vectors that are whole have one rule behind all others, where none of these is theirs too.

    ``parameters``  number of a value of the step -> name.
    """
    said: dict[str, dict[int, tuple[str, ...]]] = defaultdict(dict)
    rules: list[tuple[str, ...]] = []
    remat: list[tuple[str, str]] = []
    again: dict[tuple[str, str], list[int]] = defaultdict(list)
    at: Counter[int] = Counter()
    for column, count in found.counts:
        part, begin = parts[column.part], at[column.part]
        at[column.part] += count
        layers = part.layers[begin : begin + count]
        way, policy = column.way
        for number, leaf in way.choices().items():
            name = parameters[number]
            if not part.path:
                rules.append((name, *leaf.said))
                continue
            for layer in layers:
                stack, dot, index = layer.rpartition(".")
                pattern = f"{stack}{dot}{{}}{name.removeprefix(part.path)}"
                said[pattern][int(index)] = leaf.said
        if policy:
            stack = layers[0].rpartition(".")[0]
            again[stack, policy] += [int(layer.rpartition(".")[2]) for layer in layers]
    for pattern, of_layers in said.items():
        rules += _folded(pattern, of_layers)
    for (stack, policy), numbers in again.items():
        remat += [(f"{stack}.{n}".lstrip("."), policy) for n in patterns(numbers)]
    others = [rule for rule in rules if rule[1:] != WHOLE]
    one = others if all(rule in others or not _first(others, rule[0]) for rule in rules) else rules
    return (*one, *[("*", *WHOLE)] * (one != rules)), tuple(remat)


def _first(rules: Sequence[tuple[str, ...]], pattern: str) -> bool:
    """Return whether a rule applies to names of a pattern."""
    return any(fnmatchcase(pattern.replace("*", "0"), rule[0]) for rule in rules)


def _folded(pattern: str, said: Mapping[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rules for the layers that differ from most, then one for all others.

    >>> _folded("h.{}.w", {0: ("x .",), 1: (". x",), 2: (". x",)})
    [('h.0.w', 'x .'), ('h.*.w', '. x')]
    """
    layers: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, text in said.items():
        layers[text].append(i)
    (usual, _), *others = sorted(layers.items(), key=lambda kind: -len(kind[1]))
    found = [(pattern.format(p), *text) for text, own in others for p in patterns(own)]
    return [*found, (pattern.format("*"), *usual)]


def patterns(numbers: Iterable[int]) -> list[str]:
    """Write patterns, as of ``fnmatch``, which these numbers match and no others.

    >>> patterns(range(4, 32)), patterns([7]), patterns([0, 1, 2, 5])
    (['[4-9]', '[1-2]?', '3[0-1]'], ['7'], ['[0-25]'])
    """
    texts = sorted(map(str, numbers), key=lambda t: (len(t), t))
    return [p for _, some in itertools.groupby(texts, len) for p in _digits([*some])]


def _digits(texts: Sequence[str]) -> list[str]:
    """Write patterns of numbers with the same count of digits."""
    if not texts[0]:
        return [""]
    tails: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        tails[text[0]].append(text[1:])
    firsts: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for digit, rest in tails.items():
        firsts[tuple(rest)].append(int(digit))
    return [_class(own) + p for rest, own in firsts.items() for p in _digits(rest)]


def _class(digits: Sequence[int]) -> str:
    if len(digits) in (1, 10):
        return str(digits[0]) if len(digits) == 1 else "?"
    runs: list[list[int]] = []
    for d in digits:
        if not runs or d != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(d)
    return "[" + "".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) + "]"
