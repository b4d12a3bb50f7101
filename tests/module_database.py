"""torch's own database of modules: each called with sharded inputs and parameters, against dense.

A module is called in three ways: as ``parallelize`` makes it, with the drawn layouts as rules; by
``torch.func.functional_call`` with sharded parameters; and by itself, with its parameters set.

    python -m tests.module_database [seed]        all 114 modules; ``make operators``
"""

import copy
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

import shardlib as sl
from tests import database

MESHES = ({"x": 5, "y": 2}, {"x": 3, "y": 2}, {"data": 2, "x": 2})
WAYS = ("parallelize", "functional_call", "set")


@cache
def entries() -> dict[str, Any]:
    """The database's entries by name; importing it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return {m.name: m for m in module_db}


def _samples(name: str, training: bool) -> Iterator[tuple[nn.Module, Any]]:
    entry = entries()[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = entry.module_inputs_func(
            entry, device="cpu", dtype=torch.float64, requires_grad=False, training=training
        )
        for sample in found:
            made = sample.constructor_input
            module = entry.module_cls(*made.args, **made.kwargs).double().train(training)
            if sample.forward_input is None:
                continue
            if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
                module(*copy.deepcopy(sample.forward_input.args))
            yield module, sample.forward_input


def _by_call(module: nn.Module) -> Callable[..., Any]:
    def function(params: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(copy.deepcopy(module), params, args, kwargs)

    return function


def _by_parallelize(module: nn.Module, names: list[str], layouts: Any) -> Callable[..., Any]:
    def function(params: Any, *args: Any, **kwargs: Any) -> Any:
        rules = [(n, "" if t is None else t) for n, t in zip(names, layouts, strict=True)]
        apply, _ = sl.parallelize(copy.deepcopy(module), rules)
        return apply(params, *args, **kwargs)

    return function


def _by_setting(module: nn.Module) -> Callable[..., Any]:
    def function(params: Any, *args: Any, **kwargs: Any) -> Any:
        mine = copy.deepcopy(module)
        for name, value in params.items():
            owner, _, leaf = name.rpartition(".")
            at = mine.get_submodule(owner)
            del at._parameters[leaf]
            setattr(at, leaf, value)
        return mine(*args, **kwargs)

    return function


def calls(name: str, seed: int, meshes: Any = MESHES) -> Iterator[tuple[str, database.Call]]:
    """Calls of a module on each mesh, with drawn layouts, in each way."""
    draw = random.Random(f"{name} {seed}")
    for training in (True, False):
        for module, given in _samples(name, training):
            params = {n: p.detach() for n, p in module.named_parameters()}
            plain = _by_call(module)
            found = database.plain_call(name, plain, (params, *given.args), given.kwargs)
            if found is None:
                continue
            for mesh in meshes:
                layouts = [
                    database.drawn_layout(x.shape, mesh, draw)
                    if isinstance(x, torch.Tensor) and x.ndim
                    else None
                    for x in found.leaves
                ]
                if not any(t and t.strip(". ") for t in layouts):
                    continue
                here = replace(found, layouts=layouts, mesh=mesh)
                names = sorted(params)
                ways = {
                    "parallelize": _by_parallelize(module, names, layouts[: len(names)]),
                    "functional_call": plain,
                    "set": _by_setting(module),
                }
                for way in WAYS:
                    yield way, replace(here, function=ways[way])


def tally(name: str, seed: int) -> Iterator[tuple[str, database.Outcome]]:
    """Judge every call of a module; its buffers are constants, and what must move may."""
    for way, call in calls(name, seed):
        with sl.simulate(**call.mesh), sl.implicit(2**24), sl.constants():
            yield way, database.judge(call)


def main() -> None:
    """Print what differs, what is refused, and how many calls are equal."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    counts: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for name in entries():
        for way, out in tally(name, seed):
            counts[f"{way}: {out.kind}"] += 1
            if out.kind in ("wrong", "crash"):
                print(f"{out.kind:6} {way}: {out.note[:600]}", flush=True)
            if out.kind == "refused":
                refused.setdefault(f"{name}, {way}", out.note)
    for key, note in refused.items():
        print(f"refused {key}: {note[:200]}")
    print(dict(sorted(counts.items())))


if __name__ == "__main__":
    main()
