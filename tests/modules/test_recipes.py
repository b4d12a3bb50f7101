"""Every recipe gives an unmodified GPT the dense loss and gradients, and moves what it says."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.modules.recipes import MLP_ROLES
from tests.modules.test_parallelize import CONFIG, IDS, dense


def gap(recipe: str, pending: str | tuple = (), **options: Any) -> float:
    """Largest relative difference of loss and gradients, on the mesh in scope."""
    m, loss, grads = dense()
    before = {n: p.detach().clone() for n, p in m.named_parameters()}
    rules = getattr(sl.recipes, recipe)(m, **options)
    apply, params = sl.parallelize(m, rules, inputs={"idx": rules.tokens, "targets": rules.labels})
    got, found = sl.value_and_grad(
        lambda p: apply(p, IDS, targets=IDS.roll(-1, 1)), pending=pending
    )(params)
    errors = [abs(float(got.item() - loss.item()))]
    for n, g in grads.items():
        assert found[n].sharding.dims == params[n].sharding.dims
        errors.append(float((sl.unshard(found[n]) - g).abs().max() / g.abs().max()))
    assert all(torch.equal(before[n], p.detach()) for n, p in m.named_parameters()), (
        "the module changed"
    )
    return max(errors)


@pytest.mark.parametrize(
    "axes",
    [
        {"x": 2, "y": 2},
        {"data": 2, "x": 2, "y": 2},
        {"data": 2, "x": 1, "y": 4},
        {"x": 4, "y": 1},
        {"x": 1, "y": 1},
    ],
)
def test_a_gpt_in_2d_blocks_equals_dense(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert gap("optimus2d") < 1e-12
        if "data" in axes:
            assert gap("optimus2d", pending="data") < 1e-12


@pytest.mark.parametrize("axes", [{"x": 2}, {"data": 2, "x": 4}, {"data": 4, "x": 1}])
def test_a_gpt_in_columns_and_rows_equals_dense(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert gap("megatron1d") < 1e-12


@pytest.mark.parametrize("axes", [{"x": 4}, {"data": 2, "x": 2}])
def test_a_gpt_whose_weights_are_gathered_for_their_products_equals_dense(
    axes: dict[str, int],
) -> None:
    with sl.simulate(**axes):
        assert gap("fsdp") < 1e-12
    with sl.simulate(data=4):
        assert gap("fsdp", axis="data") < 1e-12
        assert gap("ddp") < 1e-12


def test_fsdp_gathers_each_weight_and_nothing_else() -> None:
    """Forward a rank receives (p - 1) / p of every matrix."""
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
    with sl.simulate(x=4):
        apply, params = sl.parallelize(mlp, sl.recipes.fsdp(mlp), inputs={"input": "x ."})
        assert all(str(p.sharding) == (". x" if p.ndim == 2 else ".") for p in params.values())
        with sl.trace() as t, torch.no_grad():
            apply(params, torch.ones(64, 8, dtype=torch.float64))
    assert t.bytes == 3 * (2 * 8 * 32 * 8) // 4 and set(t.by_kind()) == {"all_gather"}


@pytest.mark.parametrize("axes", [{"x": 2}, {"data": 2, "x": 4}])
def test_a_gpt_with_its_residual_split_along_the_sequence_equals_dense(
    axes: dict[str, int],
) -> None:
    with sl.simulate(**axes):
        assert gap("megatron1d", sequence=True) < 1e-12


@pytest.mark.parametrize(
    "axes",
    [{"d": 2, "x": 2, "y": 2}, {"d": 1, "x": 2, "y": 2}, {"data": 2, "d": 2, "x": 1, "y": 2}],
)
def test_a_gpt_in_a_plane_per_depth_equals_dense(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert gap("tesseract") < 1e-12
        if "data" in axes:
            assert gap("tesseract", pending="data") < 1e-12


@pytest.mark.parametrize(
    "axes",
    [
        {"x": 2, "y": 2, "z": 2},
        {"x": 1, "y": 2, "z": 2},
        {"x": 2, "y": 1, "z": 2},
        {"x": 2, "y": 2, "z": 1},
        {"data": 2, "x": 1, "y": 2, "z": 1},
        {"x": 1, "y": 1, "z": 4},
        {"x": 1, "y": 4, "z": 1},
    ],
)
def test_a_gpt_on_a_cube_equals_dense(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert gap("cube3d") < 1e-12
        with sl.saving():
            assert gap("cube3d") < 1e-12
        if "data" in axes:
            assert gap("cube3d", pending="data") < 1e-12


def test_a_gpt_equals_dense_on_real_processes(pool: Any) -> None:
    assert max(pool.run(gap, "optimus2d", x=2, y=2)) < 1e-12
    assert max(pool.run(gap, "optimus2d", "data", data=2, x=1, y=2)) < 1e-12
    assert max(pool.run(gap, "megatron1d", data=2, x=2)) < 1e-12


def test_simulated_and_real_ranks_count_the_same(pool: Any) -> None:
    with sl.simulate(x=2, y=2):
        assert {traffic()} == set(pool.run(traffic, x=2, y=2))
    with sl.record(x=2, y=2):
        assert traffic() == pool.run(traffic, x=2, y=2)[0]


@pytest.mark.parametrize(
    ("recipe", "axes", "given", "fix"),
    [
        ("megatron1d", "x", {"data": "x"}, "ddp(model, data='x')"),
        ("megatron1d", "x y", {"data": "x"}, "megatron1d(model, axis='y', data='x')"),
        ("megatron1d", "data x", {"axis": "data"}, "megatron1d(model, axis='x')"),
        ("optimus2d", "x y z", {"data": "y"}, "optimus2d(model, cols='z', data='y')"),
        ("ring", "s", {"data": "s"}, "ddp(model, data='s')"),
    ],
)
def test_an_axis_for_batches_and_for_the_model_is_refused_when_the_recipe_is_made(
    recipe: str, axes: str, given: dict[str, str], fix: str
) -> None:
    model = GPT(GPTConfig(vocab=16, ctx=8, layers=1, heads=2, embed=8))
    with sl.simulate(**dict.fromkeys(axes.split(), 2)):
        with pytest.raises(sl.errors.AxisReused, match="is used twice, as") as e:
            getattr(sl.recipes, recipe)(model, **given)
        assert e.value.fix == f"sl.recipes.{fix}"
        exec(e.value.fix, {"sl": sl, "model": model})


def test_fsdp_on_a_mesh_of_copies_alone_is_told_to_split_over_them() -> None:
    with sl.simulate(data=2):
        with pytest.raises(sl.errors.UnknownAxis) as e:
            sl.recipes.fsdp(GPT(CONFIG))
        assert e.value.fix == "sl.recipes.fsdp(model, axis='data')"


def traffic() -> tuple[Any, ...]:
    m, where = GPT(CONFIG), "x ."
    with sl.trace() as t:
        apply, params = sl.parallelize(
            m, sl.recipes.optimus2d(m), inputs={"idx": where, "targets": where}
        )
        sl.value_and_grad(lambda p: apply(p, IDS, targets=IDS))(params)
    return t.bytes, t.messages, tuple(sorted(t.by_kind().items()))


def test_dropout_gives_the_same_loss_under_every_layout() -> None:
    m = GPT(GPTConfig(vocab=32, ctx=8, layers=1, heads=4, embed=16, dropout=0.3)).double()
    losses = []
    for recipe, axes in [
        ("optimus2d", {"x": 2, "y": 2}),
        ("megatron1d", {"x": 2}),
        ("tesseract", {"d": 2, "x": 2, "y": 2}),
        ("cube3d", {"x": 2, "y": 2, "z": 2}),
        ("optimus2d", {"x": 1, "y": 1}),
    ]:
        with sl.simulate(**axes):
            rules = getattr(sl.recipes, recipe)(m)
            apply, params = sl.parallelize(
                m, rules, inputs={"idx": rules.tokens, "targets": rules.labels}
            )
            torch.manual_seed(5)
            losses.append(apply(params, IDS, IDS).item())
    assert max(losses) - min(losses) < 1e-12


@pytest.mark.parametrize("axes", ["x", "data", "data x", "x y", "p q", "a x", "data a", "p q r"])
@pytest.mark.parametrize(
    "recipe", ["ddp", "fsdp", "ring", "megatron1d", "optimus2d", "tesseract", "cube3d"]
)
def test_a_missing_axis_has_a_fix_that_this_mesh_has_the_axes_for(recipe: str, axes: str) -> None:
    """No axis in two roles, which a product would refuse later."""
    model = GPT(GPTConfig(vocab=16, ctx=8, layers=1, heads=2, embed=8))
    with sl.simulate(**dict.fromkeys(axes.split(), 2)) as mesh:
        try:
            getattr(sl.recipes, recipe)(model, mesh)
        except sl.ShardError as e:
            names = re.findall(r"='(\w+)'", e.fix.split("#")[0])
            assert names and len(names) == len(set(names)) and set(names) <= set(mesh.names)
            exec(e.fix, {"sl": sl, "model": model})


class Block(nn.Module):
    """The four products of a Transformer block."""

    def __init__(self, h: int, **where: Any) -> None:
        super().__init__()
        self.c_attn, self.out_proj = (
            nn.Linear(h, 3 * h, bias=False, **where),
            nn.Linear(h, h, bias=False, **where),
        )
        self.fc_in, self.fc2 = (
            nn.Linear(h, 4 * h, bias=False, **where),
            nn.Linear(4 * h, h, bias=False, **where),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.out_proj(self.c_attn(x).chunk(3, -1)[0])
        return self.fc2(self.fc_in(x))


@pytest.mark.parametrize("mlp", MLP_ROLES)
@pytest.mark.parametrize("grid", [(2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 3, 1), (2, 2, 3)])
def test_an_mlp_may_have_roles_of_its_own(grid: tuple[int, int, int], mlp: str) -> None:
    """Value and gradients, of a model that has attention beside it."""
    m, k, n = grid
    h, batch = 48, 24
    torch.manual_seed(0)
    model = Block(h).double()
    x, g = torch.randn(batch, h).double().requires_grad_(), torch.randn(batch, h).double()
    want = [y := model(x), *torch.autograd.grad(y, (x, *model.parameters()), g)]
    with sl.simulate(x=m, y=n, z=k), sl.algorithm(matmul="mm3"):
        rules = sl.recipes.cube3d(model, mlp=mlp)
        apply, params = sl.parallelize(model, rules)
        placed = sl.shard(x.detach(), f"{rules.tokens.rsplit(' ', 1)[0]} z").requires_grad_()
        leaves = [placed, *params.values()]
        out = apply(params, placed)
        got = [out, *torch.autograd.grad(out, leaves, sl.shard(g, placed.sharding))]
        assert out.sharding == placed.sharding and [p.sharding for p in got[2:]] == [
            p.sharding for p in leaves[1:]
        ]
        for ours, dense in zip(got, want, strict=True):
            assert float(((sl.unshard(ours) - dense).norm() / dense.norm()).detach()) < 1e-12


def test_other_roles_are_refused() -> None:
    with sl.simulate(x=2, y=2, z=2), pytest.raises(sl.ShardError, match='mlp="mnk"'):
        sl.recipes.cube3d(Block(8), mlp="knm")
