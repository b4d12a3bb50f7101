"""What comes from constants is known on paper, and what comes from data is not."""

import pytest
import torch

import shardlib as sl
from shardlib.planning.constant_folding import Known


def test_what_comes_from_constants_is_what_the_host_computes() -> None:
    def asked(device: str) -> list[float]:
        x = torch.arange(12, device=device).view(3, 4)
        x = torch.cat([x, x.flip(0) * 2], 1)
        x[:, 0] = 5
        mask = (x.cumsum(1) > 10) & torch.ones(3, 8, dtype=torch.bool, device=device).tril()
        return [int(x.max()), int(mask.sum()), bool(mask.any()), int(x[2, 3])]

    with Known():
        assert asked("meta") == asked("cpu")


def test_rows_that_are_one_row_are_computed_once() -> None:
    """The same values as of rows that lie one by one, and as much memory as one row."""

    def asked(x: torch.Tensor) -> list[torch.Tensor]:
        first = torch.cat([x[:, :1] - 1, x], 1)
        steps = first.diff() != 1
        table = torch.arange(x.shape[1], device=x.device)
        return [
            first,
            steps.cumsum(-1),
            x + table,
            x * x,
            x.cumsum(0),
            torch.cat([x, x]),
            x[1:] + 1,
        ]

    with Known() as known:
        one = torch.arange(5, device="meta") // 2
        found = [known.values[id(y)] for y in asked(one.expand(3, 5))]
    want = asked((torch.arange(5) // 2).repeat(3, 1))
    for got, y in zip(found, want, strict=True):
        assert got.dtype == y.dtype and got.equal(y)
    assert [got.stride(0) for got in found[:4]] == [0] * 4


def test_of_data_nothing_is_known() -> None:
    with Known():
        ids = torch.empty(4, dtype=torch.int64, device="meta")
        table = torch.arange(4, device="meta")
        for x in (ids, ids + table, table.index_fill(0, ids, 1)):
            with pytest.raises(RuntimeError, match="meta"):
                x.max().item()
        table.add_(ids)
        with pytest.raises(RuntimeError, match="meta"):
            table.sum().item()


def test_a_value_that_was_told_is_known() -> None:
    with Known() as known:
        x = torch.empty(3, dtype=torch.int64, device="meta")
        known.tell(x, torch.tensor([1, 2, 3]))
        assert (x * 2).sum().item() == 12


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_transformers_model_is_explained_with_masks_dropout_and_a_padded_vocabulary(
    dropout: float,
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    off = {n: dropout for n in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    small = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 65, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**small, **off, bos_token_id=0, eos_token_id=0)
    ).train()
    ids = torch.randint(65, (4, 8))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with sl.simulate(x=2):
        rules = sl.recipes.megatron1d(model)
        apply, params = sl.parallelize(model, rules, pad=True)
        assert params["transformer.wte.weight"].is_padded

        found = sl.explain(lambda p, **kw: apply(p, **kw).logits, params, given)
        with sl.trace() as t, torch.no_grad():
            apply(params, **given)
    assert found.forward.bytes == t.bytes > 0
