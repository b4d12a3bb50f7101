import functools
import gc
import re
import time
import weakref
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib import optim
from shardlib.pipeline import stages
from shardlib.pipeline.schedules import schedule

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 1, "zbv": 2, "dualpipev": 2}
"""Name -> stages on each rank."""


class _Net(nn.Module):
    """Eight blocks, a tied weight and a skip over several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(8)
        )
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + first)


RULES = [("*.0.weight", "x ."), ("*.0.bias", "x"), ("*.2.weight", ". x"), ("*", "...")]


def _loss(logits: Any, ids: Any) -> Any:
    with sl.constants():
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _made() -> tuple[_Net, torch.Tensor]:
    torch.manual_seed(0)
    return _Net().double(), torch.randint(0, 8, (16, 3))


def _staged(name: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    mesh, (net, _) = sl.current_mesh(), _made()
    rules = RULES if "x" in mesh else [("*", "...")]
    inputs = {"ids": "data ." if "data" in mesh else ". ."}
    how = sl.Stages("pipe", schedule=name, per_rank=SCHEDULES[name])
    return sl.parallelize(net, rules, inputs=inputs, stages=how, **more)


def _far(name: str, micros: int) -> tuple[float, int, Any]:
    """The largest error of loss and gradients, the parameters held here, and bytes by axis."""
    net, ids = _made()
    want = _loss(net(ids), ids)
    want.backward()
    apply, params = _staged(name)
    step = sl.value_and_grad(lambda p, ids: _loss(apply(p, ids), ids), microbatches=micros)
    with sl.trace() as t:
        loss, grads = step(params, ids)
    errors = [abs(loss.item() - want.item())]
    for n, g in grads.items():
        p = net.get_parameter(n)
        assert p.grad is not None
        errors.append(float((sl.unshard(g) - p.grad).abs().max()))
    return max(errors), len(params), t.by_axis().get("pipe", 0)


@functools.cache
def _simulated(name: str, size: int, micros: int) -> tuple[float, list[int]]:
    """The largest error of a step on simulated ranks, and the most that each stage kept."""
    kept: list[list[int]] = []

    class Noted(stages.PipelineStep):
        def run(self) -> Any:
            kept.append([0] * self.table.stages)
            return super().run()

        def _do(self, a: Any) -> None:
            super()._do(a)
            now = sum(stage == a.stage for stage, _ in self.kept)
            kept[-1][a.stage] = max(kept[-1][a.stage], now)

    with pytest.MonkeyPatch.context() as patch, sl.simulate(pipe=size, data=2, x=2):
        patch.setattr(stages, "PipelineStep", Noted)
        return _far(name, micros)[0], kept[0]


# dualpipev's rounds want a micro-batch for each stage
SIMULATED = [
    (name, p, m) for name in SCHEDULES for p, m in ((2, 8), (4, 4 + 4 * (name == "dualpipev")))
]


@pytest.mark.parametrize(("name", "size", "micros"), SIMULATED)
def test_stages_give_the_gradients_of_one_process(name: str, size: int, micros: int) -> None:
    assert _simulated(name, size, micros)[0] < 1e-12


@pytest.mark.parametrize(("name", "size", "micros"), SIMULATED)
def test_a_stage_keeps_the_micro_batches_of_its_table(name: str, size: int, micros: int) -> None:
    _, kept = _simulated(name, size, micros)
    table = schedule(name, size, micros, SCHEDULES[name])
    for rank in range(size):
        most = [n for s, n in enumerate(kept) if table.ranks[s] == rank]
        assert max(most) <= table.held[rank] <= sum(most)


def _on_their_way(name: str, micros: int) -> list[int]:
    """The most micro-batches whose outputs, and gradients, are kept here until they have left."""
    most = [0, 0]

    class Noted(stages.PipelineStep):
        def _do(self, a: Any) -> None:
            super()._do(a)
            ways: dict[str, set[Any]] = {"F": set(), "B": set()}
            for label, *_ in chain(*self.messages.leaving.values()):
                maker = self.cuts[0].owner[label.output.call]
                stage = maker if label.direction == "F" else label.user
                ways[label.direction].add((stage, label.micro))
            most[:] = map(max, most, map(len, ways.values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "PipelineStep", Noted)
        assert _far(name, micros)[0] < 1e-12
    return most


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb", "zbv", "dualpipev"])
def test_messages_are_kept_of_no_more_micro_batches_than_the_table_holds(
    name: str, pool: Any
) -> None:
    """Outputs: than the rank itself holds; gradients, on their way to others: than any rank does."""
    table = schedule(name, 4, 16, SCHEDULES[name])
    held = [table.held[rank] for rank in range(4)]
    for rank, (outputs, gradients) in enumerate(pool.run(_on_their_way, name, 16, pipe=4)):
        assert outputs <= held[rank] and gradients <= max(held) < 16


REAL = [(name, {"pipe": 4}) for name in SCHEDULES]
REAL += [(name, {"pipe": 2, "x": 2}) for name in ("1f1b", "interleaved", "zbv")]


@pytest.mark.parametrize(("name", "mesh"), REAL, ids=str)
def test_real_stages_do_what_simulated_ones_do(name: str, mesh: dict[str, int], pool: Any) -> None:
    micros = 8 if name == "dualpipev" else 4
    with sl.simulate(**mesh):
        _, whole, moved = _far(name, micros)
    found = pool.run(_far, name, micros, **mesh)
    assert max(error for error, _, _ in found) < 1e-12
    assert all(held < whole for _, held, _ in found)
    # the loss, 8 bytes to all other stages, is moved between processes alone
    assert {b for _, _, b in found} == {moved + 8 * (mesh["pipe"] - 1) // mesh["pipe"]}


def _checked() -> tuple[float, int, Any]:
    with sl.check():
        return _far("zb", 4)


def test_check_mode_compares_what_the_ranks_of_a_stage_call(pool: Any) -> None:
    assert max(error for error, _, _ in pool.run(_checked, pipe=2, x=2)) < 1e-12


STEPS = 3


def _optimizer(norm: float, split: int | None) -> tuple[Any, dict[str, Any]]:
    """A clipped AdamW, and what a step takes of it."""
    tx: Any = optim.chain(optim.clip_by_global_norm(norm), optim.adamw(1e-2))
    if split is None:
        return tx, {}
    tx = optim.zero(tx, axis="data", stage=split)
    return tx, {"into": tx}


def _trained(split: int | None, name: str, remat: str) -> dict[str, torch.Tensor]:
    """Train, and return the parameters held here."""
    _, ids = _made()
    apply, params = _staged(name, remat=[("blocks.*", remat)])
    tx, into = _optimizer(0.1, split)
    state_of: Any = tx.shard(params) if split == 3 else params
    state = tx.init(state_of)
    step = sl.value_and_grad(lambda p, ids: _loss(apply(p, ids), ids), microbatches=4, **into)
    for _ in range(STEPS):
        _, grads = step(state_of, ids)
        state_of, state, _ = optim.step(tx, state_of, grads, state)
    if split == 3:
        with state_of.opened() as whole:
            return {n: sl.unshard(x).detach() for n, x in whole.items()}
    return {n: sl.unshard(x).detach() for n, x in state_of.items()}


@pytest.mark.parametrize(
    ("split", "name", "remat"),
    [(None, "zb", "full"), (1, "interleaved", "all"), (2, "1f1b", "products"), (3, "zbv", "full")],
)
def test_stages_train_as_one_process_does(
    split: int | None, name: str, remat: str, pool: Any
) -> None:
    net, ids = _made()
    opt = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=1e-4)
    opt.param_groups[0]["weight_decay"] = _decay()
    for _ in range(STEPS):
        opt.zero_grad()
        _loss(net(ids), ids).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
    for found in pool.run(_trained, split, name, remat, pipe=2, data=2):
        for n, x in found.items():
            assert (x - net.get_parameter(n)).abs().max() < 1e-12, n


def _summed(name: str, split: int | None) -> tuple[float, bool]:
    """Seconds from the first sum of gradients over data to the end of the last action here.

    And whether bits and bytes are those of a step that sums gradients at its end.
    """
    _, ids = _made()
    apply, params = _staged(name)
    into = {}
    if split is not None:
        # a bucket for each parameter
        into = {"into": optim.zero(optim.sgd(0.1), axis="data", stage=split, bucket_mb=1e-6)}
    step = sl.value_and_grad(lambda p, ids: _loss(apply(p, ids), ids), microbatches=4, **into)
    with sl.seeing.timeline() as line, sl.trace() as early:
        grads = step(params, ids)[1]
    with pytest.MonkeyPatch.context() as patch, sl.trace() as late:
        patch.setattr(stages.PipelineStep, "_ended", lambda self, a: [])
        want = step(params, ids)[1]
    # the loss has 8 bytes
    first = min(s.start for s in line.collectives if s.axis == "data" and s.bytes > 8)
    same = all(torch.equal(g.raw, want[n].raw) for n, g in grads.items())
    end = max(s.end for s in line.spans if s.action)
    return end - first, same and early.by_axis() == late.by_axis()


@pytest.mark.parametrize(
    ("name", "split"), [("1f1b", 2), ("zb", 0), ("zbv", 2), ("interleaved", None)]
)
def test_gradients_are_summed_while_stages_compute(name: str, split: int | None, pool: Any) -> None:
    """In the last backward of each stage, with the bits and bytes of sums at the end."""
    with sl.simulate(pipe=2, data=2, x=2):
        found = [_summed(name, split)]
    found += pool.run(_summed, name, split, pipe=2, data=2)
    assert all(seconds > 0 and same for seconds, same in found)


def _decay() -> float:
    """AdamW's weight decay where none is given."""
    import inspect

    return inspect.signature(optim.adamw).parameters["weight_decay"].default


def _net(*frozen: str) -> nn.Sequential:
    """Make a net with frozen modules, or with none in its second half."""
    torch.manual_seed(len(frozen))
    net = nn.Sequential(nn.Embedding(8, 4), *[nn.Linear(4, 4) for _ in range(3)]).double()
    for name in frozen:
        net.get_submodule(name).requires_grad_(False)
    if not frozen:
        net[2], net[3] = nn.Tanh(), nn.Tanh()
    return net


IDS = torch.arange(16) % 8


def _halved(net: nn.Module, split: int | None = None) -> Any:
    """Cut a net into two stages, or none without ranks for them."""
    order = "zb" if split == 2 else "1f1b"
    stages = sl.Stages("pipe", cut=["0", "2"], schedule=order, example=(IDS,))
    stages = stages if "pipe" in sl.current_mesh() else None
    return sl.parallelize(net, [("*", "...")], inputs={"input": "data"}, stages=stages)


def _partly(
    split: int | None, apply: Any, params: Any, want: Any = 0.0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train for three steps; return norms and the parameters held here."""
    tx, into = _optimizer(0.01, split)
    kept: Any = tx.shard(params) if split == 3 else params
    state, norms = tx.init(kept), []
    loss = lambda p, ids, want: (apply(p, ids) - want).square().mean()  # noqa: E731
    step = sl.value_and_grad(loss, microbatches=4, **into)
    for _ in range(3):
        _, grads = step(kept, IDS, want)
        kept, state, info = optim.step(tx, kept, grads, state, norm=True)
        norms.append(float(info.norm))
    if split == 3:
        with kept.opened() as whole:
            kept = dict(whole)
    return norms, {n: sl.unshard(x).detach() for n, x in kept.items()}


def _frozen(split: int | None, *frozen: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return _partly(split, *_halved(_net(*frozen), split))


@pytest.mark.parametrize("split", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("frozen", [("0", "1"), ("2", "3"), ()], ids=["first", "last", "none"])
def test_a_stage_without_trained_parameters_takes_part(
    split: int | None, frozen: tuple[str, ...], pool: Any
) -> None:
    with sl.simulate(data=1):
        norms, want = _frozen(None, *frozen)
    for there, found in pool.run(_frozen, split, *frozen, pipe=2, data=2):
        assert there == pytest.approx(norms, rel=1e-12)
        for n, x in found.items():
            assert (x - want[n]).abs().max() < 1e-12, n


def _two(split: int | None, *names: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Train two models of one mesh, in turn; the student with the result of its teacher."""
    nets = {"student": _net("0", "1"), "teacher": _net("3")}
    made = {n: _halved(nets[n], split) for n in names}
    teacher, params = made["teacher"]
    with torch.no_grad():
        want = teacher(params, IDS)
    return [_partly(split, teacher, params), _partly(split, *made["student"], want)]


@pytest.mark.parametrize(
    ("split", "names"),
    [(None, ("student", "teacher")), *((s, ("teacher", "student")) for s in range(4))],
)
def test_models_of_one_mesh_may_differ_in_where_they_are_frozen(
    split: int | None, names: tuple[str, ...], pool: Any
) -> None:
    with sl.simulate(data=1):
        want = _two(None, *names)
    for both in pool.run(_two, split, *names, pipe=2, data=2):
        for (there, found), (norms, params) in zip(both, want, strict=True):
            assert there == pytest.approx(norms, rel=1e-12)
            assert all((x - params[n]).abs().max() < 1e-12 for n, x in found.items())


def _frozen_ties(split: int | None, before: str, after: str) -> dict[str, torch.Tensor]:
    """Take a step; parameters whose names match are frozen before and after the module is cut."""
    net, ids = _made()
    for n, p in net.named_parameters():
        p.requires_grad_(re.fullmatch(before, n) is None)
    cut = sl.Stages("pipe")
    apply, params = sl.parallelize(net, [("*", "...")], inputs={"ids": "data ."}, stages=cut)
    for n, x in params.items():
        x.requires_grad_(re.fullmatch(after, n) is None)
    tx, into = _optimizer(0.1, split)
    kept: Any = tx.shard(params) if split == 3 else params
    state = tx.init(kept)
    step = sl.value_and_grad(lambda p, ids: _loss(apply(p, ids), ids), microbatches=2, **into)
    _, grads = step(kept, ids)
    kept, _, _ = optim.step(tx, kept, grads, state)
    if split == 3:
        with kept.opened() as whole:
            kept = dict(whole)
    return {n: sl.unshard(x).detach() for n, x in kept.items()}


@pytest.mark.parametrize(
    ("split", "before", "after"),
    [(3, r".*\.0\..*", r".*\.0\..*"), (None, "embed.*", "x"), (2, "x", "embed.*")],
    ids=["beside", "trained later", "frozen later"],
)
def test_a_tied_weight_is_added_up_where_it_is_trained_now(
    split: int | None, before: str, after: str, pool: Any
) -> None:
    with sl.simulate(pipe=2, data=2):
        want = _frozen_ties(None, before, after)
    for found in pool.run(_frozen_ties, split, before, after, pipe=2, data=2):
        assert all((x - want[n]).abs().max() < 1e-12 for n, x in found.items())


class _Sour(nn.Module):
    """Raises on values that shapes do not show."""

    def forward(self, x: Any) -> Any:
        raw = x.raw if isinstance(x, sl.ShardedTensor) else x
        if not raw.is_meta and float(raw.detach().sum()) == 0:
            raise ValueError("all zeros")
        return x


class _Wide(nn.Module):
    """Returns more columns, or others, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.columns, self.dtype = nn.Linear(4, 4), 4, torch.float64

    def forward(self, x: Any) -> Any:
        return self.linear(x[:, :4].double()).repeat(1, 2)[:, : self.columns].to(self.dtype)


def _changed(part: str, trains: bool, **how: Any) -> tuple[str, list[float]]:
    """Change a module after its first step; say how the next one fails.

    And the losses of the first step, and on simulated ranks of one after the error's fix.
    """
    torch.manual_seed(0)
    net, x = nn.Sequential(*[_Wide() for _ in range(3)]).double(), torch.randn(4, 4).double()
    cut = sl.Stages("pipe", cut=["0", "1", "2"], example=(x,))
    apply, params = sl.parallelize(net, [("*", "...")], stages=cut)
    step: Any = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=2)
    losses = []

    def run() -> None:
        if trains:
            losses.append(float(step(params, x)[0]))
        else:
            with torch.no_grad():
                losses.append(float(sl.unshard(apply(params, x)).sum()))

    run()
    vars(apply.module.get_submodule(part)).update(how)
    try:
        run()
    except sl.ShardError as e:
        if isinstance(e, sl.errors.StageFailed):
            assert e.fix in e.message
        said = f"{type(e).__name__}: {e.message}"
        if sl.current_mesh().coord is None:
            exec(e.fix, {"apply": apply})
            run()
        return said, losses
    return "nothing", losses


UNLIKE = [
    (
        ("0", True), {"columns": 6},
        "stage 0 (0), forward of micro-batch 0: ShardError: stage 1 expects 0 as "
        "torch.float64[2, 4], and it is torch.float64[2, 6]: ",
    ),
    (
        ("1", True), {"dtype": torch.float32},
        "stage 1 (1), forward of micro-batch 0: ShardError: stage 2 expects 1 as "
        "torch.float64[2, 4], and it is torch.float32[2, 4]: ",
    ),
    (
        ("2", False), {"columns": 6},
        "stage 2 (2), forward of micro-batch 0: ShardError: every rank expects the result as "
        "torch.float64[4, 4], and it is torch.float64[4, 6]: ",
    ),
    (
        ("2", True), {"dtype": torch.float32},
        "stage 2 (2), forward of micro-batch 0: ShardError: every rank expects the result as "
        "torch.float64[], and it is torch.float32[]: ",
    ),
]  # fmt: skip


def test_a_wrong_shape_between_stages_names_both_sides() -> None:
    for at, how, why in UNLIKE[:2]:
        with sl.simulate(pipe=3):
            said, losses = _changed(*at, **how)
        assert said.startswith("StageFailed: ") and why in said.replace("[1, 2, ", "[2, ")
        # columns that the next stage does not read, and another dtype
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def _changed_and_stays(folder: Path, at: Any, how: dict[str, Any]) -> None:
    said, _ = _changed(*at, **how)
    (folder / str(sl.axis_index("pipe"))).write_text(said)


@pytest.mark.parametrize(("at", "how", "why"), UNLIKE, ids=["sizes", "dtype", "result", "loss"])
def test_a_wrong_shape_is_told_to_all_ranks_before_it_is_sent(
    at: Any, how: dict[str, Any], why: str, tmp_path: Path, forked: None
) -> None:
    with pytest.raises(sl.errors.RankFailed, match=re.escape(why)):
        sl.launch(_changed_and_stays, tmp_path, at, how, pipe=3, timeout=20.0)
    for rank in range(3):
        said = (tmp_path / str(rank)).read_text()
        failed = "StageFailed" if str(rank) == at[0] else "RankFailed"
        assert said.startswith(f"{failed}: ") and why in said and "apply.stages.memo" in said


def test_micro_batches_of_one_row_give_weights_their_gradients_later() -> None:
    """The sum of a bias does not write to the gradient of its layer's result."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)]).double()
    x = torch.randn(2, 4).double()
    net(x).square().mean().backward()
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(
            net, [("*", "...")], stages=sl.Stages("pipe", schedule="zb", example=(x,))
        )
        step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=2)
        _, grads = step(params, x)
    for n, p in net.named_parameters():
        torch.testing.assert_close(sl.unshard(grads[n]), p.grad)


def _fails() -> str:
    net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)], _Sour())
    mesh = sl.current_mesh()
    stage = sl.Stages("pipe", cut=["0", "1", "2"], example=(torch.ones(2, 4),))
    apply, params = sl.parallelize(net, [("*", "...")], mesh=mesh, stages=stage, src=0)
    batch = torch.cat([torch.ones(4, 4), torch.zeros(2, 4), torch.ones(2, 4)])
    step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=4)
    try:
        step(params, batch)
    except sl.ShardError as e:
        return f"{type(e).__name__}: {e.message}"
    return "nothing"


def test_a_stage_that_raises_is_named_with_its_micro_batch() -> None:
    with sl.simulate(pipe=3):
        assert _fails() == (
            "StageFailed: stage 2 (2), forward of micro-batch 2: ValueError: all zeros"
        )


def test_a_hook_added_between_two_steps_takes_outputs_of_other_stages() -> None:
    """A step after it is cut anew: the hook's output is sent to the stage that uses it."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)]
    ).double()
    x, got = torch.randn(4, 4).double(), []

    def loss(apply: Any, x: Any) -> Any:
        out = apply(x).square().mean()
        return out + got.pop().square().mean() if got else out

    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(net, [("*", "...")], stages=sl.Stages("pipe"))
        step = sl.value_and_grad(lambda p, x: loss(lambda x: apply(p, x), x), microbatches=2)
        before = [step(params, x)[0].item(), loss(net, x).item()]
        for m in (apply.module.get_submodule("0.0"), net[0][0]):
            m.register_forward_hook(lambda m, a, out: got.append(out))
        value, grads = step(params, x)
        got.clear()
        want = loss(net, x)
        want.backward()
        after = [value.item(), want.item()]
        assert before[0] == pytest.approx(before[1]) and after[0] == pytest.approx(after[1])
        assert before[0] != pytest.approx(after[0])
        for n, p in net.named_parameters():
            torch.testing.assert_close(sl.unshard(grads[n]), p.grad)


def _fails_and_stays(folder: Path) -> None:
    """Write how the step failed here; the rank that failed goes on until the others have."""
    said = _fails()
    (folder / str(sl.axis_index("pipe"))).write_text(said)
    until = time.monotonic() + 10 * said.startswith("StageFailed")
    while time.monotonic() < until and len(list(folder.iterdir())) < 3:
        time.sleep(0.05)
    (folder / str(sl.axis_index("pipe"))).write_text(f"{said} {len(list(folder.iterdir()))}")


def test_a_stage_that_raises_is_named_on_the_ranks_that_wait_for_it(
    tmp_path: Path, forked: None
) -> None:
    """Its caller catches the error, so that its process does not end."""
    why = "stage 2 (2), forward of micro-batch 2: ValueError: all zeros"
    with pytest.raises(sl.errors.RankFailed, match=re.escape(why)):
        sl.launch(_fails_and_stays, tmp_path, pipe=3, timeout=20.0)
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    for rank, said in enumerate(found):
        assert said.startswith(f"{'StageFailed' if rank == 2 else 'RankFailed'}: ") and why in said
    # while it ran on, the others knew
    assert found[2].endswith(" 3")


def _left_after_a_step(schedule: str) -> tuple[bool, int]:
    """Whether the batch is freed when the caller drops it, and how many blocks more each step leaves."""
    apply, params = _staged(schedule)
    step = sl.value_and_grad(lambda p, ids: _loss(apply(p, ids), ids), microbatches=8)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(4):
            _, ids = _made()
            batch = weakref.ref(ids)
            step(params, ids)
            del ids
            counts.append(sum(type(x) is torch.Tensor for x in gc.get_objects()))
        return batch() is None, max(0, min(b - a for a, b in pairwise(counts)))
    finally:
        gc.enable()


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_a_step_keeps_nothing_of_its_batch(schedule: str, pool: Any) -> None:
    with sl.simulate(pipe=4):
        assert _left_after_a_step(schedule) == (True, 0)
    assert pool.run(_left_after_a_step, schedule, pipe=4) == [(True, 0)] * 4


class _Placed(nn.Module):
    """Calls a function of sharded values; which values it gets is counted."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.linear, self.calls, self.plain = nn.Linear(4, 4), calls, 0
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.scale: Any

    def forward(self, x: Any) -> Any:
        # a write that no other micro-batch reads
        self.scale.add_(1)
        out = self.linear(x) * self.scale
        self.plain += not isinstance(out, sl.ShardedTensor)
        return sl.reshard(out, "...") if self.calls else out


def _on_blocks(calls: bool, schedule: str) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(*[_Placed(calls and i % 2 == 1) for i in range(4)]).double()
    how = sl.Stages("pipe", schedule=schedule, example=(torch.ones(2, 4).double(),))
    apply, params = sl.parallelize(net, [("*", "...")], stages=how)
    seen: list[str] = []

    def loss(p: Any, x: Any) -> Any:
        # a parameter of the loss's own making is what the module gets
        p = {n: w * 2 if n.endswith("bias") else w for n, w in p.items()}
        out = apply(p, x)
        seen.append(type(out).__name__)
        return out.square().mean()

    step = sl.value_and_grad(loss, microbatches=2)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(2):
        value, grads = step(params, x)
    plain = sum(m.plain for m in apply.module.modules() if isinstance(m, _Placed))
    return value.item(), {n: g.raw.squeeze(0) for n, g in grads.items()}, plain, set(seen)


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize("calls", [False, True])
def test_a_stage_of_one_rank_runs_on_blocks_unless_its_module_asks_for_values(
    pool: Any, calls: bool, schedule: str
) -> None:
    with sl.simulate(pipe=4):
        value, grads, _, _ = _on_blocks(calls, schedule)
    said = pool.run(_on_blocks, calls, schedule, pipe=4)
    for rank, (found, here, plain, seen) in enumerate(said):
        assert found == pytest.approx(value, rel=1e-12)
        # the module's result is a value of the mesh again, on the last stage
        assert seen <= {"ShardedTensor"}
        # a stage whose module calls functions of sharded values found out once
        assert plain == (4 if not calls or rank % 2 == 0 else 1)
        for n, g in here.items():
            assert (g - grads[n].reshape(g.shape)).abs().max() < 1e-12, n


class _Complex(nn.Module):
    """Products of complex numbers whose parts are parameters, one with an addend of many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4, 2)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Any) -> Any:
        w, b = map(torch.view_as_complex, (self.w, self.b))
        return torch.addmm(torch.nn.functional.linear(x, w, b), x, w)


def _complex() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*[_Complex() for _ in range(4)]).double()
    return net, torch.randn(4, 4, dtype=torch.complex128)


def _of_complex() -> dict[str, torch.Tensor]:
    net, x = _complex()
    how = sl.Stages("pipe", schedule="zb", example=(x,))
    apply, params = sl.parallelize(net, [("*", "...")], stages=how)
    step = sl.value_and_grad(lambda p, x: apply(p, x).abs().square().mean(), microbatches=2)
    return {n: sl.unshard(g) for n, g in step(params, x)[1].items()}


def test_gradients_of_complex_weights_computed_later_are_conjugated(pool: Any) -> None:
    net, x = _complex()
    net(x).abs().square().mean().backward()
    for grads in pool.run(_of_complex, pipe=4):
        for n, g in grads.items():
            torch.testing.assert_close(g, net.get_parameter(n).grad)
