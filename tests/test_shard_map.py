"""Per-device code: what a body returns is what its layout says, on every back end."""

import contextlib
import sys
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib import collectives as C
from shardlib.errors import WrongAxes
from shardlib.layouts import as_layout


@pytest.mark.parametrize(("where", "found"), [(".", [5.0, 6.0]), ("x", [5.0, 6.0] * 4)])
def test_a_tensor_made_inside_is_the_same_on_every_rank(
    pool: Any, where: str, found: list[float]
) -> None:
    with sl.simulate(x=4):
        mine = sl.shard_map(lambda v: torch.tensor([5.0, 6.0]), in_layouts="x", out_layouts=where)(
            sl.shard(torch.arange(4.0), "x")
        )
        assert sl.unshard(mine).tolist() == found
        here = sl.unshard(mine).tolist()
    assert pool.run(_plain_inside, where, x=4) == [here] * 4


def _plain_inside(where: str) -> list[float]:
    x = sl.shard(torch.arange(4.0), "x")
    return sl.unshard(
        sl.shard_map(lambda v: torch.tensor([5.0, 6.0]), in_layouts="x", out_layouts=where)(x)
    ).tolist()


MISTAKES: list[tuple[str, Any, str, str, str]] = [  # name, body, in, out, the axis it is refused by
    ("no psum", lambda v: v.sum(), "x", "", "'x'"),
    ("psum over the wrong axis", lambda v: sl.psum(v.sum(), "y"), "x", "", "'y'"),
    ("psum twice", lambda v: sl.psum(sl.psum(v.sum(), "x"), "x"), "x", "", "'x'"),
    ("psum of a copy", lambda v: sl.psum(v, "y"), "x", "x", "'y'"),
    ("psum over both", lambda v: sl.psum(v, ("x", "y")), "x", ".", "'y'"),
    ("psum_scatter of a copy", lambda v: C.psum_scatter(v, "y"), ".", "y", "'y'"),
    ("preduce of a copy", lambda v: C.preduce(v, "y"), ".", ". + sum(y)", "'y'"),
    ("posted psum of a copy", lambda v: C.start(sl.psum, v, "y").wait(), "x", "x", "'y'"),
    ("a whole value as pending", lambda v: sl.psum(v.sum(), "x"), "x", " + sum(x)", "'x'"),
    ("its place as replicated", lambda v: v * 0 + sl.axis_index("x"), ".", ".", "'x'"),
    ("its place picked", lambda v: v * C.pick([1] * sl.axis_size("x"), "x"), ".", ".", "'x'"),
    ("all_to_all as replicated", lambda v: sl.all_to_all(v, "x", 0, 0), "x", ".", "'x'"),
    ("a slice as replicated", lambda v: C.pslice(v, "y"), ".", ".", "'y'"),
    ("a shift as replicated", lambda v: C.shift(v, "x"), "x", ".", "'x'"),
    ("written into a copy", lambda v: _written(v), "x", ".", "'x'"),
    ("written into a view", lambda v: _written_through_a_view(v), "x", ".", "'x'"),
]


def _written(v: torch.Tensor) -> torch.Tensor:
    out = v.new_zeros(v.shape)
    out[0] = v[0]
    return out


def _written_through_a_view(v: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(v)
    out.view(-1)[1:].add_(v[1:])
    return out


@pytest.mark.parametrize(("name", "body", "where", "out", "axis"), MISTAKES)
def test_a_body_that_mistakes_what_varies_is_refused(
    name: str, body: Any, where: str, out: str, axis: str
) -> None:
    """By the axis, though every rank's values are the same here."""
    with sl.simulate(x=2, y=2):
        v = sl.shard(torch.ones(4), where)
        with pytest.raises(WrongAxes, match=axis):
            sl.shard_map(body, in_layouts=where, out_layouts=out)(v)


def _softmax(v: torch.Tensor) -> torch.Tensor:
    top = sl.pmax(v.amax(-1, keepdim=True), "y")
    e = (v - top).exp()
    return e / sl.psum(e.sum(-1, keepdim=True), "y")


def _summa(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a.new_zeros(a.shape[0], b.shape[1])
    for i in range(2):
        c += C.pbroadcast(a, "y", i) @ C.pbroadcast(b, "x", i)
    return c


def _summa_abt(c: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A = C B^T: the columns of its block are views, filled by sums that lie at their root."""
    a = c.new_zeros(c.shape[0], b.shape[0])
    for i in range(2):
        a.view(-1, b.shape[0])[:].add_(C.preduce(c @ C.pbroadcast(b, "x", i).T, "y", i))
    return a


def _cannon(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a @ b
    return c + C.shift(a, "y", -1) @ C.shift(b, "x", -1)


def _counted(v: torch.Tensor) -> torch.Tensor:
    """A constant summed counts ranks; the mean of a copy is the copy."""
    return sl.pmean(v, "y") * sl.psum(torch.ones(()), ("x", "y")) / 4


def _first_only(v: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.as_tensor(sl.axis_index("y") == 0), v, torch.zeros_like(v))


def _round_the_ring(v: torch.Tensor) -> torch.Tensor:
    return C.pcast(v + C.shift(v, "x"), "x", to="replicated")


RIGHT: list[tuple[Any, tuple[str, ...], str]] = [
    (_softmax, ("x y",), "x y"),
    (_summa, ("x y", "x y"), "x y"),
    (_summa_abt, ("x y", "x y"), "x y"),
    (_cannon, ("x y skew a", "x y skew b"), "x y"),
    (lambda v, w, u: sl.psum(torch.relu(v @ w) @ u, "x"), (". .", ". x", "x ."), ". ."),
    (lambda v: sl.all_gather(C.psum_scatter(v, "x"), "x"), (". y + sum(x)",), ". y"),
    (_counted, ("x .",), "x ."),
    (_first_only, ("x .",), "x . + sum(y)"),
    (_round_the_ring, ("x .",), ". ."),
    (lambda v: C.pslice(C.pbroadcast(v, "y", 1), "y"), ("x .",), "(x y) ."),
    (lambda v: sl.psum(C.pcast(v, "y", to="varying"), "y"), ("x .",), "x ."),
    (lambda v: v.softmax(-1).topk(2, -1).values.sort(-1)[0], ("x .",), "x ."),
]


@pytest.mark.parametrize(("body", "ins", "out"), RIGHT)
def test_a_right_body_is_not_refused(body: Any, ins: tuple[str, ...], out: str) -> None:
    with sl.simulate(x=2, y=2):
        given = [sl.shard(torch.randn(4, 4), layout) for layout in ins]
        sl.shard_map(body, in_layouts=ins, out_layouts=out)(*given)
        for x in given:
            x.requires_grad_()
        sl.unshard(sl.shard_map(body, in_layouts=ins, out_layouts=out)(*given)).sum().backward()
        assert all(x.grad is not None for x in given)


@pytest.mark.parametrize("name", [m[0] for m in MISTAKES])
def test_an_axis_of_one_rank_holds_no_mistake(name: str) -> None:
    """What is right on one rank runs on one rank."""
    _, body, where, out, _ = next(m for m in MISTAKES if m[0] == name)
    with sl.simulate(x=1, y=1):
        sl.shard_map(body, in_layouts=where, out_layouts=out)(sl.shard(torch.ones(4), where))


def test_copies_that_differ_are_refused_where_nothing_is_known_of_them() -> None:
    def body(v: torch.Tensor) -> torch.Tensor:
        return sl.collectives.Stacked(v.ranks, v.mesh)  # type: ignore[attr-defined]

    with sl.simulate(x=2, y=2):
        v = sl.shard(torch.arange(4.0), "x")
        with pytest.raises(WrongAxes, match="varies along axis 'x'"):
            sl.shard_map(body, in_layouts="x", out_layouts=".")(v)


def test_copies_that_differ_by_their_rounding_pass() -> None:
    with sl.simulate(x=3):
        v = sl.shard(torch.randn(3, 7), "x .")

        def body(u: torch.Tensor) -> torch.Tensor:
            near = sl.all_gather(u, "x").sum(0) * (1 + 1e-7 * sl.axis_index("x"))
            return C.pcast(near, "x", to="replicated")

        assert sl.shard_map(body, in_layouts="x .", out_layouts=".")(v).shape == (7,)


def test_a_claim_that_is_not_so_is_refused() -> None:
    with sl.simulate(x=2):
        v = sl.shard(torch.arange(4.0), "x")
        f = sl.shard_map(
            lambda u: C.pcast(u, "x", to="replicated"), in_layouts="x", out_layouts="."
        )
        with pytest.raises(WrongAxes, match="differs along axis 'x'"):
            f(v)


@pytest.mark.parametrize("body", [lambda v: 1.0, lambda v: (v, v), lambda v: None])
def test_a_body_returns_one_tensor_for_each_layout(body: Any) -> None:
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="the body returned"):
        sl.shard_map(body, in_layouts="x", out_layouts=("x", "x", "x"))(
            sl.shard(torch.ones(4), "x")
        )


def test_real_ranks_refuse_the_same_mistakes_under_check(pool: Any) -> None:
    assert pool.run(_mistaken, x=2, y=2) == [[m[0] for m in MISTAKES]] * 4


def _mistaken() -> list[str]:
    """The mistakes that are refused, of which none has moved anything."""
    refused = []
    state = torch.random.get_rng_state()
    for name, body, where, out, axis in MISTAKES:
        v = sl.shard(torch.ones(4), where)
        with sl.check():
            try:
                sl.shard_map(body, in_layouts=where, out_layouts=out)(v)
            except WrongAxes as e:
                refused += [name] if axis in str(e) else []
        for right, ins, there in RIGHT:
            given = [sl.shard(torch.ones(4, 4), layout) for layout in ins]
            if right in (_softmax, _cannon, _counted) and not refused[1:]:
                with sl.check():
                    sl.shard_map(right, in_layouts=ins, out_layouts=there)(*given)
    assert torch.equal(state, torch.random.get_rng_state())
    return refused


# ---------------------------------------------------------------- trees, as JAX's in_specs


def _layer(params: dict[str, Any], v: torch.Tensor, scale: float) -> dict[str, Any]:
    y = v @ params["w"] + params["b"]
    return {"y": y * scale, "sums": (sl.psum(y.sum(), "x"), [y.sum(0)]), "none": None}


def _trees() -> list[Any]:
    """A body over trees under every way of writing its layouts, forward and backward."""
    w = sl.shard(torch.arange(12.0).reshape(3, 4), ". x").requires_grad_()
    b = sl.shard(torch.ones(4), "x").requires_grad_()
    v = sl.shard(torch.ones(2, 3), "...").requires_grad_()
    found = []
    for ins, outs in (
        (({"w": ". x", "b": "x"}, "...", None), {"y": ". x", "sums": ("...", "x"), "none": None}),
        (({"w": (None, "x"), "b": ("x",)}, (), ()), {"y": (None, "x"), "sums": ((), ["x"]), "none": ()}),
        (({"w": sl.P(None, "x"), "b": sl.P("x")}, sl.P(), sl.P()),
         {"y": sl.P(None, "x"), "sums": (sl.P(), sl.P("x")), "none": sl.P()}),
    ):  # fmt: skip
        w.grad = b.grad = v.grad = None
        f = sl.shard_map(_layer, in_layouts=ins, out_layouts=outs)
        out = f({"w": w, "b": b}, v, 2.0)
        (sl.unshard(out["y"]).square().sum() + sl.unshard(out["sums"][0])).backward()
        types = [sl.typeof(out), out["none"]]
        found.append([types, *(sl.unshard(t.grad).tolist() for t in (w, b, v))])
    return found


def test_a_body_takes_trees_with_layouts_for_their_upper_part(pool: Any) -> None:
    w = torch.arange(12.0).reshape(3, 4).requires_grad_()
    b, v = torch.ones(4, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    y = v @ w + b
    ((2 * y).square().sum() + y.sum()).backward()
    want = [t.grad.tolist() for t in (w, b, v)]
    types = {"y": "f32[2, 4@x]", "sums": ("f32[]", ["f32[4@x]"]), "none": None}
    with sl.simulate(x=2, y=2):
        here = _trees()
    assert here == [[[types, None], *want]] * 3
    assert pool.run(_trees, x=2, y=2) == [here] * 4


def test_one_layout_serves_every_operand_and_result() -> None:
    with sl.simulate(x=2, y=2):
        a, b = (sl.shard(torch.ones(4, 4), "x y") for _ in "ab")
        for layout in ("x y", sl.P("x", "y"), sl.Layout2D("x", "y")):
            f = sl.shard_map(
                lambda u, v: (u + v, {"d": u - v}), in_layouts=layout, out_layouts=layout
            )
            total, more = f(a, b)
            assert sl.typeof((total, more)) == ("f32[4@x, 4@y]", {"d": "f32[4@x, 4@y]"})


def test_it_decorates_a_function_and_keeps_its_name() -> None:
    @sl.shard_map(in_layouts="x", out_layouts=())
    def mean(v: torch.Tensor) -> torch.Tensor:
        """Average over all ranks."""
        return sl.pmean(v.mean(), "x")

    assert (mean.__name__, mean.__doc__) == ("mean", "Average over all ranks.")
    for ranks in (2, 4):  # the mesh is that of each call
        with sl.simulate(x=ranks):
            assert sl.unshard(mean(sl.shard(torch.arange(8.0), "x"))).item() == 3.5
    mesh = sl.simulate(x=2)
    made = sl.shard_map(lambda: torch.ones(3), in_layouts=(), out_layouts="x", mesh=mesh)()
    assert sl.typeof(made) == "f32[6@x]"
    nothing = sl.shard_map(lambda v: None, in_layouts="x", out_layouts=())
    assert nothing(sl.shard(torch.ones(2), "x", mesh)) is None


def _wrong_operand() -> Any:
    tree = {"w": sl.shard(torch.ones(4), "...")}
    return sl.shard_map(lambda t: t["w"], in_layouts=({"w": "x"},), out_layouts="x")(tree)


REFUSED: list[tuple[str, Any, str]] = [
    ("no body", lambda: sl.shard_map(3, in_layouts="x", out_layouts="x"), "the body is a function"),
    ("P of one operand", lambda: _mapped(("x", None)), r"1 operands and 2 layouts: sl.P\(...\) is one"),
    ("two for one", lambda: _mapped(["x", "x"]), "1 operands and 2 layouts"),
    ("another tree", lambda: _mapped(({"a": "x"},)), "no tree of layouts like"),
    ("None", lambda: _mapped((None,)), "None is no layout"),
    ("a leaf laid out otherwise", _wrong_operand, r"operand x\['w'\] is laid out ., not x"),
    ("results unlike the layouts", lambda: _mapped("x", {"a": "x"}), "is no layout"),
    ("one that is written to", lambda: _mapped("x", "x", lambda v: v.add_(1)), "wrote into operand x"),
]  # fmt: skip


def _mapped(ins: Any, outs: Any = "x", body: Any = lambda v: v) -> Any:
    tree = {"b": sl.shard(torch.ones(4), "x")}
    x = tree if isinstance(ins, tuple) and isinstance(ins[0], dict) else tree["b"]
    return sl.shard_map(body, in_layouts=ins, out_layouts=outs)(x)


@pytest.mark.parametrize(("name", "call", "says"), REFUSED, ids=[r[0] for r in REFUSED])
def test_layouts_that_do_not_fit_are_refused(name: str, call: Any, says: str) -> None:
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match=says) as e:
        call()
    assert e.value.fix


def test_a_body_that_returns_its_operand_gives_a_value_of_its_own() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.arange(4.0), "x")
        y = sl.shard_map(lambda v: v, in_layouts="x", out_layouts="x")(x)
        y.add_(1)
        assert sl.unshard(x).tolist() == [0, 1, 2, 3] and sl.unshard(y).tolist() == [1, 2, 3, 4]


def _placing_inside() -> list[str]:
    x, w = sl.shard(torch.arange(4.0), "x"), sl.shard(torch.ones(4), "x")
    bodies: list[tuple[Any, str]] = [
        (lambda v: sl.shard(v, "x"), "place values before"),
        (lambda v: sl.shard(torch.ones(4), "x"), "place values before"),
        (lambda v: sl.reshard(v, "."), "move blocks by collectives"),
        (lambda v: sl.constrain(v, "."), "move blocks by collectives"),
        (lambda v: sl.unshard(v), "move blocks by collectives"),
        (lambda v: v * w, "a block of the body"),
        (lambda v: w, "returned a sharded value"),
    ]
    said = []
    for body, words in bodies:
        with pytest.raises(sl.ShardError, match=words) as e:
            sl.shard_map(body, in_layouts="x", out_layouts="x")(x)
        said.append(str(e.value))
    assert sl.unshard(sl.shard(torch.ones(4), "x")).sum() == 4.0  # the scope has been left
    return said


def test_a_body_that_places_or_moves_whole_values_is_told_what_to_write(pool: Any) -> None:
    with sl.simulate(x=2, y=2):
        said = _placing_inside()
    assert pool.run(_placing_inside, x=2, y=2) == [said] * 4


def test_layouts_of_operands_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def seen(given: object, *args: Any, **how: Any) -> Any:
        asked.append(given)
        return as_layout(given, *args, **how)

    monkeypatch.setattr(sys.modules["shardlib.shard_map"], "as_layout", seen)
    f = sl.shard_map(lambda a, b: a @ b, in_layouts=("x ...", ". ."), out_layouts="x .")
    with sl.simulate(x=2):
        a, b = sl.shard(torch.ones(4, 4), "x ."), sl.shard(torch.ones(4, 4), "...")
        for x in (a, a, sl.shard(torch.ones(2, 4, 4), "x . .")):
            with contextlib.suppress(
                sl.ShardError
            ):  # of the last, whose result has more dimensions
                f(x, b)
            asked.remove("x .")
    assert asked == ["x ...", ". .", "x ..."]
