"""Bad input gets an error that names the culprit and a fix that runs, and changes nothing."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

import shardlib as sl
from tests.fixes import fault


def s(layout: str, *shape: int) -> sl.ShardedTensor:
    return sl.shard(torch.arange(float(torch.Size(shape).numel())).reshape(shape), layout)


def wide() -> sl.ShardedTensor:
    return s("rows", 4).double().requires_grad_()


# (what is wrong, the call, the error's class, what it says, names for the fix)
def ring() -> sl.ShardedTensor:
    return s(". . rows .", 2, 2, 4, 4)


QKV = {n: ring for n in "qkv"}

MISTAKES: list[tuple[str, Callable[[], Any], str, str, dict[str, Callable[[], Any]]]] = [
    ("axis not in the mesh", lambda: s("row .", 4, 4), "UnknownAxis", "unknown axis 'row'; this mesh has rows, y", {}),
    ("axis used twice", lambda: s("y y", 4, 4), "AxisReused", "axis 'y' is used twice", {}),
    ("rank mismatch", lambda: s("rows y", 4), "RankMismatch", "2 dimensions, the tensor 1", {}),
    ("uneven split", lambda: s("rows y", 4, 5), "UnevenSplit", "dimension 1 of size 5 does not divide over mesh axis 'y' (size 2, remainder 1)", {"x": lambda: torch.ones(4, 5)}),
    ("no layout at all", lambda: sl.shard(torch.ones(4, 4), None), "LayoutSyntax", "None is no layout", {"x": lambda: torch.ones(4, 4)}),
    ("a tuple of a text's tokens", lambda: sl.shard(torch.ones(4, 4), ("rows", ".")), "LayoutSyntax", "is no layout", {"x": lambda: torch.ones(4, 4)}),
    ("placements for another mesh", lambda: sl.shard(torch.ones(4, 4), [Shard(1)]), "LayoutSyntax", "one for each axis of the mesh, in order: 1 given, the mesh has rows, y", {"x": lambda: torch.ones(4, 4)}),
    ("an average as a placement", lambda: sl.shard(torch.ones(4, 4), [Shard(1), Partial("avg")]), "NotExpressible", "a pending avg over axis 'y'", {"x": lambda: torch.ones(4, 4)}),
    ("placements in reshard", lambda: sl.reshard(s("rows .", 4, 4), [Replicate(), Shard(0), Shard(1)]), "LayoutSyntax", "3 given", {"x": lambda: s("rows .", 4, 4)}),
    ("a tree of layouts unlike the tensors'", lambda: sl.shard({"a": torch.ones(4)}, {"b": "rows"}), "LayoutSyntax", "no tree of layouts like {'a'}", {"x": lambda: torch.ones(4)}),
    ("a tuple of layouts for a longer list", lambda: sl.reshard({"a": [s(".", 4)] * 3}, {"a": ("rows", "y")}), "LayoutSyntax", "like list of 3 at a", {"x": lambda: s(".", 4)}),
    ("P of tokens", lambda: sl.P("rows y"), "LayoutSyntax", "each dimension has a mesh axis", {}),
    ("a list of numbers", lambda: sl.shard([1.0, 2.0], "rows"), "PlainTensor", "list is no tensor", {"x": lambda: [1.0, 2.0]}),
    ("an array", lambda: sl.shard(torch.ones(4).numpy(), "rows"), "PlainTensor", "ndarray is no tensor", {"x": lambda: torch.ones(4).numpy()}),
    ("an array in a tree", lambda: sl.shard({"a": torch.ones(4), "b": torch.ones(4).numpy()}, "rows"), "PlainTensor", "ndarray is no tensor", {"x": lambda: torch.ones(4).numpy()}),
    ("an input that forward lacks", lambda: sl.parallelize(torch.nn.Linear(2, 2), [("*", "...")], inputs={"inputs": "rows ."}), "RuleLint", "did you mean 'input'?", {"inputs": lambda: {"inputs": "rows ."}}),
    ("sharded twice", lambda: sl.shard(s("rows .", 4, 4), ". y"), "ShardError", "sharded already", {"x": lambda: s("rows .", 4, 4)}),
    ("plain in reshard", lambda: sl.reshard(torch.ones(4, 4), "rows ."), "PlainTensor", "no layout to leave", {"x": lambda: torch.ones(4, 4)}),
    ("plain mixed in", lambda: s("rows .", 4, 4) * torch.ones(4), "PlainTensor", "a plain tensor met a sharded one", {"t": lambda: torch.ones(4)}),
    ("plain in a product", lambda: s("rows .", 4, 4) @ torch.ones(4, 4), "PlainTensor", "a plain tensor met a sharded one", {"t": lambda: torch.ones(4, 4)}),
    ("plain has no layout", lambda: sl.layout_of(torch.ones(4)), "PlainTensor", "no layout", {"x": lambda: torch.ones(4)}),
    ("columns split over x's rows", lambda: s("(rows y) .", 4, 4) @ s(". rows", 4, 4), "ImplicitCommunication", "rows splits w's columns and x", {"x": lambda: s("(rows y) .", 4, 4), "w": lambda: s(". rows", 4, 4)}),
    ("a product asked for elsewhere", lambda: sl.matmul(s("rows y", 4, 4), s("rows y", 4, 4), out="y rows"), "NoImplementation", "gives rows y, not y rows", {"x": lambda: s("rows y", 4, 4), "w": lambda: s("rows y", 4, 4)}),
    ("a product on an unknown axis", lambda: sl.matmul(s("rows y", 4, 4), s("rows y", 4, 4), out="row y"), "UnknownAxis", "did you mean 'rows'?", {}),
    ("a rule that does not divide", lambda: sl.parallelize(torch.nn.Linear(3, 5), [("weight", "y ."), ("*", "...")]), "UnevenSplit", "the rule of parameter 'weight' does not fit it: dimension 0 of size 5", {"module": lambda: torch.nn.Linear(3, 5), "rules": lambda: [("bias", "...")]}),
    ("a rule of other dimensions", lambda: sl.parallelize(torch.nn.Linear(3, 5), [("*", ". .")]), "RankMismatch", "the rule of parameter 'bias' does not fit it", {"module": lambda: torch.nn.Linear(3, 5), "rules": lambda: [("weight", "...")]}),
    ("a rule with no layout", lambda: sl.parallelize(torch.nn.Linear(2, 2), [("weight",)]), "RuleLint", "a rule is (pattern, layout)", {"module": lambda: torch.nn.Linear(2, 2)}),
    ("nothing to plan for", lambda: sl.choose(torch.nn.ReLU(), torch.ones(4, 4), ranks=4), "BadArgument", "no parameters", {}),
    ("no ranks to choose for", lambda: sl.choose(torch.nn.Embedding(64, 8), torch.arange(8)[:, None], ranks=0), "BadArgument", "ranks=0", {"model": lambda: torch.nn.Embedding(64, 8), "ids": lambda: torch.arange(8)[:, None]}),
    ("bytes that are no number", lambda: sl.saving("all").__enter__(), "ShardError", "a number of bytes", {}),
    ("elementwise of other splits", lambda: s("rows .", 4, 4) + s("y .", 4, 4), "ImplicitCommunication", "bytes per rank would move unasked", {"x": lambda: s("rows .", 4, 4), "y": lambda: s("y .", 4, 4)}),
    ("pending sum in gelu", lambda: F.gelu(s(". . + sum(y)", 4, 4)), "PartialEscape", "the sum over y is still pending", {"x": lambda: s(". . + sum(y)", 4, 4)}),
    ("view through blocks", lambda: s(". y", 3, 4).view(2, 6), "ImplicitCommunication", "cuts through the blocks", {"x": lambda: s(". y", 3, 4)}),
    ("view of another size", lambda: s(". y", 3, 4).view(5, 2), "BadArgument", "invalid for 12 elements", {"x": lambda: s(". y", 3, 4)}),
    ("index into a split dimension", lambda: s("rows .", 4, 4)[1:3], "ImplicitCommunication", "cuts through dimension 0", {"x": lambda: s("rows .", 4, 4)}),
    ("split through blocks", lambda: s(". y", 4, 12).split(4, 1), "ImplicitCommunication", "pieces of [4, 4, 4]", {"x": lambda: s(". y", 4, 12)}),
    ("topk along a split dimension", lambda: s(". y", 4, 4).topk(2), "ImplicitCommunication", "needs dimensions whole", {"x": lambda: s(". y", 4, 4)}),
    ("cat along a split dimension", lambda: torch.cat([s("rows .", 4, 4)] * 2), "ImplicitCommunication", "would move unasked", {n: (lambda: s("rows .", 4, 4)) for n in "xy"}),
    ("attention with heads apart", lambda: F.scaled_dot_product_attention(s(". y . .", 2, 2, 4, 4), s(". rows . .", 2, 2, 4, 4), s(". rows . .", 2, 2, 4, 4)), "ImplicitCommunication", "batch and heads are split alike", {n: (lambda: s(". y . .", 2, 2, 4, 4)) for n in "qkv"} | {"F": lambda: F}),
    ("loss with targets elsewhere", lambda: F.cross_entropy(s("rows y", 4, 4), sl.shard(torch.zeros(4, dtype=torch.int64), "y")), "ImplicitCommunication", "not split the same way", {"logits": lambda: s("rows y", 4, 4), "target": lambda: sl.shard(torch.zeros(4, dtype=torch.int64), "y"), "F": lambda: F}),
    ("a function without a rule", lambda: torch.histc(s("rows .", 4, 4)), "ImplicitCommunication", "needs whole operands", {"x": lambda: s("rows .", 4, 4), "torch": lambda: torch}),
    ("sorting a split dimension", lambda: s("rows .", 4, 4).sort(0), "ImplicitCommunication", "needs dimensions whole", {"x": lambda: s("rows .", 4, 4), "torch": lambda: torch}),
    ("a Python value of a split tensor", lambda: s("rows", 4).tolist(), "ShardError", "needs the whole tensor", {"x": lambda: s("rows", 4)}),
    ("numpy of a sharded tensor", lambda: s("rows", 4).numpy(), "ShardError", "needs the whole tensor", {"x": lambda: s("rows", 4)}),
    ("numpy's sum of a sharded tensor", lambda: np.sum(s("rows", 4)), "PlainTensor", "torch.sum computes on sharded tensors", {"x": lambda: s("rows", 4)}),
    ("numpy's comparison, which takes an error for a result", lambda: np.array_equal(s("rows", 4), s("rows", 4)), "PlainTensor", "numpy computes on whole arrays", {"x": lambda: s("rows", 4)}),
    ("gradcheck of sharded inputs", lambda: torch.autograd.gradcheck(torch.sin, wide()), "Unsupported", "gradcheck changes one element", {"x": wide, "f": lambda: torch.sin}),
    ("gradcheck in its fast mode", lambda: torch.autograd.gradcheck(torch.sin, wide(), fast_mode=True), "Unsupported", "gradcheck changes one element", {"x": wide, "f": lambda: torch.sin}),
    ("backward of a matrix", lambda: s("rows .", 4, 4).requires_grad_().backward(), "ShardError", "no scalar", {"x": lambda: s("rows .", 4, 4).requires_grad_()}),
    ("a loss that is no scalar", lambda: sl.value_and_grad(lambda p: p * 2)(s("rows", 4)), "ShardError", "not a scalar", {"f": lambda: lambda p: p * 2, "params": lambda: s("rows", 4)}),
    ("an integer parameter", lambda: sl.value_and_grad(lambda p: p.sum())(sl.shard(torch.arange(4), "rows")), "ShardError", "only floating point", {"x": lambda: torch.arange(4)}),
    ("dtypes that differ", lambda: s("rows .", 4, 4) @ s(". .", 4, 4).double(), "ShardError", "different dtypes", {"x": lambda: s("rows .", 4, 4), "w": lambda: s(". .", 4, 4).double()}),
    ("contraction sizes that differ", lambda: s("rows .", 4, 4) @ s(". .", 6, 4), "ShardError", "contraction sizes differ: 4 and 6", {"x": lambda: s("rows .", 4, 4), "w": lambda: s(". .", 6, 4)}),
    ("an unknown algorithm", lambda: sl.algorithm(matmul="canon").__enter__(), "ShardError", "unknown algorithm 'canon'", {}),
    ("an unknown operation", lambda: sl.why("matmull", 1, 2), "ShardError", "unknown operation 'matmull'", {"a": lambda: s("rows .", 4, 4), "b": lambda: s(". .", 4, 4)}),
    ("shard_map of another layout", lambda: sl.shard_map(lambda v: v, in_layouts="rows", out_layouts="rows")(s(".", 4)), "ShardError", "laid out ., not rows", {"x": lambda: s(".", 4)}),
    ("attention over an unknown algorithm", lambda: sl.ring_attention(*[ring()] * 3, algorithm="rnig"), "ShardError", "unknown algorithm 'rnig'", QKV),
    ("an algorithm that is no engine", lambda: sl.ring_attention(*[ring()] * 3, algorithm=("rsa", 2)), "ShardError", "an algorithm is a name or an engine", QKV),
    ("an inner ring that does not divide", lambda: sl.ring_attention(*[ring()] * 3, algorithm=sl.attention.DoubleRing(3)), "NoImplementation", "an inner ring of 3 does not divide", QKV),
    ("a bias that Ulysses would drop", lambda: sl.ring_attention(*[ring()] * 3, bias=torch.zeros(4, 4), algorithm="ulysses"), "NoImplementation", "rows change places", QKV),
    ("USP over one axis", lambda: sl.ring_attention(*[ring()] * 3, algorithm="usp"), "NoImplementation", "split over two axes", QKV),
    ("an unknown kernel", lambda: sl.ring_attention(*[ring()] * 3, kernel="fast"), "ShardError", "unknown kernel 'fast'", QKV),
    ("a kernel of another device", lambda: sl.ring_attention(*[ring()] * 3, kernel="flash"), "Unsupported", "it runs on CUDA", QKV),
    ("a kernel without dropout", lambda: sl.ring_attention(*[ring()] * 3, kernel="cpu", dropout=0.1), "Unsupported", "need the math block", QKV),
    ("dropout above one", lambda: sl.ring_attention(*[ring()] * 3, dropout=1.5), "ShardError", "dropout is a probability", QKV),
    ("a sink of another size", lambda: sl.ring_attention(*[ring()] * 3, sink=torch.zeros(3)), "ShardError", "one score for each of 2 heads", QKV),
    ("a bias of another size", lambda: sl.ring_attention(*[ring()] * 3, bias=torch.zeros(3, 4)), "ShardError", "a bias is [.., 4, 4]", QKV),
    ("documents of another length", lambda: sl.ring_attention(*[ring()] * 3, mask=sl.masks.Documents((0, 3))), "ShardError", "documents of 1 x 3 positions", QKV),
    ("a mask that asks for a gradient", lambda: sl.masks.Bias(torch.zeros(4, 4, requires_grad=True)), "ShardError", "asks for a gradient", QKV | {"bias": lambda: torch.zeros(4, 4)}),
    ("a bias for other sizes", lambda: sl.ring_attention(*[ring()] * 3, mask=sl.masks.Bias(torch.zeros(3, 3))), "ShardError", "a bias [3, 3] for scores", QKV),
    ("attention of different dtypes", lambda: sl.ring_attention(ring(), ring().double(), ring()), "ShardError", "different dtypes", QKV),
    ("a tensor as a mask", lambda: sl.ring_attention(*[ring()] * 3, mask=torch.ones(4, 4) > 0), "ShardError", "a tensor is a bias", QKV | {"mask": lambda: torch.ones(4, 4) > 0}),
    ("a word as a mask", lambda: sl.ring_attention(*[ring()] * 3, mask="causal"), "ShardError", "not 'causal'", QKV),
    ("a window that reaches backwards", lambda: sl.masks.Window(-1), "ShardError", "not -1", QKV),
    ("a prefix that is no number", lambda: sl.masks.Prefix("3"), "ShardError", "not '3'", QKV),
    ("dropout as text", lambda: sl.ring_attention(*[ring()] * 3, dropout="0.1"), "ShardError", "dropout is a probability", QKV),
    ("slopes for other heads", lambda: sl.ring_attention(*[ring()] * 3, mask=sl.masks.ALiBi([0.5])), "ShardError", "1 slopes for 2 heads", QKV),
    ("keys split over another axis", lambda: sl.ring_attention(ring(), *[s(". . y .", 2, 2, 4, 4)] * 2), "ImplicitCommunication", "over the same axes", QKV),
    ("a sequence that lies otherwise than asked", lambda: sl.ring_attention(*[ring()] * 3, layout=sl.Ring("rows", schedule="striped")), "ImplicitCommunication", "split rows, not striped(rows)", QKV),
    ("plain tensors in attention", lambda: sl.ring_attention(*[torch.zeros(2, 2, 4, 4)] * 3), "PlainTensor", "local blocks need their layout", {n: (lambda: torch.zeros(2, 2, 4, 4)) for n in "qkv"}),
    ("a projection of another length", lambda: sl.attention.linformer_attention(*[ring()] * 3, torch.zeros(2, 3)), "ShardError", "a projection is [r, 4]", QKV),
    ("a simulated DTensor", lambda: sl.dtensor.to_dtensor(s("rows", 4)), "Unsupported", "simulated ranks have no DTensor", {"x": lambda: s("rows", 4)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "says", "names"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_errors_name_the_culprit_and_their_fix_runs(
    call: Any, error: str, says: str, names: dict[str, Any]
) -> None:
    with sl.simulate(rows=2, y=2):
        with pytest.raises(sl.ShardError) as caught:
            call()
        e = caught.value
        assert type(e).__name__ == error, e
        assert says in str(e).splitlines()[0] or says in str(e), e
        assert e.fix and e.op and e.line.startswith("test_errors.py"), e
        assert not fault(e.fix), fault(e.fix)
        exec(e.fix, {"sl": sl, "torch": torch} | {n: make() for n, make in names.items()})


def test_bad_input_changes_nothing() -> None:
    with sl.simulate(x=2, y=3):
        a, b = s("x y", 6, 6), s("x y", 6, 6)
        before = a.raw.clone(), b.raw.clone()
        for call in (
            lambda: sl.reshard(a, "y z"),
            lambda: a.add_(torch.ones(6, 6)),
            lambda: a.add_(s("y x", 6, 6)),
        ):
            with pytest.raises(sl.ShardError):
                call()
        assert torch.equal(a.raw, before[0]) and torch.equal(b.raw, before[1])
        assert sl.why("matmul", a, b).chosen == "summa"


def test_meshes_that_do_not_fit_the_world_are_refused_both_ways(pool: Any) -> None:
    for larger, smaller in pool.run(_wrong_worlds, x=4):
        assert (
            "needs 8 ranks, 4 processes are running" in larger
            and "torchrun --nproc-per-node 8" in larger
        )
        assert "needs 2 ranks, 4 processes are running" in smaller


def _wrong_worlds() -> list[str]:
    out = []
    for axes in ({"x": 2, "y": 4}, {"x": 2}):
        try:
            sl.make_mesh(**axes)
        except sl.ShardError as e:
            out.append(str(e))
    return out


def test_implicit_allows_and_counts_what_is_otherwise_refused() -> None:
    with sl.simulate(x=2):
        a, b = s("x .", 4, 4), s(". x", 4, 4)
        with sl.implicit(), sl.trace() as t:
            c = a + b
        assert t.bytes > 0 and torch.equal(sl.unshard(c), 2 * sl.unshard(a))
        with sl.implicit(max_bytes=1), pytest.raises(sl.ShardError, match="would move unasked"):
            a + b


def test_operands_of_two_meshes_are_refused() -> None:
    with sl.simulate(x=2):
        a = s("x", 4)
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="different meshes"):
        a + s("x", 4)


def test_every_field_is_on_the_error() -> None:
    with sl.simulate(x=2), pytest.raises(sl.ShardError) as caught:
        s("x", 5)
    e = caught.value
    assert (
        e.op == "shard"
        and e.operands["layout"] == "x"
        and dict(e.mesh) == {"x": 2}
        and "pad=True" in e.fix
    )
    assert str(e).splitlines()[0].startswith("shard: dimension 0 of size 5")


# ---------------------------------------------------------------- size, and what a terminal obeys

HUGE = "x\x1b[2J" * (262_000_000 // 5)


def test_a_message_of_any_size_is_two_kilobytes_with_both_ends() -> None:
    began = time.process_time()
    rows = {str(i): "é" * 4000 for i in range(1000)} | {HUGE: HUGE}
    error = sl.ShardError(HUGE + "end", op="save", operands=rows, mesh=HUGE, fix="fix " + HUGE)
    text = str(error)
    assert time.process_time() - began < 5.0
    assert 1000 < len(text.encode()) <= 2000 and len(error.message) <= 2000
    assert text.startswith(r"save: x\x1b[2J") and "of 262,000,003 characters" in error.message
    assert error.message.endswith("end") and "fix" in text.splitlines()[-1]
    assert all(c.isprintable() or c == "\n" for c in text)


@given(st.text(), st.dictionaries(st.text(), st.text(max_size=3000), max_size=30), st.text())
def test_no_text_reaches_a_terminal_that_obeys_it(
    message: str, operands: dict[str, str], fix: str
) -> None:
    text = str(sl.ShardError(message, op="save", operands=operands, fix=fix))
    assert len(text.encode()) <= 2000
    assert all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("text", ["a" * 10**6, "a " * 10**6, "(" * 10**6, "\x1b[2J" * 10**6])
def test_a_hostile_text_is_refused_at_once(text: str) -> None:
    with sl.simulate(x=2):
        calls: list[Callable[[], Any]] = [
            lambda: sl.shard(torch.ones(4), text),
            lambda: sl.psum(torch.ones(4), text),
            lambda: sl.load(text),
            lambda: sl.algorithm(matmul=text).__enter__(),
            lambda: sl.simulate(**{text + "-": 2}),
        ]
        for call in calls:
            began = time.process_time()
            with pytest.raises(sl.ShardError) as e:
                call()
            assert time.process_time() - began < 2.0
            assert len(str(e.value).encode()) <= 2000 and "\x1b" not in str(e.value)
