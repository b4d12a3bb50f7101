"""An explanation of stages as text and as plain values."""

import json

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.planning import Cluster, Link
from shardlib.planning.explanation import PipelineExplanation

LINK = Link(1e-4, 1e-6)
SLOW = Cluster(1e9, 1e8, inside=LINK, between=LINK)


def _explained(micros: int, name: str = "1f1b", cluster: Cluster = SLOW) -> PipelineExplanation:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(
            model, [("*", "...")], stages=sl.Stages("pipe", schedule=name)
        )
        f = lambda p, x: apply(p, x).square().mean()  # noqa: E731
        return sl.explain(f, params, torch.ones(16, 64), microbatches=micros, cluster=cluster)


def test_the_slowest_stage_sets_the_time_of_many_micro_batches() -> None:
    few, many = _explained(2), _explained(16)
    assert many.bubble < few.bubble < 1
    slowest = max(sum(s.seconds.values()) for s in many.stages)
    assert 16 * slowest < many.seconds


def test_operations_are_priced_by_the_clusters_speed_and_messages_by_its_links() -> None:
    told = _explained(2)
    rows, weight = 8, 64 * 64
    assert told.stages[0].seconds == {
        "F": pytest.approx(2 * 2 * rows * weight / 1e8),
        "B": pytest.approx(3 * 2 * rows * weight / 1e8),
    }
    # F0, its message, F and B of stage 1, the message back, B0: of the last micro-batch of two
    fast = Cluster(1e9, 1e8, inside=Link(0, 0), between=Link(0, 0))
    message = 1e-4 + 1e-6 * rows * 64 * 4
    assert told.seconds == pytest.approx(_explained(2, cluster=fast).seconds + 2 * message)


def test_parts_of_backward_cost_the_whole_and_shorten_the_step() -> None:
    whole, parts = _explained(8), _explained(8, "zb")
    for a, b in zip(whole.stages, parts.stages, strict=True):
        assert b.seconds["I"] + b.seconds["W"] == pytest.approx(a.seconds["B"])
    assert parts.seconds < whole.seconds


def test_stages_are_written_with_their_units_and_given_as_plain_values() -> None:
    found = _explained(4)
    text, plain = str(found), found.json()
    assert "2 stages on pipe=2, 1f1b, 4 micro-batches" in text
    assert "stage 1   2 to 3, place 1" in text and "in flight 2" in text
    assert plain == json.loads(json.dumps(plain))
    assert [p["in_flight"] for p in plain["places"]] == [2, 1]
    assert plain["sent_bytes"] == found.sent.bytes and plain["seconds"] == found.seconds
