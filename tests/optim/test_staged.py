"""Stages of a pipeline, dealt by hand: together they take the steps of the whole tree.

A rank holds some of a model's parameters, on a mesh of its own.  Gradients come from a dense run,
one row for each of some micro-batches, which are dealt over the other axis: only what the optimizer
does with stages is under test.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.optim.buckets import Buckets
from tests.ops.cases import ids, r

o = sl.optim
MESHES = [{"pipe": 2, "data": 2}, {"pipe": 4}, {"data": 2, "pipe": 2}]
WIDTHS = [6, 10, 7, 9, 6]
TIED = "table.weight"
STEPS = 4

TX: dict[str, Any] = {
    "adamw": lambda: o.adamw(0.01, weight_decay=0.1),
    "lamb": lambda: o.lamb(0.01),
    "adafactor": lambda: o.adafactor(0.01),
    "muon": lambda: o.muon(0.01, rest=o.adamw(0.01), matrices=["layers.0.weight", "table.*"]),
    "mean": lambda: o.averaged(o.adamw(0.01), 0.9),
    "twice": lambda: o.multi_steps(o.adamw(0.01), 2),
    "skip": lambda: o.skip_nonfinite(o.chain(o.clip_by_global_norm(0.5), o.adamw(0.01))),
    "scale": lambda: o.loss_scale(o.chain(o.clip_by_global_norm(0.5), o.adamw(0.01)), 4.0),
    "groups": lambda: o.partition(
        {"table": o.sgd(0.1, 0.9), "rest": o.chain(o.clip_by_global_norm(0.1), o.adamw(0.01))},
        [("table.*", "table"), ("*", "rest")],
    ),
}
Case = tuple[str, str, int | None, str | None]
"""Transform, where it clips, stage of zero if any, its master."""


def made(case: Case, axis: str) -> Any:
    name, clip, split, master = case
    tx = TX[name]()
    tx = o.chain(o.clip_by_global_norm(0.5), tx) if clip == "inside" else tx
    if split is not None:
        # several buckets, so that their order is agreed
        how: Any = {} if split == 3 else {"bucket_mb": 1e-4}
        tx = o.zero(tx, axis, split, master=master, **how)  # type: ignore[arg-type]
    return o.chain(o.clip_by_global_norm(0.5), tx) if clip == "outside" else tx


@cache
def dense() -> dict[str, Tensor]:
    """Four layers of different widths between an embedding and itself."""
    out = {TIED: r(12, 6, seed=9)}
    for i, (m, n) in enumerate(pairwise(WIDTHS)):
        out[f"layers.{i}.weight"], out[f"layers.{i}.bias"] = r(n, m, seed=i), r(n, seed=i + 4)
    return out


def loss(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = params[TIED][tokens]
    for i in range(len(WIDTHS) - 1):
        x = F.linear(x, params[f"layers.{i}.weight"], params[f"layers.{i}.bias"]).tanh()
    return F.cross_entropy(x @ params[TIED].T, tokens.roll(1))


@cache
def gradients(step: int) -> dict[str, Tensor]:
    """Rows whose sum is the gradient of the mean loss of as many micro-batches."""
    params = {n: x * (1 + 0.1 * step) for n, x in dense().items()}
    batches = ids(32).split(8)
    found = [torch.func.grad(lambda p, b=b: loss(p, b) / len(batches))(params) for b in batches]
    return {n: torch.stack([g[n] for g in found]) for n in params}


@contextmanager
def stage() -> Iterator[tuple[Any, list[str]]]:
    """The mesh of this rank's stage, and its names: the last stage's embedding is the first's.

    Each but the last holds one layer.
    """
    mesh = sl.current_mesh()
    inner, at, stages = mesh.without("pipe"), (mesh.coord or {})["pipe"], mesh["pipe"]
    ends = [*range(1, stages), len(WIDTHS) - 1]
    mine = [f"layers.{i}.{k}" for i in range(at, ends[at]) for k in ("weight", "bias")]
    assert inner.outer is not None
    # the mesh is kept: others may have left it frozen, and others use it afterwards
    inner.outer.__init__(inner.outer.mesh, inner.outer.axis)
    inner.outer.hold(mesh, {TIED: (0, stages - 1)}, at)
    try:
        yield inner, [TIED, *mine] if at in (0, stages - 1) else mine
    finally:
        inner.outer.__init__(inner.outer.mesh, inner.outer.axis)


def taken(tx: Any, params: Any, given: dict[str, Tensor]) -> Any:
    """Gradients of a loss that is linear in the parameters, into ``tx``'s buckets if it has some."""
    mesh = next(iter(params.values())).mesh

    def linear(p: Any) -> Tensor:
        if isinstance(p, Buckets):
            with p.opened() as found:  # type: ignore[attr-defined]
                return linear(found)
        rows = f"{next(iter(mesh))} ..."
        each = [(x * sl.shard(given[n].to(x.dtype), rows, mesh)).sum() for n, x in p.items()]
        return torch.stack(each).sum()

    return sl.value_and_grad(linear, into=tx if tx.sink else None)(params)[1]


def whole(params: Any) -> dict[str, Tensor]:
    if isinstance(params, Buckets):
        with torch.no_grad(), params.opened() as found:  # type: ignore[attr-defined]
            return whole(found)
    return {n: sl.unshard(x).detach().clone() for n, x in params.items()}


Found = tuple[dict[str, Tensor], list[float]]
"""Parameters after the steps, and the norm of each."""


def trained(case: Case, mesh: Any, names: Sequence[str]) -> Found:
    tx, dtype = made(case, next(iter(mesh))), torch.bfloat16 if case[3] else torch.float64
    params = tx.shard({n: sl.shard(dense()[n].to(dtype), "...", mesh) for n in names})
    state, norms = tx.init(params), []
    for i in range(STEPS):
        given = dict(gradients(i))
        if case[0] in ("skip", "scale") and i == 2:  # one stage alone holds it
            given["layers.2.bias"] = given["layers.2.bias"] * float("nan")
        params, state, info = o.step(tx, params, taken(tx, params, given), state, norm=True)
        norms.append(float(info.norm))
    return whole(params), norms


def by_stage(cases: Sequence[Case], check: bool = False) -> list[Found]:
    with stage() as (inner, names), sl.check() if check else nullcontext():
        return [trained(case, inner, names) for case in cases]


def by_torch() -> Found:
    params, norms = {n: x.clone().requires_grad_() for n, x in dense().items()}, []
    optimizer = torch.optim.AdamW(params.values(), 0.01, weight_decay=0.1)
    for i in range(STEPS):
        for n, rows in gradients(i).items():
            params[n].grad = rows.sum(0)
        norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), 0.5)))
        optimizer.step()
    return {n: x.detach() for n, x in params.items()}, norms


def far(got: Found, want: Found) -> float:
    """The largest difference of parameters, and of norms that are numbers."""
    (ours, norms), (theirs, others) = got, want
    errors = [float((x - theirs[n]).abs().max()) for n, x in ours.items()]
    return max([*errors, *(abs(a - b) for a, b in zip(norms, others, strict=True) if a == a)])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_stages_take_the_steps_of_torch(mesh: dict[str, int], pool: Any) -> None:
    """Clipped by the norm of all parameters, in which a tied one counts once."""
    cases: list[Case] = [("adamw", "inside", split, None) for split in (None, 0, 1, 2, 3)]
    cases += [("adamw", "outside", split, None) for split in (0, 1, 2)]
    cases = cases if mesh == MESHES[0] else cases[1::2]  # zero 0, 2, and a clip of 0, 2
    want = by_torch()
    for got in pool.run(by_stage, cases, **mesh):
        assert [case for case, one in zip(cases, got, strict=True) if far(one, want) > 1e-12] == []


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_stages_take_the_steps_of_the_whole_tree(mesh: dict[str, int], pool: Any) -> None:
    """Whatever the transform, under check mode, and halves with masters bit for bit."""
    cases: list[Case] = [("adamw", "inside", split, "fp32") for split in (1, 2, 3)]
    cases += [("muon", "inside", split, None) for split in (None, 1, 2, 3)]
    cases += [(name, "inside", split, None) for name in ("lamb", "adafactor") for split in (1, 3)]
    cases += [("mean", "inside", 2, None), ("twice", "inside", 2, None)]
    cases += [("groups", "", 3, None), ("scale", "", 1, None)]
    cases += [("skip", "", split, None) for split in (None, 2)]
    cases = cases if mesh == MESHES[0] else cases[2::3]  # one of a stage has nothing to divide
    with sl.simulate(data=mesh.get("data", 1)) as one:
        want = [trained(case, one, list(dense())) for case in cases]
    for got in pool.run(by_stage, cases, True, **mesh):
        errors = map(far, got, want)
        wrong = [(c, e) for c, e in zip(cases, errors, strict=True) if e > (0 if c[3] else 1e-12)]
        assert wrong == []


def norms(ps: Sequence[float]) -> list[list[float]]:
    """The norms of a stage's gradients as a tree, in whole buckets and in parts."""
    out = []
    with stage() as (inner, names):
        axis = next(iter(inner))
        params = {n: sl.shard(dense()[n], "...", inner) for n in names}
        for split in (0, 1, 2):
            grads = taken(o.zero(o.sgd(1.0), axis, split), params, gradients(0))
            out.append([float(o.global_norm(grads, p)) for p in ps])
        # the last stage trains nothing, as its parameters are frozen
        held = dict.fromkeys(grads) if inner.outer.copies else params
        out.append([float(o.global_norm(held, p)) for p in ps])
    return out


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_a_norm_is_that_of_all_stages(mesh: dict[str, int], pool: Any) -> None:
    ps = [1.0, 2.0, float("inf")]
    grads = {n: rows.sum(0) for n, rows in gradients(0).items()}
    last = tuple(f"layers.{i}." for i in range(mesh["pipe"] - 1, len(WIDTHS) - 1))
    left = [x for n, x in dense().items() if not n.startswith(last)]
    want = [
        torch.stack([torch.cat([x.flatten() for x in xs]).norm(p) for p in ps])
        for xs in (grads.values(), left)
    ]
    for got in pool.run(norms, ps, **mesh):
        ours = torch.tensor(got, dtype=torch.float64)
        assert torch.allclose(ours, torch.stack([*[want[0]] * 3, want[1]]), 1e-14)


def test_a_simulated_stage_holds_all_parameters() -> None:
    with sl.simulate(pipe=2, data=2) as mesh, sl.trace() as t:
        inner = mesh.without("pipe")
        norm = o.global_norm({n: sl.shard(x, "...", inner) for n, x in dense().items()})
    assert abs(norm - torch.cat([x.flatten() for x in dense().values()]).norm()) < 1e-12
    assert [e.axis for e in t.events] == ["data"]


def labelled() -> str:
    """A mask by names of which a stage has none, and a clip of a label of which it has none."""
    with stage() as (inner, names):
        params = {n: sl.shard(dense()[n], "...", inner) for n in names}
        tx = o.masked(o.scale(-1.0), ["layers.0.*", "layers.3.bias"])
        updates, _ = tx.update(params, tx.init(params), params)
        for n, x in updates.items():
            asked = n.startswith("layers.0") or n == "layers.3.bias"
            assert torch.equal(sl.unshard(x), -dense()[n] if asked else dense()[n])
        clipped = o.chain(o.clip_by_global_norm(1.0), o.sgd(0.1))
        try:
            o.partition(
                {"one": clipped, "rest": o.sgd(0.1)}, [("layers.0.*", "one"), ("*", "rest")]
            ).init(params)
        except sl.ShardError as e:
            return e.message
    return ""


def test_labels_may_name_parameters_of_other_stages(pool: Any) -> None:
    said = pool.run(labelled, pipe=2, data=2)
    assert said[:2] == ["", ""] and all("no parameter of this stage" in text for text in said[2:])
