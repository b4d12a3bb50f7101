"""A sample of the drawn jobs that ``make jobs`` runs by the thousand."""

from pathlib import Path
from typing import Any

import pytest

from tests.optim.jobs import draw, judged


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_a_drawn_job_equals_the_dense_run(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 4):
        job = draw(seed)
        assert not (wrong := judged(job, str(tmp_path / "c"))), f"{job.text()}\n{wrong}"


def on_ranks(seeds: list[int], mesh: dict[str, int], folder: str) -> list[str]:
    jobs = [draw(seed, mesh) for seed in seeds]
    found = [(job, judged(job, f"{folder}/{job.seed}", simulate=False)) for job in jobs]
    return [f"{job.text()}\n{wrong}" for job, wrong in found if wrong]


@pytest.mark.parametrize(("seed", "mesh"), [(0, {"data": 4}), (1, {"data": 2, "x": 2})])
def test_a_drawn_job_equals_the_dense_run_on_real_ranks(
    seed: int, mesh: Any, tmp_path: Path, pool: Any
) -> None:
    for wrong in pool.run(on_ranks, [seed], mesh, str(tmp_path), **mesh):
        assert not wrong, wrong[0]
