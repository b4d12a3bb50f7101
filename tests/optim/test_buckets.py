import math
import pickle

import optree
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.optim.buckets import ALIGN, Buckets, Item, adopt, index, own, parts
from shardlib.optim.trees import by_tensor, pieces
from tests.ops.cases import r
from tests.strategies import examples

shapes = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 11]), max_size=3).map(tuple),
    min_size=1,
    max_size=12,
)


@examples(80)
@given(shapes, st.integers(1, 7), st.integers(1, 4000), st.randoms(), st.sampled_from(["", "x"]))
def test_slots_cover_are_disjoint_and_round_trip(
    sizes: list, data: int, most: int, random, inner: str
) -> None:
    values = [random.randrange(i + 1) if random.random() < 0.2 else i for i in range(len(sizes))]
    values = [values[v] for v in values]
    values = [values[v] for v in values]  # a tie leads to the first of its kind
    sizes = [sizes[v] for v in values]  # tied leaves have one shape
    dtypes = [torch.float32 if v % 3 else torch.float64 for v in values]
    items = tuple(
        Item(str(i), s, d, ("x",) * (v % 2), v, group="ab"[v % 5 // 4])
        for i, (s, d, v) in enumerate(zip(sizes, dtypes, values, strict=True))
    )
    order = list(range(len(items)))
    random.shuffle(order)
    firsts = [
        torch.full(s, float(v), dtype=d) + torch.arange(math.prod(s), dtype=d).reshape(s)
        for s, v, d in zip(sizes, values, dtypes, strict=True)
    ]
    seen: dict[int, torch.Tensor] = {}
    hops = (("x",), ("data",)) if inner else (("data",),)
    made = index(items, hops, (("data", data), ("x", 2)), most, tuple(order))
    assert len({b.name for b in made.buckets}) == len(made.buckets)
    for b, bucket in enumerate(made.buckets):
        # what splits its leaves does not cut it
        over = ("x", "data") if inner and not bucket.axes else ("data",)
        assert bucket.over == over and bucket.ways == math.prod(
            {"x": 2, "data": data}[a] for a in over
        )
        ways = bucket.ways
        assert bucket.length % (ALIGN * ways) == 0
        used = bucket.slots[-1].offset + bucket.slots[-1].length
        assert used <= bucket.length < max(used, 1) + ALIGN * ways
        ends = [0, *(s.offset + s.length for s in bucket.slots)]
        assert [s.offset for s in bucket.slots] == [-(-e // ALIGN) * ALIGN for e in ends[:-1]]
        assert len(bucket.slots) == 1 or used * bucket.dtype.itemsize <= most
        in_it = [items[i] for s in bucket.slots for i in s.leaves]
        assert {(i.dtype, i.axes, i.group) for i in in_it} == {
            (bucket.dtype, bucket.axes, in_it[0].group)
        }
        gaps = sum(b - a for a, b in bucket.gaps)
        assert gaps + sum(s.length for s in bucket.slots) == bucket.length
        cut = [part for rank in range(ways) for part in parts(bucket, rank, ways)]
        assert sum(p.length for p in cut) == sum(s.length for s in bucket.slots)
        assert all(p.start % ALIGN == p.at % ALIGN == 0 for p in cut)
        flat = torch.zeros(bucket.length, dtype=bucket.dtype)
        for slot in bucket.slots:
            flat[slot.offset : slot.offset + slot.length] = firsts[slot.leaves[0]].reshape(-1)
        for n, slot in enumerate(bucket.slots):
            for leaf in slot.leaves:
                assert leaf not in seen and made.where[leaf] == (b, n)
                seen[leaf] = flat[slot.offset : slot.offset + slot.length].view(slot.shape)
    assert sorted(seen) == list(range(len(items)))
    assert all(torch.equal(seen[i], firsts[i]) for i in seen)


def test_tied_leaves_share_a_slot() -> None:
    items = tuple(Item(n, (4,), torch.float32, (), 0) for n in "ab")
    (bucket,) = index(items, (("data",),), (("data", 2),), 100).buckets
    assert [s.leaves for s in bucket.slots] == [(0, 1)] and bucket.length == 2 * ALIGN


def test_buckets_are_a_node_of_trees_that_keeps_its_index() -> None:
    with sl.simulate(data=2):
        params = {"w": sl.shard(torch.randn(130), ".")}
        state = sl.optim.zero(sl.optim.sgd(0.1, 0.9), "data").init(params)
    mu = state.trace
    assert isinstance(mu, Buckets)
    twice = optree.tree_map(lambda x: x * 2 + 1, mu)
    assert isinstance(twice, Buckets) and twice.index is mu.index
    assert [p.numel() for p in pieces(twice)[0]] == [128, 128]
    (view,) = by_tensor(twice)
    assert view is not None and [x.numel() for x in view.parts if x is not None] == [128, 2]
    view.parts[1].fill_(7.0)
    (name,) = twice
    assert twice[name].raw[1, :3].tolist() == [7.0, 7.0, 1.0]
    again = pickle.loads(pickle.dumps(mu.index))
    assert again == mu.index and hash(again) == hash(mu.index)


@examples(40)
@given(
    st.lists(st.sampled_from([1, 3, 63, 64, 65, 128, 192, 500]), min_size=1, max_size=9),
    st.integers(1, 3),
)
def test_a_bucket_is_whole_vectors_for_a_kernel_on_every_rank(sizes: list, ways: int) -> None:
    """With the padding between its slots, so that no element is rounded otherwise than others."""
    with sl.simulate(data=ways):
        params = {str(i): sl.shard(torch.randn(n), "...") for i, n in enumerate(sizes)}
        parts = sl.optim.zero(sl.optim.sgd(0.1), "data", 3).shard(params)
        vectors, other = pieces(parts, parts.like(dict(parts)))
        assert all(len(t) % ALIGN == 0 for t in vectors) and len(vectors) == ways * len(parts)
        assert [t.data_ptr() for t in vectors] == [t.data_ptr() for t in other]
        views = [x for view in by_tensor(parts) if view for x in view.parts if x is not None]
        assert sum(map(len, views)) == sum(sizes)
        for x in views:  # each tensor's elements are in a vector
            x.fill_(7.0)
        assert sum(int(t.eq(7.0).sum()) for t in vectors) == sum(sizes)


NASTY = [
    f"{a}{b}{c}"
    for a in ("h", "h.1", "")
    for b in (".", " ", "/", "~", "é")
    for c in ("1", "10", "0.w")
]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(NASTY), min_size=1, max_size=24, unique=True),
    st.lists(
        st.sampled_from(["a", "a b", "b", ("a", "b"), ("a b",), "a frozen", "1", "0"]), min_size=24
    ),
    st.booleans(),
)
@example([f"h.{i}.w" for i in range(24)], ["a"] * 24, True)
def test_no_two_buckets_of_an_index_have_one_name(paths: list, groups: list, small: bool) -> None:
    with sl.simulate(data=2):
        params = {p: sl.shard(torch.full((3,), float(i)), ".") for i, p in enumerate(paths)}
        params[paths[0]].requires_grad_(len(paths) % 2 == 0)  # then all others are frozen
        group = dict(zip(paths, groups, strict=False))
        tx = sl.optim.sgd(0.1)._replace(groups=lambda tree: [group[p] for p in sorted(tree)])
        for stage in (1, 3):
            full = sl.optim.zero(tx, "data", stage, bucket_mb=1e-5 if small else None)
            parts = full.shard(params)
            held = [parts] if stage == 3 else []
            state = full.init(parts)
            for tree in [*held, *(x for x in state if isinstance(x, Buckets))]:
                names = [b.name for b in tree.index.buckets]
                assert len(set(names)) == len(names) == len(tree)
                for b in tree.index.buckets:  # what is of two groups lies apart
                    assert (
                        len({repr(group[tree.index.items[s.leaves[0]].path]) for s in b.slots}) == 1
                    )
            for tree in held:
                found: dict = sl.optim.state_dict(tree)
                assert {p: float(sl.unshard(x)[0]) for p, x in found.items()} == {
                    p: float(i) for i, p in enumerate(paths)
                }


# ---------------------------------------------------------------- parameters that are views of them


def laid(axes: dict[str, int]) -> tuple[list[sl.ShardedTensor], Buckets, sl.Mesh]:
    mesh = sl.simulate(**axes)
    with mesh:
        params = {
            "a": sl.shard(r(8, 12), "x ."),
            "b": sl.shard(r(7, seed=1), ".").requires_grad_(),
            "s": sl.shard(r(seed=2), ""),
            "z": sl.shard(r(0, 3, seed=2), "..."),
        }
        for p in params.values():
            p.requires_grad_()
        state = sl.optim.zero(sl.optim.sgd(0.1, 0.9), "data").init(params)
    return list(params.values()), state.trace, mesh


def test_adopted_parameters_are_views_that_keep_their_values_and_flags() -> None:
    leaves, trace, mesh = laid({"data": 3, "x": 2})
    before = [sl.unshard(x).clone() for x in leaves]
    flats = adopt(leaves, trace.index, mesh)
    assert all(torch.equal(sl.unshard(x), b) for x, b in zip(leaves, before, strict=True))
    assert all(x.raw.requires_grad and x.raw.is_leaf for x in leaves)
    for flat in flats:
        flat.mul_(2)
    assert all(torch.equal(sl.unshard(x), 2 * b) for x, b in zip(leaves, before, strict=True))
    again = adopt(leaves, trace.index, mesh)  # nothing is moved a second time
    assert [f.data_ptr() for f in again] == [f.data_ptr() for f in flats]
    moved = [x.becomes(x.raw.clone()) for x in leaves]
    other = adopt(moved, trace.index, mesh)
    assert not {f.data_ptr() for f in other} & {f.data_ptr() for f in flats}


def test_own_pieces_are_the_ranks_parts_in_place() -> None:
    leaves, trace, mesh = laid({"data": 3, "x": 2})
    flats = adopt(leaves, trace.index, mesh)
    mine = own(flats, trace.index, mesh)
    both = pieces(mine, trace)
    assert [p.shape for p in both[0]] == [p.shape for p in both[1]]
    for p in both[0]:
        p.fill_(5.0)
    mine.put_back(flats)
    for x in leaves:  # each element was in the piece of one rank along data, of each rank along x
        assert (x.raw == 5).sum() == x.raw.numel() / 3


def test_init_moves_parameters_and_a_graph_made_before_runs_on() -> None:
    """So that the parameters' old memory is free before the first gradients need some."""
    with sl.simulate(data=2):
        tx = sl.optim.zero(sl.optim.sgd(0.1), "data")
        w = sl.shard(r(8, 4), "...").requires_grad_()
        loss, block, before = (w * w).sum(), w.raw, w.raw.data_ptr()
        state = tx.init({"w": w})
        assert w.raw is block and w.raw.data_ptr() != before
        loss.raw.sum().backward(retain_graph=True)
        assert torch.equal(w.raw.grad, 2 * w.raw)  # it went where it was to go
        g = w.becomes(torch.ones_like(w.raw))
        sl.optim.step(tx, {"w": w}, {"w": g}, state)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.raw.sum().backward()
