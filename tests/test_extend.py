"""An algorithm written outside the library is as good as one within, whenever it is registered."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.ops import registry

PAGE = (Path(__file__).parent.parent / "docs" / "writing_an_algorithm.md").read_text()
BLOCK, MASK, LAYOUT, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.S)
SMALL: list[dict[str, int]] = [{"x": 2}, {"x": 2, "y": 2}]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results() -> dict[str, tuple[str, str, int]]:
    """What is chosen for every pair of layouts on 2 x 2, where the result lies, and the bytes."""
    found = {}
    texts = [". .", "x .", ". x", "y .", "x y", "y x", "(x y) ."]
    with sl.simulate(x=2, y=2):
        for left in texts:
            for right in texts:
                a, b = sl.shard(torch.ones(8, 8), left), sl.shard(torch.ones(8, 8), right)
                try:
                    with sl.trace() as t:
                        c = a @ b
                except sl.ShardError:
                    continue
                assert torch.equal(sl.unshard(c), torch.full((8, 8), 8.0))
                found[f"{left} @ {right}"] = sl.why("matmul", a, b).chosen, sl.typeof(c), t.bytes
    return found


def test_the_page_s_algorithm_runs_and_keeps_the_laws(
    untouched: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "panel_by_panel.py"
    path.write_text(BLOCK)
    load(path)
    printed = capsys.readouterr().out
    assert "f32[12@x, 24] @ f32[24@x, 36] on x=2 y=2" in printed
    code = BLOCK[BLOCK.index("@dataclass") : BLOCK.index("print(")]
    assert len([line for line in code.splitlines() if line.strip()]) <= 35


@pytest.mark.parametrize("first", [True, False])
def test_registered_before_or_after_the_others_the_results_are_the_same(
    first: bool, untouched: None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BLOCK[: BLOCK.index("print(")])
    without = results()
    load(path)
    after = results()
    assert {k: v for k, v in after.items() if k in without} != {} and set(after) >= set(without)
    if first:
        others = [a for a in registry._ALGORITHMS["matmul"] if a.name != "panel_by_panel"]
        registry._ALGORITHMS["matmul"] = []
        load(path)
        for a in reversed(others):
            sl.extend.algorithm("matmul", a.name, a.order)(a.match)
    assert results() == after
    assert [a.name for a in registry._ALGORITHMS["matmul"]][-1] == "panel_by_panel"
    assert len(sl.testing.check_algorithm("matmul", "panel_by_panel", SMALL)) == 7


def test_every_schedule_is_one() -> None:
    with sl.simulate(x=2, y=2):
        a, b = sl.shard(torch.ones(8, 8), "x y"), sl.shard(torch.ones(8, 8), "y x")
        found: dict[str, Any] = dict(sl.why("matmul", a, a).verdicts) | dict(
            sl.why("matmul", a, b).verdicts
        )
    runs = [m.run for m in found.values() if isinstance(m, sl.extend.Match)]
    assert len(runs) >= 3 and all(isinstance(run, sl.extend.Schedule) for run in runs)


@torch.library.custom_op("shardlib_tests::centred", mutates_args=())
def centred(x: torch.Tensor, dim: int, weight: torch.Tensor) -> torch.Tensor:
    """An operator of a user: rows less their means, times a weight that broadcasts."""
    return (x - x.mean(dim, keepdim=True)) * weight


@torch.library.custom_op("shardlib_tests::doubled_", mutates_args=("x",))
def doubled_(x: torch.Tensor) -> None:
    x.mul_(2)


def _gradient(ctx: Any, g: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    dx = (g * weight) - (g * weight).mean(ctx.dim, keepdim=True)
    return dx, None, (g * (x - x.mean(ctx.dim, keepdim=True))).sum_to_size(weight.shape)


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(inputs[0], inputs[2])


centred.register_fake(lambda x, dim, weight: torch.empty_like(x))
centred.register_autograd(_gradient, setup_context=_saved)
sl.extend.operator(sl.extend.OpSpec("shardlib_tests::centred(x, dim, weight)", "along"))
FORMS = [centred, torch.ops.shardlib_tests.centred, torch.ops.shardlib_tests.centred.default]


@pytest.mark.parametrize("call", FORMS, ids=["custom_op", "packet", "overload"])
@pytest.mark.parametrize("size", [6, 5])  # 5: the last block is padded
def test_a_declared_operator_equals_dense_with_its_gradients(call: Any, size: int) -> None:
    x, w = (torch.randn(size, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    c = torch.randn(size, 4, dtype=torch.float64)
    want = centred(x, 1, w)
    (want * c).sum().backward()
    with sl.simulate(x=2, y=2) as mesh:
        a, b, d = (sl.shard(t.detach(), "x .", mesh, pad=True) for t in (x, w, c))
        a, b = a.requires_grad_(), b.requires_grad_()
        with sl.trace() as t:
            got = call(a, 1, b)
        (got * d).sum().backward()
        assert t.bytes == 0 and str(sl.layout_of(got)) == "x ."
        for mine, dense in ((got, want), (a.grad, x.grad), (b.grad, w.grad)):
            assert torch.allclose(sl.unshard(mine), dense, rtol=1e-12)


def test_a_declared_operator_refuses_what_its_kind_needs_whole() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.randn(4, 6), ". x")
        with pytest.raises(sl.errors.ImplicitCommunication) as e:
            centred(x, 1, x)
        y = x
        got = eval(e.value.fix, {"torch": torch, "sl": sl, "x": x, "y": y})
        whole = sl.unshard(x)
        assert torch.equal(sl.unshard(got), centred(whole, 1, whole))


def test_a_declared_operator_is_cast_as_it_says() -> None:
    @torch.library.custom_op("shardlib_tests::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    halved.register_fake(lambda x: torch.empty_like(x))
    sl.extend.operator(sl.extend.OpSpec("shardlib_tests::halved", "pointwise", cast="lower"))
    with sl.simulate(x=2), torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert halved(sl.shard(torch.ones(4), "x")).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (sl.extend.OpSpec("shardlib_tests::none", "rows"), "no operator"),
        (sl.extend.OpSpec("sin", "rows"), "no operator of torch.library"),
        (sl.extend.OpSpec("shardlib_tests::centred", "own"), "kind 'own' is none of 'pointwise'"),
        (sl.extend.OpSpec("shardlib_tests::doubled_", "rows"), "writes to an operand"),
        (sl.extend.OpSpec("shardlib_tests::centred", "rows"), "declared already"),
    ],
)
def test_a_record_that_cannot_hold_is_refused(spec: sl.extend.OpSpec, why: str) -> None:
    with pytest.raises(sl.errors.BadArgument, match=why):
        sl.extend.operator(spec)
