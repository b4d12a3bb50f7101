"""Gradients summed together: the same sums, the same bytes, fewer transfers; where they may not wait
they are summed at once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.tensor import Together

SIZES = {"w": (6, 5), "b": (6,), "n": (5,), "s": (), "e": (7, 5), "u": (3,), "z": (0,)}


def drawn(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {k: torch.randn(s, generator=draw, dtype=dtype) for k, s in SIZES.items()}


def loss(p: Any, ids: Tensor, x: Tensor) -> Tensor:
    """Weights read once, twice and transposed, a scalar, a table, one that is not used; and a term
    that meets no data."""
    h = F.layer_norm(x + F.embedding(ids, p["e"]), (5,), p["n"])
    y = F.linear(h, p["w"], p["b"]) @ p["w"] * p["s"] + p["n"]
    return y.square().mean() + p["w"].square().sum() * 0.1 + p["b"].sum()


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 7, (12,), generator=draw)
    return ids, torch.randn(12, 5, generator=draw, dtype=torch.float64)


def whole() -> dict[str, Tensor]:
    params = {k: v.requires_grad_() for k, v in drawn().items()}
    found = torch.autograd.grad(loss(params, *data()), list(params.values()), allow_unused=True)
    return {
        k: torch.zeros_like(p) if g is None else g
        for (k, p), g in zip(params.items(), found, strict=True)
    }


def measured(axes: str) -> tuple[float, tuple[int, int], tuple[int, int]]:
    """Error of all gradients; bytes and transfers, together and one by one."""
    ids, x = data()
    params = sl.shard(drawn(), "...")
    args = sl.shard(ids, f"({axes})"), sl.shard(x, f"({axes}) .")
    with sl.trace() as t:
        _, grads = sl.value_and_grad(loss)(params, *args)
    apart = {k: p.detach().requires_grad_() for k, p in params.items()}
    with sl.trace() as one_by_one:
        loss(apart, *args).backward()
    want = whole()
    errors = [float((sl.unshard(g) - want[k]).abs().amax()) for k, g in grads.items() if g.numel()]
    assert all(g.sharding == params[k].sharding for k, g in grads.items())
    return max(errors), *((c.bytes, len(c.events)) for c in (t, one_by_one))  # type: ignore[return-value]


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 3}, {"data": 4}, {"data": 2, "x": 2}])
def test_gradients_equal_dense_and_bytes_are_those_of_each_by_itself(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        error, together, apart = measured(" ".join(axes))
    assert error < 1e-12
    assert together[0] == apart[0]
    assert together[1] < apart[1]


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "x": 2}])
def test_real_ranks_give_and_move_the_same(pool: Any, axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        simulated = measured(" ".join(axes))
    for error, together, apart in pool.run(measured, " ".join(axes), **axes):
        assert error < 1e-12
        assert (together, apart) == simulated[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_each_by_itself_bit_for_bit(dtype: torch.dtype) -> None:
    def f(p: Any, x: Tensor) -> Tensor:
        return (F.layer_norm(x, (8,), p["w"], p["b"]) + p["w"] * x).float().square().sum()

    with sl.simulate(data=4):
        params = {k: sl.shard(torch.randn(8, dtype=dtype), "...") for k in "wb"}
        x = sl.shard(torch.randn(16, 8, dtype=dtype), "data .")
        _, grads = sl.value_and_grad(f)(params, x)
        apart = {k: p.detach().requires_grad_() for k, p in params.items()}
        f(apart, x).backward()
    for k, p in apart.items():
        assert torch.equal(grads[k].raw, p.grad.raw), k  # type: ignore[union-attr]


def test_a_bucket_is_posted_while_backward_goes_on() -> None:
    def f(p: Any, x: Tensor) -> Tensor:
        for w in p:
            x = torch.tanh(x @ w)
        return x.sum()

    seen: list[int] = []
    take = Together.take

    def counted(self: Together, *args: Any) -> None:
        take(self, *args)
        seen.append(len(self.flying))

    with sl.simulate(data=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Together, "take", counted)
        params = [sl.shard(torch.randn(512, 512) / 20, "...") for _ in range(6)]
        sl.value_and_grad(f)(params, sl.shard(torch.randn(4, 512), "data ."))
    assert len(seen) == 6 and seen[-1] > 1  # of 6 MiB, a fifth each


def test_a_hook_hears_the_sum_and_an_inner_backward_gets_it() -> None:
    heard: list[Tensor] = []
    inner: list[Tensor] = []

    def hooked(p: Any, x: Tensor) -> Tensor:
        p["a"].register_hook(lambda g: heard.append(sl.unshard(g)))
        y = (x * p["a"] * p["b"]).sum()
        (g,) = torch.autograd.grad(y, p["b"], retain_graph=True)
        inner.append(sl.unshard(g))
        return y

    with sl.simulate(data=2):
        params = {k: sl.shard(torch.full((4,), v), "...") for k, v in (("a", 2.0), ("b", 3.0))}
        x = sl.shard(torch.ones(6, 4), "data .")
        _, grads = sl.value_and_grad(hooked)(params, x)
    assert torch.equal(heard[0], torch.full((4,), 18.0))
    assert torch.equal(inner[0], torch.full((4,), 12.0))
    assert [float(sl.unshard(grads[k])[0]) for k in "ab"] == [18.0, 12.0]


def stepped(copies: bool) -> tuple[dict[str, Tensor], bool]:
    """Parameters after a step in place; whether gradients lay in one memory before it."""
    ids, x = data()
    params = sl.shard(drawn(), "...")
    tx = sl.optim.adamw(0.1)
    _, grads = sl.value_and_grad(loss)(params, sl.shard(ids, "data"), sl.shard(x, "data ."))
    if copies:
        grads = {k: g.becomes(g.raw.clone()) for k, g in grads.items()}
    shared = len({grads[k].raw.untyped_storage().data_ptr() for k in "se"}) == 1
    new, *_ = sl.optim.step(tx, params, grads, tx.init(params))
    return {k: sl.unshard(p) for k, p in new.items()}, shared


def test_steps_in_place_take_gradients_that_are_parts_of_one_vector(pool: Any) -> None:
    def alike(found: Callable[[bool], Any]) -> None:
        (one, parts), (two, own) = found(False), found(True)
        assert parts and not own
        assert all(torch.equal(one[k], two[k]) for k in one)

    with sl.simulate(data=2):
        alike(stepped)
    alike(lambda copies: pool.run(stepped, copies, data=4)[0])
