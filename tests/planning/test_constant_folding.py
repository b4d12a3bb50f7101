"""What comes from constants is known on paper, and what comes from data is not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import shardlib as sl
from shardlib.memory_tracker import Live
from shardlib.planning.constant_folding import Known, on_shapes, operator_of


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
    want = asked((torch.arange(5, device="cpu") // 2).repeat(3, 1))
    for got, y in zip(found, want, strict=True):
        assert got.dtype == y.dtype and got.equal(y)
    assert [got.stride(0) for got in found[:4]] == [0] * 4


def test_rows_that_were_expanded_are_viewed_as_one_dimension() -> None:
    with Known() as known:
        row = torch.arange(6, device="meta")[None]
        x = row.expand(4, 6) + row.expand(4, 6)
        y = x.view(24)
        assert known.values[id(y)].tolist() == [2 * i for i in range(6)] * 4


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


def test_a_copy_of_a_value_on_the_host_is_known() -> None:
    given = torch.tensor([1, 2, 3])
    with Known():
        x = given.detach().to("meta")
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


aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
SHAPES = st.lists(st.integers(1, 4), max_size=3)


@given(SHAPES, DTYPES, DTYPES, st.booleans(), st.sampled_from([2, 2.0, True]))
def test_a_second_time_is_as_the_first(
    shape: list[int], left: torch.dtype, right: torch.dtype, turned: bool, number: Any
) -> None:
    """Size, strides and dtype, also where operands are transposed, or scalars of other types."""
    x, y = meta(*shape, dtype=left), meta(*shape, dtype=right)
    x, y = (x.mT, y.mT) if turned and len(shape) > 1 else (x, y)
    calls = [
        (aten.mul.Tensor, (x, y)),
        (aten.mul.Scalar, (x, number)),
        (aten.cat.default, ([x, y],)),
    ]
    for func, args in calls[: 3 if shape else 2]:
        want = func(*args)
        for _ in range(2):
            got = on_shapes(func, args, {})
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert got.is_meta and got.untyped_storage().nbytes() == want.untyped_storage().nbytes()


def test_a_view_shares_its_storage_and_an_update_is_its_operand() -> None:
    x, w = meta(4, 6), meta(4, 6)
    for _ in range(2):
        for func, args in ((aten._unsafe_view.default, (x, [6, 4])), (aten.t.default, (x,))):
            view = on_shapes(func, args, {})
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert on_shapes(aten.add_.Tensor, (x, w), {}) is x


def test_shapes_that_do_not_fit_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"broadcast|must match"):
            on_shapes(aten.add.Tensor, (meta(2), meta(3)), {})
        with pytest.raises(RuntimeError, match=r"broadcast|output with shape"):
            on_shapes(aten.add_.Tensor, (meta(2), meta(3, 2)), {})


def test_values_are_never_remembered() -> None:
    one = torch.ones(2)
    assert on_shapes(aten.mul.Tensor, (one, one), {}).tolist() == [1.0, 1.0]
    assert on_shapes(aten.mul.Tensor, (one * 2, one), {}).tolist() == [2.0, 2.0]


def test_a_step_remembered_keeps_as_many_bytes() -> None:
    """Peak and what stays, of forward and backward, the first time and the second."""

    def peaks() -> list[tuple[int, int]]:
        x, w = meta(8, 16).requires_grad_(), meta(16, 16).requires_grad_()
        with Known(), Live(paper=True) as live:
            loss = F.gelu(torch.addmm(x, x, w)).square().sum()
            forward = live.now, live.peak
            grads = torch.autograd.grad(loss, (x, w))
            assert len(grads) == 2
            return [forward, (live.now, live.peak)]

    operator_of.cache_clear()
    first = peaks()
    assert peaks() == first


def test_a_context_of_the_users_sees_every_operation() -> None:
    x = meta(4, 4)
    with Known():
        x @ x
    with FlopCounterMode(display=False) as count, Known():
        x @ x
    assert count.get_total_flops() == 2 * 4**3


def test_places_of_constants_are_known_and_what_is_gone_takes_no_memory() -> None:
    def places(device: str) -> list[list[int]]:
        x = torch.arange(6, device=device).view(2, 3) % 2
        return [[int(i) for i in place] for place in [x.unique(), *x.nonzero()]]

    with Known() as known, Live(paper=True) as live:
        assert places("meta") == places("cpu")
        assert live.now == 0 and not known.values
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.empty(4, device="meta").nonzero()
