"""What travels behind a product: the share of the shorter of transfers and products that is hidden.

    python -m benchmarks.overlap        four ranks, 100 Mbit/s

An MLP of square layers, forward and backward, fp32.  Every local product is replaced by a pause of
its multiply-adds over a modelled rate, so that two cores do not compute for four ranks: transfers
are real, products take the time they would on a machine as fast as its links (the rate at which
both take equally long).  Of a step's transfers alone, its products alone and both together,

    hidden = (transfers + products - both) / min(transfers, products)

"in turn" is what ``parallelize`` does: the gather of the next
product's weight starts one product early.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from benchmarks import rig

__all__ = ["contest", "main"]

LAYERS, H, BATCH, SEQUENCE = 4, 1024, 8, 128


class Paced(TorchDispatchMode):
    """Matrix products take ``seconds_per_flop`` and compute nothing."""

    def __init__(self, seconds_per_flop: float) -> None:
        super().__init__()
        self.pace, self.flops = seconds_per_flop, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
            return func(*args, **(kwargs or {}))
        a, b = args[-2:]
        flops = 2 * a.numel() * b.shape[-1]
        self.flops += flops
        if self.pace:
            time.sleep(flops * self.pace)
        return args[0] if name == "addmm_" else a.new_zeros(*a.shape[:-1], b.shape[-1])


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(H, H, bias=False) for _ in range(LAYERS)))


def _step(
    rules: Callable[[nn.Module], Any], where: str, rule: str, **axes: int
) -> Callable[[], None]:
    mesh = sl.make_mesh(device="cpu", **axes)
    sl.probe(mesh, repeats=2)  # panels are cut for links that are measured
    with sl.use_mesh(mesh):
        model = MLP()
        apply, params = sl.parallelize(model, rules(model))
        x = sl.shard(torch.randn(BATCH, SEQUENCE, H), where)
        leaves = list(params.values())

    def step() -> None:
        with sl.use_mesh(mesh), sl.algorithm(matmul=rule):
            y = apply(params, x)
            torch.autograd.grad(y, leaves, y.detach())

    return step


@contextmanager
def _one_by_one() -> Iterator[None]:
    with mock.patch("shardlib.modules.apply.prefetching", lambda *_: nullcontext()):
        yield


def _contestants() -> dict[str, Callable[[], None]]:
    def fsdp() -> Callable[[], None]:
        return _step(lambda m: [("*", ". x")], "x . .", "mm3", x=4)

    def alone(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with _one_by_one():
                step()

        return run

    def alternating(m: nn.Module) -> list[tuple[str, ...]]:
        return [
            (f"{i}.weight", *(("x .",) if i % 2 == 0 else (". x", ". x ...")))
            for i in range(LAYERS)
        ]

    return {
        "FSDP, one by one": alone(fsdp()),
        "FSDP, in turn": fsdp(),
        "2D, SUMMA": _step(sl.recipes.optimus2d, "x . y", "summa", x=2, y=2),
        "1D, gather and scatter": _step(alternating, ". x .", "mm3", x=4),
        "1D, ring": _step(alternating, ". x .", "ring", x=4),
        "1D, both ways round": _step(alternating, ". x .", "ring2", x=4),
    }


def contest(repeats: int) -> list[dict[str, Any]]:
    """Run by every rank."""
    found = []
    rig.say(f"{'seconds of a step':<26}{'transfers':>10}{'products':>10}{'both':>8}{'hidden':>9}")
    for name, step in _contestants().items():

        def paced(pace: float, step: Callable[[], None] = step) -> tuple[float, int]:
            mode = Paced(pace)
            with mode:
                rows = rig.compare({"step": step}, repeats)
            return statistics.median(r.seconds for r in rows), mode.flops // (repeats + 1)

        transfers, flops = paced(0.0)
        pace = float(torch.tensor(transfers / flops))
        both, _ = paced(pace)
        products = flops * pace
        hidden = (transfers + products - both) / min(transfers, products)
        rig.say(f"{name:<26}{transfers:>10.3f}{products:>10.3f}{both:>8.3f}{hidden:>9.0%}")
        found.append({"name": name, "transfers": transfers, "products": products, "both": both})
    return found


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rate", type=float, default=100.0, help="Mbit/s each way")
    p.add_argument("--repeats", type=int, default=5)
    args = p.parse_args()
    if reason := rig.unavailable():
        print(f"skipped: {reason}")
        return 0
    print(f"4 ranks behind links of {args.rate:.0f} Mbit/s", flush=True)
    try:
        *_, control = rig.run("benchmarks.overlap:contest", 4, args.rate, args.repeats, seconds=900)
    except rig.Disturbed as error:
        print(error)
        return 1
    print(f"control {control[0]:.2f} before, {control[1]:.2f} after")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
