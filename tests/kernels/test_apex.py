"""NVIDIA's apex behind the same operations: stand-ins with the documented signatures, run on CPUs."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.kernels import apex as module
from tests.workers import Pool

AMP_C = """
    import torch
    CALLS = []
    WRONG = set()

    def _step(g, m, v, b1, b2, eps, step, bias_correction):
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        one, two = (1 - b1**step, 1 - b2**step) if bias_correction else (1.0, 1.0)
        return (m / one) / ((v / two).sqrt() + eps)

    def multi_tensor_adam(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode,
                          bias_correction, weight_decay):
        assert isinstance(chunk_size, int) and noop_flag.dtype == torch.int and mode == 1
        CALLS.append("adam")
        for g, p, m, v in zip(*tensor_lists, strict=True):
            u = _step(g, m, v, beta1, beta2, epsilon, step, bias_correction) + weight_decay * p
            p.sub_(u, alpha=lr * (2 if "adam" in WRONG else 1))

    def multi_tensor_lamb(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step,
                          bias_correction, weight_decay, grad_averaging, mode, global_grad_norm,
                          max_grad_norm, use_nvlamb_python):
        assert mode == 1 and grad_averaging == 1 and float(global_grad_norm) <= max_grad_norm
        CALLS.append("lamb")
        for g, p, m, v in zip(*tensor_lists, strict=True):
            u = _step(g, m, v, beta1, beta2, epsilon, step, bias_correction) + weight_decay * p
            ratio = 1.0
            if (use_nvlamb_python or weight_decay) and p.norm() > 0 and u.norm() > 0:
                ratio = p.norm() / u.norm()
            p.sub_(u * ratio, alpha=lr)

    def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor_python=None):
        CALLS.append("l2norm")
        each = torch.stack([t.float().norm() for t in tensor_lists[0]])
        return each.norm().reshape(1), each if per_tensor_python else each[:0]
"""
APPLY = """
    class MultiTensorApply:
        available = True
        def __init__(self, chunk_size):
            self.chunk_size = chunk_size
        def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
            return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
    multi_tensor_applier = MultiTensorApply(2048 * 32)
"""
NORMS = """
    import torch.nn.functional as F
    CALLS = []
    def fused_layer_norm(input, normalized_shape, eps=1e-6, memory_efficient=False):
        CALLS.append("layer_norm")
        return F.layer_norm(input, normalized_shape, None, None, eps)
    def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        CALLS.append("layer_norm_affine")
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    def mixed_dtype_fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        CALLS.append("mixed_layer_norm")
        return F.layer_norm(input.to(weight.dtype), normalized_shape, weight, bias, eps)
    def fused_rms_norm(input, normalized_shape, eps=1e-6, memory_efficient=False):
        CALLS.append("rms_norm")
        return F.rms_norm(input, normalized_shape, None, eps)
    def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        CALLS.append("rms_norm_affine")
        return F.rms_norm(input, normalized_shape, weight, eps)
    def mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        CALLS.append("mixed_rms_norm")
        return F.rms_norm(input.to(weight.dtype), normalized_shape, weight, eps)
"""


def forget() -> None:
    for asked in (module.probe, module._checked, module._warn_once):
        asked.cache_clear()
    for name in [n for n in sys.modules if n.split(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, str]], None]]:
    """Write files that python finds before any other, and forget them afterwards."""
    forget()

    def put(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))

    yield put
    forget()


NVIDIAS = {
    "apex/__init__.py": "",
    "apex/multi_tensor_apply/__init__.py": APPLY,
    "apex/optimizers/__init__.py": "",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": NORMS,
    "amp_C.py": AMP_C,
}
OTHERS = {  # the registry's: authentication for a web framework
    "apex/__init__.py": "raise AssertionError('imported')",
    "apex/forms.py": "",
    "apex/views.py": "",
    "apex/lib/__init__.py": "",
    "apex/scaffolds/__init__.py": "",
}


def test_nothing_installed_is_said_once_and_torch_runs() -> None:
    forget()
    if module.probe().kind != "none":
        pytest.skip("an apex is installed here")
    tx, p = sl.optim.adamw(0.1, backend="apex"), {"w": torch.ones(3)}
    with pytest.warns(UserWarning, match="apex is not installed"):
        p, state, _ = sl.optim.step(tx, p, {"w": torch.ones(3)}, tx.init(p))
    p, *_ = sl.optim.step(tx, p, {"w": torch.ones(3)}, state)  # and no second warning
    assert torch.allclose(p["w"], torch.full((3,), 0.8), atol=2e-3)
    assert sl.kernels.info()["apex"] == "not installed"
    forget()


def test_the_other_package_of_that_name_is_named_and_never_imported(
    install: Callable[[dict[str, str]], None],
) -> None:
    install(OTHERS)
    assert module.probe().kind == "other" and "not NVIDIA's" in sl.kernels.info()["apex"]
    with (
        pytest.warns(UserWarning, match="wants NVIDIA's apex, and .* is not NVIDIA's"),
        sl.kernels.use("apex"),
    ):
        assert module.apex("adam", torch.ones(2)) is None
    assert "apex" not in sys.modules


def test_extensions_that_were_not_built_are_named(
    install: Callable[[dict[str, str]], None],
) -> None:
    install({k: v for k, v in NVIDIAS.items() if k != "amp_C.py"})
    assert "without its extensions" in sl.kernels.info()["apex"]
    with pytest.warns(UserWarning, match="apex has no adam"), sl.kernels.use("apex"):
        assert module.apex("adam", torch.ones(2)) is None


def test_a_function_that_is_missing_is_named(install: Callable[[dict[str, str]], None]) -> None:
    install(NVIDIAS | {"amp_C.py": "def multi_tensor_adam(): ..."})
    with pytest.warns(UserWarning, match="amp_C lacks multi_tensor_lamb"), sl.kernels.use("apex"):
        assert module.apex("lamb", torch.ones(2)) is None


def test_a_function_of_another_signature_is_not_used(
    install: Callable[[dict[str, str]], None],
) -> None:
    install(NVIDIAS | {"amp_C.py": "def multi_tensor_adam(lr): ..."})
    told = "adam is not used for torch.float32 on cpu: it raises TypeError"
    with pytest.warns(UserWarning, match=told), sl.kernels.use("apex"):
        assert module.apex("adam", torch.ones(2)) is None


def test_a_function_that_computes_something_else_is_not_used(
    install: Callable[[dict[str, str]], None],
) -> None:
    install(NVIDIAS)
    import amp_C  # type: ignore[import-not-found]

    amp_C.WRONG.add("adam")
    with (
        pytest.warns(UserWarning, match="adam is not used .* it is off by"),
        sl.kernels.use("apex"),
    ):
        assert module.apex("adam", torch.ones(2)) is None
        assert module.apex("lamb", torch.ones(2)) is not None


def test_it_is_used_only_where_it_is_chosen(install: Callable[[dict[str, str]], None]) -> None:
    install(NVIDIAS)
    assert module.apex("adam", torch.ones(2)) is None
    with sl.kernels.use("native"):
        assert module.apex("adam", torch.ones(2)) is None
    assert "inside sl.kernels.use('apex')" in sl.kernels.info()["apex"]
    assert "amp_C" not in sys.modules


def steps(make: Callable[..., sl.optim.Transform], layout: str, backend: str) -> torch.Tensor:
    torch.manual_seed(0)
    w = {"w": sl.shard(torch.randn(4, 6), layout), "b": sl.shard(torch.randn(5), ".")}
    tx = sl.optim.chain(
        sl.optim.clip_by_global_norm(1.0, backend=backend),
        make(0.1, weight_decay=0.1, backend=backend),
    )
    state = tx.init(w)
    for i in range(3):
        g = torch.Generator().manual_seed(i)
        grads = {
            "w": sl.shard(torch.randn(4, 6, generator=g), layout),
            "b": sl.shard(torch.randn(5, generator=g), "."),
        }
        w, state, _ = sl.optim.step(tx, w, grads, state)
    return torch.cat([sl.unshard(w["w"]).flatten(), sl.unshard(w["b"])])


@pytest.mark.parametrize(
    ("make", "layout", "used"),
    [
        (sl.optim.adamw, "x .", {"adam", "l2norm"}),
        (sl.optim.adamw, ". .", {"adam", "l2norm"}),
        (sl.optim.lamb, ". .", {"lamb", "l2norm"}),
        (sl.optim.lamb, "x .", {"l2norm"}),  # a tensor's norm is that of all its parts
    ],
)
def test_optimizers_step_by_it(
    make: Callable[..., sl.optim.Transform],
    layout: str,
    used: set[str],
    install: Callable[[dict[str, str]], None],
) -> None:
    install(NVIDIAS)
    with sl.simulate(x=2):
        want = steps(make, layout, "eager")
        with sl.kernels.use("apex"):
            module.apex("adam", torch.ones(2)), module.apex("lamb", torch.ones(2))
            module.apex("l2norm", torch.ones(2))
        import amp_C  # type: ignore[import-not-found]

        amp_C.CALLS.clear()
        got = steps(make, layout, "apex")
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    assert set(amp_C.CALLS) == used


def test_under_zero_adam_steps_by_it(install: Callable[[dict[str, str]], None]) -> None:
    install(NVIDIAS)
    found = []
    for backend in ("eager", "apex"):
        with sl.simulate(data=2):
            p = {"w": sl.shard(torch.linspace(-1, 1, 9), ".")}
            tx = sl.optim.zero(sl.optim.adamw(0.1, backend=backend), "data")  # type: ignore[arg-type]
            state = tx.init(p)
            for _ in range(2):
                _, g = sl.value_and_grad(lambda q: (q["w"] ** 2).sum(), into=tx)(p)
                p, state, _ = sl.optim.step(tx, p, g, state)
            found.append(sl.unshard(p["w"]))
    import amp_C  # type: ignore[import-not-found]

    assert torch.allclose(*found, atol=1e-6) and "adam" in amp_C.CALLS


def normed(folder: str, op: str, factors: int, half: bool) -> tuple[list[str], bool]:
    """On a real rank, which holds its rows as they are: what ran, and whether it is torch's result."""
    sys.path.insert(0, folder)
    forget()
    try:
        dtype = torch.bfloat16 if half else torch.float32
        torch.manual_seed(0)
        every = torch.randn(4, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(8).to(dtype)
        found, calls = [], []
        for backend in ("eager", "apex"):
            given = [
                sl.shard(t, at).requires_grad_()
                for t, at in zip(every, ["x .", ".", "."], strict=True)
            ]
            given = given[: 1 + factors]
            with sl.kernels.use(backend):
                if backend == "apex":
                    module.apex(op, every[0])
                    from apex.normalization import fused_layer_norm  # type: ignore[import-not-found]

                    calls = fused_layer_norm.CALLS
                    calls.clear()
                y = getattr(F, op)(given[0], (8,), *given[1:], eps=1e-5)
                grads = torch.autograd.grad(y.float().pow(2).sum(), given)
            found.append([sl.unshard(t.detach()) for t in (y, *grads)])
        same = all(
            a.dtype == b.dtype == dtype
            and torch.allclose(
                a.float(), b.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-2 if half else 1e-5
            )
            for a, b in zip(*found, strict=True)
        )
        return list(calls), same
    finally:
        sys.path.remove(folder)
        forget()


@pytest.mark.parametrize(
    ("op", "factors", "half", "called"),
    [
        ("layer_norm", 2, False, ["layer_norm_affine"]),
        ("layer_norm", 2, True, ["mixed_layer_norm"]),
        ("layer_norm", 0, True, ["layer_norm"]),
        ("layer_norm", 1, False, []),
        ("rms_norm", 1, False, ["rms_norm_affine"]),
        ("rms_norm", 1, True, ["mixed_rms_norm"]),
        ("rms_norm", 0, False, ["rms_norm"]),
    ],
)
def test_norms_of_whole_rows_run_by_it(
    op: str, factors: int, half: bool, called: list[str], pool: Pool, tmp_path: Path
) -> None:
    for name, text in NVIDIAS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    assert pool.run(normed, str(tmp_path), op, factors, half, x=4) == [(called, True)] * 4
