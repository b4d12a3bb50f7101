"""Recorded ranks answer as simulated ones: the same types,
the same bytes, or a refusal that says why.
"""

import random
from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from tests import fixes
from tests.collectives.primitives import (
    EACH,
    PRIMITIVES,
    on_rank,
    stacked_input,
)

MESH = {"x": 3, "y": 2}
DRAWN = "rand dropout bernoulli multinomial normal uniform cauchy exponential geometric empty rrelu fractional lowrank"


def _outcome(mesh: Any, op: Any, leaves: list[Any], tree: Any, texts: list[Any]) -> Any:
    def placed(x: torch.Tensor, text: str) -> torch.Tensor:
        return sl.shard(x.detach().to("meta" if mesh.kind == "record" else "cpu", copy=True), text)

    with mesh, sl.implicit(), sl.trace() as t:
        mine = [
            x
            if not isinstance(x, torch.Tensor)
            else placed(x, text)
            if text is not None
            else x.to(mesh.device)
            for x, text in zip(leaves, texts, strict=True)
        ]
        x, args, kwargs = optree.tree_unflatten(tree, mine)
        try:
            out = op.op(x, *args, **kwargs)
        except sl.ShardError as e:
            fixes.caught(e)
            return type(e).__name__
        found = optree.tree_leaves(out)
        return (
            [sl.typeof(v) if isinstance(v, torch.Tensor) else v for v in found],
            t.bytes,
            t.messages,
        )


@pytest.mark.filterwarnings("ignore")  # the samples of torch's database warn
def test_recorded_ranks_answer_as_simulated_ones() -> None:
    op_db = pytest.importorskip(
        "torch.testing._internal.common_methods_invocations", reason="needs expecttest"
    ).op_db
    draw, differ, same = random.Random(0), {}, 0
    ops = [
        op
        for op in op_db
        if torch.float64 in op.dtypes and not any(w in op.name for w in DRAWN.split())
    ]
    for op in draw.sample(ops, 60):
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
        for sample in samples[:2]:
            leaves, tree = optree.tree_flatten(
                (sample.input, sample.args, sample.kwargs), none_is_leaf=True
            )
            texts = [
                _layout(draw, x) if isinstance(x, torch.Tensor) and x.ndim else None for x in leaves
            ]
            if not any(t and t.strip(". ") for t in texts):
                continue
            want = _outcome(sl.simulate(**MESH), op, leaves, tree, texts)
            got = _outcome(sl.record(**MESH), op, leaves, tree, texts)
            same += got == want
            if (
                got not in (want, "Unsupported", "NoImplementation") and "batch_norm" not in op.name
            ):  # whose meta kernel has other sizes
                differ[op.name] = (texts, want, got)
    assert not differ
    assert same > 20


def _layout(draw: random.Random, x: torch.Tensor) -> str:
    free, tokens = list(MESH), []
    draw.shuffle(free)
    for n in x.shape:
        fit = [a for a in free if n and n % MESH[a] == 0]
        if fit and draw.random() < 0.65:
            free.remove(fit[0])
        tokens.append(fit[0] if fit and fit[0] not in free else ".")
    return " ".join(tokens)


def test_a_number_is_no_answer_of_shapes() -> None:
    with sl.record(x=4):
        x = sl.shard(torch.empty(4, device="meta"), "x")
        for ask in (
            lambda: x.sum().item(),
            lambda: bool(sl.reshard(x.sum(), "...") > 0),
            lambda: float(x.mean()),
        ):
            with pytest.raises(sl.ShardError):
                ask()


@pytest.mark.parametrize("name", PRIMITIVES)
def test_recorded_ranks_have_the_shape_and_the_price(name: str) -> None:
    for mesh, axis in EACH:
        if name in ("pick", "axis_index"):
            continue
        with sl.record(**mesh):
            out, nbytes, messages = on_rank(name, axis, torch.float64)
        with sl.simulate(**mesh) as m, sl.trace() as t:
            want = PRIMITIVES[name][0](stacked_input(m), axis)
        assert out.shape == want.shape
        assert (nbytes, messages) == (t.bytes, t.messages)
