"""Memory tiers: training with parameters in host memory is training in memory, bit for bit."""

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl

o = sl.optim
WIDE = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Equal blocks and nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: Any) -> Any:
        for block in self.h:
            x = block(x)
        return x.square().mean()


RULES = [("h.*.up.weight", "x ."), ("h.*.up.bias", "x"), ("h.*.down.weight", ". x"), ("*", "...")]


def model(count: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    module = Blocks(count).to(dtype)
    x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(1)).to(dtype)
    apply, params = sl.parallelize(module, RULES, inputs={"x": "data ."})
    return (lambda p: apply(p, x)), params


def run(
    inner: Any, tiers: Any, count: int = 4, steps: int = 3, dtype: torch.dtype = torch.float32, **how: Any
) -> dict[str, Any]:  # fmt: skip
    """Losses, norms, parameters and state of some steps, and the blocks loaded in each."""
    f, params = model(count, dtype)
    tx = o.zero(inner, "data", 3, tiers=tiers, **how)
    params = tx.shard(params)
    state = tx.init(params)
    out: dict[str, Any] = {"loads": []}
    for i in range(steps):
        before = params.cache.loads if tiers else 0
        loss, grads = sl.value_and_grad(f, into=tx)(params)
        out["loads"].append(params.cache.loads - before if tiers else 0)
        params, state, info = o.step(tx, params, grads, state, norm=True)
        out |= {f"loss {i}": loss, f"norm {i}": info.norm}
    out |= {f"param {n}": sl.unshard(x) for n, x in o.state_dict(params).items()}
    out |= {
        n: sl.unshard(x) if isinstance(x, torch.Tensor) else x
        for n, x in o.state_dict(state).items()
    }
    return out


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    assert a.keys() == b.keys()
    rows = ((n, a[n], b[n]) for n in a if n != "loads")
    return [n for n, x, y in rows if not torch.equal(torch.as_tensor(x), torch.as_tensor(y))]


def block_bytes(mesh: dict[str, int], dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the parts of a block on a rank, all of its buckets."""
    with sl.simulate(**mesh):
        tx = o.zero(o.sgd(0.1), "data", 3, tiers=o.Tiers())
        return max(tx.shard(model(1, dtype)[1]).cache.sizes.values())


def clipped() -> Any:
    return o.chain(o.clip_by_global_norm(0.05), o.adamw(0.01))


MESHES = [{"data": 1, "x": 1}, {"data": 2, "x": 1}, {"data": 2, "x": 2}, {"data": 1, "x": 2}]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [lambda: o.adamw(0.01), clipped])
def test_training_in_tiers_is_training_in_memory(mesh: Any, make: Any) -> None:
    with sl.simulate(**mesh):
        want = run(make(), None)
        for device in (least(mesh), None):
            tiers = o.Tiers(device=device)
            assert differing(want, run(make(), tiers)) == []
            assert tiers.ledger.peak["device"] <= (device or 1 << 62)


def least(mesh: dict[str, int], dtype: torch.dtype = torch.float32) -> int:
    """The bytes that the refusal of a smaller budget names."""
    with sl.simulate(**mesh), pytest.raises(sl.ShardError, match="needs") as refused:
        o.zero(o.sgd(0.1), "data", 3, tiers=o.Tiers(device=1)).shard(model(1, dtype)[1])
    return int(str(refused.value).split("device=")[-1].strip(" )"))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("more", [0, 1, 3])
def test_an_explanation_says_what_is_held_and_loaded(mesh: Any, more: int) -> None:
    with sl.simulate(**mesh):
        f, params = model(4)
        tiers = o.Tiers(device=least(mesh) + more * block_bytes(mesh))
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
        params = tx.shard(params)
        said = sl.explain(f, params, tx=tx).tiers
        state = tx.init(params)
        for _ in range(3):
            before, moved = params.cache.loads, params.cache.movers.loads.moved
            _, grads = sl.value_and_grad(f, into=tx)(params)
            loads = params.cache.loads - before
            loaded = params.cache.movers.loads.moved - moved
            params, state, _ = o.step(tx, params, grads, state)
        assert said is not None
        assert (said.blocks, said.loads) == (4, loads)
        assert said.loaded * params.cache.shares == loaded
        assert said.host == dict(tiers.ledger.peaks["host"])
