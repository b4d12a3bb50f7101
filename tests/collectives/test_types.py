"""A storage holds the blocks of the ranks of this process; docs/block_types.md has their types."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives import (
    Stacked,
    Varies,
    blocks,
    each_rank,
    held,
    holds_values,
    lead,
    played,
    storage,
    unwrap,
    wrap,
)


@pytest.mark.parametrize("make", [sl.simulate, sl.record])
def test_a_storage_has_one_block_for_each_rank_that_runs_here(make: Any) -> None:
    mesh = make(x=2, y=3)
    given = [torch.full((4,), i, device=mesh.device) for i, _ in enumerate(played(mesh))]
    raw = storage(given, mesh)
    assert raw.ndim == 1 + lead(mesh) and len(blocks(raw, mesh)) == len(given)
    assert unwrap(wrap(raw, mesh)) is raw
    assert [c for c, _ in each_rank(mesh)] == played(mesh)


def test_a_write_to_a_block_is_a_write_to_its_storage() -> None:
    mesh = sl.simulate(x=3)
    raw = torch.zeros(3, 2)
    for i, block in enumerate(blocks(raw, mesh)):
        block += i
    for coord, view in each_rank(mesh):
        view(raw)[0] += 10 * coord["x"]
    assert raw.tolist() == [[0, 0], [11, 1], [22, 2]]


def test_a_plain_tensor_is_held_by_every_simulated_rank() -> None:
    mesh, plain = sl.simulate(x=2), torch.arange(3.0)
    assert torch.equal(held(plain, mesh), plain.expand(2, 3))
    assert held(wrap(torch.ones(2, 3), mesh), mesh).shape == (2, 3)
    assert type(wrap(plain, sl.record(x=2))) is not Stacked and not holds_values(sl.record(x=2))


PAGE = (Path(__file__).parents[2] / "docs" / "block_types.md").read_text()
ROWS = {  # of the table of verbs: verb -> (types that it takes, type that it gives, its gradient)
    name: row[1:]
    for row in re.findall(r"^\| (`[a-z_]+.*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.M)
    for name in re.findall(r"`(.*?)`", row[0])
}
c = sl.collectives
VERBS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "psum": lambda v: sl.psum(v, "x"),
    "pmean": lambda v: sl.pmean(v, "x"),
    "pmax": lambda v: sl.pmax(v, "x"),
    "all_gather": lambda v: sl.all_gather(v, "x"),
    "pbroadcast": lambda v: c.pbroadcast(v, "x"),
    "psum_scatter": lambda v: sl.psum_scatter(v, "x"),
    "preduce": lambda v: c.preduce(v, "x"),
    "pslice": lambda v: c.pslice(v, "x"),
    "all_to_all": lambda v: sl.all_to_all(v, "x", 0, 0),
    "ppermute": lambda v: sl.ppermute(v, "x", [(0, 1), (1, 0)]),
    "shift": lambda v: c.shift(v, "x"),
    "pvary": lambda v: c.pvary(v, "x"),
    'pcast(to="varying")': lambda v: c.pcast(v, "x", to="varying"),
    'pcast(to="replicated")': lambda v: c.pcast(v, "x", to="replicated"),
}


def test_the_page_has_a_row_for_every_verb() -> None:
    moving = {n for n in dir(c) if n in c.__all__ and n.startswith(("p", "all_", "shift"))}
    assert moving - {"pick"} == {name.partition("(")[0] for name in VERBS}
    assert set(VERBS) <= set(ROWS)


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("given", ["varying", "replicated"])
def test_a_verb_takes_and_gives_the_types_that_its_row_says(name: str, given: str) -> None:
    takes, gives, _ = ROWS[name]
    with sl.simulate(x=2) as mesh:
        # equal values, so that pcast may call them replicated
        block = Stacked(torch.ones(2, 2), mesh)
        block.varies = Varies(frozenset("x" if given == "varying" else ""))
        if given not in takes:
            with pytest.raises(sl.errors.WrongAxes, match="would add the same value 2 times"):
                VERBS[name](block)
            return
        out: Any = VERBS[name](block)
    assert out.varies.axes == (
        {"x"} if (given if gives == "the same" else gives) == "varying" else set()
    )


@pytest.mark.parametrize("name", [n for n in VERBS if ROWS[n][2].startswith("`")])
def test_the_gradient_of_a_verb_is_the_verb_of_its_row(name: str) -> None:
    """The cotangent that comes back is that verb of the one that was given, on each rank."""
    torch.manual_seed(0)
    back = re.findall(r"`(.*?)`", ROWS[name][2])[0]
    with sl.simulate(x=2) as mesh:
        raw = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        out = unwrap(VERBS[name](Stacked(raw, mesh)))
        g = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, raw, g)
        block = Stacked(g, mesh)
        want = unwrap(VERBS[back](block))
    assert torch.equal(found, want)
