"""A mask of one's own is right with ``allowed`` alone, on every engine and back end."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardlib as sl
from shardlib.layouts import Ring
from shardlib.layouts.orders import Run
from shardlib.ops.attention.case import attention_case
from shardlib.ops.attention.masks import SOMETHING, At
from shardlib.testing import check_mask
from shardlib.testing import dense_attention as attention
from tests.ops.attention.test_op import gap, normal
from tests.strategies import examples

ENGINES = [
    "ring",
    "ring_bidirectional",
    "double_ring",
    "allgather",
    "ulysses",
    "usp",
    "pass_q",
    "rsa",
    "canonical",
    "auto",
]


@dataclass(frozen=True)
class Modulo(sl.masks.Mask):
    """q a + k b + head + batch is no multiple of n."""

    n: int
    a: int = 1
    b: int = 1

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        which = at.heads[:, None, None] + at.batch[:, None, None, None]
        return (q[:, None] * self.a + k * self.b + which) % self.n != 0


class Sparse(sl.masks.Causal):
    """A mask of ours with other booleans: what Causal says of runs does not hold for it."""

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        return (q[:, None] >= k) & (k % 3 != 1)


class Recency(sl.masks.Full):
    """``scores`` alone: later keys weigh more."""

    def scores(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        return 0.1 * k.double() - 0.01 * q[:, None]


@dataclass(frozen=True)
class Careless(sl.masks.Mask):
    """Writes to the positions that it is given."""

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        q += 1
        k *= 2
        return q[:, None] >= k // 2


@st.composite
def own_masks(draw: Any) -> sl.masks.Mask:
    out = draw(
        st.sampled_from([Sparse(), Recency(), Careless()])
        | st.builds(Modulo, *[st.integers(1, 5)] * 3)
    )
    return out & draw(
        st.sampled_from(
            [
                sl.masks.Full(),
                sl.masks.Causal(),
                sl.masks.Window(4),
                Recency(),
                sl.masks.Padding([7, 9]),
            ]
        )
    )


@examples(40)
@given(
    own_masks(),
    st.sampled_from(ENGINES),
    st.integers(1, 20),
    st.sampled_from(["contiguous", "zigzag", "striped"]),
)
def test_a_mask_of_one_s_own_is_dense_s_on_every_engine(
    mask: sl.masks.Mask, engine: str, n: int, order: str
) -> None:
    assert worst(mask, engine, n, order, {"r": 2, "s": 2}) < 1e-12


def worst(
    mask: sl.masks.Mask, engine: str, n: int, order: str, mesh: dict[str, int] | None = None
) -> float:
    """The error of output and gradients, on simulated ranks or on those of the mesh in scope."""
    q, k, v = (normal(2, h, n, 4, seed=h).requires_grad_() for h in (4, 2, 2))
    want, _ = attention(q, k, v, mask)
    c = normal(*want.shape, seed=7)
    wanted = torch.autograd.grad((want * c).sum(), (q, k, v))

    def ours() -> float:
        layout = Ring(tuple(sl.current_mesh().axes), 2, order)
        xs = [sl.shard(x.detach(), layout, pad=True).requires_grad_() for x in (q, k, v)]
        out = sl.ring_attention(*xs, mask=mask, algorithm=engine)
        (out * sl.shard(c, layout, pad=True)).sum().backward()
        pairs = zip([out, *(x.grad for x in xs)], [want.detach(), *wanted], strict=True)
        return max(gap(sl.unshard(a), b) for a, b in pairs)

    if mesh is None:
        return ours()
    with sl.simulate(**mesh):
        return ours()


def on_every_engine() -> dict[tuple[str, str], float]:
    masks = [Modulo(3, 2), Sparse(), Recency() & sl.masks.Causal(), Careless()]
    return {
        (repr(m), e): worst(m, e, 13, "zigzag")
        for i, m in enumerate(masks)
        for j, e in enumerate(ENGINES)
        if (i + j) % 2 == 0  # every mask, every engine
    }


def test_it_is_on_real_processes_too(pool: Any) -> None:
    for found in pool.run(on_every_engine, r=2, s=2):
        assert all(error < 1e-12 for error in found.values()), found


@pytest.mark.parametrize(
    "mask", [Modulo(4, 3), Sparse(), Recency(), sl.masks.Causal() & Modulo(2)], ids=repr
)
def test_it_keeps_the_laws(mask: sl.masks.Mask) -> None:
    check_mask(mask, engines=("ring", "allgather"))


def test_a_mask_says_nothing_of_runs_unless_it_does() -> None:
    run = Run(0, 1, 4)
    assert Modulo(3).relation(run, run) == Sparse().relation(run, run) == SOMETHING
    assert sl.masks.Causal().relation(run, run) != SOMETHING

    class Bounded(sl.masks.Causal):
        def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
            return q[:, None] >= k

        def relation(self, q: Run, k: Run) -> Any:
            return sl.masks.Causal().relation(q, k)

    assert Bounded().relation(run, run) == sl.masks.Causal().relation(run, run)


def test_a_mask_without_allowed_cannot_be_made() -> None:
    class Empty(sl.masks.Mask):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Empty()  # type: ignore[abstract]


def test_the_laws_find_a_relation_that_lies() -> None:
    class Lying(sl.masks.Causal):
        def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
            return q[:, None] > k

        def relation(self, q: Run, k: Run) -> Any:
            return sl.masks.Causal().relation(q, k)

    with pytest.raises(AssertionError, match="relation and allowed"):
        check_mask(Lying())


def test_answers_that_are_no_booleans_are_refused() -> None:
    class Numbers(sl.masks.Mask):
        def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
            return (q[:, None] - k) % 2

    class Transposed(sl.masks.Mask):
        def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
            return torch.ones(len(k) + 1, len(q), dtype=torch.bool)

    with sl.simulate(s=2):
        x = sl.shard(normal(1, 1, 8, 4, seed=1), Ring("s", 2))
        for mask in (Numbers(), Transposed()):
            with pytest.raises(sl.ShardError, match="gives booleans that broadcast"):
                sl.ring_attention(x, x, x, mask=mask)


def test_a_mask_that_cannot_be_hashed_is_refused() -> None:
    @dataclass
    class Listed(sl.masks.Mask):
        lengths: list[int]

        def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
            return k < self.lengths[0]

    with sl.simulate(s=2):
        x = sl.shard(normal(1, 1, 8, 4, seed=1), Ring("s", 2))
        with pytest.raises(sl.ShardError, match="cannot be hashed"):
            sl.ring_attention(x, x, x, mask=Listed([3]))


def test_a_documents_mask_is_made_again_from_its_value() -> None:
    mask = sl.masks.Documents(torch.tensor([[0, 0, 1], [0, 1, 1]]))
    assert replace(mask) == mask


def test_masks_for_other_sizes_are_refused_before_a_plan_is_made() -> None:
    with sl.simulate(s=2):
        x = sl.shard(normal(1, 1, 8, 4, seed=1), Ring("s", 2))
        with pytest.raises(sl.ShardError, match="documents of 1 x 5"):
            attention_case(x, x, x, sl.masks.Documents((0, 5)))
