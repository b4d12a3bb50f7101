"""Muon: torch's own, and the same values whatever the layout and wherever matrices are computed."""

import math
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardlib as sl
from shardlib.errors import NoImplementation
from tests.ops.cases import close, r
from tests.optim.test_clip import pend

o = sl.optim
PARAMS = {
    "q": r(8, 12),
    "k": r(4, 12, seed=1),
    "o": r(12, 8, seed=2),
    "up": r(24, 12, seed=3),
    "e": r(4, 8, 12, seed=4),
}


def gradients(params: Any, i: int) -> Any:
    return {
        k: (p * 0.3 + (i % 3 - 1) + r(*p.shape, seed=i)) * (1 + i) for k, p in fixed(params).items()
    }


def fixed(params: Any) -> Any:
    """Gradients that do not hang on the layout."""
    return {k: PARAMS[k] for k in params}


def written_down(g: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """The iteration as torch.optim.Muon has it, in the dtype given."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def paper(
    params: Any, count: int, lr: float = 0.05, momentum: float = 0.9, decay: float = 0.1
) -> Any:
    """Stacks of matrices one by one."""
    x, buf = (
        {k: p.clone() for k, p in params.items()},
        {k: torch.zeros_like(p) for k, p in params.items()},
    )
    for i in range(count):
        g = gradients(x, i)
        for k in x:
            buf[k] = buf[k].lerp(g[k], 1 - momentum)
            way = g[k].lerp(buf[k], momentum)
            mats = way.reshape(-1, *way.shape[-2:])
            done = torch.stack([written_down(m) for m in mats]).reshape(way.shape)
            m, n = way.shape[-2:]
            x[k] = x[k] * (1 - lr * decay) - lr * math.sqrt(max(1, m / n)) * done
    return x


def run(tx: Any, params: Any, count: int, how: Any = lambda g: g) -> Any:
    state = tx.init(params)
    for i in range(count):
        grads = gradients(params, i)
        lie = {
            k: sl.shard(g, params[k].sharding, pad=params[k].is_padded)
            if isinstance(params[k], sl.ShardedTensor)
            else g
            for k, g in grads.items()
        }
        updates, state = tx.update(how(lie), state, params)
        params = o.apply_updates(params, updates)
    return params


TX = o.muon(0.05, 0.9, weight_decay=0.1)


def test_muon_is_torchs() -> None:
    """In bfloat16, as torch computes it; and in fp64 the same lines written down."""
    theirs = {k: p.float().clone().requires_grad_() for k, p in PARAMS.items() if p.ndim == 2}
    ours = {k: p.detach().clone() for k, p in theirs.items()}
    for how, adjust in (({}, "original"), ({"adjust_lr_fn": "match_rms_adamw"}, "match_rms_adamw")):
        optimizer = torch.optim.Muon(list(theirs.values()), 0.05, 0.1, 0.9, **how)
        tx = o.muon(0.05, 0.9, weight_decay=0.1, adjust=adjust, dtype=torch.bfloat16)  # type: ignore[arg-type]
        state = tx.init(ours)
        for i in range(4):
            g = {k: v.float() for k, v in gradients(ours, i).items()}
            for k, p in theirs.items():
                p.grad = g[k].clone()
            optimizer.step()
            updates, state = tx.update(g, state, ours)
            ours = o.apply_updates(ours, updates)
        for k in ours:
            close(ours[k], theirs[k].detach(), 2e-3)
    want = paper(PARAMS, 4)
    for k, p in run(TX, PARAMS, 4).items():
        close(p, want[k], 1e-12)


LAYOUTS = {  # by mesh: parallelism -> layout of a matrix stored (out, in)
    "1D": ({"x": 4}, {"q": "x .", "k": "x .", "o": ". x", "up": "x .", "e": "x . ."}),
    "2D": ({"x": 2, "y": 2}, {"q": "y x", "k": "x y", "o": "y x", "up": "y x", "e": ". x y"}),
    "2.5D": (
        {"d": 2, "x": 2, "y": 2},
        {"q": "y x", "k": "y x", "o": "y x", "up": "(3 y) x", "e": "d x y"},
    ),
    "3D": (
        {"x": 2, "y": 2, "z": 2},
        {"q": "z (x y)", "k": "y (z x)", "o": "(z x) y", "up": "y (z x)", "e": "z x y"},
    ),
    "data": ({"data": 3}, {"q": "...", "k": "...", "o": "...", "up": "...", "e": "..."}),
}


@pytest.mark.parametrize("way", ["", "gathered", "owners", "blocks"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_muon_is_one_devices_on_every_layout(name: str, way: str) -> None:
    mesh, layouts = LAYOUTS[name]
    given = {
        k: p for k, p in PARAMS.items() if not (way == "blocks" and (p.ndim > 2 or name == "data"))
    }
    want = paper(given, 3)
    with sl.simulate(**mesh):
        params = {k: sl.shard(p, layouts[k]) for k, p in given.items()}
        if way and given:
            with sl.algorithm(muon=way):
                got = run(TX, params, 3)
        else:
            got = run(TX, params, 3)
        for k in given:
            close(sl.unshard(got[k]), want[k], 1e-12)


@pytest.mark.parametrize("way", ["", "gathered", "owners", "blocks"])
def test_padded_matrices(way: str) -> None:
    whole = {"a": r(7, 11), "b": r(13, 5, seed=1)}

    def grads(i: int) -> Any:
        return {k: r(*p.shape, seed=20 + i) for k, p in whole.items()}

    def go(params: Any) -> Any:
        state = TX.init(params)
        for i in range(2):
            g = {
                k: sl.shard(v, params[k].sharding, pad=True)
                if isinstance(params[k], sl.ShardedTensor)
                else v
                for k, v in grads(i).items()
            }
            updates, state = TX.update(g, state, params)
            params = o.apply_updates(params, updates)
        return params

    want = go(whole)
    with sl.simulate(x=2, y=2 if way == "blocks" else 3):
        placed = {k: sl.shard(p, "x y", pad=True) for k, p in whole.items()}
        if way:
            with sl.algorithm(muon=way):
                got = go(placed)
        else:
            got = go(placed)
        for k in want:
            close(sl.unshard(got[k]), want[k], 1e-12)


SIDES = [("q", 2), ("up", 3), ("o", (1, 2))]


@pytest.mark.parametrize("way", ["", "gathered", "owners"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_matrices_side_by_side_are_made_orthogonal_apart(name: str, way: str) -> None:
    tx = o.muon(0.05, 0.9, weight_decay=0.0, side=SIDES)
    split = {
        f"{k}{i}": m for k, n in (("q", 2), ("up", 3)) for i, m in enumerate(PARAMS[k].chunk(n))
    }
    split |= {f"o{i}": m for i, m in enumerate(PARAMS["o"].chunk(2, 1))}
    given = {k: PARAMS[k] for k in ("q", "up", "o")}
    state, want = tx.init(given), tx.update(given, tx.init(given), given)[0]
    alone = o.muon(0.05, 0.9, weight_decay=0.0)
    apart = alone.update(split, alone.init(split), split)[0]
    close(want["q"], torch.cat([apart["q0"], apart["q1"]]), 1e-12)
    close(want["up"], torch.cat([apart[f"up{i}"] for i in range(3)]), 1e-12)
    close(want["o"], torch.cat([apart["o0"], apart["o1"]], 1), 1e-12)
    mesh, layouts = LAYOUTS[name]
    with sl.simulate(**mesh):
        params = {k: sl.shard(p, layouts[k]) for k, p in given.items()}
        if way:
            with sl.algorithm(muon=way):
                got = tx.update(params, tx.init(params), params)[0]
        else:
            got = tx.update(params, tx.init(params), params)[0]
        for k in want:
            close(sl.unshard(got[k]), want[k], 1e-12)
    assert state.count == 0


def test_whole_heads_and_experts_stay_where_they_are() -> None:
    """Heads split over x are whole matrices of their rank, and so are experts: nothing moves."""
    tx = o.muon(0.05, side=[("q", 4)])
    with sl.simulate(x=4), sl.trace() as t:
        params = {"q": sl.shard(r(8, 12), "x ."), "e": sl.shard(r(4, 8, 12), "x . .")}
        tx.update(params, tx.init(params), params)
    assert not t.events


@pytest.mark.parametrize("way", ["gathered", "owners", "blocks"])
@pytest.mark.parametrize("name", ["1D", "2D", "2.5D", "3D"])
def test_prices_are_what_moves(name: str, way: str) -> None:
    mesh, layouts = LAYOUTS[name]
    with sl.simulate(**mesh), sl.algorithm(muon=way):
        params = {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items() if p.ndim == 2}
        told = dict(sl.why("muon", params).verdicts)[way]
        assert not isinstance(told, str), told
        tx = o.muon(0.05)
        with sl.trace() as t:
            tx.update(params, tx.init(params), params)
        assert t.bytes == told.forward.bytes


def test_why_names_the_ways() -> None:
    with sl.simulate(x=2, y=2):
        w = sl.shard(r(64, 64), "x y")
        text = str(sl.why("muon", {"w": w}))
    assert all(
        n in text for n in ("local", "gathered", "owners", "blocks", "GF", "a matrix is split")
    )


def test_why_is_legible_and_says_what_a_step_does() -> None:
    """Few lines of a hundred columns, alike matrices told once; and how another way is pinned."""
    with sl.simulate(x=2, y=2, device="cpu"):  # the choice is by a device's speed
        params = {
            f"h.{i}.up.weight": sl.shard(torch.ones(64, 256 + 8 * i), "x y") for i in range(9)
        }
        params |= {f"h.{i}.k.weight": sl.shard(torch.ones(64, 64), "x y") for i in range(9)}
        params |= {"large.weight": sl.shard(torch.ones(1024, 1024), "x y")}
        lines = str(sl.why("muon", params)).splitlines()
        assert all(len(line) <= 100 for line in lines) and len(lines) < 12, lines
        text = " ".join(x.strip() for x in lines)
        assert "and 3 kinds more" in text
        assert "1 by blocks (large.weight)" in text and "18 by owners (h.0.k.weight, " in text
        assert "9 x [64, 64] in x y" not in str(sl.why("muon", params["large.weight"]))
        (line,) = [x for x in lines if x.startswith("another: ")]
        with eval(line.removeprefix("another: with ").removesuffix(": ..."), {"sl": sl}):
            pinned = sl.why("muon", params).chosen
        assert f'"{pinned}"' in line


def test_ways_are_chosen_together() -> None:
    """A matrix that outweighs all others is not its owner's alone, and the others are dealt."""
    with sl.simulate(x=2, y=2, device="cpu"):  # the choice is by a device's speed
        params = {f"w{i}": sl.shard(torch.ones(64, 64), "x y") for i in range(8)}
        params["large"] = sl.shard(torch.ones(1024, 1024), "x y")
        with sl.trace() as t:
            o.muon(0.05).update(params, o.muon(0.05).init(params), params)
        with sl.trace() as small:
            some = {k: p for k, p in params.items() if k != "large"}
            o.muon(0.05).update(some, o.muon(0.05).init(some), some)
        kinds = t.by_kind(), small.by_kind()
        assert kinds[0]["ragged_all_to_all"] == kinds[1]["ragged_all_to_all"]
        assert "pbroadcast" in kinds[0] and list(kinds[1]) == ["ragged_all_to_all"]


@pytest.mark.parametrize(("layout", "replicated"), [("x .", 0), (". x", 1)])
def test_prices_count_products_that_ranks_do_not_share(layout: str, replicated: int) -> None:
    """Where columns are split the Gram matrix is a sum that all ranks have, and all square it."""
    n = 256
    with sl.simulate(x=4):
        told = dict(sl.why("muon", sl.shard(torch.ones(n, n), layout)).verdicts)["blocks"]
    assert not isinstance(told, str), told
    shared, square = 5 * 4 * n**3 // 4, 5 * 2 * n**3
    want = shared + (square if replicated else square // 4)
    assert told.note.startswith(f"{want / 1e9:.3g} GF on the busiest rank"), told.note


@pytest.mark.parametrize("way", ["local", "gathered", "owners"])
def test_one_rank_may_be_asked_for_any_way(way: str) -> None:
    with sl.simulate(x=1), sl.algorithm(muon=way):
        w = {"w": sl.shard(r(8, 6), "x .")}
        got = TX.update(w, TX.init(w), w)[0]["w"]
    alone = {"w": r(8, 6)}
    close(sl.unshard(got), TX.update(alone, TX.init(alone), alone)[0]["w"], 1e-12)


def test_matrices_without_elements() -> None:
    """They take no part, and harm nobody."""
    shapes = {"a": (0, 3), "b": (3, 0), "c": (0, 4, 3), "d": (4, 3)}
    whole = {k: r(*s, seed=i) for i, (k, s) in enumerate(shapes.items())}
    want = run_once(whole)
    with sl.simulate(x=2):
        placed = {k: sl.shard(p, "x " + ". " * (p.ndim - 1), pad=True) for k, p in whole.items()}
        got = run_once(placed)
        assert "[0" not in str(sl.why("muon", placed))
        for k, p in want.items():
            assert sl.unshard(got[k]).shape == p.shape
            if p.numel():
                close(sl.unshard(got[k]), p, 1e-12)


@pytest.mark.parametrize("kind", ["muon", "soap"])
@pytest.mark.parametrize("way", ["", "gathered", "owners", "blocks"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_convolutions_kernel_is_one_matrix(stage: int, way: str, kind: str) -> None:
    """[out, in, height, width] as [out, in height width]; named, since a stack looks alike."""
    if kind == "soap" and way:
        return
    whole = {"a": r(8, 4, 3, 3), "b": r(5, 3, 2, 2, seed=1), "c": r(4, 6, 3, seed=2)}
    flat = {k: p.reshape(len(p), -1) for k, p in whole.items()}
    make = o.soap if kind == "soap" else o.muon
    tx, plain = make(0.05, kernels=["a", "b", "c"]), make(0.05)
    want, state = flat, plain.init(flat)
    for _ in range(3):
        updates, state = plain.update(flat, state, want)
        want = o.apply_updates(want, updates)
    copies = lambda: {k: p.clone() for k, p in whole.items()}  # noqa: E731
    got = several(tx, copies(), copies)
    assert all(torch.equal(got[k].reshape(len(p), -1), p) for k, p in want.items())
    with sl.simulate(data=2, x=2, y=2), sl.algorithm(muon=way) if way else nullcontext():
        cut = o.zero(tx, "data", stage=stage) if stage else tx
        put = lambda t: {  # noqa: E731
            k: sl.shard(p, "x y" + " ." * (p.ndim - 2), pad=True) for k, p in t.items()
        }
        new = lambda: put(whole) if stage < 3 else cut.shard(put(whole))  # noqa: E731
        params = several(cut, new(), new)
        found = params if stage < 3 else o.state_dict(params)
        for k, p in want.items():
            close(sl.unshard(found[k]).reshape(len(p), -1), p, 1e-12)


def several(tx: Any, params: Any, grads: Any) -> Any:
    """Three steps in place, of gradients made anew for each."""
    state = tx.init(params)
    for _ in range(3):
        params, state, _ = o.step(tx, params, grads(), state)
    return params


def test_what_may_be_a_kernel_or_a_stack_is_not_guessed() -> None:
    stack = {"e": r(2, 3, 4, 5)}
    for make in (o.muon, o.soap):
        with pytest.raises(sl.ShardError, match="kernels= names those that are one matrix") as e:
            make(0.05).init(stack)
        names: dict[str, Any] = {"sl": sl}
        exec(e.value.fix, names)
        names["tx"].init(stack)
    one = o.muon(0.05, kernels=[])
    many = {"e": stack["e"].reshape(6, 4, 5)}
    want = one.update(many, one.init(many), many)[0]["e"]
    close(one.update(stack, one.init(stack), stack)[0]["e"].reshape(6, 4, 5), want, 1e-15)
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="no matrix split in blocks"):
        w = {"w": sl.shard(r(4, 4, 2, 2), ". . x .")}
        tx = o.muon(0.05, kernels="w")
        tx.update(w, tx.init(w), w)


PLACES = [  # mesh, stage, layout of a matrix
    ({"data": 2, "x": 2}, 2, "x ."),
    ({"data": 1, "x": 2, "y": 2}, 0, "x y"),
    ({"data": 3}, 3, ". ."),
    ({"d": 2, "data": 2, "x": 2}, 1, ". x"),
    ({"data": 1}, 0, ". ."),
]


def test_state_goes_on_on_any_mesh_and_stage() -> None:
    """With side, stacks, padding and a rest: by name, from each place to the next."""
    whole = {"q": r(24, 8), "k": r(7, 13, seed=1), "e": r(4, 6, 8, seed=2), "b": r(5, seed=3)}
    inner = o.muon(0.05, rest=o.adamw(0.05), matrices=["q", "k", "e"], side=[("q", 3)])

    def grads(i: int) -> Any:
        return {k: r(*p.shape, seed=50 + 9 * i + j) for j, (k, p) in enumerate(whole.items())}

    want, state = whole, inner.init(whole)
    for i in range(2 * len(PLACES)):
        updates, state = inner.update(grads(i), state, want)
        want = o.apply_updates(want, updates)
    params, kept, i = whole, None, 0
    for mesh, stage, layout in PLACES:
        with sl.simulate(**mesh):
            tx = o.zero(inner, "data", stage=stage, bucket_mb=1e-3) if stage else inner
            put = lambda t, at=layout: {  # noqa: E731
                k: sl.shard(p, ". " * (p.ndim - 2) + at if p.ndim > 1 else "...", pad=True)
                for k, p in t.items()
            }
            cut = put if stage < 3 else (lambda t, tx=tx, put=put: tx.shard(put(t)))
            mine = cut(params)
            now = tx.init(mine) if kept is None else o.load_state_dict(tx.init(mine), kept)
            for _ in range(2):
                mine, now, _ = o.step(tx, mine, cut(grads(i)), now)
                i += 1
            found = mine if stage < 3 else o.state_dict(mine)
            params = {k: sl.unshard(p).clone() for k, p in found.items()}
            kept = {
                k: sl.unshard(x).clone() if isinstance(x, sl.ShardedTensor) else x
                for k, x in o.state_dict(now).items()
            }
    for k, p in want.items():
        close(params[k], p, 1e-12)


def run_once(params: Any) -> Any:
    return TX.update(params, TX.init(params), params)[0]


def test_owners_move_half_of_what_gathering_does() -> None:
    with sl.simulate(x=2, y=2):
        params = {str(i): sl.shard(r(16, 16, seed=i), "x y") for i in range(8)}
        told = dict(sl.why("muon", params).verdicts)
    assert told["owners"].forward.bytes == Fraction(told["gathered"].forward.bytes) / 2  # type: ignore[union-attr]


def test_a_matrix_no_rank_should_hold_is_computed_on_blocks() -> None:
    with sl.simulate(x=2, y=2):
        params = {"w": sl.shard(r(16, 16), "x y")}
        tx = o.muon(0.05, most_mb=16 * 16 * 8 / 2**20 - 1e-6)
        with sl.trace() as t:
            got = tx.update(params, tx.init(params), params)[0]
        assert "ragged_all_to_all" not in t.by_kind() and "all_gather" not in t.by_kind()
    want = tx.update({"w": r(16, 16)}, tx.init({"w": r(16, 16)}), {"w": r(16, 16)})[0]
    close(sl.unshard(got["w"]), want["w"], 1e-12)


@pytest.mark.parametrize("name", ["1D", "2D", "3D"])
def test_muon_under_zero_is_muon(name: str) -> None:
    """With its rest, clipped, in buckets that are cut anywhere: by owners."""
    mesh, layouts = LAYOUTS[name]
    given = PARAMS | {"b": r(12, seed=9)}
    inner = o.chain(
        o.clip_by_global_norm(1.0),
        o.muon(0.05, 0.9, rest=o.adamw(0.05), matrices=["q", "k", "o", "up", "e"], side=SIDES),
    )

    def grads(i: int) -> Any:
        return {k: r(*p.shape, seed=30 + i) for k, p in given.items()}

    want, state = given, inner.init(given)
    for i in range(3):
        updates, state = inner.update(grads(i), state, want)
        want = o.apply_updates(want, updates)
    tx = o.zero(inner, "data", bucket_mb=1e-3)
    with sl.simulate(data=2, **mesh):
        layouts = layouts | {"b": "..."}
        params = {k: sl.shard(p, layouts[k]) for k, p in given.items()}
        kept = {k: p.clone() for k, p in params.items()}
        state, after = tx.init(params), tx.init(kept)
        for i in range(3):
            g = {k: pend(sl.shard(v, layouts[k]), "data") for k, v in grads(i).items()}
            updates, state = tx.update(g, state, params)
            params = o.apply_updates(params, updates)
            kept, after, _ = o.step(tx, kept, g, after)
        for k in want:
            close(sl.unshard(params[k]), want[k], 1e-12)
            close(sl.unshard(kept[k]), want[k], 1e-12)


MESHES = [
    ({"data": 3}, [". .", ". ."]),
    ({"data": 2, "x": 3}, ["x .", ". x"]),
    ({"x": 2, "data": 2, "y": 2}, ["x y", "y x", "(x y) .", "(2 y) x"]),
    ({"d": 2, "data": 2, "x": 2}, ["x .", ". x"]),  # 2.5D: copied over d
    ({"x": 2, "y": 1, "z": 2, "data": 2}, ["z (x y)", "(z x) y", "y (z x)"]),
]


@st.composite
def matrices(draw: Any) -> Any:
    mesh, layouts = draw(st.sampled_from(MESHES))
    out: dict[str, Any] = {}
    for i in range(draw(st.integers(1, 5))):
        rows, cols = (draw(st.sampled_from([1, 2, 5, 8, 12, 17])) for _ in range(2))
        layout, stack = draw(st.sampled_from(layouts)), draw(st.sampled_from([(), (), (3,)]))
        side = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 3)]))
        if layout == "(2 y) x":  # the layout of two matrices one above the other
            side = (2, 1)
        shape = (rows * side[0], cols * side[1])
        if layout == "(2 y) x" and rows % 2:
            shape = (shape[0] * 2, shape[1])
        out[f"p{i}"] = (*stack, *shape), ". " * len(stack) + layout, side
    return mesh, out


@settings(max_examples=25, deadline=None)
@given(
    matrices(),
    st.sampled_from(["", "gathered", "owners", "blocks", "local"]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([1e-3, 25.0]),
)
def test_muon_is_one_devices_wherever_it_is_computed(
    case: Any, way: str, stage: int, mb: float
) -> None:
    """Drawn matrices, stacks, and matrices side by side; padded; with and without zero."""
    mesh, drawn = case
    tx = o.muon(0.05, 0.9, weight_decay=0.1, side=[(k, v[2]) for k, v in drawn.items()])
    params = {k: r(*v[0], seed=i) for i, (k, v) in enumerate(drawn.items())}
    grads = [{k: r(*p.shape, seed=40 + i) for k, p in params.items()} for i in range(2)]
    want, state = params, tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, want)
        want = o.apply_updates(want, updates)
    with sl.simulate(**mesh):
        cut = tx if stage == 0 else o.zero(tx, "data", stage=stage, bucket_mb=mb)
        put = lambda t: {k: sl.shard(x, drawn[k][1], pad=True) for k, x in t.items()}  # noqa: E731
        mine = put(params) if stage < 3 else cut.shard(put(params))
        now = cut.init(mine)
        with sl.algorithm(muon=way) if way else nullcontext():
            try:
                for g in grads:
                    parts = put(g) if stage < 3 else cut.shard(put(g))
                    mine, now, _ = o.step(cut, mine, parts, now)
            except NoImplementation as e:
                assert way in ("blocks", "local"), e
                return
        found = mine if stage < 3 else o.state_dict(mine)
        for k in want:
            close(sl.unshard(found[k]), want[k], 1e-12)


def test_why_says_the_prices_under_zero_too() -> None:
    with sl.simulate(data=2, x=2, y=2):
        params = {"w": sl.shard(r(64, 64), "x y"), "v": sl.shard(r(32, 64), "y x")}
        tx = o.zero(o.muon(0.05), "data")
        state = tx.init(params)
        told = sl.why("muon", state.trace)
        assert "GF" in str(told) and "owners" in str(told)
        for way in ("gathered", "owners", "blocks"):
            with sl.algorithm(muon=way), sl.trace() as t:
                tx.update(params, state, params)
            with sl.trace() as rest:  # the parameters' own gather
                zero = o.zero(o.sgd(0.1), "data")
                zero.update(params, zero.init(params), params)
            price = dict(sl.why("muon", state.trace).verdicts)[way]
            assert not isinstance(price, str), price
            assert t.bytes - rest.bytes == price.forward.bytes, way


def test_heads_are_gathered_no_further_than_they_are_split() -> None:
    """Split by heads in rows, and in columns: the columns alone are gathered."""
    with sl.simulate(x=2, y=2):
        w = {"w": sl.shard(r(64, 64), "y x")}
        tx = o.muon(0.05, side=[("w", 4)])
        with sl.algorithm(muon="gathered"), sl.trace() as t:
            tx.update(w, tx.init(w), w)
        assert t.bytes == 32 * 64 * 8 // 2


def test_owners_keep_what_zero_gave_them_whole() -> None:
    """Matrices that a rank holds already do not travel."""
    with sl.simulate(data=4):
        params = {f"w{i}": sl.shard(r(16, 16, seed=i), ". .") for i in range(8)}
        tx = o.zero(o.muon(0.05), "data")
        told = dict(sl.why("muon", tx.init(params).trace).verdicts)["owners"]
        assert not isinstance(told, str) and told.forward.bytes == 0


MISTAKES = [
    (lambda: o.muon(0.1).init({"b": torch.ones(3)}), "b of 1 dimensions is no matrix"),
    (lambda: o.muon(0.1, rest=o.sgd(0.1)), "says which parameters muon updates"),
    (
        lambda: o.muon(0.1, side=[("w", 3)]).update(
            {"w": torch.ones(4, 4)},
            o.muon(0.1).init({"w": torch.ones(4, 4)}),
            {"w": torch.ones(4, 4)},
        ),
        "not 3 x 1 matrices",
    ),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES)
def test_what_is_no_matrix_is_refused(call: Any, says: str) -> None:
    with pytest.raises(sl.ShardError, match=says):
        call()


def on_ranks(name: str) -> dict[str, float]:
    layouts = LAYOUTS[name][1]
    want, out = paper(PARAMS, 2), {}
    for way in ("", "gathered", "owners", "blocks"):
        given = {k: p for k, p in PARAMS.items() if way != "blocks" or p.ndim == 2}
        params = {k: sl.shard(p, layouts[k]) for k, p in given.items()}
        if way:
            with sl.algorithm(muon=way):
                got = run(TX, params, 2)
        else:
            got = run(TX, params, 2)
        out[way] = max(float((sl.unshard(got[k]) - want[k]).abs().max()) for k in given)
    return out


@pytest.mark.parametrize("name", ["1D", "2D"])
def test_muon_on_real_ranks(pool: Any, name: str) -> None:
    for answers in pool.run(on_ranks, name, **LAYOUTS[name][0]):
        assert all(e < 1e-11 for e in answers.values()), answers


def test_layouts_say_where_a_fused_weight_splits() -> None:
    """Each third of a fused qkv is a matrix, on one device as on a mesh, whose rules say so."""
    whole = {"qkv.weight": r(24, 8)}
    with sl.simulate(x=2, y=2):
        side = sl.recipes.beside([("qkv.weight", "(3 y) x"), ("qkv.bias", "(3 y)"), ("*", "...")])
        assert side == [("qkv.weight", (3, 1))]
        tx = o.muon(0.05, side=side)
        want = tx.update(whole, tx.init(whole), whole)[0]["qkv.weight"]
        params = {"qkv.weight": sl.shard(whole["qkv.weight"], "(3 y) x")}
        for way in ("owners", "gathered", "blocks"):
            with sl.algorithm(muon=way):
                got = tx.update(params, tx.init(params), params)[0]["qkv.weight"]
            close(sl.unshard(got), want, 1e-12)
    thirds = {str(i): m for i, m in enumerate(whole["qkv.weight"].chunk(3))}
    alone = o.muon(0.05)
    apart = alone.update(thirds, alone.init(thirds), thirds)[0]
    close(want, torch.cat([apart[str(i)] for i in range(3)]), 1e-12)


def test_a_recipe_names_what_lies_between_weights() -> None:
    """Embeddings, tied or not, heads, norms and biases are left to the rest."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=32, **small))
    layer = "model.layers.0"
    want = [f"{layer}.self_attn.{n}_proj.weight" for n in "qkvo"]
    want += [f"{layer}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    assert sl.recipes.matrices(llama) == want
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=8)
    )
    with sl.simulate(x=2):
        side = sl.recipes.beside(sl.recipes.megatron1d(gpt2))
    assert side == [("transformer.h.*.attn.c_attn.weight", (1, 3))]
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(intermediate_size=32, **small)
    )
    found = sl.recipes.matrices(bert)
    assert len(found) == 7 and not [n for n in found if "embeddings" in n or "classifier" in n]
    tx = o.muon(0.02, rest=o.adamw(1e-3), matrices=sl.recipes.matrices(llama))
    params = {n: p.detach() for n, p in llama.named_parameters()}
    state = tx.init(params)
    held = {n for n, m in state.inner["on"].trace.items() if m is not None}
    assert held == set(want)
