"""Stage 3 keeps parts: of every parameter, once, and steps those that are trained."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.optim.stage3 import Parts
from tests.optim.cases import r


def parts(stage: int = 3) -> tuple[Any, Any]:
    params: Any = {k: sl.shard(torch.ones(4, 6), "...") for k in ("h.0.w", "h.1.w", "ln")}
    for name, x in params.items():
        x.requires_grad_(name != "ln")
    tx = sl.optim.zero(sl.optim.sgd(0.5), "data", stage)
    return tx, tx.shard(params)


def test_a_group_of_modules_and_what_is_frozen_have_buckets_of_their_own() -> None:
    with sl.simulate(data=2):
        tx, params = parts()
        assert isinstance(params, Parts) and tx.shard(params) is params
        of = {params.paths[b.slots[0].leaves[0]]: params[b.name] for b in params.index}
        assert {path: x.requires_grad for path, x in of.items()} == {
            "h.0.w": True, "h.1.w": True, "ln": False,
        }  # fmt: skip


def test_a_step_changes_the_parts_that_are_trained() -> None:
    with sl.simulate(data=2):
        tx, params = parts()
        state = tx.init(params)
        grads = params.like({n: x.becomes(torch.ones_like(x.raw)) for n, x in params.items()})
        params, state, _ = sl.optim.step(tx, params, grads, state)
        with params.opened() as whole:
            found = {k: sl.unshard(x).unique().tolist() for k, x in whole.items()}
        assert found == {"h.0.w": [0.5], "h.1.w": [0.5], "ln": [1.0]}


def test_whole_parameters_and_gradients_of_others_are_refused() -> None:
    with sl.simulate(data=2):
        tx, params = parts()
        _, whole = parts(stage=2)
        with pytest.raises(sl.ShardError, match="these are whole"):
            tx.init(whole)
        with pytest.raises(sl.ShardError, match="another tree"):
            tx.update({}, tx.init(params), params)


READ: dict[str, Callable[[Any, Any], Any]] = {
    "factor": lambda x, p: x * p,
    "summand": lambda x, p: (x + p).square(),
    "norm": lambda x, p: torch.nn.functional.layer_norm(x, (8,), p),
    "rms norm": lambda x, p: torch.nn.functional.rms_norm(x, (8,), p),
    "bias": lambda x, p: torch.nn.functional.linear(x, torch.eye(8).double(), p).square(),
    "vector": lambda x, p: (x @ p).square(),
}


@pytest.mark.parametrize("before", ["nothing", "forward alone", "frozen"])
@pytest.mark.parametrize("op", READ)
def test_what_was_read_without_gradients_changes_none(op: str, before: str) -> None:
    """A call is repeated as it was planned: with a gradient's sum over an axis, or without one."""
    x, start = r(4, 8, seed=1), r(8, seed=2)
    leaf = start.clone().requires_grad_()
    READ[op](x, leaf).sum().backward()
    assert leaf.grad is not None
    with sl.simulate(data=2, x=2), sl.implicit(), sl.constants():
        tx = sl.optim.zero(sl.optim.sgd(1.0), "data", 3)
        params = {n: sl.shard(start, "...").requires_grad_(n == "p") for n in ("frozen", "p")}
        parts, rows = tx.shard(params), sl.shard(x, "x .")

        def loss(p: Any) -> Any:
            with p.opened() as read:
                more = READ[op](rows, read["frozen"]).sum() if before == "frozen" else 0
                return READ[op](rows, read["p"]).sum() + more

        if before == "forward alone":
            with torch.no_grad():
                loss(parts)
        for _ in range(2):
            _, grads = sl.value_and_grad(loss)(parts)
        new, _, _ = sl.optim.step(tx, parts, grads, tx.init(parts))
        with new.opened() as read:
            assert not read["frozen"].requires_grad and read["p"].requires_grad
            torch.testing.assert_close(sl.unshard(read["p"]).detach(), start - leaf.grad)


def test_a_forward_whose_backward_never_runs_leaves_nothing() -> None:
    """Nothing that it saved stays alive, also where a node saved its own output."""
    made: list[weakref.ref[Any]] = []
    with sl.simulate(data=2):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid())
        apply, params = sl.parallelize(module, [("*", "...")])
        tx = sl.optim.zero(sl.optim.sgd(0.5), "data", 3)

        def f(p: Any) -> Any:
            made.append(weakref.ref(apply(p, torch.ones(2, 4)).raw.untyped_storage()))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sl.value_and_grad(f, into=tx)(tx.shard(params))
        gc.collect()
    assert [x() for x in made] == [None]


def test_micro_batches_in_flight_keep_no_bucket_gathered_each() -> None:
    def gathered(count: int) -> int:
        net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(8)])
        stages = sl.Stages("pipe", schedule="gpipe")
        apply, params = sl.parallelize(net, [("*", "...")], stages=stages)
        tx = sl.optim.zero(sl.optim.sgd(0.5), "data", 3)
        mine = tx.shard(params)
        step = sl.value_and_grad(lambda p, x: apply(p, x).sum(), into=tx, microbatches=count)
        step(mine, torch.ones(16, 4))
        return len(mine.index.room.buffers)

    with sl.simulate(data=2, pipe=2):
        assert gathered(2) == gathered(8) <= 3
