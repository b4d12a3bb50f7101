"""What is ambient belongs to the thread, the task or the generator
that entered it, and ends with its ``with``.
"""

import asyncio
import contextlib
import contextvars
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.errors import UnexpectedComm
from shardlib.mesh import Scope, bind, scope, within
from shardlib.random import seeded


def here() -> Any:
    return scope().mesh


# ---------------------------------------------------------------- generators


def test_a_mesh_entered_in_a_generator_is_in_force_until_it_is_left_there() -> None:
    """As torch.no_grad: a suspended generator's settings are its caller's."""

    def body() -> Iterator[Any]:
        with sl.simulate(x=2) as mesh, torch.no_grad():
            yield mesh
        yield here()

    ranks = body()
    mesh = next(ranks)
    assert here() is mesh and not torch.is_grad_enabled()
    assert next(ranks) is here() is None and torch.is_grad_enabled()


def test_a_generator_that_ends_inside_its_callers_mesh_takes_its_own_along() -> None:
    def body() -> Iterator[None]:
        with sl.simulate(x=2):
            yield

    one, two = body(), body()
    next(one)
    with sl.simulate(x=5) as outer:
        next(two)
        one.close()
        two.close()
        assert here() is outer
    assert here() is None and scope().before is None


def test_one_mesh_entered_by_a_generator_and_by_its_caller_is_left_by_each() -> None:
    mesh = sl.simulate(x=2)

    def body() -> Iterator[Any]:
        with mesh:
            yield here()

    ranks = body()
    with mesh:
        assert next(ranks) is mesh
    assert here() is mesh
    ranks.close()
    assert here() is None and scope().before is None


def test_a_dropped_generator_leaves_nothing() -> None:
    def body() -> Iterator[None]:
        with sl.simulate(x=2) as mesh:
            seen.append(weakref.ref(mesh))
            yield

    seen: list[Any] = []
    ranks = body()
    next(ranks)
    del ranks
    gc.collect()
    assert here() is None and scope().before is None and seen[0]() is None


def test_a_context_manager_written_as_a_generator_is_in_force_for_its_body() -> None:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with sl.simulate(x=2), sl.trace() as t:
            yield
        assert t.bytes == 16

    with entered():
        sl.psum(torch.ones(4), "x")
        assert here().size == 2
    with contextlib.ExitStack() as stack:
        stack.enter_context(sl.simulate(x=3))
        stack.enter_context(entered())
        sl.psum(torch.ones(4), "x")
    assert here() is None


@pytest.fixture
def meshed() -> Iterator[Any]:
    with sl.simulate(x=2) as mesh:
        yield mesh


def test_a_fixture_written_as_a_generator_is_in_force_for_its_test(meshed: Any) -> None:
    assert here() is meshed


def test_a_copied_context_carries_what_surrounds_it_to_another_thread() -> None:
    def body() -> Iterator[Any]:
        with sl.simulate(x=2) as mesh, ThreadPoolExecutor(1) as pool:
            yield pool.submit(contextvars.copy_context().run, here).result() is mesh

    with sl.simulate(x=3) as mesh, ThreadPoolExecutor(1) as pool:
        assert next(body())
        assert pool.submit(contextvars.copy_context().run, here).result() is mesh
        assert pool.submit(here).result() is None


# ---------------------------------------------------------------- order, errors, decorators


def test_what_is_left_out_of_order_ends_nevertheless() -> None:
    a, b, c = sl.simulate(a=2), sl.implicit(8), sl.simulate(c=2)
    a.__enter__(), b.__enter__(), c.__enter__()
    b.__exit__(None, None, None)
    assert here() is c
    c.__exit__(None, None, None)
    assert here() is a and scope().policy.budget is None
    a.__exit__(None, None, None)
    assert here() is None and scope().before is None
    a.__exit__(None, None, None)  # of what is not in scope: nothing to end
    assert here() is None


def test_a_body_that_raises_leaves_the_scope_as_it_was() -> None:
    for entered in (sl.simulate(x=2), sl.implicit(), sl.saving(), sl.algorithm(matmul="summa"), sl.trace(),
                    bind(sl.simulate(x=2)), within(promoting=True)):  # fmt: skip
        before = scope()
        with pytest.raises(KeyError), entered:
            raise KeyError
        assert scope() is before


def test_budgets_and_pins_may_decorate_a_function() -> None:
    @sl.implicit(8)
    @sl.saving(9)
    @sl.algorithm(matmul="cannon")
    def f() -> Any:
        return scope().policy.budget, scope().policy.saving, scope().policy.pins

    assert f() == f() == (8, 9, (("matmul", "cannon"),)) and scope().policy.budget is None


def test_expected_communication_is_compared_only_where_the_body_ended() -> None:
    with pytest.raises(KeyError), sl.expect_comm(psum=1):
        raise KeyError
    with sl.simulate(x=2), pytest.raises(UnexpectedComm, match="1 psum, not 0"), sl.expect_comm():
        sl.psum(torch.ones(2), "x")


@pytest.mark.parametrize("make", [sl.simulate, sl.record])
def test_a_played_mesh_is_its_own_context_manager(make: Any) -> None:
    mesh = make(x=1)
    with mesh as entered:
        assert type(mesh) is sl.Mesh and entered is mesh is sl.current_mesh()
        assert sl.unshard(sl.shard(torch.zeros(2, device=mesh.device), "x")).shape == (2,)
    assert here() is None


def test_a_mesh_of_processes_is_its_own_context_manager(pool: Any) -> None:
    assert pool.run(_made, x=4) == [True] * 4


def _made() -> bool:
    outer = here()
    with sl.make_mesh(device=torch.get_default_device().type, x=2, y=2) as mesh:
        inside = type(mesh) is sl.Mesh and sl.current_mesh() is mesh
        value = (
            sl.unshard(sl.shard(torch.ones(2), "x") @ sl.shard(torch.ones(2, 2), "x y"))
            .sum()
            .item()
            == 4.0
        )
    return inside and value and here() is outer


# ---------------------------------------------------------------- threads and tasks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, h: Tensor) -> Tensor:
        return self.b(F.dropout(F.gelu(self.a(h)), 0.2, self.training))


RULES = [("a.weight", "x ."), ("a.bias", "x"), ("b.weight", ". x"), ("b.bias", ".")]
X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def trained(number: int) -> Iterator[tuple[list[float], Any]]:
    """Train 20 steps in a simulated mesh of its own, with a pause
    after each; last: the losses, and what moved.
    """
    generator = torch.Generator().manual_seed(number)
    module = Net().double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 4)
    losses: list[float] = []
    mesh = sl.simulate(data=2, x=2)
    with mesh, sl.trace() as t, seeded(mesh, number):
        apply, params = sl.parallelize(module, RULES, inputs={"h": "data ."})
        step = sl.value_and_grad(lambda p: apply(p, X).square().mean())
        for _ in range(20):
            loss, grads = step(params)
            assert sl.current_mesh() is mesh
            params = {n: p - 0.1 * grads[n] for n, p in params.items()}
            losses.append(loss.item())
            yield losses, None
    assert len(losses) == 20
    yield losses, (t.bytes, t.messages, t.by_axis())


def finished(number: int) -> Any:
    return list(trained(number))[-1]


@lru_cache
def alone() -> list[Any]:
    return [finished(n) for n in range(8)]


def test_eight_threads_train_as_one_and_count_their_own() -> None:
    want = alone()
    assert len({tuple(losses) for losses, _ in want}) == 8 and all(
        count[0] > 0 for _, count in want
    )
    start = threading.Barrier(8)

    def run(number: int) -> Any:
        start.wait(60)
        return finished(number)

    with sl.trace() as outside, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == want
    assert outside.bytes == 0


def test_eight_tasks_train_as_one_and_count_their_own() -> None:
    want = alone()

    async def run(number: int) -> Any:
        found = None
        for found in trained(number):  # noqa: B007 every step is followed by another task's
            await asyncio.sleep(0)
        return found

    async def main() -> list[Any]:
        return await asyncio.gather(*[run(n) for n in range(8)])

    assert asyncio.run(main()) == want


def test_a_backward_on_another_thread_is_counted_where_it_is_called() -> None:
    with sl.simulate(x=2):
        w = sl.shard(torch.ones(4), "...").requires_grad_()
        x = sl.shard(torch.ones(4), "x")
    with sl.trace() as forward:
        loss = (w * x).sum()
    with sl.trace() as backward:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(loss.backward,))
        thread.start()
        thread.join()
    assert forward.bytes > 0 and backward.bytes > 0 and forward.by_kind() == {"psum": 4}
    assert torch.equal(sl.unshard(w.grad), torch.ones(4))


class Deep(torch.autograd.Function):
    """A backward inside a backward, deeper than the engine goes on one thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, look: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.look = depth, look
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.look()
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Deep.apply(x, ctx.depth - 1, ctx.look).sum().backward()
        return grads[0], None, None


def seen_by_autograds_own_threads() -> bool:
    seen, me = [], threading.get_ident()

    def look() -> None:
        if threading.get_ident() != me:
            seen.append((here(), scope().listeners.traces))

    x = torch.ones(1, requires_grad=True)
    with sl.simulate(x=2) as mesh, sl.trace() as t:
        Deep.apply(x, 70, look).sum().backward()
    return seen[0] == (mesh, (t,))


def test_autograds_own_threads_see_what_surrounds_the_call_of_backward() -> None:
    """In another process: where autograd has threads, none can be forked.

    That process ends without finalising the interpreter. A thread of torch's
    engine that wants Python's lock at that moment is unwound by Python, which
    aborts the process: so do a quarter of the runs of plain torch that end
    right after a backward this deep.
    """
    code = (
        "import os; from tests.mesh.test_scope import *; "
        "os._exit(not seen_by_autograds_own_threads())"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=120
    )


def test_promotion_and_budgets_are_each_threads_own() -> None:
    inside, done, said = threading.Event(), threading.Event(), []

    def other() -> None:
        with within(promoting=True), sl.implicit(), sl.saving(), sl.algorithm(matmul="summa"):
            inside.set()
            assert done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    said = [
        scope().call.promoting,
        scope().policy.budget,
        scope().policy.saving,
        scope().policy.pins,
    ]
    done.set()
    thread.join()
    assert said == [False, None, None, ()]


def test_one_mesh_entered_in_two_threads_gives_each_its_own_back() -> None:
    shared, both, out = sl.simulate(x=2), threading.Barrier(2), []

    def run() -> None:
        with sl.simulate(q=7) as outer:
            both.wait(30)
            with shared:
                both.wait(30)
            both.wait(30)
            out.append(here() is outer)
        out.append(here() is None)

    thread = threading.Thread(target=run)
    thread.start()
    both.wait(30)
    with shared:
        both.wait(30)
    both.wait(30)
    out.append(here() is None)
    thread.join()
    assert out == [True] * 3


# ---------------------------------------------------------------- nothing is kept alive


def _used(mesh: Any) -> None:
    with mesh:
        a, b = (sl.shard(torch.ones(4, 4), "x y").requires_grad_() for _ in range(2))
        torch.softmax(torch.einsum("ij,jk->ik", a, b) @ b, 0).sum().backward()
        padded = sl.shard(torch.ones(5, 3), "x y", pad=True)
        (
            (padded @ padded.mT).sum(),
            a[torch.tensor([0, 3])],
            torch.rand_like(a),
            sl.random.get_state(),
        )
        with sl.implicit():
            a.cumsum(0)
        q = sl.shard(torch.ones(1, 2, 8, 4), ". . (x y) .")
        sl.ring_attention(q, q, q, mask=sl.masks.Causal())


def test_a_mesh_dies_after_its_last_use() -> None:
    mesh = sl.simulate(x=2, y=2)
    _used(mesh)
    gone = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------- groups of settings


def test_a_setting_is_changed_by_its_own_name_and_the_others_stay() -> None:
    with (
        sl.simulate(x=2) as mesh,
        sl.implicit(8),
        within(promoting=True, pins=(("matmul", "summa"),)),
    ):
        now = scope()
        assert now.policy == (now.policy.pins, 8, None, None, "auto", False)
        assert now.policy.pins == (("matmul", "summa"),) and now.call.promoting is True
        with within(keys=[3], budget=None):
            assert scope().random.keys == [3] and scope().policy == now.policy._replace(budget=None)
            assert scope().mesh is mesh and scope().call is now.call
    with pytest.raises(KeyError, match="unheard_of"), within(unheard_of=1):
        pass


def test_no_two_settings_have_one_name() -> None:
    names = [*Scope._fields, *(f for g in Scope() if hasattr(g, "_fields") for f in g._fields)]
    assert len(names) == len(set(names))
