"""Cross entropy by kernels: as torch's, wherever the rows and classes lie."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.kernels.active import Backend
from shardlib.kernels.loss import ce_back, ce_back_, ce_loss, ce_stats, row_loss
from tests.kernels.host import built, check_operator, needs_host
from tests.kernels.properties import COUNT, TYPES, cross_entropy, cross_entropy_of_no_class
from tests.workers import Pool


@needs_host
def test_kernels_equal_fp64() -> None:
    assert built()
    for seed in range(COUNT):
        cross_entropy(seed)
        cross_entropy_of_no_class(seed)


@pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=needs_host)])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_operators_are_torchs(backend: Backend, dtype: torch.dtype) -> None:
    """Schema, fake, gradient and what torch.compile sees of them; fp64 goes the eager way."""
    assert backend == "auto" or built()
    torch.manual_seed(0)
    x, t = torch.randn(5, 33).to(dtype).requires_grad_(), torch.tensor([0, 32, -100, 7, 9])
    with sl.kernels.use(backend):
        check_operator(row_loss, (x, t, -100, 0.1), dtype == torch.float32)
        y = x.detach()
        parts = ce_stats(y, t, 33, 0)
        check_operator(ce_stats, (y, t, 30, 3))
        check_operator(ce_loss, (parts[None], t, -100, 0.1, 33))
        kept = ce_loss(parts[None], t, -100, 0.0, 33)[1]
        how = (t, kept, torch.ones(5), 33, 0, -100, 0.1, 33)
        check_operator(ce_back, (y, *how))
        check_operator(ce_back_, (y.clone(), *how))
        loss = row_loss(x, t, -100, 0.1)[0]
        (dx,) = torch.autograd.grad(loss.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(loss.sum(), x)
    assert torch.equal(dx, again)
    z = x.detach().double().requires_grad_()
    want = F.cross_entropy(z, t, reduction="none", label_smoothing=0.1)
    (dz,) = torch.autograd.grad(want.sum(), z)
    assert torch.allclose(loss.double(), want, rtol=2e-6, atol=2e-6)
    assert torch.allclose(dx.double(), dz, atol=2 * torch.finfo(dtype).eps, rtol=1e-2)


CASES = [  # layout of the logits, of the targets, classes
    (". y", ".", 32),
    ("x y", "x", 32),
    ("x (y z)", "x", 32),
    ("(x z) .", "(x z)", 32),
    ("x y", "x", 30),  # the last two are padding
]


def losses(layouts: tuple[str, str, int], backend: Backend, half: bool, **how: float):
    """Loss and gradient of eight rows, on the mesh in force."""
    of_x, of_t, classes = layouts
    torch.manual_seed(1)
    x, t = torch.randn(8, classes), torch.randint(0, classes, (8,))
    t[3] = -100
    x = x.bfloat16() if half else x
    a = sl.shard(x, of_x, pad=True).requires_grad_()
    with sl.kernels.use(backend), sl.trace() as moved:
        loss = F.cross_entropy(a, sl.shard(t, of_t), **how)
        (g,) = torch.autograd.grad(loss, a)
    kinds = [e.kind for e in moved.events if e.axis != "x"]
    return sl.unshard(loss.detach()), sl.unshard(g), a, kinds, (x, t)


@needs_host
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("smooth", [0.0, 0.2])
@pytest.mark.parametrize("layouts", CASES, ids=str)
def test_split_rows_equal_dense(layouts: tuple[str, str, int], smooth: float, half: bool) -> None:
    assert built()
    with sl.simulate(x=2, y=2, z=2):
        loss, g, _, _, (x, t) = losses(layouts, "native", half, label_smoothing=smooth)
        eager, *_ = losses(layouts, "eager", half, label_smoothing=smooth)
    dense = x.double().requires_grad_()
    want = F.cross_entropy(dense, t, label_smoothing=smooth)
    (dx,) = torch.autograd.grad(want, dense)
    eps = torch.finfo(x.dtype).eps
    assert loss.dtype == g.dtype == x.dtype
    assert torch.allclose(loss.double(), want, rtol=2 * eps)
    assert torch.allclose(g.double(), dx, rtol=eps, atol=2e-7)
    assert torch.allclose(loss, eager, rtol=2 * eps)


@needs_host
def test_one_collective_lies_between_statistics_and_loss() -> None:
    assert built()
    with sl.simulate(x=2, y=2, z=2):
        *_, kinds, _ = losses((". y", ".", 32), "native", False, reduction="sum")
    assert kinds == ["all_gather"], kinds


@needs_host
def test_logits_are_as_they_were_and_backward_runs_twice() -> None:
    assert built()
    with sl.simulate(y=2), sl.kernels.use("native"):
        x = torch.randn(4, 8)
        a = sl.shard(x, ". y").requires_grad_()
        loss = F.cross_entropy(a, sl.shard(torch.arange(4), "."))
        (one,) = torch.autograd.grad(loss, a, retain_graph=True)
        (two,) = torch.autograd.grad(loss, a)
    assert torch.equal(sl.unshard(one), sl.unshard(two)) and torch.equal(sl.unshard(a), x)


@needs_host
def test_second_derivatives_equal_dense() -> None:
    assert built()
    x, t, v = torch.randn(4, 8), torch.arange(4), torch.randn(4, 8)

    def twice(a: torch.Tensor, labels: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(F.cross_entropy(a, labels), a, create_graph=True)
        return torch.autograd.grad((g * w).sum(), a)[0]

    want = twice(x.clone().requires_grad_(), t, v)
    with sl.simulate(y=2), sl.kernels.use("native"):
        a = sl.shard(x, ". y").requires_grad_()
        got = twice(a, sl.shard(t, "."), sl.shard(v, ". y"))
    assert torch.allclose(sl.unshard(got), want, atol=1e-6)


@needs_host
@pytest.mark.parametrize("classes", [16, 13])
def test_linear_cross_entropy_gives_its_logits_up(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert built()
    from shardlib.ops import loss as module

    used = []
    monkeypatch.setattr(module, "ce_back_", lambda *a: used.append(1) or ce_back_(*a))
    x, w, t = torch.randn(6, 4), torch.randn(classes, 4), torch.randint(0, classes, (6,))
    d = [x.double().requires_grad_(), w.double().requires_grad_()]
    want = F.cross_entropy(d[0] @ d[1].T, t)
    grads = torch.autograd.grad(want, d)
    with sl.simulate(data=2, y=2), sl.kernels.use("native"):
        a, b = sl.shard(x, "data ."), sl.shard(w, "y .", pad=True)
        a.requires_grad_(), b.requires_grad_()
        loss = sl.linear_cross_entropy(a, b, t, chunks=3)
        got = torch.autograd.grad(loss, [a, b])
    assert used
    assert torch.allclose(sl.unshard(loss).double(), want, rtol=1e-6)
    for one, two in zip(got, grads, strict=True):
        assert torch.allclose(sl.unshard(one).double(), two, rtol=1e-5, atol=1e-6)


def on_a_rank(layouts: tuple[str, str, int]):
    built()
    loss, g, *_ = losses(layouts, "native", True)
    return loss, g


@needs_host
@pytest.mark.parametrize("layouts", [CASES[1], CASES[4]], ids=str)
def test_real_ranks_give_the_bits_of_simulated_ones(
    layouts: tuple[str, str, int], pool: Pool
) -> None:
    with sl.simulate(x=2, y=2):
        want = on_a_rank(layouts)
    for got in pool.run(on_a_rank, layouts, x=2, y=2):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@needs_host
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_rows_may_lie_in_any_way_and_dtype(dtype: torch.dtype) -> None:
    """Every other element of a buffer, or one for all: as the formula has it."""
    assert built()
    torch.manual_seed(0)
    x, t = torch.randn(5, 9), torch.randint(0, 9, (5,))
    kept = torch.ops.shardlib.row_loss(x, t, -100, 0.0)[1]
    wide = torch.empty(5, 4).copy_(torch.cat([kept, kept], 1))[:, :2]
    for g in (torch.randn(10).to(dtype)[::2], torch.randn(1).to(dtype).expand(5)):
        with sl.kernels.use("eager"):
            want = torch.ops.shardlib.ce_back(x, t, kept, g.to(torch.float32), 9, 0, -100, 0.0, 9)
        with sl.kernels.use("native"):
            got = torch.ops.shardlib.ce_back(x, t, wide, g, 9, 0, -100, 0.0, 9)
        assert torch.allclose(got, want, atol=1e-6)
