"""Plans of drawn graphs against every combination of the strategies of their calls.

    python -W ignore -m tests.planning.brute_force --count 300 --seed 0

A module of at most 8 calls on a mesh of at most 3 axes is drawn: products, sums, activations, norms,
values and weights that are read twice, and stacks of equal layers, of which each may be computed
again, or save in host memory.  Every setting of it (split of the batch, axes of ZeRO) is enumerated
without any pruning, and what a step takes is added up here anew; the columns, the integer program
and the bounds between settings must find the same least seconds in several budgets, and the same
least bytes.
"""

import argparse
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.planning.calls import Call
from shardlib.planning.joint import GAP, Setting, Study
from shardlib.planning.program import solve
from shardlib.planning.question import Question
from shardlib.planning.strategies import CallStrategy, Operand
from shardlib.planning.work import StepWork

PATHS = 4000
"""The most ways through the calls of a setting, and the most steps that they make."""
STEPS = 1_000_000

CALLS = 8


class Ops(nn.Module):
    """Calls in a drawn order: of each its name, the values it reads, and the width of its result."""

    def __init__(self, calls: Sequence[tuple[str, tuple[int, ...], int]], width: int) -> None:
        super().__init__()
        self.calls, widths = calls, [width]
        for i, (name, reads, wide) in enumerate(calls):
            if name == "linear":
                setattr(self, f"at{i}", nn.Linear(widths[reads[0]], wide, bias=bool(i % 2)))
            elif name == "norm":
                setattr(self, f"at{i}", nn.LayerNorm(wide))
            widths.append(wide)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for i, (name, reads, _) in enumerate(self.calls):
            given = [values[r] for r in reads]
            if name == "add":
                out = given[0] + given[1]
            elif name == "again":
                # the weight of the first product, read a second time
                first = next(j for j, call in enumerate(self.calls) if call[0] == "linear")
                out = F.linear(given[0], getattr(self, f"at{first}").weight)
            elif name in ("linear", "norm"):
                out = getattr(self, f"at{i}")(given[0])
            else:
                out = _PLAIN[name](given[0])
            values.append(out)
        return values[-1]


_PLAIN = {"gelu": F.gelu, "tanh": torch.tanh, "softmax": lambda x: x.softmax(-1)}


class Layers(nn.Module):
    """A stack of equal layers between other calls."""

    def __init__(self, before: nn.Module, layers: Sequence[nn.Module], behind: nn.Module) -> None:
        super().__init__()
        self.before, self.h, self.behind = before, nn.ModuleList(layers), behind

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.h:
            x = layer(x)
        return self.behind(x)


def _ops(rng: random.Random, count: int, width: int, back: bool = False) -> Ops:
    """Draw so many calls; ``back``: the last has the width of the first operand."""
    calls: list[tuple[str, tuple[int, ...], int]] = []
    widths = [width]
    for i in range(count):
        newest = len(widths) - 1
        read = newest if rng.random() < 0.8 else rng.randrange(len(widths))
        same = [j for j, w in enumerate(widths) if w == widths[read] and j != read]
        first = next((c for c in calls if c[0] == "linear"), None)
        names = ["linear", "linear", "gelu", "tanh", "softmax", "norm", *["add"] * 3 * bool(same)]
        if first is not None and widths[read] == widths[first[1][0]]:
            names.append("again")
        name, wide, reads = rng.choice(names), widths[read], (read,)
        if not calls or (back and i == count - 1 and wide != width):
            name, reads = "linear", (read,)
        if name == "linear":
            wide = rng.choice([8, 16, 32])
            if back and i == count - 1:
                wide = width
        elif name == "add":
            reads = read, rng.choice(same)
        elif name == "again":
            assert first is not None
            wide = first[2]
            if back and i == count - 1 and wide != width:
                name = "gelu"
                wide = widths[read]
        calls.append((name, reads, wide))
        widths.append(wide)
    return Ops(calls, width)


class Case(NamedTuple):
    """A drawn question, and the draw of its budgets."""

    asked: Question
    text: str
    rng: random.Random


def draw(seed: int) -> Case:
    """Draw a module, a mesh, a cluster and the layouts that are weighed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width = rng.choice([8, 16])
    stacked = rng.random() < 0.4
    if stacked:
        layers, size = rng.choice([2, 2, 3]), rng.choice([2, 3])
        block = rng.randrange(2**30)
        module: nn.Module = Layers(
            _ops(rng, rng.choice([1, 2]), width, True),
            [_ops(random.Random(block), size, width, True) for _ in range(layers)],
            _ops(rng, 1, width),
        )
    else:
        module = _ops(rng, rng.randint(2, CALLS - 1), width)
    sizes = rng.choice([(2,), (4,), (2, 2), (4, 2), (2, 2, 2)])
    mesh = dict(zip("abc", sizes, strict=False))
    shape = (rng.choice([4, 8, 64]), width)
    if rng.random() < 0.3:
        shape = shape[0], 4, width
    flops, beta = 10 ** rng.uniform(7, 12), 10 ** rng.uniform(-9, -6)
    cluster = sl.planning.Cluster(
        1e12, flops, 2, sl.planning.Link(1e-6, beta / 4), sl.planning.Link(1e-5, beta),
        bandwidth=10 ** rng.uniform(7, 10), host=10 ** rng.uniform(6, 10),
    )  # fmt: skip
    asked = Question(
        module, (torch.empty(*shape, device="meta"),), _loss, sl.optim.adamw(0.01), cluster, 1e15,
        math.prod(sizes), mesh, rng.choice([1, 1, 1, 2]), host=rng.choice([None, 1e15]),
    )  # fmt: skip
    kept = {(True, 1): 4, (True, 2): 3}.get((stacked, len(sizes)), 2 if stacked else 4)
    asked = replace(asked, refused=_refused(asked, rng, kept))
    calls = [c[0] for m in module.modules() if isinstance(m, Ops) for c in m.calls]
    return Case(asked, f"{mesh} {shape} {' '.join(calls)}", rng)


def _loss(apply: Any, params: Any, x: Tensor) -> Tensor:
    return apply(params, x).sum()


def _refused(asked: Question, rng: random.Random, kept: int) -> dict[str, frozenset[str]]:
    """Draw the layouts of each matrix that are not weighed, all but a few."""
    study = Study(asked, asked.micros or 1)
    found = {}
    for name, p in asked.module.named_parameters():
        if p.ndim > 1 and name in study.parameters:
            texts = study.layouts(name)
            found[name] = frozenset(texts) - {*rng.sample(texts, min(kept, len(texts)))}
    return found


# ---------------------------------------------------------------- every way there is


class TooMany(Exception):
    """There are more ways than are enumerated."""


class Alive(NamedTuple):
    """A value that is read later: where it lies, the value whose memory it shares, of ``nbytes``."""

    operand: Operand
    root: int
    nbytes: int


class At(NamedTuple):
    """What later calls depend on: the values alive by number, and the roots that are saved.

    ``near``  bytes that the last call saved to host memory.
    """

    alive: tuple[tuple[int, Alive], ...]
    saved: frozenset[int]
    near: int = 0


class Cost(NamedTuple):
    """What a way through a part of a step takes, as ``Column`` has it, and its passes alone.

    ``again``  seconds of forward before backward, where it is computed again but for results that
               are held: ``held`` bytes, the values ``numbers``.
    """

    forward: float = 0.0
    back: float = 0.0
    kept: float = 0.0
    gradients: float = 0.0
    saved: float = 0.0
    most: float = 0.0
    again: float = 0.0
    held: float = 0.0
    numbers: frozenset[int] = frozenset()


class Every:
    """Every way through the parts of a setting, its cost added up from the table of strategies."""

    def __init__(self, study: Study, setting: Setting) -> None:
        self.study, self.search, self.step = study, setting.search, study.step
        self.plain = setting.search
        self.holding = setting.holding
        self.steps = 0
        self.offers: dict[Any, Any] = {}

    def begin(self) -> At:
        """Return the state in which inputs are there, and nothing else."""
        alive = []
        for n, operand in sorted(self.search.inputs.items()):
            stacked = len(self.study.parts[0].layers) > 1 and operand.dtype.is_floating_point
            alive.append((n, Alive(replace(operand, trained=stacked), n, operand.nbytes)))
        return At(tuple(alive), frozenset())

    def ways(self, calls: Sequence[Call], begin: At, remat: str = "") -> dict[At, set[Cost]]:
        """Return what each way through these calls takes, by the state that it ends in."""
        outer = {x.root for _, x in begin.alive}
        found: dict[At, set[Cost]] = defaultdict(set)
        self.search = self.plain.under(remat)
        self._longer(calls, 0, begin, Cost(), outer, found)
        return found

    def _longer(
        self, calls: Sequence[Call], at: int, now: At, cost: Cost, outer: set[int],
        found: dict[At, set[Cost]],
    ) -> None:  # fmt: skip
        if at == len(calls):
            found[now].add(cost)
            return
        call, have = calls[at], dict(now.alive)
        given = {r: have[r].operand for r in call.reads if r in have}
        given |= {r: self.search.inputs[r] for r in call.reads if r in self.search.inputs}
        for choice, strategy in self._offered(call, given):
            self.steps += 1
            if self.steps > STEPS:
                raise TooMany
            leaves = {i: leaf.operand for i, leaf in choice.items()}
            after, own = self._through(call, strategy, now, leaves, choice, cost, outer)
            self._longer(calls, at + 1, after, own, outer, found)

    def _offered(self, call: Call, given: Mapping[int, Operand]) -> Any:
        key = call, self.search.remat, tuple(given.items())
        if key not in self.offers:
            offers = self.search._offers(call, given)
            steps = [s for offer in offers for s in self.search._steps(call, offer)]
            self.offers[key] = [(s.choice, s.strategy) for s in steps]
        return self.offers[key]

    def _through(
        self, call: Call, strategy: CallStrategy, now: At, leaves: Mapping[int, Operand],
        choice: Mapping[int, Any], cost: Cost, outer: set[int],
    ) -> tuple[At, Cost]:  # fmt: skip
        have, holding = dict(now.alive), self.holding
        late = StepWork()
        sums = list(strategy.sums)
        if holding.micros > 1:
            # gradients of micro-batches are added up, and summed over ranks once
            sums = [holding.once(call.reads.index(i), leaf) for i, leaf in choice.items()]
            added = sum(map(holding.added, choice.values()))
            late.touched += 3 * (holding.micros - 1) * added
        operands = {n: x.operand for n, x in have.items()} | leaves
        for s in sums:
            late.join(holding.summed(s, holding.over(operands[call.reads[s.operand]])))
        readers = {n: [c for c in self.step.calls if n in c.reads] for n in call.reads}
        for n in call.reads:
            if readers[n][0] is not call and have[n].operand.trained:
                late.touched += 3 * holding.micros * have[n].operand.nbytes
        gradients = kept = 0.0
        for leaf in choice.values():
            late.join(holding.reduced(leaf))
            kept += holding.kept(leaf)
            gradients += holding.gradients(leaf)
        gradients += holding.gathering(sums)
        rates = self.search.rates
        forward = cost.forward + holding.passes * rates.seconds(strategy.forward)
        back = (
            holding.passes * rates.seconds(strategy.backward) + rates.seconds(late) / holding.pipe
        )
        # memory
        for n in call.reads:
            if n not in have:
                operand = leaves.get(n) or self.search.inputs.get(n) or self.search.constants[n]
                have[n] = Alive(operand, n, operand.nbytes)
        for j, n in enumerate(call.gives):
            shared = strategy.shares[j]
            if shared < 0:
                have[n] = Alive(strategy.outs[j], n, strategy.outs[j].nbytes)
            else:
                source = have[call.reads[shared]]
                have[n] = Alive(strategy.outs[j], source.root, source.nbytes)
        away = self.search.remat == "host"
        saved, more = set(now.saved), float(strategy.near if away else strategy.beside)
        for k in () if away else strategy.saved:
            x = have[call.reads[k] if k >= 0 else call.gives[-1 - k]]
            if _is_number(x) and x.root not in saved and x.root not in self.step.parameters:
                saved.add(x.root)
                more += x.nbytes
        not_counted = {*outer, *saved, *self.step.parameters, *self.search.constants}
        values = {x.root: x.nbytes for x in have.values() if x.root not in not_counted}
        at = self.step.calls.index(call)
        # values that Python holds, or that are read later
        left = {n: x for n, x in have.items() if self.step.ends.get(n, -1) > at}
        coming = sum(
            x.operand.nbytes for n, x in left.items()
            if n not in self.step.parameters and x.operand.trained and _is_number(x)
        )  # fmt: skip
        saves = cost.saved + more
        results = frozenset(call.gives[-1 - k] for k in strategy.held)
        held = cost.held + strategy.held_beside + sum(have[n].nbytes for n in results)
        again = cost.again + holding.passes * rates.seconds(strategy.again)
        meanwhile = max(strategy.most + sum(values.values()), strategy.most_back + coming)
        if away:
            forth = strategy.most + sum(values.values()) + strategy.beside
            meanwhile = now.near + max(forth, strategy.most_back + coming + strategy.away)
            back += holding.passes * 2 * strategy.away / self.study.cluster.host
        new = Cost(
            forward, cost.back + back, cost.kept + kept, cost.gradients + gradients, saves,
            max(cost.most, saves + meanwhile), again, held, cost.numbers | results,
        )  # fmt: skip
        alive = tuple(sorted(left.items(), key=lambda nx: nx[0]))
        roots = frozenset(saved) & {x.root for x in left.values()}
        return At(alive, roots, strategy.away * away), new

    # ------------------------------------------------------------ steps of all parts

    def totals(self) -> tuple[Any, Any]:
        """Return seconds and peak of every step: arrays of one entry for each combination."""
        nothing = np.zeros(1)
        # state -> seconds; kept and saved until there; the peak until there
        now = {self.begin(): (nothing, nothing, nothing)}
        for part in self.study.parts:
            found: dict[At, list[Any]] = defaultdict(list)
            for begin, (seconds, before, peak) in now.items():
                for end, several in self._layers(part, begin).items():
                    table = np.array(several)
                    s, prefix, ended, own = table.T
                    found[end].append((
                        _all(seconds, s), _all(before, prefix),
                        np.maximum(_all(peak, ended), _all(before, own)),
                    ))  # fmt: skip
            now = {
                end: tuple(np.concatenate([f[i] for f in some]) for i in range(3))
                for end, some in found.items()
            }
            if sum(len(seconds) for seconds, *_ in now.values()) > STEPS:
                raise TooMany
        empty = np.zeros(0)
        return tuple(np.concatenate([empty, *(f[i] for f in now.values())]) for i in (0, 2))  # type: ignore[return-value]

    def _layers(self, part: Any, begin: At) -> dict[At, list[tuple[float, ...]]]:
        """Return every choice of the layers of a part, by their end.

        Of each its seconds; its kept and saved bytes; its kept bytes and gradients; and its peak.
        """
        ways = self.ways(part.calls, begin)
        if sum(map(len, ways.values())) > PATHS:
            raise TooMany
        found: dict[At, list[tuple[float, ...]]] = {}
        layers = len(part.layers)
        held: dict[At, list[tuple[float, ...]]] = defaultdict(list)
        for end, costs in ways.items():
            if layers > 1 and not _goes_on(begin, end):
                continue
            for c in costs:
                held[end].append(self._of_layer(c, c.forward + c.back, c.saved))
        if layers > 1 and self.search.host:
            for end, costs in self.ways(part.calls, begin, "host").items():
                if _goes_on(begin, end):
                    own = [self._of_layer(c, c.forward + c.back, c.saved) for c in costs]
                    held[end._replace(near=0)] += own
        for remat in ("full", "products") if layers > 1 else ():
            for end, costs in self.ways(part.calls, begin, remat).items():
                if not _goes_on(begin, end):
                    continue
                left = {x.root for _, x in end.alive}
                border = {
                    x.root: x.nbytes for _, x in begin.alive
                    if _is_number(x) and x.root not in left and x.root not in begin.saved
                }  # fmt: skip
                for c in costs:
                    after = end._replace(saved=(end.saved & begin.saved) | (c.numbers & left))
                    kept = c.held + sum(border.values())
                    seconds = c.forward + c.again + c.back
                    held[after].append(self._of_layer(c, seconds, kept))
        for end, own in held.items():
            own = sorted(set(own))
            if math.comb(len(own) + layers - 1, layers) > STEPS // 4:
                raise TooMany
            found[end] = [_together(some) for some in combinations_with_replacement(own, layers)]
        return found

    def _of_layer(self, c: Cost, seconds: float, saved: float) -> tuple[float, ...]:
        # a layer that is computed again holds all that it saves meanwhile
        most = c.most - saved + self.holding.flying * saved
        return seconds, c.kept, c.gradients, self.holding.flying * saved, most


def _together(layers: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the seconds, the bytes and the peak of layers that follow one another."""
    seconds, kept, gradients, saved, _ = (sum(x) for x in zip(*layers, strict=True))
    # backward begins with all that is saved, and ends with all gradients
    first = max(max(most - own, 0.0) for *_, own, most in layers)
    last = max(max(most - own, 0.0) for _, _, own, _, most in layers)
    peak = kept + max(saved + first, gradients + last)
    return seconds, kept + saved, kept + gradients, peak


def _all(a: Any, b: Any) -> Any:
    return (a[:, None] + b[None, :]).ravel()


def _is_number(x: Alive) -> bool:
    return x.operand.dtype.is_floating_point or x.operand.dtype.is_complex


def _goes_on(begin: At, end: At) -> bool:
    """Return whether the next layer may begin as this one ends."""
    before, after = dict(begin.alive), dict(end.alive)
    new = [(x.operand.place, x.operand.dtype) for n, x in after.items() if n not in before]
    gone = [(x.operand.place, x.operand.dtype) for n, x in before.items() if n not in after]
    return bool(new) and all(new.count(p) <= gone.count(p) for p in new)


# ---------------------------------------------------------------- the comparison


def compare(case: Case, budgets: int = 3) -> str:
    """Return in what the search differs from every combination, "" for nothing.

    Raises: TooMany.
    """
    asked, rng = case.asked, case.rng
    micros = asked.micros or 1
    # without memory no difference between two ways is too small
    study = Study(replace(asked, room=0.0), micros)
    every: list[tuple[Setting, Any, Any]] = []
    for setting in study.settings():
        every.append((setting, *Every(study, setting).totals()))
    some = [(s, t, p) for s, t, p in every if len(t)]
    if not some:
        whole = Study(asked, micros)
        ways = whole.weighed(whole.settings(), math.inf, {})
        return "a plan where there is no way" if ways else ""
    low = min(peak.min() for _, _, peak in some)
    high = max(peak[seconds.argmin()] for _, seconds, peak in some)
    rooms = [low * 0.99, *(low + rng.random() * (1.05 * high - low) for _ in range(budgets)), 1e15]
    for setting, seconds, peak in every:
        differs = _of_setting(study, setting, seconds, peak, rooms)
        if differs:
            return f"{setting.name}: {differs}"
    room = rooms[1]
    want = min(_least(seconds, peak, room) for _, seconds, peak in every)
    whole = Study(replace(asked, room=room), micros)
    whole.weighed(whole.settings(), math.inf, {})
    if not want * (1 - 1e-9) <= whole.thought <= want * (1 + GAP):
        return f"{whole.thought} s of all settings in {room:.0f} bytes, not {want}"
    return ""


def _of_setting(
    study: Study, setting: Setting, seconds: Any, peak: Any, rooms: Sequence[float]
) -> str:
    columns = study.columns(setting.search)
    for room in rooms:
        want, found = _least(seconds, peak, room), solve(columns, study.counts, room)
        got = math.inf if found is None else found.seconds
        if got != want and abs(got - want) > 1e-9 * want:
            return f"{got} s in {room:.0f} bytes, not {want}, of {len(seconds)} ways"
    least = solve(columns, study.counts, least=True)
    if len(peak) and (least is None or abs(least.peak - peak.min()) > 1e-9 * peak.min()):
        return f"{least and least.peak} bytes at the least, not {peak.min()}"
    return ""


def _least(seconds: Any, peak: Any, room: float) -> float:
    fitting = seconds[peak <= room]
    return float(fitting.min()) if len(fitting) else math.inf


def drawn(seed: int) -> Iterator[Case]:
    """Yield draws of a seed, until one has few enough ways."""
    for again in range(20):
        yield draw(seed + 1_000_000 * again)


def judged(seed: int) -> tuple[Case, str]:
    """Return the first draw of a seed with few enough ways, and in what its plans differ."""
    for case in drawn(seed):
        try:
            return case, compare(case)
        except TooMany:
            continue
    raise AssertionError(f"every draw of {seed} has too many ways")


def main(argv: list[str] | None = None) -> int:
    """Compare drawn graphs; return how many differ."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--count", type=int, default=300)
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args(argv)
    wrong = 0
    for seed in range(options.seed, options.seed + options.count):
        began = time.process_time()
        case, differs = judged(seed)
        wrong += bool(differs)
        took = time.process_time() - began
        print(f"{seed} {case.text}: {differs or 'equal'}, {took:.1f} s", flush=True)
    print(f"{options.count - wrong} of {options.count} are equal")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
