import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardlib as sl
from examples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=32, ctx=8, layers=2, heads=4, embed=16)
IDS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))


def dense() -> tuple[GPT, torch.Tensor, dict[str, torch.Tensor]]:
    m = GPT(CONFIG).double()
    loss = m(IDS, IDS.roll(-1, 1))
    loss.backward()
    return m, loss.detach(), {n: p.grad for n, p in m.named_parameters()}


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
        with pytest.raises(
            sl.errors.RuleLint, match=r"no argument 'hiden'; did you mean 'hidden'\?"
        ):
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
    "no layout": ([("weight", None), ("bias", ".")], "None is no layout"),
    "a tuple of tokens": ([("weight", ("x", ".")), ("bias", ".")], r"\('x', '.'\) is no layout"),
    "placements": ([("weight", [Shard(0), Shard(1)]), ("bias", ".")], "one for each axis of"),
    "a family": (
        [("weight", sl.Layout3D("x", "y", "z")), ("bias", ".")],
        "Layout3D.* has a layout for activations, .act, and one for weights",
    ),
    "no end of a group": ([("weight", "(x ."), ("bias", ".")], "cannot read"),
    "a whole factor in a group": ([("weight", "(. x) ."), ("bias", ".")], "may only end a group"),
    "a function's": ([(_first, "x ."), ("bias", ".")], "dimension 0 of size 5"),
    "a regex's": ([(re.compile("we"), "x ."), ("bias", ".")], "dimension 0 of size 5"),
    "one that others share": ([("*", "x ...")], "dimension 0 of size 5"),
}


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("case", UNFIT)
def test_a_layout_that_does_not_fit_names_its_parameter_and_the_fix_runs(
    case: str, meta: bool
) -> None:
    rules, says = UNFIT[case]
    module = nn.Linear(4, 5, device="meta" if meta else None)
    with sl.simulate(x=2):
        with pytest.raises(
            sl.ShardError, match=f"^parallelize: the rule of parameter 'weight' .*{says}"
        ) as caught:
            sl.parallelize(module, rules)
        fix = caught.value.fix
        _, params = eval(fix, {"sl": sl, "module": module, "rules": rules, "re": re})
    assert {str(p.sharding) for p in params.values()} == {". .", "."}


@pytest.mark.parametrize("layout", ["q .", "x x", "(x .", None, ("q", None), [Shard(0), Shard(1)]])
def test_an_inputs_layout_that_cannot_be_names_the_input_and_the_fix_runs(layout: Any) -> None:
    space: dict[str, Any] = {
        "sl": sl,
        "module": nn.Linear(4, 5),
        "rules": [("*", "...")],
        "inputs": {"input": layout},
    }
    with sl.simulate(x=2):
        with pytest.raises(
            sl.ShardError, match=r"^parallelize: the layout of input 'input'"
        ) as caught:
            sl.parallelize(space["module"], space["rules"], inputs=space["inputs"])
        eval(caught.value.fix, space)
        space["inputs"] = [("input", "x .")]
        with pytest.raises(sl.errors.RuleLint, match="a mapping") as caught:
            sl.parallelize(space["module"], space["rules"], inputs=space["inputs"])
        eval(caught.value.fix, space)


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
            MLP,
            [("0.weight", "x ."), (re.compile(r"^2\.w"), ". x"), (lambda n, t: t.ndim == 1, ".")],
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
    (
        [("*", "..."), ("0.weight", "x .")],
        "rule '0.weight' is never reached: an earlier rule takes 0.weight",
    ),
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
        with pytest.raises(
            sl.ShardError, match=r"no parameter '0.wieght'; did you mean '0.weight'"
        ) as caught:
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
        sl.save(tmp_path / "a", values)
        apply, blank = sl.parallelize(m, sl.recipes.optimus2d(m), inputs={"idx": "x ."})
        assert (
            blank["wte.weight"].local.shape == (16, 8)
            and sl.unshard(blank["wte.weight"]).isnan().all()
        )
        params = sl.load(tmp_path / "a", like=blank)
        assert torch.equal(sl.unshard(apply(params, IDS)), sl.unshard(apply(values, IDS)))
    with sl.record(x=2):
        _, p = sl.parallelize(nn.Linear(4, 4, device="meta"), [("*", "...")])
        assert p["weight"].shape == (4, 4)


def test_the_loss_is_the_modules_own() -> None:
    m, loss, _ = dense()
    with sl.simulate(x=2, y=2):
        apply, params = sl.parallelize(m, sl.recipes.optimus2d(m), inputs={"idx": "x ."})
        logits = apply(params, IDS)
        assert logits.shape == (8, 8, 32)
        whole = sl.unshard(logits)
    assert abs(F.cross_entropy(whole.view(-1, 32), IDS.roll(-1, 1).view(-1)) - loss) < 1e-12


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("remat", [[], [("0", "full"), ("1", "products")]])
def test_apply_runs_without_a_graph(mode: Any, remat: Any) -> None:
    """Tensors of inference mode count no writes; nothing needs to know of them there."""
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    with sl.simulate(data=2):
        inputs = {"input": "data ."}
        apply, params = sl.parallelize(m, [("*", "...")], inputs=inputs, remat=remat)
        with mode():
            y, state = apply.mutable(params, apply.buffers, x)
            trained, mean = sl.unshard(y), sl.unshard(state["1.running_mean"])
            again, _ = apply.mutable(params, state, x)
            assert torch.allclose(sl.unshard(again), trained, atol=1e-12)
        apply.module.eval()
        with mode():
            evaluated = sl.unshard(apply(params, x))
    expected = m(x)
    assert torch.allclose(trained, expected, atol=1e-12)
    assert torch.allclose(mean, m[1].running_mean, atol=1e-12)
    m[1].running_mean.zero_(), m[1].running_var.fill_(1)
    assert torch.allclose(evaluated, m.eval()(x), atol=1e-12)
