"""Parameters, layouts and a deterministic run of steps, for the tests of transforms."""

from typing import Any

import shardlib as sl
from tests.ops.cases import r

PARAMS = {"w": r(8, 12), "b": r(8, seed=1), "s": r(seed=2)}
LAYOUTS = [
    {"w": "x y", "b": "x", "s": ""},
    {"w": "y x", "b": ".", "s": ""},
    {"w": "(x y) .", "b": "y", "s": ""},
]


def gradients(params: Any, i: int) -> Any:
    """A function of parameter and step."""
    return {k: (p * 0.3 + (i % 3 - 1)) * (1 + i) for k, p in params.items()}


def steps(tx: sl.optim.Transform, params: Any, count: int = 10) -> Any:
    """The parameters after so many steps."""
    state = tx.init(params)
    for i in range(count):
        updates, state = tx.update(gradients(params, i), state, params)
        params = sl.optim.apply_updates(params, updates)
    return params
