"""What would need more memory than there is is refused before anything is made."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.capacity import available


@pytest.mark.parametrize("verb", [sl.parallelize, sl.init])
def test_a_module_that_does_not_fit_is_refused_before_it_begins(verb: Any) -> None:
    left = available(torch.get_default_device())
    assert left is not None and left > 0
    with torch.device("meta"):
        model = nn.Linear(1 << 20, left >> 21, bias=False)  # twice what is left, on 2 ranks
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="GiB are needed") as caught:
        verb(model, [("*", "...")])
    assert "sl.record" in str(caught.value)
    with sl.record(x=2):
        sl.parallelize(model, [("*", "...")])


def test_a_tensor_that_does_not_fit_is_refused_before_it_is_copied() -> None:
    left = available(torch.get_default_device())
    assert left is not None
    wide = torch.zeros(1).expand(left // 6)  # four bytes of it, and two ranks
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="GiB are needed"):
        sl.shard(wide, "...")
    with sl.simulate(x=2):
        x = sl.shard(torch.zeros(2, 1), "x .")
        x = x.becomes(torch.zeros(1).expand(2, 1, left // 6), shape=(2, left // 6))
        with pytest.raises(sl.ShardError, match=r"reshard: .* GiB are needed"):
            sl.unshard(x)


@pytest.mark.parametrize("tx", [sl.optim.adamw(0.1), sl.optim.lion(0.1), sl.optim.ema(0.9)])
def test_moments_that_do_not_fit_are_refused_before_they_are_made(tx: Any) -> None:
    left = available(torch.get_default_device())
    assert left is not None
    n = left // 6  # of four bytes, on two ranks
    with sl.simulate(x=2):
        x = sl.shard(torch.zeros(2), "...")
        wide = x.becomes(torch.zeros(1).expand(2, n), shape=(n,))
        with pytest.raises(sl.ShardError, match=r"init: .* GiB are needed"):
            tx.init({"w": wide})


def _stages(stage: int, master: Any = None) -> Any:
    return sl.optim.zero(sl.optim.sgd(0.1), "x", stage=stage, master=master)


MAKERS = {  # what makes blocks: a function of parameters
    "buckets": lambda p: _stages(1).init(p),
    "parts": lambda p: _stages(3).shard(p),
    "masters": lambda p: _stages(1, "fp32").init({k: w.bfloat16() for k, w in p.items()}),
    "mixed": lambda p: sl.optim.mixed(sl.optim.sgd(0.1)).init({"w": p["w"].bfloat16()}),
    "remainders": lambda p: sl.optim.mixed(
        sl.optim.sgd(0.1), sl.optim.Precision(master="bf16+rem")
    ).init({"w": p["w"].bfloat16()}),
    "moments": lambda p: sl.optim.adamw(0.1).init(p),
    "statistics": lambda p: sl.optim.soap(0.1).init(p),
    "gradients": lambda p: sl.value_and_grad(lambda q: q["w"].sum(), into=_stages(2))(p),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_blocks_that_do_not_fit_are_refused_whoever_makes_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sl.simulate(x=2):
        params = {"w": sl.shard(torch.ones(8, 8), "...").requires_grad_()}
        before = sl.unshard(params["w"])
        monkeypatch.setattr("shardlib.capacity.LARGE", 0)
        monkeypatch.setattr("shardlib.optim.buckets.LARGE", 0)
        monkeypatch.setattr("shardlib.capacity.available", lambda _: 10)
        with pytest.raises(sl.ShardError, match="GiB are needed") as caught:
            MAKERS[kind](params)
        assert caught.value.fix.startswith("with sl.record(x=2):")
        monkeypatch.undo()
        assert torch.equal(sl.unshard(params["w"]), before)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with sl.simulate(x=2):
        params = {"weight": sl.shard(torch.ones(8, 8), "x .")}
        sl.save_hf(tmp_path / "hf", params)
        assert _loads(tmp_path, params) == [True, True]
        model = nn.Linear(8, 8, bias=False, device="meta")
        with (
            _without_memory(),
            pytest.raises(sl.ShardError, match=r"GiB are needed(.|\n)*sl.record"),
        ):
            sl.load_hf(tmp_path / "hf", model, [("*", "x .")])


def test_where_one_rank_lacks_memory_a_load_is_refused_on_all(tmp_path: Path, pool: Any) -> None:
    assert pool.run(_load_on_ranks, tmp_path, x=4) == [[True, True]] * 4


def _load_on_ranks(folder: Path) -> list[bool]:
    return _loads(folder, {"weight": sl.shard(torch.ones(8, 8), "x .")}, rank=1)


def _loads(folder: Path, params: Any, rank: int = 0) -> list[bool]:
    """Whether loads are refused with the sizes and the fix, where a rank lacks memory."""
    sl.save(folder / "c", params)
    found = []
    with _without_memory(rank):
        for like in (None, params):
            with pytest.raises(sl.ShardError) as caught:
                sl.load(folder / "c", like)
            found.append(all(w in str(caught.value) for w in ("GiB are needed", "sl.record(x=")))
    return found


@contextlib.contextmanager
def _without_memory(rank: int = 0) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardlib.capacity.LARGE", 0)
        if sl.process_index() == rank:
            patch.setattr("shardlib.capacity.available", lambda _: 10)
        yield


def test_what_an_allocator_keeps_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"get_memory_info": (100, 1000), "memory_reserved": 700, "memory_allocated": 200}
    monkeypatch.setattr("shardlib.capacity._asked", lambda _, general, own: said.get(general))
    assert available(torch.device("cuda")) == 600
    del said["memory_reserved"]
    assert available(torch.device("cuda")) == 100
    said.clear()
    assert available(torch.device("cuda")) is None and available(torch.device("meta")) is None
