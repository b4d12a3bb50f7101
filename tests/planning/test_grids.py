"""The price of a step on a grid is what a step on it moves."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib.modules.recipes import MLP_ROLES
from shardlib.pipeline.schedules import schedule, timeline
from shardlib.planning.grids import Layer, factorizations, in_stages, step_cost
from tests.ops.cases import cube_words

sizes = st.integers(1, 64).map(lambda n: 8 * n)


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


class MLP(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.fc_in, self.fc2 = nn.Linear(h, 4 * h, bias=False), nn.Linear(4 * h, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc_in(x))


@pytest.mark.parametrize("grid", [(2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 4), (4, 1, 1), (2, 3, 1)])
@pytest.mark.parametrize("save", ["", "xw"])
def test_the_price_of_a_step_is_what_a_step_moves(grid: tuple[int, int, int], save: str) -> None:
    m, k, n = grid
    model, batch = MLP(48), 24
    with sl.simulate(x=m, y=n, z=k), sl.algorithm(matmul="mm3" + ("_" + save if save else "")):
        rules = sl.recipes.cube3d(model)
        apply, params = sl.parallelize(model, rules)
        x = sl.shard(torch.randn(batch, 48), f"{rules.tokens.rsplit(' ', 1)[0]} z").requires_grad_()
        with sl.trace() as t:
            apply(params, x).sum().backward()
    layers = [Layer(48, 192), Layer(192, 48, True)]
    cost = step_cost(layers, m, k, n, save, batch, 4, 12)
    loss = sum((e.bytes for e in t.events if e.kind == "psum"), Fraction(0))  # of the sum alone
    assert t.bytes - loss == cost.bytes
    assert sum(e.messages for e in t.events if e.kind != "psum") == cost.messages


@pytest.mark.parametrize("mlp", MLP_ROLES)
@pytest.mark.parametrize("grid", [(2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 3, 1), (2, 2, 3)])
def test_an_mlp_may_have_roles_of_its_own(grid: tuple[int, int, int], mlp: str) -> None:
    """Value, gradients and price, of a model that has attention beside it."""
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
        with sl.trace() as t:
            out = apply(params, placed)
            got = [out, *torch.autograd.grad(out, leaves, sl.shard(g, placed.sharding))]
        assert out.sharding == placed.sharding and [p.sharding for p in got[2:]] == [
            p.sharding for p in leaves[1:]
        ]
        for ours, dense in zip(got, want, strict=True):
            assert float(((sl.unshard(ours) - dense).norm() / dense.norm()).detach()) < 1e-12
    layers = [
        Layer(h, 3 * h),
        Layer(h, h, True),
        Layer(h, 4 * h, False, True),
        Layer(4 * h, h, True, True),
    ]
    cost = step_cost(layers, m, k, n, "", batch, 8, 12, mlp)
    kinds = {"all_gather", "psum_scatter"}
    assert sum((e.bytes for e in t.events if e.kind in kinds), Fraction(0)) == cost.bytes
    assert sum(e.messages for e in t.events if e.kind in kinds) == cost.messages


def test_other_roles_are_refused() -> None:
    with sl.simulate(x=2, y=2, z=2), pytest.raises(sl.ShardError, match='mlp="mnk"'):
        sl.recipes.cube3d(MLP(8), mlp="knm")


sizes = st.integers(1, 64).map(lambda n: 8 * n)


@given(sizes, sizes, sizes, st.sampled_from([1, 2, 4, 8, 9, 12, 16, 64, 512]))
def test_no_grid_moves_less_than_the_bound(m: int, k: int, n: int, p: int) -> None:
    """Counted on average over ranks, with every operand and the result held once."""
    least = min(cube_words(m, k, n, *grid) for grid in factorizations(p))
    assert float(least) >= sl.planning.lower_bound(m, k, n, p) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((4096, 64, 64), (8, 1, 1)),
        ((64, 4096, 64), (1, 8, 1)),
        ((64, 64, 4096), (1, 1, 8)),
        ((512, 64, 512), (4, 1, 4)),
        ((512, 1024, 64), (4, 8, 1)),
        ((64, 64, 64), (2, 2, 2)),
        ((96, 96, 96), (3, 3, 3)),
        ((128, 64, 64), (4, 2, 2)),
        ((256, 128, 128), (16, 8, 8)),
        ((512, 512, 512), (8, 8, 8)),
    ],
)
def test_the_matching_grid_attains_the_bound(
    shape: tuple[int, int, int], grid: tuple[int, int, int]
) -> None:
    assert float(cube_words(*shape, *grid)) == pytest.approx(
        sl.planning.lower_bound(*shape, math.prod(grid)), rel=1e-12
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("hop", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 23])
def test_seconds_of_a_pipeline_are_those_of_its_timeline(
    stages: int, hop: float, count: int
) -> None:
    table = schedule("1f1b", stages, count)
    cost = {"F": 2.0, "B": 4.0}
    line = timeline(table, lambda a: cost[a.kind], lambda *_: 6 * hop)
    assert in_stages(6.0, stages, count, 6 * hop) == pytest.approx(line.seconds, rel=1e-12)
