import contextlib
import math
import pickle
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts import Dim, Layout
from shardlib.mesh import coordinates
from tests.strategies import examples, layouts, meshes, only, placed, shape_for, skewable, spellings

laws = examples(100)


def count(layout: Layout, shape: tuple[int, ...], mesh: dict[str, int]) -> torch.Tensor:
    owners = torch.zeros(shape, dtype=torch.int64)
    for coord in coordinates(mesh):
        index = layout.indices(shape, mesh, coord)
        grid = (
            torch.meshgrid(
                *[torch.tensor(list(i), dtype=torch.int64) for i in index], indexing="ij"
            )
            if shape
            else ()
        )
        owners[tuple(grid)] += 1
    return owners


@laws
@given(spellings())
def test_parse_inverts_print(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@laws
@given(spellings())
def test_equal_layouts_hash_and_pickle_alike(layout: Layout) -> None:
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout and hash(again) == hash(layout) and str(again) == str(layout)


@laws
@given(placed(skew=True))
def test_shards_tile_the_tensor(case: Any) -> None:
    """Each element is owned by exactly as many ranks as there are replicas."""
    layout, shape, mesh = case
    replicas = math.prod(n for axis, n in mesh.items() if axis not in layout.axes)
    assert (count(layout, shape, mesh) == replicas).all()


@laws
@given(placed(skew=True))
def test_local_shape_is_the_shape_of_every_block(case: Any) -> None:
    layout, shape, mesh = case
    for coord in coordinates(mesh):
        assert layout.local_shape(shape, mesh) == tuple(
            len(i) for i in layout.indices(shape, mesh, coord)
        )


@laws
@given(spellings())
def test_T_is_an_involution(layout: Layout) -> None:
    assert layout == layout.T.T


@laws
@given(placed(skew=True), st.randoms())
def test_transpose_commutes_with_shard(case: Any, random: Any) -> None:
    layout, shape, mesh = case
    x = torch.arange(math.prod(shape)).reshape(shape)
    perm = list(range(len(shape)))
    random.shuffle(perm)
    with sl.simulate(**mesh):
        there = sl.shard(x, layout).permute(perm)
        here = sl.shard(x.permute(perm), layout.transpose(*perm))
    assert there.sharding == here.sharding
    assert torch.equal(there.raw, here.raw)


disjoint = st.tuples(*[layouts(3, special=False) for _ in range(3)]).map(
    lambda ls: tuple(
        only(x, dict.fromkeys(a, 1)) for x, a in zip(ls, ("a", "b", "cd"), strict=True)
    )
)


@laws
@given(disjoint)
def test_product_commutes_and_associates(three: tuple[Layout, Layout, Layout]) -> None:
    a, b, c = three
    assert a * b == b * a
    assert (a * b) * c == a * (b * c)
    assert a * sl.Replicated() == a


@laws
@given(disjoint)
def test_refine_splits_further(three: tuple[Layout, Layout, Layout]) -> None:
    a, b, c = three
    assert a.refine(b) <= a
    assert a.refine(b).refine(c) == a.refine(b.refine(c))
    assert a.refine(sl.Replicated()) == a


pairs = st.integers(0, 4).flatmap(lambda n: st.tuples(*[layouts(n) for _ in range(3)])) | skewable(
    3, 24, True
).map(lambda drawn: tuple(drawn[0]))


@laws
@given(spellings(), spellings())
def test_dots_stand_for_unsplit_dimensions(a: Layout, b: Layout) -> None:
    """Resolving commutes with T, with & and with <=."""
    assume(not a.skew and not b.skew)
    if a.ellipsis is None or b.ellipsis is None:
        assume(a.ellipsis != b.ellipsis or len(a.dims) == len(b.dims))
    n = len(a.dims) if a.ellipsis is None else len(b.dims) if b.ellipsis is None else 10
    assume(n >= max(len(a.dims), len(b.dims)))
    whole, other = a.resolve(n), b.resolve(n)
    assert a.T.resolve(n) == whole.T
    assert (a & b).resolve(n) == whole & other
    assert (a <= b) == (whole <= other)


@laws
@given(pairs)
def test_and_is_a_meet(three: tuple[Layout, Layout, Layout]) -> None:
    a, b, c = three
    assert a & a == a
    assert a & b == b & a
    assert (a & b) & c == a & (b & c)
    assert a <= a & b and b <= a & b
    assert (a & b) & a == a & b
    assert not (a <= c and b <= c) or (a & b) <= c


@laws
@given(pairs)
def test_at_least_as_split_is_a_partial_order(three: tuple[Layout, Layout, Layout]) -> None:
    a, b, c = three
    assert a <= a
    assert not (a <= b and b <= a) or a == b
    assert not (a <= b and b <= c) or a <= c
    assert a <= Layout(tuple(Dim() for _ in a.dims))


@laws
@given(placed(2, partial=False))
def test_finer_blocks_lie_inside_coarser_ones(case: Any) -> None:
    a, b, shape, mesh = case
    for c in coordinates(mesh):
        for mine, theirs in zip(
            a.indices(shape, mesh, c), (a & b).indices(shape, mesh, c), strict=True
        ):
            assert set(mine) <= set(theirs)


@laws
@given(placed(2, partial=False))
def test_equivalent_means_the_same_elements(case: Any) -> None:
    a, b, shape, mesh = case
    x = torch.arange(math.prod(shape)).reshape(shape)
    with sl.simulate(**mesh):
        same = (
            torch.equal(sl.shard(x, a).raw, sl.shard(x, b).raw)
            if a.local_shape(shape, mesh) == b.local_shape(shape, mesh)
            else False
        )
    assert a.equivalent(b, shape, mesh) == same


@st.composite
def products(draw: Any) -> Any:
    """Layouts a, b of [..., m, k] and [..., k, n], the shapes
    and the mesh; often they multiply in place.
    """
    mesh = draw(meshes(12))
    a = only(draw(layouts(draw(st.integers(2, 4)), partial=False)), mesh)
    free = [x for x in mesh if x not in a.axes]
    columns = Dim(tuple(draw(st.permutations(free))[: draw(st.integers(0, len(free)))]))
    batch = draw(st.integers(0, 2))
    tail = a.dims[max(0, len(a.dims) - 2 - batch) : -2]
    b = Layout((*[Dim()] * (batch - len(tail)), *tail, a.dims[-1], columns))
    if draw(st.integers(0, 3)) == 0:
        b = only(draw(layouts(len(b.dims), partial=False)), mesh)
    pad = max(len(a.dims), len(b.dims))
    wide = [
        Layout((*[Dim()] * (pad - len(x.dims)), *x.dims))
        for x in (a, b.transpose(*range(batch), -1, -2))
    ]
    shape = draw(
        shape_for([*wide, Layout((*wide[1].dims[:-2], wide[1].dims[-1], wide[1].dims[-2]))], mesh)
    )
    *lead, m, k = shape
    n = draw(shape_for([Layout((b.dims[-1],))], mesh))[0]
    left, right = (*lead, m, k)[pad - len(a.dims) :], (*lead, k, n)[pad - len(b.dims) :]
    return a, b, left, right, mesh


@laws
@given(products())
def test_matmul_layout_agrees_with_a_dense_oracle(case: Any) -> None:
    """Local products, summed over the pending axes, are the product; or the layouts are refused."""
    a, b, left, right, mesh = case
    try:
        c = a @ b
    except sl.ShardError:
        alike = a.dims[-1] == b.dims[-2] and not set(b.dims[-1].axes) & set(a.axes)
        assert not (alike and len(b.dims) == 2)
        return
    x, w = (
        np.arange(math.prod(left)).reshape(left) - 3,
        np.arange(math.prod(right)).reshape(right) % 7,
    )
    dense = x @ w
    total = np.zeros_like(dense)
    for coord in coordinates(mesh):
        mine, theirs = (
            x[np.ix_(*a.indices(left, mesh, coord))],
            w[np.ix_(*b.indices(right, mesh, coord))],
        )
        total[np.ix_(*c.indices(dense.shape, mesh, coord))] += mine @ theirs
    replicas = math.prod(n for axis, n in mesh.items() if axis not in c.axes + c.partial)
    assert (total == replicas * dense).all()


def test_named_layouts_are_spellings() -> None:
    assert str(sl.Layout2D("x", "y")) == "x ... y"
    assert sl.Layout2D("x", "y").resolve(2) == Layout.parse("x y")
    assert sl.Layout25D is sl.Layout25D
    assert sl.Layout25D("x", "y", "d").act.resolve(3) == Layout.parse("(d x) . y")
    cube = sl.Layout3D("x", "y", "z")
    assert str(cube.out) == "(x z) ... y"
    assert sl.Ring("s").layout.resolve(3) == Layout.parse(". s .")
    assert sl.Partial("x").partial == ("x",)


MISTAKES = [
    ("sl.Layout.parse('x y x')", "AxisReused", "'x' is used twice"),
    ("sl.Layout.parse('x + sum(x)')", "AxisReused", "sum"),
    ("sl.Layout.parse('x + mean(y)')", "LayoutSyntax", "sum"),
    ("sl.Layout.parse('spiral(x) .')", "LayoutSyntax", "unknown order"),
    ("sl.Layout.parse('x .. y')", "LayoutSyntax", "no axis name"),
    ("sl.Layout.parse('... x ...')", "LayoutSyntax", "once"),
    ("sl.Layout.parse('x y').resolve(1)", "RankMismatch", "2 dimensions, the tensor 1"),
    ("sl.Layout.parse('tpp .').check((4, 4), {'tp': 2})", "UnknownAxis", "did you mean 'tp'"),
    ("sl.Layout.parse('x').check((5,), {'x': 2})", "UnevenSplit", "size 5 does not divide"),
    ("sl.Layout.parse('x y skew a').check((6, 6), {'x': 2, 'y': 3})", "MeshError", "equal size"),
    (
        "sl.Layout.parse('x y') @ sl.Layout.parse('x y')",
        "ImplicitCommunication",
        "contraction split y in a and x in b",
    ),
    ("sl.Layout.parse('x .') * sl.Layout.parse('. x')", "AxisReused", "both layouts"),
    ("sl.Layout.parse('g(x) zigzag(y)')", "LayoutSyntax", "unknown order 'g'"),
    ("sl.Layout.parse('z . + mean(y)')", "LayoutSyntax", "sum"),  # sum(z) would use z twice
    # tp is taken
    ("sl.Layout.parse('tp tpp').check((4, 4), {'tp': 2})", "UnknownAxis", "this mesh has tp\n"),
    (
        "sl.Layout.parse('y x') @ sl.Layout.parse('. x .')",
        "ImplicitCommunication",
        "do not multiply in place",
    ),
    (
        "sl.Layout.parse('x . + sum(y)') @ sl.Layout.parse('. .')",
        "ImplicitCommunication",
        "do not multiply in place",
    ),
    ("sl.Ring('s', schedule='zig')", "LayoutSyntax", "zigzag"),
]


@pytest.mark.parametrize(("code", "error", "says"), MISTAKES)
def test_mistakes_name_the_culprit_and_the_fix_runs(code: str, error: str, says: str) -> None:
    space: dict[str, Any] = {"sl": sl, "torch": torch, "x": torch.zeros(5)}
    with pytest.raises(sl.ShardError) as caught:
        eval(code, space)
    assert type(caught.value).__name__ == error
    assert says in str(caught.value)
    assert caught.value.line.startswith("test_layout.py:")
    with sl.simulate(x=2, y=2):
        eval(caught.value.fix, space)


GOLDEN = [
    ("x .. y", sl.errors.LayoutSyntax, """\
layout: cannot read 'x .. y': '..' is no axis name
  at   HERE
  fix  sl.Layout.parse('x ... y')"""),
    ("x x", sl.errors.AxisReused, """\
layout: axis 'x' is used twice, in 'x' and in 'x'
  layout  x x
  at      HERE
  fix     sl.Layout.parse('x .')"""),
    ("col .", sl.errors.UnknownAxis, """\
shard: unknown axis 'col'; this mesh has x, cols; did you mean 'cols'?
  layout  col .
  mesh    x=2 cols=2
  at      HERE
  fix     sl.Layout.parse('cols .')"""),
    ("x . cols", sl.errors.RankMismatch, """\
layout: layout 'x . cols' has 3 dimensions, the tensor 2
  layout  x . cols
  at      HERE
  fix     sl.Layout.parse('x .')"""),
    ("x cols", sl.errors.UnevenSplit, """\
shard: dimension 1 of size 5 does not divide over mesh axis 'cols' (size 2, remainder 1)
  tensor  [4, 5]
  layout  x cols
  mesh    x=2 cols=2
  at      HERE
  fix     sl.shard(x, 'x cols', pad=True)"""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "error", "golden"), GOLDEN, ids=[g[1].__name__ for g in GOLDEN])
def test_errors_read_as_they_should_and_their_fix_runs(text: str, error: type, golden: str) -> None:
    x = torch.arange(20.0).reshape(4, 5)
    with sl.simulate(x=2, cols=2):
        with pytest.raises(error) as caught:
            sl.shard(x, text)
        assert str(caught.value) == golden.replace("HERE", caught.value.line)
        assert caught.value.line.startswith("test_layout.py:")
        mended = eval(caught.value.fix, {"sl": sl, "x": x, "torch": torch})
        if isinstance(mended, sl.ShardedTensor):
            assert torch.equal(sl.unshard(mended), x)
        elif mended != Layout.parse("x ... y"):
            assert torch.equal(sl.unshard(sl.shard(x, mended)), x)


@pytest.mark.parametrize("perm", [(2, 3), (0, 0), (-3, 0), (1, -1)])
def test_only_permutations_transpose(perm: tuple[int, ...]) -> None:
    with pytest.raises(sl.ShardError, match="no permutation") as caught:
        Layout.parse("x y").transpose(*perm)
    assert eval(caught.value.fix, {"layout": Layout.parse("x y")}) == Layout.parse("x y")


WORDS = [
    *". x y z a b (x) ... .. + sum(x) mean(x) sum() skew zigzag(x) striped(y) spiral(z) g(x) ( ) 3 x,y ()".split(),
    *("(x y)", "(3 y)", "(y 3)", "(1 x)", "+ sum(y z)", "zigzag(2 x)", "skew a", "skew c"),
]


@laws
@example("+ sum(y z) skew .")
@given(st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join))
def test_the_fix_of_any_text_can_be_read(text: str) -> None:
    """A text is a layout that prints and reads back, or its error has a fix that is one."""
    try:
        layout = Layout.parse(text)
    except sl.ShardError as e:
        layout = eval(e.fix, {"sl": sl})
    assert Layout.parse(str(layout)) == layout


def test_a_long_text_is_refused_at_once() -> None:
    before = time.monotonic()
    with pytest.raises(sl.ShardError):
        Layout.parse("runs(x; " + "|  " * 10_000 + "!)")
    assert time.monotonic() - before < 5


@pytest.mark.parametrize(
    "text", ["(² x)", "documents(s; 0)", "documents(s; 1 5)", "runs(x; 0:2x)", "runs(s;)"]
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(sl.ShardError, match="cannot read"):
        Layout.parse(text)


LONG = {
    "open": "(" * 10_000,
    "deep": "(9 " * 2500 + ")" * 2500,
    "dots": ". " * 5000,
    "axes": " ".join(f"a{i}" for i in range(1750)),
    "group": "(" + " ".join(f"a{i}" for i in range(1700)) + ")",
    "ranges": "runs(x; " + "| " * 4990 + ")",
    "ranges of digits": "runs(x; 0:" + "9" * 9980 + ")",
    "borders of digits": "documents(x; 0 " + "9" * 9980 + ")",
    "orders": "zigzag(" * 1400,
    "unknown orders": "zigzaq(x) " * 1000,
    "sums": "x + sum(" + " ".join(f"a{i}" for i in range(1700)) + ")",
    "commas": "x + sum(" + "a," * 4990,
    "ellipses": "... " * 2500,
    "digits": "9" * 10_000,
    "a number": "(" + "9" * 9990 + " x)",
    "name": "_" * 10_000,
    "spaces": " " * 10_000,
    "pluses": "+ " * 5000,
    "skews": " skew " * 1600,
    "nul": "\0" * 10_000,
    "letters": "é " * 5000,
}


@pytest.mark.parametrize("what", LONG)
def test_any_text_of_ten_thousand_characters_is_read_or_refused_at_once(what: str) -> None:
    best = math.inf
    for i in range(5):
        began = time.process_time()
        with contextlib.suppress(sl.errors.LayoutSyntax, sl.errors.AxisReused):
            Layout.parse(LONG[what] + " " * i)  # none is remembered
        best = min(best, time.process_time() - began)
    # 5 ms on a quiet machine; a pattern that tries all ways to split the text takes hours
    assert best < 0.1, f"{best * 1000:.1f} ms"
