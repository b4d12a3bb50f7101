"""Drawn histories: what was done before a training step changes none of its results.

What a library remembers between calls (plans, repeated calls, orders of reading, buckets) can only
be wrong after another call.  A case is drawn from one seed: a mesh, layouts, ZeRO's stage or none,
a module, and a sequence of acts on one model.  After each act its result, and all parameters, are
compared with those of the module alone in torch.

    python -m tests.histories --count 500          # simulated ranks
    python -m tests.histories --count 50 --real    # on 4 processes
    python -m tests.histories --seed 1234          # one case, printed and run
"""

import argparse
import copy
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from tests.workers import Pool

NEAR, VOCAB, WIDE = 1e-10, 12, 8

MESHES: list[tuple[dict[str, int], int]] = [
    ({"data": 2}, 0), ({"data": 4}, 4), ({"data": 2, "x": 2}, 4), ({"x": 2}, 0),
    ({"data": 2, "x": 2, "y": 2}, 0), ({"data": 1, "x": 4}, 4), ({"data": 3}, 0),
]  # fmt: skip
"""Meshes, and on how many processes they also run."""

ACTS = (
    "step", "step", "step", "look", "look inference", "gradients", "raise forward",
    "raise backward", "twice", "sums", "part", "input", "reload", "flip", "mode", "copy",
    "freeze", "other",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A module, its layouts, and what is done with it."""

    seed: int
    mesh: dict[str, int]
    layout: str
    zero: int  # -1: without zero
    keep: bool
    optimizer: str
    depth: int
    tied: bool
    frozen: float
    remat: str
    implicit: bool
    acts: tuple[tuple[str, int], ...]  # and how many rows

    def text(self) -> str:
        """Print it in one line."""
        return " ".join(f"{k}={v!r}" for k, v in asdict(self).items())


def draw(seed: int, real: bool = False) -> Case:
    """Draw a case."""
    r = random.Random(seed)
    mesh = dict(r.choice([m for m, on in MESHES if on == 4 or not real]))
    layouts = ["whole", "fsdp"] if mesh.get("data", 3) != 3 else ["whole"]
    layouts += ["megatron", "megatron", "some"] if "x" in mesh else []
    layouts += ["2d"] if "y" in mesh else []
    layout = r.choice(layouts)
    zeros = [-1, 1, 2, 3, 3] if "data" in mesh and layout != "fsdp" else [-1]
    every = mesh.get("data", 1) * mesh.get("x", 1)
    return Case(
        seed=seed,
        mesh=mesh,
        layout=layout,
        zero=r.choice(zeros),
        keep=r.random() < 0.3,
        optimizer=r.choice(["sgd", "momentum", "adamw", "clipped"]),
        depth=r.choice([1, 2, 3, 5, 13]),
        tied=r.random() < 0.3,
        frozen=r.choice([0, 0, 0.3, 0.7]),
        remat=r.choice(["", "", "", "full", "products", "host"]),
        implicit=layout in ("2d", "fsdp") or r.random() < 0.2,
        acts=tuple(
            # a call is repeated from its second time on: most are of one size
            (r.choice(ACTS), every * r.choice([1] * 7 + [2]))
            for _ in range(r.randint(4, 12))
        ),
    )


# ---------------------------------------------------------------- the module


FAILS: list[bool] = []
"""Whether blocks raise in forward."""


class Raised(Exception):
    """What a hook raises."""


class Block(nn.Module):
    """A residual block: a norm that a mode changes, attention and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.q, self.k, self.v = (nn.Linear(WIDE, WIDE, bias=i < 2) for i in range(3))
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)
        self.gain = nn.Parameter(torch.rand(WIDE) + 0.5)

    def forward(self, x: Any) -> Any:
        """Compute it of ``[rows, length, WIDE]``."""
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(-3, -2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2)
        if FAILS:
            raise Raised
        y = self.down(torch.tanh(self.up(y))) * self.gain
        return x + (y if self.training else 0.5 * y)


class Model(nn.Module):
    """Ids to logits; ``part`` leaves out the later half of the blocks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.ids, self.place = nn.Embedding(VOCAB, WIDE), nn.Parameter(torch.rand(4, WIDE))
        # read beside values that require no gradient: each kind twice, of which one may be frozen
        self.ways = nn.ModuleList(
            f(WIDE) for f in (nn.LayerNorm, nn.RMSNorm, partial(nn.Linear, WIDE)) for _ in range(2)
        )
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(WIDE)) for _ in range(4))
        self.h = nn.ModuleList(Block() for _ in range(case.depth))
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.ids.weight

    def forward(self, ids: Any, scale: Any = None, part: bool = False) -> Any:
        """Return logits ``[rows, length, VOCAB]``."""
        table = torch.arange(VOCAB * WIDE, dtype=torch.float64, device=ids.device)
        x = F.embedding(ids, table.sin().reshape(VOCAB, WIDE))
        x = sum((f(x) for f in self.ways), x * self.gains[0] + x * self.gains[1])
        x = x + (table[:WIDE] + self.gains[2]) * (table[:WIDE].cos() + self.gains[3])
        x = x + self.ids(ids) + self.place
        if scale is not None:
            x = x * scale
        blocks = list(self.h)
        for block in blocks[: (len(blocks) + 1) // 2] if part else blocks:
            x = block(x)
        return self.head(self.norm(x))


def module(case: Case, other: int = 0) -> Model:
    """Make the model, with its frozen parameters, or an ``other`` one."""
    torch.manual_seed(case.seed + other)
    made = Model(case).double()
    some = list(made.parameters())
    for p in random.Random(case.seed + other).sample(
        some, min(int(case.frozen * len(some)), len(some) - 1)
    ):
        p.requires_grad_(False)
    return made


def rules_of(case: Case) -> Any:
    """Make the layouts of the parameters."""
    split = [
        (f"h.{i}.{n}", at)
        for i in (["0"] if case.layout == "some" else ["*"])
        for n, at in (
            ("up.weight", "x ."), ("up.bias", "x"), ("down.weight", ". x"),
            ("q.weight", "x ."), ("q.bias", "x"), ("k.weight", "x ."), ("k.bias", "x"),
            ("v.weight", "x ."),
        )
    ]  # fmt: skip
    own = {
        "whole": [], "megatron": split, "some": split,
        "fsdp": [("h.*.up.weight", "data ."), ("h.*.down.weight", "data .")],
        "2d": [("h.*.up.weight", "y x"), ("h.*.down.weight", "y x"), ("h.*.bias", "y")],
    }[case.layout]  # fmt: skip
    return [*own, ("*", "...")]


# ---------------------------------------------------------------- the two runs


def loss_of(f: Callable[..., Any], ids: Any, times: int = 1, **how: Any) -> Any:
    """Compute a mean over tokens; with ``times`` of several calls, each of other ids."""
    found = [f((ids + i) % VOCAB, **how).sin().square().sum(-1).mean() for i in range(times)]
    return sum(found[1:], found[0])


def tx_of(case: Case) -> sl.optim.Transform:
    """Make the optimizer."""
    tx = {
        "sgd": lambda: sl.optim.sgd(0.1),
        "momentum": lambda: sl.optim.sgd(0.1, momentum=0.9),
        "adamw": lambda: sl.optim.adamw(0.01, weight_decay=0.1),
        "clipped": lambda: sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.sgd(0.1)),
    }[case.optimizer]()
    return (
        tx
        if case.zero < 0
        else sl.optim.zero(tx, "data", case.zero, keep=case.keep and case.zero == 3)
    )


class Alone:
    """The module in torch."""

    def __init__(self, case: Case, other: int = 0) -> None:
        self.case, self.net = case, module(case, other)
        self.opt = self._made()

    def _made(self) -> torch.optim.Optimizer:
        some = list(self.net.parameters())
        if self.case.optimizer == "adamw":
            return torch.optim.AdamW(some, 0.01, weight_decay=0.1)
        momentum = 0.9 if self.case.optimizer == "momentum" else 0.0
        return torch.optim.SGD(some, 0.1, momentum=momentum)

    def gradients(self, loss: Tensor) -> None:
        """Put gradients into the parameters; zeros where there are none."""
        some = [p for p in self.net.parameters() if p.requires_grad]
        self.opt.zero_grad()
        for p, g in zip(some, torch.autograd.grad(loss, some, allow_unused=True), strict=True):
            p.grad = torch.zeros_like(p) if g is None else g

    def step(self) -> None:
        """Update the parameters."""
        if self.case.optimizer == "clipped":
            nn.utils.clip_grad_norm_([p for p in self.net.parameters() if p.requires_grad], 0.1)
        self.opt.step()


class Ours:
    """The same module, parallelized."""

    def __init__(self, case: Case, other: int = 0) -> None:
        self.case, self.net = case, module(case, other)
        how: Any = {"remat": [("h.*", case.remat)]} if case.remat else {}
        self.apply, params = sl.parallelize(self.net, rules_of(case), **how)
        self.tx = tx_of(case)
        self.params: Any = params if case.zero < 3 else self.tx.shard(params)
        self.state = self.tx.init(self.params)

    def run(self, f: Callable[..., Any], *args: Any, **how: Any) -> tuple[Any, Any]:
        """Return the loss and gradients of a function of the parameters."""
        into = {"into": self.tx} if self.case.zero >= 1 else {}
        return sl.value_and_grad(f, **into, **how)(self.params, *args)

    def step(self, grads: Any) -> None:
        """Update the parameters."""
        self.params, self.state, _ = sl.optim.step(self.tx, self.params, grads, self.state)

    def whole(self) -> dict[str, Tensor]:
        """Return all parameters whole."""
        if self.case.zero == 3:
            with self.params.opened() as read:
                return {k: sl.unshard(x).detach().clone() for k, x in read.items()}
        return {k: sl.unshard(x).detach().clone() for k, x in self.params.items()}


class Run:
    """Both, and the acts: each compares what it computes."""

    def __init__(self, case: Case) -> None:
        self.case, self.theirs, self.ours = case, Alone(case), Ours(case)
        self.others: Any = None
        self.g = torch.Generator().manual_seed(case.seed)
        over = [a for a in ("data", *(("x",) if case.layout == "whole" else ())) if a in case.mesh]
        self.spec = f"({' '.join(over)}) ." if over else "..."
        if len(over) == 1:
            self.spec = f"{over[0]} ."

    def ids(self, rows: int) -> tuple[Tensor, Any]:
        """Draw a batch, whole and sharded."""
        x = torch.randint(VOCAB, (rows, 4), generator=self.g)
        return x, sl.shard(x, self.spec)

    def act(self, name: str, rows: int) -> None:
        """Do one thing with both."""
        getattr(self, "_" + name.partition(" ")[0])(rows, name.partition(" ")[2])
        with torch.no_grad():
            mine = self.ours.whole()
            for n, p in self.theirs.net.named_parameters():
                same(f"parameter {n}", mine[n], p.detach())

    def _trained(self, rows: int, update: bool = True, times: int = 1, **how: Any) -> None:
        whole, ids = self.ids(rows)
        apply = self.ours.apply
        loss = loss_of(self.theirs.net, whole, times, **how)
        self.theirs.gradients(loss)
        mine, grads = self.ours.run(
            lambda p: loss_of(lambda i, **how: apply(p, i, **how), ids, times, **how)
        )
        same("loss", mine, loss)
        if self.case.zero < 1:
            for n, p in self.theirs.net.named_parameters():
                if p.requires_grad:
                    same(f"gradient {n}", sl.unshard(grads[n]), p.grad)
        if update:
            self.theirs.step()
            self.ours.step(grads)

    def _step(self, rows: int, _: str) -> None:
        self._trained(rows)

    def _gradients(self, rows: int, _: str) -> None:
        self._trained(rows, update=False)

    def _twice(self, rows: int, _: str) -> None:
        self._trained(rows, times=2)

    def _part(self, rows: int, _: str) -> None:
        self._trained(rows, part=True)

    def _look(self, rows: int, how: str) -> None:
        whole, ids = self.ids(rows)
        with torch.inference_mode() if how else torch.no_grad():
            theirs, mine = self.theirs.net(whole), self.ours.apply(self.ours.params, ids)
            same("output", sl.unshard(mine), theirs)

    def _raise(self, rows: int, where: str) -> None:
        _, ids = self.ids(rows)
        if where == "forward":
            FAILS.append(True)
        apply = self.ours.apply

        def loss(p: Any) -> Any:
            out = apply(p, ids).square().mean()
            if where == "backward":
                out.register_hook(_stops)
            return out

        try:
            self.ours.run(loss)
        except Exception as e:
            if "Raised" not in repr(e) + repr(e.__cause__):
                raise
        else:
            raise AssertionError("it did not raise")
        finally:
            FAILS.clear()

    def _sums(self, rows: int, _: str) -> None:
        """Gradients of two micro-batches."""
        whole, ids = self.ids(2 * rows)
        loss = loss_of(self.theirs.net, whole)
        self.theirs.gradients(loss)
        apply = self.ours.apply
        mine, grads = self.ours.run(
            lambda p, i: loss_of(lambda j: apply(p, j), i), ids, microbatches=2
        )
        same("loss", mine, loss)
        self.theirs.step()
        self.ours.step(grads)

    def _input(self, rows: int, _: str) -> None:
        """The gradient of an input, of parameters that are held."""
        whole, ids = self.ids(rows)
        start = torch.rand(WIDE, generator=self.g).double()
        leaf = start.clone().requires_grad_()
        (theirs,) = torch.autograd.grad(loss_of(self.theirs.net, whole, scale=leaf), leaf)
        apply, params = self.ours.apply, self.ours.params
        mine = sl.grad(lambda s: loss_of(lambda i: apply(params, i, scale=s), ids))(
            sl.shard(start, "...")
        )
        same("gradient of an input", sl.unshard(mine), theirs)

    def _reload(self, rows: int, _: str) -> None:
        ours = self.ours
        held = sl.optim.state_dict(ours.state)
        # the state of a parameter that was frozen since is still there
        like = ours.state if self.case.zero < 0 else ours.tx.init(ours.params)
        ours.state = sl.optim.load_state_dict(like, held)

    def _flip(self, rows: int, _: str) -> None:
        """Another layout of the batch from here on."""
        other = "data ." if "data" in self.case.mesh else "..."
        self.spec = other if self.spec == "..." else "..."

    def _mode(self, rows: int, _: str) -> None:
        on = not self.theirs.net.training
        self.theirs.net.train(on)
        self.ours.net.train(on)

    def _copy(self, rows: int, _: str) -> None:
        """The whole state copied, as a snapshot is."""
        self.ours.params = copy.deepcopy(self.ours.params)
        self.ours.state = copy.deepcopy(self.ours.state)

    def _freeze(self, rows: int, _: str) -> None:
        """Train other parameters from here on, of those that have a state of their own."""
        if self.case.zero >= 0 or self.case.frozen:
            return
        names = [n for n, _ in self.theirs.net.named_parameters()]
        drawn = random.Random(rows + len(names) + int(self.g.initial_seed()))
        for n, p in self.theirs.net.named_parameters():
            on = n == names[-1] or drawn.random() < 0.6
            p.requires_grad_(on)
            self.ours.params[n].requires_grad_(on)

    def _other(self, rows: int, _: str) -> None:
        """Train another model of the same sizes, of which other parameters are frozen."""
        if self.others is None:
            self.others = Alone(self.case, 1), Ours(self.case, 1)
        mine = self.theirs, self.ours
        self.theirs, self.ours = self.others
        try:
            self._trained(rows)
        finally:
            self.theirs, self.ours = mine


def _stops(grad: Any) -> Any:
    raise Raised


def same(what: str, mine: Any, theirs: Any) -> None:
    """Compare two values."""
    mine, theirs = torch.as_tensor(mine).detach(), torch.as_tensor(theirs).detach()
    if isinstance(mine, sl.ShardedTensor):
        mine = sl.unshard(mine)
    far = float((mine - theirs).abs().max()) if mine.shape == theirs.shape else float("inf")
    if not far <= NEAR * (1 + float(theirs.abs().max())):
        raise AssertionError(f"{what}: off by {far}")


def check(case: Case) -> None:
    """Run a case inside the ambient mesh.  Raises: AssertionError, with the act."""
    # a call is repeated only where no budget is given
    with sl.implicit() if case.implicit else sl.constants():
        run = Run(case)
        for i, (name, rows) in enumerate(case.acts):
            try:
                run.act(name, rows)
            except Exception as e:
                raise AssertionError(f"act {i}, {name} of {rows} rows: {e}") from e


def main() -> None:
    """Run cases, print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    one = args.seed is not None
    seeds = [args.seed] if one else list(range(args.start, args.start + args.count))
    torch.set_num_threads(1)
    pool, wrong, began = Pool(4) if args.real else None, 0, time.monotonic()
    for seed in seeds:
        case = draw(seed, args.real)
        if one:
            print(case.text())
        try:
            if pool is not None:
                pool.run(check, case, **case.mesh)
            else:
                with sl.simulate(**case.mesh):
                    check(case)
        except Exception as e:
            wrong += 1
            text = "".join(traceback.format_exception(e)) if one else f"{type(e).__name__}: {e}"
            print(f"WRONG {case.text()}\n  {text[-3000:]}", flush=True)
    if pool is not None:
        pool.close()
    print(f"{len(seeds)} histories, {wrong} wrong, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
