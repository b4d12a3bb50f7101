"""The same primitives give the same values, and the same counts, on every back end."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives import (
    blocks,
    gather_into,
    played,
    scatter_into,
    storage,
    unwrap,
    wrap,
)
from shardlib.mesh import coordinates, rank_along
from tests import fixes
from tests.collectives.primitives import (
    ADJOINTS,
    MESHES,
    PRIMITIVES,
    all_gradients,
    all_on_rank,
    expected,
    gradient,
    halves,
    linear_adjoints,
    of_nothing,
)


@pytest.mark.parametrize("make", [sl.simulate, sl.record])
def test_who_receives_nothing_gets_zeros_also_where_there_is_one_rank(make: Any) -> None:
    """A halo of one-sized axes: the edge has no neighbour, and keeps nothing of its own."""
    with make(x=1, y=2) as m:
        x = torch.ones(3, device=m.device, requires_grad=True)
        y = sl.ppermute(x, "x", [(i, i + 1) for i in range(sl.axis_size("x") - 1)])
        y.sum().backward()
        assert y.shape == (3,) and x.grad is not None
        if make is sl.simulate:
            assert not y.any() and not x.grad.any()


@pytest.mark.parametrize("name", ADJOINTS)
def test_gradients_pass_gradcheck_on_simulated_ranks(name: str) -> None:
    for mesh, axis in [({"x": 2, "y": 2}, "x"), ({"x": 2, "y": 2}, ("y", "x")), ({"x": 4}, "x")]:
        with sl.simulate(**mesh) as m:
            x = torch.randn(m.size, 4, 6, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(
                lambda raw, m=m, a=axis: unwrap(PRIMITIVES[name][0](wrap(raw, m), a)), (x,)
            )


def test_gradients_are_adjoints_on_real_ranks(pool: Any) -> None:
    for mesh, axes in MESHES:
        for gaps in pool.run(linear_adjoints, axes, **mesh):
            assert max(gaps.values()) < 1e-12, max(gaps, key=gaps.get)


def test_gradients_on_real_ranks_are_those_on_simulated_ones(pool: Any) -> None:
    """Small integers, so that several ranks hold the maximum, whose gradient is shared."""
    for mesh, axes in MESHES:
        blocks = torch.randint(3, (4, 4, 6), generator=torch.Generator().manual_seed(0)).double()
        answers = pool.run(all_gradients, axes, blocks, **mesh)
        for (name, axis), _ in answers[0].items():
            with sl.simulate(**mesh) as m:
                want = unwrap(gradient(name, axis, wrap(blocks, m)))
            for rank, answer in enumerate(answers):
                said = f"{name} over {axis} on rank {rank}"
                torch.testing.assert_close(
                    answer[name, axis], want[rank], rtol=1e-12, atol=0, msg=said
                )


def test_flattened_axes_that_are_not_the_whole_mesh() -> None:
    mesh, axes = {"x": 2, "y": 2, "z": 2}, [("x", "y"), ("y", "x"), ("z", "x"), "y"]
    answers = sl.launch(all_on_rank, axes, **mesh, timeout=180)
    for name, axis in answers[0]:
        want = expected(name, mesh, axis, torch.float64)
        for rank, answer in enumerate(answers):
            said = f"{name} over {axis} on rank {rank}"
            torch.testing.assert_close(
                answer[name, axis][0], want[rank], rtol=1e-12, atol=0, msg=said
            )


def test_blocks_without_elements_travel(pool: Any) -> None:
    for mesh, axis in [({"x": 2, "y": 2}, "y"), ({"x": 4}, "x")]:
        with sl.simulate(**mesh):
            want = of_nothing(axis)
        assert pool.run(of_nothing, axis, **mesh) == [want] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_round_once(pool: Any, dtype: torch.dtype) -> None:
    blocks = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    total = blocks.sum(0).to(dtype)
    for rank, (scattered, reduced) in enumerate(pool.run(halves, dtype, blocks, x=4)):
        assert torch.equal(scattered, total.chunk(4)[rank]) and torch.equal(
            reduced, total * (rank == 1)
        )
    with sl.simulate(x=4):
        scattered, reduced = halves(dtype, blocks)
    assert torch.equal(unwrap(scattered).flatten(), total) and torch.equal(
        unwrap(reduced)[1], total
    )


def test_pvary_sums_its_gradient() -> None:
    with sl.simulate(x=3) as m:
        raw = torch.ones(3, 2, requires_grad=True)
        y = sl.collectives.pvary(wrap(raw, m), "x")
        unwrap(y).backward(torch.arange(6.0).reshape(3, 2))
    assert raw.grad is not None and torch.equal(raw.grad, torch.tensor([[6.0, 9.0]] * 3))


MISTAKES = [
    (lambda x: sl.psum(x, "z"), "UnknownAxis", "this mesh has x, y"),
    (lambda x: sl.psum_scatter(x, "y", 1), "UnevenSplit", "size 3 does not divide"),
    (lambda x: sl.all_gather(x, "x", 5), "RankMismatch", "dimension 5"),
    (lambda x: sl.collectives.pbroadcast(x, "x", 7), "ShardError", "root 7"),
    (
        lambda x: sl.ppermute(x, "x", [(0, 1), (1, 1)]),
        "ShardError",
        "rank 1 sends or receives twice",
    ),
    (lambda x: sl.ppermute(x, "x", [(0, 2)]), "ShardError", "rank 2 is not among 0..1"),
    (lambda x: sl.collectives.start(sl.psum, x.requires_grad_(), "x"), "ShardError", "no gradient"),
    (lambda x: sl.collectives.start(sl.pmean, x, "x"), "ShardError", "these have one: psum"),
    (
        lambda x: sl.collectives.start(sl.collectives.pbroadcast, x, "x", -1),
        "ShardError",
        "root -1 is not among 0..1",
    ),
    (
        lambda x: sl.collectives.start(sl.collectives.preduce, x, "x", 2),
        "ShardError",
        "preduce: root 2",
    ),
    (
        lambda x: sl.collectives.start(sl.ppermute, x, "x", [(0, 2)]),
        "ShardError",
        "rank 2 is not among 0..1",
    ),
    (lambda x: sl.psum(x, ("x", "y", "x")), "AxisReused", "names a mesh axis twice"),
    (
        lambda x: sl.all_gather(x, "x", 4, tiled=False),
        "RankMismatch",
        "dimension 4 of a block with 3 dimensions",
    ),
    (lambda x: bool(sl.axis_index("x") > 0), "ShardError", "different values"),
]


@pytest.mark.parametrize(("call", "error", "says"), MISTAKES)
def test_mistakes_name_the_culprit(call: Any, error: str, says: str) -> None:
    with sl.simulate(x=2, y=2) as m:
        x = wrap(torch.ones(4, 4, 3), m)
        with pytest.raises(sl.ShardError, match=says) as caught:
            call(x)
        assert type(caught.value).__name__ == error and caught.value.fix


def _mistakes() -> list[str]:
    said = []
    for call, *_ in MISTAKES:
        try:
            said.append(str(call(torch.ones(4, 3))))
        except sl.ShardError as e:
            fixes.caught(e)
            said.append(f"{type(e).__name__} {e.message} {e.fix}")
    return said


def test_real_ranks_refuse_the_same_mistakes(pool: Any) -> None:
    for said in pool.run(_mistakes, x=2, y=2):
        # the last is of simulation alone
        for line, (_, error, says) in list(zip(said, MISTAKES, strict=True))[:-1]:
            assert line.startswith(error) and says.rpartition(": ")[2] in line, (line, says)


def test_a_transfer_is_waited_for_once() -> None:
    with sl.simulate(x=2) as m:
        later = sl.collectives.start(sl.collectives.shift, wrap(torch.ones(2, 1), m), "x")
        later.wait()
        with pytest.raises(sl.ShardError, match="waited for already"):
            later.wait()


def test_a_collective_without_a_mesh_says_so() -> None:
    with pytest.raises(sl.ShardError, match="no mesh is in scope") as caught:
        sl.psum(torch.ones(2), "x")
    assert "simulate" in caught.value.fix


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_a_sum_sent_narrow_is_rounded_once_on_the_way_and_once_at_the_end(p: int) -> None:
    """1 + 2^-9 travels as 1 in bfloat16; what stays on its rank does not travel."""
    parts = torch.full((p, 5), 1 + 2**-9)
    with sl.simulate(x=p) as m:
        narrow = unwrap(sl.psum(wrap(parts, m), "x", out=torch.bfloat16, wire=torch.bfloat16))
        back = unwrap(sl.psum(wrap(parts, m), "x", out=torch.bfloat16))
        with sl.trace() as t:
            sl.psum(wrap(parts, m), "x", out=torch.bfloat16)
        alone = unwrap(sl.psum(wrap(parts[:, 0], m), "x", out=torch.bfloat16))
    assert torch.equal(alone, back[:, 0])
    once = torch.tensor(p - 1 + 1 + 2**-9).bfloat16()  # p-1 parts arrived as 1
    assert narrow.dtype == back.dtype == torch.bfloat16
    assert torch.equal(narrow, once.expand(p, 5)) and torch.equal(
        back, torch.tensor(p * (1 + 2**-9)).bfloat16().expand(p, 5)
    )
    assert float(t.bytes) == (p - 1) / p * 5 * (4 + 2) and t.messages == 2 * (p - 1)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
CALLS = {
    "psum": lambda t: sl.psum(t, "x"),
    "pmax": lambda t: sl.pmax(t, "x"),
    "all_gather": lambda t: sl.all_gather(t, "x"),
    "psum_scatter": lambda t: sl.psum_scatter(t, "x"),
    "all_to_all": lambda t: sl.all_to_all(t, "x", 0, 1),
    "shift": lambda t: sl.collectives.shift(t, "x", 1),
    "pbroadcast": lambda t: sl.collectives.pbroadcast(t, "x", 1),
    "preduce": lambda t: sl.collectives.preduce(t, "x", 1),
}


def _of_each_dtype() -> dict[Any, Any]:
    """Outcome and count of each call on blocks of each dtype, small and large."""
    out: dict[Any, Any] = {}
    for dtype in DTYPES:
        for rows in (4, 4096):
            here = (
                torch.arange(rows * 4).reshape(rows, 4) % 3
                + torch.as_tensor(sl.axis_index("x")) % 2
            )
            block = here.float().to(dtype)
            for name, call in CALLS.items():
                with sl.trace() as t:
                    try:
                        found: Any = call(block)
                    except sl.ShardError as e:
                        found = str(e).splitlines()[0]
                text = (
                    found
                    if isinstance(found, str)
                    else (found.dtype, tuple(found.shape), _digest(found))
                )
                out[dtype, rows, name] = (text, t.bytes, t.messages)
    return out


def _digest(x: torch.Tensor) -> Any:
    """The block of rank 0 as numbers, summed with weights by position."""
    first = unwrap(x)[0] if isinstance(x, sl.collectives.Stacked) else x
    flat = torch.view_as_real(first).flatten() if first.is_complex() else first.flatten()
    return float((flat.double() * torch.arange(1, flat.numel() + 1)).sum())


def test_every_dtype_moves_alike_on_every_back_end(pool: Any) -> None:
    with sl.simulate(x=4):
        want = _of_each_dtype()
    got = pool.run(_of_each_dtype, x=4)[0]
    assert {k: (got[k], want[k]) for k in want if got[k] != want[k]} == {}
    refused = {k[0] for k, v in want.items() if isinstance(v[0], str)}
    assert refused == {
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
    }


def _largest_with_nan(size: int) -> list[float]:
    x = torch.arange(float(size))
    x[size // 2] = float("nan") if sl.axis_index("x") == 2 else 0
    return sl.pmax(x, "x").tolist()


@pytest.mark.parametrize("size", [1, 7, 9000])
def test_no_maximum_passes_over_a_nan(pool: Any, size: int) -> None:
    for found in pool.run(_largest_with_nan, size, x=4):
        assert [i for i, v in enumerate(found) if v != v] == [size // 2]
        assert found[-1] == size - 1 or size == 1


FLAT = [({"x": 4}, ("x",)), ({"x": 2, "y": 2}, ("y", "x")), ({"x": 2, "y": 2}, ("y",))]


def round_sum(
    every: list[torch.Tensor], mesh: sl.Mesh, axes: tuple[str, ...], wire: torch.dtype | None
) -> torch.Tensor:
    """Each part summed from its owner's neighbour on round to the owner."""
    p, ranks = mesh.axis_size(axes), coordinates(mesh.axes)
    out = []
    for coord in played(mesh):
        owner, others = rank_along(axes, coord, mesh.axes), {}
        for other, x in zip(ranks, every, strict=True):
            if all(other[a] == coord[a] for a in mesh.names if a not in axes):
                others[rank_along(axes, other, mesh.axes)] = x.view(p, -1)[owner]
        total = torch.zeros(())
        for i in range(1, p + 1):
            one = others[(owner + i) % p]
            one = one if wire is None or i == p else one.to(wire).to(one.dtype)
            total = one if i == 1 else total + one
        out.append(total)
    return storage(out, mesh)


def flat_vectors(axes: tuple[str, ...]) -> list[str]:
    """What differs between the collectives on flat vectors and those that allocate."""
    mesh, wrong = sl.current_mesh(), []
    for n, dtype, wire in [
        (8, torch.float32, None),
        (1 << 17, torch.float32, None),
        ((1 << 17) + 24, torch.float64, None),
        (1 << 17, torch.float32, torch.bfloat16),
        (1 << 17, torch.bfloat16, None),
    ]:
        p = mesh.axis_size(axes)
        g = torch.Generator().manual_seed(n)
        every = [torch.randn(n, generator=g).to(dtype) for _ in range(mesh.size)]
        place = {tuple(c.items()): i for i, c in enumerate(coordinates(mesh.axes))}
        raw = storage([every[place[tuple(c.items())]] for c in played(mesh)], mesh)
        out = torch.empty_like(raw[..., : n // p])
        want = unwrap(sl.psum_scatter(wrap(raw, mesh), axes, 0, wire))
        with sl.trace() as one:
            unwrap(sl.psum_scatter(wrap(raw, mesh), axes, 0, wire))
            unwrap(sl.all_gather(wrap(want, mesh), axes))
        with sl.trace() as two:
            land = torch.empty_like(raw)
            got = scatter_into(raw.clone(), out, mesh, axes, wire=wire, land=land, ahead=True)()
            flat = torch.zeros_like(raw)
            parts = flat.unflatten(-1, (p, -1))
            for view, mine, c in zip(
                blocks(parts, mesh), blocks(got, mesh), played(mesh), strict=True
            ):
                view[rank_along(axes, c, mesh.axes)] = mine
            gather_into(flat, mesh, axes, ahead=True)()
        turned = flat.clone()
        for part, c in zip(blocks(turned, mesh), played(mesh), strict=True):
            mine = rank_along(axes, c, mesh.axes)
            part.view(p, -1)[[i for i in range(p) if i != mine]] = 0
        if not torch.equal(gather_into(turned, mesh, axes)(), flat):
            wrong.append(f"ring gather {n} {dtype}")
        if dtype is not torch.bfloat16 and not torch.equal(got, round_sum(every, mesh, axes, wire)):
            wrong.append(f"sum {n} {dtype} {wire}")
        for room in (None, land, land.view(-1)[: n // 16]):  # in large and small pieces
            again = torch.empty_like(got)
            scatter_into(raw.clone(), again, mesh, axes, wire=wire, land=room)()
            if not torch.equal(again, got):
                wrong.append(f"ring {n} {dtype} {wire} {None if room is None else room.numel()}")
        if not torch.equal(flat, unwrap(sl.all_gather(wrap(got, mesh), axes))):
            wrong.append(f"gather {n} {dtype}")
        if (one.bytes, one.messages) != (two.bytes, two.messages):
            wrong.append(f"counts {n} {dtype} {wire}: {one.bytes} {two.bytes}")
        wide = torch.zeros(*got.shape, dtype=torch.float32)
        if dtype is torch.bfloat16 and not torch.equal(
            scatter_into(raw, wide, mesh, axes)(),
            unwrap(sl.psum_scatter(wrap(raw.float(), mesh), axes)),
        ):
            wrong.append(f"half precision {n}")
    return wrong


@pytest.mark.parametrize(("mesh", "axes"), FLAT)
def test_collectives_on_flat_vectors_are_those_that_allocate(
    mesh: dict[str, int], axes: tuple[str, ...], pool: Any
) -> None:
    with sl.simulate(**mesh):
        assert flat_vectors(axes) == []
    assert pool.run(flat_vectors, axes, **mesh) == [[]] * 4


@pytest.mark.parametrize("axis", [None, 0, 1.5, b"x", ("x", 0)])
@pytest.mark.parametrize("verb", [sl.psum, sl.pmax, sl.all_gather, sl.collectives.pvary])
def test_an_axis_that_is_no_name_is_refused(verb: Any, axis: Any) -> None:
    with sl.simulate(x=2), pytest.raises(sl.errors.ShardError, match="axis"):
        verb(torch.ones(2), axis)


@pytest.mark.parametrize("verb", [sl.psum, sl.pmean, sl.pmax, sl.all_gather, sl.psum_scatter])
def test_a_collective_of_what_is_no_block_is_refused(verb: Any) -> None:
    with sl.simulate(x=2):
        for x in (None, 0, 1.5, [1.0]):
            with pytest.raises(sl.errors.BadArgument, match="takes a tensor"):
                verb(x, "x")
        x = sl.shard(torch.arange(4.0), "x")
        with pytest.raises(sl.errors.BadArgument, match="this value is sharded"):
            verb(x, "x")


def test_a_table_has_one_number_for_each_rank() -> None:
    with sl.simulate(x=2):
        assert sl.collectives.pick(torch.tensor([3.0, 4.0]), "x").ranks.tolist() == [3.0, 4.0]
        for table in ([1.0], [1.0, 2.0, 3.0], ["a", "b"], torch.ones(3)):
            with pytest.raises(sl.errors.BadArgument, match="'x' has 2 ranks"):
                sl.collectives.pick(table, "x")  # type: ignore[arg-type]
