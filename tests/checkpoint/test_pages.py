"""New memory is apart for every tensor, in large pages where there are some, and given back."""

import gc
import mmap

import pytest
import torch

from shardlib.checkpoint.pages import new
from tests.checkpoint.cases import DTYPES

CPU = torch.device("cpu")
SHAPES = [(), (0,), (3,), (300, 100), (1 << 19,), (7, 1 << 16), (1 << 21,), (5, 5)]


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_tensor_has_a_storage_of_its_own(
    dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not large:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    made = new([(shape, dtype, CPU) for shape in SHAPES])
    for i, (x, shape) in enumerate(zip(made, SHAPES, strict=True)):
        assert x.shape == shape and x.dtype == dtype and x.is_contiguous() and not x._is_view()
        assert x.untyped_storage().nbytes() == x.numel() * dtype.itemsize
        assert not x.numel() or x.data_ptr() % dtype.itemsize == 0
        x.view(-1).view(torch.uint8).fill_(i) if x.ndim else x.zero_()
    for i, x in enumerate(made):
        assert not x.ndim or (x.view(-1).view(torch.uint8) == i).all()


def test_meta_tensors_are_made_where_they_lie() -> None:
    x, y = new([((1 << 20,), torch.float32, torch.device("meta")), ((1 << 20,), torch.int8, CPU)])
    assert x.is_meta and y.device == CPU


def held() -> int:
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Anonymous:")) * 1024


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="pages are Linux's")
def test_pages_go_with_their_tensor_and_not_with_the_last() -> None:
    made = [x.fill_(1) for x in new([((1 << 22,), torch.uint8, CPU)] * 8)]
    gc.collect()
    before = held()
    del made[::2]
    assert before - held() > 3 * (1 << 22)
    view = made[0][5:]
    del made
    assert before - held() > 6 * (1 << 22) and view.sum() == (1 << 22) - 5
