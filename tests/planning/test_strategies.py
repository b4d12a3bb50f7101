"""What a call is found to cost is what it takes where it runs."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib.errors import NoImplementation
from shardlib.mesh import Link, within
from shardlib.ops.matmul import function
from shardlib.planning.calls import calls_of
from shardlib.planning.strategies import Table, operand_of
from shardlib.planning.work import Rates
from shardlib.recompute import Kept

CASES = [
    ("x .", ". ."),
    ("x .", "x ."),
    (". x", "x ."),
    ("x y", "y x"),
    (". .", "x y"),
    ("(x y) .", ". ."),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "weight"), CASES)
def test_bytes_and_messages_are_those_of_a_run(rows: str, weight: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(8, 16, bias=False, dtype=dtype)
    given_x = torch.empty(8, 8, dtype=dtype)
    step = calls_of(linear, (given_x,), lambda apply, params, x: apply(params, x).sum())
    call, shapes = step.calls[0], [(8, 8), (16, 8)]
    with sl.record(x=2, y=2) as mesh:
        given: list[Any] = [
            sl.shard(torch.empty(n, dtype=dtype, device="meta"), text)
            for n, text in zip(shapes, (rows, weight), strict=True)
        ]
        for x in given:
            x.requires_grad_()
        found = Table(step, mesh).ask(call, [operand_of(x) for x in given])
    assert not isinstance(found, str), found
    with sl.simulate(x=2, y=2):
        x = sl.shard(torch.randn(8, 8, dtype=dtype), rows).requires_grad_()
        w = sl.shard(torch.randn(16, 8, dtype=dtype), weight).requires_grad_()
        with sl.trace() as forward:
            out = torch.nn.functional.linear(x, w)
        with sl.trace() as back:
            out.sum().backward()
    assert str(out.sharding) == str(found.outs[0].place.layout)
    assert sum(n for n, _ in found.forward.along.values()) == forward.bytes
    sums = 0.0
    for s in found.sums:
        p = 1
        for a in s.axes:
            p *= mesh.axes[a]
        sums += s.own[0] if s.own else 2 * (p - 1) / p * s.nbytes
    assert any(s.own for s in found.sums) is (dtype.itemsize == 2 and bool(found.sums))
    # the sum's own total, a number, travels too
    own = sum(n for n, _ in found.backward.along.values()) + sums
    assert own <= back.bytes <= own + 64


@pytest.mark.parametrize(("rows", "weight"), CASES)
def test_what_is_computed_again_and_held_is_what_a_recomputation_does(
    rows: str, weight: str
) -> None:
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    step = calls_of(block, (torch.empty(8, 8),), lambda apply, params, x: apply(params, x).sum())
    product, gelu, _ = step.calls
    sizes: list[Any] = [((8, 8), rows), ((16, 8), weight), (16, "...")]
    with sl.record(x=2, y=2) as mesh:
        operands = [
            operand_of(sl.shard(torch.empty(n, device="meta").requires_grad_(), text))
            for n, text in sizes
        ]
        table = Table(step, mesh)
        plain, found = (t.ask(product, operands) for t in (table, table.holding))
        assert not isinstance(plain, str) and not isinstance(found, str)
        assert table.holding.ask(gelu, found.outs) is table.ask(gelu, found.outs)
    assert plain.again is plain.forward and not plain.held
    with sl.simulate(x=2, y=2):
        given = [sl.shard(torch.randn(n).requires_grad_(), text) for n, text in sizes]
        region = Kept()
        with within(region=region):
            region.begin()
            torch.nn.functional.linear(*given)
            region.begin()
            with sl.trace() as again:
                out = torch.nn.functional.linear(*given)
    assert sum(n for n, _ in found.again.along.values()) == again.bytes
    held = sum(
        x.nbytes for results, _ in region.results for x in results if isinstance(x, torch.Tensor)
    )
    told = sum(found.outs[-1 - k].nbytes for k in found.held) + found.held_beside
    assert told == held // 4 and held > 0
    # the bias alone is added again
    assert found.again.flops == 0.0 < plain.forward.flops
    assert str(out.sharding) == str(found.outs[0].place.layout)


class Heads(nn.Module):
    """Three products of one value: one call."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, n, bias=n == 8) for n in (16, 8, 16))

    def forward(self, x: Any) -> Any:
        q, k, v = (head(x) for head in self.heads)
        return q * v, k


@pytest.mark.parametrize("links", [(1e-9, 1e-9), (1e-9, 1e-7), (1e-7, 1e-9)])
def test_a_product_moves_at_least_what_it_says_before_it_runs(links: tuple[float, float]) -> None:
    x = torch.empty(8, 4, 16)
    step = calls_of(Heads(), (x,), lambda apply, params, x: apply(params, x)[0].sum())
    (call,) = [c for c in step.calls if c.name == "linear"]
    texts = [" ".join(two) for two in itertools.product((".", "x", "y", "(x y)"), repeat=2)]
    texts = [t for t in texts if all(t.count(a) < 2 for a in "xy")]
    moved = refused = 0
    with sl.record(x=4, y=2) as mesh:
        mesh.links = {a: Link(1e-5, beta) for a, beta in zip("xy", links, strict=True)}
        table, rates = Table(step, mesh), Rates(mesh.links, 1e12)
        for rows, weight in itertools.product(("x . .", "(x y) . .", "x . y", ". . ."), texts):
            given = []
            for r in call.reads:
                size = step.shapes[r]
                text = {3: rows, 2: weight, 1: "."}[len(size)]
                x = sl.shard(torch.empty(size, device="meta"), text).requires_grad_()
                given.append(operand_of(x))
            found = table.ask(call, given)
            try:
                said = table.moves(call, given)
            except NoImplementation:
                assert isinstance(found, str)
                refused += 1
                continue
            if said is None or isinstance(found, str):
                continue
            assert rates.least(said) <= rates.moving(found.forward.along) * (1 + 1e-9)
            moved += rates.least(said) > 0
    assert moved > 20 and refused > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("grid", [(8, 2), (3, 5), (8, 8), (2, 16)])
def test_equal_steps_of_a_loop_count_as_if_each_ran(
    grid: tuple[int, int], sliced: bool, dtype: torch.dtype, monkeypatch: Any
) -> None:
    linear = nn.Linear(960, 1920, bias=False).to(dtype)
    x = torch.empty(480, 960, dtype=dtype)
    step = calls_of(linear, (x,), lambda apply, params, x: apply(params, x).sum())
    operators, found = [], []
    with sl.record(x=grid[0], y=grid[1]) as mesh:
        if sliced:
            mesh.links = dict.fromkeys("xy", Link(1e-6, 1e-9))
        given = [
            operand_of(
                sl.shard(torch.empty(size, dtype=dtype, device="meta"), "x y").requires_grad_()
            )
            for size in ((480, 960), (1920, 960))
        ]
        for rounds in (function._ROUNDS, 10_000):
            monkeypatch.setattr(function, "_ROUNDS", rounds)
            with _Operators() as ran:
                found.append(Table(step, mesh).ask(step.calls[0], given))
            operators.append(ran.count)
    assert not isinstance(found[0], str) and vars(found[0]) == vars(found[1])
    assert operators[0] < operators[1]


class _Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_call_under_no_layouts_says_why() -> None:
    linear = nn.Linear(8, 16, bias=False)
    step = calls_of(linear, (torch.empty(8, 8),), lambda apply, params, x: apply(params, x).sum())
    with sl.record(x=2, y=2) as mesh:
        x, w = (
            sl.shard(torch.empty(s, device="meta"), t)
            for s, t in [((8, 8), "y x"), ((16, 8), "y x")]
        )
        found = Table(step, mesh).ask(step.calls[0], [operand_of(x), operand_of(w)])
    assert isinstance(found, str) or found.forward.along
