"""Adam and its kin: torch's own values, on every layout."""

import pytest
import torch

import shardlib as sl
from tests.ops.cases import close
from tests.optim.cases import LAYOUTS, PARAMS, steps

TORCH = {
    "sgd": (sl.optim.sgd(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "momentum": (sl.optim.sgd(0.05, 0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "nesterov": (
        sl.optim.sgd(0.05, 0.9, True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    ),
    "adam": (sl.optim.adam(0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adamw": (
        sl.optim.adamw(0.05, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_transforms_follow_torch_optim(name: str) -> None:
    tx, make = TORCH[name]
    theirs = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    optimizer = make(list(theirs.values()))
    for i in range(10):
        for p in theirs.values():
            p.grad = ((p * 0.3 + (i % 3 - 1)) * (1 + i)).detach()
        optimizer.step()
    for k, p in steps(tx, PARAMS).items():
        close(p, theirs[k].detach(), 1e-12)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "tx", [sl.optim.adamw(0.05), sl.optim.lion(0.05, weight_decay=0.1), sl.optim.sgd(0.05, 0.9)]
)
def test_sharded_updates_are_the_dense_ones_bit_for_bit(
    tx: sl.optim.Transform, layouts: dict[str, str]
) -> None:
    want = steps(tx, PARAMS)
    with sl.simulate(x=2, y=2):
        got = steps(tx, {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()})
        for k in want:
            assert torch.equal(sl.unshard(got[k]), want[k])


def test_nothing_given_is_changed() -> None:
    tx = sl.optim.adamw(0.1)
    p, g = {"w": torch.ones(3)}, {"w": torch.ones(3)}
    state = tx.init(p)
    tx.update(g, state, p)
    assert state.count == 0 and state.mu["w"].sum() == 0 and g["w"].sum() == 3 and p["w"].sum() == 3
