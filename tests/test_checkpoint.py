"""What is saved is what was held, whatever order the ranks' dictionaries have."""

from typing import Any

import optree
import pytest
import torch
from safetensors.torch import load_file

import shardlib as sl
from examples.gpt import GPT
from tests.modules.test_parallelize import CONFIG


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


def test_trees_and_their_numbers_come_back(tmp_path: Any) -> None:
    path = tmp_path / "all.safetensors"
    with sl.simulate(data=2, x=2):
        params = {
            "w": sl.shard(torch.arange(8.0).reshape(4, 2), "x ."),
            "b": sl.shard(torch.ones(2), "."),
        }
        tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(0.1))
        _, state = tx.update(params, tx.init(params), params)
        held = {
            "params": params,
            "state": state,
            "step": 7,
            "rate": 0.5,
            "note": "first",
            "nothing": None,
        }
        sl.save(path, held)
        blank = optree.tree_map(
            lambda v: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None,
            held,
            none_is_leaf=True,
        )
        found = sl.load(path, blank)
        for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(held), strict=True):
            assert (
                torch.equal(sl.unshard(a), sl.unshard(b)) if isinstance(a, torch.Tensor) else a == b
            )
        assert found["step"] == 7 and found["nothing"] is None


def test_two_leaves_of_one_name_and_odd_leaves_are_refused(tmp_path: Any) -> None:
    one = torch.ones(1)
    for tree in ({"a.b": one, "a": {"b": one}}, {"f": print}):
        with pytest.raises(sl.ShardError):
            sl.save(tmp_path / "p", tree)
    assert not list(tmp_path.iterdir())


def test_checkpoints_load_under_another_layout_and_in_one_process(tmp_path: Any) -> None:
    m = GPT(CONFIG)
    with sl.simulate(x=2, y=2):
        _, params = sl.parallelize(m, sl.recipes.optimus2d(m))
        sl.save(tmp_path / "a.safetensors", params)
    with sl.simulate(x=4):
        _, other = sl.parallelize(m, sl.recipes.megatron1d(m))
        blank = {n: p.detach() * 0 for n, p in other.items()}
        got = sl.load(tmp_path / "a.safetensors", like=blank)
        assert all(torch.equal(got[n].raw, other[n].raw) for n in other)
        with pytest.raises(sl.ShardError, match="missing"):
            sl.load(tmp_path / "a.safetensors", like={"w": blank["wte.weight"]})
    plain = sl.load(tmp_path / "a.safetensors", like=dict(m.named_parameters()))
    assert all(torch.equal(plain[n], p) for n, p in m.named_parameters())
