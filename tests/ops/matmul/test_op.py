"""The way from torch's spelling to an algorithm, and what the first
of a value's products leaves for the next.
"""

import gc
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.ops.matmul import summa
from tests.ops.cases import PRODUCTS, run_on_meshes
from tests.workers import Pool

PACKAGE = Path(sl.__file__).parent


def test_a_product_is_five_files_above_summa_s_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but dispatch, the operation, the autograd
    function and the 2D schedule stand between.
    """
    ways: list[list[str]] = []
    real = summa.ahead

    def seen(*args: Any) -> Any:
        files = [Path(f.filename) for f in traceback.extract_stack()[:-1]]
        ways.append([str(f.relative_to(PACKAGE)) for f in files if PACKAGE in f.parents])
        return real(*args)

    monkeypatch.setattr(summa, "ahead", seen)
    with sl.simulate(x=2, y=2):
        a = sl.shard(torch.ones(8, 8), "x y")
        _ = a @ a
        F.linear(a, sl.shard(torch.ones(8, 8), "y x"))
    for way in ways:
        opened = list(dict.fromkeys(way))
        assert opened[-4:] == [
            f"ops/matmul/{f}.py" for f in ("op", "function", "matmul2d", "summa")
        ]
        assert len(opened) <= 5, opened
    assert len(ways) == 2


def test_a_layout_asked_for_is_given_or_refused_whatever_was_asked_before() -> None:
    """A weight's own wish may be cut to; one of ``out=`` may not."""
    with sl.simulate(x=2):
        x, w = sl.shard(torch.ones(4, 8), ". ."), sl.shard(torch.ones(8, 6), "x .")
        for _ in range(2):
            assert sl.typeof(x @ w) == "f32[4, 6]"
            assert sl.typeof(sl.matmul(x, w, out="x .")) == "f32[4@x, 6]"
            with pytest.raises(sl.ShardError):
                sl.matmul(x, sl.shard(torch.ones(8, 6), ". ."), out=". x")


@pytest.mark.parametrize(
    "x, w, out",
    [
        (". x", "x .", ". . + sum(x)"),
        (". x", "x .", ". . + sum(y)"),
        ("x .", ". .", "x . + sum(y)"),
    ],
)
def test_no_product_is_left_pending_and_a_layout_that_asks_for_it_is_refused(
    x: str, w: str, out: str
) -> None:
    with sl.simulate(x=2, y=2):
        a, b = sl.shard(torch.ones(4, 4), x), sl.shard(torch.ones(4, 4), w)
        with pytest.raises(sl.ShardError, match="its algorithm ends the sum"):
            sl.matmul(a, b, out=out)


def test_a_bias_is_added_by_every_algorithm() -> None:
    bias = torch.arange(8.0)
    with sl.simulate(x=2, y=2):
        a, b = sl.shard(torch.eye(8), "x y"), sl.shard(torch.eye(8), "y x")
        for name in ("summa", "summa_x", "summa_w", "cannon", "mm3", "mm3_xw"):
            for w in (a, b):
                for dtype in (torch.float32, torch.bfloat16):
                    with sl.saving(), sl.algorithm(matmul=name):
                        held = sl.shard(bias.to(dtype), (a @ w.mT).sharding.dims[-1].axes[0])
                        got = F.linear(a.to(dtype), w.to(dtype), held)
                    assert torch.equal(sl.unshard(got).float(), torch.eye(8) + bias), (name, dtype)


def deferred_biases() -> list[bool]:
    """Run by every rank: whether torch's own function adds the bias, and each gradient is dense's."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (8, 6), "w": (4, 6), "b": (4,)}
    whole = {k: torch.randn(s, generator=draw, dtype=torch.float64) for k, s in shapes.items()}
    leaves = {k: v.clone().requires_grad_() for k, v in whole.items()}
    weight = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    (F.linear(*leaves.values()) * weight).sum().backward()
    found = []
    for layouts in (("data .", ". .", "."), ("data .", "x .", "x"), ("data x", ". x", ".")):
        with torch.no_grad():
            laid = {k: sl.shard(v, how) for (k, v), how in zip(whole.items(), layouts, strict=True)}
        for k in "wb":
            laid[k] = laid[k].at(laid[k].place._replace(deferred=frozenset({"data"})))
        for v in laid.values():
            v.requires_grad_()
        y = F.linear(*laid.values())
        found.append(type(y.raw.grad_fn).__name__ != "AddBackward0")
        (y * sl.shard(weight, y.sharding)).sum().backward()
        for k, v in laid.items():
            assert isinstance(v.grad, sl.ShardedTensor)
            assert v.grad.sharding.partial == (("data",) if k in "wb" else ())
            torch.testing.assert_close(sl.unshard(v.grad), leaves[k].grad)
    return found


def test_a_bias_whose_gradient_is_deferred_is_added_inside(pool: Pool) -> None:
    assert pool.run(deferred_biases, data=2, x=2) == [[True, True, False]] * 4


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 4), (1, 1, 1, 4)])
def test_a_bias_does_not_enlarge_the_result(shape: tuple[int, ...]) -> None:
    x, w, bias = torch.ones(1, 6), torch.ones(4, 6), torch.ones(shape)
    with pytest.raises(RuntimeError):
        F.linear(x, w, bias)
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="would enlarge a result"):
        F.linear(sl.shard(x, ". ."), sl.shard(w, "x ."), sl.shard(bias, "..."))


def test_a_product_without_bias_is_changed_in_place() -> None:
    with sl.simulate(x=2, y=2):
        x, w = (
            sl.shard(torch.ones(2, 4, 4), "x . y"),
            sl.shard(torch.ones(4, 4), "y x").requires_grad_(),
        )
        y = F.linear(x, w)
        y += 1
        F.relu(y, inplace=True).sum().backward()
        assert (
            float(y.sum().detach()) == 2 * 4 * 4 * 5
            and float(sl.unshard(w.grad).sum()) == 2 * 4 * 16
        )


@pytest.mark.parametrize("name", PRODUCTS)
def test_torch_s_spellings_of_a_product_equal_dense(name: str) -> None:
    run_on_meshes(name)


@pytest.mark.parametrize(
    ("left", "right"), [("x . .", "x y ."), ("x . .", ". . ."), ("y . x", ". x .")]
)
def test_what_a_product_read_is_freed_without_a_garbage_collection(left: str, right: str) -> None:
    """Also where no algorithm takes its operands as they are, and they are contracted."""
    with sl.simulate(x=2, y=2):
        gc.disable()
        try:
            a, b = sl.shard(torch.rand(4, 6, 8), left), sl.shard(torch.rand(4, 8, 4), right)
            raws = weakref.ref(a.raw), weakref.ref(b.raw)
            assert (a @ b).shape == (4, 6, 4)
            del a, b
            assert [raw() for raw in raws] == [None, None]
        finally:
            gc.enable()
