"""A table in tiles of rows trains as a whole one, within a budget of the module's blocks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from tests.optim.test_tiered import clipped

o = sl.optim
WORDS = 180


class Language(nn.Module):
    """Blocks between an embedding and a head, which may be the same table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, padding_idx=3)
        self.h = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, i: Any, how: str = "head") -> Any:
        x = self.words(i)
        for block in self.h:
            x = x + torch.tanh(block(x))
        if how == "head":
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), i.flatten())
        if how == "whole":
            x = x + self.words.weight.sum()
        return x.square().mean()


def model(tied: bool, split: str = "") -> Any:
    torch.manual_seed(0)
    rules = [("words.weight" if tied else "[wh][oe]*.weight", split or "..."), ("*", "...")]
    # in blocks of two axes the rows of activations lie over that of the table's
    rows = "(data x) ." if split == "x y" else "data ."
    apply, params = sl.parallelize(Language(tied).double(), rules, inputs={"i": rows})
    # with ids of the first and the last row, and of padding
    i = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(1))
    i[0, :3] = torch.tensor([0, 3, WORDS - 1])
    return lambda p, how="head": apply(p, i, how), params


def least(params: Any, inner: Any) -> int:
    """The bytes that the refusal of a smaller budget names."""
    with pytest.raises(sl.ShardError, match="needs") as refused:
        o.zero(inner, "data", 3, tiers=o.Tiers(device=1)).shard(params)
    return int(str(refused.value).split("device=")[-1].strip(" )"))


def run(tied: bool, tiers: Any, how: str = "head", split: str = "", inner: Any = None) -> Any:
    """Losses, parameters and state of three steps, and the parameters' parts."""
    f, params = model(tied, split)
    tx = o.zero(inner or clipped(), "data", 3, tiers=tiers)
    parts, counted, losses = tx.shard(params), [], []
    said, state = sl.explain(lambda p: f(p, how), parts, tx=tx), tx.init(parts)
    for _ in range(3):
        before = parts.cache.loads if tiers else 0
        with sl.trace() as t:
            loss, grads = sl.value_and_grad(lambda p: f(p, how), into=tx)(parts)
        counted.append((parts.cache.loads - before if tiers else 0, t.bytes))
        parts, state, _ = o.step(tx, parts, grads, state)
        losses.append(float(loss))
    out = {f"param {n}": sl.unshard(x).cpu() for n, x in o.state_dict(parts).items()}
    kept = {n: x for n, x in o.state_dict(state).items() if isinstance(x, torch.Tensor)}
    out |= {n: sl.unshard(x).cpu() for n, x in kept.items()}
    if tiers:
        moved = said.forward.bytes + said.backward.bytes
        assert counted[-1] == (said.tiers.loads, moved), (counted, said.tiers.loads, moved)
        assert tiers.ledger.peak["device"] <= tiers.ledger.budget["device"]
    return losses, out, parts


def compared(tied: bool, split: str = "", times: int = 1, **mesh: int) -> tuple[float, float]:
    """(the largest difference of a run in tiles, the whole's least budget over that of tiles)."""
    budget = least(model(tied, split)[1], clipped())
    want, whole, _ = run(tied, None, split=split)
    got, tiled, parts = run(tied, o.Tiers(device=times * budget), split=split)
    assert whole.keys() == tiled.keys()
    rows = [(whole[n] - tiled[n]).abs().max().item() for n in whole]
    rows += [abs(a - b) for a, b in zip(want, got, strict=True)]
    return max(rows), parts.cache.whole / budget


CASES = [({"data": 1, "x": 1}, False, "", 1), ({"data": 2, "x": 1}, True, "", 2),
         ({"data": 2, "x": 2}, True, "x .", 1), ({"data": 1, "x": 2}, False, "x .", 2),
         ({"data": 2, "x": 2, "y": 1}, True, "x y", 1),
         ({"data": 1, "x": 2, "y": 2}, False, "x y", 1)]  # fmt: skip


@pytest.mark.parametrize(("mesh", "tied", "split", "times"), CASES)
def test_training_in_tiles_is_training_in_memory(
    mesh: dict[str, int], tied: bool, split: str, times: int
) -> None:
    """Within the budget of one block or two; loads and bytes are as explained."""
    with sl.simulate(**mesh):
        error, smaller = compared(tied, split, times)
        assert error < 1e-12 and smaller > 2


def test_real_ranks_read_tiles_too(pool: Any) -> None:
    for error, _ in pool.run(compared, True, "x .", data=2, x=2):
        assert error < 1e-12


def test_a_lookup_in_tiles_is_exact() -> None:
    """Each row is in one tile, and so is its gradient: without products and norms bits are the same."""
    with sl.simulate(data=2, x=1):
        want, whole, _ = run(False, None, "blocks", inner=o.adamw(0.1))
        tiers = o.Tiers(device=least(model(False)[1], o.adamw(0.1)))
        got, tiled, parts = run(False, tiers, "blocks", inner=o.adamw(0.1))
        assert len(parts.index.items) > len(whole) / 3 and want == got
        assert [n for n in whole if not torch.equal(whole[n], tiled[n])] == []


def test_what_was_saved_in_tiles_is_loaded_in_other_tiles_and_whole() -> None:
    with sl.simulate(data=2, x=2):
        _, params = model(True, "x .")
        budget = least(params, o.adamw(0.1))
        kinds = [o.Tiers(device=budget), o.Tiers(device=2 * budget), None]
        txs = [o.zero(o.adamw(0.1), "data", 3, tiers=tiers) for tiers in kinds]
        given = {
            n: sl.shard(torch.rand(x.shape, dtype=x.dtype), x.sharding) for n, x in params.items()
        }
        want = {n: sl.unshard(x).cpu() for n, x in given.items()}
        for one in txs:
            kept = o.state_dict(one.shard(given))
            assert all(torch.equal(sl.unshard(x).cpu(), want[n]) for n, x in kept.items())
            for other in txs:
                found = o.state_dict(o.load_state_dict(other.shard(params), kept))
                assert all(torch.equal(sl.unshard(x).cpu(), want[n]) for n, x in found.items())


def test_what_reads_a_table_whole_is_refused_with_the_budget_that_it_needs() -> None:
    with sl.simulate(data=1, x=1):
        f, params = model(False)
        budget, whole = least(params, o.adamw(0.1)), least(params, o.lamb(0.1))
        assert whole > 2 * budget
        for device in (budget, whole):
            tx = o.zero(o.adamw(0.1), "data", 3, tiers=o.Tiers(device=device))
            parts = tx.shard(params)
            if device == whole:
                assert float(f(parts, "whole")) > 0
                continue
            with pytest.raises(sl.errors.Unsupported, match=f"(?s)'words.weight' whole.*{whole}"):
                f(parts, "whole")


def test_a_durable_run_goes_on_in_its_own_tiles_on_any_device_that_holds_them(
    tmp_path: Any,
) -> None:
    with sl.simulate(data=2, x=1):
        f, params = model(True)
        budget = least(params, o.adamw(0.1))

        def steps(where: str, device: int | None, count: int) -> Any:
            how: Any = {"disk": tmp_path / where, "durable": True, "resume": True}
            tx = o.zero(o.adamw(0.1), "data", 3, tiers=o.Tiers(device=device, **how))
            parts = tx.shard(params)
            state, begun, step = tx.init(parts), parts.generation, o.value_and_step(f, tx)
            for _ in range(count):
                loss, parts, state, _ = step(parts, state)
            return begun, parts.generation, float(loss), len(parts)

        want, _, whole = run(True, None, inner=o.adamw(0.1))
        first = steps("tiled", budget, 1)
        assert first[:2] == (0, 1) and first[3] > len(whole)
        for at, device in ((1, budget), (2, None)):
            *numbers, loss, count = steps("tiled", device, 1)
            assert (numbers, count) == ([at, at + 1], first[3]) and abs(loss - want[at]) < 1e-12
        assert steps("whole", None, 1)[3] == len(whole)
        with pytest.raises(sl.ShardError, match="the largest block needs") as refused:
            steps("whole", budget, 1)
        device = int(str(refused.value).split("device=")[-1].strip(" )"))
        assert steps("whole", device, 1)[:2] == (1, 2)
