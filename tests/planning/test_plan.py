"""Plans: what a plan says is what its step takes, it runs, and no recipe is better."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.command.train import checked, start
from shardlib.planning.candidates import RECIPES, recipe_meshes
from shardlib.planning.explain import explain
from shardlib.planning.explanation import size
from shardlib.planning.plan import loss_of
from tests.planning.plans_run import OPTIMIZER, confirm, loss_over, made, stepped
from tests.planning.test_joint import CLUSTER, GIVEN, Block, Words, loss

SLOW = sl.planning.Link(1e-3, 8 / 50e6)  # 50 Mbit/s between all ranks
RIG = sl.planning.Cluster(8e9, 5e10, 1, SLOW, SLOW)
BUSY = replace(RIG, flops=2e8)  # products take long


@pytest.mark.parametrize("ranks", [2])
def test_a_plan_fits_and_no_recipe_that_fits_is_faster(ranks: int) -> None:
    model = Words()
    free = sl.plan(model, GIVEN, mesh={"a": ranks}, cluster=CLUSTER, loss=loss)
    assert free.remat == ()
    for memory in (free.peak, 0.9 * free.peak):
        found = sl.plan(model, GIVEN, mesh={"a": ranks}, memory=memory, cluster=CLUSTER, loss=loss)
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
    rates = CLUSTER.rates(mesh)
    return rates.seconds(found.work), found.peak


def test_what_cannot_fit_is_refused_with_the_least_that_does() -> None:
    def plan(memory: float) -> Any:
        return sl.plan(Words(), GIVEN, mesh={"a": 2}, memory=memory, cluster=CLUSTER, loss=loss)

    with pytest.raises(sl.errors.NoPlanFits, match="the least is") as refused:
        plan(1e4)
    least = refused.value.least
    found = plan(least)
    assert found.peak <= least
    named = [f"{name} {size(nbytes)}" for name, nbytes in found.largest[:3]]
    assert refused.value.message.endswith(f"its largest tensors: {', '.join(named)}")
    assert found.largest[0] == max(found.largest, key=lambda x: x[1])
    assert {"table.weight", "h.*.up.weight", "gelu of h.*"} <= {name for name, _ in found.largest}
    with pytest.raises(sl.errors.NoPlanFits):
        plan(0)


@pytest.mark.parametrize("share", [1.0, 0.85])
def test_a_planned_step_is_one_process_s(share: float) -> None:
    torch.manual_seed(0)
    model = Words().double()
    free = sl.plan(model, GIVEN, mesh={"a": 2}, cluster=CLUSTER, loss=loss)
    found = sl.plan(
        model, GIVEN, mesh={"a": 2}, memory=share * free.peak, cluster=CLUSTER, loss=loss
    )
    want = losses({"a": 1}, model, None)
    assert losses(found.mesh, model, found) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("ranks", [2])
def test_a_plan_in_tiers_is_one_process_s_within_what_it_says_of_each_tier(ranks: int) -> None:
    torch.manual_seed(0)
    model, memory = Words(6).double(), 950_000
    found = sl.plan(
        model, GIVEN, mesh={"a": ranks}, cluster=replace(CLUSTER, host=1e8), loss=loss,
        microbatches=1, memory=memory, host="10MB",
    )  # fmt: skip
    assert found.peak <= memory and found.zero["stage"] == 3
    with sl.simulate(**found.mesh):
        apply, parts, tx = found.apply(model)
        given = [sl.shard(x, text) for x, text in zip(GIVEN, found.inputs, strict=True)]
        step = sl.value_and_grad(lambda p, *x: loss(apply, p, *x), into=tx)
        state, got, moved = tx.init(parts), [], []
        for _ in range(3):
            before = parts.cache.loads
            value, grads = step(parts, *given)
            parts, state, _ = sl.optim.step(tx, parts, grads, state)
            got.append(value.item())
            moved.append(parts.cache.loads - before)
        ledger = parts.cache.ledger
    assert got == pytest.approx(losses({"a": 1}, model, None), abs=1e-12)
    use = found.explained.tiers
    assert use is not None and moved[1:] == [use.loads] * 2 and use.loads > use.blocks
    assert ledger.peak["device"] <= found.tiers["device"] < found.peak


def test_stages_that_no_device_holds_are_planned_in_tiers() -> None:
    torch.manual_seed(0)
    model, memory = Words(2).double(), 720_000
    plan = partial(
        sl.plan, model, GIVEN, mesh={"pipe": 2}, cluster=replace(CLUSTER, host=1e8), loss=loss,
        microbatches=2, memory=memory, recipes=["ddp"],
    )  # fmt: skip
    with pytest.raises(sl.errors.NoPlanFits):
        plan()
    found = plan(host="2MB")
    assert found.pipe == 2 and found.tiers and found.peak <= memory
    want = losses({"a": 1}, model, None)
    assert losses(found.mesh, model, found) == pytest.approx(want, abs=1e-12)
    # each place has its own
    assert max(sum(p.tiers.host.values()) for p in found.explained.places) <= 2e6


def losses(mesh: Any, model: Any, plan: Any, batch: Any = GIVEN, loss: Any = loss) -> list[float]:
    with sl.simulate(**mesh):
        tx = sl.optim.adamw(1e-3)
        how: dict[str, Any] = {}
        if plan is None:
            apply, params = sl.parallelize(model, [("*", "...")])
            given = [sl.shard(x, "...") for x in batch]
        else:
            apply, params, tx = plan.apply(model)
            given = [sl.shard(x, text) for x, text in zip(batch, plan.inputs, strict=True)]
            how = {"microbatches": plan.microbatches} if plan.microbatches > 1 else {}
        if tx.sink:
            how["into"] = tx
        step = sl.value_and_grad(lambda p, *x: loss(apply, p, *x), **how)
        state, out = tx.init(params), []
        for _ in range(3):
            with sl.trace() as moved:
                value, grads = step(params, *given)
                params, state, _ = sl.optim.step(tx, params, grads, state)
            out.append(value.item())
    if plan is not None:
        # simulated ranks add up those inside of all places of a pipeline
        said = sum(b * (1 if a == "pipe" else plan.pipe) for a, (b, _) in plan.along.items())
        assert float(moved.bytes) == pytest.approx(said, rel=0.02)
    return out


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rows of a dataset: words, and the next ones as labels."""
    return [(torch.arange(i, i + 16) % 64, torch.arange(i + 1, i + 17) % 64) for i in range(64)]


# recipes of one axis on four ranks; of more on eight, whose grids are no squares
@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [
        *((r, 8 if r in ("optimus2d", "tesseract", "cube3d") else 4) for r in RECIPES),
        ("tesseract", 4),
    ],
)
def test_a_recipe_s_plan_is_one_process_s_and_moves_what_it_says(recipe: str, ranks: int) -> None:
    module, inputs = made("gpt2 of 4")
    given, loss = tuple(inputs.values()), loss_over((*inputs,))
    how: dict[str, Any] = {
        "cluster": CLUSTER, "loss": loss, "pipe": 1, "optimizer": OPTIMIZER
    }  # fmt: skip
    if recipe == "tesseract" and ranks < 8:
        with pytest.raises(sl.ShardError, match="no mesh of 4 ranks"):
            sl.plan(module, given, ranks=ranks, recipes=[recipe], **how)
        return
    found = sl.plan(module, given, ranks=ranks, recipes=[recipe], **how)
    losses, received = stepped(module, inputs, found)
    assert losses == pytest.approx(stepped(module, inputs, None)[0], rel=1e-12)
    said = tuple(map(sum, zip(*found.along.values(), strict=True)))
    assert found.recipe == recipe and said == received
    assert confirm(inputs, module, found) == ""


class Ends(nn.Module):
    """Words whose table is also the weight of the last product, which has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(512, 32), nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.randn(512))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.up(self.table(ids)).tanh(), self.table.weight, self.bias)


def test_labels_and_a_bias_lie_where_logits_do() -> None:
    """Tokens, which are their own labels, may be split otherwise; the weight was read before."""
    torch.manual_seed(0)
    model, ids = Ends().double(), torch.arange(64).reshape(8, 8)
    # whatever is held whole or sent takes long
    costly = replace(RIG, bandwidth=1e7)
    found = sl.plan(model, ids, mesh={"a": 2}, cluster=costly)
    rules = {name: text for name, text, *_ in found.rules}
    assert rules["table.weight"] == "a ." and rules["bias"] == "a"
    cube = {"x": 2, "y": 2, "z": 1}
    found = sl.plan(model, ids, mesh=cube, cluster=costly, recipes=["cube3d"])
    assert found.inputs == ("(x y) .",)

    own = lambda apply, p, x: loss_of(apply(p, x), x)  # noqa: E731
    want = losses({"a": 1}, model, None, (ids,), own)
    assert losses(found.mesh, model, found, (ids,), own) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", ["mixtral (batched_mm)", "blocks of nn.Sequential"])
def test_calls_that_write_to_an_operand_and_residuals_outside_of_layers_are_planned(
    name: str,
) -> None:
    if name.startswith("mixtral"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    module, inputs = made(name)
    given, loss = tuple(inputs.values()), loss_over((*inputs,))
    how: dict[str, Any] = {"cluster": CLUSTER, "loss": loss, "optimizer": OPTIMIZER}
    found = sl.plan(module, given, mesh={"a": 2}, microbatches=1, **how)
    want, _ = stepped(module, inputs, None)
    assert stepped(module, inputs, found)[0] == pytest.approx(want, rel=1e-6)


def test_the_choice_is_the_fastest_of_all_recipes() -> None:
    module, how = Words(1), dict[str, Any](cluster=CLUSTER, loss=loss)
    best = sl.choose(module, GIVEN, ranks=2, **how)
    others = [
        sl.plan(module, GIVEN, ranks=2, recipes=[r], **how)
        for r in RECIPES
        if [*recipe_meshes(r, 2)]
    ]
    assert len(others) > 2 and best.seconds == min(p.seconds for p in others)
    assert sl.plan(module, GIVEN, ranks=2, **how).seconds <= best.seconds


def test_fewer_rows_than_ranks_are_split_along_the_sequence() -> None:
    fast = sl.planning.Cluster(1e9, 2e10, 8, inside=sl.planning.Link(1e-6, 1e-11), bandwidth=1e10)
    model = Words(layers=2, width=36).double()
    batch = tuple(x.repeat(1, 16)[:1] for x in GIVEN)
    found, ring = (
        sl.plan(model, batch, ranks=8, cluster=fast, loss=loss, recipes=recipes)
        for recipes in (None, ["ring"])
    )
    assert found.inputs == (". zigzag(a)",) * 2 and found.mesh == {"a": 4, "b": 2}
    # weights are split over the other axis
    assert any("b" in text for _, text, *_ in found.rules) and found.seconds < ring.seconds
    want = losses({"a": 1}, model, None, batch)
    assert losses(found.mesh, model, found, batch) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("memory", "recipes"),
    [
        ("500KB", None),
        ("9MB", "cube3d"),
        ("9MB", "ring"),
        ("200KB", "host"),
        ("9MB", "alike"),
        ("9MB", "zigzag"),
    ],
)
def test_what_is_written_as_a_file_trains_as_one_process_does(
    memory: str, recipes: str | None, tmp_path: Path
) -> None:
    """The tables of a plan, in the file of a run; the first budget is the least, nearly.

    Behind slow links all ranks do the same: nothing is split over their axis, and the file says so.
    """
    run = """
[model]
make = "tests.planning.test_joint:Words"
[data.dataset]
make = "tests.planning.test_plan:rows"
[optimizer]
name = "adamw"
lr = 1e-3
[log]
every = 1
"""
    how: dict[str, Any] = {"recipes": [recipes]} if recipes else {}
    if recipes == "host":
        how = {"host": "10MB"}
    cluster = CLUSTER
    if recipes == "alike":
        how, cluster = {}, replace(CLUSTER, inside=sl.planning.Link(1.0, 1.0))
    given = GIVEN
    if recipes == "zigzag":
        how, given = {}, tuple(x[:1].repeat(1, 64) for x in GIVEN)
        cluster = replace(CLUSTER, node=2, inside=sl.planning.Link(1e-6, 1e-12))
    found = sl.plan(Words(), given, ranks=2, memory=memory, cluster=cluster, loss=loss, **how)
    alike = "axes = " in found.toml() and "alike"
    zigzag = "zigzag" in found.inputs[0] and "zigzag"
    assert (found.recipe or (found.tiers and "host") or alike or zigzag) == (recipes or False)
    alone = f'[data]\nbatch = {len(given[0])}\n[mesh]\na = 1\n[layout]\nrules = [["*", "..."]]'
    losses = []
    for name, text in {"planned": found.toml(), "alone": alone}.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(f"steps = 3\n{text}\n{run}")
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
    found = sl.plan(model, rows, mesh={"a": 2}, cluster=CLUSTER)
    with sl.simulate(a=2):
        apply, params, _ = found.apply(model)
        assert sorted(params) == sorted(dict(model.named_parameters()))
        assert torch.allclose(
            sl.unshard(apply(params, sl.shard(rows, found.inputs[0]))), model(rows)
        )


class Outside(nn.Module):
    """Layers whose residual is added outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = x + layer(x)
        return x


def test_single_layers_are_computed_again_where_memory_is_short() -> None:
    how: dict[str, Any] = {"mesh": {"a": 1}, "cluster": CLUSTER, "microbatches": 1}
    x = torch.empty(1024, 16)
    free = sl.plan(Outside(), x, **how)
    counts = []
    for share in (0.85, 0.65, 0.45):
        found = sl.plan(Outside(), x, memory=share * free.peak, **how)
        assert found.peak <= share * free.peak and found.seconds > free.seconds
        counts.append(sum(fnmatchcase(f"h.{i}", p) for i in range(4) for p, _ in found.remat))
    assert 0 < counts[0] < counts[1] < counts[2]


def test_what_does_not_fit_whole_fits_in_micro_batches() -> None:
    """Less memory, more of them; and their step is one process's, within the bytes that are said."""
    torch.manual_seed(0)
    model, many = Words(2).double(), tuple(x.repeat(8, 1) for x in GIVEN)
    how: dict[str, Any] = {"mesh": {"a": 2}, "cluster": CLUSTER, "loss": loss, "pipe": 1}
    counts = []
    for memory in (1e9, 1.5e6):
        found = sl.plan(model, many, memory=memory, **how)
        assert found.peak <= memory
        counts.append(found.microbatches)
        assert (f"{counts[-1]} micro-batches of {64 // counts[-1]} rows" in str(found)) is (
            counts[-1] > 1
        )
    assert counts[0] == 1 < counts[1]
    want = losses({"a": 1}, model, None, many)
    assert losses(found.mesh, model, found, many) == pytest.approx(want, abs=1e-12)
    assert sl.plan(model, many, microbatches=4, **how).microbatches == 4


def test_where_little_memory_is_missing_results_of_products_are_held() -> None:
    torch.manual_seed(0)
    model, many = Words(3).double(), tuple(x.repeat(4, 1) for x in GIVEN)
    how: dict[str, Any] = {"mesh": {"a": 2}, "cluster": CLUSTER, "loss": loss, "microbatches": 1}
    free = sl.plan(model, many, memory=1e9, **how)
    found, less = (sl.plan(model, many, memory=x * free.peak, **how) for x in (0.9, 0.7))
    assert not free.remat and {policy for _, policy in found.remat} == {"products"}
    assert {policy for _, policy in less.remat} == {"full"}
    assert free.seconds < found.seconds < less.seconds and found.peak <= 0.9 * free.peak
    want = losses({"a": 1}, model, None, many)
    assert losses(found.mesh, model, found, many) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(("share", "tiers"), [(0.6, False), (0.5, True)])
def test_behind_a_fast_link_what_layers_save_goes_to_host_memory(share: float, tiers: bool) -> None:
    """Where no host memory is given they are computed again, which takes longer."""
    torch.manual_seed(0)
    model, many = Words(3).double(), tuple(x.repeat(8, 1) for x in GIVEN)
    how: dict[str, Any] = {"mesh": {"a": 2}, "loss": loss, "microbatches": 1}
    how["cluster"] = replace(CLUSTER, host=1e12)
    free = sl.plan(model, many, memory=1e9, **how)
    how["memory"] = share * free.peak
    found, again = sl.plan(model, many, host="1GB", **how), sl.plan(model, many, **how)
    assert found.remat == (("h.[0-2]", "host"),) and bool(found.tiers) == tiers
    assert {policy for _, policy in again.remat} == {"full"} and not again.tiers
    assert free.seconds < found.seconds < again.seconds and found.peak <= how["memory"]
    want = losses({"a": 1}, model, None, many)
    assert losses(found.mesh, model, found, many) == pytest.approx(want, abs=1e-12)
    # as much host memory as is needed for one layer
    one = found.explained.work.away / 3
    if not tiers:
        less = sl.plan(model, many, host=one, **how)
        assert less.seconds > found.seconds and less.explained.work.away <= one


def test_behind_slow_links_layers_are_on_different_ranks() -> None:
    torch.manual_seed(0)
    model = Words(8).double()
    found, none = (
        sl.plan(model, GIVEN, ranks=2, cluster=BUSY, loss=loss, pipe=pipe) for pipe in (None, 1)
    )
    assert found.pipe == 2 and none.pipe == 1 and found.seconds < none.seconds
    assert found.without("pipe").seconds == none.seconds
    want = losses({"a": 1}, model, None)
    assert losses(found.mesh, model, found) == pytest.approx(want, abs=1e-12)
    assert "[stages]" in found.toml() and f"microbatches = {found.microbatches}" in found.toml()


class Shifted(nn.Module):
    """Blocks that read a condition, of which no example is known from the module alone."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(32) for _ in range(8)])
        self.shift = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift = self.shift(condition)[:, None]
        for block in self.h:
            x = block(x + shift)
        return x


def test_where_stages_are_not_known_a_plan_has_none() -> None:
    given = torch.empty(8, 16, 32), torch.empty(8, 16)
    assert sl.plan(Shifted(), given, ranks=2, cluster=BUSY).pipe == 1
    with pytest.raises(sl.ShardError):
        sl.plan(Shifted(), given, ranks=2, cluster=BUSY, pipe=2)


def test_a_parameter_s_other_layouts_and_a_plan_without_a_part_cost_more() -> None:
    found = sl.plan(Words(2), GIVEN, mesh={"a": 2}, memory="640KB", cluster=CLUSTER, loss=loss)
    lines = found.why("h.*.up.weight").splitlines()[1:]
    assert len(lines) == 3 and sum("as planned" in line for line in lines) == 1
    times = {line.split(": ")[0].strip(): line for line in lines}
    chosen = next(text for text, line in times.items() if "as planned" in line)
    assert chosen == next(rule[1] for rule in found.rules if rule[0] == "h.*.up.weight")
    # one of equal layers lies as all of them do
    assert found.why("h.1.up.weight").splitlines()[1:] == lines
    other = found.without("h.*.up.weight")
    assert chosen not in [rule[1] for rule in other.rules if rule[0] == "h.*.up.weight"]
    assert other.seconds >= 0.999 * found.seconds
    for what in ("remat", "zero", "microbatches"):
        try:
            assert found.without(what).seconds >= 0.999 * found.seconds
        except sl.errors.NoPlanFits as e:
            assert e.least > 640e3


def test_the_links_that_are_given_are_those_that_count() -> None:
    fast, late = (
        sl.plan(Words(2), GIVEN, mesh={"a": 2}, cluster=c, loss=loss, pipe=1)
        for c in (replace(BUSY, between=CLUSTER.between), BUSY)
    )
    assert late.seconds > 1.2 * fast.seconds


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "either ranks or a mesh"),
        ({"ranks": 2, "mesh": {"a": 2}}, "either ranks or a mesh"),
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 2, "cluster": "h10"}, "no cluster 'h10'"),
        ({"ranks": 2, "memory": "much"}, "much"),
        ({"ranks": 2, "microbatches": 0}, "microbatches=0"),
        ({"ranks": 2, "microbatches": 3}, "3 micro-batches"),
        ({"ranks": 2, "pipe": 3}, "3 stages"),
        ({"mesh": {"a": 0}}, "a=0"),
        ({"ranks": 2, "recipes": ["cube"]}, "['cube'], of ddp, megatron1d"),
        ({"ranks": 2, "recipes": []}, "recipes: [], of ddp"),
    ],
)
def test_mistakes_say_what_to_write(how: dict[str, Any], said: str) -> None:
    with pytest.raises(sl.errors.BadArgument, match=re.escape(said)):
        sl.plan(Words(1), GIVEN, loss=loss, **how)


def test_a_parameter_that_is_none_is_refused() -> None:
    found = sl.plan(nn.Linear(8, 8), torch.empty(4, 8), ranks=1)
    for method, text, near in (("why", "wieght", "weight"), ("without", "zer", "zero")):
        with pytest.raises(sl.errors.BadArgument, match="no matrix") as e:
            getattr(found, method)(text)
        assert e.value.fix == f"found.{method}({near!r})"


@torch.library.custom_op("plans::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, g: 2 * g)


class Between(nn.Module):
    """A function between two products; as an attribute it can be no deep copy."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.before, self.between, self.after = nn.Linear(8, 8), between, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.between(self.before(x)))


def test_an_operator_without_declaration_is_held_whole_and_said() -> None:
    found = sl.plan(Between(twice), torch.empty(4096, 8), ranks=2)
    assert len(found.whole) == 1 and "twice" in found.whole[0]
    assert f"whole on every rank: {found.whole[0]}" in str(found)
    model, x = Between(twice), torch.randn(4096, 8)
    with sl.simulate(**found.mesh):
        apply, params, _ = found.apply(model)
        out = apply(params, sl.shard(x, found.inputs[0]))
        torch.testing.assert_close(sl.unshard(out), model(x))
    assert sl.plan(Between(torch.tanh), torch.empty(4096, 8), ranks=2).whole == ()


def test_a_rule_with_the_layout_of_a_product_is_written_to_the_file() -> None:
    found = sl.plan(Between(torch.tanh), torch.empty(4096, 8), mesh={"a": 2})
    rules = ("before.weight", ". .", "a ."), *found.rules
    assert '["before.weight", ". .", "a ."]' in replace(found, rules=rules).toml()


def test_a_forward_that_asks_for_values_is_refused() -> None:
    model = Between(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(sl.errors.Unsupported, match="does not run on shapes alone") as e:
        sl.plan(model, torch.empty(8, 8), ranks=2)
    assert e.value.op == "plan"
