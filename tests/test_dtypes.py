import torch

from shardlib.dtypes import HALF, is_half, wide, wider


def test_halves_are_summed_in_fp32_and_all_others_as_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32):
        x = torch.ones(2, dtype=dtype)
        half = dtype.itemsize == 2
        assert is_half(x) == (dtype in HALF) == half
        assert wide(x).dtype == wider(dtype) == (torch.float32 if half else dtype)
        assert half or wide(x) is x
