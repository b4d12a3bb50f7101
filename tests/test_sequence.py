"""Labels are shifted before they are cut."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl


@given(
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from(["contiguous", "zigzag", "striped"]),
    st.data(),
)
def test_each_token_s_target_is_the_next_token(n: int, p: int, schedule: str, data: Any) -> None:
    ids = torch.arange(100, 100 + 2 * n).view(2, n)
    borders = (
        (0, *sorted(data.draw(st.lists(st.integers(1, n - 1), max_size=2))), n) if n > 1 else (0, n)
    )
    with sl.simulate(s=p):
        lay = sl.Ring("s", schedule=schedule)
        xs, ys = sl.shard_sequence(ids, lay, documents=borders)
        for r in range(p):
            held = lay.positions(r, n, p)
            for i, position in enumerate(held):
                for b in range(2):
                    token, target = int(xs.raw[r, b, i]), int(ys.raw[r, b, i])
                    assert token == ids[b, position]
                    assert target == (-100 if position + 1 in borders else token + 1)
            assert (ys.raw[r, :, len(held) :] == -100).all()


def test_a_dict_keeps_its_names() -> None:
    ids = torch.arange(12).view(2, 6)
    with sl.simulate(data=2, s=3):
        out = sl.shard_sequence(
            {"input_ids": ids, "labels": ids, "extra": ids[..., None].float()}, "data s"
        )
        assert (
            sl.typeof(out["input_ids"]) == "i64[2@data, 6@s]"
            and sl.typeof(out["extra"]) == "f32[2@data, 6@s, 1]"
        )
        assert torch.equal(sl.unshard(out["labels"])[:, :-1], ids[:, 1:])


def test_uneven_batches_and_borders_are_refused() -> None:
    with sl.simulate(s=2):
        with pytest.raises(sl.ShardError, match="of one length"):
            sl.shard_sequence({"a": torch.zeros(2, 4), "labels": torch.zeros(2, 3)}, sl.Ring("s"))
        with pytest.raises(sl.ShardError, match="run from 0 to 4"):
            sl.shard_sequence(torch.zeros(2, 4), sl.Ring("s"), documents=(0, 3))


def test_a_filled_up_sequence_trains_as_the_dense_one() -> None:
    """Seven tokens on four ranks: the loss and its gradients are those of seven."""
    from examples.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(ctx=8, layers=1, heads=2, embed=8)).double()
    ids = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(
        model(ids)[:, :-1].reshape(-1, 256), ids[:, 1:].reshape(-1)
    )
    loss.backward()
    with sl.simulate(s=4):
        apply, params = sl.parallelize(model, sl.recipes.ring(model))
        xs, ys = sl.shard_sequence(ids, sl.Ring("s", schedule="zigzag"))
        got, grads = sl.value_and_grad(lambda p: apply(p, xs, ys))(params)
        assert abs(got.item() - loss.item()) < 1e-12
        for name, p in model.named_parameters():
            assert (sl.unshard(grads[name]) - p.grad).abs().max() < 1e-12


@given(st.lists(st.integers(0, 25), min_size=1, max_size=12), st.integers(1, 10))
def test_every_token_of_every_document_is_packed_once_with_its_successor(
    sizes: list[int], length: int
) -> None:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    documents = [range(end - n + 1, end + 1) for n, end in zip(sizes, ends, strict=True)]
    rows = sl.pack(documents, length)
    held = [int(t) for row in rows for t in row["input_ids"] if t]
    assert sorted(held) == list(range(1, sum(sizes) + 1))
    owner = {t: d for d, document in enumerate(documents) for t in document}
    for row in rows:
        assert {n: (len(x), x.dtype) for n, x in row.items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), (length, torch.int64)
        )
        ids, labels, places = (row[n].tolist() for n in ("input_ids", "labels", "position_ids"))
        for i, (token, label, place) in enumerate(zip(ids, labels, places, strict=True)):
            starts = i == 0 or not token or not ids[i - 1] or owner[ids[i - 1]] != owner[token]
            if token:
                assert place == (0 if starts else places[i - 1] + 1)
                follows = i + 1 < length and ids[i + 1] and owner[ids[i + 1]] == owner[token]
                assert label == (ids[i + 1] if follows else -100)
            else:
                assert label == -100
    least = -(-sum(sizes) // length)
    assert least <= len(rows) <= 2 * least


def test_rows_without_a_length_are_refused() -> None:
    with pytest.raises(sl.ShardError, match="rows of 0 tokens"):
        sl.pack([[1, 2]], 0)
