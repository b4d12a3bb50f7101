"""Drawn training jobs: parameters, states and their files equal those of a dense run.

A job is drawn from one seed alone: a model and its depth, how often a loss calls it and what is
evaluated in between, mesh, layouts, stage, optimizer and its groups, ties, frozen and unused
leaves, recomputation, accumulation, steps; then what is saved is read back, plain, and goes on on
another mesh at another stage.

    python -m tests.optim.jobs --count 2000           # what ``make jobs`` runs
    python -m tests.optim.jobs --seed 1234            # one job, printed and run
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.optim.buckets import Buckets

o = sl.optim
WIDE, ROWS, NEAR = 6, 12, 1e-9

OPTIMIZERS = {
    "sgd": lambda: o.sgd(0.05, 0.9),
    "adamw": lambda: o.adamw(0.01, weight_decay=0.1),
    "lion": lambda: o.lion(0.01, weight_decay=0.1),
    "lamb": lambda: o.lamb(0.01),
    "clipped": lambda: o.chain(o.clip_by_global_norm(0.05), o.adamw(0.01)),
    "groups": lambda: o.partition(
        {"a.b": o.adamw(0.01, weight_decay=0.1), "a": o.sgd(0.05, 0.9), "still": o.set_to_zero()},
        [("*.bias", "a"), ("*1.up*", "still"), ("*", "a.b")],
    ),
}
LAYOUTS = {
    "whole": [("*", "...")],
    "megatron": [
        ("h.*.up.weight", "x ."), ("h.*.up.bias", "x"), ("h.*.down.weight", ". x"), ("*", "..."),
    ],
    "some": [("h.0.up.weight", "x ."), ("h.0.up.bias", "x"), ("h.0.down.weight", ". x"), ("*", "...")],
}  # fmt: skip


def rules_of(job: "Job") -> list[tuple[str, str]]:
    """Make the layouts: "own" splits weights over data, which zero splits, "mixed" over both."""
    if job.layout not in ("own", "mixed"):
        return LAYOUTS[job.layout]
    up, down = ("data .", ". data") if 4 % job.mesh["data"] == 0 else (". data", "data .")
    if job.layout == "own":
        more = [("h.0.down.weight", down)] if up == "data ." else []
        return [("h.*.up.weight", up), *more, ("*", "...")]
    up, down = up.replace(".", "x"), down.replace(".", "x")
    return [("h.*.up.weight", up), ("h.*.down.weight", down), ("h.*.up.bias", "x"), ("*", "...")]


@dataclass(frozen=True)
class Job:
    """What is trained, and how; ``then``: (mesh, stage) on which it goes on from its file."""

    seed: int
    mesh: dict[str, int]
    layout: str
    axis: Any
    stage: int
    keep: bool
    bucket_mb: float | None
    optimizer: str
    depth: int
    times: int
    between: str  # what is evaluated, and where
    remat: str
    tied: bool
    spare: bool
    frozen: int
    accumulate: str
    into: str
    steps: int
    then: tuple[dict[str, int], int]

    def text(self) -> str:
        """Print it in one line."""
        return " ".join(f"{k}={v!r}" for k, v in asdict(self).items())


MESHES = [{"data": 1}, {"data": 2}, {"data": 4}, {"data": 2, "x": 2}, {"data": 3, "x": 2}, {"x": 2}]


def draw(seed: int, mesh: dict[str, int] | None = None) -> Job:
    """Draw a job, of a given mesh or of any."""
    r = random.Random(seed)
    sizes = mesh or r.choice(MESHES)
    split = sizes.get("x", 1) > 1 and "data" in sizes
    layout = r.choice(["whole", "own"]) if "data" in sizes else "whole"
    layout = r.choice(["whole", "megatron", "some", "own", "mixed"]) if split else layout
    axis: Any = "data" if "data" in sizes else "x"
    if split and r.random() < 0.4:
        axis = r.choice(["x", ("data", "x"), ("x", "data")])
    depth = r.choice([1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, r.randint(10, 13), r.randint(14, 40)])
    steps = r.randint(1, 5) if depth < 3 else r.randint(1, 3) if depth < 10 else 1
    optimizer = r.choice(list(OPTIMIZERS))
    stage = r.randrange(4)
    return Job(
        seed, sizes, layout, axis, stage,
        keep=r.random() < 0.5,
        bucket_mb=r.choice([None, 1e-3, 1e-4]),
        optimizer=optimizer if depth > 1 or optimizer != "groups" else "adamw",
        depth=depth,
        times=r.choice([1, 1, 2, 2, 3]) if depth < 10 else r.choice([1, 2]),
        between=r.choice(["", "", "no_grad", "inference", "after", "start"]),
        remat=r.choice(["", "", "all", "some"]),
        tied=r.random() < 0.4,
        spare=r.random() < 0.4,
        frozen=r.choice([0, 0, 0, 1, 2]),
        accumulate=r.choice(["", "", "", "hand", "multi"]) if depth < 10 else "",
        into=r.choice(["into", "into", "tree", "pending"]),
        steps=steps,
        then=(r.choice(MESHES) if mesh is None else sizes, r.randrange(4)),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, remat: bool) -> None:
        super().__init__()
        self.up, self.down, self.remat = nn.Linear(WIDE, 4), nn.Linear(4, WIDE), remat

    def inner(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Any) -> Any:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.remat else self.inner(x))


class Model(nn.Module):
    """Blocks between two products, which may share their weight; ``spare`` is not used."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        every = {"": 0, "all": 1, "some": 3}[job.remat]
        self.first = nn.Linear(WIDE, WIDE, bias=False)
        self.h = nn.ModuleList(Block(bool(every) and i % every == 0) for i in range(job.depth))
        self.last = nn.Linear(WIDE, WIDE)
        if job.tied:
            self.last.weight = self.first.weight
        if job.spare:
            self.spare = nn.Parameter(torch.ones(3, 5))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.h:
            x = block(x)
        return self.last(x)


def module(job: Job) -> Model:
    """Make the model, with its frozen leaves."""
    torch.manual_seed(job.seed)
    made = Model(job).double()
    some = list(made.parameters())
    for p in random.Random(job.seed).sample(some, min(job.frozen * len(some) // 4, len(some) - 1)):
        p.requires_grad_(False)
    return made


def loss_of(job: Job, f: Any, xs: list[Tensor]) -> Any:
    """Compute the loss of one batch, which calls the model once or several times."""
    kinds = [
        lambda y: y.square().mean(),
        lambda y: y.sin().mean(),
        lambda y: (y * 0.3).cos().mean(),
    ]
    total: Any = 0.0
    for i, x in enumerate(xs[: job.times]):
        if job.between in ("no_grad", "inference"):
            with torch.no_grad() if job.between == "no_grad" else torch.inference_mode():
                by = 1.0 + float(f(xs[-1]).sin().mean())
            total = total + kinds[i](f(x)) * by
        else:
            total = total + kinds[i](f(x))
    return total


def batches(job: Job) -> Iterator[list[Tensor]]:
    """Draw the inputs of each step, or half step."""
    g = torch.Generator().manual_seed(job.seed)
    while True:
        yield [torch.randn(ROWS, WIDE, generator=g).double() for _ in range(3)]


# ---------------------------------------------------------------- the two runs


def optimizer(job: Job) -> Any:
    """Make the transform, without zero."""
    tx = OPTIMIZERS[job.optimizer]()
    return o.multi_steps(tx, 2) if job.accumulate == "multi" else tx


def dense(job: Job, steps: int) -> Any:
    """Train the module by itself; yield (parameters, state) at the start and after each step."""
    net, data = module(job), batches(job)
    params = dict(net.named_parameters())
    tx = optimizer(job)
    state = tx.init(params)
    yield {k: p.detach().clone() for k, p in params.items()}, state, 0.0
    for _ in range(steps):
        for half in range(2 if job.accumulate else 1):
            trained = [p for p in params.values() if p.requires_grad]
            loss = loss_of(job, net, next(data))
            found = iter(torch.autograd.grad(loss, trained, allow_unused=True))
            some = ((k, p, next(found) if p.requires_grad else None) for k, p in params.items())
            grads: Any = {
                k: None if not p.requires_grad else torch.zeros_like(p) if g is None else g
                for k, p, g in some
            }
            if job.accumulate == "hand":
                if not half:
                    before = grads
                    continue
                grads = {k: None if g is None else g + before[k] for k, g in grads.items()}
            updates, state = tx.update(grads, state, params)
            with torch.no_grad():
                for k, p in params.items():
                    if updates[k] is not None:
                        p.add_(updates[k])
        yield {k: p.detach().clone() for k, p in params.items()}, state, float(loss.detach())


def zeroed(job: Job, stage: int, axis: Any) -> Any:
    """Make the transform that the sharded run has."""
    inner = OPTIMIZERS[job.optimizer]()
    tx = o.zero(inner, axis, stage, keep=job.keep, bucket_mb=job.bucket_mb)
    return o.multi_steps(tx, 2) if job.accumulate == "multi" else tx


def sharded(job: Job) -> Any:
    """Shard the module: (apply, parameters)."""
    where = "data ." if "data" in job.mesh else "x ."
    net = module(job)
    return sl.parallelize(net, rules_of(job), inputs={"x": where}), net


def way_of(job: Job, tx: Any, stage: int, axis: Any) -> dict[str, Any]:
    """Choose how gradients come."""
    if job.into == "into" and tx.sink is not None:
        return {"into": tx}
    if job.into == "pending" and 0 < stage < 3:
        return {"pending": axis}
    return {}


def trained(job: Job, apply: Any, tx: Any, params: Any, state: Any, data: Any, how: Any) -> Any:
    """Make one step, of one batch or two."""
    vg = sl.value_and_grad(lambda p, xs: loss_of(job, lambda x: apply(p, x), xs), **how)
    for half in range(2 if job.accumulate else 1):
        xs = next(data)
        if job.between == "start":
            with torch.no_grad():
                apply(params, xs[0])
        loss, grads = vg(params, xs)
        if job.between == "after":
            with torch.inference_mode():
                apply(params, xs[0])
        if job.accumulate == "hand":
            if not half:
                before = optree.tree_map(lambda g: g * 1.0, grads) if "into" in how else grads
                continue
            grads = optree.tree_map(torch.add, before, grads)
        params, state, _ = o.step(tx, params, grads, state)
    return params, state, float(loss)


# ---------------------------------------------------------------- comparison


def named(params: Any) -> dict[str, Any]:
    """Parameters by name, of parts too."""
    return o.state_dict(params) if isinstance(params, Buckets) else dict(params)


def kept_of(state: Any) -> dict[str, Any]:
    """State by name, without the empty sums of a cycle that has not begun, which zero keeps not."""
    return {k: x for k, x in o.state_dict(state).items() if not k.startswith("total.")}


def apart(what: str, mine: Any, want: Any) -> str:
    """Say where two mappings differ."""
    if set(mine) != set(want):
        return f"{what}: names {sorted(set(mine) ^ set(want))[:4]}"
    for k, x in mine.items():
        y = want[k]
        if not isinstance(y, Tensor):
            if x != y:
                return f"{what}: {k} is {x}, not {y}"
            continue
        x, y = (sl.unshard(x) if isinstance(x, sl.ShardedTensor) else x).cpu(), y.cpu()
        off = (
            float((x.detach() - y.detach()).abs().max())
            if x.shape == y.shape and y.numel()
            else 0.0
        )
        if x.shape != y.shape or not off <= NEAR * max(
            1.0, float(y.abs().max()) if y.numel() else 0
        ):
            return f"{what}: {k} is off by {off}"
    return ""


def run(job: Job, folder: str, simulate: bool = True) -> str:
    """Run a job twice and go on; return what is wrong, or nothing."""
    right = list(dense(job, job.steps + 1))
    scope = sl.simulate(**job.mesh) if simulate else nullcontext()
    with scope:
        (apply, params), net = sharded(job)
        for k, p in net.named_parameters():
            params[k].requires_grad_(p.requires_grad)
        tx = zeroed(job, job.stage, job.axis)
        params = tx.shard(params)
        state, data = tx.init(params), batches(job)
        how = way_of(job, tx, job.stage, job.axis)
        for i, (want, state_want, loss_want) in enumerate(right[:-1]):
            if i:
                params, state, loss = trained(job, apply, tx, params, state, data, how)
                if abs(loss - loss_want) > NEAR * max(1.0, abs(loss_want)):
                    return f"step {i}: loss {loss}, not {loss_want}"
            held, kept = named(params), kept_of(state)
            wrong = apart(f"step {i} parameters", held, want)
            wrong = wrong or apart(f"step {i} state", kept, kept_of(state_want))
            if wrong:
                return wrong
        sl.save(folder, {"params": held, "state": kept})
    mesh, stage = job.then
    found = sl.load(folder) if simulate else None
    with sl.simulate(**mesh) if simulate else nullcontext():
        found = found or sl.load(folder)
        last = right[-2]
        wrong = apart("file's parameters", found["params"], last[0])
        wrong = wrong or apart("file's state", found["state"], kept_of(last[1]))
        if wrong:
            return wrong
        plain = Job(**(asdict(job) | {"mesh": mesh, "layout": "whole"}))
        (apply, params), net = sharded(plain)
        for k, p in net.named_parameters():
            params[k].requires_grad_(p.requires_grad)
        axis = "data" if "data" in mesh else "x"
        tx = zeroed(job, stage, axis)
        params = tx.shard(params)
        params = o.load_state_dict(params, found["params"])
        state = tx.init(params)
        state = o.load_state_dict(state, found["state"])
        how = way_of(job, tx, stage, axis)
        params, state, _ = trained(job, apply, tx, params, state, data, how)
        wrong = apart("parameters after going on", named(params), right[-1][0])
        return wrong or apart("state after going on", kept_of(state), kept_of(right[-1][1]))


def judged(job: Job, folder: str, simulate: bool = True) -> str:
    """Run a job; an exception is wrong too."""
    try:
        return run(job, folder, simulate)
    except Exception:
        return traceback.format_exc(limit=-6)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--count", type=int, default=2000)
    p.add_argument("--start", type=int, default=0)
    p.add_argument("--seed", type=int)
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    seeds = [a.seed] if a.seed is not None else range(a.start, a.start + a.count)
    bad, begun = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            job = draw(seed)
            wrong = judged(job, f"{folder}/c")
            if a.seed is not None or wrong:
                print(f"{job.text()}\n  -> {wrong or 'nothing wrong'}", flush=True)
            bad += bool(wrong)
    print(f"{len(seeds)} jobs, {bad} wrong; {time.monotonic() - begun:.0f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
