"""Pipelines as docs/pipelines.md describes them: what it prints, equals, sends and refuses."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl

PAGE = (Path(__file__).parent.parent / "docs" / "pipelines.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.S)
NUMBER = re.compile(r"\d+\.\d+")
RULES = [("*", "...")]


@pytest.mark.parametrize("number", range(7))
def test_the_page_prints_what_stands_below_its_blocks(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    block, printed = BLOCKS[number]
    exec(compile(block, "cell", "exec"), {"__name__": "__main__"})
    now, then = (re.sub(r".* at .*\n", "", text) for text in (capsys.readouterr().out, printed))
    assert NUMBER.sub("#", now) == NUMBER.sub("#", then)
    numbers = zip(NUMBER.findall(now), NUMBER.findall(then), strict=True)
    assert all(float(a) == pytest.approx(float(b), abs=1e-5) for a, b in numbers)


class Skipping(nn.Module):
    """A table, a skip over all blocks, a block that is called twice, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(ids)
        for block in [*self.blocks, self.blocks[3]]:
            x = self.drop(block(x * torch.arange(8.0).cos().to(x.dtype)).tanh())
        return self.head(x + first)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


IDS = torch.arange(48).reshape(8, 6)


def step(model: nn.Module, pipe: int, m: int = 4, **stages: Any) -> tuple[Any, Any]:
    with sl.simulate(pipe=pipe):
        torch.manual_seed(0)
        cut = sl.Stages("pipe", **stages)
        apply, params = sl.parallelize(model, RULES, stages=cut)
        run = sl.value_and_grad(lambda p, x, y: loss_of(apply(p, x), y), microbatches=m)
        loss, grads = run(params, IDS, sl.shard(IDS, "..."))
        return loss.item(), {n: sl.unshard(g) for n, g in grads.items()}


def test_a_step_has_the_loss_and_gradients_of_one_process() -> None:
    model = Skipping().double().eval()
    loss_of(model(IDS), IDS).backward()
    loss, grads = step(model, 4)
    assert loss == pytest.approx(loss_of(model(IDS), IDS).item(), rel=1e-12)
    for name, p in model.named_parameters():
        assert torch.allclose(grads[name], p.grad, rtol=1e-12, atol=1e-15), name


def test_weights_make_a_mean_over_tokens_that_of_the_whole_batch() -> None:
    model = Skipping().double().eval()
    labels = IDS.masked_fill(IDS % 7 < IDS // 12, -100)
    loss_of(model(IDS), labels).backward()
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(model, RULES, stages=sl.Stages("pipe"))
        run = sl.value_and_grad(
            lambda p, x, y: loss_of(apply(p, x), y),
            microbatches=4,
            weigh=lambda x, y: (y != -100).sum(),
        )
        loss, grads = run(params, IDS, sl.shard(labels, "..."))
        assert loss.item() == pytest.approx(loss_of(model(IDS), labels).item(), rel=1e-12)
        for name, p in model.named_parameters():
            assert torch.allclose(sl.unshard(grads[name]), p.grad, rtol=1e-12, atol=1e-15), name


@pytest.mark.parametrize("labels", ["data .", "...", "x .", "(data x) ."])
def test_without_stages_micro_batches_are_accumulation(labels: str) -> None:
    """Gradients are those of the whole batch, however arguments are split, and are summed once."""
    model = Skipping().double().eval()
    loss_of(model(IDS), IDS).backward()
    moved = []
    with sl.simulate(data=2, x=2), sl.implicit(1 << 30):
        apply, params = sl.parallelize(model, RULES, inputs={"ids": "data ."})
        for m in (1, 2):
            run = sl.value_and_grad(lambda p, x, y: loss_of(apply(p, x), y), microbatches=m)
            with sl.trace() as t:
                loss, grads = run(params, IDS, sl.shard(IDS, labels))
            moved.append(t.bytes)
            assert loss.item() == pytest.approx(loss_of(model(IDS), IDS).item(), rel=1e-12)
            for name, p in model.named_parameters():
                assert torch.allclose(sl.unshard(grads[name]), p.grad, rtol=1e-12, atol=1e-15)
    assert moved[1] - moved[0] < 200 < moved[0]  # a few scalars of each micro-batch


class Collecting(nn.Module):
    """A hook in one block takes an output, which is used at the end."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.found: list[torch.Tensor] = []
        self.reads_input = False
        inner: Any = self.blocks[block]
        inner[0].register_forward_hook(self.note)

    def note(self, _: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.found.append(args[0] if self.reads_input else out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.clear()
        for block in self.blocks:
            x = block(x)
        return x + self.found[0]


@pytest.mark.parametrize("block", [0, 3])
def test_hooks_take_outputs_of_layers_on_other_stages(block: int) -> None:
    model, x = Collecting(block).double(), torch.randn(8, 8, dtype=torch.float64)
    expected = model(x).square().mean()
    grads = torch.autograd.grad(expected, list(model.parameters()))
    with sl.simulate(pipe=2):
        stages = sl.Stages("pipe", example=x)
        apply, params = sl.parallelize(model, RULES, stages=stages)
        run = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=2)
        loss, found = run(params, x)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        for (name, _), g in zip(model.named_parameters(), grads, strict=True):
            assert torch.allclose(sl.unshard(found[name]), g, rtol=1e-12, atol=1e-15), name


def test_a_hook_that_reads_the_input_of_another_stage_is_refused() -> None:
    model = Collecting(0)
    model.reads_input = True
    stages = sl.Stages("pipe", example=torch.randn(8, 8))
    with (
        sl.simulate(pipe=2),
        pytest.raises(sl.ShardError, match="did not return"),
    ):
        sl.parallelize(model, RULES, stages=stages)


def test_draws_are_the_same_for_every_cut_and_schedule() -> None:
    model = Skipping().double()
    losses = {step(model, *case)[0] for case in [(1,), (2,), (4,)]}
    losses |= {step(model, 2, schedule="gpipe")[0], step(model, 2, cut=["embed", "blocks.3"])[0]}
    assert max(losses) == pytest.approx(min(losses), rel=1e-12)
    assert abs(min(losses) - step(model.eval(), 2)[0]) > 1e-3


def test_a_forward_outside_a_step_gives_every_rank_the_result() -> None:
    model = Skipping().eval()
    with sl.simulate(pipe=2), torch.no_grad():
        apply, params = sl.parallelize(model, RULES, stages=sl.Stages("pipe"))
        assert torch.allclose(sl.unshard(apply(params, IDS)), model(IDS), atol=1e-6)


def test_guessed_inputs_have_the_rank_of_their_layout() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
    with sl.simulate(pipe=2, data=2):
        stages = sl.Stages("pipe")
        apply, _ = sl.parallelize(model, RULES, inputs={"input": "data ."}, stages=stages)
        assert "0 | 1" in str(apply.stages)


def _beside(f: Any) -> Any:
    """Add another module's call to a loss."""
    other, params = sl.parallelize(nn.Linear(6, 6), RULES)
    return lambda p, x, y: f(p, x, y) + other(params, x.float()).mean()


Loss = Callable[..., Any]
HEAD = "blocks.0.weight"
REFUSED: dict[str, tuple[Callable[[Any], Loss], dict[str, Any], str]] = {
    "rows": (lambda f: f, {"microbatches": 3}, "8 rows are not 3 equal micro-batches"),
    "aux": (lambda f: lambda *a: (f(*a), 0), {"has_aux": True}, "give one loss"),
    "twice": (lambda f: lambda *a: f(*a) + f(*a), {}, "calls one module with stages, once"),
    "other": (_beside, {}, "once, and no other module"),
    "number": (lambda f: lambda *a: 1.0 * bool(f(*a).shape), {}, "a float, and no tensor in it"),
    "none": (lambda f: lambda p, *_: p[HEAD].sum(), {}, "calls no module that has stages"),
    "read": (lambda f: lambda p, *a: f(p, *a) + p[HEAD].sum(), {}, "at pipe=1, and the module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_run_in_stages_is_refused(name: str) -> None:
    made, how, why = REFUSED[name]
    with sl.simulate(pipe=2), pytest.raises(sl.ShardError, match=why):
        apply, params = sl.parallelize(Skipping().eval(), RULES, stages=sl.Stages("pipe"))
        loss = made(lambda p, x, y: loss_of(apply(p, x), y))
        run = sl.value_and_grad(loss, **{"microbatches": 2, **how})
        run(params, IDS, sl.shard(IDS, "..."))


def test_a_batch_that_is_no_argument_of_the_step_is_refused() -> None:
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(Skipping().eval(), RULES, stages=sl.Stages("pipe"))
        labels = sl.shard(IDS, "...")
        with pytest.raises(sl.ShardError, match="no argument has rows"):
            sl.value_and_grad(lambda p: apply(p, IDS).mean(), microbatches=2)(params)
        with pytest.raises(sl.ShardError, match="a step takes it as an argument"):
            loss = lambda p, x: loss_of(apply(p, x), labels)  # noqa: E731
            sl.value_and_grad(loss, microbatches=2)(params, IDS)
        with pytest.raises(sl.ShardError, match="split over 'pipe'"):
            loss = lambda p, x: apply(p, x).mean()  # noqa: E731
            sl.value_and_grad(loss, microbatches=2)(params, sl.shard(IDS, "pipe ."))


def test_statistics_of_a_batch_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with sl.simulate(pipe=2), pytest.raises(sl.errors.Unsupported):
        apply, params = sl.parallelize(
            model, RULES, stages=sl.Stages("pipe", example=torch.ones(4, 8))
        )
        sl.value_and_grad(lambda p, x: apply(p, x).mean(), microbatches=2)(params, torch.ones(4, 8))


class Skips(nn.Module):
    """Leaves a block out, at random or of a given number."""

    def __init__(self, rate: float = 0.0, left: int = -1, layerdrop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rate, self.left, self.layerdrop = rate, left, layerdrop

    def forward(self, x: Any) -> Any:
        for i, block in enumerate(self.blocks):
            if i != self.left and not (self.training and torch.rand(()) < self.rate):
                x = block(x)
        return x


X = torch.randn(8, 8)
MISUSED: dict[str, tuple[nn.Module, Any, Any, str]] = {
    "numpy": (Skips(), None, (X.cpu().numpy(),), "is a numpy.ndarray, neither a tensor nor"),
    "random": (Skips(rate=1.0), None, (X,), "skipped at random, as by LayerDrop"),
    "layerdrop": (Skips(layerdrop=0.5), None, (X,), "Skips in training skips blocks at random"),
    "text": (Skips(), "pipe", (X,), "stages='pipe' is no sl.Stages"),
    "per_rank": (Skips(), {"per_rank": 2}, (X,), "1f1b of 2 ranks with 2 stages each"),
    "rows": (Skips(), None, (X[:7],), "7 rows are not 2 equal micro-batches"),
    "axis": (Skips(), {"axis": "x"}, (X,), "unknown axis 'x'; this mesh has pipe"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_a_misuse_is_refused_by_name(name: str) -> None:
    model, how, batch, why = MISUSED[name]
    with sl.simulate(pipe=2), pytest.raises(sl.ShardError, match=why):
        stages = (
            how
            if isinstance(how, str)
            else sl.Stages(**{"axis": "pipe", "example": X, **(how or {})})
        )
        apply, params = sl.parallelize(model, RULES, stages=stages)
        sl.value_and_grad(lambda p, x: apply(p, x).mean(), microbatches=2)(params, *batch)


def _paired(between: bool) -> tuple[nn.Module, type]:
    """A module of two blocks with a dataclass between them or as its result, and that class."""

    @dataclass
    class Pair:
        a: torch.Tensor
        b: torch.Tensor

    class Paired(nn.Linear):
        def forward(self, x: Any) -> Any:
            x = x if isinstance(x, Pair) else Pair(x, x)
            return Pair(super().forward(x.a), x.b)

    class Outer(nn.Sequential):
        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            return out.a if between else Pair(out, out)

    # the mean may be near 0, where fp32 has few digits left
    return Outer(*((Paired if between else nn.Linear)(8, 8) for _ in range(2))).double(), Pair


@pytest.mark.parametrize("between", [True, False])
def test_a_dataclass_of_tensors_is_refused_unless_it_is_registered(between: bool) -> None:
    rows = X.double()
    stages = sl.Stages("pipe", example=rows)
    loss = lambda out: (out if between else out.b).mean()  # noqa: E731
    with sl.simulate(pipe=2):
        why = f"{'0' if between else 'the function'} returns a Pair, whose tensors are not known"
        with pytest.raises(sl.ShardError, match=why):
            model, Pair = _paired(between)  # noqa: RUF059 the fix names it
            sl.parallelize(model, RULES, stages=stages)
        model, registered = _paired(between)
        torch.export.register_dataclass(registered)
        apply, params = sl.parallelize(model, RULES, stages=stages)
        run = sl.value_and_grad(lambda p, x: loss(apply(p, x)), microbatches=2)
        assert run(params, rows)[0].item() == pytest.approx(loss(model(rows)).item(), rel=1e-5)


def test_an_array_is_not_cut_without_stages_either() -> None:
    with sl.simulate(data=1), pytest.raises(sl.ShardError, match=r"is a numpy.ndarray"):
        apply, params = sl.parallelize(Skips(), RULES)
        loss = lambda p, x, y: apply(p, x).mean() + y.mean()  # noqa: E731
        sl.value_and_grad(loss, microbatches=2)(params, X, X.cpu().numpy())


@pytest.mark.parametrize("left", range(4))
def test_a_block_that_is_skipped_after_the_cut_is_refused(left: int) -> None:
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(Skips(), RULES, stages=sl.Stages("pipe", example=X))
        run = sl.value_and_grad(lambda p, x: apply(p, x).mean(), microbatches=2)
        run(params, X)
        apply.module.left = left
        with pytest.raises(sl.errors.StageFailed, match=f"blocks.{left} was next when the stages"):
            run(params, X)


def test_a_loss_that_reads_a_value_is_refused() -> None:
    with sl.simulate(pipe=2), pytest.raises(sl.ShardError, match="stages are cut by shapes alone"):
        apply, params = sl.parallelize(Skips(), RULES, stages=sl.Stages("pipe", example=X))

        def loss(p: Any, x: Any) -> Any:
            out = apply(p, x)
            return out.mean() * out.sum().item()

        sl.value_and_grad(loss, microbatches=2)(params, X)


def test_a_staged_model_is_no_module() -> None:
    with sl.simulate(pipe=2), pytest.raises(sl.errors.Unsupported, match="no forward of its own"):
        sl.as_module(*sl.parallelize(Skips(), RULES, stages=sl.Stages("pipe", example=X)))


def test_an_axis_of_one_rank_is_one_stage() -> None:
    model = Skips().double()
    with sl.simulate(pipe=1, data=2):
        apply, params = sl.parallelize(model, RULES, stages=sl.Stages("pipe", example=X.double()))
        run = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=2)
        loss, _ = run(params, X.double())
        assert loss.item() == pytest.approx(model(X.double()).square().mean().item(), rel=1e-12)


def test_recipes_suggest_axes_that_layouts_may_name() -> None:
    with sl.simulate(pipe=2, data=2), pytest.raises(sl.errors.UnknownAxis) as e:
        sl.recipes.fsdp(Skips())
    assert e.value.fix == "sl.recipes.fsdp(model, axis='data')"


def test_a_micro_batch_without_weight_is_left_out(pool: Any) -> None:
    """The mean over its tokens is NaN, whose gradient would be too."""
    with sl.simulate(data=1):
        want, grads = _some_ignored()
    with sl.simulate(pipe=2):
        for loss, found in [_some_ignored(), *pool.run(_some_ignored, pipe=4)]:
            assert loss == pytest.approx(want, rel=1e-12)
            for name, g in found.items():
                assert torch.allclose(g, grads[name], rtol=1e-12, atol=1e-15), name


def _some_ignored() -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Skipping().double().eval()
    labels = torch.where(IDS < 12, -100, IDS)

    def loss(logits: Any, y: Any) -> Any:
        kept = (y != -100).double()
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return (each.view(y.shape) * kept).sum() / kept.sum()

    stages = sl.Stages("pipe") if "pipe" in sl.current_mesh() else None
    apply, params = sl.parallelize(model, RULES, stages=stages)
    parts = {"microbatches": 4, "weigh": lambda x, y: (y != -100).sum()} if stages else {}
    run = sl.value_and_grad(lambda p, x, y: loss(apply(p, x), y), **parts)
    value, grads = run(params, IDS, sl.shard(labels, "..."))
    return value.item(), {n: sl.unshard(g) for n, g in grads.items()}


def _written(_: int = 0) -> list[int]:
    """Write four tokens, each the likeliest after those before."""
    torch.manual_seed(0)
    model = Skipping().eval()
    stages = sl.Stages("pipe") if "pipe" in sl.current_mesh() else None
    apply, params = sl.parallelize(model, RULES, stages=stages)
    ids = IDS[:1, :3]
    with torch.no_grad():
        for _ in range(4):
            logits = sl.unshard(apply(params, ids))
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()


def test_tokens_are_generated_by_forwards_through_all_stages(pool: Any) -> None:
    with sl.simulate(data=1):
        want = _written()
    with sl.simulate(pipe=4):
        assert _written() == want
    assert pool.run(_written, pipe=4) == [want] * 4


def _held() -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    stages = sl.Stages("pipe", cut=["embed", "blocks.2"])
    apply, params = sl.parallelize(Skipping().eval(), RULES, stages=stages)
    run = sl.value_and_grad(lambda p, x, y: loss_of(apply(p, x), y), microbatches=2)
    loss, grads = run(params, IDS, sl.shard(IDS, "..."))
    assert loss.numel() == 1
    return sorted(params), sorted(grads)


def test_a_rank_holds_what_its_stages_read(pool: Any) -> None:
    (first, _), *_, (last, grads) = pool.run(_held, pipe=2, data=2)
    assert set(first) & set(last) == {"embed.weight"} and last == grads
    assert set(first) | set(last) == {n for n, _ in Skipping().named_parameters()}


def _late(_: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    apply, params = sl.parallelize(model, RULES, stages=sl.Stages("pipe"), src=0)
    labels = sl.shard(torch.tensor([0, 1, 2, 9]), "...")
    run = sl.value_and_grad(lambda p, x, y: F.cross_entropy(apply(p, x), y), microbatches=2)
    run(params, torch.ones(4, 4), labels)
    return "ran"


def test_a_failed_stage_is_the_first_cause_on_real_ranks(forked: None) -> None:
    why = "StageFailed: value_and_grad: stage 1 .1., forward of micro-batch 1"
    with pytest.raises(sl.ShardError, match=why):
        sl.launch(_late, 0, pipe=2, timeout=60.0)
