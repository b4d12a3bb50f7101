"""Each contraction is the einsum that it stands for: values, layout and bytes."""

from typing import Any

import pytest
import torch

import shardlib as sl

R = torch.Generator().manual_seed(0)
M, N, V = (torch.randn(*s, dtype=torch.float64, generator=R) for s in ((4, 6), (6, 4), (6,)))
CASES: dict[str, tuple[Any, str, tuple[tuple[torch.Tensor, str], ...]]] = {
    "outer": (torch.outer, "i,j->ij", ((V, "x"), (V, "y"))),
    "inner": (torch.inner, "i,i->", ((V, "x"), (V, "x"))),
    "matmul": (torch.matmul, "ij,jk->ik", ((M, "x y"), (N, "y ."))),
    "mv": (torch.mv, "ij,j->i", ((M, "x y"), (V, "y"))),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, ([1], [0])),
        "ij,jk->ik",
        ((M, ". y"), (N, "y x")),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_its_einsum(name: str) -> None:
    f, equation, operands = CASES[name]
    with sl.simulate(x=2, y=2):
        given = [sl.shard(t, where) for t, where in operands]
        moved, found = [], []
        for call in (lambda: f(*given), lambda: torch.einsum(equation, *given)):
            with sl.trace() as t:
                found.append(call())
            moved.append(t.bytes)
        want = torch.einsum(equation, *(t for t, _ in operands))
        assert all(torch.allclose(sl.unshard(y), want) for y in found)
    assert moved[0] == moved[1] and found[0].sharding == found[1].sharding


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (2.0, 0.5)])
def test_a_summand_is_scaled_and_ignored_where_beta_is_zero(beta: float, alpha: float) -> None:
    c = torch.full((4, 4), float("nan") if beta == 0 else 1.0, dtype=torch.float64)
    with sl.simulate(x=2, y=2):
        placed = [sl.shard(t, w) for t, w in ((c, "x ."), (M, "x y"), (N, "y ."))]
        out = torch.addmm(*placed, beta=beta, alpha=alpha)
        assert torch.allclose(sl.unshard(out), torch.addmm(c, M, N, beta=beta, alpha=alpha))
