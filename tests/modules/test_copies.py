"""Threads call one apply at once; a copy computes the same and has a tree of its own."""

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Steps(nn.Module):
    """Checkpointed layers, so that backward runs the module once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        for layer in self.layers:
            x = checkpoint(lambda v, layer=layer: torch.tanh(layer(v)), x, use_reentrant=False)
        return x.square().sum() * self.calls


@pytest.mark.parametrize("recipe", ["fsdp", "whole"])
def test_threads_that_call_one_apply_at_once_are_right(recipe: str) -> None:
    torch.manual_seed(0)
    m = Steps().double()
    scales, results, failures = [0.5, 1.0, 1.5, 2.0], {}, []
    xs = [torch.randn(4, 8, dtype=torch.float64) for _ in scales]
    want = {}
    for k, (scale, x) in enumerate(zip(scales, xs, strict=True)):
        scaled = Steps().double()
        scaled.load_state_dict({n: t * scale for n, t in m.state_dict().items()})
        loss = scaled(x)
        loss.backward()
        want[k] = loss.detach(), {n: p.grad for n, p in scaled.named_parameters()}
    with sl.simulate(x=2):
        rules = sl.recipes.fsdp(m) if recipe == "fsdp" else [("*", "...")]
        apply, params = sl.parallelize(m, rules, inputs={"x": "x ."})
    gate = threading.Barrier(len(scales))

    def work(k: int) -> None:
        try:
            with sl.simulate(x=2):
                mine = {
                    n: sl.shard(sl.unshard(p).detach() * scales[k], p.sharding)
                    for n, p in params.items()
                }
                gate.wait()
                for _ in range(5):
                    results[k] = sl.value_and_grad(lambda p: apply(p, xs[k]))(mine)
                    loss, grads = results[k]
                    assert torch.allclose(sl.unshard(loss), want[k][0], rtol=1e-12)
                    for n, g in want[k][1].items():
                        assert torch.allclose(sl.unshard(grads[n]), g, rtol=1e-10), n
        except BaseException as e:
            failures.append(e)
            gate.abort()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(scales))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and len(results) == len(scales), failures
    assert apply.buffers["calls"].item() == 0


def test_train_and_eval_count_while_the_module_is_kept_and_of_the_skeleton_after() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    with sl.simulate(x=2):
        apply, params = sl.parallelize(module, [("*", "...")])

        def drops() -> bool:
            return bool((sl.unshard(apply(params, X)) == 0).any())

        assert drops()
        module.eval()
        assert not drops()
        module[1].train()
        assert drops()
        apply.module.eval()
        assert not drops()
        del module
        apply.module.train()
        assert drops()


class Dropping(nn.Module):
    """Dropout that scales by a buffer, and a region that remat runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.register_buffer("by", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.by


@pytest.mark.parametrize("way", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_copied_apply_computes_the_same_apart_from_the_module(way: Any) -> None:
    """It has the training modes of the moment, a tree of its own, and does not follow the module."""
    module = Dropping().double()
    with sl.simulate(x=2):
        apply, params = sl.parallelize(module, [("*", "...")], remat=[("inner", "full")])
        module.eval()
        want = sl.unshard(apply(params, X))
        again, shared = way(apply), copy.copy(apply)
        loss = lambda f: sl.value_and_grad(lambda p: f(p, X).square().sum())(params)  # noqa: E731
        (value, grads), (wanted, theirs) = loss(again), loss(apply)
        assert torch.equal(sl.unshard(value), sl.unshard(wanted))
        assert all(torch.equal(grads[n].raw, g.raw) for n, g in theirs.items())
        module.train()
        assert torch.equal(sl.unshard(again(params, X)), want)
        assert (sl.unshard(shared(params, X)) == 0).any()
        assert again.module is not apply.module and shared.module is apply.module
        again.module.inner[0].register_forward_hook(lambda m, i, o: 2 * o)
        assert torch.allclose(sl.unshard(again(params, X)), 2 * want)
    assert set(module.state_dict()) == set(again.module.state_dict()) == set(dict(params)) | {"by"}


class Leaves(nn.Module):
    """Leaves something behind, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.seen: list[Any] = []
        self.total = torch.zeros(3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "number":
            self.calls += 1
        if self.how == "list":
            self.seen.append(1)
        if self.how == "tensor":
            self.total += 1.0
        if self.how == "new":
            self.last = x
        if self.how == "buffer":
            self.count += 1
        if self.how == "same":
            self.calls = 0
        return x * 2


@pytest.mark.parametrize(
    ("how", "name"),
    [("number", "calls"), ("list", "seen"), ("tensor", "total"), ("new", "last")],
)
def test_what_forward_leaves_behind_is_reported(how: str, name: str) -> None:
    model = nn.Sequential(nn.Identity(), Leaves(how))
    with sl.simulate(x=2):
        apply, params = sl.parallelize(model, [])
        apply(params, torch.ones(2))  # unseen outside check mode
        with sl.check(), pytest.warns(UserWarning, match=f"attribute '{name}' of 1") as seen:
            apply(params, torch.ones(2))
        assert len(seen) == 1


@pytest.mark.parametrize("how", ["nothing", "buffer", "same"])
def test_a_pure_forward_is_not_reported(how: str) -> None:
    with sl.simulate(x=2), sl.check(), warnings.catch_warnings():
        warnings.simplefilter("error")
        apply, params = sl.parallelize(nn.Sequential(Leaves(how)), [])
        apply(params, torch.ones(2))
