"""A skeleton is the module without weights: nothing in it
leads back, and what is the user's is shared.
"""

import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.modules.weightless_copy import Around, copied, skeleton

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    """One linear layer; what derives from it leads back to itself in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.tie()
        self.double()

    def tie(self) -> None:
        """Make what leads back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


class Listed(Base):
    def tie(self) -> None:
        self.held = [self.linear.weight, {"bias": (self.linear.bias,)}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias) + self.shift


class Unregistered(Base):
    """A submodule that lies in a list too."""

    def tie(self) -> None:
        self.line = [self.linear]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line[0](x) + self.shift


class Parent(Base):
    """A child that knows its parent."""

    def tie(self) -> None:
        object.__setattr__(self.linear, "parent", self)
        object.__setattr__(self.linear, "weakly", weakref.ref(self))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear.parent.linear(x) + self.linear.weakly().shift  # type: ignore[operator, union-attr]


class Patched(Base):
    """forward replaced as wrappers of models do: a closure over the old one."""

    def tie(self) -> None:
        old = self.forward

        @functools.wraps(old)
        def forward(x: torch.Tensor) -> torch.Tensor:
            return old(x) * 2

        self.forward = forward


class Accelerated(Base):
    """forward replaced as accelerate does: a partial of a function of the module."""

    def tie(self) -> None:
        old = self._old_forward = self.forward

        def new(module: Any, *args: Any) -> torch.Tensor:
            return module._old_forward(*args) * 3

        self.forward = functools.update_wrapper(functools.partial(new, self), old)


class Hooked(Base):
    """Hooks that are bound methods, closures and partials."""

    def tie(self) -> None:
        self.register_forward_pre_hook(self.before)
        self.linear.register_forward_hook(lambda m, i, o: o + self.shift)
        self.register_forward_hook(functools.partial(self.after, 2.0))
        self.register_load_state_dict_pre_hook(lambda module, *rest: module.shift)

    def before(self, module: nn.Module, given: Any) -> Any:
        return (given[0] @ self.linear.weight,)

    def after(self, by: float, module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        assert module.linear is self.linear  # a hook is given the module that runs
        return out * by


class Tied(Base):
    def tie(self) -> None:
        self.other = nn.Linear(4, 4)
        self.other.weight = self.linear.weight
        self.same = self.linear
        self.other.register_buffer("shift", self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.same(x)) + self.other.shift


class Normed(Base):
    def tie(self) -> None:
        parametrizations.weight_norm(self.linear)


class Uncopiable(Base):
    """What deepcopy refuses is shared."""

    def tie(self) -> None:
        self.lock, self.generator = threading.Lock(), (i for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.linear(x) + self.shift


class Recurrent(Base):
    def tie(self) -> None:
        self.rnn = nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x[None])[0][0] + self.linear(x)


class Compiled(Base):
    def tie(self) -> None:
        self.linear = torch.compile(self.linear, backend="eager")  # type: ignore[assignment]


class Circular(Base):
    def tie(self) -> None:
        self.held: list[Any] = [self.linear]
        self.held.append(self.held)

        def even(n: int) -> Any:
            return self if n == 0 else odd(n - 1)

        def odd(n: int) -> Any:
            return even(n - 1)

        self.find = even

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.find(2).held[0](x)


WAYS = [Base, Listed, Unregistered, Parent, Patched, Accelerated, Hooked, Tied, Normed, Uncopiable,
        Recurrent, Compiled, Circular]  # fmt: skip


def storages(tensors: Any) -> dict[int, int]:
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors  # one under vmap has no storage
        if t.device.type != "meta" and not torch._C._functorch.is_batchedtensor(t)
    }


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    module(X).square().sum().backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_module_is_freed_and_apply_computes_what_it_did(way: type[Base]) -> None:
    module = way()
    want, grads = module(X).detach(), gradients(module)
    module.zero_grad()
    before = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    with sl.simulate(x=2):
        apply, params = sl.parallelize(module, [("*", "...")], inputs={"x": "x ."})
        for _ in range(2):  # with the module, and without
            got, found = sl.value_and_grad(lambda p: apply(p, X).square().sum())(params)
            assert torch.allclose(sl.unshard(apply(params, X)), want) and torch.allclose(
                sl.unshard(got), want.square().sum()
            )
            assert {n for n in found if found[n] is not None} >= set(grads)
            assert all(torch.allclose(sl.unshard(found[n]), g) for n, g in grads.items())
            if module is not None:
                assert {k: v for k, v in vars(module).items() if not k.startswith("_")} == before
                assert torch.equal(module(X), want), "the module is the caller's"
                weights = [weakref.ref(p) for p in module.parameters()]
                module, before = None, {}  # type: ignore[assignment]
                gc.collect()
                if way is not Normed:  # its class, which the skeleton shares, closes over the layer
                    assert not [w for w in weights if w() is not None], "apply leads to a weight"
        if way is Hooked:  # as_module's hooks see what a caller gives and gets: plain tensors
            return
        top = sl.as_module(apply, params)
        assert torch.allclose(top(X), want)
        top(X).square().sum().backward()
        for n, p in top.named_parameters():
            assert n not in grads or torch.allclose(sl.unshard(p.grad), grads[n]), n


def test_hooks_of_ones_own_run_and_see_what_runs() -> None:
    module, seen = Base(), []
    module.linear.register_forward_hook(lambda m, i, o: seen.append((m, o)))
    with sl.simulate(x=2):
        apply, params = sl.parallelize(module, [("*", "...")], inputs={"x": "x ."})
        late = apply.module.register_forward_hook(lambda m, i, o: o * 2)
        out = apply(params, X)
        late.remove()
        assert len(seen) == 1 and seen[0][0] is apply.module.linear
        assert torch.equal(sl.unshard(out), 2 * sl.unshard(apply(params, X)))
        assert not module._forward_hooks


def test_a_skeleton_has_the_shapes_dtypes_and_ties_of_the_module() -> None:
    m = GPT(GPTConfig(vocab=32, ctx=8, layers=1, heads=4, embed=16)).bfloat16()
    m.wte.weight.requires_grad_(False)
    bare = skeleton(m)
    assert {n: (p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()} == {
        n: (p.shape, p.dtype, p.requires_grad) for n, p in bare.named_parameters()
    }
    assert bare.lm_head.weight is bare.wte.weight and not storages(bare.parameters())


def held(sequence: bool) -> tuple[int, int, int]:
    """Bytes alive more than before, after a module is dropped; those of
    blocks and buffers; those of the module.
    """
    gc.collect()
    before = storages(x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter))
    m = GPT(GPTConfig(vocab=64, ctx=16, layers=3, heads=4, embed=64))
    m.register_buffer("table", torch.ones(100))
    whole = sum(storages(m.parameters()).values())
    apply, params = sl.parallelize(m, sl.recipes.megatron1d(m, sequence=sequence))
    del m
    gc.collect()
    kept = sum(
        storages(
            [p.raw for p in params.values()] + [b.raw for b in apply.buffers.values()]
        ).values()
    )
    blocks = sum(p.raw.nbytes for p in params.values()) + sum(
        b.raw.nbytes for b in apply.buffers.values()
    )
    assert kept == blocks, "a block that is a view keeps the whole tensor"
    alive = storages(x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter))
    return sum(n for at, n in alive.items() if at not in before), blocks, whole


@pytest.mark.parametrize("sequence", [False, True])
def test_a_rank_holds_its_blocks_and_buffers_and_nothing_else(pool: Any, sequence: bool) -> None:
    for alive, blocks, whole in pool.run(held, sequence, x=4):
        assert abs(alive - blocks) <= 0.01 * blocks and blocks < 0.5 * whole


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, input: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(input) * scale


def shifted(module: nn.Module, forward: Any, by: float, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs) + by


def test_a_copy_of_the_module_has_its_own() -> None:
    """By deepcopy, pickle and the copy of a tree; two around one method, each in its turn."""
    m, x = Twice(), torch.ones(1, 2)
    Around(m, "forward", shifted, 1.0)
    Around(m, "forward", shifted, 10.0)
    Around(m.inner, "forward", shifted, 100.0)
    want = m(x, scale=2.0)
    swap = {id(p): nn.Parameter(p.detach().clone()) for p in m.parameters()}
    for again in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), copied(m, swap)[id(m)]):
        assert torch.equal(again(x, scale=2.0), want)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        assert torch.equal(again(x), torch.full((1, 2), 111.0))
        assert torch.equal(m(x, scale=2.0), want)
    assert not any(p.is_meta for p in m.parameters())
    assert all(p.is_meta for p in skeleton(m).parameters())


def test_its_signature_is_the_methods() -> None:
    m = Twice()
    before = inspect.signature(m.forward)
    Around(m, "forward", shifted, 1.0)
    Around(m, "forward", shifted, 1.0)
    assert inspect.signature(m.forward) == before
