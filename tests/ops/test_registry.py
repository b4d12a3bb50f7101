"""Which algorithm is chosen hangs on cases alone, and nothing is kept longer than its mesh."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import shardlib as sl
from shardlib.mesh import Memo
from shardlib.ops import registry

PAIRS = [
    (". tp", "tp ."),
    ("tp .", ". tp"),
    ("x y", "x y"),
    ("y x", "x y"),
    ("x .", ". y"),
    (". .", ". ."),
    (". y", "y ."),
]


@contextmanager
def registered_in(order: list[str]) -> Iterator[None]:
    """As if the matmul algorithms had been registered in this order, each after those before it."""
    before = registry._ALGORITHMS["matmul"]
    known = {a.name: a for a in before}
    registry._ALGORITHMS["matmul"] = []
    try:
        for name in order:
            registry.algorithm("matmul", name, known[name].order)(known[name].match)
        yield
    finally:
        registry._ALGORITHMS["matmul"] = before
        Memo.version += 1


def chosen() -> list[tuple[str, str]]:
    found = []
    with sl.simulate(x=2, y=2, tp=2):
        for left, right in PAIRS:
            a, b = sl.shard(torch.ones(8, 8), left), sl.shard(torch.ones(8, 8), right)
            found.append((sl.why("matmul", a, b).chosen, sl.typeof(a @ b)))
    return found


def test_the_order_of_registration_means_nothing() -> None:
    names = [a.name for a in registry._ALGORITHMS["matmul"]]
    want = chosen()
    assert {sl.typeof(torch.ones(1)), *(t for _, t in want)} > {"f32[8, 8]", "f32[8@x, 8@y]"}
    for order in (names[::-1], sorted(names), names[5:] + names[:5]):
        with registered_in(order):
            assert chosen() == want


def test_registering_again_under_a_name_replaces_in_its_place() -> None:
    """As a notebook's cell does that runs twice."""
    (summa,) = [a for a in registry._ALGORITHMS["matmul"] if a.name == "summa"]
    want, names = chosen(), [a.name for a in registry._ALGORITHMS["matmul"]]
    for name, again in itertools.product(("summa", "oned"), range(2)):
        (known,) = [a for a in registry._ALGORITHMS["matmul"] if a.name == name]
        sl.extend.algorithm("matmul", name=name)(known.match)
        assert [a.name for a in registry._ALGORITHMS["matmul"]] == names, again
        assert chosen() == want
    try:
        sl.extend.algorithm("matmul", name="summa")(lambda case: "replaced")
        with sl.simulate(x=2, y=2):
            a = sl.shard(torch.ones(8, 8), "x y")
            assert dict(sl.why("matmul", a, a).verdicts)["summa"] == "replaced"
            assert sl.why("matmul", a, a).chosen == "summa_y"
    finally:
        sl.extend.algorithm("matmul", name="summa")(summa.match)
    assert chosen() == want


def test_what_was_chosen_before_a_registration_is_void() -> None:
    with sl.simulate(x=2, y=2), sl.trace() as t:
        a = sl.shard(torch.ones(8, 8), "x y")
        _ = a @ a
        messages = t.messages
        (summa,) = [m for m in registry._ALGORITHMS["matmul"] if m.name == "summa"]
        (cannon,) = [m for m in registry._ALGORITHMS["matmul"] if m.name == "cannon"]
        sl.extend.algorithm("matmul", name="a_cannon", order=-1)(lambda case: cannon.match(case))
        try:
            with sl.algorithm(matmul="a_cannon"):
                assert torch.equal(sl.unshard(a @ a), torch.full((8, 8), 8.0))
            assert sl.why("matmul", a, a).chosen == "summa" and t.messages > messages
        finally:
            sl.extend.remove("matmul", "a_cannon")
        with pytest.raises(sl.ShardError, match="unknown algorithm 'a_cannon'"):
            sl.extend.remove("matmul", "a_cannon")
        assert summa.name == sl.why("matmul", a, a).chosen


def test_a_mesh_dies_after_its_last_product() -> None:
    """The tables of choices and of plans are the mesh's own."""

    def use() -> weakref.ref:
        with sl.simulate(x=2, y=2) as mesh:
            a = sl.shard(torch.randn(8, 8), "x y").requires_grad_()
            y = torch.cumsum(sl.reshard(a @ a, ". y"), 0)
            y.sum().backward()
            # one that is cut first
            _ = sl.shard(torch.randn(4, 8), "x y") @ sl.shard(torch.randn(8, 4), ". .")
            _ = sl.shard(torch.randn(7, 8), "x y", pad=True).sum()  # one whose padding is masked
        return weakref.ref(mesh)

    held = use()
    gc.collect()
    assert held() is None


def test_links_that_changed_are_heeded() -> None:
    """Where messages are cheap, SUMMA cuts its panels."""
    with sl.simulate(x=2, y=2) as mesh:
        a = sl.shard(torch.zeros(512, 512), "x y")
        counted = []
        for alpha in (1.0, 1e-9):
            mesh.links.update(x=sl.planning.Link(alpha, 1e-9), y=sl.planning.Link(alpha, 1e-9))
            mesh.memo.forget()
            with sl.trace() as t:
                _ = a @ a
            counted.append(t.messages)
        assert counted[1] == 2 * counted[0]


def test_a_rule_registered_later_replaces_and_can_be_pinned() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.eye(4), "x .")
        with sl.algorithm(matmul="oned"):
            assert sl.why("matmul", a, sl.shard(torch.eye(4), ". .")).chosen == "oned"
        with pytest.raises(sl.ShardError, match="unknown algorithm 'canon'"):
            sl.algorithm(matmul="canon").__enter__()


def test_why_says_which_operands_an_operation_takes() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.ones(4, 4), "x .")
        for op in ("matmul", "attention"):
            with pytest.raises(sl.ShardError, match="missing a required argument"):
                sl.why(op, a)
