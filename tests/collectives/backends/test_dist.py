"""Real processes give the values and the counts of simulated ranks."""

from typing import Any

import pytest
import torch

import shardlib as sl
from tests.collectives.primitives import (
    MESHES,
    PRIMITIVES,
    all_on_rank,
    expected,
    stacked_input,
)


@pytest.mark.parametrize(("mesh", "axes"), MESHES)
def test_real_ranks_agree_with_stacked_ones(
    pool: Any, mesh: dict[str, int], axes: list[Any]
) -> None:
    answers = pool.run(all_on_rank, axes, **mesh)
    for name, axis in answers[0]:
        want = expected(name, mesh, axis, torch.float64)
        with sl.simulate(**mesh) as m, sl.trace() as t:
            PRIMITIVES[name][0](stacked_input(m), axis)
        for rank, answer in enumerate(answers):
            out, nbytes, messages = answer[name, axis]
            torch.testing.assert_close(
                out, want[rank], rtol=1e-12, atol=0, msg=f"{name} over {axis} on rank {rank}"
            )
            assert (nbytes, messages) == (t.bytes, t.messages), (name, axis)
