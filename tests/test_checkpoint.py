"""What is saved is what was held, whatever order the ranks' dictionaries have."""

from typing import Any

import torch
from safetensors.torch import load_file

import shardlib as sl


def _saved(path: str) -> None:
    params = {n: sl.shard(torch.full((4,), float(v)), "x") for n, v in (("a", 1), ("b", 7))}
    if sl.axis_index("x"):
        params = dict(reversed(params.items()))
    sl.save(path, params)


def test_the_order_of_names_means_nothing(pool: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "p.safetensors")
    pool.run(_saved, path, x=2, y=2)
    found = load_file(path)
    assert {n: t.tolist() for n, t in found.items()} == {"a": [1.0] * 4, "b": [7.0] * 4}
