"""A number out of range is refused when a transform or a schedule is made, as torch refuses it."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.errors import BadArgument, ShardError

o = sl.optim
TX = o.adamw(1e-3)

MAKERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {  # a call that is right, by name
    **{
        n: (getattr(o, n), {"lr": 1e-3})
        for n in ("adafactor adagrad adam adam8bit adamw lamb lion muon rmsprop sgd soap".split())
    },
    "averaged": (o.averaged, {"tx": TX}),
    "clip_by_global_norm": (o.clip_by_global_norm, {"max_norm": 1.0}),
    "clip_by_parameter_norm": (o.clip_by_parameter_norm, {"max_norm": 1.0}),
    "clip_by_value": (o.clip_by_value, {"limit": 1.0}),
    "constant": (o.constant, {"value": 1.0}),
    "cosine": (o.cosine, {"start": 1.0, "end": 0.0, "steps": 5}),
    "ema": (o.ema, {"decay": 0.5}),
    "linear": (o.linear, {"start": 1.0, "end": 0.0, "steps": 5}),
    "loss_scale": (o.loss_scale, {"tx": TX}),
    "multi_steps": (o.multi_steps, {"tx": TX, "every": 2}),
    "scale": (o.scale, {"factor": 1.0}),
    "skip_nonfinite": (o.skip_nonfinite, {"tx": TX}),
    "warmup_cosine": (o.warmup_cosine, {"peak": 1.0, "warmup": 1, "steps": 5}),
    "wsd": (o.wsd, {"peak": 1.0, "warmup": 1, "steps": 5, "decay": 2}),
}
NUMBERS = [
    (name, key)
    for name, (make, _) in MAKERS.items()
    for key, p in inspect.signature(make).parameters.items()
    if p.annotation in (float, int, float | None, float | o.schedules.Schedule)
]


def test_the_table_has_every_maker_of_a_number() -> None:
    for name in o.__all__:
        make = getattr(o, name)
        if inspect.isfunction(make) and name not in MAKERS:
            kinds = {p.annotation for p in inspect.signature(make).parameters.values()}
            assert not kinds & {float, int} or name in ("global_norm", "zero"), name


@pytest.mark.parametrize(("name", "key"), NUMBERS, ids=".".join)
def test_what_is_no_number_is_refused_with_a_call_that_runs(name: str, key: str) -> None:
    make, right = MAKERS[name]
    make(**right)
    for wrong in (math.nan, "x", True, [1.0]):
        with pytest.raises(BadArgument, match=f"{key}=") as e:
            make(**right | {key: wrong})
        exec(e.value.fix, {"sl": sl})
    if (name, key) not in (("scale", "factor"), ("adafactor", "decay")):
        with pytest.raises(BadArgument, match=f"{key}=-1"):
            make(**right | {key: -1})


WEIGHT = [torch.nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize(
    ("name", "theirs", "key", "like", "values"),
    [
        ("adamw", torch.optim.AdamW, "eps", {}, (-1.0, 0.0, 1e-8)),
        ("adamw", torch.optim.AdamW, "b1", {"b1": lambda b: {"betas": (b, 0.9)}}, (-0.1, 0.0, 0.9, 1.0, 1.5)),
        ("adamw", torch.optim.AdamW, "b2", {"b2": lambda b: {"betas": (0.9, b)}}, (-0.1, 0.0, 0.9, 1.0, 1.5)),
        ("sgd", torch.optim.SGD, "momentum", {}, (-1.0, 0.0, 0.9)),
        ("sgd", torch.optim.SGD, "nesterov", {}, (False, True)),
        ("sgd", torch.optim.SGD, "weight_decay", {}, (-1.0, 0.0, 2.0)),
        ("adagrad", torch.optim.Adagrad, "lr_decay", {}, (-1.0, 0.0, 2.0)),
        ("adafactor", torch.optim.Adafactor, "clip", {"clip": lambda d: {"d": d}}, (-1.0, 0.5, 1.0, 2.0)),
        ("adafactor", torch.optim.Adafactor, "decay", {"decay": lambda d: {"beta2_decay": d}}, (-0.8, 0.0, 0.5)),
        ("adafactor", torch.optim.Adafactor, "eps1", {"eps1": lambda e: {"eps": (e, 1e-3)}}, (-1.0, None, 0.0)),
        ("adafactor", torch.optim.Adafactor, "eps2", {"eps2": lambda e: {"eps": (None, e)}}, (-1.0, 0.0)),
        ("rmsprop", torch.optim.RMSprop, "eps", {}, (-1.0, 0.0)),
    ],
)  # fmt: skip
def test_torch_refuses_the_same(
    name: str, theirs: Any, key: str, like: dict[str, Any], values: tuple[Any, ...]
) -> None:
    for value in values:
        said = like[key](value) if key in like else {key: value}
        outcomes = []
        for make, given in ((getattr(o, name), {key: value}), (partial(theirs, WEIGHT), said)):
            try:
                make(lr=1e-3, **given)
                outcomes.append(True)
            except (ShardError, ValueError):
                outcomes.append(False)
        assert outcomes[0] is outcomes[1], (name, key, value)


def test_a_schedule_that_gives_no_rate_is_refused_at_that_step() -> None:
    params = {"w": torch.ones(2)}
    for gives in (-1.0, math.nan, math.inf):
        tx = o.sgd(lambda step, bad=gives: bad if step else 0.1)
        _, state = tx.update(params, tx.init(params), params)
        with pytest.raises(BadArgument, match="at step 1: a rate is 0 or more") as e:
            tx.update(params, state, params)
        exec(e.value.fix, {"sl": sl})


def test_a_tensor_and_numpys_numbers_are_numbers() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    for lr in (torch.tensor(0.1), numpy.float32(0.1), numpy.int64(1)):
        o.sgd(lr)
    assert o.linear(0.0, 1.0, numpy.int64(2))(1) == 0.5
