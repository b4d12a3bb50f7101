"""einops on sharded tensors: values, layouts and gradients as dense, by its own four verbs."""

from collections.abc import Callable
from typing import Any

import einops
import pytest

import shardlib as sl
from shardlib.errors import ShardError
from tests.ops.cases import close, r
from tests.workers import Pool

X = r(4, 6, 12)
# f, layout, layout of the result
LOCAL: dict[str, tuple[Callable[[Any], Any], str, str | None]] = {
    "heads apart": (lambda x: einops.rearrange(x, "b s (h d) -> b h s d", h=4), "x . y", "x y . ."),
    "heads joined": (
        lambda x: einops.rearrange(x, "b s (h d) -> (b s) h d", h=4),
        "x . y",
        "x y .",
    ),
    "transposed": (lambda x: einops.rearrange(x, "b s c -> c b s"), "x . y", "y x ."),
    "new dimension": (lambda x: einops.rearrange(x, "b s c -> b 1 s c"), "x . y", "x . . y"),
    "mean over a whole dimension": (
        lambda x: einops.reduce(x, "b s c -> b c", "mean"),
        "x . y",
        "x y",
    ),
    "sum over split ones": (lambda x: einops.reduce(x, "b s c -> s", "sum"), "x . y", "."),
    "maximum of windows": (
        lambda x: einops.reduce(x, "b (s two) c -> b s c", "max", two=2),
        "x . y",
        "x . y",
    ),
    "product over a split one": (
        lambda x: einops.reduce(x, "b s c -> b s", "prod"),
        "x . y",
        "x .",
    ),
    "repeated": (lambda x: einops.repeat(x, "b s c -> b n s c", n=3), "x . y", "x . . y"),
    "repeated inside": (lambda x: einops.repeat(x, "b s c -> b (s n) c", n=2), "x . y", "x . y"),
    "einsum": (lambda x: einops.einsum(x, x, "b s c, b t c -> b s t"), "x . y", "x . ."),
}


def check(name: str) -> Any:
    f, layout, out = LOCAL[name]
    dense = X.clone().requires_grad_()
    want = f(dense)
    ours = sl.shard(X, layout).requires_grad_()
    with sl.trace() as t:
        got = f(ours)
    if out is not None:
        assert sl.layout_of(got) == sl.Layout.parse(out).resolve(got.ndim)
    g = r(*want.shape, seed=3)
    want.backward(g)
    got.backward(sl.shard(g, sl.layout_of(got)))
    close(sl.unshard(got).detach(), want.detach())
    close(sl.unshard(ours.grad), dense.grad)
    return t.bytes


@pytest.mark.parametrize("name", LOCAL)
def test_a_pattern_means_what_it_means_dense(name: str) -> None:
    with sl.simulate(x=2, y=2):
        check(name)


def on_ranks() -> list[Any]:
    return [check(name) for name in LOCAL]


def test_real_ranks_agree(pool: Pool) -> None:
    with sl.simulate(x=2, y=2):
        want = on_ranks()
    assert pool.run(on_ranks, x=2, y=2) == [want] * 4


def test_a_pattern_through_the_blocks_is_refused_or_gathered() -> None:
    pattern = "b (three t) c -> b t three c"
    want = einops.rearrange(X, pattern, three=3)
    with sl.simulate(x=2, y=2):
        x = sl.shard(X, ". x y")
        with pytest.raises(ShardError):
            einops.rearrange(x, pattern, three=3)
        with sl.implicit():
            close(sl.unshard(einops.rearrange(x, pattern, three=3)), want)
