"""The three-axis product against dense: value, both gradients, bytes, what it saves, the bound."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib.modules.apply import giving
from tests.ops.cases import cube_words
from tests.ops.matmul.test_matmul2d import relative
from tests.strategies import examples

SAVES = ["mm3", "mm3_x", "mm3_w", "mm3_xw"]
GRIDS = [
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (2, 1, 2),
    (1, 3, 2),
    (2, 2, 2),
    (2, 3, 2),
    (3, 3, 3),
    (4, 4, 4),
]
# x, w, the layout asked of y (None: what follows), the layout given
LAYOUTS = [
    ("(m n) . k", "(k m) n", None, "(m k) . n"),  # the cube
    ("(m n) . k", "(k m) n", "m k n", "m k n"),
    ("m . (k n)", "(k m) n", None, "(m k) . n"),  # Solomonik-Demmel: k over depth, blocks in 2D
    ("m . (k n)", "(k m) n", "m . (n k)", "m . (n k)"),  # X stays
    ("(m n) . k", "k (n m)", "m . n", "m . n"),  # W's columns gathered, the sum not scattered
    ("m n k", "(k m) n", None, "(m k) . n"),  # a sequence gathered, a batch scattered
    ("(m n) . k", "(k m) n", "m . (n k)", "m . (n k)"),
    ("m . k", "k n", None, "(m k) . n"),  # copies of W over m and of X over n
    ("m . k", "(k m) n", "m k n", "m k n"),
]


@st.composite
def products(draw: Any) -> Any:
    pm, pk, pn = draw(st.sampled_from(GRIDS))
    x, w, out, gives = draw(st.sampled_from(LAYOUTS))
    unit = pm * pk * pn
    m, s, k, n = (unit * draw(st.integers(1, 2)) for _ in range(4))
    if unit > 12:
        m, s, k, n = unit, math.lcm(pk, pn), unit, unit
    form = draw(st.sampled_from(["nn", "nt"]))
    return (
        {"m": pm, "k": pk, "n": pn},
        (x, w, out, gives),
        (m, s, k, n),
        form,
        draw(st.sampled_from(SAVES)),
    )


@examples(80)
@given(products(), st.integers(0, 2**31))
@example(({"m": 2, "k": 2, "n": 2}, LAYOUTS[0], (8, 8, 8, 8), "nt", "mm3"), 0)
@example(({"m": 4, "k": 4, "n": 4}, LAYOUTS[0], (16, 1, 16, 16), "nn", "mm3_xw"), 0)
def test_products_equal_dense_and_cost_what_they_say(case: Any, seed: int) -> None:
    mesh, (x_text, w_text, out, gives), (m, s, k, n), form, rule = case
    draw = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=draw)  # noqa: E731
    x, w, g = rand(m, s, k).requires_grad_(), rand(k, n).requires_grad_(), rand(m, s, n)
    (x @ w).backward(g)
    with sl.simulate(**mesh), sl.algorithm(matmul=rule):
        a, b = (
            sl.shard(x.detach(), x_text).requires_grad_(),
            sl.shard(w.detach(), w_text).requires_grad_(),
        )
        if form == "nt":
            b = sl.shard(w.detach().T, sl.layout_of(b).T).requires_grad_()
            b = b if out is None else giving({"b": b}, {"b": sl.Layout.parse(out)})["b"]
        right = b.T if form == "nt" else b
        with sl.trace() as forward:
            c = F.linear(a, b) if form == "nt" else sl.matmul(a, b, out=out)
        with sl.trace() as backward:
            c.backward(sl.shard(g, c.sharding))
        price = dict(sl.why("matmul", a, right, out).verdicts)[rule]
        assert isinstance(price, sl.extend.Match), price
        assert c.sharding == sl.Layout.parse(gives)
        assert (forward.bytes, forward.messages) == (price.forward.bytes, price.forward.messages)
        assert (backward.bytes, backward.messages) == (
            price.backward.bytes,
            price.backward.messages,
        )
        assert relative(sl.unshard(c).detach(), (x @ w).detach()) < 1e-12
        assert a.grad is not None and a.grad.sharding == a.sharding
        assert b.grad is not None and b.grad.sharding == b.sharding
        assert relative(sl.unshard(a.grad), x.grad) < 1e-12
        db = sl.unshard(b.grad)
        assert relative(db.T if form == "nt" else db, w.grad) < 1e-12


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("plane", [(2, 2), (1, 2), (3, 1)])
def test_both_25d_forms_equal_dense_at_any_depth(depth: int, plane: tuple[int, int]) -> None:
    """Tesseract by SUMMA, with the sum of dW over depth;
    Solomonik-Demmel with the sum of Y scattered.
    """
    row, col = plane
    unit = depth * row * col
    x, w, g = (
        torch.randn(s, dtype=torch.float64)
        for s in ((2 * unit, 3, unit), (unit, 2 * unit), (2 * unit, 3, 2 * unit))
    )
    x.requires_grad_(), w.requires_grad_()
    (x @ w).backward(g)
    with sl.simulate(d=depth, x=row, y=col):
        lay = sl.Layout25D("x", "y", "d")
        for act, weight, out, rule in (
            (lay.act, lay.weight, lay.act, "summa"),
            (lay.deep_act, lay.deep_weight, lay.deep_out, "mm3"),
        ):
            a, b = (
                sl.shard(x.detach(), act).requires_grad_(),
                sl.shard(w.detach(), weight).requires_grad_(),
            )
            with sl.trace() as t:
                c = a @ b
                c.backward(sl.shard(g, c.sharding))
            verdict = sl.why("matmul", a, b)
            price = dict(verdict.verdicts)[verdict.chosen]
            assert isinstance(price, sl.extend.Match) and t.bytes == price.cost.bytes
            assert c.sharding == out.resolve(3) and (verdict.chosen == rule or unit != 4 * depth)
            assert b.grad is not None and b.grad.sharding == b.sharding
            pairs = (
                (sl.unshard(c), x @ w),
                (sl.unshard(a.grad), x.grad),
                (sl.unshard(b.grad), w.grad),
            )
            assert all(relative(mine.detach(), dense.detach()) < 1e-12 for mine, dense in pairs)


@pytest.mark.parametrize(("rule", "times"), [("mm3", (1, 2)), ("mm3_xw", (1, 1))])
@pytest.mark.parametrize("grid", GRIDS)
def test_words_are_the_formula(
    grid: tuple[int, int, int], rule: str, times: tuple[int, int]
) -> None:
    """[(pn-1) MK + (pm-1) KN + (pk-1) MN] / P forward; as much
    backward, and X and W once more unless saved.
    """
    pm, pk, pn = grid
    m, k, n = 48, 96, 144
    if 48 % math.prod(grid):
        m, k, n = (math.prod(grid) * i for i in (1, 2, 3))
    with sl.record(m=pm, k=pk, n=pn), sl.algorithm(matmul=rule):
        a = sl.shard(torch.empty(m, k, device="meta"), "(m n) k").requires_grad_()
        b = sl.shard(torch.empty(k, n, device="meta"), "(k m) n").requires_grad_()
        with sl.trace() as forward:
            c = a @ b
        with sl.trace() as backward:
            c.backward(sl.shard(torch.empty(m, n, device="meta"), c.sharding))
    moved = Fraction((pk - 1) * m * n, pm * pk * pn)
    operands = cube_words(m, k, n, pm, pk, pn) - moved
    assert forward.bytes == 4 * cube_words(m, k, n, pm, pk, pn)
    assert backward.bytes == 4 * (moved + times[1] * operands)
    assert forward.messages == pm + pk + pn - 3


@pytest.mark.parametrize("rule", SAVES)
def test_only_what_is_asked_is_saved_for_backward(rule: str) -> None:
    held: list[Tensor] = []
    with sl.simulate(m=2, k=2, n=2), sl.algorithm(matmul=rule):
        a, b = (
            sl.shard(torch.randn(8, 8), "(m n) k").requires_grad_(),
            sl.shard(torch.randn(8, 8), "(k m) n"),
        )
        b.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            _ = a @ b
        price = dict(sl.why("matmul", a, b).verdicts)[rule]
        assert isinstance(price, sl.extend.Match)
        assert 4 * sum(t.numel() for t in held) // 8 == 4 * (8 + 8) + price.saved


def test_gathering_and_saving_are_asked_for() -> None:
    """2D blocks keep SUMMA; within ``saving`` the three-axis product moves less and is taken."""
    with sl.simulate(x=2, y=2):
        a, b = (sl.shard(torch.zeros(64, 64), "x y") for _ in range(2))
        assert sl.why("matmul", a, b).chosen == "summa"
        with sl.saving():
            assert sl.why("matmul", a, b).chosen == "mm3_xw"
        with sl.saving(max_bytes=3 * 32 * 32 * 4):  # two operands gathered, one of them saved
            assert sl.why("matmul", a, b).chosen in ("mm3_x", "mm3_w")


def test_the_layout_of_the_result_never_hangs_on_sizes() -> None:
    with sl.simulate(x=2, y=2):
        for m, k, n in ((4, 256, 4), (256, 4, 4), (4, 4, 256)):
            y = sl.shard(torch.zeros(m, k), "x y") @ sl.shard(torch.zeros(k, n), "y x")
            assert str(y.sharding) == "x y"


def test_second_derivatives_equal_dense() -> None:
    def second(x: Tensor, w: Tensor, grad: Any) -> tuple[Tensor, ...]:
        (dx,) = grad((x @ w).square().sum(), [x], create_graph=True)
        return grad((dx * dx).sum(), [x, w])

    x, w = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    want = second(x.clone().requires_grad_(), w.clone().requires_grad_(), torch.autograd.grad)
    with sl.simulate(m=2, k=2, n=2):
        a, b = sl.shard(x, "(m n) k").requires_grad_(), sl.shard(w, "(k m) n").requires_grad_()
        for mine, dense in zip(second(a, b, torch.autograd.grad), want, strict=True):
            assert relative(sl.unshard(mine), dense) < 1e-12
        with (
            pytest.raises(sl.errors.Unsupported, match="second derivative"),
            sl.algorithm(matmul="mm3_xw"),
        ):
            second(a, b, torch.autograd.grad)


MISTAKES = [
    ("(m n) k", "(k m) n", "n (m k)", "gives (m n) . summed over k, not n (m k)"),
    ("(n m) k", "(k m) n", None, "must be the minor ones"),
    ("(m n) (2 k)", "(2 k m) n", None, "group"),
    ("(m n) zigzag(k)", ". n", None, "splits x's contraction and not w"),
]


@pytest.mark.parametrize(("x", "w", "out", "says"), MISTAKES)
def test_what_does_not_fit_says_why(x: str, w: str, out: str | None, says: str) -> None:
    with sl.simulate(m=2, k=2, n=2):
        a, b = sl.shard(torch.zeros(8, 8), x), sl.shard(torch.zeros(8, 8), w)
        verdict = dict(sl.why("matmul", a, b, out).verdicts)["mm3"]
        assert isinstance(verdict, str) and says in verdict, verdict
        with pytest.raises(sl.ShardError):
            sl.matmul(a, b, out=out)


def on_a_real_rank(row: tuple[str, str, str | None, str]) -> list[float]:
    x_text, w_text, out, gives = row
    errors = []
    for rule in SAVES:
        draw = torch.Generator().manual_seed(1)
        x, w, g = (
            torch.randn(s, dtype=torch.float64, generator=draw)
            for s in ((8, 4, 8), (8, 12), (8, 4, 12))
        )
        x.requires_grad_(), w.requires_grad_()
        (x @ w).backward(g)
        with sl.algorithm(matmul=rule):
            a, b = (
                sl.shard(x.detach(), x_text).requires_grad_(),
                sl.shard(w.detach(), w_text).requires_grad_(),
            )
            with sl.trace() as t:
                c = sl.matmul(a, b, out=out)
                c.backward(sl.shard(g, c.sharding))
            price = dict(sl.why("matmul", a, b, out).verdicts)[rule]
        assert (
            isinstance(price, sl.extend.Match)
            and t.bytes == price.cost.bytes
            and c.sharding == sl.Layout.parse(gives)
        )
        pairs = ((sl.unshard(c), x @ w), (sl.unshard(a.grad), x.grad), (sl.unshard(b.grad), w.grad))
        errors.append(max(relative(mine.detach(), dense.detach()) for mine, dense in pairs))
    return errors


@pytest.mark.parametrize("grid", [(2, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_real_processes_equal_dense(request: Any, grid: tuple[int, int, int]) -> None:
    pm, pk, pn = grid
    workers = request.getfixturevalue("pool8" if pm * pk * pn == 8 else "pool")
    # every layout on eight ranks, every other one on each mesh with an axis of one rank
    for row in LAYOUTS if pm * pk * pn == 8 else LAYOUTS[pn - 1 :: 2]:
        for errors in workers.run(on_a_real_rank, row, m=pm, k=pk, n=pn):
            assert max(errors) < 1e-12, (row, errors)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.fc2(self.fc1(x)))


class Log(TorchDispatchMode):
    """How many collectives had been posted when each local product began."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events, self.posted = events, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.posted.append(len(self.events))
        return func(*args, **(kwargs or {}))


def _steps(axes: dict[str, int], where: str) -> tuple[list[tuple[list[int], list[str]]], float]:
    """Two steps of three products: (collectives posted before each
    product, their kinds); the largest error.
    """
    torch.manual_seed(0)
    model, x = Three().double(), torch.randn(8, 8, dtype=torch.float64)
    want = torch.autograd.grad(model(x).square().sum() / 2, list(model.parameters()))
    seen, error = [], 0.0
    with sl.algorithm(matmul="mm3"):
        apply, params = sl.parallelize(model, [("*", where)])
        for _ in range(2):
            with sl.trace() as t, Log(t.events) as log:
                y = apply(params, sl.shard(x, f"{' '.join(axes)} ."))
                got = torch.autograd.grad(y, list(params.values()), y.detach(), retain_graph=True)
            seen.append((log.posted, [e.kind for e in t.events]))
            errors = [
                float((sl.unshard(g) - w).abs().max()) for g, w in zip(got, want, strict=True)
            ]
            # fc2's gather is in vain
            (part,) = torch.autograd.grad(y, [params["fc3.weight"]], y.detach())
            error = max(error, *errors, float((part.raw - got[2].raw).abs().max()))
    return seen, error


BACKWARD = ["all_gather", "psum_scatter", "all_gather", "psum_scatter", "psum_scatter"]


def _as_announced(seen: list[tuple[list[int], list[str]]], error: float) -> None:
    """In backward, W3 is on its way when dW3 is multiplied; dW3
    and W2 are when dX3 is; W1 is not needed.
    """
    assert [kinds for _, kinds in seen] == [["all_gather"] * 3 + BACKWARD] * 2 and error < 1e-12
    first, second = (posted for posted, _ in seen)
    assert first == [1, 2, 3, 4, 6, 6, 7, 7]
    assert second == [2, 3, 3, 4, 6, 6, 7, 7]  # the order of the first call is known


def test_the_next_weight_travels_during_a_product() -> None:
    with sl.simulate(x=4):
        _as_announced(*_steps({"x": 4}, ". x"))


def test_so_it_does_on_real_processes(pool: Any) -> None:
    for answer in pool.run(_steps, {"x": 4}, ". x", x=4):
        _as_announced(*answer)


def test_rows_that_a_weights_rule_takes_to_be_split_stay_whole_where_they_are() -> None:
    """A weight made of two others, as adapters that look at their own size do."""
    a, b = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    module = torch.nn.Linear(8, 4, bias=False).double()
    with sl.simulate(x=2, y=2, z=2):
        apply, params = sl.parallelize(module, [("weight", ". z", "(x y) ... .")])
        x = sl.shard(a, ". z").requires_grad_()
        with sl.trace() as t:
            y = apply(params, x)
        assert str(sl.layout_of(y)) == ". ." and set(t.by_kind()) == {"psum"}
        assert (sl.unshard(y) - a @ module.weight.T).abs().max() < 1e-12
        (y * y).sum().backward()
        assert x.grad is not None
        assert (sl.unshard(x.grad) - 2 * (a @ module.weight.T) @ module.weight).abs().max() < 1e-12
        rows = sl.shard(b.T.contiguous(), "(x y) z")
        assert str(sl.layout_of(apply(params, rows))) == "(x y) ."
