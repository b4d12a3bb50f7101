"""Drawn steps of training whose transfers run beside them equal those in the eager order, bit by bit.

A step is drawn from one seed: mesh, layouts, stage of zero, buckets, accumulation, what is kept for
backward and where.  On the pretend device it runs with kernels that run when they are called, with
kernels that run when something waits for them, and with those of the default stream alone late: a
missing wait, or memory that is used again too early, gives other numbers in one of them.

    python -m tests.accelerator.steps --count 200
    python -m tests.accelerator.steps --seed 17 --without _follow:beside     # a planted mistake
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.collectives.backends import streams
from tests.accelerator import pretend
from tests.accelerator.pretend import DEVICE
from tests.workers import Pool

o = sl.optim
WIDE, ROWS = 32, 32

LAYOUTS = {
    "whole": [("*", "...")],
    "megatron": [
        ("*up.weight", "x ."), ("*up.bias", "x"), ("*down.weight", ". x"), ("*", "..."),
    ],
    "gathered": [("*.weight", ". data"), ("*", "...")],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    mesh: dict[str, int]
    layout: str
    stage: int
    keep: bool
    bucket_mb: float
    into: str
    optimizer: str
    accumulate: str
    remat: str
    depth: int
    half: bool


def draw(seed: int, ranks: int = 0) -> Case:
    """Draw a case, for so many ranks or for any."""
    r = random.Random(seed)
    mesh = r.choice([{"data": 2}, {"data": 4}, {"data": 2, "x": 2}][ranks // 4 :])
    stage = r.randrange(4)
    layouts = ["whole", *["megatron"] * ("x" in mesh), *["gathered"] * 2 * (stage == 0)]
    return Case(
        mesh, r.choice(layouts), stage,
        keep=r.random() < 0.3,
        bucket_mb=r.choice([0.004, 0.01, 1.0]),
        into=r.choice(["into", "into", "tree", "pending"]),
        optimizer=r.choice(["adamw", "sgd", "clipped"]),
        accumulate=r.choice(["", "hand", "multi"]),
        remat=r.choice(["", "host", "host", "full", "products"]),
        depth=r.randint(1, 4),
        half=r.random() < 0.3,
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Any) -> Any:
        for block in self.h:
            x = block(x)
        return x


OPTIMIZERS = {
    "adamw": lambda: o.adamw(0.01, weight_decay=0.1),
    "sgd": lambda: o.sgd(0.05, 0.9),
    "clipped": lambda: o.chain(o.clip_by_global_norm(0.05), o.adamw(0.01)),
}


def trained(case: Case, real: bool = False, steps: int = 2) -> list[Tensor]:
    """Train, on simulated ranks or ``real`` ones; give losses and parameters, on the host."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        net = Model(case.depth).to(torch.bfloat16 if case.half else torch.float32)
        halves = 2 if case.accumulate else 1
        data = torch.randn(steps * halves, ROWS, WIDE).to(torch.bfloat16 if case.half else None)
    batches = iter(data.to(DEVICE))
    out: list[Any] = []
    with nullcontext() if real else sl.simulate(device=DEVICE, **case.mesh):
        remat = [("h.*", case.remat)] if case.remat else []
        apply, params = sl.parallelize(
            net, LAYOUTS[case.layout], inputs={"x": "data ."}, remat=remat
        )
        tx: Any = OPTIMIZERS[case.optimizer]()
        how: dict[str, Any] = {}
        if case.stage:
            more = {"master": "fp32"} if case.half else {}
            tx = o.zero(tx, "data", case.stage, keep=case.keep, bucket_mb=case.bucket_mb, **more)
        elif case.half:
            tx = o.mixed(tx)
        tx = o.multi_steps(tx, 2) if case.accumulate == "multi" else tx
        if case.stage:
            if case.into == "into" and tx.sink is not None:
                how = {"into": tx}
            elif case.into == "pending" and case.stage < 3:
                how = {"pending": "data"}
            params = tx.shard(params)
        state = tx.init(params)
        vg = sl.value_and_grad(lambda p, x: apply(p, x).float().square().mean(), **how)
        for _ in range(steps):
            before: Any = None
            for _ in range(halves):
                loss, grads = vg(params, next(batches))
                out.append(loss)
                if case.accumulate == "hand":
                    if before is None:
                        before = {k: g * 1.0 for k, g in grads.items()}
                        continue
                    for k, g in grads.items():
                        g.raw.add_(before[k].raw)
                params, state, _ = o.step(tx, params, grads, state)
        found = o.state_dict(params) if case.stage == 3 else params
        out += [found[k] for k in sorted(found)]
        return [sl.unshard(x.detach()).cpu() for x in out]


def late(case: Case, hasty: bool, real: bool = False) -> list[Tensor]:
    """Train with kernels that run when something waits for them, of all streams or of the default."""
    pretend.late(True, hasty)
    try:
        return trained(case, real)
    finally:
        pretend.late(False)


def apart(case: Case, real: bool = False) -> bool:
    """Say whether another order gives other bits."""
    want = trained(case, real)
    try:
        found = [late(case, hasty, real) for hasty in (False, True)]
    except sl.ShardError:  # numbers that an optimizer refuses
        return True
    return not all(torch.equal(a, b) for some in found for a, b in zip(want, some, strict=True))


@contextmanager
def without(call: str) -> Iterator[None]:
    """Leave out the waits, or the records, of one function: ``"_follow:beside"``."""
    name, _, asked = call.partition(":")
    real = getattr(streams, name)

    def done(*args: Any) -> None:
        if sys._getframe(1).f_code.co_name != asked:
            real(*args)

    with mock.patch.object(streams, name, done):
        yield


PLANTED = (
    "_follow:beside", "_follow:_arrive", "_follow:_send", "_follow:_leave", "_follow:_fetch",
)  # fmt: skip
"""Every wait of a stream for another."""

TELLING = 29
"""The seed of a case that needs them all."""


def main() -> int:
    """Run the drawn cases; 1 where one differs."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--seed", type=int)
    p.add_argument("--real", action="store_true", help="on four processes")
    p.add_argument("--without", default="", help="function:caller of streams.py to leave out")
    given = p.parse_args()
    began, wrong = time.monotonic(), []
    seeds = range(given.count) if given.seed is None else [given.seed]
    pretend.default()
    pool = Pool(4) if given.real else None
    for seed in seeds:
        case = draw(seed, 4 if given.real else 0)
        with without(given.without) if given.without else nullcontext():
            if apart(case) if pool is None else any(pool.run(apart, case, True, **case.mesh)):
                wrong.append(seed)
                print(f"--seed {seed}: {case}", flush=True)
    if pool is not None:
        pool.close()
    print(f"{len(wrong)} of {len(seeds)} differ, {time.monotonic() - began:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
