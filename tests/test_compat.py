"""An import changes nothing of torch, the first mesh what a page lists; torch.compile stays right."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib import _compat
from shardlib._compat import PATCHES

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
RULES = [
    ("*a.weight", "x ."),
    ("*a.bias", "x"),
    ("*n.*", "x"),
    ("*b.weight", ". x"),
    ("*b.bias", "."),
]

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, h: Tensor) -> Tensor:
        return self.b(F.gelu(self.n(self.a(h))))


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def compiled(backend: str, few: bool = False) -> list[str]:
    """Compiled forms whose values or gradients are not dense, on the mesh in scope."""
    wrong = []

    def c(f: Any) -> Any:
        return torch.compile(f, backend=backend)

    def same(what: str, got: Any, want: Tensor) -> None:
        if not float((sl.unshard(got) - want).detach().abs().max()) < 1e-10:
            wrong.append(what)

    x = sl.shard(X, "x .")
    forms: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "softmax": (lambda z: z.softmax(-1), X.softmax(-1)),
        "sum": (lambda z: (z * 2).sum(), (X * 2).sum()),
        "layer_norm": (lambda z: F.layer_norm(z, (6,)), F.layer_norm(X, (6,))),
        "product": (lambda z: z @ z.T, X @ X.T),
        "closure": (lambda _: (x * 3).exp(), (X * 3).exp()),
        "shard_map": (
            sl.shard_map(
                lambda v: v.exp() * sl.psum(v.sum(0), "x"), in_layouts="x .", out_layouts="x ."
            ),
            X.exp() * X.sum(0),
        ),
    }
    for name, (f, want) in list(forms.items())[-3 if few else 0 :]:
        same(name, c(f)(x), want)
    same("placing inside", c(lambda z: sl.shard(z, "x .").exp())(X), X.exp())
    dense = net()
    (dense(X) ** 2).sum().backward()

    def grads(what: str, apply: Any, params: Any) -> None:
        same(what, apply(params, X), dense(X))
        found = sl.grad(lambda p: (apply(p, X) ** 2).sum())(params)
        for (_, g), p in zip(found.items(), dense.parameters(), strict=True):
            same(f"{what}: gradient", g, p.grad)  # type: ignore[arg-type]

    apply, params = sl.parallelize(net(), RULES, inputs={"h": "data ."})
    grads("compiled apply", c(apply), params)
    if few:
        return wrong
    inner = net()
    inner.n = c(inner.n)
    grads("compiled submodule", *sl.parallelize(inner, RULES, inputs={"h": "data ."}))
    grads("compiled module", *sl.parallelize(c(net()), RULES, inputs={"h": "data ."}))
    itself = net()
    itself.compile(backend=backend)
    grads("module.compile()", *sl.parallelize(itself, RULES, inputs={"h": "data ."}))
    return wrong


def test_compiled_functions_and_modules_are_right(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        assert compiled("eager") == []
    assert pool.run(compiled, "aot_eager", True, data=2, x=2, seconds=200.0) == [[]] * 4


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Any:
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_plain_functions_still_compile_whole() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, x = CompileCounter(), X.clone().requires_grad_()
    torch.compile(lambda a: Square.apply(a).sum(), backend=counter, fullgraph=True)(x).backward()
    assert counter.frame_count == 1 and torch.allclose(x.grad, 2 * X)


ROOT = Path(__file__).parents[1]


def changed(off: str = "") -> tuple[list[str], list[str]]:
    """What the import of shardlib changes of torch, and then its first mesh."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch_attributes"],
        env={**os.environ, "SHARDLIB_UNPATCHED": off, "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported, used = map(ast.literal_eval, done.stdout.splitlines())
    return imported, used


def test_an_import_changes_nothing_of_torch_and_the_first_mesh_what_the_page_lists() -> None:
    imported, used = changed()
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page.partition("changed in torch")[2], re.M)
    assert imported == [] and {name for name, _ in rows} == {*PATCHES}
    listed = {name for _, row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert {*used} <= listed and len(used) >= 12, {*used} ^ listed


def test_what_is_switched_off_is_not_changed() -> None:
    assert changed(",".join(PATCHES)) == ([], [])


def test_a_switch_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_UNPATCHED", "seed")
    monkeypatch.setattr("shardlib._compat._INSTALLED", set[str]())
    with pytest.raises(sl.errors.BadArgument, match="SHARDLIB_UNPATCHED names seed, of seeds, "):
        sl.simulate(x=2)


class Held(_compat._AtEnd):
    """Callbacks that stay alive, as they do for a moment where a thread of the device ran the pass."""

    alive: ClassVar[list["Held"]] = []

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.alive.append(self)


def heard(device: torch.device, raises: str) -> list[str]:
    """What a backward pass calls when it ends, or raises in a node or in a callback."""
    said: list[str] = []

    def ended() -> None:
        said.append("ended")
        if raises == "callback":
            raise ValueError("mine")

    def hook(_: Any) -> None:
        _compat.after_backward(ended, lambda: said.append("failed"))
        if raises == "node":
            raise ValueError("mine")

    with sl.simulate(x=2, device=device):
        x = torch.ones(3, device=device, requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        try:
            y.sum().backward()
            said.append("no error")
        except ValueError:
            said.append("error")
    while Held.alive:
        Held.alive.pop()
    return said


def test_a_backward_that_raises_has_ended_its_callbacks_when_its_caller_hears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_compat, "_AtEnd", Held)
    device = torch.get_default_device()
    assert heard(device, "") == ["ended", "no error"]
    assert heard(device, "node") == ["failed", "error"]
    assert heard(device, "callback") == ["ended", "failed", "error"]
