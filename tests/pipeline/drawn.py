"""Drawn pipelines: loss and gradients equal those of one process.

A case is drawn from one seed alone: a mesh and the layouts on its other axes, a module with skips,
ties, repeated blocks, masks and integers between its blocks, hooks, code between blocks that draws
and writes in place, where it is cut, schedule, stages per rank and micro-batches, frozen
parameters, remat, and how the batch comes.  One process runs the module by itself, or where it
draws, the same steps without stages on one rank.

    python -m tests.pipeline.drawn --count 500           # simulated ranks, ``make pipelines``
    python -m tests.pipeline.drawn --count 100 --real    # on 4 and 8 processes
    python -m tests.pipeline.drawn --seed 1234           # one case, printed and run
"""

import argparse
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.pipeline.schedules import placing
from tests.workers import Pool, WorkerError

NEAR, SECONDS, VOCAB = 1e-12, 180, 12
SPLIT = ("zb", "zbv", "dualpipev")
"""Schedules that compute the gradients of inputs and of weights apart."""


@dataclass(frozen=True)
class Case:
    """A module, how it is cut, and how it is run."""

    seed: int
    mesh: dict[str, int]
    layout: str
    schedule: str
    per_rank: int
    cut: Any
    micros: int
    rows: tuple[int, ...]  # of each step
    batch: str  # "plain", or "placed" by its owner on the whole mesh
    call: str  # "dict": the batch is one argument, "named" or "listed": each input is one
    weighed: bool
    depth: int
    loops: int
    skips: tuple[tuple[int, int], ...]
    tied: tuple[str, ...]
    masks: bool
    outputs: bool
    hooks: bool
    glue: str
    dropout: float
    remat: str
    frozen: float
    training: tuple[bool, ...]  # the mode of each step
    looks: bool  # whether forward is called between steps
    zero: int  # -1: nothing is trained, 0: without zero, or zero's stage

    @property
    def steps(self) -> int:
        return len(self.rows)

    def text(self) -> str:
        """Print it in one line."""
        return " ".join(f"{k}={v!r}" for k, v in asdict(self).items())


MESHES: list[dict[str, int]] = [
    {"pipe": 2}, {"pipe": 3}, {"pipe": 4}, {"pipe": 8}, {"pipe": 1}, {"data": 2, "pipe": 2},
    {"pipe": 2, "x": 2}, {"pipe": 4, "data": 2}, {"data": 2, "pipe": 2, "x": 2},
    {"pipe": 2, "x": 2, "y": 2}, {"x": 2, "pipe": 3}, {"pipe": 2, "data": 3},
]  # fmt: skip
REAL: dict[int, list[dict[str, int]]] = {
    4: [{"pipe": 4}, {"pipe": 2, "data": 2}, {"x": 2, "pipe": 2}],
    8: [{"pipe": 8}, {"data": 2, "pipe": 4}, {"pipe": 2, "data": 2, "x": 2}, {"pipe": 4, "x": 2}],
}


def draw(seed: int, mesh: dict[str, int] | None = None, split: bool = False) -> Case:
    """Draw a case, of a given mesh or of any; ``split``: of the schedules in ``SPLIT`` too."""
    r, more = random.Random(seed), random.Random(-1 - seed)
    mesh = mesh or r.choice(MESHES)
    p = mesh["pipe"]
    schedule = r.choice(["gpipe", "1f1b", "1f1b", "interleaved", *(SPLIT if split else ())])
    per_rank = r.choice([1, 2, 2, 3]) if schedule in ("gpipe", "interleaved") and p < 8 else 1
    stages = len(placing(schedule, p, per_rank))
    micros = r.randint(1, 16)
    if schedule == "interleaved":
        micros = p * r.randint(1, max(1, 16 // p))
    if schedule == "dualpipev":
        micros = r.randint(2 * p, max(16, 2 * p))
    loops = r.choice([1, 1, 1, 2, 3])
    depth = max(r.randint(1, 5), -(-stages // loops)) + r.choice([0, 0, 1, 3])
    cut: Any = r.choice(["auto", "auto", stages])
    if depth >= stages and r.random() < 0.4:
        begins = [0, *sorted(r.sample(range(1, depth), stages - 1))]
        cut = [f"h.{i}" for i in begins]
    layouts = ["whole", *(["megatron", "megatron", "some"] if "x" in mesh else [])]
    layouts += ["fsdp"] if "data" in mesh else []
    dropout = r.choice([0.0, 0.0, 0.0, 0.3])
    layout = r.choice(["2d", "whole"]) if "y" in mesh else r.choice(layouts)
    rows = micros * mesh.get("data", 1) * mesh.get("x", 1) * r.choice([1, 2])
    if more.random() < 0.25:
        depth = max(depth, more.randint(4, 16))
    steps = more.choice([1, 1, 2, 3])
    zeros = [-1, -1, -1, 0, *([1, 2, 3] if "data" in mesh and layout != "fsdp" else [])]
    return Case(
        seed=seed,
        mesh=mesh,
        layout=layout,
        schedule=schedule,
        per_rank=per_rank,
        cut=cut,
        micros=micros,
        rows=tuple(rows * more.choice([1, 1, 2]) for _ in range(steps)),
        call=more.choice(["dict", "named", "listed"]),
        batch=r.choice(["plain", "placed"]) if not dropout else "plain",
        weighed=r.random() < 0.3,
        depth=depth,
        loops=loops,
        skips=tuple(
            sorted(tuple(sorted(r.sample(range(-1, depth * loops), 2))) for _ in range(r.choice([0, 0, 1, 2, 3])))
        ) if depth * loops > 1 else (),
        tied=tuple(n for n in ("head", "blocks", "gain") if r.random() < 0.25),
        masks=r.random() < 0.35,
        outputs=r.random() < 0.3,
        hooks=r.random() < 0.25,
        glue=r.choice(["", "", "scale", "write", "draw" if dropout else "table"]),
        dropout=dropout,
        remat=r.choice(["", "", "", "full", "products", "host", "around", "torch"]),
        frozen=r.choice([0, 0, 0, 0.3, 0.8]),
        training=tuple(more.random() < 0.7 for _ in range(steps)),
        looks=more.random() < 0.3,
        zero=more.choice(zeros),
    )  # fmt: skip


# ---------------------------------------------------------------- the module


class Block(nn.Module):
    """A residual block; with ``masks`` it takes and returns a mask and an index of each row."""

    def __init__(self, wide: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide)
        self.drop = nn.Dropout(dropout)
        self.gain = nn.Parameter(torch.rand(wide))
        self.register_buffer("shift", torch.rand(wide), persistent=False)

    def forward(self, x: Any, skip: Any = None, mask: Any = None, index: Any = None) -> Any:
        y = self.down(self.drop(torch.tanh(self.up(x)))) * self.gain + self.shift
        if skip is not None:
            y = y + 0.5 * skip
        if mask is None:
            return x + y
        y = torch.where(mask.unsqueeze(-1), y, -y) + 0.01 * index.to(y.dtype).unsqueeze(-1)
        return {"x": x + y, "mask": y.sum(-1) > 0, "index": y.argmax(-1), "kind": "row"}


class Stack(nn.Module):
    """Blocks in a loop, with skips between them."""

    def __init__(self, case: Case, wide: int) -> None:
        super().__init__()
        self.case = case
        self.h = nn.ModuleList(Block(wide, case.dropout) for _ in range(case.depth))
        self.scale = nn.Parameter(torch.ones(wide) + 0.1 * torch.rand(wide))

    def forward(self, x: Any, mask: Any, index: Any) -> Any:
        c, seen = self.case, [x]
        for i in range(c.depth * c.loops):
            skip = sum(seen[a + 1] for a, b in c.skips if b == i) if c.skips else None
            block: Any = self.h[i % c.depth]
            if c.remat == "torch":
                block = partial(checkpoint, block, use_reentrant=False)
            x = block(x, skip if isinstance(skip, Tensor) else None, mask, index)
            if c.masks:
                x, mask, index = x["x"], x["mask"], x["index"]
            x = self._between(x)
            seen.append(x)
        return seen

    def _between(self, x: Any) -> Any:
        """Run what is in no block."""
        glue = self.case.glue
        if glue == "scale":
            return x * self.scale
        if glue == "write":
            x += 0.1
            x.mul_(1.01)
        if glue == "draw":
            return F.dropout(x, 0.2, self.training)
        if glue == "table":
            return x + torch.arange(4.0, dtype=x.dtype, device=x.device).mean()
        return x


class Model(nn.Module):
    """A stack between two products, of ids and of features; its outputs are one or several."""

    def __init__(self, case: Case, wide: int = 8) -> None:
        super().__init__()
        self.case = case
        self.ids, self.first = nn.Embedding(VOCAB, wide), nn.Linear(wide, wide)
        self.body = Stack(case, wide)
        self.head = nn.Linear(wide, VOCAB, bias=False)
        self.spare = nn.Linear(3, 2)
        if "head" in case.tied:
            self.head.weight = self.ids.weight
        if "blocks" in case.tied:
            self.body.h[-1].up.weight = self.body.h[0].up.weight
        if "gain" in case.tied:
            for block in self.body.h:
                block.gain = self.body.h[0].gain

    def forward(self, ids: Any, x: Any, factor: float = 1.0) -> Any:
        x = self.first(x) + self.ids(ids) * factor
        mask = index = None
        if self.case.masks:
            mask, index = x.sum(-1) > 0, x.argmax(-1)
        got: list[Any] = []
        hooked = [b.up for b in self.body.h] if self.case.hooks else []
        handles = [m.register_forward_hook(lambda m, a, out: got.append(out)) for m in hooked]
        try:
            every = self.body(x, mask, index)
        finally:
            for handle in handles:
                handle.remove()
        y = self.head(every[-1])
        if not self.case.outputs and not got:
            return y
        more = every[1::2] if self.case.outputs else []
        return {"y": y, "hidden": tuple(more), "got": got, "none": None}


def module(case: Case) -> Model:
    """Make the model, with its frozen parameters."""
    torch.manual_seed(case.seed)
    made = Model(case).double()
    some = list(made.parameters())
    drawn = random.Random(case.seed)
    for p in drawn.sample(some, min(int(case.frozen * len(some)), len(some) - 1)):
        p.requires_grad_(False)
    return made


def rules_of(case: Case) -> list[tuple[str, str]]:
    """Make the layouts of the parameters."""
    split = [("*h.*.up.weight", "x ."), ("*h.*.up.bias", "x"), ("*h.*.down.weight", ". x")]
    one = [("*h.0.up.weight", "x ."), ("*h.0.up.bias", "x"), ("*h.0.down.weight", ". x")]
    own = {
        "whole": [],
        "megatron": split,
        "some": [] if "blocks" in case.tied else one,
        "fsdp": [("*h.*.down.weight", "data .")],
        "2d": [
            ("ids.weight", ". y"), ("*.h.*.weight", "y x"), ("*h.*.bias", "y"), ("*h.*.gain", "y"),
            ("first.weight", "y x"), ("first.bias", "y"), ("body.scale", "y"),
        ],
    }  # fmt: skip
    return [*own[case.layout], ("*", "...")]


def loss_of(case: Case, f: Callable[..., Any], batch: dict[str, Any]) -> Any:
    """Compute a mean over rows, or over those that count."""
    out = f(batch["ids"], batch["x"], factor=batch["factor"])
    outs = [out] if not isinstance(out, dict) else [out["y"], *out["hidden"], *out["got"]]
    rows: Any = sum(x.sin().square().sum(-1) * (1 + i) for i, x in enumerate(outs))
    if not case.weighed:
        return rows.mean()
    counts = batch["counts"]
    if isinstance(rows, sl.ShardedTensor) and not isinstance(counts, sl.ShardedTensor):
        counts = sl.shard(counts, "...")
    return (rows * counts).sum() / counts.sum().clamp(min=1)


def batches(case: Case) -> Iterator[dict[str, Any]]:
    """Draw the batch of each step."""
    g = torch.Generator().manual_seed(case.seed)
    for rows in case.rows:
        counts = (torch.rand(rows, generator=g) < 0.7).double()
        # a batch that weighs nothing has no loss
        counts[0] = 1
        yield {
            "ids": torch.randint(VOCAB, (rows,), generator=g),
            "x": torch.randn(rows, 8, generator=g).double(),
            "counts": counts,
            "factor": 0.5,
        }


# ---------------------------------------------------------------- the two runs


Step = tuple[float, dict[str, Tensor]]


def alone(case: Case) -> list[Step]:
    """Run the steps in one process; where the module draws or is trained, as ``stepped`` does."""
    net, data = module(case), batches(case)
    trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
    if case.dropout or case.zero >= 0:
        with sl.simulate(one=1):
            apply, params = sl.parallelize(net, [("*", "...")])
            return stepped(case, apply, params, net, data)
    found = []
    for _ in range(case.steps):
        loss = loss_of(case, net, next(data))
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        pairs = zip(trained.items(), grads, strict=True)
        whole = {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}
        found.append((float(loss.detach()), whole))
    return found


def stepped(case: Case, apply: Any, params: Any, net: nn.Module, data: Any) -> list[Step]:
    """Run the steps of a module that was parallelized.

    Return the gradients that are held here, or where it is trained, the parameters.
    """
    for n, p in net.named_parameters():
        if n in params:
            params[n].requires_grad_(p.requires_grad)
    tx, into = optimizer(case)
    kept: Any = tx.shard(params) if case.zero == 3 and into else params
    state = tx.init(kept)
    step, given = called(case, apply, into)
    torch.manual_seed(case.seed)
    found = []
    for training, batch in zip(case.training, data, strict=True):
        apply.module.train(training)
        loss, grads = step(kept, *given(batch))
        if case.looks and case.zero < 0:
            looked(case, apply, params, net, batch)
        if case.zero >= 0:
            kept, state, _ = sl.optim.step(tx, kept, grads, state)
        found.append((float(loss), whole_of(grads if case.zero < 0 else kept)))
    return found


def called(case: Case, apply: Any, into: Any) -> tuple[Any, Callable[..., Any]]:
    """Make the step, and what makes its arguments of a batch."""
    names = ("ids", "x", "counts", "factor")
    batch_of = lambda a: a[0] if case.call == "dict" else dict(zip(names, a, strict=True))  # noqa: E731
    step = sl.value_and_grad(
        lambda p, *a: loss_of(case, partial(apply, p), batch_of(a)),
        microbatches=case.micros,
        weigh=(lambda *a: batch_of(a)["counts"].sum()) if case.weighed else None,
        **into,
    )
    return step, lambda batch: (batch,) if case.call == "dict" else [batch[n] for n in names]


def optimizer(case: Case) -> tuple[Any, dict[str, Any]]:
    """Make a clipped AdamW, and what a step takes of it; ``eps`` keeps what rounds to zero small."""
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.adamw(1e-2, eps=1e-3))
    if case.zero < 1 or "data" not in sl.current_mesh():
        return tx, {}
    tx = sl.optim.zero(tx, axis="data", stage=case.zero)
    return tx, {"into": tx}


def whole_of(tree: Any) -> dict[str, Tensor]:
    """Return the whole tensors of gradients or parameters, which zero may have split."""
    with tree.opened() if hasattr(tree, "opened") else nullcontext(tree) as held:
        return {n: sl.unshard(x).detach().clone() for n, x in held.items() if x is not None}


def looked(case: Case, apply: Any, params: Any, net: nn.Module, batch: dict[str, Any]) -> None:
    """Compare a forward between two steps with the module's; it draws nothing, and leaves nothing."""
    before = apply.module.training
    apply.module.eval()
    with torch.no_grad():
        mine = apply(params, batch["ids"], batch["x"], factor=batch["factor"])
        whole = {
            k: sl.unshard(v) if isinstance(v, sl.ShardedTensor) else v for k, v in batch.items()
        }
        want = net.eval()(whole["ids"], whole["x"], factor=whole["factor"])
    mine, want = (y["y"] if isinstance(y, dict) else y for y in (mine, want))
    apply.module.train(before)
    off = float((sl.unshard(mine) - want).abs().max())
    assert off <= NEAR * max(1.0, float(want.abs().max())), f"a forward is off by {off}"


def piped(case: Case, stages: bool = True) -> tuple[list[Step], Any]:
    """Run the steps on the mesh in scope; return them, and the call of the module."""
    net = module(case)
    example = {k: v for k, v in next(batches(case)).items() if k != "counts"}
    rows = {"fsdp": "data", "2d": "x"}.get(case.layout, "data" if "data" in case.mesh else ".")
    inputs = {"ids": rows, "x": f"{rows} {'y' if case.layout == '2d' else '.'}"}
    policies = {"full", "products", "host"}
    remat = [("body.h.*", case.remat)] if case.remat in policies else []
    more: dict[str, Any] = {"remat": [("body", "full")] if case.remat == "around" else remat}
    if stages:
        more["stages"] = sl.Stages(
            "pipe",
            cut=case.cut if not isinstance(case.cut, list) else [f"body.{n}" for n in case.cut],
            per_rank=case.per_rank,
            schedule=case.schedule,
            example=example,
        )
    apply, params = sl.parallelize(net, rules_of(case), inputs=inputs, **more)
    data = batches(case)
    if case.batch == "placed":
        data = map(partial(placed, rows, inputs), data)
    return stepped(case, apply, params, net, data), apply


def placed(rows: str, inputs: dict[str, str], batch: dict[str, Any]) -> dict[str, Any]:
    """Place a batch on the mesh in scope, those inputs with a layout."""
    layouts = {**inputs, "counts": rows}
    return {k: sl.shard(v, layouts[k]) if layouts.get(k) else v for k, v in batch.items()}


def apart(mine: Sequence[Step], want: Sequence[Step], held: bool) -> str:
    """Describe where two runs differ; ``held``: all parameters are held here."""
    for i, ((loss, grads), (loss_want, wanted)) in enumerate(zip(mine, want, strict=True)):
        top = max([1.0, abs(loss_want), *(float(g.abs().max()) for g in wanted.values())])
        if not abs(loss - loss_want) <= NEAR * top:
            return f"step {i}: loss {loss}, not {loss_want}"
        if held and set(grads) != set(wanted):
            return f"step {i}: gradients of {sorted(set(grads) ^ set(wanted))[:4]}"
        for n, g in grads.items():
            off = float((g - wanted[n]).abs().max()) if n in wanted else float("inf")
            if not off <= NEAR * top:
                return f"step {i}: gradient of {n} is off by {off}"
    return ""


def run(case: Case, simulate: bool = True) -> str:
    """Run a case both ways; return what is wrong, or nothing, or why layouts refuse it."""
    want = alone(case)
    with sl.simulate(**case.mesh) if simulate else nullcontext():
        try:
            mine, _ = piped(case)
        except sl.ShardError as e:
            return refused(case, e) if simulate else traceback.format_exc(limit=-6)
        return apart(mine, want, held=simulate)


def refused(case: Case, e: sl.ShardError) -> str:
    """Return a refusal's text, and whether the same layouts without stages are refused too."""
    text = "".join(traceback.format_exception(e, limit=-6))
    mesh = {a: n for a, n in case.mesh.items() if a != "pipe"} or {"one": 1}
    try:
        with sl.simulate(**mesh):
            piped(case, stages=False)
    except sl.ShardError as without:
        return f"refused without stages too: {without}"
    return text


def judged(case: Case, simulate: bool = True) -> str:
    """Run a case; an exception is wrong too."""
    try:
        return run(case, simulate)
    except Exception:
        return traceback.format_exc(limit=-6)


# ---------------------------------------------------------------- many


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what runs longer than this."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it has run for {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def simulated(seeds: Sequence[int], split: bool) -> Iterator[tuple[Case, str]]:
    """Run cases on simulated ranks."""
    for seed in seeds:
        case = draw(seed, split=split)
        try:
            with limited(SECONDS):
                yield case, judged(case)
        except TimeoutError as e:
            yield case, str(e)


def on_rank(case: Case) -> str:
    return judged(case, simulate=False)


def real(seeds: Sequence[int], split: bool) -> Iterator[tuple[Case, str]]:
    """Run cases on processes; one that ends without an answer, or hangs, is wrong."""
    for world, meshes in REAL.items():
        pool = Pool(world)
        for seed in seeds:
            case = draw(seed, meshes[seed % len(meshes)], split)
            try:
                answers = pool.run(on_rank, case, seconds=SECONDS, **case.mesh)
            except WorkerError as e:
                answers = [str(e)]
            wrong = next(filter(None, answers), "")
            # as layouts alone may, which simulated ranks find out
            yield case, judged(case) if "shardlib.errors" in wrong else wrong
        pool.close()


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--count", type=int, default=500)
    p.add_argument("--start", type=int, default=0)
    p.add_argument("--seed", type=int)
    p.add_argument("--real", action="store_true", help="on 4 and 8 processes")
    p.add_argument("--split", action="store_true", help=f"of the schedules {', '.join(SPLIT)} too")
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    seeds = [a.seed] if a.seed is not None else range(a.start, a.start + a.count)
    bad, none, begun, count = 0, 0, time.monotonic(), 0
    for case, wrong in (real if a.real else simulated)(seeds, a.split):
        count += 1
        refusal = wrong.startswith("refused")
        if a.seed is not None or (wrong and not refusal):
            print(f"{case.text()}\n  -> {wrong or 'nothing wrong'}", flush=True)
        bad, none = bad + bool(wrong and not refusal), none + refusal
    took = time.monotonic() - begun
    print(f"{count} cases, {bad} wrong, {none} refused by their layouts alone; {took:.0f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
