"""The public masks join by ``&``, and what a mask hides has no part in the result."""

import itertools

import pytest
import torch

import shardlib as sl
from shardlib.testing import dense_attention

M = sl.masks
POSITIONS = torch.arange(8)
MASKS = [M.Full(), M.Causal(), M.Window(2, 1), M.Documents((0, 3, 8)), M.Prefix(3)]


def allowed(mask: M.Mask) -> torch.Tensor:
    """Whether query i may see key j, of batch 0 and head 0."""
    q = torch.zeros(1, 1, 8, 1, dtype=torch.float64)
    v = torch.eye(8, dtype=torch.float64)[None, None]
    return dense_attention(q, q, v, mask)[0][0, 0] > 0


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(MASKS, 2)), ids=str)
def test_a_pair_is_seen_through_two_masks_if_both_let_it(a: M.Mask, b: M.Mask) -> None:
    assert torch.equal(allowed(a & b), allowed(a) & allowed(b))
    assert torch.equal(allowed(a & b), allowed(b & a))


def test_causal_and_documents_are_triangles_in_boxes() -> None:
    assert torch.equal(allowed(M.Causal()), torch.ones(8, 8).tril().bool())
    boxes = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).bool()
    assert torch.equal(allowed(M.Documents((0, 3, 8))), boxes)


def test_a_rule_of_ones_own_is_a_mask() -> None:
    mask = M.mask_mod(lambda b, h, q, k: (q - k) % 2 == 0)
    assert torch.equal(allowed(mask), (POSITIONS[:, None] - POSITIONS) % 2 == 0)
