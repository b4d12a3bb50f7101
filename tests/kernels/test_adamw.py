"""AdamW in one pass by the kernel: as torch's, with the master, the half and the scale in passing."""

import pytest
import torch

import shardlib as sl
from shardlib.kernels.active import Backend
from shardlib.kernels.adamw import adamw_, adamw_halves_
from tests.kernels import properties
from tests.kernels.host import built, check_operator, needs_host
from tests.kernels.properties import COUNT, TYPES


@needs_host
def test_kernels_equal_fp64() -> None:
    assert built()
    for seed in range(COUNT):
        properties.adamw(seed)
        if seed < 8:
            properties.halves(seed)
            properties.many_tensors(seed)


HOW = 1e-2, 0.9, 0.999, 1e-8, 0.1


@pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=needs_host)])
@pytest.mark.parametrize("dtype", TYPES)
def test_operators_are_torchs(backend: Backend, dtype: torch.dtype) -> None:
    assert backend == "auto" or built()
    torch.manual_seed(0)
    g, p, m, v = (torch.rand(37) for _ in range(4))
    g, scale = g.to(dtype), torch.tensor([2.0])
    out = torch.zeros(37, dtype=dtype if dtype != torch.float32 else torch.bfloat16)
    from shardlib.optim.precision import halves

    half, low = halves(p)
    with sl.kernels.use(backend):
        check_operator(
            adamw_, ([g], [p], [m], [v], [out], scale, (*HOW, 3)), dtype == torch.float32
        )
        if dtype != torch.float16:
            check_operator(adamw_halves_, ([g], [half], [low], [m], [v], None, (*HOW, 3)))


@needs_host
@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_ten_steps_are_torchs(b2: float) -> None:
    assert built()
    torch.manual_seed(0)
    p = torch.randn(4097)
    q = p.clone().requires_grad_()
    optimizer = torch.optim.AdamW([q], lr=1e-2, betas=(0.9, b2), weight_decay=0.1, foreach=False)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    out = torch.zeros(4097, dtype=torch.bfloat16)
    with sl.kernels.use("native"):
        for t in range(1, 11):
            q.grad = torch.randn(4097)
            optimizer.step()
            hyper = 1e-2, 0.9, b2, 1e-8, 0.1, t
            adamw_([q.grad * 3], [p], [m], [v], [out], torch.tensor([3.0]), hyper)
    assert (p - q.detach()).abs().max() < 1e-6 and torch.equal(out, p.bfloat16())


@needs_host
def test_a_master_in_halves_is_a_master() -> None:
    """The same fp32 numbers after every step, bit for bit."""
    assert built()
    from shardlib.optim.precision import halves, joined

    torch.manual_seed(0)
    p = torch.randn(1003)
    high, low = halves(p)
    m, v, m2, v2 = (torch.zeros(1003) for _ in range(4))
    with sl.kernels.use("native"):
        for t in range(1, 6):
            g = torch.randn(1003).bfloat16()
            adamw_([g], [p], [m], [v], [], None, (*HOW, t))
            adamw_halves_([g], [high], [low], [m2], [v2], None, (*HOW, t))
            assert torch.equal(joined(high, low), p) and torch.equal(m, m2) and torch.equal(v, v2)


@needs_host
def test_a_step_does_not_depend_on_where_a_shard_is_cut() -> None:
    assert built()
    torch.manual_seed(0)
    whole = [torch.rand(1000) for _ in range(4)]
    parts = [t.clone() for t in whole]
    with sl.kernels.use("native"):
        adamw_(*([t] for t in whole), [], None, (*HOW, 2))
        for a, b in ((0, 3), (3, 500), (500, 501), (501, 1000)):
            adamw_(*([t[a:b]] for t in parts), [], None, (*HOW, 2))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def trained(
    backend: Backend, dtype: torch.dtype, master: str | None, stage: int, wrap: bool = True
) -> list[torch.Tensor]:
    """Parameters and first moments after four clipped, scaled steps on a mesh of two by two."""
    torch.manual_seed(0)
    start = {"w": torch.randn(12, 6).to(dtype), "b": torch.randn(7).to(dtype)}
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(0.1, weight_decay=0.1))
    tx = sl.optim.loss_scale(tx, start=8.0) if wrap else tx
    if stage:
        tx = sl.optim.zero(tx, "x", stage=stage, master=master)
    params = {k: sl.shard(v, "y ." if k == "w" else ".") for k, v in start.items()}
    state = tx.init(params)
    with sl.kernels.use(backend):
        for i in range(4):
            x = torch.randn(8, 1, 1, generator=torch.Generator().manual_seed(i)).to(dtype)
            data = sl.shard(x, "x . .")

            def loss(p: dict[str, torch.Tensor], x: torch.Tensor = data) -> torch.Tensor:
                return ((x * p["w"]).float().pow(2).sum() + p["b"].float().pow(3).sum()) * 8

            _, grads = sl.value_and_grad(loss, into=tx if stage else None)(params)
            params, state, info = sl.optim.step(tx, params, grads, state)
            assert not info.skipped and info.lr == 0.1
    return [sl.unshard(params[k]) for k in ("w", "b")]


@needs_host
@pytest.mark.parametrize(
    ("stage", "master"),
    [(0, None), *((s, m) for s in (1, 2) for m in (None, "fp32", "bf16+rem"))],
)
def test_optimizers_step_by_the_kernel(
    stage: int, master: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As eagerly, to the rounding of fp32; with a master the halves are written in the same pass."""
    assert built()
    from shardlib.kernels import adamw as module

    used = []
    real = module.call
    monkeypatch.setattr(
        module, "call", lambda name, *a: (used.append((name, a[1])), real(name, *a))
    )
    dtype = torch.bfloat16 if master else torch.float32
    with sl.simulate(x=2, y=2):
        got = trained("native", dtype, master, stage)
        want = trained("eager", dtype, master, stage)
    for a, b in zip(got, want, strict=True):
        eps = torch.finfo(dtype).eps
        assert torch.allclose(a.float(), b.float(), rtol=2 * eps, atol=2e-6)
    wanted = "adamw_halves" if master == "bf16+rem" else "adamw"
    assert len(used) == 4 and {name for name, _ in used} == {wanted}
    assert wanted == "adamw_halves" or {beside for _, beside in used} == {2 if master else 0}


@needs_host
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_is_the_unsharded_step(stage: int) -> None:
    assert built()
    with sl.simulate(x=2, y=2):
        want = trained("native", torch.float32, None, 0, wrap=False)
        got = trained("native", torch.float32, None, stage, wrap=False)
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(got, want, strict=True))
