"""All of a step's blocks go in one call; who receives none gets zeros, and no pair is no block."""

from types import SimpleNamespace
from typing import Any

import torch

import shardlib as sl
from shardlib.ops.attention.local import Leaving, send


def test_blocks_arrive_along_their_pairs() -> None:
    with sl.simulate(s=3) as mesh:
        job: Any = SimpleNamespace(mesh=mesh, axes=("s",))
        raw = torch.arange(6.0).reshape(3, 2)  # the block of each rank
        ring = ((0, 1), (1, 2), (2, 0))
        with sl.trace() as t:
            coming = send(job, [
                Leaving(("k", 0, 1), raw, ring),
                Leaving(("v", 0, 1), -raw, ((0, 2),)),
                Leaving(("k", 1, 1), raw, ()),
            ])  # fmt: skip
            found = {key: wait() for key, wait in coming.items()}
    assert set(found) == {("k", 0, 1), ("v", 0, 1)}
    assert torch.equal(found["k", 0, 1], raw[[2, 0, 1]])
    assert torch.equal(found["v", 0, 1], torch.stack([raw[0] * 0, raw[0] * 0, -raw[0]]))
    assert t.by_kind().keys() == {"ppermute"}
    assert send(job, []) == {}
