"""Numbers as functions of key and position: fair, independent, and the same in every block."""

import math

import torch

import shardlib as sl
from shardlib.kernels.bits import bits
from shardlib.ops.counter_rng import Pairs, normal, open_unit, unit
from shardlib.random import branch
from tests.ops.test_random import N, chi2


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard deviations of what independent samples give."""
    a, b = a - a.mean(), b - b.mean()
    return abs(float((a * b).mean() / (a.std() * b.std()))) * math.sqrt(len(a))


def test_positions_keys_and_calls_are_independent() -> None:
    at = torch.arange(N)
    keys = [branch(branch(0, c), 0) for c in range(4)] + [branch(1, c) for c in range(4)]
    draws = [open_unit(bits(at, k)) for k in keys]
    for i, a in enumerate(draws):
        assert all(correlation(a[:-lag], a[lag:]) < 4.5 for lag in (1, 2, 3, 64, 1024, 4096))
        assert all(correlation(a, b) < 4.5 for b in draws[:i])
    pairs = (draws[0] * 16).long() * 16 + (draws[1] * 16).long()
    assert chi2(torch.bincount(pairs, minlength=256).double().tolist(), [N / 256] * 256) < 4
    near = (draws[0][:-1] * 16).long() * 16 + (draws[0][1:] * 16).long()
    assert chi2(torch.bincount(near, minlength=256).double().tolist(), [(N - 1) / 256] * 256) < 4


def test_every_bit_is_fair_and_hangs_on_every_bit() -> None:
    at = torch.arange(1 << 16)
    h = bits(at, branch(3, 1))
    for b in range(64):
        share = ((h >> b) & 1).double().mean()
        assert abs(share - 0.5) * 2 * math.sqrt(len(at)) < 4.5
    for flip in (0, 1, 7, 15, 31, 47):
        changed = bits(at ^ (1 << flip), branch(3, 1)) ^ h
        for b in range(64):
            assert abs(((changed >> b) & 1).double().mean() - 0.5) * 2 * math.sqrt(len(at)) < 4.5
    assert len(h.unique()) == len(h)


def test_uniform_numbers_stay_in_their_interval() -> None:
    ends = torch.tensor([0, -1, 1 << 62, (1 << 63) - 1, -(1 << 63), 0xFFF, ~0xFFF])
    assert ((open_unit(ends) > 0) & (open_unit(ends) < 1)).all() and normal(ends).isfinite().all()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        make = unit(dtype)
        u = (make.make if isinstance(make, Pairs) else make)(ends).to(dtype)
        assert ((u >= 0) & (u < 1)).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with sl.simulate(x=2):
            y = torch.empty_like(sl.shard(torch.zeros(N, dtype=dtype), "x")).uniform_(0.1, 0.3)
            v = sl.unshard(y)
        assert v.min() >= torch.tensor(0.1, dtype=dtype) and v.max() < torch.tensor(
            0.3, dtype=dtype
        )


def test_a_number_does_not_hang_on_where_it_lies_in_a_block() -> None:
    """torch's vector loops and their tails differ in the last bit."""
    for n in (1, 7, 63, 65, 1000):
        with sl.simulate(x=1):
            torch.manual_seed(1)
            whole = sl.unshard(
                torch.empty_like(
                    sl.shard(torch.zeros(n * 6, dtype=torch.float64), ".")
                ).exponential_()
            )
        with sl.simulate(x=6):
            torch.manual_seed(1)
            assert torch.equal(
                sl.unshard(
                    torch.empty_like(
                        sl.shard(torch.zeros(n * 6, dtype=torch.float64), "x")
                    ).exponential_()
                ),
                whole,
            )
