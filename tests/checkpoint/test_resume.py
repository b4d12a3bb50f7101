"""A run that stops, saves and goes on, here or on other ranks, is the run that never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from tests.checkpoint.test_writing import every_pair
from tests.workers import Pool

CONFIG = GPTConfig(ctx=8, layers=1, heads=4, embed=16, dropout=0.2, vocab=32)


def windows() -> list[dict[str, Any]]:
    text = torch.randint(32, (41, 9), generator=torch.Generator().manual_seed(7))
    return [{"idx": t[:-1], "labels": t[1:]} for t in text]


def run(
    path: str, steps: int, *, recipe: str, stage: int = 1, resume: bool = False, wait: bool = True,
    config: GPTConfig = CONFIG, microbatches: int | None = None,
) -> list[float]:  # fmt: skip
    """Losses of ``steps`` steps, from a checkpoint or from the start; a checkpoint at the end."""
    torch.manual_seed(0)
    model, mesh = GPT(config), sl.current_mesh()
    inner = mesh.without("pipe") if "pipe" in mesh else mesh
    with inner:
        rules = getattr(sl.recipes, recipe)(model)
    stages = sl.Stages("pipe") if "pipe" in mesh else None
    apply, params = sl.parallelize(model, rules, stages=stages)
    clipped = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(1e-2))
    tx = sl.optim.zero(clipped, axis="data", stage=stage)
    params = tx.shard(params)
    state, done = tx.init(params), 0
    layouts = {"idx": rules.tokens, "labels": rules.labels}
    rows = sl.data(windows(), 8, layouts, seed=1, mesh=inner)
    torch.manual_seed(5)

    def everything(done: int) -> dict[str, Any]:
        kept = {"params": sl.optim.state_dict(params), "state": sl.optim.state_dict(state)}
        return kept | {"step": done, "data": rows.state(), "key": sl.random.get_state()}

    if resume:
        found = sl.load(path, everything(0))
        params, done = sl.optim.load_state_dict(params, found["params"]), found["step"]
        state = sl.optim.load_state_dict(state, found["state"])
        rows = sl.data(windows(), 8, rows.layout, state=found["data"], mesh=inner)
        sl.random.set_state(found["key"])
    grads_of = sl.value_and_grad(
        lambda p, b: apply(p, b["idx"], targets=b["labels"]), into=tx, microbatches=microbatches
    )
    losses: list[float] = []
    while len(losses) < steps:
        for batch in rows:
            loss, grads = grads_of(params, batch)
            params, state, _ = sl.optim.step(tx, params, grads, state)
            losses.append(loss.item())
            if len(losses) == steps:
                break
    sl.save(path, everything(done + steps), step=done + steps, wait=wait).wait()
    return losses


WHOLE = {"recipe": "megatron1d"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: Any) -> tuple[list[float], dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("whole"))
    with sl.simulate(data=2, x=2):
        losses = run(path, 20, **WHOLE)  # type: ignore[arg-type]
    return losses, sl.load(path)


def test_it_goes_on_bit_for_bit(uninterrupted: Any, tmp_path: Path) -> None:
    losses, end = uninterrupted
    path = str(tmp_path)
    with sl.simulate(data=2, x=2):
        first = run(path, 10, wait=False, **WHOLE)  # type: ignore[arg-type]
    with sl.simulate(data=2, x=2):
        rest = run(path, 10, resume=True, **WHOLE)  # type: ignore[arg-type]
    assert first + rest == losses
    found = sl.load(path)
    assert found["step"] == 20 and found["data"] == end["data"] and found["key"] == end["key"]
    for part in ("params", "state"):
        for n, x in end[part].items():
            same = (
                torch.equal(found[part][n], x)
                if isinstance(x, torch.Tensor)
                else found[part][n] == x
            )
            assert same, n


@pytest.mark.parametrize(
    ("axes", "other"),
    [
        ({"data": 4, "x": 1}, {"recipe": "megatron1d", "stage": 2}),
        ({"data": 1, "x": 4}, {"recipe": "megatron1d"}),
        ({"data": 2, "x": 2, "y": 2}, {"recipe": "optimus2d", "stage": 2}),
        ({"data": 8}, {"recipe": "ddp", "stage": 3}),
        ({"data": 2, "x": 2}, {"recipe": "megatron1d", "stage": 0}),
        ({"data": 2, "x": 2}, {"recipe": "megatron1d", "stage": 3}),
    ],
    ids=["data4", "x4", "2d", "ddp", "stage0", "stage3"],
)
def test_it_goes_on_elsewhere(uninterrupted: Any, tmp_path: Path, axes: Any, other: Any) -> None:
    losses, end = uninterrupted
    path = str(tmp_path)
    with sl.simulate(data=2, x=2):
        first = run(path, 10, **WHOLE)  # type: ignore[arg-type]
    with sl.simulate(**axes):
        rest = run(path, 10, resume=True, **other)
    torch.testing.assert_close(
        torch.tensor(first + rest), torch.tensor(losses), rtol=2e-6, atol=1e-6
    )
    found = sl.load(path)
    assert found["step"] == 20 and found["data"] == end["data"] and found["key"] == end["key"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_stage_goes_on_bit_for_bit(stage: int, tmp_path: Path) -> None:
    how: Any = {"recipe": "megatron1d", "stage": stage}
    with sl.simulate(data=2, x=2):
        losses = run(str(tmp_path / "whole"), 6, **how)
        first = run(str(tmp_path / "halves"), 3, **how)
        rest = run(str(tmp_path / "halves"), 3, resume=True, **how)
    assert first + rest == losses
    assert _same(*(sl.load(tmp_path / n) for n in ("whole", "halves")))


def _same(one: Any, two: Any) -> bool:
    pairs = [(x, two[part][n]) for part in ("params", "state") for n, x in one[part].items()]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


BY_THREE = GPTConfig(ctx=8, layers=1, heads=3, embed=12, dropout=0.2, vocab=36)


def _every_stage(path: str) -> list[str]:
    """What differs of two steps, and of one, a checkpoint and one more, at each stage."""
    wrong = []
    for stage in range(4):
        how: Any = {"recipe": "megatron1d", "stage": stage, "config": BY_THREE}
        losses = run(f"{path}/whole{stage}", 2, **how)
        found = run(f"{path}/halves{stage}", 1, **how)
        found += run(f"{path}/halves{stage}", 1, resume=True, **how)
        wrong += [f"stage {stage}: {found} for {losses}"] * (found != losses)
    return wrong


def test_a_real_mesh_of_two_by_three(tmp_path: Path) -> None:
    """Every pair of layouts, padded ones too, and every stage."""
    six = Pool(6)
    try:
        assert six.run(every_pair, str(tmp_path / "pairs"), "x y", x=2, y=3) == [[]] * 6
        assert six.run(_every_stage, str(tmp_path), seconds=120.0, data=2, x=3) == [[]] * 6
    finally:
        six.close()
    for stage in range(4):
        assert _same(*(sl.load(tmp_path / f"{n}{stage}") for n in ("whole", "halves"))), stage


def test_processes_go_on_where_simulated_ranks_stopped_and_back(
    pool: Any, uninterrupted: Any, tmp_path: Path
) -> None:
    losses, _ = uninterrupted
    path = str(tmp_path)
    with sl.simulate(data=2, x=2):
        found = run(path, 5, **WHOLE)  # type: ignore[arg-type]
    for axes, more, stage in (({"data": 2, "x": 2}, 5, 3), ({"data": 4}, 5, 0)):
        said = pool.run(_resumed, path, more, stage, **axes)
        assert said == [said[0]] * 4
        found += said[0]
    with sl.simulate(data=2, x=2):
        found += run(path, 5, resume=True, **WHOLE)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=2e-6, atol=1e-6)


def _resumed(path: str, steps: int, stage: int) -> list[float]:
    recipe = "megatron1d" if "x" in sl.current_mesh().axes else "ddp"
    return run(path, steps, recipe=recipe, stage=stage, resume=True)


TALL = GPTConfig(ctx=8, layers=2, heads=4, embed=16, dropout=0.0, vocab=32)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_pipeline_goes_on_with_other_stages_or_none(
    pool: Any, stage: int, tmp_path: Path
) -> None:
    """Its first and last stage have one parameter, which is tied."""
    losses = pool.run(_piped, str(tmp_path / "whole"), 3, stage, False, pipe=2, data=2)[0]
    found, path = [], str(tmp_path / "parts")
    for axes in ({"pipe": 2, "data": 2}, {"data": 4}, {"data": 2, "pipe": 2}):
        said = pool.run(_piped, path, 1, stage, bool(found), **axes)
        assert said == [said[0]] * 4
        found += said[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=2e-6, atol=1e-6)


def _piped(path: str, steps: int, stage: int, resume: bool) -> list[float]:
    how: Any = {"config": TALL, "microbatches": 2, "stage": stage, "resume": resume}
    return run(path, steps, recipe="ddp", **how)


def test_a_state_in_buckets_is_refused_with_the_way_to_save_it(tmp_path: Path) -> None:
    with sl.simulate(data=2):
        tx = sl.optim.zero(sl.optim.adamw(0.1), axis="data")
        state = tx.init({"w": sl.shard(torch.ones(8), ".")})
        with pytest.raises(sl.ShardError, match="flat vectors"):
            sl.save(tmp_path / "c", {"state": state})
        sl.save(tmp_path / "c", {"state": sl.optim.state_dict(state)})
