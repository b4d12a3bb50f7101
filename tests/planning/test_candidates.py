"""The layouts that a plan weighs are those that divide."""

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.planning.calls import calls_of
from shardlib.planning.candidates import Candidates, side_by_side


def of(module: nn.Module, rows: Any, groups: Any = (), **mesh: int) -> Candidates:
    step = calls_of(module, (rows,), lambda apply, params, x: apply(params, x).sum())
    with sl.record(**mesh) as m:
        return Candidates(step, m, dict(module.named_parameters()), dict(groups))


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (6, 3), (3, 1)])
def test_rows_are_split_over_the_axes_that_divide_them(rows: int, count: int) -> None:
    found = of(nn.Linear(4, 8), torch.empty(rows, 4), x=2, y=2)
    assert len(found.batches(rows)) == count


@pytest.mark.parametrize(
    ("rows", "length", "count"), [(8, 32, 0), (2, 32, 3), (2, 4, 1), (1, 32, 2)]
)
def test_sequences_are_split_where_rows_are_fewer_than_ranks(
    rows: int, length: int, count: int
) -> None:
    tokens = torch.zeros(rows, length, dtype=torch.long)
    found = of(nn.Embedding(4, 8), tokens, x=2, y=4)
    split = [b for b in found.batches(rows, [tokens]) if "zigzag" in b]
    assert len(split) == count and split == [b for b in split if found.inputs(b, [tokens])]
    # of what is no sequence of tokens
    assert not [b for b in found.batches(rows, [torch.empty(rows, length)]) if "zigzag" in b]


def test_each_axis_is_on_one_side_of_a_matrix_or_on_none() -> None:
    found = of(nn.Linear(4, 8), torch.empty(8, 4), x=2, y=2).matrices("weight")
    assert len(set(found)) == 9 and "(x y) ." in found and "x y" in found


def test_matrices_side_by_side_are_split_each() -> None:
    found = of(nn.Linear(4, 12), torch.empty(8, 4), [(("weight", 0), 3)], x=2)
    assert found.matrices("weight") == [". .", "(3 x) .", ". x"]


def test_what_does_not_divide_is_no_candidate_but_a_vocabulary() -> None:
    assert of(nn.Linear(4, 7), torch.empty(8, 4), x=2).leaf("weight", "x .") is None
    found = of(nn.Linear(4, 8193), torch.empty(8, 4), x=2).leaf("weight", "x .")
    assert found is not None and found.operand.size == (4097, 4)


def test_side_by_side_is_what_the_recipe_reads() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    found = side_by_side(transformers.GPT2LMHeadModel(config))
    assert found["transformer.h.0.attn.c_attn.weight", 1] == 3
