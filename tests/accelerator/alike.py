"""Drawn calls and the kernels of cuda/ give the CPU's bits on the device; run by test_accelerator.py.

python -m tests.accelerator.alike --count 500
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from benchmarks.waits import ROWS, measured, models
from shardlib.kernels import active, library
from tests.accelerator import pretend
from tests.accelerator.pretend import DEVICE
from tests.fuzz_calls import Case, Outcome, dense, draw, ours
from tests.kernels import properties
from tests.kernels.host import built, needs_host

CALLS = 25
"""Drawn calls that the quick part takes; ``make accelerator`` takes 500."""


def on(case: Case, device: torch.device) -> Case:
    """The same call with operands of a device."""
    operands = {n: replace(o, value=o.value.to(device)) for n, o in case.operands.items()}
    return replace(case, operands=operands, said=None)


def answer(case: Case, device: torch.device) -> Outcome:
    """What sharded tensors of this device say."""
    torch.manual_seed(0)
    with torch.device(device), sl.simulate(device=device, **case.axes):
        return ours(on(case, device))


def alone(case: Case, device: torch.device) -> Outcome:
    """What torch says there."""
    with torch.device(device):
        return dense(on(case, device))


def bits(x: Any) -> Any:
    """A value that is equal where all bits are, NaNs but for their payload."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        return str(x.dtype), list(x.shape), x.tolist() if x.numel() < 3 else repr(x.tolist())
    if isinstance(x, list | tuple):
        return [bits(y) for y in x]
    return repr(x)


def near(a: Any, b: Any) -> bool:
    """Whether the values are equal up to rounding."""
    try:
        torch.testing.assert_close(a, b, check_device=False)
    except AssertionError:
        return False
    return True


def differs(seed: int) -> str:
    """What one drawn call gives on the device that it does not on the CPU, or nothing."""
    case = draw(seed)
    if any(word in case.text() for word in (".cpu(", ".cuda(", "device='cpu'")):
        return ""  # sharded values stay where the mesh computes
    there, here = answer(case, DEVICE), answer(case, torch.device("cpu"))
    for what in ("kind", "results", "grads", "seconds", "moved"):
        a, b = (bits(getattr(outcome, what)) for outcome in (there, here))
        if repr(a) != repr(b) and not torchs_own(case, there, here):
            return f"{what} of\n{case.text()}\n  there {a}\n    {there.error}\n  here  {b}\n    {here.error}"
    return ""


def torchs_own(case: Case, there: Outcome, here: Outcome) -> bool:
    """Whether torch alone refuses the call on one of both, or rounds otherwise as far as they do."""
    a, b = alone(case, DEVICE), alone(case, torch.device("cpu"))
    if a.kind != b.kind:
        return True
    pairs = [(getattr(there, w), getattr(here, w)) for w in ("results", "grads", "seconds")]
    rounds = repr(bits([a.results, a.grads])) != repr(bits([b.results, b.grads]))
    # each device has kernels of its own, of which the library chooses as torch does
    rounds = rounds or "scaled_dot_product_attention(" in case.text()
    return rounds and there.kind == here.kind and all(near(x, y) for x, y in pairs)


def test_drawn_calls_give_the_bits_of_the_cpu() -> None:
    found = [text for seed in range(CALLS) if (text := differs(seed))]
    assert not found, "\n".join(found)


@contextmanager
def host_kernels() -> Iterator[list[str]]:
    """Launch on the device what g++ built of cuda/, as nvcc's would be there; yield what was."""
    found, launch, launched = library.library, library.call, []

    def here(device: torch.device) -> Any:
        return found(torch.device("cpu") if device.type == DEVICE.type else device)

    def lent(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [lent(y) for y in x]
        return pretend.host(x) if isinstance(x, Tensor) else x

    def call(name: str, *args: Any) -> None:
        launched.append(name)
        lists = (a if isinstance(a, list | tuple) else (a,) for a in args)
        like = next(x for some in lists for x in some if isinstance(x, Tensor))
        assert like.device == DEVICE, "an operand of a kernel is on the host"
        launch(name, *lent(args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(active, "library", here)
        for module in [m for n, m in sys.modules.items() if n.startswith("shardlib.kernels")]:
            if getattr(module, "call", None) is launch:
                patch.setattr(module, "call", call)
        yield launched


@needs_host
@pytest.mark.parametrize("of", properties.PROPERTIES, ids=lambda f: f.__name__)
def test_kernels_hold_on_the_device_as_on_the_cpu(of: Any) -> None:
    assert built()
    properties.DEVICE[:] = [str(DEVICE)]
    try:
        with torch.device("cpu"), host_kernels() as launched:
            for seed in range(properties.COUNT // 10):
                of(seed)
        assert launched
    finally:
        properties.DEVICE[:] = ["cpu"]


@needs_host
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_step_launches_kernels_on_the_device_and_its_loss_is_the_same(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert built()
    make, row = models()[name], next(r for r in ROWS if r.name == "optimus2d")
    with host_kernels() as launched:
        there = measured(make, row, DEVICE, pretend.counting)
    here = measured(make, row, torch.device("cpu"), pretend.counting)
    assert there.losses == pytest.approx(here.losses, rel=1e-5)
    assert {"ce_stats", "ce_back"} <= set(launched), set(launched)
    assert not there.waits and not there.uploads, there.lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    count = parser.parse_args().count
    pretend.default()
    found = [text for seed in range(count) if (text := differs(seed))]
    print("\n".join([*found, f"{count - len(found)} of {count} drawn calls give the CPU's bits"]))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
