"""Recorded ranks answer as simulated ones: the same types,
the same bytes, or a refusal that says why.
"""

import itertools
import random
from functools import partial
from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from shardlib.collectives import start
from shardlib.collectives.in_place import gather_into, scatter_into
from shardlib.memory_tracker import Live
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


def _scattered(x: torch.Tensor, axes: tuple[str, ...], **how: Any) -> Any:
    """Post a sum of vectors that lands in memory of the caller."""
    mesh, flat = sl.current_mesh(), x.reshape(-1)
    out = flat.new_empty(flat.numel() // mesh.axis_size(axes))
    return scatter_into(flat, out, mesh, axes, **how)


def _gathered(x: torch.Tensor, axes: tuple[str, ...], **how: Any) -> Any:
    return gather_into(x.reshape(-1).clone(), sl.current_mesh(), axes, **how)


def _rotated(x: torch.Tensor, axes: tuple[str, ...]) -> Any:
    p = sl.current_mesh().axis_size(axes)
    return start(sl.ppermute, x, axes, [(i, (i + 1) % p) for i in range(p)]).wait


def _sliced(x: torch.Tensor, axes: tuple[str, ...], dim: int) -> Any:
    out = sl.collectives.pslice(x, axes, dim)
    return lambda: out


def _posted(op: Any, **params: Any) -> Any:
    return lambda x, axes: start(op, x, axes, **params).wait


POSTS: dict[str, Any] = {
    "psum": _posted(sl.psum),
    "pmax": _posted(sl.collectives.pmax),
    **{f"all_gather {d}": _posted(sl.all_gather, dim=d) for d in (0, 1)},
    **{f"psum_scatter {d}": _posted(sl.psum_scatter, dim=d) for d in (0, 1)},
    "psum_scatter in bf16": _posted(sl.psum_scatter, dim=0, wire=torch.bfloat16),
    **{
        f"all_to_all {s} {c}": _posted(sl.all_to_all, split_dim=s, concat_dim=c)
        for s, c in ((0, 1), (1, 0), (0, 0))
    },
    "ppermute": _rotated,
    **{f"pslice {d}": partial(_sliced, dim=d) for d in (0, 1)},
    **{f"scatter_into {a}": partial(_scattered, ahead=a) for a in (False, True)},
    "scatter_into in bf16": partial(_scattered, wire=torch.bfloat16),
    **{f"gather_into {a}": partial(_gathered, ahead=a) for a in (False, True)},
}


def memory_of_transfers() -> dict[Any, Any]:
    """For each transfer: bytes alive when it is posted, the most until then, and until its result."""
    mesh, found = sl.current_mesh(), {}
    sizes = [
        (64, torch.float64, False),
        (16384, torch.float64, True),
        (16384, torch.bfloat16, True),
    ]
    for n, dtype, turned in sizes:
        x = torch.zeros(8, n // 8, dtype=dtype, device=mesh.device)
        for name, axes in itertools.product(POSTS, [("x",), ("x", "y"), ("y", "x")]):
            with Live(paper=x.is_meta) as live:
                wait = POSTS[name](x.mT if turned else x, axes)
                posted = live.now, live.peak
                # what is computed meanwhile
                beside = torch.empty(n, dtype=torch.float64, device=mesh.device)
                out = wait()
                found[name, n, dtype, axes] = *posted, live.peak
                del wait, out, beside
    return found


def test_a_transfer_takes_on_paper_what_it_takes_between_processes(pool: Any) -> None:
    """From when it is posted until it is waited for: what is computed meanwhile is beside it."""
    with sl.record(x=2, y=2):
        paper = memory_of_transfers()
    for found in pool.run(memory_of_transfers, x=2, y=2):
        wrong = {k: (said, found[k]) for k, said in paper.items() if said != found[k]}
        assert not wrong, wrong
