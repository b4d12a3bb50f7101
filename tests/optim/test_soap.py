"""SOAP: the paper's steps, and bit for bit those of one device on every layout and under zero."""

from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from tests.ops.cases import close, r
from tests.optim.test_muon import LAYOUTS, PARAMS

o = sl.optim
HOW: dict[str, Any] = {"b1": 0.9, "b2": 0.8, "weight_decay": 0.1, "every": 2}
TX = o.soap(0.05, **HOW)


def grads(i: int) -> dict[str, torch.Tensor]:
    return {k: r(*p.shape, seed=20 + 7 * i + n) for n, (k, p) in enumerate(PARAMS.items())}


def paper(w: torch.Tensor, given: list[torch.Tensor], most: float = 1e9) -> torch.Tensor:
    """Algorithm 3 of arXiv 2409.11321 for one matrix, with Adam's correction; the first step looks.

    The paper does not say what eigenvectors the first statistics have, which lack rank.
    """
    m, n = w.shape
    left, right = torch.zeros(m, m).double(), torch.zeros(n, n).double()
    mu, nu = torch.zeros_like(w), torch.zeros_like(w)
    ql, qr = torch.eye(m).double(), torch.eye(n).double()
    for t, g in enumerate(given):
        if t:
            turned = ql.T @ g @ qr
            mu = 0.9 * mu + 0.1 * g
            nu = 0.8 * nu + 0.2 * turned**2
            way = ql @ ((ql.T @ mu @ qr) / (nu.sqrt() + 1e-8)) @ qr.T
            w = w - 0.05 * (1 - 0.8**t) ** 0.5 / (1 - 0.9**t) * way - 0.05 * 0.1 * w
        left, right = left.lerp(g @ g.T, 1 - 0.8), right.lerp(g.T @ g, 1 - 0.8)
        if t == 0:
            ql = basis(torch.linalg.eigh(left)[1].flip(1), left) if m <= most else ql
            qr = basis(torch.linalg.eigh(right)[1].flip(1), right) if n <= most else qr
        elif t % 2 == 0:
            if m <= most:
                at = order(ql, left)
                nu, ql = nu[at], basis(torch.linalg.qr(left @ ql[:, at])[0], left)
            if n <= most:
                at = order(qr, right)
                nu, qr = nu[:, at], basis(torch.linalg.qr(right @ qr[:, at])[0], right)
    return w


def order(q: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Largest first; those of which rounding alone is left stay in their order."""
    values = (q.T @ stats @ q).diagonal()
    return values.where(values > 1e-14 * values.max(), 0).argsort(descending=True, stable=True)


def basis(q: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Complete the eigenvectors that there are by drawn ones, made orthogonal to them."""
    n, rank = len(q), int(torch.linalg.matrix_rank(stats, hermitian=True))
    if rank == n:
        return q
    seen = q[:, :rank]
    drawn = torch.randn(n, n - rank, generator=torch.Generator().manual_seed(n)).double()
    return torch.cat([seen, torch.linalg.qr(drawn - seen @ (seen.T @ drawn))[0]], 1)


def run(tx: Any, params: Any, count: int, put: Any, in_place: bool = False) -> Any:
    state = tx.init(params)
    for i in range(count):
        g = put({k: x for k, x in grads(i).items() if k in params})
        if in_place:
            params, state, _ = o.step(tx, params, g, state)
        else:
            updates, state = tx.update(g, state, params)
            params = o.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("most", [1e9, 10])
def test_soap_is_the_papers(most: float) -> None:
    got, _ = run(o.soap(0.05, **HOW, most=most), PARAMS, 6, dict)
    for k, p in PARAMS.items():
        every = [grads(i)[k].reshape(-1, *p.shape[-2:]) for i in range(6)]
        flat, now = p.reshape(-1, *p.shape[-2:]), got[k].reshape(-1, *p.shape[-2:])
        for j in range(len(flat)):
            close(now[j], paper(flat[j], [g[j] for g in every], most), 1e-10)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["1D", "2D", "3D"])
def test_a_clip_before_it_changes_no_more_than_its_norm_does(name: str, stage: int) -> None:
    """Gradients that differ in their last bit are updated alike, also where statistics lack rank."""
    mesh, layouts = LAYOUTS[name]
    tx = o.chain(o.clip_by_global_norm(1.0), TX)
    want, _ = run(tx, PARAMS, 6, dict)
    if stage:
        tx = o.zero(tx, "data", stage=stage, bucket_mb=1e-3)
    with sl.simulate(data=2, **mesh):
        put = lambda t: {k: sl.shard(x, layouts[k]) for k, x in t.items()}  # noqa: E731
        cut = put if stage < 3 else (lambda t: tx.shard(put(t)))
        params, state = cut(PARAMS), tx.init(cut(PARAMS))
        for i in range(6):
            params, state, _ = o.step(tx, params, cut(grads(i)), state)
        found = params if stage < 3 else o.state_dict(params)
        for k, p in want.items():
            close(sl.unshard(found[k]), p, 1e-12)


def test_what_got_no_gradient_yet_is_left_to_adam() -> None:
    """Its statistics are zero and have no eigenvectors: the basis is the matrix's own."""
    params = {"w": r(3, 5)}
    state = TX.update({"w": torch.zeros(3, 5).double()}, TX.init(params), params)[1]
    kept = o.state_dict(state)
    assert torch.equal(kept["left_basis.w"], torch.eye(3).double())
    assert torch.equal(kept["right_basis.w"], torch.eye(5).double())


@pytest.mark.parametrize("name", LAYOUTS)
def test_soap_is_one_devices_bit_for_bit_on_every_layout(name: str) -> None:
    mesh, layouts = LAYOUTS[name]
    want, _ = run(TX, PARAMS, 5, dict)
    with sl.simulate(**mesh):
        put = lambda t: {k: sl.shard(x, layouts[k]) for k, x in t.items()}  # noqa: E731
        got, state = run(TX, put(PARAMS), 5, put)
        assert all(torch.equal(sl.unshard(got[k]), want[k]) for k in want)
        kept, _ = run(TX, put(PARAMS), 5, put, in_place=True)
        assert all(torch.equal(sl.unshard(kept[k]), want[k]) for k in want)
        largest = max(p[..., 0, 0].numel() and p.shape[-2] * p.shape[-1] for p in PARAMS.values())
        whole = sum(p.numel() for p in PARAMS.values())  # shared out, not copied
        assert state.mu.held.length <= max(largest, 1.3 * whole / len(state.mu.held.plan.holds))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["1D", "2D", "3D"])
def test_soap_under_zero_is_soap(name: str, stage: int) -> None:
    mesh, layouts = LAYOUTS[name]
    want, _ = run(TX, PARAMS, 4, dict)
    tx = o.zero(TX, "data", stage=stage, bucket_mb=1e-3)
    with sl.simulate(data=2, **mesh):
        put = lambda t: {k: sl.shard(x, layouts[k]) for k, x in t.items()}  # noqa: E731
        whole = stage < 3
        params = put(PARAMS) if whole else tx.shard(put(PARAMS))
        state = tx.init(params)
        for i in range(4):
            g = put(grads(i)) if whole else tx.shard(put(grads(i)))
            params, state, _ = o.step(tx, params, g, state)
        found = params if whole else o.state_dict(params)
        assert all(torch.equal(sl.unshard(found[k]), want[k]) for k in want)


def test_padded_matrices() -> None:
    whole = {"a": r(7, 11), "b": r(13, 5, seed=1)}

    def go(params: Any, put: Any) -> Any:
        state = TX.init(params)
        for i in range(4):
            g = put({k: r(*p.shape, seed=20 + i) for k, p in whole.items()})
            updates, state = TX.update(g, state, params)
            params = o.apply_updates(params, updates)
        return params

    want = go(whole, dict)
    with sl.simulate(x=2, y=3):
        put = lambda t: {k: sl.shard(x, "x y", pad=True) for k, x in t.items()}  # noqa: E731
        got = go(put(whole), put)
        for k in want:
            close(sl.unshard(got[k]), want[k], 1e-12)


def test_state_goes_on_on_another_mesh() -> None:
    """By name: saved on 2 x 2, loaded on one device, on four ranks, and under zero."""
    want, _ = run(TX, PARAMS, 3, dict)
    (mesh, layouts), (other, others) = LAYOUTS["2D"], LAYOUTS["1D"]
    with sl.simulate(**mesh):
        put = lambda t: {k: sl.shard(x, layouts[k]) for k, x in t.items()}  # noqa: E731
        params, state = run(TX, put(PARAMS), 3, put)
        kept = {k: sl.unshard(x) if k != "count" else x for k, x in o.state_dict(state).items()}
        params = {k: sl.unshard(p) for k, p in params.items()}
    assert (
        kept["count"] == 3 and kept["left.e"].shape == (4, 8, 8) and kept["nu.q"].shape == (8, 12)
    )

    def on(tx: Any, p: Any, put: Any) -> Any:
        state = o.load_state_dict(tx.init(p), kept)
        for i in range(3, 6):
            p, state, _ = o.step(tx, p, put(grads(i)), state)
        return p

    want = on(TX, {k: p.clone() for k, p in params.items()}, dict)
    with sl.simulate(**other):
        put = lambda t: {k: sl.shard(x, others[k]) for k, x in t.items()}  # noqa: E731
        for tx in (TX,):
            got = on(tx, put(params), put)
            assert all(torch.equal(sl.unshard(got[k]), want[k]) for k in want)
    with sl.simulate(data=3):
        put = lambda t: {k: sl.shard(x, "...") for k, x in t.items()}  # noqa: E731
        got = on(o.zero(TX, "data"), put(params), put)
        assert all(torch.equal(sl.unshard(got[k]), want[k]) for k in want)


def test_it_moves_what_muons_owners_move() -> None:
    with sl.simulate(x=2, y=2):
        params = {str(i): sl.shard(r(16, 16, seed=i), "x y") for i in range(8)}
        state = TX.init(params)
        told = dict(sl.why("muon", params).verdicts)["owners"]
        assert not isinstance(told, str), told
        with sl.trace() as t:
            TX.update(params, state, params)
        assert t.bytes == told.forward.bytes


def on_ranks(name: str) -> bool:
    want, _ = run(TX, PARAMS, 4, dict)
    layouts = LAYOUTS[name][1]
    put = lambda t: {k: sl.shard(x, layouts[k]) for k, x in t.items()}  # noqa: E731
    got, state = run(TX, put(PARAMS), 4, put, in_place=True)
    kept = o.load_state_dict(TX.init(got), o.state_dict(state))
    same = zip(optree.tree_leaves(kept), optree.tree_leaves(state), strict=True)
    alike = all(
        torch.equal(a.raw, b.raw) if isinstance(a, sl.ShardedTensor) else a == b for a, b in same
    )
    return alike and all(torch.equal(sl.unshard(got[k]), want[k]) for k in want)


@pytest.mark.parametrize("name", ["1D", "2D"])
def test_soap_on_real_ranks(pool: Any, name: str) -> None:
    assert pool.run(on_ranks, name, **LAYOUTS[name][0]) == [True] * 4


def test_what_it_cannot_do_is_refused() -> None:
    for call, says in (
        (lambda: o.soap(0.1).init({"b": torch.ones(3)}), "b of 1 dimensions is no matrix"),
        (lambda: o.soap(0.1, rest=o.sgd(0.1)), "says which parameters soap updates"),
        (lambda: o.soap(0.1, every=0), "every=0 is not a whole number"),
        (
            lambda: TX.update({"b": r(3, 3)}, TX.init({"a": r(3, 3)}), {"b": r(3, 3)}),
            "made for other parameters: they differ at a, b",
        ),
    ):
        with pytest.raises(sl.ShardError, match=says):
            call()
    with sl.simulate(x=2):
        state = TX.init({"a": sl.shard(r(4, 4), "x .")})
        with pytest.raises(sl.ShardError, match="one mesh"):
            sl.save("/nowhere", {"state": state})
