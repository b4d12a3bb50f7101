"""An exception leaves nothing posted."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives import start
from shardlib.errors import RankFailed
from shardlib.mesh import POSTED, bind, drain, posted, within


def test_a_transfer_is_kept_until_it_is_waited_for() -> None:
    before = len(POSTED)
    with sl.simulate(x=2):
        later = start(sl.psum, torch.ones(2), "x")
        assert len(POSTED) == before + 1
        later.wait()
    assert len(POSTED) == before


def test_an_exception_settles_what_is_posted_and_its_owner_still_finds_the_result() -> None:
    with sl.simulate(x=2) as mesh:
        later = start(sl.psum, torch.ones(2), "x")
        with pytest.raises(KeyError), bind(mesh):
            raise KeyError("mine")
        assert not POSTED
        assert later.wait().tolist() == [2.0, 2.0]
        with pytest.raises(sl.errors.ShardError, match="waited for already"):
            later.wait()


@pytest.mark.parametrize("error", [RankFailed("gone", op="psum"), ValueError()])
def test_nothing_waits_for_ranks_that_failed(error: Exception) -> None:
    waits = []

    def finish() -> None:
        waits.append(1)
        raise RankFailed("gone", op="psum")

    POSTED["one"], POSTED["two"] = finish, finish
    drain(error)
    assert not POSTED
    assert len(waits) == (type(error) is ValueError)  # the first to fail ends the waiting


class Late(sl.masks.Causal):
    """A mask that raises at a piece, once."""

    at = 1

    def allowed(self, *args: Any) -> Any:
        self.at -= 1
        if self.at == 0:
            raise ValueError("mine")
        return super().allowed(*args)


def caught() -> float:
    q = torch.randn(1, 2, 32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = sl.shard(q, sl.Ring("s", 2, "zigzag"))
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    mask = Late()
    with pytest.raises(ValueError, match="mine") as kept:
        sl.ring_attention(x, x, x, mask=mask, algorithm="ring")
    got = sl.unshard(sl.ring_attention(x, x, x, mask=mask, algorithm="ring"))
    del kept
    return float((got - want).abs().max())


def test_a_mask_that_raises_on_all_ranks_leaves_the_next_attention_right(pool: Any) -> None:
    with sl.simulate(s=4):
        assert caught() < 1e-12
    assert max(pool.run(caught, seconds=20.0, s=4)) < 1e-12


def forgotten() -> str:
    x = sl.shard(torch.arange(8.0), "x")

    def body(v: Any) -> Any:
        start(sl.psum, v, "x")
        return v * 2

    f = sl.shard_map(body, in_layouts="x", out_layouts="x")
    with (
        torch.no_grad(),
        pytest.raises(sl.errors.ShardError, match=r"1 transfer .* not waited") as e,
    ):
        f(x)
    with sl.check(), pytest.raises(sl.errors.ShardError, match="not waited"):
        f(x)
    with pytest.raises(sl.errors.ShardError, match="check: 2 transfers"), sl.check():
        for _ in range(2):
            start(sl.psum, torch.ones(2), "x")
    assert sl.unshard(x.sum()).item() == 28.0
    return e.value.op


def test_a_transfer_that_is_never_waited_for_is_refused_by_a_body_and_by_check(pool: Any) -> None:
    with sl.simulate(x=4):
        assert forgotten() == "shard_map"
    assert pool.run(forgotten, x=4) == ["shard_map"] * 4


def left_open() -> str:
    mesh = sl.current_mesh()
    posted.CHECKED = True
    try:
        with (
            within(mesh=None),
            pytest.raises(sl.errors.ShardError, match=r"1 transfer .* not waited") as e,
            mesh,
        ):
            with mesh:  # in the outer one it can still be waited for
                start(sl.psum, torch.ones(2), "x")
            assert len(POSTED) == 1
        assert not POSTED and sl.psum(torch.ones(1), "x").item() == 4.0
    finally:
        posted.CHECKED = False
    return e.value.op


def test_a_checked_program_refuses_to_leave_its_mesh_with_a_transfer_under_way(pool: Any) -> None:
    with sl.simulate(x=4):
        assert left_open() == "check"
    assert pool.run(left_open, x=4) == ["check"] * 4


def test_a_checked_program_says_at_its_end_what_nobody_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with sl.simulate(x=2):
        later = start(sl.psum, torch.ones(2), "x")
    posted._at_exit()
    assert not capsys.readouterr().err
    monkeypatch.setattr(posted, "CHECKED", True)
    posted._at_exit()
    assert "1 transfer that it posted was not waited for" in capsys.readouterr().err
    later.wait()
    posted._at_exit()
    assert not capsys.readouterr().err
