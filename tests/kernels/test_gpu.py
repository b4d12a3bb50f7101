"""What a GPU runs: the same properties on the kernels that nvcc built, and operators beside fp64."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.kernels.active import serving
from tests.kernels import properties
from tests.kernels.host import needs_gpu
from tests.kernels.properties import COUNT, PROPERTIES

pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    sl.kernels.build()
    properties.DEVICE[:] = ["cuda"]
    yield
    properties.DEVICE[:] = ["cpu"]


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda f: f.__name__)
def test_kernels_equal_fp64_on_a_gpu(holds: Callable[[int], None]) -> None:
    for seed in range(COUNT):
        holds(seed)


def test_they_serve_without_being_asked() -> None:
    assert serving(torch.ones(2, device="cuda"))
    assert "compiled kernels" in sl.kernels.info()["cuda"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_equal_fp64_on_a_gpu(dtype: torch.dtype) -> None:
    """A world of one: whole rows, on the kernels' way."""
    torch.manual_seed(0)
    x, w, t = torch.randn(64, 1000), torch.randn(1000), torch.randint(0, 1000, (64,))
    x, w = x.to(dtype), w.to(dtype)
    dense = [v.double().requires_grad_() for v in (x, w)]
    want = F.cross_entropy(F.rms_norm(dense[0], (1000,), dense[1], 1e-5), t)
    wants = torch.autograd.grad(want, dense)
    with sl.make_mesh(x=1):
        given = [sl.shard(v, "...").requires_grad_() for v in (x, w)]
        loss = F.cross_entropy(F.rms_norm(given[0], (1000,), given[1], 1e-5), sl.shard(t, "..."))
        grads = torch.autograd.grad(loss, given)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    for got, true in zip((loss, *grads), (want, *wants), strict=True):
        got = sl.unshard(got.detach()).cpu().double()
        assert (got - true).abs().max() <= 4 * eps * true.abs().max()
