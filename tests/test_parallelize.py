import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from examples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=32, ctx=8, layers=2, heads=4, embed=16)
IDS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))


def dense() -> tuple[GPT, torch.Tensor, dict[str, torch.Tensor]]:
    m = GPT(CONFIG).double()
    loss = m(IDS, IDS.roll(-1, 1))
    loss.backward()
    return m, loss.detach(), {n: p.grad for n, p in m.named_parameters()}


def gap(recipe: str, pending: str | tuple = (), **options: Any) -> float:
    """Largest relative difference of loss and gradients, on the mesh in scope."""
    m, loss, grads = dense()
    before = {n: p.detach().clone() for n, p in m.named_parameters()}
    rules = getattr(sl.recipes, recipe)(m, **options)
    apply, params = sl.parallelize(m, rules, inputs={"idx": rules.tokens, "targets": rules.labels})
    got, found = sl.value_and_grad(lambda p: apply(p, IDS, targets=IDS.roll(-1, 1)), pending=pending)(params)
    errors = [abs(float(got.item() - loss.item()))]
    for n, g in grads.items():
        assert found[n].sharding.dims == params[n].sharding.dims
        errors.append(float((sl.unshard(found[n]) - g).abs().max() / g.abs().max()))
    assert all(torch.equal(before[n], p.detach()) for n, p in m.named_parameters()), "the module changed"
    return max(errors)


@pytest.mark.parametrize(
    "axes",
    [{"x": 2, "y": 2}, {"data": 2, "x": 2, "y": 2}, {"data": 2, "x": 1, "y": 4}, {"x": 4, "y": 1}, {"x": 1, "y": 1}],
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
def test_a_gpt_whose_weights_are_gathered_for_their_products_equals_dense(axes: dict[str, int]) -> None:
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


def _decorated(f: Any) -> Any:
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    return run


class Loose(nn.Module):
    """A forward behind a decorator, as transformers write it, that takes more than it names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    @_decorated
    def forward(self, hidden: torch.Tensor, *rest: torch.Tensor, **more: Any) -> torch.Tensor:
        return hidden * self.w + sum(rest)


def test_inputs_are_placed_by_name_or_position_and_misspelt_ones_are_refused() -> None:
    with sl.simulate(data=2):
        x = torch.ones(4, 4)
        places = {"hidden": "data .", "rest": "data .", "other": "data ."}
        apply, params = sl.parallelize(Loose(), [("*", "...")], inputs=places)
        for out in (apply(params, x), apply(params, hidden=x), apply(params, x, x, x)):
            assert sl.layout_of(out) == sl.Layout.parse("data .")
        with pytest.raises(sl.errors.RuleLint, match=r"no argument 'hiden'; did you mean 'hidden'\?"):
            sl.parallelize(Loose(), [("*", "...")], inputs={"hiden": "data ."})
        compiled = torch.compile(nn.Linear(4, 4), backend="eager")
        with pytest.raises(sl.errors.RuleLint, match="did you mean 'input'"):
            sl.parallelize(compiled, [("*", "...")], inputs={"inputs": "data ."})
        apply, params = sl.parallelize(compiled, [("*", "...")], inputs={"input": "data ."})
        assert sl.layout_of(apply(params, x)) == sl.Layout.parse("data .")


def _unwrapped(f: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    return run


class Scaled(nn.Module):
    """hidden times w; what derives from it says forward in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(4.0))

    def forward(module, hidden: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return hidden * module.w * by


class Bound(Scaled):
    """forward is an attribute, a partial of another method."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(self.run, 2.0)

    def run(self, by: float, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.w * by


class Partial(Scaled):
    def run(self, by: float, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.w * by

    forward = functools.partialmethod(run, 3.0)  # type: ignore[assignment]


class PositionalOnly(Scaled):
    def forward(self, hidden: torch.Tensor, /, *, by: float = 1.0) -> torch.Tensor:
        return hidden * self.w * by


def _compiled_in_place() -> nn.Module:
    module = Scaled()
    module.compile(backend="eager")
    return module


FORWARDS = {
    "a first parameter that is not called self": Scaled,
    "an attribute that is a partial": Bound,
    "a partialmethod": Partial,
    "positional only": PositionalOnly,
    "compiled in place": _compiled_in_place,
    "traced by torch.fx": lambda: torch.fx.symbolic_trace(Scaled()),
    "wrapped by functools.wraps": Loose,
}


@pytest.mark.parametrize("way", FORWARDS)
def test_positional_inputs_are_placed_however_forward_is_written(way: str) -> None:
    module, x = FORWARDS[way](), torch.randn(4, 4)
    want = module(x)
    with sl.simulate(data=2):
        apply, params = sl.parallelize(module, [("*", "...")], inputs={"hidden": "data ."})
        out = apply(params, x)
        assert sl.layout_of(out) == sl.Layout.parse("data .") and torch.equal(sl.unshard(out), want)
        top = sl.as_module(apply, params, whole=False)
        assert sl.layout_of(top(x)) == sl.Layout.parse("data .")


class Nameless(Scaled):
    forward = _unwrapped(Scaled.forward)


def test_an_input_whose_name_nothing_says_is_refused_by_position_and_placed_by_name() -> None:
    x = torch.randn(4, 4)
    with sl.simulate(data=2):
        apply, params = sl.parallelize(Nameless(), [("*", "...")], inputs={"hidden": "data ."})
        for call in (apply, lambda _, x: sl.as_module(apply, params)(x)):
            with pytest.raises(sl.errors.RuleLint, match=r"positional input 1 in \*args") as caught:
                call(params, x)
        out = eval(caught.value.fix, {"apply": apply, "params": params, "hidden": x})
        assert sl.layout_of(out) == sl.Layout.parse("data .")
        apply, params = sl.parallelize(Nameless(), [("*", "...")])
        assert sl.layout_of(apply(params, x)) == sl.Layout.parse(". .")


def _first(name: str, value: torch.Tensor) -> bool:
    return name == "weight"


UNFIT: dict[str, tuple[Any, str]] = {
    "another size": ([("weight", "x ."), ("bias", ".")], "dimension 0 of size 5"),
    "another number of dimensions": ([("weight", "x . ."), ("bias", ".")], "has 3 dimensions"),
    "an unknown axis": ([("weight", "q ."), ("bias", ".")], "unknown axis 'q'"),
    "an unknown axis of products": ([("weight", ". x", "q ."), ("bias", ".")], "unknown axis 'q'"),
    "an axis twice": ([("weight", "x x"), ("bias", ".")], "axis 'x' is used twice"),
    "no layout": ([("weight", None), ("bias", ".")], "not None"),
    "placements": ([("weight", ("x", None)), ("bias", ".")], r"not \('x', None\)"),
    "a family": ([("weight", sl.Layout3D("x", "y", "z")), ("bias", ".")], "Layout3D has act and weight"),
    "no end of a group": ([("weight", "(x ."), ("bias", ".")], "cannot read"),
    "a whole factor in a group": ([("weight", "(. x) ."), ("bias", ".")], "may only end a group"),
    "a function's": ([(_first, "x ."), ("bias", ".")], "dimension 0 of size 5"),
    "a regex's": ([(re.compile("we"), "x ."), ("bias", ".")], "dimension 0 of size 5"),
    "one that others share": ([("*", "x ...")], "dimension 0 of size 5"),
}


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("case", UNFIT)
def test_a_layout_that_does_not_fit_names_its_parameter_and_the_fix_runs(case: str, meta: bool) -> None:
    rules, says = UNFIT[case]
    module = nn.Linear(4, 5, device="meta" if meta else None)
    with sl.simulate(x=2):
        with pytest.raises(sl.ShardError, match=f"^parallelize: the rule of parameter 'weight' .*{says}") as caught:
            sl.parallelize(module, rules)
        fix = caught.value.fix
        if case == "one that others share":  # the bias, of 5 too, is next
            with pytest.raises(sl.ShardError, match="parameter 'bias'") as caught:
                eval(fix, {"sl": sl, "module": module, "rules": rules, "re": re})
            return
        _, params = eval(fix, {"sl": sl, "module": module, "rules": rules, "re": re})
    assert {str(p.sharding) for p in params.values()} == {". .", "."}


@pytest.mark.parametrize("layout", ["q .", "x x", "(x .", None, ("x", None)])
def test_an_inputs_layout_that_cannot_be_names_the_input_and_the_fix_runs(layout: Any) -> None:
    space: dict[str, Any] = {"sl": sl, "module": nn.Linear(4, 5), "rules": [("*", "...")], "inputs": {"input": layout}}
    with sl.simulate(x=2):
        with pytest.raises(sl.ShardError, match=r"^parallelize: the layout of input 'input'") as caught:
            sl.parallelize(space["module"], space["rules"], inputs=space["inputs"])
        eval(caught.value.fix, space)
        space["inputs"] = [("input", "x .")]
        with pytest.raises(sl.errors.RuleLint, match="a mapping") as caught:
            sl.parallelize(space["module"], space["rules"], inputs=space["inputs"])
        eval(caught.value.fix, space)


@pytest.mark.parametrize("axes", [{"x": 2}, {"data": 2, "x": 4}])
def test_a_gpt_with_its_residual_split_along_the_sequence_equals_dense(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert gap("megatron1d", sequence=True) < 1e-12


@pytest.mark.parametrize(
    "axes", [{"d": 2, "x": 2, "y": 2}, {"d": 1, "x": 2, "y": 2}, {"data": 2, "d": 2, "x": 1, "y": 2}]
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


def traffic() -> tuple[Any, ...]:
    m, where = GPT(CONFIG), "x ."
    with sl.trace() as t:
        apply, params = sl.parallelize(m, sl.recipes.optimus2d(m), inputs={"idx": where, "targets": where})
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
            apply, params = sl.parallelize(m, rules, inputs={"idx": rules.tokens, "targets": rules.labels})
            torch.manual_seed(5)
            losses.append(apply(params, IDS, IDS).item())
    assert max(losses) - min(losses) < 1e-12


def test_tied_parameters_are_one_leaf() -> None:
    m = GPT(CONFIG)
    with sl.simulate(x=2, y=2):
        apply, params = sl.parallelize(m, sl.recipes.optimus2d(m))
    assert "lm_head.weight" not in params and apply.tied == {"lm_head.weight": "wte.weight"}


MLP = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
GOOD = [("*.weight", "..."), ("*.bias", ".")]


def test_rules_match_by_glob_regex_and_function_in_order() -> None:
    with sl.simulate(x=2):
        _, p = sl.parallelize(
            MLP, [("0.weight", "x ."), (re.compile(r"^2\.w"), ". x"), (lambda n, t: t.ndim == 1, ".")]
        )
    assert [str(v.sharding) for v in p.values()] == ["x .", ".", ". x", "."]


def test_logical_names_resolve_by_axes() -> None:
    with sl.simulate(x=2):
        _, p = sl.parallelize(
            nn.Linear(4, 12),
            [("weight", "(3 heads hd) embed"), ("bias", "(3 heads hd)")],
            axes={"heads": "x", "embed": ".", "hd": "."},
        )
    assert str(p["weight"].sharding) == "(3 x) ." and str(p["bias"].sharding) == "(3 x)"


LINT = [
    ([("0.*", "...")], "no rule matches parameter '2.weight'"),
    ([*GOOD, ("3.wieght", ".")], "rule '3.wieght' matches no parameter"),
    ([("*", "..."), ("0.weight", "x .")], "rule '0.weight' is never reached: an earlier rule takes 0.weight"),
    ([*GOOD, (lambda n, t: n == "3.weight", ".")], "matches no parameter"),
]


@pytest.mark.parametrize(("rules", "says"), LINT)
def test_rules_are_linted_both_ways_and_the_fix_runs(rules: Any, says: str) -> None:
    with sl.simulate(x=2):
        with pytest.raises(sl.ShardError, match=re.escape(says)) as caught:
            sl.parallelize(MLP, rules)
        space = {"rules": rules, "re": re}
        if caught.value.fix.startswith("rules ="):
            exec(caught.value.fix, space)
            mended = space["rules"]
        else:
            mended = eval(caught.value.fix, space)
        sl.parallelize(MLP, mended)


def test_misspelt_and_missing_parameters_are_named() -> None:
    with sl.simulate(x=2):
        module = MLP
        apply, params = sl.parallelize(module, GOOD)
        x = torch.ones(2, 4)
        wrong = {("0.wieght" if n == "0.weight" else n): p for n, p in params.items()}
        with pytest.raises(sl.ShardError, match=r"no parameter '0.wieght'; did you mean '0.weight'") as caught:
            apply(wrong, x)
        exec(caught.value.fix, {"params": wrong})
        assert apply(wrong, x).shape == (2, 4)
        with pytest.raises(sl.ShardError, match=r"parameters are missing: 2\.bias"):
            apply({n: p for n, p in params.items() if n != "2.bias"}, x)


def test_buffers_are_cloned_and_returned_by_mutable() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return x * self.w

    m = Counter()
    with sl.simulate(x=2):
        apply, params = sl.parallelize(m, [("w", "x")])
        out, new = apply.mutable(params, apply.buffers, sl.shard(torch.ones(4), "x"))
        assert new["seen"].item() == 1 and apply.buffers["seen"].item() == 0 and m.seen.item() == 0
        assert sl.unshard(out).sum() == 4


def test_tensors_made_inside_forward_count_as_replicated_and_only_there() -> None:
    with sl.simulate(x=2):
        w = sl.shard(torch.ones(4), "x")
        with pytest.raises(sl.ShardError, match="a plain tensor met a sharded one"):
            w + torch.arange(4.0)

        class Shift(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(4))

            def forward(self) -> torch.Tensor:
                return self.w + torch.arange(4.0)

        apply, params = sl.parallelize(Shift(), [("w", "x")])
        assert sl.unshard(apply(params)).tolist() == [1, 2, 3, 4]


def test_meta_modules_materialise_shard_by_shard(tmp_path: Any) -> None:
    """Blocks are NaN until a checkpoint fills them: using them early cannot go unseen."""
    real = GPT(CONFIG)
    with torch.device("meta"):
        m = GPT(CONFIG)
    with sl.simulate(x=2, y=2):
        _, values = sl.parallelize(real, sl.recipes.optimus2d(real))
        sl.save(tmp_path / "a.safetensors", values)
        apply, blank = sl.parallelize(m, sl.recipes.optimus2d(m), inputs={"idx": "x ."})
        assert blank["wte.weight"].local.shape == (16, 8) and sl.unshard(blank["wte.weight"]).isnan().all()
        params = sl.load(tmp_path / "a.safetensors", like=blank)
        assert torch.equal(sl.unshard(apply(params, IDS)), sl.unshard(apply(values, IDS)))
    with sl.record(x=2):
        _, p = sl.parallelize(nn.Linear(4, 4, device="meta"), [("*", "...")])
        assert p["weight"].shape == (4, 4)


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


def test_the_loss_is_the_modules_own() -> None:
    m, loss, _ = dense()
    with sl.simulate(x=2, y=2):
        apply, params = sl.parallelize(m, sl.recipes.optimus2d(m), inputs={"idx": "x ."})
        logits = apply(params, IDS)
        assert logits.shape == (8, 8, 32)
        whole = sl.unshard(logits)
    assert abs(F.cross_entropy(whole.view(-1, 32), IDS.roll(-1, 1).view(-1)) - loss) < 1e-12
