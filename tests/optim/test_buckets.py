import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.optim.buckets import Item, flatten, index, unflatten

shapes = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 11]), max_size=3).map(tuple),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200)
@given(shapes, st.integers(1, 7), st.integers(1, 400), st.randoms())
def test_slots_cover_are_disjoint_and_round_trip(sizes: list, ways: int, most: int, random) -> None:
    values = [random.randrange(i + 1) if random.random() < 0.2 else i for i in range(len(sizes))]
    values = [values[v] for v in values]
    values = [values[v] for v in values]  # a tie leads to the first of its kind
    sizes = [sizes[v] for v in values]  # tied leaves have one shape
    dtypes = [torch.float32 if v % 3 else torch.float64 for v in values]
    items = tuple(
        Item(str(i), s, d, ("x",) * (v % 2), v)
        for i, (s, d, v) in enumerate(zip(sizes, dtypes, values, strict=True))
    )
    blocks = [
        torch.full(s, float(v), dtype=d) + torch.arange(math.prod(s), dtype=d).reshape(s)
        for s, v, d in zip(sizes, values, dtypes, strict=True)
    ]
    seen: dict[int, torch.Tensor] = {}
    for bucket in index(items, ways, most):
        assert bucket.length % ways == 0
        used = bucket.slots[-1].offset + bucket.slots[-1].length
        assert used <= bucket.length < used + ways
        ends = [0, *(s.offset + s.length for s in bucket.slots)]
        assert [s.offset for s in bucket.slots] == ends[:-1]
        assert len(bucket.slots) == 1 or used * bucket.dtype.itemsize <= most
        flat = flatten(blocks, bucket)
        assert flat.dtype == bucket.dtype and flat.numel() == bucket.length
        for leaf, block in unflatten(flat, bucket).items():
            assert leaf not in seen
            seen[leaf] = block
    assert sorted(seen) == list(range(len(items)))
    assert all(torch.equal(seen[i], blocks[i]) for i in seen)


def test_tied_leaves_share_a_slot() -> None:
    items = tuple(Item(n, (4,), torch.float32, (), 0) for n in "ab")
    (bucket,) = index(items, 2, 100)
    assert [s.leaves for s in bucket.slots] == [(0, 1)] and bucket.length == 4
