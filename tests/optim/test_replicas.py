"""Check mode compares, after each update, what ranks hold alike and are configured with."""

from typing import Any

import pytest
import torch

import shardlib as sl
from tests.workers import Pool

o = sl.optim


def parted(what: str, stage: int, way: str) -> str:
    """Train two steps in which rank 1 differs: the error of each rank, or nothing."""
    rank = torch.distributed.get_rank()
    other = rank == 1
    lr = 0.2 if what == "rate" and other else 0.1
    decay = 0.5 if what == "decay" and other else 0.1
    limit = 0.01 if what == "clip" and other else 0.1
    params: Any = {k: sl.shard(torch.ones(4), "...") for k in ("a", "b")}
    x = sl.shard(torch.arange(8.0), "data")
    inner = o.chain(o.clip_by_global_norm(limit), o.adamw(lr, weight_decay=decay))
    tx = inner if stage < 0 else o.zero(inner, "data", stage)
    try:
        with sl.check():
            params = tx.shard(params)
            state = tx.init(params)
            how: Any = {"into": tx} if tx.sink is not None and way == "step" else {}
            vg = sl.value_and_grad(
                lambda p: (p["a"].sum() + p["b"].square().sum()) * x.sum(), **how
            )
            for i in range(2):
                if stage == 3:
                    with params.opened() as whole:
                        assert whole
                    grads = params.like({n: v * 0.5 for n, v in params.items()})
                else:
                    grads = vg(params)[1]
                if what == "skip" and other and i == 0:
                    continue
                if way == "step":
                    params, state, _ = o.step(tx, params, grads, state)
                else:
                    updates, state = tx.update(grads, state, params)
                    params = o.apply_updates(params, updates)
                if what == "value" and other and i == 0:
                    next(iter(params.values())).raw.data.add_(1e-3)
            if stage < 3:
                sl.unshard(sl.shard(torch.ones(8), "data") * 2)
    except sl.errors.RankFailed as e:
        return str(e)
    return ""


def every(cases: list[tuple[str, int, str]]) -> list[str]:
    return [parted(*case) for case in cases]


@pytest.mark.parametrize(
    ("what", "stage", "way", "says"),
    [
        ("rate", 1, "step", "optim.step: lr"),
        ("decay", 2, "step", "weight_decay"),
        ("clip", 3, "step", "max_norm"),
        ("value", -1, "step", "params['a']"),
        ("skip", 0, "step", ""),
        ("value", -1, "update", "params['a']"),
    ],
)
def test_replicas_that_part_are_named_in_check_mode(
    what: str, stage: int, way: str, says: str
) -> None:
    workers = Pool(2)  # whose job ends with its first cause
    try:
        found = workers.run(parted, what, stage, way, data=2)
    finally:
        workers.close()
    assert any(found), found
    assert says in "".join(found), found
    assert "rank 1" in "".join(found) and "rank 0" in "".join(found)


def test_ranks_that_are_alike_pass(pool: Any) -> None:
    cases = [("", stage, "step") for stage in (-1, 0, 1, 2)] + [("", -1, "update")]
    assert pool.run(every, cases, data=2, x=2) == [[""] * len(cases)] * 4
    with sl.simulate(data=2), sl.check():
        params = {"w": sl.shard(torch.ones(4), ".")}
        tx = o.zero(o.adamw(0.1), "data")
        new, *_ = o.step(tx, params, params, tx.init(params))
        assert sl.unshard(new["w"]).isfinite().all()
