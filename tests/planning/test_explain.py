"""What is explained beforehand is what is counted afterwards."""

import json
from typing import Any

import optree
import pytest
import torch
from torch import nn

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.collectives import Trace
from shardlib.memory_tracker import Live

CONFIG = GPTConfig(vocab=32, ctx=8, layers=2, heads=4, embed=16)
IDS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
MESHES = {
    "megatron1d": {"x": 4},
    "optimus2d": {"data": 2, "x": 2, "y": 2},
    "tesseract": {"d": 2, "x": 2, "y": 2},
    "cube3d": {"x": 2, "y": 2, "z": 2},
}


def built(recipe: str) -> Any:
    m = GPT(CONFIG)
    rules = getattr(sl.recipes, recipe)(m)
    return sl.parallelize(m, rules, inputs={"idx": rules.tokens, "targets": rules.labels})


@pytest.mark.parametrize("recipe", MESHES)
def test_explained_is_counted(recipe: str) -> None:
    with sl.simulate(**MESHES[recipe]):
        apply, params = built(recipe)
        said = sl.explain(apply, params, {"idx": IDS, "targets": IDS})
        with sl.trace() as forward, torch.no_grad():
            apply(params, IDS, IDS)
        with sl.trace() as both:
            sl.value_and_grad(lambda p: apply(p, IDS, IDS))(params)
    assert (said.forward.bytes, said.forward.messages) == (forward.bytes, forward.messages)
    assert (said.bytes, said.messages) == (both.bytes, both.messages)
    assert said.parameters == sum(p.local.numel() * 4 for p in params.values())


def test_a_plan_for_512_ranks_needs_none_of_them() -> None:
    m = GPT(GPTConfig(vocab=256, ctx=8, layers=2, heads=8, embed=512))
    with sl.simulate(x=1, y=1, z=1):
        rules = sl.recipes.cube3d(m)
        apply, params = sl.parallelize(
            m, rules, inputs={"idx": rules.tokens, "targets": rules.labels}
        )
        said = sl.explain(
            apply,
            params,
            (torch.zeros(64, 8, dtype=torch.long),) * 2,
            mesh={"x": 8, "y": 8, "z": 8},
        )
        assert all(p.mesh.size == 1 for p in params.values()), "the parameters stay where they are"
    text = str(said)
    assert "x=8 y=8 z=8" in text and "2 x linear" in text and "lower bound" in text
    assert 1.0 <= float(said.products) / said.bound < 4.0


def test_a_product_alone_is_priced_by_its_rule() -> None:
    with sl.simulate(x=2, y=2):
        a, b = sl.shard(torch.ones(8, 8), "x y"), sl.shard(torch.ones(8, 8), "x y")
        price = dict(sl.why("matmul", a, b).verdicts)["summa"]
        said = sl.explain(
            lambda p: p["a"] @ p["b"], {"a": a.requires_grad_(), "b": b.requires_grad_()}
        )
    (row,) = [r for r in said.rows if r.algorithm]
    assert (
        isinstance(price, sl.extend.Match)
        and row.algorithm == "summa"
        and row.at.startswith("test_explain.py:")
    )
    assert said.forward.bytes == price.forward.bytes and said.backward.bytes == price.backward.bytes
    assert row.memory == price.forward.memory and said.memory == row.memory


def test_without_gradients_nothing_is_said_of_them() -> None:
    with sl.simulate(x=2):
        apply, params = sl.parallelize(
            nn.Linear(4, 4), [("weight", ". x"), ("bias", ".")], inputs={"input": ". x"}
        )
        said = sl.explain(apply, params, torch.empty(2, 4), backward=False)
    assert said.backward.bytes == 0 and said.forward.bytes > 0


def test_mistakes_say_what_to_do() -> None:
    with sl.simulate(x=2):
        apply = sl.parallelize(nn.Linear(4, 4), [("*", "...")])[0]
        with pytest.raises(sl.ShardError, match="no parameter is sharded"):
            sl.explain(
                apply, {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, torch.empty(2, 4)
            )
        with pytest.raises(sl.ShardError, match="does not divide"):
            sl.explain(apply, sl.shard({"weight": torch.ones(4, 4)}, "x ."), mesh={"x": 3})


def test_expecting_other_communication_fails_with_what_ran() -> None:
    with sl.simulate(x=2):
        x = torch.ones(4)
        with sl.expect_comm(all_gather=1, psum=2, bytes=48, messages=5):
            sl.all_gather(x, "x"), sl.psum(x, "x"), sl.psum(x, "x")
        with (
            pytest.raises(sl.errors.UnexpectedComm, match="1 psum, not 0") as caught,
            sl.expect_comm(),
        ):
            sl.psum(x, "x")
        assert caught.value.fix == "sl.expect_comm(psum=1)"
        with (
            pytest.raises(AssertionError, match="16 bytes, not 8"),
            sl.expect_comm(psum=1, bytes=8),
        ):
            sl.psum(x, "x")
        with (
            pytest.raises(AssertionError, match="0 all_gather, not 1"),
            sl.expect_comm(all_gather=1),
        ):
            pass


def step_memory() -> tuple[int, int]:
    """(on paper, counted here): bytes alive at the most in a training step
    of a GPT on a ring, beside its parameters.
    """
    from shardlib.memory_tracker import Live

    model = GPT(GPTConfig(ctx=256, layers=2, heads=4, embed=32))
    rules = sl.recipes.ring(model)
    apply, params = sl.parallelize(
        model, rules, inputs={"idx": rules.tokens, "targets": rules.labels}
    )
    ids = torch.zeros(2, 256, dtype=torch.int64)
    step = sl.value_and_grad(lambda p: apply(p, ids, ids))
    with sl.algorithm(attention="ring"):
        paper = sl.explain(lambda p, i, t: apply(p, i, t), params, (ids, ids)).transient
        step(params)
        with Live() as live:
            step(params)
    return paper, live.peak


def test_peak_memory_on_paper_is_what_a_step_allocates(pool: Any) -> None:
    for paper, here in pool.run(step_memory, s=4):
        assert abs(here / paper - 1) < 0.05, (paper, here)


def later_step(tx: Any, step: Any, params: Any, *inputs: Any) -> tuple[Trace, int, Any]:
    """Step five times: what a later one's gradients moved, the most bytes beside state, and parameters.

    A later one finds the buckets that the second has made in the order of the first's gradients.  Of
    three the one that holds least counts: a send holds its operand until another rank has taken it.
    """
    peaks = []
    with Live() as live:
        state = tx.init(params)
        held = live.now
        for _ in range(5):
            live.peak = live.now
            with sl.trace() as t:
                _, grads = step(params, *inputs)
            params, state, _ = sl.optim.step(tx, params, grads, state)
            del grads
            peaks.append(live.peak - held)
    return t, min(peaks[2:]), params


def steps_of_stages() -> dict[str, tuple[int, int]]:
    """(on paper, counted here) of a step of a GPT, by stage of ZeRO."""
    found, ids = {}, torch.zeros(16, 64, dtype=torch.int64)
    for stage, keep in ((0, False), (1, False), (2, False), (3, False), (3, True)):
        model = GPT(GPTConfig(ctx=64, layers=2, heads=4, embed=64))
        rules = sl.recipes.ddp(model)
        apply, params = sl.parallelize(
            model, rules, inputs={"idx": rules.tokens, "targets": rules.labels}
        )
        tx = sl.optim.zero(sl.optim.adamw(1e-3), "data", stage, keep=keep)
        params = tx.shard(params)
        plan = sl.explain(apply, params, (ids, ids), tx=tx)
        step = sl.value_and_grad(apply, into=None if stage == 3 else tx)
        t, most, params = later_step(tx, step, params, ids, ids)
        found[f"stage {stage} {keep}"] = plan.peak, plan.peak - plan.transient + most
        assert (plan.bytes, plan.messages) == (t.bytes, t.messages), stage
        if stage > 1 and not keep:  # as if none had run
            again = sl.explain(apply, params, (ids, ids), tx=tx)
            assert (again.peak, again.bytes) == (plan.peak, plan.bytes), stage
    return found


def test_a_step_takes_what_paper_says_at_every_stage(pool: Any) -> None:
    for by_stage in pool.run(steps_of_stages, data=4):
        for stage, (paper, here) in by_stage.items():
            # attention is no fused kernel on the pretend device, and is told 1.1 % too high there
            near = 0.01 if torch.get_default_device().type == "cpu" else 0.02
            assert abs(here / paper - 1) < near, (stage, paper, here)


class Backwards(nn.Module):
    """Layers that are registered in another order than that in which they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.square().sum()


def steps_of_other_orders() -> list[tuple[str, float, float]]:
    """(stage and micro-batches, counted peak over paper's of all steps, and of later ones)."""
    found = []
    for stage, count in ((0, None), (2, None), (2, 2)):
        rules = [("*.weight", ". ."), ("*.bias", ".")]
        apply, params = sl.parallelize(Backwards(), rules, inputs={"x": "data ."})
        tx = sl.optim.zero(sl.optim.adamw(1e-3), "data", stage, bucket_mb=0.13)
        x = sl.shard(torch.ones(32, 128), "data .")
        plan = sl.explain(apply, params, (x,), tx=tx, microbatches=count)
        step = sl.value_and_grad(apply, into=tx, microbatches=count)
        with Live() as live:
            step(params, x)
        t, most, params = later_step(tx, step, params, x)
        assert (plan.bytes, plan.messages) == (t.bytes, t.messages), stage
        later = sl.explain(apply, params, (x,), tx=tx, microbatches=count)
        assert later.bytes == plan.bytes, stage
        beside, every = later.peak - later.transient, max(live.peak, most)
        more = (beside + every) / plan.peak, (beside + most) / later.peak
        found.append((f"{stage} {count}", *more))
    return found


def test_a_later_step_has_its_buckets_in_the_order_of_gradients_on_paper(pool: Any) -> None:
    for found in pool.run(steps_of_other_orders, data=4):
        assert not [x for x in found if max(abs(x[1] - 1), abs(x[2] - 1)) >= 0.01], found


def steps_of_micro_batches() -> list[tuple[str, bool, float]]:
    """(stage and number, whether bytes are those on paper, counted peak over paper's)."""
    found, ids = [], torch.zeros(40, 64, dtype=torch.int64)
    counts = [(0, 2), (1, 5), (2, 1), (2, 2), (3, 2), (3, 5)]
    ways = [*((*c, torch.float32) for c in counts), (2, 5, torch.bfloat16)]
    for stage, count, dtype in ways:
        model = GPT(GPTConfig(ctx=64, layers=2, heads=4, embed=64)).to(dtype)
        rules = sl.recipes.ddp(model)
        apply, params = sl.parallelize(
            model, rules, inputs={"idx": rules.tokens, "targets": rules.labels}
        )
        given = [sl.shard(ids, rules.tokens), sl.shard(ids, rules.labels)]
        master = "fp32" if dtype is torch.bfloat16 else None
        tx = sl.optim.zero(sl.optim.adamw(1e-3), "data", stage, master=master)
        params = tx.shard(params)
        plan = sl.explain(apply, params, given, tx=tx, microbatches=count)
        into = None if stage == 3 else tx
        step = sl.value_and_grad(apply, into=into, microbatches=count)  # type: ignore[call-overload]
        t, most, _ = later_step(tx, step, params, *given)
        beside = plan.peak - plan.transient
        alike = (plan.bytes, plan.messages) == (t.bytes, t.messages)
        moved = {axes: (float(b), m) for axes, (b, m) in plan.work.along.items()}
        alike &= sum(b for b, _ in moved.values()) == float(t.bytes)
        found.append((f"{stage} {count} {dtype}", alike, (beside + most) / plan.peak))
    return found


def test_a_step_of_micro_batches_takes_what_paper_says_at_every_stage(pool: Any) -> None:
    """The first, one that stands for all between, and the last."""
    near = 0.01 if torch.get_default_device().type == "cpu" else 0.02
    for found in pool.run(steps_of_micro_batches, data=4):
        wrong = [x for x in found if not x[1] or abs(x[2] - 1) >= near]
        assert not wrong, wrong


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_what_is_no_number_of_micro_batches_is_refused(count: Any) -> None:
    with sl.simulate(x=2):
        apply, params = sl.parallelize(nn.Linear(4, 4), [("*", "...")])
        f = lambda p, x: apply(p, x).sum()  # noqa: E731
        with pytest.raises(sl.ShardError, match="no positive whole number"):
            sl.explain(f, params, torch.ones(4, 4), microbatches=count)
        with pytest.raises(sl.ShardError, match="not a scalar"):
            sl.explain(apply, params, torch.ones(4, 4), microbatches=2)


def steps_of_own_parts() -> list[tuple[bool, float]]:
    """(whether bytes are those on paper, counted peak over paper's) of weights that data splits."""
    found, x = [], sl.shard(torch.ones(64, 64), "data .")
    for stage, axis in ((2, "data"), (2, ("data", "x")), (3, ("data", "x"))):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64, bias=False))
        rules = [("0.weight", "data ."), ("2.weight", ". data"), ("*", "...")]
        apply, params = sl.parallelize(model, rules, inputs={"input": "data ."})
        tx = sl.optim.zero(sl.optim.adamw(1e-3), axis, stage)
        params, f = tx.shard(params), lambda p, x, apply=apply: apply(p, x).square().mean()
        plan = sl.explain(f, params, x, tx=tx)
        step = sl.value_and_grad(f, into=None if stage == 3 else tx)  # type: ignore[call-overload]
        t, most, _ = later_step(tx, step, params, x)
        beside = plan.peak - plan.transient
        alike = (plan.bytes, plan.messages) == (t.bytes, t.messages)
        found.append((alike, (beside + most) / plan.peak))
    return found


def test_parameters_that_are_split_over_zeros_axes_are_explained_as_counted(pool: Any) -> None:
    for found in pool.run(steps_of_own_parts, data=2, x=2):
        assert all(alike and abs(share - 1) < 0.01 for alike, share in found), found


def test_a_skeleton_takes_no_memory() -> None:
    with Live() as live, Live(paper=True) as paper:
        _kept = nn.Linear(16, 16, device="meta")
    assert live.peak == 0 and paper.now >= 4 * 16 * 16


def test_a_reshape_of_one_row_a_rank_takes_as_much_on_512_ranks_as_on_8() -> None:
    class Heads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).view(-1, 4, 8, 64)
            return y.transpose(1, 2).reshape(-1, 32, 64)

    found = []
    for ranks in (8, 512):
        with sl.record(data=ranks):
            apply, params = sl.parallelize(Heads(64, 64), [("*", "...")], inputs={"x": "data ..."})
            found.append(sl.explain(apply, params, torch.empty(ranks, 32, 64)).transient)
    assert found[1] <= found[0]


def every_verb(p: Any) -> torch.Tensor:
    """What is not a function of torch: attention, products, moves and local code."""
    y = sl.ring_attention(p["q"], p["q"], p["q"], mask=sl.masks.Causal())
    z = sl.matmul(sl.reshard(y, "..."), sl.reshard(p["w"], "..."))
    total = sl.shard_map(lambda t: sl.psum(t, "s"), in_layouts=". . s .", out_layouts="...")(y)
    return z.sum() + total.sum() + sl.unshard(y).square().sum()


def test_verbs_of_the_library_are_explained_as_they_are_counted() -> None:
    with sl.simulate(s=4):
        q = sl.shard(torch.ones(1, 4, 16, 8), ". . s .")
        params = {"q": q, "w": sl.shard(torch.ones(8, 8), "s .")}
        leaves = {n: p.requires_grad_() for n, p in params.items()}
        said = sl.explain(every_verb, leaves)
        with sl.trace() as forward, torch.no_grad():
            every_verb(params)
        with sl.trace() as both:
            sl.value_and_grad(every_verb)(params)
    assert (said.forward.bytes, said.bytes) == (forward.bytes, both.bytes)
    names = [row.op for row in said.rows]
    assert {"ring_attention", "reshard", "product", "shard_map", "unshard"} <= set(names)


def test_operations_have_their_module_and_layers_are_put_together() -> None:
    with sl.simulate(x=2):
        apply, params = built("megatron1d")
        said = sl.explain(apply, params, {"idx": IDS, "targets": IDS})
    up = next(rows for rows in said.kinds() if rows[0].pattern == "h.*.mlp.c_fc")
    assert [row.module for row in up] == ["h.0.mlp.c_fc", "h.1.mlp.c_fc"]
    assert "2 x linear" in str(said) and "h.*.mlp.c_fc   gpt.py:" in str(said)
    assert "% of all" in str(said)


def test_rows_are_sorted_and_given_as_plain_values() -> None:
    with sl.simulate(x=2):
        apply, params = built("megatron1d")
        said = sl.explain(apply, params, {"idx": IDS, "targets": IDS})
    sums = [len(rows) * rows[0].bytes for rows in said.kinds("bytes")]
    assert sums == sorted(sums, reverse=True) and sum(sums) == said.bytes
    held = [rows[0].memory for rows in said.kinds("memory")]
    assert held == sorted(held, reverse=True)
    found = json.loads(json.dumps(said.json()))
    assert found["bytes"] == said.bytes == sum(row["bytes"] for row in found["rows"])
    assert found["peak"] == said.peak and found["mesh"] == {"x": 2}
    with pytest.raises(sl.ShardError, match="no order 'size'"):
        said.kinds("size")


STATES: dict[str, Any] = {
    "zero": lambda o: o.zero(o.adamw(1e-3), "data", 2),
    "muon": lambda o: o.zero(o.muon(0.02, rest=o.adamw(1e-3), matrices="*.weight"), "data"),
    "soap": lambda o: o.soap(0.02, rest=o.adamw(1e-3), matrices="*.weight"),
    "adafactor": lambda o: o.adafactor(1e-3),
    "adam8bit": lambda o: o.adam8bit(1e-3),
}


@pytest.mark.parametrize("name", STATES)
def test_state_on_paper_is_the_state(name: str) -> None:
    tx, model = STATES[name](sl.optim), torch.nn.Sequential(torch.nn.Linear(64, 128))
    with sl.simulate(data=2, x=2):
        apply, params = sl.parallelize(model, [("0.weight", "x ."), ("0.bias", "x")])
        told = sl.explain(apply, params, torch.empty(8, 64), tx=tx).state
        kept = [x for x in optree.tree_leaves(tx.init(params)) if isinstance(x, torch.Tensor)]
    here = (x.raw[0] if isinstance(x, sl.ShardedTensor) else x for x in kept)
    assert told == sum(x.numel() * x.element_size() for x in here)


class _Refuses(nn.Module):
    """Its forward asks for a value, or raises as a foreign module's own code does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "value":
            return x if torch.rand(1, device=x.device).item() >= 0 else -x
        raise KeyError("no such option")


@pytest.mark.parametrize(
    ("how", "said"), [("value", "asks for values"), ("error", "raised KeyError: 'no such option'")]
)
def test_a_forward_that_does_not_run_on_paper_is_told_by_its_module(how: str, said: str) -> None:
    """And the fix runs: it raises what the module itself raises, or counts."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), _Refuses(how)))
    inputs = (torch.ones(2, 4),)
    with sl.simulate(x=2):
        apply, params = sl.parallelize(net, [("*", "...")])
        with pytest.raises(sl.errors.Unsupported, match=r"module '1\.1'") as caught:
            sl.explain(apply, params, inputs)
        assert said in caught.value.message and caught.value.__cause__ is not None
        line = f"{caught.value.fix}\n"
        names = {"sl": sl, "apply": apply, "params": params, "inputs": inputs}
        if how == "value":
            exec(line, names)
        else:
            with pytest.raises(KeyError):
                exec(line, names)


def parts_of_stage_3(policy: str, keep: bool) -> tuple[Any, Any, float]:
    """(bytes and messages, on paper and counted), and the counted share of the peak on paper."""
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    x, model = torch.zeros(1024, 16), nn.Sequential(*blocks)
    apply, params = sl.parallelize(
        model, [("*", "...")], inputs={"input": "data ."}, remat=[("*", policy)]
    )
    tx = sl.optim.zero(sl.optim.adamw(1e-2), "data", 3, keep=keep)
    parts, f = tx.shard(params), lambda p, x: apply(p, x).square().mean()
    rows = sl.shard(x, "data .")
    plan, step = sl.explain(f, parts, rows, tx=tx), sl.value_and_grad(f)
    t, most, _ = later_step(tx, step, tx.shard(params), rows)
    said = plan.forward.bytes + plan.backward.bytes, plan.forward.messages + plan.backward.messages
    with pytest.raises(sl.ShardError, match="cut for one mesh"):
        sl.explain(f, parts, x, mesh={"data": 8}, tx=tx)
    return said, (t.bytes, t.messages), most / plan.transient


@pytest.mark.parametrize("keep", [False, True])
def test_parts_of_stage_3_are_gathered_on_paper_as_in_a_run(keep: bool, pool: Any) -> None:
    for policy in ("all", "full"):
        for said, counted, share in pool.run(parts_of_stage_3, policy, keep, data=4):
            assert said == counted and abs(share - 1) < 0.01, (policy, share)


SHAPED: dict[str, Any] = {
    "a word table of odd size": lambda p: torch.nn.functional.linear(p["x"], p["odd"]).sum(),
    "a product of odd size": lambda p: (p["x"] @ p["odd"].mT).sum(),
    "an odd sum": lambda p: (p["x"] @ p["odd"].mT).relu().sum(0).sum(),
    "a new value": lambda p: (p["x"].new_empty(p["x"].shape).zero_() + p["x"]).sum(),
    "values alike": lambda p: (torch.ones_like(p["x"]) * p["x"]).sum(),
    "heads": lambda p: p["x"].view(-1, 4, 16).transpose(0, 1).reshape(4, -1).sum(),
}


@pytest.mark.parametrize("call", SHAPED)
def test_what_is_made_for_its_sizes_alone_is_no_memory_and_no_work(call: str) -> None:
    """One row a rank: on 256 ranks as on 8, blocks are as large, and global sizes are not."""
    found = []
    for ranks in (8, 256):
        with sl.record(x=ranks) as mesh:
            p = {
                "x": sl.shard(torch.empty(ranks, 64, device="meta"), "x .", mesh),
                "odd": sl.shard(torch.empty(16 * ranks - 1, 64, device="meta"), "x .", mesh, pad=True),
            }  # fmt: skip
            if "odd" in call:
                # whole rows against the columns of a rank
                p["x"] = sl.shard(torch.empty(2, 64, device="meta"), "...", mesh)
            said = sl.explain(
                lambda p: SHAPED[call](p), {k: v.requires_grad_() for k, v in p.items()}
            )
        found.append((said.transient, said.work.flops))
    assert found[1][0] <= 2 * found[0][0] and found[1][1] == found[0][1]


class _Loop(nn.Module):
    """Experts as transformers writes them: a loop over those that a row is routed to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 64, 16))
        self.down = nn.Parameter(torch.randn(4, 16, 64))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in nn.functional.one_hot(index, 4).sum((0, 1)).nonzero():
            row, slot = torch.where(index == e[0])
            y = nn.functional.linear(x[row], self.up[e[0]]).tanh()
            y = nn.functional.linear(y, self.down[e[0]])
            out.index_add_(0, row, y * weights[row, slot, None])
        return out


class _Together(_Loop):
    """The same by one product of each row with its expert's weights."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        of = index.reshape(-1)
        y = torch.bmm(self.up[of], x.repeat_interleave(index.shape[-1], 0).unsqueeze(-1)).tanh()
        y = torch.bmm(self.down[of], y).squeeze(-1) * weights.reshape(-1, 1)
        return y.view(len(x), -1, 16).sum(1)


class _Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts, self.head = experts, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        # as many rows to each expert
        index = torch.arange(2 * len(x), device=x.device).view(-1, 2) % 4
        return x + self.experts(x, index, x[:, :2].softmax(-1))


def steps_of_experts() -> list[tuple[str, int, int]]:
    """(rule and kind of experts, the peak on paper, the peak counted)."""
    found = []
    for experts in (_Loop, _Together):
        for rule, ways in (("x ...", 2), ("(data x) ...", 4)):
            apply, params = sl.parallelize(
                _Mixture(experts()), [("experts*", rule), ("*", "...")], inputs={"x": "data ."}
            )
            x, f = sl.shard(torch.ones(64, 16), "data ."), lambda p, x: apply(p, x).square().mean()  # noqa: B023
            said = sl.explain(f, params, x)
            peaks = []
            for _ in range(3):
                with Live() as live:
                    sl.value_and_grad(f)(params, x)
                peaks.append(live.peak)
            # a transfer may let go of what it sent a moment later
            found.append((f"{experts.__name__} {rule}", said.transient, min(peaks)))
            # two products of each row and each of its two experts, and their gradients
            rows = 64 * 2 / (2 if ways == 2 else 1) / ways
            assert said.work.flops == 3 * 2 * (2 * rows * 16 * 64) + 2 * 2 * 32 * 16 * 16
    return found


def test_experts_take_on_paper_what_they_take_with_even_routing(pool: Any) -> None:
    for found in pool.run(steps_of_experts, data=2, x=2):
        wrong = [x for x in found if abs(x[2] / x[1] - 1) > 0.01]
        assert not wrong, wrong


def test_products_whose_layouts_depend_on_the_rows_are_explained_in_micro_batches() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 32)).double()
    rules = [("0.weight", "a b"), ("0.bias", "a"), ("1.weight", "b a"), ("1.bias", "b")]
    x = torch.zeros(8, 8, 32, dtype=torch.float64)
    with sl.record(a=4, b=2):
        apply, params = sl.parallelize(model, rules)
        given = sl.shard(x.to("meta"), "...")
        # of all eight rows the first product moves others, and the last bias lies elsewhere
        with pytest.raises(sl.errors.ImplicitCommunication):
            sl.explain(lambda p, v: apply(p, v).sum(), params, given)
        found = sl.explain(lambda p, v: apply(p, v).sum(), params, given, microbatches=2)
    with sl.simulate(a=4, b=2):
        apply, params = sl.parallelize(model, rules)
        step = sl.value_and_grad(lambda p, v: apply(p, v).sum(), microbatches=2)
        with sl.trace() as moved:
            step(params, sl.shard(x, "..."))
    assert sum(n for n, _ in found.work.along.values()) == float(moved.bytes)
