"""torch's optimizers here, and transforms there: the same steps either way."""

import copy
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import shardlib as sl
from shardlib.optim.transform import Step, run_in_place
from tests.ops.cases import close
from tests.optim.cases import LAYOUTS, PARAMS, gradients, steps

o, t = sl.optim, torch.optim
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (t.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "AdamW": (t.AdamW, {"amsgrad": True}),
    "Adam": (t.Adam, {"weight_decay": 0.1}),
    "NAdam": (t.NAdam, {}),
    "RAdam": (t.RAdam, {}),
    "Adamax": (t.Adamax, {}),
    "Adadelta": (t.Adadelta, {}),
    "Adagrad": (t.Adagrad, {"initial_accumulator_value": 0.1}),
    "RMSprop": (t.RMSprop, {"centered": True, "momentum": 0.5}),
    "ASGD": (t.ASGD, {}),
}


def by_torch(make: Any, how: dict[str, Any], count: int) -> dict[str, torch.Tensor]:
    params = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    optimizer = make(list(params.values()), lr=0.05, **how)
    for i in range(count):
        for k, g in gradients({k: p.detach() for k, p in params.items()}, i).items():
            params[k].grad = g
        optimizer.step()
    return {k: p.detach() for k, p in params.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimizers_are_transforms(name: str) -> None:
    """Purely, in place, sharded, and under zero: equal to themselves."""
    make, how = OPTIMIZERS[name]
    want = by_torch(make, how, 4)
    tx = o.from_torch(make, lr=0.05, **how)
    for k, p in steps(tx, PARAMS, 4).items():
        close(p, want[k], 1e-12)
    for layouts in LAYOUTS[:1]:
        with sl.simulate(data=2, x=2, y=2):
            params = {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()}
            for given in (tx, o.zero(tx, "data")):
                for k, p in steps(given, params, 4).items():
                    close(sl.unshard(p), want[k], 1e-12)
            kept = {k: p.clone() for k, p in params.items()}
            state = tx.init(kept)
            for i in range(4):
                state = run_in_place(tx, gradients(kept, i), state, kept, Step())
            for k, p in kept.items():
                assert torch.equal(sl.unshard(p), want[k])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrapped_optimizers_take_sums_of_halves_under_zero(name: str, stage: int) -> None:
    """Zero sums gradients of bfloat16 in fp32; torch's optimizers take none of another dtype."""
    make, how = OPTIMIZERS[name]
    drawn = torch.Generator().manual_seed(0)
    p, g = (torch.randn(8, 4, generator=drawn).bfloat16() for _ in range(2))
    want = p.clone().requires_grad_()
    optimizer = make([want], lr=0.05, **how)
    with sl.simulate(data=2):
        params, fixed = {"w": sl.shard(p, ". .")}, sl.shard(g, ". .")
        tx = o.zero(o.from_torch(make, lr=0.05, **how), "data", stage=stage)
        state = tx.init(params)
        step = sl.value_and_grad(lambda q: (q["w"] * fixed).sum(), into=tx)
        for _ in range(3):
            _, grads = step(params)
            params, state, _ = o.step(tx, params, grads, state)
            want.grad = g.clone()
            optimizer.step()
        assert torch.equal(sl.unshard(params["w"]), want)


def test_a_wrapped_optimizer_takes_schedules_and_frozen_leaves() -> None:
    rates = o.linear(0.1, 0.0, 4)
    tx = o.from_torch(t.SGD, lr=rates)
    p = {"a": torch.ones(2).requires_grad_(), "b": torch.ones(2)}
    state, g = tx.init(p), {"a": torch.ones(2), "b": None}
    for i in range(3):
        updates, state = tx.update(g, state, p)
        assert updates["b"] is None and torch.allclose(updates["a"], torch.full((2,), -rates(i)))
    assert o.apply_updates(p, updates)["b"] is p["b"]
    state = o.from_torch(t.AdamW, lr=0.1).init(p)
    assert state.kept["exp_avg"]["b"] is None


def test_a_wrapped_optimizers_state_goes_by_name() -> None:
    tx = o.from_torch(t.AdamW, lr=0.05)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    with sl.simulate(x=2, y=2):
        params = {k: sl.shard(p, LAYOUTS[0][k]) for k, p in PARAMS.items()}
        again = o.load_state_dict(tx.init(params), o.state_dict(state))
        one, _ = tx.update(PARAMS, state, PARAMS)
        two, _ = tx.update(params, again, params)
        for k in one:
            assert torch.equal(sl.unshard(two[k]), one[k])


def test_one_whose_trait_is_not_known_is_refused_by_zero() -> None:
    class Mine(t.SGD):
        pass

    tx: Any
    silent = o.Transform(lambda params: 0, lambda grads, n, params=None: (grads, n))
    for tx in (o.from_torch(Mine, lr=0.1), silent, o.chain(o.adamw(0.1), silent)):
        groups = o.partition({"a": o.sgd(0.1), "b": tx}, [("w", "a"), ("*", "b")])
        for one in (tx, groups, o.skip_nonfinite(tx)):
            with pytest.raises(sl.ShardError, match="nobody said") as caught:
                o.zero(one, "data")
            names = {"sl": sl, "tx": one}
            exec(caught.value.fix, names)
    with pytest.raises(sl.ShardError, match="there is no trait 'elemntwise'"):
        o.from_torch(Mine, lr=0.1, trait="elemntwise")
    for odd in ("AdamW", t.SGD([torch.ones(1)], 0.1), None):
        with pytest.raises(sl.ShardError, match="a class of optimizers"):
            o.from_torch(odd, lr=0.1)  # type: ignore[arg-type]
    o.zero(o.from_torch(Mine, lr=0.1, trait="elementwise"), "data")
    with pytest.raises(sl.ShardError, match="evaluates the loss itself") as caught:
        o.from_torch(t.LBFGS)
    assert eval(caught.value.fix, {"sl": sl, "torch": torch}).trait == "elementwise"


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)
    ).double()


X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

SCHEDULERS = {
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=8, cycle_momentum=False),
    "CosineAnnealingLR": lambda opt: schedulers.CosineAnnealingLR(opt, 8),
    "LambdaLR": lambda opt: schedulers.LambdaLR(opt, lambda i: 1 / (1 + i)),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, patience=0),
}


def trained(module: Any, optimizer: Any, scheduler: Any, count: int = 6) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        loss = module(X).square().mean()
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", ["injected", "factor"])
def test_torchs_schedulers_drive_a_transform(name: str, kind: str) -> None:
    """The rate where it is injected; else a factor of the updates, as of a rate of 1."""
    theirs, ours = model(), model()
    base = 0.01 if kind == "injected" else 1.0
    optimizer = t.SGD(theirs.parameters(), base, weight_decay=0.1)
    trained(theirs, optimizer, SCHEDULERS[name](optimizer))
    tx = (
        o.inject_hyperparams(o.sgd)(lr=0.01, weight_decay=0.1)
        if kind == "injected"
        else o.sgd(1.0, weight_decay=0.1)
    )
    mine = o.as_torch(tx, ours.parameters())
    trained(ours, mine, SCHEDULERS[name](mine))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(a.detach(), b.detach(), 1e-12)
    assert mine.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_groups_have_rates_of_their_own() -> None:
    module = model()
    injected = o.inject_hyperparams(o.sgd)
    tx = o.partition({"a": injected(lr=0.1), "b": injected(lr=0.2)}, [("0.*", "a"), ("*", "b")])
    optimizer = o.as_torch(tx, dict(module.named_parameters()))
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]
    optimizer.param_groups[1]["lr"] = 0.0
    before = copy.deepcopy(module.state_dict())
    module(X).square().mean().backward()
    optimizer.step()
    changed = {n for n, p in module.state_dict().items() if not torch.equal(p, before[n])}
    assert changed == {"0.weight", "0.bias"}


def test_a_closure_is_evaluated_with_gradients() -> None:
    module = model()
    optimizer = o.as_torch(o.sgd(0.1), module.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(X).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_a_sharded_module_trains_as_a_plain_one_and_resumes() -> None:
    theirs, plain = model(), model()
    reference = t.AdamW(theirs.parameters(), 0.01)
    trained(theirs, reference, SCHEDULERS["LambdaLR"](reference), 4)
    with sl.simulate(data=2, x=2):
        made = sl.parallelize(plain, sl.recipes.megatron1d(plain), inputs={"input": "data ."})
        module = sl.as_module(*made)
        tx = o.inject_hyperparams(o.adamw)(lr=0.01)
        optimizer = o.as_torch(tx, dict(module.named_parameters()))
        scheduler = SCHEDULERS["LambdaLR"](optimizer)
        trained(module, optimizer, scheduler, 2)
        kept = optimizer.state_dict()
        later = o.as_torch(tx, dict(module.named_parameters()))
        later.load_state_dict(kept)
        again = SCHEDULERS["LambdaLR"](later)
        again.load_state_dict(scheduler.state_dict())
        later.param_groups[0]["lr"] = kept["param_groups"][0]["lr"]
        trained(module, later, again, 2)
        for (n, a), b in zip(module.named_parameters(), theirs.parameters(), strict=True):
            close(sl.unshard(a).detach(), b.detach(), 1e-12)
            assert n


def test_parameters_come_by_name_or_without_and_as_nothing_else() -> None:
    one, two = model(), model()
    for module, given in ((one, one.named_parameters()), (two, dict(two.named_parameters()))):
        optimizer = o.as_torch(o.adamw(0.1, mask="*.weight"), given)
        module(X).square().mean().backward()
        optimizer.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)
    weight = one[0].weight
    for odd in (one, weight, 3, [{"params": [weight]}], [weight, None]):
        with pytest.raises(sl.ShardError) as caught:
            o.as_torch(o.adamw(0.1), odd)
        exec(caught.value.fix, {"sl": sl, "tx": o.adamw(0.1), "module": one})
    with pytest.raises(sl.ShardError, match="parameters of before"):
        o.as_torch(o.adamw(0.1), [weight]).add_param_group({"params": [one[2].weight]})


def test_no_parameters_are_refused() -> None:
    with pytest.raises(sl.ShardError, match="no parameters"):
        o.as_torch(o.sgd(0.1), [])
