from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.pipeline.flow import Dependences
from tests.pipeline.test_forward import _Collects
from tests.pipeline.test_step import RULES, _Net


def test_data_and_autograd_are_both_followed() -> None:
    flow = Dependences()
    mask, w = torch.ones(3, dtype=torch.bool, device="meta"), torch.ones(3, device="meta")
    w.requires_grad_()
    flow.mark(mask, "mask")
    flow.mark(w, "w")
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with flow:
        by_data = torch.where(mask, 1.0, 2.0)
    with hidden:
        # made outside the mode: autograd alone knows
        by_autograd = w * 2
    assert flow.of([by_data]) == {"mask"} and flow.of([by_autograd]) == {"w"}
    assert flow.of([torch.ones(3, device="meta")]) == frozenset()


def test_a_fill_takes_sizes_and_no_values() -> None:
    flow, x = Dependences(), torch.ones(3, device="meta")
    flow.mark(x, "x")
    with flow:
        zeros, written = torch.zeros_like(x), torch.zeros(3, device="meta")
        written.copy_(x)
    assert flow.of([zeros]) == frozenset() and flow.of([written]) == {"x"}


GATED = [("*.gate.weight", "x ."), ("*.gate.bias", "x"), ("*.out.weight", ". x"), ("*", "...")]


@pytest.mark.parametrize("remat", [None, "full", "products"])
@pytest.mark.parametrize(("kind", "rules"), [(_Net, RULES), (_Collects, GATED)])
def test_the_walk_along_edges_finds_what_a_backward_reaches(
    kind: Any, remat: str | None, rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross, of = Dependences.cross, Dependences.of
    found: list[Any] = []

    def recorded(self: Any, x: Any, name: Any) -> None:
        if x.requires_grad:
            with monkeypatch.context() as m:
                # the edges alone
                m.setattr(self, "names", {})
                found.append((self, x, name, of(self, [x])))
        cross(self, x, name)

    monkeypatch.setattr(Dependences, "cross", recorded)
    batch = torch.ones(2, 4) if kind is _Collects else torch.zeros(2, 3, dtype=torch.int64)
    with sl.simulate(pipe=4, x=2):
        stages, policies = sl.Stages("pipe", example=(batch,)), [("blocks.*", remat)]
        more: Any = {"remat": policies} if remat else {}
        sl.parallelize(kind(), rules, stages=stages, **more)
    flow, edges = found[0][0], {}
    params = [x for x in flow.alive if x.is_leaf and x.requires_grad]
    assert params and len(found) > 4
    for _, x, name, walked in found:
        edges[name] = walked.union(*(edges.get(n, ()) for n in walked))
        grads = torch.autograd.grad(
            x, params, torch.ones_like(x), allow_unused=True, retain_graph=True
        )
        reached = [p for p, g in zip(params, grads, strict=True) if g is not None]
        assert reached and edges[name] - {*edges} == {
            n for p in reached for n in flow.given[p._cdata]
        }
