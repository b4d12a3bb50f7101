"""torch.nn.init on sharded tensors: what it is called, whatever the layout."""

import math
from typing import Any

import torch
from torch import nn

import shardlib as sl


def test_orthogonal_and_dirac_are_what_they_are_called() -> None:
    for shape, layout in (((6, 10), "x y"), ((10, 6), "y x"), ((4, 3, 2), "x . .")):
        with sl.simulate(x=2, y=2):
            w = sl.unshard(
                nn.init.orthogonal_(
                    sl.shard(torch.zeros(shape, dtype=torch.float64), layout), gain=2.0
                )
            ).flatten(1)
        small = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        assert torch.allclose(small, 4 * torch.eye(len(small), dtype=torch.float64), atol=1e-12)
    with sl.simulate(x=2, y=2):
        for shape in ((4, 4, 3), (8, 2, 3, 5)):
            got = sl.unshard(nn.init.dirac_(sl.shard(torch.rand(shape), "x y ..."), 2))
            assert torch.equal(got, nn.init.dirac_(torch.empty(shape), 2))
        zeros = (sl.unshard(nn.init.sparse_(sl.shard(torch.ones(10, 6), "x y"), 0.25)) == 0).sum(0)
    assert (zeros == 3).all()


def modules_drawn() -> list[torch.Tensor]:
    """Parameters that their own reset_parameters draws, in place on shards."""
    torch.manual_seed(4 + torch.distributed.get_rank() if torch.distributed.is_initialized() else 4)
    out = []
    for make in (
        lambda: nn.Linear(8, 12),
        lambda: nn.Conv2d(4, 8, 3),
        lambda: nn.Embedding(8, 4),
        lambda: nn.GRU(4, 4),
    ):
        module = make()
        for n, p in list(module.named_parameters(recurse=False)):
            new = sl.shard(torch.full_like(p.detach(), float("nan")), "x ...").requires_grad_()
            del module._parameters[n]
            setattr(module, n, new)
        module.__dict__.setdefault("parameters", None)
        del module.__dict__["parameters"]
        if not isinstance(module, nn.GRU):
            module.reset_parameters()
            out += [
                sl.unshard(getattr(module, n)).detach()
                for n in ("weight", "bias")
                if getattr(module, n, None) is not None
            ]
    return out


def test_modules_reset_their_sharded_parameters(pool: Any) -> None:
    with sl.simulate(x=1):
        want = modules_drawn()
    assert (
        all(w.isfinite().all() for w in want)
        and abs(float(want[0].std()) - 1 / math.sqrt(3 * 8)) < 0.05
    )
    for got in pool.run(modules_drawn, x=2, y=2):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
