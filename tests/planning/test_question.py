"""A question allows the meshes and recipes that it names, and a better answer is one."""

import math

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.planning.cluster import cluster_of
from shardlib.planning.question import Question


def asked(axes: dict[str, int] | None = None, recipes: tuple[str, ...] | None = None) -> Question:
    rows = (torch.empty(8, 4),)
    tx, h100 = sl.optim.adamw(0.01), cluster_of("h100")
    ranks = math.prod((axes or {"a": 8}).values())
    return Question(
        nn.Linear(4, 4), rows, lambda *_: None, tx, h100, 1e9, ranks, axes, recipes=recipes
    )


@pytest.mark.parametrize("pipe", [1, 2])
def test_meshes_have_all_ranks_of_a_stage(pipe: int) -> None:
    found = [*asked().meshes(pipe), *(m for _, m in asked().laid(pipe))]
    assert found and all(math.prod(m.values()) == 8 // pipe for m in found)


def test_a_mesh_that_is_given_is_the_only_one() -> None:
    assert asked({"x": 2, "y": 4, "pipe": 2}).meshes(2) == [{"x": 2, "y": 4}]
    laid = [*asked({"data": 2, "x": 4}, ("megatron1d", "optimus2d")).laid(1)]
    assert laid == [("megatron1d", {"data": 2, "x": 4})]
