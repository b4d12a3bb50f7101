"""Every back end has what the protocol says, and they agree on what a storage is."""

import inspect
import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.collectives import (
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
from shardlib.collectives.backends import BACKENDS, Backend
from shardlib.collectives.backends.stacked import at_once
from shardlib.collectives.types import group

NAMES = [n for n, f in vars(Backend).items() if inspect.isfunction(f) and not n.startswith("_")]
LOOKS = {"lead", "group"}
AXES = [("x",), ("y",), ("x", "y"), ("y", "x")]
CALLS: dict[str, tuple[Any, ...]] = {  # what each collective takes besides x and the group
    "psum": (),
    "pmax": (),
    "all_gather": (1,),
    "psum_scatter": (0,),
    "pslice": (0,),
    "place": (1,),
    "all_to_all": (0, 1),
    "pbroadcast": (1,),
    "preduce": (1,),
}


def test_the_protocol_is_these_collectives() -> None:
    others = "ppermutes preduce_into ragged_all_to_all psum_scatter_into all_gather_into in_streams".split()
    assert set(NAMES) - LOOKS == {*CALLS, *others}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [k for k in BACKENDS if k != "forked"])  # that one refuses all
def test_a_back_end_has_the_functions_of_the_protocol(kind: str, name: str) -> None:
    mine, asked = (
        inspect.signature(getattr(b, name)).parameters for b in (BACKENDS[kind], Backend)
    )
    assert list(mine) == [n for n in asked if n != "self"]
    assert [p.default for p in mine.values()] == [
        p.default for n, p in asked.items() if n != "self"
    ]
    assert isinstance(BACKENDS[kind], ModuleType) and isinstance(BACKENDS[kind].holds_values, bool)


def laws() -> list[str]:
    """What a storage is, on the mesh in scope."""
    mesh, wrong = sl.current_mesh(), []
    coords = played(mesh)

    def hold(what: str, is_so: bool) -> None:
        if not is_so:
            wrong.append(what)

    hold(
        "coordinates of this mesh",
        all(list(c) == list(mesh) and all(c[a] < mesh[a] for a in c) for c in coords),
    )
    hold(
        "one rank or all",
        len(coords) in (1, mesh.size)
        and lead(mesh) == int(len(coords) > 1 or mesh.kind == "stacked"),
    )
    parts = [torch.full((2, 3), float(i), device=mesh.device) for i in range(len(coords))]
    raw = storage(parts, mesh)
    hold("lead", raw.ndim == 2 + lead(mesh) and raw.shape[lead(mesh) :] == (2, 3))
    hold("wrap", wrap(raw, mesh).shape == (2, 3) and unwrap(wrap(raw, mesh)) is raw)
    hold("held", held(wrap(raw, mesh), mesh) is raw)
    hold("held of a plain tensor", held(parts[0], mesh).shape == raw.shape)
    if holds_values(mesh):
        hold("blocks invert storage", all(map(torch.equal, blocks(raw, mesh), parts)))
        for block in blocks(raw, mesh):
            block.add_(1)
        hold(
            "blocks are views",
            all(
                torch.equal(b, p + 1 if lead(mesh) else p)
                for b, p in zip(blocks(raw, mesh), parts, strict=True)
            ),
        )
        hold("each_rank", [c for c, _ in each_rank(mesh)] == coords)
    for axes in AXES:
        index = group(mesh, axes).index
        want = [
            c[axes[0]] if len(axes) == 1 else c[axes[0]] * mesh[axes[1]] + c[axes[1]]
            for c in coords
        ]
        hold(f"index {axes}", (index.tolist() if isinstance(index, Tensor) else [index]) == want)
    return wrong


def test_storages_keep_the_laws() -> None:
    for make in (sl.simulate, sl.record):
        with make(x=2, y=3), make(x=2, y=2):
            assert laws() == []
    with sl.simulate(x=1, y=1):
        assert laws() == []


def test_storages_keep_the_laws_on_processes(pool: Any) -> None:
    assert pool.run(laws, x=2, y=2) == [[]] * 4


@pytest.mark.parametrize(("name", "axes"), list(itertools.product(CALLS, AXES)))
def test_recorded_shapes_are_those_of_simulated_ranks(name: str, axes: tuple[str, ...]) -> None:
    real, paper = sl.simulate(x=2, y=3), sl.record(x=2, y=3)
    x = torch.zeros(6, 12, 6)
    one = getattr(BACKENDS[paper.kind], name)(x.to("meta"), group(paper, axes), *CALLS[name])()
    all_ = getattr(BACKENDS[real.kind], name)(
        x.expand(6, 6, 12, 6), group(real, axes), *CALLS[name]
    )()
    assert (
        one.shape == all_.shape[1:]
        and one.dtype == all_.dtype
        and one.is_meta
        and all_.is_contiguous()
    )


def test_what_is_done_at_once_is_given_by_finish() -> None:
    assert at_once(lambda x: x + 1)(torch.zeros(()))() == 1
