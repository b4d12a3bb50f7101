"""Boxes copied by kernels: the very elements, wherever they lie."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.kernels import pack as module
from shardlib.kernels.active import Backend
from shardlib.kernels.pack import at_front, box, copy_box, copy_box_, dense, index, pack, unpack
from tests.kernels.host import built, check_operator, needs_host
from tests.kernels.properties import COUNT, boxes
from tests.workers import Pool


@needs_host
def test_kernels_copy_every_element() -> None:
    assert built()
    for seed in range(COUNT):
        boxes(seed)


WHERE = box([range(1, 3), (4, 0, 2)], [5, 1], torch.device("cpu"))


@pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=needs_host)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_operators_are_torchs(backend: Backend, dtype: torch.dtype) -> None:
    assert backend == "auto" or built()
    x = torch.arange(20).view(4, 5).to(dtype)
    if dtype.is_floating_point:
        x.requires_grad_()
    with sl.kernels.use(backend):
        check_operator(pack, (x, *WHERE), dtype == torch.float32)
        block = pack(x, *WHERE)
        assert torch.equal(block, x[1:3][:, [4, 0, 2]])
        check_operator(unpack, (block.detach(), [4, 5], *WHERE))
        back = unpack(block, [4, 5], *WHERE)
        check_operator(
            copy_box_,
            (x.detach().clone(), block.detach(), WHERE.size, *at_front(WHERE.size), *WHERE[1:]),
        )
        if dtype.is_floating_point:
            (g,) = torch.autograd.grad(back.sum(), x)
            assert torch.equal(g, (back != 0).to(dtype))


@needs_host
def test_a_box_of_no_dimensions_is_one_element() -> None:
    assert built()
    with sl.kernels.use("native"):
        into = torch.zeros(())
        copy_box(into, torch.tensor(3.0), [], [])
    assert into == 3 and index(box([], [], torch.device("cpu"))).tolist() == [0]


@needs_host
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1, 3), (0, 2, 1, 3), (1, 2, 0), (0, 1, 2)])
def test_dense_is_contiguous(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert built()
    used = []
    real = module.call
    monkeypatch.setattr(module, "call", lambda *a: (used.append(a[0]), real(*a)))
    x = torch.randn([3, 5, 4, 6][: len(order)])[1:].permute(order)
    with sl.kernels.use("native"):
        y = dense(x)
    assert y.is_contiguous() and torch.equal(x, y)
    moves_rows = order[-1] == len(order) - 1 and list(order) != sorted(order)
    assert bool(used) is moves_rows


PAIRS = [
    ("x . y", "y . x"),
    ("x zigzag(y) .", ". x y"),
    (". zigzag(x) .", "y . x"),
    ("(x y) . .", ". . (y x)"),
    (". striped(x) y", "x . y"),
]


def moved(source: str, target: str, backend: Backend, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 12).to(dtype)
    with sl.kernels.use(backend), sl.trace() as t:
        a = sl.shard(x, source).requires_grad_()
        y = sl.reshard(a, target)
        (g,) = torch.autograd.grad((y * y).sum(), a)
    return sl.unshard(y.detach()), sl.unshard(g), x, t.by_kind()


@needs_host
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_reshard_moves_the_same_elements(pair: tuple[str, str]) -> None:
    assert built()
    with sl.simulate(x=2, y=2):
        y, g, x, how = moved(*pair, "native", torch.float32)
        assert how == moved(*pair, "eager", torch.float32)[3]
    assert torch.equal(y, x) and torch.equal(g, 2 * x)


@needs_host
def test_an_exchange_is_packed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built()
    used = []
    real = module.call
    monkeypatch.setattr(module, "call", lambda *a: (used.append(a[0]), real(*a)))
    with sl.simulate(x=2, y=2), sl.kernels.use("native"):
        x = torch.arange(4 * 8.0).view(4, 8)
        y = sl.reshard(sl.shard(x, "x zigzag(y)"), "(y x) .")
    assert torch.equal(sl.unshard(y), x) and "copy" in used


def on_a_rank(source: str, target: str) -> Any:
    built()
    y, g, x, _ = moved(source, target, "native", torch.bfloat16)
    return torch.equal(y, x), torch.equal(g, 2 * x)


@needs_host
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_real_ranks_move_the_same_elements(pair: tuple[str, str], pool: Pool) -> None:
    assert pool.run(on_a_rank, *pair, x=2, y=2) == [(True, True)] * 4
