"""One draw for every layout, mesh and back end; distributions are what
they are called; positions are independent.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.errors import ShardError, Unsupported

D = torch.float64


def g(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CALLS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda x: x.normal_(1, 2),
    "normal_, a generator": lambda x: x.normal_(generator=g()),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "uniform_, from and to": lambda x: x.uniform_(to=5.0, **{"from": 4.0}),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: (x * 0).bernoulli_(x),
    "exponential_": lambda x: x.exponential_(2.0),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "log_normal_": lambda x: x.log_normal_(),
    "random_": lambda x: x.random_(),
    "random_, one end": lambda x: x.random_(9),
    "random_, two ends": lambda x: x.random_(3, 9),
    "rand_like": torch.rand_like,
    "rand_like, dtype": lambda x: torch.rand_like(x, dtype=torch.bfloat16),
    "rand_like, complex": lambda x: torch.rand_like(x, dtype=torch.complex64),
    "randn_like": torch.randn_like,
    "randn_like, complex": lambda x: torch.randn_like(x, dtype=torch.complex128),
    "randint_like": lambda x: torch.randint_like(x, 2, 9, dtype=torch.int64),
    "randint_like, all": lambda x: torch.randint_like(x, -(2**62), 2**63 - 1, dtype=torch.int64),
    "bernoulli": torch.bernoulli,
    "bernoulli of a number": lambda x: x.bernoulli(0.3),
    "normal": lambda x: torch.normal(x, x),
    "normal of a number": lambda x: torch.normal(2.0, x),
    "poisson": lambda x: torch.poisson(x * 5),
    "poisson, large": lambda x: torch.poisson(x * 100),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial, again": lambda x: x.multinomial(12, replacement=True),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x, 0.4, inplace=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[1],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "dropout1d": lambda x: F.dropout1d(x.reshape(6, 10, 1).expand(6, 10, 2) * 1, 0.4),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.02, a=-0.01, b=0.05),
    "sparse_": lambda x: nn.init.sparse_(x, 0.3),
    "eye_": nn.init.eye_,
}  # fmt: skip
MESHES = [("x .", {"x": 2, "y": 2}), ("x y", {"x": 3, "y": 2}), (". (x y)", {"x": 5, "y": 2}), ("...", {"x": 2}),
          ("zigzag(x) .", {"x": 3}), ("(3 x) y", {"x": 2, "y": 5})]  # fmt: skip


def called(name: str, layout: str) -> torch.Tensor:
    torch.manual_seed(3)
    return sl.unshard(CALLS[name](sl.shard(torch.full((6, 10), 0.3, dtype=D), layout)))


@pytest.mark.parametrize("name", CALLS)
def test_a_draw_is_the_same_for_every_layout_and_mesh(name: str) -> None:
    with sl.simulate(x=1):
        want = called(name, "...")
    for layout, axes in MESHES:
        with sl.simulate(**axes):
            assert torch.equal(called(name, layout), want), layout


def all_called(layout: str) -> dict[str, torch.Tensor]:
    return {n: called(n, layout) for n in CALLS}


def test_real_ranks_draw_what_one_rank_draws(pool: Any) -> None:
    with sl.simulate(x=1):
        want = all_called("...")
    for axes, layout in (
        ({"x": 2, "y": 2}, "x y"),
        ({"x": 2, "y": 2}, ". x"),
        ({"x": 1, "y": 4}, "..."),
    ):
        for got in pool.run(all_called, layout, **axes):
            assert [n for n in want if not torch.equal(got[n], want[n])] == []


PADDED = [
    "normal_",
    "uniform_, from and to",
    "bernoulli_",
    "random_",
    "rand_like",
    "randn_like",
    "dropout",
    "alpha_dropout",
    "rrelu",
    "kaiming_uniform_",
    "trunc_normal_",
    "sparse_",
    "eye_",
]


@pytest.mark.parametrize("name", PADDED)
def test_padding_takes_no_part_in_positions(name: str) -> None:
    with sl.simulate(x=1):
        want = called(name, "...")
    for layout, axes in ((". x", {"x": 4}), ("x y", {"x": 4, "y": 4})):
        with sl.simulate(**axes):
            torch.manual_seed(3)
            x = sl.shard(torch.full((6, 10), 0.3, dtype=D), layout, pad=True)
            assert torch.equal(sl.unshard(CALLS[name](x)), want), layout


@pytest.mark.parametrize("name", CALLS)
def test_recorded_ranks_draw_nothing_and_say_the_shape(name: str) -> None:
    with sl.simulate(x=1):
        want = called(name, "...")
    state = sl.random.get_state(sl.simulate(x=1))
    with sl.record(x=2, y=2):
        out = CALLS[name](sl.shard(torch.full((6, 10), 0.3, dtype=D), "x y"))
        assert (out.shape, out.dtype) == (want.shape, want.dtype)
    assert sl.random.get_state(sl.simulate(x=1)) == state


def test_attention_with_dropout_is_recorded() -> None:
    with sl.record(s=4):
        q = sl.shard(torch.empty(1, 2, 64, 8), ". . s .").requires_grad_()
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
        assert q.grad is not None


# ---------------------------------------------------------------- distributions

N = 1 << 18


def ks(sample: torch.Tensor, cdf: torch.Tensor) -> float:
    """Kolmogorov and Smirnov's distance times root n, of a
    sorted sample; above 1.95 once in a thousand.
    """
    n = len(sample)
    steps = torch.arange(1, n + 1, dtype=D) / n
    return float(
        torch.maximum((steps - cdf).abs().max(), (cdf - steps + 1 / n).abs().max())
    ) * math.sqrt(n)


CONTINUOUS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "uniform": (lambda x: x.uniform_(-1, 3), lambda v: (v + 1) / 4),
    "normal": (lambda x: x.normal_(1, 2), lambda v: torch.special.ndtr((v - 1) / 2)),
    "exponential": (lambda x: x.exponential_(0.5), lambda v: -torch.expm1(-v / 2)),
    "cauchy": (lambda x: x.cauchy_(1, 2), lambda v: 0.5 + torch.atan((v - 1) / 2) / math.pi),
    "log normal": (lambda x: x.log_normal_(0.5, 0.7), lambda v: torch.special.ndtr((v.log() - 0.5) / 0.7)),
    "truncated": (
        lambda x: nn.init.trunc_normal_(x, 0.0, 1.0, -0.5, 1.5),
        lambda v: (torch.special.ndtr(v) - torch.special.ndtr(torch.tensor(-0.5, dtype=D)))
        / (torch.special.ndtr(torch.tensor(1.5, dtype=D)) - torch.special.ndtr(torch.tensor(-0.5, dtype=D))),
    ),
    "truncated, far in a tail": (
        lambda x: nn.init.trunc_normal_(x, 0.0, 1.0, 6.0, 7.0),
        lambda v: 1 - (torch.special.ndtr(-v) - torch.special.ndtr(torch.tensor(-7.0, dtype=D)))
        / (torch.special.ndtr(torch.tensor(-6.0, dtype=D)) - torch.special.ndtr(torch.tensor(-7.0, dtype=D))),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
@pytest.mark.parametrize("dtype", [D, torch.float32])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_samples_follow_their_distribution(name: str, dtype: torch.dtype) -> None:
    make, cdf = CONTINUOUS[name]
    torch.manual_seed(11)
    with sl.simulate(x=4):
        sample = sl.unshard(make(sl.shard(torch.zeros(N, dtype=dtype), "x"))).double().sort().values
    assert ks(sample, cdf(sample)) < 1.95


COUNTS: dict[str, tuple[Callable[[Any], Any], Callable[[int], float], range]] = {
    "bernoulli": (lambda x: x.bernoulli_(0.3), lambda k: 0.3 if k else 0.7, range(2)),
    "dropout": (lambda x: F.dropout(x + 0.7, 0.3).round(), lambda k: 0.7 if k else 0.3, range(2)),
    "geometric": (lambda x: x.geometric_(0.3), lambda k: 0.3 * 0.7 ** (k - 1), range(1, 12)),
    "integers": (lambda x: x.random_(2, 9), lambda k: 1 / 7, range(2, 9)),
    "poisson 3": (lambda x: torch.poisson(x + 3), lambda k: math.exp(-3 + k * math.log(3) - math.lgamma(k + 1)), range(11)),
    "poisson 30": (lambda x: torch.poisson(x + 30), lambda k: math.exp(-30 + k * math.log(30) - math.lgamma(k + 1)), range(15, 48)),
}  # fmt: skip


def chi2(found: list[float], want: list[float]) -> float:
    """Standard deviations by which chi-square exceeds its mean."""
    total = sum((f - w) ** 2 / w for f, w in zip(found, want, strict=True))
    return (total - (len(found) - 1)) / math.sqrt(2 * (len(found) - 1))


@pytest.mark.parametrize("name", COUNTS)
def test_counts_follow_their_distribution(name: str) -> None:
    make, p, values = COUNTS[name]
    torch.manual_seed(12)
    with sl.simulate(x=4):
        sample = sl.unshard(make(sl.shard(torch.zeros(N, dtype=D), "x")))
    found = [float((sample == k).sum()) for k in values]
    rest = N - sum(found), N * (1 - sum(p(k) for k in values))
    more = [rest] if rest[1] > 5 else []
    assert rest[1] > 5 or rest[0] <= 5
    assert (
        chi2([*found, *(f for f, _ in more)], [*(N * p(k) for k in values), *(w for _, w in more)])
        < 4
    )


@pytest.mark.parametrize("again", [True, False])
def test_rows_are_sampled_by_weight(again: bool) -> None:
    weights = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3, 0.0], dtype=D)
    torch.manual_seed(13)
    with sl.simulate(x=2, y=2):
        rows = sl.shard(weights.expand(1 << 15, 6).contiguous(), "y x")
        picks = sl.unshard(torch.multinomial(rows, 2, again))
    first = [float((picks[:, 0] == k).sum()) for k in (0, 2, 3, 4)]
    assert chi2(first, [w * len(picks) for w in (0.1, 0.4, 0.2, 0.3)]) < 4
    w = weights
    pairs = [(a, b) for a in (0, 2, 3, 4) for b in (0, 2, 3, 4) if again or a != b]
    want = [float(w[a] * w[b] / (1 if again else 1 - w[a])) * len(picks) for a, b in pairs]
    found = [float(((picks[:, 0] == a) & (picks[:, 1] == b)).sum()) for a, b in pairs]
    assert sum(found) == len(picks) and chi2(found, want) < 4


def test_of_a_split_row_only_candidates_travel() -> None:
    with sl.simulate(x=4):
        x = sl.shard(torch.rand(8, 1024, dtype=D), ". x")
        with sl.trace() as t:
            torch.multinomial(x, 2)
        assert t.bytes == 3 * 8 * 2 * (8 + 8)  # two values and two places of 8 rows, from 3 ranks


# ---------------------------------------------------------------- independence


# ---------------------------------------------------------------- as torch does


def test_in_place_is_in_place_and_torchs_refusals_are_ours() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.ones(4, 4), "x .")
        assert F.dropout(x, 0.5, inplace=True) is x and set(sl.unshard(x).unique().tolist()) == {
            0.0,
            2.0,
        }
        assert F.dropout(x, 0.5, training=False) is x and F.alpha_dropout(x) is x
        leaf = sl.shard(torch.ones(4, 4), "x .").requires_grad_()
        state = sl.random.get_state()
        for f, match in (
            (lambda: F.dropout(x, 1.5), "has to be between 0 and 1"),
            (lambda: x.bernoulli_(2.0), "p"),
            (lambda: x.normal_(0, -1), "std >= 0"),
            (lambda: x.uniform_(2, 1), "from"),
            (lambda: x.random_(3, 3), "from"),
            (lambda: x.exponential_(-1.0), "lambda"),
            (lambda: x.geometric_(0.0), "p"),
            (lambda: torch.bernoulli(x * 3), "p_in"),
            (lambda: torch.poisson(-x - 1), "rate"),
            (lambda: torch.multinomial(x, 9), "without replacement"),
            (lambda: torch.normal(x, -x - 1), "std"),
            (lambda: leaf.normal_(), "leaf Variable"),
            (lambda: sl.shard(torch.ones(4, dtype=torch.int64), "x").normal_(), "Long|int"),
        ):
            with pytest.raises((RuntimeError, ShardError), match=match):
                f()
        assert sl.random.get_state() == state
        with pytest.raises(ShardError, match="pending"):
            sl.shard(torch.ones(4), ". + sum(x)").normal_()
        with pytest.raises(Unsupported, match="each rank's own generator"):
            torch.pca_lowrank(x)


def test_gradients_of_what_was_drawn_are_torchs() -> None:
    """What samples a distribution has a gradient of zero in
    its parameters; dropout scales by its mask.
    """
    for f in (
        torch.bernoulli,
        torch.poisson,
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.normal(0.0, x),
    ):
        with sl.simulate(x=2):
            x = sl.shard(torch.rand(4, 4), "x .").requires_grad_()
            f(x).sum().backward()
            assert (sl.unshard(x.grad) == 0).all()
    with sl.simulate(x=2):
        for f in (F.dropout, F.feature_alpha_dropout, F.alpha_dropout):
            x = sl.shard(torch.ones(8, 8, dtype=D), "x .").requires_grad_()
            torch.manual_seed(0)
            y = f(x, 0.5, True)
            y.sum().backward()
            torch.manual_seed(0)
            moved = f(x.detach() + 1.0, 0.5, True) - y.detach()
            assert torch.allclose(sl.unshard(x.grad), sl.unshard(moved))


def test_gumbel_softmax_is_keyed() -> None:
    torch.manual_seed(0)
    with sl.simulate(x=1):
        want = sl.unshard(F.gumbel_softmax(sl.shard(torch.zeros(8, 12, dtype=D), ". ."), 0.7))
    for layout in ("x .", "x y", ". (x y)"):
        torch.manual_seed(0)
        with sl.simulate(x=2, y=2):
            got = sl.unshard(F.gumbel_softmax(sl.shard(torch.zeros(8, 12, dtype=D), layout), 0.7))
        assert torch.allclose(got, want, rtol=1e-13)
    with sl.simulate(x=2):
        torch.manual_seed(0)
        hard = sl.unshard(
            F.gumbel_softmax(sl.shard(torch.zeros(8, 12, dtype=D), "x ."), 0.7, hard=True)
        )
    assert torch.equal(hard.argmax(-1), want.argmax(-1)) and (hard.sum(-1) == 1).all()


def pooled(layout: str, d: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    x = torch.arange(4.0 * 6 * 9**d, dtype=D).sin().reshape(4, 6, *[9] * d)
    pool = nn.FractionalMaxPool2d if d == 2 else nn.FractionalMaxPool3d
    value, at = pool(2, output_size=4, return_indices=True)(sl.shard(x, layout))
    assert torch.equal(
        sl.unshard(value).flatten(2), x.flatten(2).gather(2, sl.unshard(at).flatten(2))
    )
    alone = pool(2, output_ratio=0.5)(sl.shard(x[0], "x ..."))  # [channels, space]
    return sl.unshard(value), sl.unshard(alone)


@pytest.mark.parametrize("d", [2, 3])
def test_fractional_pooling_draws_by_sample_and_channel(d: int) -> None:
    with sl.simulate(x=1):
        want = pooled("...", d)
    for layout in ("x ...", "x y ...", ". (x y) ..."):
        with sl.simulate(x=2, y=1 if "(" in layout else 2):
            assert all(torch.equal(a, b) for a, b in zip(pooled(layout, d), want, strict=True))
