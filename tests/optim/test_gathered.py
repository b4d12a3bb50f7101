"""Stage 3: parameters as parts, gathered while they are read; the module's own values and gradients."""

from collections import deque
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib._compat import storage_users
from shardlib.optim.stage3 import Parts

o = sl.optim
VOCAB, WIDE = 37, 24


class Block(nn.Module):
    def __init__(self, remat: bool) -> None:
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 40), nn.Linear(40, WIDE)
        self.remat = remat

    def inner(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(self.ln(x))))

    def forward(self, x: Any) -> Any:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.remat else self.inner(x))


class Model(nn.Module):
    """A tied head, blocks, and a vocabulary that nothing divides."""

    def __init__(self, remat: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDE)
        self.h = nn.ModuleList([Block(remat) for _ in range(4)])
        self.ln_f = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, VOCAB, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Any, targets: Any) -> Any:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)), targets)


RULES = [
    ("wte.weight", "x ."),
    ("h.*.up.weight", "x ."),
    ("h.*.up.bias", "x"),
    ("h.*.down.weight", ". x"),
    ("*", "..."),
]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (48,), generator=g), torch.randint(VOCAB, (48,), generator=g)


def model(remat: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(remat).double()


def sharded(remat: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    apply, params = sl.parallelize(
        model(remat).to(dtype), RULES, inputs={"idx": "data", "targets": "data"}, pad=True
    )
    idx, targets = data()
    return (lambda p: apply(p, idx, targets=targets)), params


def gaps(keep: bool, remat: bool, axis: Any = "data", inner: Any = None) -> list[float]:
    """Of loss, gradients, norm, and parameters after three steps, to the dense module's."""
    dense, (idx, targets) = model(), data()
    opt = torch.optim.AdamW(dense.parameters(), 0.01)
    f, params = sharded(remat)
    tx = o.zero(o.adamw(0.01), axis, 3, keep=keep, inner=inner)
    params = tx.shard(params)
    state, out = tx.init(params), []
    vg = sl.value_and_grad(f, into=tx)
    for _ in range(3):
        loss, grads = vg(params)
        opt.zero_grad()
        want = dense(idx, targets)
        want.backward()
        named = dict(dense.named_parameters())
        out.append(abs(float(loss - want.detach())))
        mine = {k: sl.unshard(g) for k, g in o.state_dict(grads).items()}
        out += [float((mine[k] - p.grad).abs().max()) for k, p in named.items()]
        params, state, info = o.step(tx, params, grads, state, norm=True)
        norm = torch.cat([p.grad.flatten() for p in dense.parameters()]).norm()
        out.append(abs(float(info.norm - norm)))
        opt.step()
    whole = {k: sl.unshard(p) for k, p in o.state_dict(params).items()}
    return out + [float((whole[k] - p.detach()).abs().max()) for k, p in named.items()]


@pytest.mark.parametrize("mesh", [{"data": 4, "x": 1}, {"data": 2, "x": 2}, {"data": 3, "x": 2}])
@pytest.mark.parametrize("keep", [True, False])
def test_stage_3_trains_as_the_dense_module(mesh: Any, keep: bool) -> None:
    with sl.simulate(**mesh):
        for remat in (False, True):
            assert max(gaps(keep, remat)) < 1e-12


@pytest.mark.parametrize(
    ("mesh", "axis", "inner"),
    [
        ({"data": 4, "x": 1}, "data", None),
        ({"data": 2, "x": 2}, "data", None),
    ],
)
def test_on_real_ranks_too(mesh: Any, axis: Any, inner: Any, pool: Any) -> None:
    for keep in (True, False):
        for answers in pool.run(gaps, keep, keep, axis, inner, **mesh):
            assert max(answers) < 1e-12


def counted(keep: bool) -> tuple[Fraction, list[int]]:
    """Bytes over data of one loss and gradient, and what each whole bucket holds."""
    f, params = sharded(dtype=torch.float32)
    tx = o.zero(o.sgd(0.1), "data", 3, keep=keep)
    parts = tx.shard(params)
    with sl.trace() as small:
        sl.value_and_grad(f, pending="data")(params)
    vg = sl.value_and_grad(f)
    vg(parts)
    with sl.trace() as t:
        vg(parts)
    moved = t.by_axis().get("data", 0) - small.by_axis().get("data", 0)
    sums = [e for e in t.events if e.kind == "psum_scatter" and e.axis == "data"]
    assert len(sums) == len(parts.index.buckets)  # the tied embedding's too, which is read twice
    return Fraction(moved), [b.length * 4 for b in parts.index.buckets]


@pytest.mark.parametrize("mesh", [{"data": 4, "x": 1}, {"data": 2, "x": 2}])
def test_bytes_are_two_or_three_times_the_parameters(mesh: Any, pool: Any) -> None:
    """Kept: gathered once and reduced once.  Else gathered twice, but for the last group that
    forward read, which backward has at hand; the embedding is gathered again as the head, and its
    own backward reads no weight.
    """
    n = mesh["data"]
    for keep in (True, False):
        with sl.simulate(**mesh):
            moved, held = counted(keep)
        last, every = held[0], sum(held)
        assert moved == Fraction(n - 1, n) * (2 * every if keep else 3 * every - last)
        assert pool.run(counted, keep, **mesh) == [(moved, held)] * 4


def test_what_is_gathered_twice_and_used_once_has_its_gradient() -> None:
    """Of two uses in forward only one leads to the loss."""
    with sl.simulate(data=2, x=2):
        _, params = sharded()
        idx, _ = data()

        def loss(p: Any, both: bool) -> Any:
            with p.opened() if isinstance(p, Parts) else nullcontext(p) as whole:
                one = F.embedding(sl.shard(idx, "data"), whole["wte.weight"])
                mid = one @ whole["h.0.up.weight"].T
                other = whole["h.1.up.weight"].sum() + whole["h.2.up.weight"].sum()
                more = whole["wte.weight"].square().sum()  # gathered again
                total = mid.square().mean() + other
                return total + more if both else total + more.detach()

        tx = o.zero(o.adamw(0.1), "data", 3)
        for both in (True, False):
            want: Any = sl.value_and_grad(lambda p, b=both: loss(p, b))(params)[1]
            found = sl.value_and_grad(lambda p, b=both: loss(p, b))(tx.shard(params))[1]
            got = o.state_dict(found)
            for k, g in want.items():
                assert torch.allclose(sl.unshard(got[k]), sl.unshard(g), atol=1e-12), (k, both)


def test_each_rank_holds_its_part_alone() -> None:
    with sl.simulate(data=4, x=1):
        _, params = sharded(dtype=torch.bfloat16)
        tx = o.zero(o.adamw(0.01), "data", 3, master="fp32")
        parts = tx.shard(params)
        state = tx.init(parts)
        n = sum(b.length for b in parts.index.buckets)
        trees = (parts, state.master, state.inner.mu, state.inner.nu)
        held = sum(x.local.numel() * x.raw.element_size() for t in trees for x in t.values())
        assert held * 4 == n * (2 + 12)  # and 2 of a gradient: 16/N
        true = sum(p.local.numel() for p in params.values())
        assert n - true < 64 * (len(params) + 4 * len(parts))


@pytest.mark.parametrize("master", ["fp32", "bf16+rem"])
def test_half_precision_with_a_master_follows_fp32(master: Any) -> None:
    with sl.simulate(data=2, x=2):
        f, params = sharded(dtype=torch.bfloat16)
        ends = []
        for stage in (1, 3):
            tx = o.zero(o.adamw(1e-3), "data", stage, master=master)
            p = {k: v.becomes(v.raw.clone()) for k, v in params.items()}
            p = tx.shard(p) if stage == 3 else p
            state = tx.init(p)
            for _ in range(3):
                loss, grads = sl.value_and_grad(f, into=tx)(p)
                p, state, _ = o.step(tx, p, grads, state)
            ends.append(float(loss))
        assert abs(ends[0] - ends[1]) < 2e-2


def test_frozen_parameters_are_parts_too_and_stay() -> None:
    with sl.simulate(data=2, x=2):
        f, params = sharded()
        for k, p in params.items():
            p.requires_grad_(not k.startswith(("wte", "h.0")))
        tx = o.zero(o.adamw(0.1), "data", 3)
        parts = tx.shard(params)
        state = tx.init(parts)
        loss, grads = sl.value_and_grad(f)(parts)
        want: Any
        want_loss, want = sl.value_and_grad(f)(params)
        assert abs(float(loss - want_loss)) < 1e-12
        before = {k: sl.unshard(p) for k, p in o.state_dict(parts).items()}
        parts, state, _ = o.step(tx, parts, grads, state)
        after = {k: sl.unshard(p) for k, p in o.state_dict(parts).items()}
        for k, p in params.items():
            assert torch.equal(before[k], after[k]) == (not p.requires_grad), k
            assert (want[k] is None) == (not p.requires_grad)


AROUND = {
    "alone": lambda t: t,
    "steps": lambda t: o.multi_steps(t, 1),
    "mean": lambda t: o.averaged(t, 0.9),
    "skip": o.skip_nonfinite,
    "scaled": lambda t: o.loss_scale(t, start=1.0),
    "clip": lambda t: o.chain(o.clip_by_value(100.0), t),
    "numbers": lambda t: o.inject_hyperparams(lambda by: o.chain(o.scale(by), t))(by=1.0),
}


@pytest.mark.parametrize("frozen", [False, True])
def test_what_stands_around_stage_3_takes_its_parts(frozen: bool) -> None:
    ends = {}
    for name, wrap in AROUND.items():
        with sl.simulate(data=2, x=2):
            f, params = sharded()
            for k, p in params.items():
                p.requires_grad_(not (frozen and k.startswith(("wte", "h.0"))))
            tx = wrap(o.zero(o.adamw(0.1), "data", 3))
            parts = tx.shard(params)
            state = tx.init(parts)
            for _ in range(2):
                _, grads = sl.value_and_grad(f)(parts)
                parts, state, _ = o.step(tx, parts, grads, state)
            _, grads = sl.value_and_grad(f)(parts)
            updates, state = tx.update(grads, state, parts)
            parts = o.apply_updates(parts, updates)
            ends[name] = {k: sl.unshard(p) for k, p in o.state_dict(parts).items()}
    for name, end in ends.items():
        assert all(torch.equal(end[k], p) for k, p in ends["alone"].items()), name


def test_mistakes_are_named() -> None:
    with sl.simulate(data=2, x=2):
        f, params = sharded()
        parts = o.zero(o.adamw(0.1), "data", 3).shard(params)
        with pytest.raises(sl.ShardError, match="lies in parts of buckets") as e:
            parts["wte.weight"]
        exec(e.value.fix, {"params": parts, "f": lambda p: p["wte.weight"].sum()})
        with pytest.raises(KeyError):
            parts["no parameter"]
        groups = o.partition({"all": o.zero(o.adamw(0.1), "data", 3)}, [("*", "all")])
        with pytest.raises(sl.ShardError, match="one group") as e:
            groups.init(params)
        names: dict[str, Any] = {"sl": sl}
        exec(e.value.fix, names)
        names["tx"].init(names["tx"].shard(params))
        tx = o.zero(o.adamw(0.1), "data", 3)
        with pytest.raises(sl.ShardError, match=r"trains parts of parameters") as e:
            tx.init(params)
        assert e.value.fix == "params = tx.shard(params)"
        parts = tx.shard(params)
        assert isinstance(parts, Parts) and tx.shard(parts) is parts
        state = tx.init(parts)
        _, grads = sl.value_and_grad(f)(params)
        with pytest.raises(sl.ShardError, match="another tree"):
            o.step(tx, parts, grads, state)
        with torch.no_grad():
            assert abs(float(f(parts) - f(params))) < 1e-12


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("master", [None, "fp32"])
def test_one_parameter_at_two_places_is_one_slot(stage: int, master: Any) -> None:
    """Its gradients are added; itself it is not, nor its master."""
    dtype = torch.float32 if master is None else torch.bfloat16
    with sl.simulate(data=2):
        w = sl.shard(torch.ones(4, dtype=dtype), ".")
        v = sl.shard(torch.ones(4, dtype=dtype), ".")
        tx = o.zero(o.sgd(0.1, weight_decay=0.5), "data", stage, master=master)
        params = tx.shard({"a": w, "b": w, "c": v})
        state = tx.init(params)
        grads: Any = {k: sl.shard(torch.full((4,), 0.25, dtype=dtype), ".") for k in "abc"}
        if stage == 3:
            grads = params.like({k: x.becomes(x.raw * 0.5) for k, x in params.items()})
        new, *_ = o.step(tx, params, grads, state)
        after = {k: sl.unshard(x).float() for k, x in o.state_dict(new).items()}
        assert torch.equal(after["a"], after["b"])
        assert torch.allclose(after["a"], torch.tensor(0.9), atol=2e-3)
        assert torch.allclose(after["c"], torch.tensor(0.925 if stage < 3 else 0.9), atol=2e-3)


class Written(nn.Module):
    """An exponential whose result is written to in place, which torch refuses in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = torch.exp(self.up(x))
        y += 1
        return y


@pytest.mark.parametrize("policy", ["all", "host"])
def test_a_saved_tensor_that_was_written_to_is_refused(policy: str) -> None:
    with sl.simulate(data=2):
        apply, params = sl.parallelize(
            nn.Sequential(Written()),
            [("*", "...")],
            inputs={"input": "data ."},
            remat=[("0", policy)],
        )
        parts = o.zero(o.sgd(0.1), "data", 3).shard(params)
        with pytest.raises(sl.ShardError, match="was written to in place"):
            sl.value_and_grad(lambda p: apply(p, torch.ones(4, 4)).sum())(parts)


# ---------------------------------------------------------------- a loss that reads them often


class Plain(nn.Module):
    """Blocks of one weight each; ``remat``: recomputed; ``norm``: of which a number is read first."""

    def __init__(self, depth: int, remat: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])
        self.remat, self.norm = remat, norm

    def forward(self, x: Any) -> Any:
        for block in self.h:
            by = 1.0
            if self.norm:
                with torch.no_grad():
                    by = block.weight.square().sum().rsqrt()
            y = checkpoint(block, x, use_reentrant=False) if self.remat else block(x)
            x = x + torch.tanh(y * by)
        return x


def plain(depth: int, how: str = "", keep: bool = False) -> Any:
    """(dense module, apply, transform, parts, two batches)."""
    torch.manual_seed(0)
    m = Plain(depth, how == "remat", how == "norm").double()
    remat = [("h.*", "host")] if how == "host" else []
    apply, params = sl.parallelize(m, [("*", "...")], inputs={"x": "data ."}, remat=remat)
    tx = o.zero(o.sgd(1.0), "data", 3, keep=keep)
    return m, apply, tx, tx.shard(params), [torch.randn(4, 8).double() for _ in range(3)]


def apart(module: Any, grads: Any) -> float:
    """How far gradients by name are from the dense module's."""
    got = {k: sl.unshard(x) for k, x in o.state_dict(grads).items()}
    return max(float((got[k] - q.grad).abs().max()) for k, q in module.named_parameters())


def often(how: str, keep: bool, depth: int = 3) -> float:
    m, apply, tx, parts, (a, b, c) = plain(depth, how, keep)

    def loss(f: Any) -> Any:
        one = f(a).square().mean()
        if how in ("no_grad", "inference"):  # a teacher in between
            with torch.no_grad() if how == "no_grad" else torch.inference_mode():
                by = float(f(b).sin().mean())
            one = one * by
        return one + f(b).sin().mean() + (f(c).cos().mean() if how == "thrice" else 0.0)

    loss(m).backward()
    worst = 0.0
    for vg in (sl.value_and_grad(lambda p: loss(lambda x: apply(p, x)), into=tx),
               sl.value_and_grad(lambda p: loss(lambda x: apply(p, x)))):  # fmt: skip
        for _ in range(2):  # the second time buckets are started ahead
            worst = max(worst, apart(m, vg(parts)[1]))
            if how == "inference":  # what is evaluated must leave no memory that cannot be written
                with torch.inference_mode():
                    apply(parts, a)
    return worst


OFTEN = ["", "thrice", "remat", "host", "no_grad", "inference", "norm"]


@pytest.mark.parametrize("how", OFTEN)
def test_a_loss_that_calls_the_model_twice_has_one_gradient(how: str) -> None:
    for ranks in (1, 2, 3):
        with sl.simulate(data=ranks) if ranks < 3 else sl.simulate(data=4):
            assert max(often(how, keep) for keep in (True, False)) < 1e-12


def test_a_loss_that_calls_the_model_twice_has_one_gradient_on_real_ranks(pool: Any) -> None:
    assert max(max(row) for row in pool.run(some_hows, data=4)) < 1e-12


def some_hows() -> list[float]:
    cases = [("", False), ("", True), ("remat", False), ("inference", True), ("norm", False)]
    return [often(how, keep, 2) for how, keep in cases]


def hand_made() -> list[float]:
    """Gradients that are not value_and_grad's: backward() twice, with a hook, of a function of them."""
    m, apply, _, parts, (a, b, _) = plain(3)
    (m(a).square().mean() + m(b).sin().mean()).backward()
    heard: list[float] = []
    for x in parts.values():
        x.requires_grad_()
        x.raw.register_hook(lambda g: heard.append(float(g.isfinite().all())))
    apply(parts, a).square().mean().backward()
    apply(parts, b).sin().mean().backward()  # onto the first
    out = [apart(m, parts.like({n: x.grad for n, x in parts.items()}))]
    for x in parts.values():
        x.grad = None
    one, two = apply(parts, a).square().mean(), apply(parts, b).sin().mean()
    one.backward(retain_graph=True)
    (one * 0.0 + two).backward()
    out.append(apart(m, parts.like({n: x.grad for n, x in parts.items()})))
    for x in parts.values():
        x.grad = None
    (apply(parts, a).square().mean() + apply(parts, b).sin().mean()).backward()
    out.append(apart(m, parts.like({n: x.grad for n, x in parts.items()})))
    scaled = sl.grad(
        lambda p: (lambda q: apply(q, a).square().mean() + apply(q, b).sin().mean())(
            p.like({n: x * 1.0 for n, x in p.items()})
        )
    )(parts)
    out.append(apart(m, scaled))
    return [*out, 1.0 - min(heard)]


def test_gradients_that_autograd_adds_up_itself_have_come() -> None:
    for ranks in (1, 4):
        with sl.simulate(data=ranks):
            assert max(hand_made()) < 1e-12


def test_gradients_that_autograd_adds_up_itself_have_come_on_real_ranks(pool: Any) -> None:
    assert max(max(row) for row in pool.run(hand_made, data=4)) < 1e-12


def kept_on_one_rank(keep: bool, rank: int) -> float:
    """Gradients where a rank alone keeps each loss, with its graph, of training and of evaluation."""
    m, apply, _, parts, (a, b, _) = plain(3, keep=keep)
    m(a).square().mean().backward()
    for x in parts.values():
        x.requires_grad_()
    logged: Any = [] if dist.get_rank() == rank else deque(maxlen=0)
    for each in (b, a, b):
        logged.append(apply(parts, each).square().mean())
        loss = apply(parts, a).square().mean()
        loss.backward()
        logged.append(loss)
        del loss
    return apart(m, parts.like({n: x.grad / 3 for n, x in parts.items()}))


@pytest.mark.parametrize("keep", [True, False])
def test_a_loss_that_one_rank_keeps_changes_no_transfer(keep: bool, pool: Any) -> None:
    assert max(pool.run(kept_on_one_rank, keep, 1, data=4)) < 1e-12


def moved(keep: bool, held: bool) -> list[str]:
    """The transfers of two evaluations with gradients on, whose losses are kept or not."""
    with sl.simulate(data=2):
        _, apply, _, parts, (a, b, _) = plain(3, keep=keep)
        kept = []
        with sl.trace() as t:
            for each in (a, b, a):
                kept.append(apply(parts, each).square().mean())
                if not held:
                    kept.clear()
            apply(parts, a).square().mean().backward()
        return [f"{e.kind} {e.bytes}" for e in t.events]


@pytest.mark.parametrize("keep", [True, False])
def test_transfers_do_not_depend_on_the_life_of_a_graph(keep: bool) -> None:
    assert moved(keep, True) == moved(keep, False)


def second() -> float:
    """The gradient of the gradient's size."""
    m, apply, _, parts, (a, _, _) = plain(2)
    first = torch.autograd.grad(m(a).sin().mean(), list(m.parameters()), create_graph=True)
    sum(g.square().sum() for g in first).backward()  # type: ignore[union-attr]

    def size(p: Any) -> Any:
        found: Any = sl.grad(lambda q: apply(q, a).sin().mean())(p)
        return sum(g.square().sum() for g in found.values())

    return apart(m, sl.grad(size)(parts))


def test_second_derivatives_are_the_dense_ones(pool: Any) -> None:
    with sl.simulate(data=2):
        assert second() < 1e-12
    assert max(pool.run(second, data=4)) < 1e-12


def deep(depth: int = 12) -> float:
    """Blocks of one shape, more than ten: gradients, and the state before any forward."""
    m, apply, tx, parts, (a, _, _) = plain(depth)
    m(a).square().mean().backward()
    before = {k: sl.unshard(x) for k, x in o.state_dict(parts).items()}
    worst = max(float((before[k] - p.detach()).abs().max()) for k, p in m.named_parameters())
    vg = sl.value_and_grad(lambda p: apply(p, a).square().mean(), into=tx)
    return max(worst, apart(m, vg(parts)[1]))


def test_a_model_of_many_equal_blocks_keeps_them_apart(pool: Any) -> None:
    with sl.simulate(data=2):
        assert max(deep(12), deep(23)) < 1e-12
    assert max(pool.run(deep, data=4)) < 1e-12


@pytest.mark.parametrize("remat", ["", "remat", "host"])
def test_what_is_derived_from_a_gathered_weight_is_freed_with_it(remat: str) -> None:
    """At most the bucket that is read, the one before it and the one that comes next are alive."""
    with sl.simulate(data=2, x=2):
        _, apply, tx, parts, (a, b, _) = plain(8, remat)
        room, most = parts.index.room, [0]

        def count(*_: Any) -> None:
            alive = sum(storage_users(t) > 1 for t in room.buffers)
            most[0] = max(most[0], alive)

        def loss(p: Any) -> Any:
            x = apply(p, a)
            count()
            y = apply(p, b)
            count()
            x.register_hook(count)
            return x.square().mean() + y.sin().mean()

        for _ in range(2):
            sl.value_and_grad(loss, into=tx)(parts)
        assert 0 < most[0] <= 3 and len(room.buffers) <= 5
        count()
        assert sum(storage_users(t) > 1 for t in room.buffers) == 0
