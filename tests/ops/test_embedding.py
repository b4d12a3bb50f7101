"""Lookups in a table whose rows, columns or both are split."""

import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from tests.ops.cases import EMBEDDING, compare, ids, r, run_on_meshes


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 4), (4, 1), (2, 2), (2, 3), (3, 3)]),
    st.booleans(),
)
def test_embedding_then_loss_of_any_shape_equals_dense(
    b: int, s: int, grid: tuple[int, int], two_d: bool
) -> None:
    row, col = grid
    vocab, width = row * col * 2, row * col
    idx, target = ids(row * b, s, top=vocab), ids(row * b, s, top=vocab)

    def model(w):
        ours = isinstance(w, sl.ShardedTensor)
        i, t = (sl.shard(z, "x .") if ours else z for z in (idx, target))
        logits = F.linear(F.embedding(i, w), w)
        return F.cross_entropy(logits.view(-1, vocab), t.view(-1))

    with sl.simulate(x=row, y=col):
        compare(model, [r(vocab, width)], ["x y" if two_d else "y ."])


@pytest.mark.parametrize("name", EMBEDDING)
def test_lookups_equal_dense(name: str) -> None:
    run_on_meshes(name)


def test_ids_that_are_split_find_rows_of_a_constant() -> None:
    idx, w = ids(4, 3, top=6), r(6, 5)
    with sl.simulate(x=2), sl.constants():
        found = F.embedding(sl.shard(idx, "x ."), w)
        assert sl.layout_of(found) == sl.Layout.parse("x . .")
        assert sl.unshard(found).equal(F.embedding(idx, w))
