"""Plans of layouts: what a plan says is what its step takes, it runs, and no recipe is better."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.command.train import checked, start
from shardlib.planning.explain import explain
from shardlib.planning.joint import Question, Study
from shardlib.planning.program import solve

CLUSTER = sl.planning.Cluster(1e12, 2e10, 1, between=sl.planning.Link(1e-4, 1e-8), bandwidth=5e9)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Words(nn.Module):
    """A small language model whose head is its table."""

    def __init__(self, layers: int = 3, width: int = 32, words: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.h = nn.ModuleList([Block(width) for _ in range(layers)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.h:
            x = block(x)
        return x @ self.table.weight.T


def loss(apply: Any, params: Any, ids: Any, labels: Any) -> Any:
    out = apply(params, ids)
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


IDS = torch.arange(8 * 16).reshape(8, 16) % 64
GIVEN = (IDS, IDS.roll(-1, 1))


@pytest.mark.parametrize("mesh", [{"a": 2}])
def test_what_calls_cost_adds_up_to_the_explanation_of_the_step(mesh: dict[str, int]) -> None:
    asked = Question(Words(), GIVEN, loss, sl.optim.adamw(0.01), CLUSTER, 1e12, 2, mesh)
    study = Study(asked)
    for setting in study.settings():
        if setting.holding.axes:
            continue
        counts = [len(p.layers) for p in study.parts]
        columns = study.columns(setting.search)
        for room in (1e9, 0.97 * solve(columns, counts, 1e9).peak):
            found = solve(columns, counts, room)
            if found is None:
                continue
            made = study.explained(found, setting)
            along: dict[str, float] = {}
            flops = 0.0
            for column, n in found.counts:
                way, remat = column.way
                seen: set[Any] = set()
                for step in way.steps():
                    again = 1 + (remat == "full")
                    flops += n * (
                        again * step.strategy.forward.flops + step.strategy.backward.flops
                    )
                    works = [step.strategy.forward] * again + [step.strategy.backward]
                    for axes, nbytes in [(a, m[0]) for w in works for a, m in w.along.items()]:
                        along[axes] = along.get(axes, 0.0) + n * nbytes
                    for s in step.strategy.sums:
                        read = step.call.reads[s.operand]
                        if (read, s.axes) not in seen:
                            seen.add((read, s.axes))
                            sent, axes = setting.holding.summed(s)[0], " ".join(s.axes)
                            along[axes] = along.get(axes, 0.0) + n * sent
            # the last product of a layer is not computed again, nor what it moves
            exact = not any(column.way[1] for column, _ in found.counts)
            if exact:
                assert flops == made.explained.work.flops
                said = {a: float(m[0]) for a, m in made.along.items() if m[0]}
                assert {a: pytest.approx(b) for a, b in along.items() if b} == said
            else:
                assert made.explained.work.flops <= flops
            # of so small a model, all gradients are summed in one bucket, beside them: not foreseen
            gradients = sum(c.gradients * n for c, n in found.counts)
            assert 0.99 * found.peak <= made.peak <= found.peak + 2.2 * gradients


@pytest.mark.parametrize("ranks", [2])
def test_a_plan_fits_and_no_recipe_that_fits_is_faster(ranks: int) -> None:
    model = Words()
    free = sl.planning.plan(model, GIVEN, mesh={"a": ranks}, cluster=CLUSTER, loss=loss)
    assert free.remat == ()
    for memory in (free.peak, 0.9 * free.peak):
        found = sl.planning.plan(
            model, GIVEN, mesh={"a": ranks}, memory=memory, cluster=CLUSTER, loss=loss
        )
        assert found.peak <= memory
        assert found.seconds >= free.seconds or memory == free.peak
        for recipe, axis in (("ddp", "data"), ("megatron1d", "x"), ("fsdp", "x")):
            for remat in ("", "full"):
                seconds, peak = by_recipe(model, recipe, {axis: ranks}, remat)
                assert seconds >= 0.999 * found.seconds or peak > memory, (recipe, remat)


def by_recipe(model: Any, name: str, mesh: dict[str, int], remat: str) -> tuple[float, int]:
    """Seconds and peak of a recipe's step, by its explanation, at the prices of the plan."""
    with sl.record(**mesh) as m:
        rules = getattr(sl.recipes, name)(model, m)
        apply, params = sl.parallelize(
            model, rules, mesh=m, pad=True, remat=[("h.*", remat)] if remat else ()
        )
        given = [sl.shard(x.to("meta"), rules.tokens, m) for x in GIVEN]
        found = explain(
            lambda p, *x: loss(apply, p, *x), params, tuple(given), tx=sl.optim.adamw(0.01)
        )
    rates = sl.planning.work.Rates(CLUSTER.links(mesh), CLUSTER.flops, CLUSTER.bandwidth)
    return rates.seconds(found.work), found.peak


def test_what_cannot_fit_is_refused_with_the_least_that_does() -> None:
    def plan(memory: float) -> Any:
        return sl.planning.plan(
            Words(), GIVEN, mesh={"a": 2}, memory=memory, cluster=CLUSTER, loss=loss
        )

    with pytest.raises(sl.errors.BadArgument, match="the least is") as refused:
        plan(1e4)
    least = int(str(refused.value).split("memory=")[-1])
    assert plan(least).peak <= least


@pytest.mark.parametrize("share", [1.0, 0.85])
def test_a_planned_step_is_one_process_s(share: float) -> None:
    torch.manual_seed(0)
    model = Words().double()
    free = sl.planning.plan(model, GIVEN, mesh={"a": 2}, cluster=CLUSTER, loss=loss)
    found = sl.planning.plan(
        model, GIVEN, mesh={"a": 2}, memory=share * free.peak, cluster=CLUSTER, loss=loss
    )
    want = losses({"a": 1}, model, None)
    assert losses(found.mesh, model, found) == pytest.approx(want, abs=1e-12)


def losses(mesh: Any, model: Any, plan: Any) -> list[float]:
    with sl.simulate(**mesh):
        tx = sl.optim.adamw(1e-3)
        if plan is None:
            apply, params = sl.parallelize(model, [("*", "...")])
            given = [sl.shard(x, "...") for x in GIVEN]
        else:
            apply, params, tx = plan.apply(model)
            given = [sl.shard(x, text) for x, text in zip(GIVEN, plan.inputs, strict=True)]
        state, out = tx.init(params), []
        for _ in range(3):
            into = tx if tx.sink else None
            value, grads = sl.value_and_grad(lambda p: loss(apply, p, *given), into=into)(params)
            params, state, _ = sl.optim.step(tx, params, grads, state)
            out.append(value.item())
    return out


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rows of a dataset: words, and the next ones as labels."""
    return [(torch.arange(i, i + 16) % 64, torch.arange(i + 1, i + 17) % 64) for i in range(64)]


@pytest.mark.parametrize("memory", ["500KB", "700KB"])
def test_what_is_written_as_a_file_trains_as_one_process_does(memory: str, tmp_path: Path) -> None:
    """The tables of a plan, in the file of a run; the first budget is the least, nearly."""
    run = """steps = 3
[model]
make = "tests.planning.test_joint:Words"
[data]
batch = 8
LAYOUT
[data.dataset]
make = "tests.planning.test_joint:rows"
[optimizer]
name = "adamw"
lr = 1e-3
[log]
every = 1
"""
    found = sl.planning.plan(Words(), GIVEN, ranks=2, memory=memory, cluster=CLUSTER, loss=loss)
    tables = found.toml().replace("[data]\n", "")
    layout, rest = re.search(r"layout = .*", tables), re.sub(r"layout = .*\n", "", tables, count=1)
    assert layout is not None
    losses = []
    for name, text in {
        "planned": run.replace("LAYOUT", layout[0]) + rest,
        "alone": run.replace("LAYOUT", "") + '[mesh]\na = 1\n[layout]\nrules = [["*", "..."]]\n',
    }.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        config = checked(str(file), [])
        losses.append([*start(config, simulated=True).losses.values()])
    assert len(losses[0]) == 3 and torch.allclose(*map(torch.tensor, losses), atol=1e-6)


class Reads(nn.Module):
    """A layer that reads what an encoder gave."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(16, 16, bias), nn.Linear(16, 16, bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.k(memory).relu() * self.v(memory)


class Decoder(nn.Module):
    """A stack whose first layer differs, as T5's does."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Reads(bias) for bias in (True, False, False))

    def forward(self, memory: torch.Tensor) -> torch.Tensor:
        x = memory
        for layer in self.h:
            x = layer(x, memory)
        return x


def test_layers_of_two_kinds_that_read_one_value_have_rules_of_their_own() -> None:
    model, rows = Decoder(), torch.randn(8, 16)
    found = sl.planning.plan(model, rows, mesh={"a": 2}, cluster=CLUSTER)
    with sl.simulate(a=2):
        apply, params, _ = found.apply(model)
        assert sorted(params) == sorted(dict(model.named_parameters()))
        assert torch.allclose(
            sl.unshard(apply(params, sl.shard(rows, found.inputs[0]))), model(rows)
        )
