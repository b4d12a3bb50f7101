"""The public face: these names and no other, each where it is said to be."""

import types

import pytest
import torch

import shardlib as sl

FACE = """
    shard unshard reshard constrain shard_sequence typeof layout_of ShardedTensor
    Layout Row Col Layout2D Layout25D Layout3D Ring Replicated Partial
    Mesh make_mesh simulate record use_mesh current_mesh launch
    shard_map psum pmean pmax all_gather psum_scatter all_to_all ppermute axis_index axis_size
    matmul ring_attention grad value_and_grad parallelize init as_module save load
    algorithm saving implicit why explain trace expect_comm choose probe visualize
    ShardError
""".split()
MODULES = {
    "collectives": """Event Pending Stacked Trace all_gather all_to_all axis_index axis_size expect_comm pbroadcast
        pick pmax pmean ppermute preduce pslice psum psum_scatter pvary shift start trace""",
    "dtensor": "from_dtensor rules to_dtensor",
    "errors": """AxisReused BadArgument ImplicitCommunication LayoutSyntax MeshError NoMesh NoRule NotExpressible
        OutOfRange PartialEscape PlainTensor RankMismatch RuleLint ShardError UnevenSplit UnexpectedComm UnknownAxis
        UnknownParameter Unsupported lettered mesh_text user_line""",
    "extend": """At AttentionCase Cost Engine Job LocalQueries Mask Match MatmulCase Move Moves Plan Relation Run
        Schedule add_sink algorithm gathered local_queries moving positions register_engine remove scattered started
        summing sums_like viewed""",
    "masks": "ALiBi Bias Causal Documents Full Mask Padding Prefix Window mask_mod",
    "optim": """Transform adam adamw apply_updates chain clip_by_global_norm global_norm identity lion masked scale
        scale_by_schedule set_to_zero sgd zero""",
    "planning": "Choice Grid3 Link ReshardPlan attention_plan choose lower_bound probe",
    "random": "get_state seed set_state",
    "recipes": "Recipe cube3d ddp fsdp megatron1d optimus2d ring roles tesseract widening",
    "seeing": "draw visualize",
    "testing": "check_algorithm check_engine check_mask dense_attention",
}


def test_the_face_is_these_names() -> None:
    assert sorted(sl.__all__) == sorted([*FACE, *MODULES])
    assert [name for name in dir(sl) if not name.startswith("__")] == sorted(sl.__all__)
    assert len(FACE) <= 60


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_the_face_has_these_names(module: str) -> None:
    found = getattr(sl, module)
    assert sorted(found.__all__) == sorted(MODULES[module].split())
    assert not [n for n in found.__all__ if isinstance(getattr(found, n), types.ModuleType)]


def test_no_name_is_a_module_unless_it_is_said() -> None:
    assert not [name for name in FACE if isinstance(getattr(sl, name), types.ModuleType)]
    assert all(isinstance(getattr(sl, name), types.ModuleType) for name in MODULES)


def test_every_mesh_is_a_context() -> None:
    for made in (sl.simulate(x=2), sl.record(x=2)):
        with made:
            assert sl.typeof(sl.shard(torch.ones(4), "x")) == "f32[4@x]"
            assert sl.current_mesh() is made
