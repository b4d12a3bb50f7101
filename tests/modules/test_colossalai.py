"""Colossal-AI's legacy configuration is a mesh and a recipe, or refused by name."""

import math
import tomllib
from typing import Any

import pytest

import shardlib as sl

read = sl.recipes.from_colossalai_config

KNOWN: list[tuple[dict[str, Any], int | None, dict[str, int], str]] = [
    ({}, 8, {"data": 8}, "ddp"),
    ({"parallel": {"tensor": {"size": 4, "mode": "1d"}}}, 8, {"data": 2, "x": 4}, "megatron1d"),
    ({"parallel": {"tensor": {"size": 4}}}, 4, {"x": 4}, "megatron1d"),
    ({"parallel": {"tensor": 4}}, None, {"data": -1, "x": 4}, "megatron1d"),
    (
        {"parallel": {"data": 2, "tensor": {"size": 4, "mode": "2d"}}},
        8,
        {"data": 2, "x": 2, "y": 2},
        "optimus2d",
    ),
    (
        {"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}},
        8,
        {"d": 2, "x": 2, "y": 2},
        "tesseract",
    ),
    (
        {"parallel": {"tensor": {"size": 8, "mode": "3d"}}},
        16,
        {"data": 2, "x": 2, "y": 2, "z": 2},
        "cube3d",
    ),
    ({"parallel": {"tensor": {"size": 4, "mode": "sequence"}}}, 4, {"s": 4}, "ring"),
    (
        {"parallel": {"pipeline": {"size": 1}, "tensor": {"size": 2, "mode": "1D"}}},
        2,
        {"x": 2},
        "megatron1d",
    ),
    ({"parallel": {"pipeline": 1}, "BATCH_SIZE": 64, "NUM_EPOCHS": 3}, 4, {"data": 4}, "ddp"),
]

REFUSED: list[tuple[dict[str, Any], int | None, str]] = [
    ({"parallel": {"pipeline": 2}}, 8, "parallel.pipeline of 2 stages"),
    ({"parallel": {"pipeline": {"size": 4}}}, 8, "parallel.pipeline of 4 stages"),
    ({"parallel": {"tensor": {"size": 6, "mode": "2d"}}}, 6, "size=6 makes no square"),
    ({"parallel": {"tensor": {"size": 4, "mode": "3d"}}}, 4, "size=4 makes no cube"),
    ({"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 3}}}, 8, "no whole planes of depth=3"),
    ({"parallel": {"tensor": {"size": 4, "mode": "2d", "depth": 2}}}, 4, "depth is of mode '2.5d'"),
    ({"parallel": {"tensor": {"size": 4, "mode": "4d"}}}, 4, "is none of 1d, 2d"),
    ({"parallel": {"tensor": {"size": 4, "mod": "2d"}}}, 4, "parallel.tensor.mod has no counterpart; did you mean 'mode'?"),
    ({"parallel": {"tensr": 4}}, 4, "did you mean 'tensor'?"),
    ({"paralel": {}}, 4, "did you mean 'parallel'?"),
    ({"parallel": {"data": 3, "tensor": 2}}, 8, "is 6, not the 8 processes"),
    ({"parallel": {"tensor": 3}}, 8, "8 processes do not divide"),
    ({"parallel": {"tensor": "four"}}, 8, "parallel.tensor is a dict"),
    ({"parallel": {"data": 0}}, 8, "parallel.data=0 is no number of ranks"),
    ({"zero": {"stage": 4}}, 2, "zero.stage=4"),
    ({"zero": {"model_config": {"tensor_placement_policy": "cpu"}}}, 2, "host memory"),
    ({"fp16": {"mode": "bf8"}}, 2, "is none of naive, torch, apex"),
    ({"fp16": {"mdoe": "naive"}}, 2, "did you mean 'mode'?"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "world", "mesh", "recipe"), KNOWN)
def test_a_configuration_is_a_mesh_and_a_recipe(
    config: dict[str, Any], world: int | None, mesh: dict[str, int], recipe: str
) -> None:
    found = read(config, world)
    assert (found.mesh, found.recipe) == (mesh, recipe)
    assert world is None or math.prod(found.mesh.values()) == world
    if world is not None:  # and the recipe takes that mesh
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        with sl.record(**found.mesh):
            assert getattr(sl.recipes, recipe)(model)


@pytest.mark.parametrize(("config", "world", "said"), REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(
    config: dict[str, Any], world: int | None, said: str
) -> None:
    with pytest.raises(sl.ShardError) as caught:
        read(config, world)
    assert said in caught.value.message


def test_zero_precision_and_clipping_are_tables_of_a_file() -> None:
    found = read(
        {
            "parallel": {"data": 2, "tensor": {"size": 4, "mode": "2d"}}, "clip_grad_norm": 1.0,
            "zero": {"model_config": {"shard_strategy": None}}, "fp16": {"mode": "naive"},
            "gradient_accumulation": 4, "seed": 7,
        }
    )  # fmt: skip
    tables = tomllib.loads(found.toml())
    assert tables["accumulate"] == 4 and tables["seed"] == 7
    assert tables["mesh"] == found.mesh and tables["layout"] == {"recipe": "optimus2d"}
    assert tables["optimizer"] == {"clip": {"max_norm": 1.0}, "zero": {"axis": "data", "stage": 3}}
    assert tables["precision"] == {"param": "float16", "master": "fp32"}
