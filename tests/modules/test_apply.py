"""A call places its inputs by name, takes exactly its parameters, and is the module's forward."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl

MLP = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
GOOD = [("*.weight", "..."), ("*.bias", ".")]


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
