"""The kernels' sources compiled by g++: the same loops, heads and tails, run lane after lane."""

import functools
import shutil
import warnings
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.kernels.library import library

GXX = shutil.which("g++") is not None
needs_host = pytest.mark.skipif(
    not GXX, reason="g++ is not here: the kernels cannot run on the CPU"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@functools.cache
def built() -> bool:
    """Compile them once into the user's cache, and load them."""
    sl.kernels.build("host")
    return library(torch.device("cpu")) is not None


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def check_operator(op: Any, args: tuple[Any, ...], compiled: bool = False) -> None:
    """Hold a custom operator to torch's rules; ``compiled``: also what torch.compile makes of it."""
    more = ("test_aot_dispatch_dynamic",) if compiled else ()
    with warnings.catch_warnings():
        # torch 2.15 reads .grad of views there, and hides the warning only where it is no error
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        torch.library.opcheck(op, args, test_utils=(*QUICK, *more))
