"""A timeline holds what ran, where, and the bytes that are counted; outside it nothing listens."""

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import shardlib as sl
from shardlib.mesh.scope import scope
from shardlib.seeing.timeline import Span, Timeline, merged, timeline


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def step(remat: Any = ()) -> tuple[Timeline, Any]:
    """One step of two blocks under megatron1d on simulated ranks, and what was counted."""
    net = model()
    with sl.simulate(data=2, x=2):
        rules = sl.recipes.megatron1d(net)
        apply, params = sl.parallelize(net, rules, inputs={"input": "data ..."}, remat=remat)
        run = sl.value_and_grad(lambda p: apply(p, torch.ones(4, 8)).square().sum())
        with timeline() as line, sl.trace() as counted, line.phase("gradients"):
            run(params)
    return line, counted


def test_every_collective_is_there_once_with_its_bytes() -> None:
    line, counted = step()
    assert [(s.name, s.axis, s.bytes, s.messages) for s in line.collectives] == [
        (e.kind, e.axis, float(e.bytes), e.messages) for e in counted.events
    ]
    assert line.bytes == float(counted.bytes) > 0
    gradients = counted.events[-1]  # of all parameters, summed together when backward was through
    assert (gradients.kind, gradients.axis) == ("psum", "data")
    assert sum(s.bytes for s in line.operations) + gradients.bytes == float(counted.bytes)


def test_operations_have_their_module_type_line_and_algorithm() -> None:
    line, _ = step()
    forward = [s for s in line.operations if not s.backward]
    assert [s.module for s in forward if s.name == "linear"] == ["0.up", "0.down", "1.up", "1.down"]
    up = next(s for s in forward if s.module == "0.up")
    assert up.type == "f32[4@data, 16@x]" and up.line.startswith("test_timeline.py:")
    assert up.algorithm
    assert {s.module for s in line.collectives if not s.backward} >= {"0.down", "1.down"}
    assert all(s.module for s in line.collectives if s.name == "psum" and s.axis == "x")


def test_every_gradient_has_the_place_of_its_operation() -> None:
    line, _ = step()
    forward = {(s.name, s.module, s.line) for s in line.operations if not s.backward}
    back = [s for s in line.operations if s.backward]
    assert {(s.name, s.module, s.line) for s in back} <= forward
    assert [s.module for s in back if s.name == "linear"] == ["1.down", "1.up", "0.down", "0.up"]


def test_what_is_computed_again_is_backward_and_keeps_its_module() -> None:
    line, counted = step(remat=[("*", "full")])
    again = [s.module for s in line.operations if s.name == "linear" and s.backward]
    assert sorted(again) == sorted(["0.down", "0.up", "1.down", "1.up"] * 2)
    assert line.bytes == float(counted.bytes)


def test_spans_lie_within_the_phase_and_operations_do_not_overlap() -> None:
    line, _ = step()
    phase = line.spans[0]
    assert (phase.name, phase.kind) == ("gradients", "phase")
    assert all(phase.start <= s.start and s.end <= phase.end for s in line.spans)
    ops = sorted(line.operations, key=lambda s: s.start)
    assert all(a.end <= b.start for a, b in itertools.pairwise(ops))


def test_outside_nothing_listens_and_values_are_the_same() -> None:
    def hooks() -> int:
        return sum(len(v) for k, v in vars(torch_module).items() if k.startswith("_global_forward"))

    before = hooks()
    with sl.simulate(x=2):
        a = sl.shard(torch.arange(8.0), "x").requires_grad_()
        with timeline() as line:
            y = (a * a).sum()
        assert (
            scope().listeners.watcher is None and not scope().listeners.traces and hooks() == before
        )
        count = len(line.spans)
        y.backward()  # of a graph that was recorded
        assert len(line.spans) == count and torch.equal(sl.unshard(a.grad), 2 * torch.arange(8.0))


def test_another_watcher_and_another_timeline_hear_as_much() -> None:
    with sl.simulate(x=2), timeline() as outer:
        a, b = sl.shard(torch.ones(4, 4), ". x"), sl.shard(torch.ones(4, 4), "x .")
        with sl.check(), timeline() as inner:
            _ = a @ b
    assert [s.name for s in inner.spans] == [s.name for s in outer.spans] == ["matmul", "psum"]
    assert inner.operations[0].algorithm == outer.operations[0].algorithm != ""


def test_a_call_that_fails_leaves_nothing_open() -> None:
    with sl.simulate(x=2), timeline() as line:
        a = sl.shard(torch.ones(4, 4), "x .")
        with pytest.raises(sl.ShardError):
            a.reshape(3)
        _ = a + 1
    assert [s.name for s in line.operations] == ["add"]


def test_a_backward_that_fails_leaves_nothing_open() -> None:
    def hook(_: Any) -> None:
        raise ValueError("mine")

    with sl.simulate(x=2), timeline() as line:
        a = sl.shard(torch.ones(4, 4), "x .").requires_grad_()
        b = a.sin()
        a.register_hook(hook)
        with pytest.raises(ValueError, match="mine"):
            b.sum().backward()
        time.sleep(0.1)
        (a.detach().requires_grad_() * 2).sum().backward()
    assert [s.name for s in line.operations if s.backward] == ["sum", "sin", "sum", "mul"]
    assert all(s.seconds < 0.1 for s in line.operations)


def test_a_file_is_what_perfetto_reads_and_reads_back(tmp_path: Path) -> None:
    line, _ = step()
    line.save(tmp_path / "step.json")
    found = json.loads((tmp_path / "step.json").read_text())
    spans = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(line.spans)
    assert all({"name", "cat", "ts", "dur", "pid", "tid", "args"} <= e.keys() for e in spans)
    names = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"phases", "operations", "collectives"}
    again = Timeline.read(tmp_path / "step.json")
    assert again.spans == sorted(line.spans, key=lambda s: s.start) and again.ranks == line.ranks
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(sl.ShardError, match=r"other\.json is no timeline"):
        Timeline.read(tmp_path / "other.json")


def test_transfers_that_overlap_lie_on_tracks_of_their_own() -> None:
    spans = [Span("shift", "collective", t, 2.0) for t in (0.0, 1.0, 2.0, 3.0)]
    lanes = Timeline(spans, {0: "rank 0"})._lanes()
    assert [[s.start for s in lane] for *_, lane in lanes] == [[0.0, 2.0], [1.0, 3.0]]


def test_rows_sum_layers_and_are_sorted() -> None:
    line, _ = step()
    rows = line.rows("bytes")
    assert [r["bytes"] for r in rows] == sorted((r["bytes"] for r in rows), reverse=True)
    down = next(r for r in rows if r["name"] == "psum" and r["module"] == "*.down")
    assert down["count"] == 2
    shares = [r["share"] for r in rows if r["kind"] == "operation"]
    assert sum(shares) == pytest.approx(1.0)
    with pytest.raises(sl.ShardError, match="no order 'size'"):
        line.rows("size")
    text = str(line)
    assert "psum over x" in text and "*.up" in text and "4 simulated ranks (data=2 x=2)" in text
    page = line._repr_html_()
    assert page.count("<tr>") == len(line.table())
    (svg,) = re.findall("<svg.*?</svg>", page)
    assert len(ElementTree.fromstring(svg).findall(".//{*}rect")) == len(line.spans)


# which 2.11 says of every profile
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_torch_profiler_shows_the_names() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        step()
    names = {e.key for e in prof.key_averages()}
    assert {"linear [0.up]", "linear [0.up] backward", "psum over x", "gradients"} <= names


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which is an extra")
    line, _ = step()
    line.save(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    Timeline().save(tmp_path / "nothing.svg")
    assert "nothing ran" in (tmp_path / "nothing.svg").read_text()


def on_a_rank(folder: str) -> tuple[Any, Any]:
    a = sl.shard(torch.ones(8, 8), "x y").requires_grad_()
    b = sl.shard(torch.ones(8, 8), "x y").requires_grad_()
    with timeline() as line, sl.trace() as counted:
        (a @ b).sum().backward()
    rank = torch.distributed.get_rank()
    line.save(f"{folder}/{rank}.json")
    return line.gathered(), float(counted.bytes)


def test_ranks_are_put_beside_each_other(pool: Any, tmp_path: Path) -> None:
    found = pool.run(on_a_rank, str(tmp_path), x=2, y=2)
    every, moved = found[0]
    assert sorted(every.ranks) == [0, 1, 2, 3] and every.ranks[3] == "rank 3 (x=1 y=1)"
    assert every.bytes == moved
    for rank in range(4):
        assert [s.name for s in every.operations if s.rank == rank] == [
            "matmul",
            "sum",
            "sum",
            "matmul",
        ]
    both = merged([tmp_path / f"{rank}.json" for rank in range(4)])
    assert both.ranks == every.ranks and len(both.spans) == len(every.spans)
    events = both.chrome()["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2, 3}
    with pytest.raises(sl.ShardError, match="hold rank 0"):
        merged([tmp_path / "0.json", tmp_path / "0.json"])


def zero(stage: int) -> Any:
    net = model()
    apply, params = sl.parallelize(net, sl.recipes.ddp(net), inputs={"input": "data ..."})
    tx: Any = sl.optim.zero(sl.optim.adamw(1e-2), axis="data", stage=stage)  # type: ignore[arg-type]
    params = tx.shard(params) if stage == 3 else params
    state = tx.init(params)
    run = sl.value_and_grad(lambda p: apply(p, torch.ones(4, 8)).square().sum(), into=tx)

    def once() -> None:
        nonlocal params, state
        _, grads = run(params)
        params, state, _ = sl.optim.step(tx, params, grads, state)

    return once


def module() -> Any:
    net = model()
    rules = sl.recipes.megatron1d(net)
    sharded = sl.as_module(*sl.parallelize(net, rules, inputs={"input": "data ..."}))
    steps = torch.optim.AdamW(sharded.parameters(), 1e-2)

    def once() -> None:
        steps.zero_grad()
        sharded(torch.ones(4, 8)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        steps.step()

    return once


def twice() -> Any:
    """A gradient of a gradient."""
    a = sl.shard(torch.ones(4, 4), "data x").requires_grad_()

    def once() -> None:
        (g,) = torch.autograd.grad((a @ a).square().sum(), [a], create_graph=True)
        g.square().sum().backward()

    return once


WAYS = {"zero 1": lambda: zero(1), "zero 2": lambda: zero(2), "zero 3": lambda: zero(3),
        "as_module": module, "second derivatives": twice}  # fmt: skip


def counted_alike(way: str) -> None:
    once = WAYS[way]()
    once()
    with timeline() as line, sl.trace() as counted:
        once()
    assert line.bytes == float(counted.bytes) and counted.bytes
    assert [s.name for s in line.collectives] == [e.kind for e in counted.events]
    assert all(s.seconds >= 0 and (s.name or s.kind) for s in line.spans)
    assert sum(s.bytes for s in line.operations) <= line.bytes
    json.dumps(line.chrome())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_is_heard_as_it_is_counted(way: str) -> None:
    with sl.simulate(data=2, x=2):
        counted_alike(way)


def test_so_it_is_on_processes(pool: Any) -> None:
    for way in WAYS:
        pool.run(counted_alike, way, data=2, x=2)


def test_shapes_alone_have_a_timeline_too() -> None:
    with sl.record(x=512), timeline() as line:
        a = sl.shard(torch.empty(512, 1024, device="meta"), ". x")
        _ = a @ sl.shard(torch.empty(1024, 512, device="meta"), "x .")
    assert line.ranks == {0: "one rank of x=512"} and line.collectives[0].name == "psum"
