"""Batches are the same whatever the number of ranks, filled up at the end, and go on where they stopped."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.errors import BadArgument, MeshError, RankMismatch, UnevenSplit

MESHES = [{"data": 1}, {"data": 4}, {"data": 2, "x": 2}, {"x": 2, "data": 2, "y": 2}]


def rows(n: int = 22) -> list[dict[str, Any]]:
    return [
        {"ids": torch.arange(6) + 10 * i, "labels": torch.full((6,), i), "w": 0.5 * i}
        for i in range(n)
    ]


def told(batches: Any) -> list[Any]:
    return [(sl.unshard(b["ids"]).tolist(), sl.unshard(b["labels"]).tolist()) for b in batches]


def passes(count: int = 2) -> list[Any]:
    held = sl.data(rows(), 8, seed=3)
    return [told(held) for _ in range(count)]


def test_an_epoch_is_the_same_on_every_mesh(pool: Any) -> None:
    found = []
    for axes in MESHES:
        with sl.simulate(**axes):
            found.append(passes())
    assert found == [found[0]] * len(found)
    first, second = found[0]
    for epoch in (first, second):
        seen = [row[0] // 10 for ids, _ in epoch for row in ids]
        assert sorted(seen[:22]) == list(range(22)) and len(epoch) == 3
        assert [row for _, labels in epoch for row in labels][22:] == [[-100] * 6] * 2
    assert first != second
    assert pool.run(passes, data=2, x=2) == [found[0]] * 4
    assert pool.run(passes, data=4) == [found[0]] * 4


def test_each_rank_reads_its_own_rows_alone(pool: Any) -> None:
    said = pool.run(_asked, data=2, x=2)
    assert all(len(asked) == 11 for asked in said)
    assert said[0] == said[1] and said[2] == said[3] and not set(said[0]) & set(said[2])


def _asked() -> list[int]:
    asked = []

    class Listening:
        def __len__(self) -> int:
            return 22

        def __getitem__(self, i: int) -> int:
            asked.append(i)
            return i

    list(sl.data(Listening(), 2))
    return asked


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_run_goes_on_where_it_stopped_on_other_ranks(stop: int) -> None:
    """At every batch of two epochs, also at the border, and from plain numbers that a file holds."""
    with sl.simulate(data=2):
        whole = [b for _ in range(2) for b in told(sl.data(rows(), 8, seed=5))]
        held = sl.data(rows(), 8, seed=5)
        whole = [b for _ in range(2) for b in told(held)]
        again = sl.data(rows(), 8, seed=5)
        seen, states = [], []
        while len(seen) < stop:
            for batch in again:
                seen.append(told([batch])[0])
                states.append(again.state())
                if len(seen) == stop:
                    break
    state = states[-1]
    assert all(type(v) is int for v in state.values())
    with sl.simulate(data=4, x=2):
        rest = sl.data(rows(), 8, state=state)
        while len(seen) < len(whole):
            seen += told(rest)
    assert seen[: len(whole)] == whole


def test_a_sequence_is_split_too() -> None:
    with sl.simulate(data=2, s=2):
        for layout in ("data s", "data zigzag(s)"):
            held = sl.data([torch.arange(8) + 100 * i for i in range(4)], 4, layout, shuffle=False)
            (batch,) = list(held)
            assert sl.typeof(batch).startswith("i64[4@data, 8@")
            assert torch.equal(sl.unshard(batch), torch.arange(8) + 100 * torch.arange(4)[:, None])
        layouts = {"ids": "data s", "labels": "data .", "w": "data"}
        batch = next(iter(sl.data(rows(), 4, layouts)))
        assert [sl.typeof(batch[k]) for k in ("ids", "labels", "w")] == [
            "i64[4@data, 6@s]",
            "i64[4@data, 6]",
            "f64[4@data]",
        ]


def test_the_last_batch_counts_for_nothing_where_it_was_filled() -> None:
    """The mean loss of a filled batch is that of its true rows."""
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 7), torch.randint(7, (5,))
    want = torch.nn.functional.cross_entropy(logits[4:], labels[4:])
    with sl.simulate(data=2):
        held = sl.data(
            [(logits[i], labels[i]) for i in range(5)], 4, shuffle=False, ignore={1: -100}
        )
        *_, (x, y) = list(held)
        found = torch.nn.functional.cross_entropy(x, y)
        torch.testing.assert_close(sl.unshard(found), want)
        assert len(sl.data(rows(5), 4, last="drop")) == 1
        assert len(list(sl.data(rows(5), 4, last="drop"))) == 1


def test_workers_read_the_same() -> None:
    with torch.device("cpu"):  # what workers send
        given = rows()
    with sl.simulate(data=2):
        assert told(sl.data(given, 8, workers=1)) == told(sl.data(given, 8))


def test_wrong_arguments_are_refused() -> None:
    with sl.simulate(data=2):
        with pytest.raises(UnevenSplit):
            sl.data(rows(), 7)
        for arguments in ({"last": "cut"}, {"state": {"epoch": 1}}):
            with pytest.raises(BadArgument):
                sl.data(rows(), 8, **arguments)
        with pytest.raises(BadArgument, match="22 rows"):
            sl.data(rows(21), 8, state=sl.data(rows(), 8).state())
        with pytest.raises(BadArgument, match="length"):
            sl.data(iter(rows()), 8)
        with pytest.raises(BadArgument, match="no field"):
            list(sl.data(list(range(5)), 4))


# ---------------------------------------------------------------- from_local


def read(layout: str) -> Any:
    """What a rank would read of a table: its own rows and columns, by its coordinate."""
    mesh = sl.current_mesh()
    table = torch.arange(32).reshape(8, 4)

    def local() -> Any:
        coord = mesh.coord
        assert coord is not None
        where = sl.Layout.parse(layout).slices((8, 4), mesh, coord)
        return {"t": table[where], "n": torch.tensor([coord["data"]])}

    made = sl.from_local(local, {"t": layout, "n": "data"})
    return sl.typeof(made["t"]), sl.unshard(made["t"]).tolist(), sl.unshard(made["n"]).tolist()


@pytest.mark.parametrize("layout", ["data .", "data x", "(x data) .", ". x"])
def test_a_global_tensor_is_what_the_ranks_read(pool: Any, layout: str) -> None:
    with sl.simulate(data=2, x=2):
        one = read(layout)
    assert one[1] == torch.arange(32).reshape(8, 4).tolist() and one[2] == [0, 1]
    assert pool.run(read, layout, data=2, x=2) == [one] * 4


def _given() -> list[Any]:
    mesh = sl.current_mesh()
    assert mesh.coord is not None
    block = torch.full((2, 3), dist.get_rank(), dtype=torch.float32)
    return sl.unshard(sl.from_local(block, "(data x) .")).tolist()


def test_a_block_is_enough_where_a_process_is_one_rank(pool: Any) -> None:
    want = torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3).tolist()
    assert pool.run(_given, data=2, x=2) == [want] * 4


def test_one_block_of_several_ranks_is_refused() -> None:
    with sl.simulate(data=2) as mesh:
        with pytest.raises(MeshError, match="plays several ranks"):
            sl.from_local(torch.ones(2), "data")
        with pytest.raises(RankMismatch, match="differ"):
            sl.from_local(lambda: torch.ones(1 + mesh.coord["data"]), "data")  # type: ignore[index]
        assert mesh.coord is None  # no one place is this process's
        given = sl.from_local(sl.axis_index("data") * torch.ones(2), "data")
        assert sl.unshard(given).tolist() == [0, 0, 1, 1]


def test_fields_whose_rows_lie_differently_are_of_the_same_rows() -> None:
    """As ids and labels under cube3d: a rank reads what any of its fields holds."""
    rows = [(torch.tensor([i, i]), torch.tensor([i, -i])) for i in range(8)]
    for axes in ({"x": 2, "y": 2, "z": 2}, {"x": 2, "y": 1, "z": 2}):
        with sl.simulate(**axes):
            dealt = sl.data(rows, 4, ("(x y) .", "(x z) ."), ignore={1: -100})
            for ids, labels in dealt:
                assert torch.equal(sl.unshard(ids)[:, 0], sl.unshard(labels)[:, 0])
                assert torch.equal(sl.unshard(ids)[:, 1], -sl.unshard(labels)[:, 1])
