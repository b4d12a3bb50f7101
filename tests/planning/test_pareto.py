"""The best ways through a step's calls against all ways there are."""

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.planning import pareto
from shardlib.planning.joint import Study
from shardlib.planning.question import Question

CLUSTER = sl.planning.Cluster(1e12, 2e10, 1, between=sl.planning.Link(1e-4, 1e-8), bandwidth=5e9)


def drawn(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A chain of at most four layers, of drawn widths."""
    g = torch.Generator().manual_seed(seed)
    number = lambda *n: n[int(torch.randint(len(n), (1,), generator=g))]  # noqa: E731
    layers: list[nn.Module] = []
    width = number(8, 16)
    rows = torch.empty(number(4, 8, 64), width)
    for _ in range(number(1, 2)):
        wider = number(8, 16, 32)
        layers += [nn.Linear(width, wider, bias=number(True, False)), number(nn.ReLU(), nn.GELU())]
        width = wider
    return nn.Sequential(*layers, nn.LayerNorm(width)), rows


@pytest.mark.parametrize("seed", range(24))
def test_no_way_there_is_beats_those_that_are_kept(seed: int, monkeypatch: Any) -> None:
    module, rows = drawn(seed)
    loss = lambda apply, params, x: apply(params, x).square().mean()  # noqa: E731
    asked = Question(module, (rows,), loss, sl.optim.adamw(0.01), CLUSTER, 1e12, 2, {"a": 2})
    study = Study(asked)
    for setting in study.settings():
        search = setting.search
        begin = study._begin(search)
        kept = search.run(study.step.calls, begin)
        with monkeypatch.context() as patch:
            patch.setattr(pareto, "undominated", lambda ways, *_: list(ways))
            every = search.run(study.step.calls, begin)
        figures = lambda found: {  # noqa: E731
            (
                w.forward + w.back, w.kept + w.gradients, w.kept + w.saved, w.kept + w.most,
            )
            for ways in found.values() for w in ways
        }  # fmt: skip
        best, all_ways = figures(kept), figures(every)
        assert best <= all_ways
        for way in all_ways:
            assert any(all(b <= x * (1 + 1e-12) for b, x in zip(o, way, strict=True)) for o in best)
        # and no other way takes less bytes of any kind than those of least bytes
        least = figures(search.run(study.step.calls, begin, least=True))
        assert least <= all_ways and len(least) <= len(best)
        for _, *way in all_ways:
            assert any(all(b <= x for b, x in zip(o, way, strict=True)) for _, *o in least)
