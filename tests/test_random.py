"""One key for all ranks: it follows torch.manual_seed, can be saved,
and is what recomputation draws from again.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.errors import ShardError
from shardlib.mesh import current_job
from shardlib.random import agreed
from tests.workers import Pool


def draw(layout: str = ". .") -> torch.Tensor:
    return sl.unshard(torch.rand_like(sl.shard(torch.zeros(4, 4), layout)))


def dropped(layout: str) -> torch.Tensor:
    """A mask of copies as each rank holds it, not gathered."""
    return F.dropout(sl.shard(torch.ones(4, 4), layout), 0.5).local.clone()


# ---------------------------------------------------------------- the seed


def seeded_apart() -> list[torch.Tensor]:
    """Ranks that seed as data parallel scripts do, and that draw unevenly."""
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    out = [draw("x y")]
    if rank == 0:
        torch.randn(5)  # a sample for the log
    torch.rand(rank)
    out += [draw(". ."), dropped(". .")]
    torch.manual_seed(7 + rank)
    return [*out, draw("(x y) .")]


def seeded_here() -> list[torch.Tensor]:
    torch.manual_seed(7)
    with sl.simulate(x=2, y=2):
        first, second = draw("x y"), draw(". .")
        mask = F.dropout(sl.shard(torch.ones(4, 4), "x ."), 0.5)
        return [first, second, sl.unshard(mask), first]


def test_ranks_that_seed_and_draw_apart_draw_the_same(pool: Any) -> None:
    want = seeded_here()
    for got in pool.run(seeded_apart, x=2, y=2):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def parts_of_the_job() -> list[torch.Tensor]:
    """Rows of the grid as meshes of their own, whose stream is their
    own; a generator that each rank has seeded.
    """
    rank, whole = dist.get_rank(), sl.current_mesh()
    torch.manual_seed(7 + rank // 2)
    a = draw("x y")
    with sl.use_mesh(whole.device_mesh["y"]):  # type: ignore[index]
        sub = [draw("y ."), draw(". y")]
    own = torch.Generator().manual_seed(rank)
    named = sl.unshard(torch.empty_like(sl.shard(torch.zeros(4, 4), "x y")).normal_(generator=own))
    return [a, draw("x y"), named, *sub]


def test_a_part_of_the_job_has_a_stream_of_its_own(pool: Any) -> None:
    def here(seed: int) -> list[torch.Tensor]:
        with sl.simulate(x=2, y=2):
            torch.manual_seed(seed)
            return [draw("x y"), draw("x y")]

    with sl.simulate(x=2):
        zero = torch.Generator().manual_seed(0)
        named = sl.unshard(
            torch.empty_like(sl.shard(torch.zeros(4, 4), "x .")).normal_(generator=zero)
        )
    for rank, got in enumerate(pool.run(parts_of_the_job, x=2, y=2)):
        want = [*here(7), named, *here(7 + rank // 2)]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def by_stage() -> list[torch.Tensor]:
    """Stages whose ranks seed apart, and draw one after the other: what they agreed on is kept."""
    mesh, out = sl.current_mesh(), []
    inner, at = mesh.without("pipe"), (mesh.coord or {})["pipe"]
    for number in (7, 8):
        torch.manual_seed(number + dist.get_rank())
        agreed(inner)
        for turn in range(2):
            if at == turn:
                with inner:
                    out.append(draw("x ."))
            sl.psum(torch.ones(1), "pipe")
    return [*out, draw("pipe x")]


def test_stages_of_a_pipeline_draw_from_one_seed(pool: Any) -> None:
    want = []
    with sl.simulate(x=2):
        for number in (7, 8):
            torch.manual_seed(number)
            want.append(draw("x ."))
        want.append(draw("x ."))
    for got in pool.run(by_stage, pipe=2, x=2):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def uneven(patient: int) -> str:
    """Only rank 0 seeds: all say so; the others would go on with another key."""
    torch.manual_seed(5)
    sl.make_mesh(x=2, device="cpu", timeout=6.0)
    job = current_job()
    if dist.get_rank() == patient and job is not None:
        job.allow(30.0)  # the other rank finds the cause
    draw()
    if not dist.get_rank():
        torch.manual_seed(6)
    try:
        sl.psum(draw(), "x")
    except ShardError as e:
        return str(e)
    return "no error"


def exact() -> str:
    """A seed given outright must be one seed."""
    sl.random.seed(dist.get_rank())
    try:
        draw()
    except ShardError as e:
        return str(e)
    return "no error"


@pytest.mark.parametrize("patient", [0, 1])
def test_ranks_that_are_seeded_unevenly_are_told(patient: int) -> None:
    workers = Pool(2)  # their own: two ranks are left waiting or apart
    try:
        said = workers.run(uneven, patient, x=2)
        assert len({text.splitlines()[0].partition(": ")[2] for text in said}) == 1
        assert all("rank 0 waits in random (its first draw since a seeding)" in t for t in said)
        assert "torch.manual_seed(0)  # on every rank" in said[0]
    finally:
        workers.close()


def test_ranks_that_are_given_different_keys_are_told() -> None:
    workers = Pool(2)
    try:
        assert all("different keys" in text for text in workers.run(exact, x=2))
    finally:
        workers.close()


def test_a_seeding_that_is_undone_counts_nothing() -> None:
    with sl.simulate(x=2):
        torch.manual_seed(1)
        want = [draw(), draw()]
        torch.manual_seed(1)
        first = draw()
        with torch.random.fork_rng():
            torch.manual_seed(99)
        assert torch.equal(first, want[0]) and torch.equal(draw(), want[1])


def test_a_seed_given_outright_holds() -> None:
    with sl.simulate(x=2):
        sl.random.seed(3)
        want = draw()
        torch.manual_seed(0)
        other = draw()
        sl.random.seed(3)
        torch.manual_seed(0)
        assert torch.equal(draw(), want) and not torch.equal(other, want)
        sl.random.seed(None)
        a = draw()
        torch.manual_seed(torch.initial_seed())
        assert torch.equal(draw(), a)
    with pytest.raises(ShardError, match="a whole number"):
        sl.random.seed("3")  # type: ignore[arg-type]


def test_torchs_stream_moves_on_alike_for_every_layout() -> None:
    after = set()
    for layout in (". .", "x .", "x y"):
        with sl.simulate(x=2, y=2):
            torch.manual_seed(0)
            F.dropout(sl.shard(torch.ones(4, 4), layout), 0.5)
            after.add(torch.rand((), device="cpu").item())  # the host's stream, on any device
    torch.manual_seed(0)
    assert len(after) == 1 and torch.rand((), device="cpu").item() not in after


# ---------------------------------------------------------------- the state


def resumed() -> list[torch.Tensor]:
    saved = sl.random.get_state()
    want = [draw(), draw("x .")]
    draw()
    sl.random.set_state(saved)
    return [*want, draw("x y"), draw()]


def test_a_restored_state_resumes_exactly(pool: Any) -> None:
    torch.manual_seed(0)
    with sl.simulate(x=2, y=2):
        answers = [resumed()]
    answers += pool.run(resumed, x=2, y=2)
    for a, b, c, d in answers:
        assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)
        assert torch.equal(a, answers[0][0])
    with sl.simulate(x=2), pytest.raises(ShardError, match="a seed and a count"):
        sl.random.set_state({"seed": 1})


def test_a_state_goes_to_another_mesh() -> None:
    with sl.simulate(x=2, y=2):
        draw()
        saved = sl.random.get_state()
        want = draw()
    with sl.simulate(x=4, y=1):
        sl.random.set_state(saved)
        assert torch.equal(draw("x ."), want)


# ---------------------------------------------------------------- recomputation


def gradients(keep: bool, reentrant: bool, nested: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two regions, drawn from and reseeded before their backward; with and without recomputing."""
    torch.manual_seed(2)
    x = sl.shard(torch.arange(16.0).reshape(4, 4) / 7, "x y").requires_grad_()

    def inner(h: torch.Tensor) -> torch.Tensor:
        return F.dropout(h.sin(), 0.4) * torch.rand_like(h)

    def region(h: torch.Tensor) -> torch.Tensor:
        h = F.dropout(h * h, 0.5)
        if nested and not keep:
            return checkpoint(inner, h, use_reentrant=reentrant) + h  # type: ignore[operator]
        return inner(h) + h

    a, b = (
        region(x * 1) if keep else checkpoint(region, x * 1, use_reentrant=reentrant)
        for _ in range(2)
    )
    torch.manual_seed(4)
    between = draw()
    ((a + 2 * b) * sl.shard(torch.rand(4, 4), "x y")).sum().backward()  # type: ignore[operator]
    return sl.unshard(x.grad), torch.stack([between, draw()])


def compared() -> None:
    for reentrant in (False, True):
        for nested in (False, True):
            for got, want in zip(
                gradients(False, reentrant, nested), gradients(True, reentrant, nested), strict=True
            ):
                assert torch.equal(got, want)


def test_recomputation_draws_what_the_forward_drew(pool: Any) -> None:
    with sl.simulate(x=2, y=2):
        compared()
    pool.run(compared, x=2, y=2)


def never_drawn() -> None:
    """The first draw of all is inside the region."""
    x = sl.shard(torch.ones(8, 8), "x y").requires_grad_()
    checkpoint(lambda h: F.dropout(h, 0.5) * h, x, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    found = sl.unshard(x.grad)
    assert set(found.unique().tolist()) <= {0.0, 4.0}  # kept twice or dropped twice


def test_a_region_may_draw_first() -> None:
    workers = Pool(2)
    try:
        workers.run(never_drawn, x=2, y=1)
    finally:
        workers.close()


class _Path(torch.nn.Module):
    """Stochastic depth as it is usually written: a plain draw for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (torch.rand(x.shape[0], 1, dtype=x.dtype) < 0.5).to(x.dtype)
        return x + self.drop(self.inner(x)) * kept


def _paths(spread: bool) -> list[Any]:
    """Three calls; with ``spread`` each rank's generator
    stands elsewhere, and does so afterwards.
    """
    torch.manual_seed(0)
    model = _Path()
    apply, params = sl.parallelize(model, [("*", "...")], inputs={"x": "data ."})
    torch.manual_seed(3)
    sl.random.seed(3)
    rank = torch.as_tensor(sl.axis_index("data"))
    for _ in range(int(rank) if spread else 0):
        torch.rand(5)
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = [sl.unshard(apply(params, x)).tolist() for _ in range(3)]
    sl.random.seed(None)
    return [found, float(torch.rand(()))]


def test_plain_draws_inside_a_module_are_rank_zeros(pool: Any) -> None:
    apart = pool.run(_paths, True, data=4)
    alike = pool.run(_paths, False, data=4)
    assert all(a[0] == apart[0][0] for a in apart)
    assert apart[0][0] == alike[0][0]
    assert len({a[1] for a in apart}) == 4, "each rank goes on with its own stream"
    assert len({a[1] for a in alike}) == 1
    with sl.simulate(data=1):  # a product of 8 rows may round otherwise than four of 2
        torch.testing.assert_close(torch.tensor(_paths(False)[0]), torch.tensor(alike[0][0]))
