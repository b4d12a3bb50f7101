"""Exceptions in the middle of algorithms, drawn: what they leave posted, and what comes next.

    python -m tests.collectives.raising [--count 60] [--seed 0] [--simulated | --real]

Every algorithm that posts transfers ahead runs forward and backward; at a drawn place (before a
transfer is posted, after it, before it is waited for, in a piece of a mask, in a hook of backward)
all ranks raise the same exception and catch it.  Nothing may be left posted then, and the next
step must equal dense.  Simulated ranks first, then four real ones.
"""

import argparse
import contextlib
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardlib as sl
from shardlib.collectives import posted as asynchronous
from shardlib.collectives import start
from shardlib.collectives.backends import dist
from shardlib.mesh import posted
from tests.workers import Pool

REAL = torch.float64
ROWS = {1: "x .", 2: "(x y) ."}
ERRORS = (ValueError, MemoryError, KeyboardInterrupt, torch.OutOfMemoryError)

Step = Callable[[], list[Tensor]]


class Places:
    """A count of the places that a step passes, the same on every rank; one of them may raise."""

    def __init__(self) -> None:
        self.passed = 0
        self.at: int | None = None
        self.error: BaseException = ValueError()

    def __call__(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            self.at = None
            raise self.error


PLACES = Places()


class Counting(dict[Any, Any]):
    """The table of what is posted: a place after each entry, and one before each is waited for."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        PLACES()

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            PLACES()
        return super().pop(key, *default)


@contextlib.contextmanager
def counting() -> Iterator[Counting]:
    """Count places while open."""
    owners = (asynchronous, dist, sys.modules["shardlib.mesh.scope"], posted)
    table, finish = Counting(), asynchronous.begin

    def before(*args: Any) -> Any:
        PLACES()
        return finish(*args)

    saved = [owner.POSTED for owner in owners]
    try:
        for owner in owners:
            owner.POSTED = table  # type: ignore[attr-defined]
        asynchronous.begin = before
        yield table
    finally:
        asynchronous.begin = finish
        for owner, old in zip(owners, saved, strict=True):
            owner.POSTED = old  # type: ignore[attr-defined]


# ---------------------------------------------------------------- algorithms


class Pieces(sl.masks.Causal):
    """A causal mask whose first piece of a pass, which is in every rank's own block, is a place."""

    fresh = True

    def allowed(self, *args: Any) -> Any:
        fresh, Pieces.fresh = self.fresh, False
        if fresh:
            PLACES()
        return super().allowed(*args)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=REAL, generator=torch.Generator().manual_seed(seed))


def hooked(x: Any) -> Any:
    """A value in whose backward is a place."""

    def hook(g: Any) -> None:
        Pieces.fresh = True
        PLACES()

    x.register_hook(hook)
    return x


def attention(algorithm: Any, mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
    lay = sl.Ring(tuple(mesh), 2, "zigzag")
    plain = [normal(1, 4, 32, 4, seed=i) for i in range(3)]
    weights = normal(1, 4, 32, 4, seed=9)

    def dense() -> list[Tensor]:
        given = [x.clone().requires_grad_() for x in plain]
        out = F.scaled_dot_product_attention(*given, is_causal=True)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), given)]

    def step() -> list[Tensor]:
        q, k, v = (sl.shard(x, lay).requires_grad_() for x in plain)
        Pieces.fresh = True
        out = sl.ring_attention(q, k, v, mask=MASK, algorithm=algorithm)
        hooked(out)
        (out * sl.shard(weights, lay)).sum().backward()
        return [sl.unshard(x) for x in (out.detach(), q.grad, k.grad, v.grad)]

    return step, dense()


MASK = Pieces()


def product(name: str, x: str, w: str, out: str | None = None) -> Any:
    def make(mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
        plain = normal(8, 8), normal(8, 8, seed=1)

        def step() -> list[Tensor]:
            a, b = (sl.shard(t, at).requires_grad_() for t, at in zip(plain, (x, w), strict=True))
            with sl.algorithm(matmul=name), sl.implicit():
                loss = hooked(sl.matmul(a, b, out=out)).sin().sum()
                loss.backward()
            return [sl.unshard(loss.detach()), sl.unshard(a.grad), sl.unshard(b.grad)]

        given = [t.clone().requires_grad_() for t in plain]
        loss = (given[0] @ given[1]).sin().sum()
        return step, [loss.detach(), *torch.autograd.grad(loss, given)]

    return make


class Fan(nn.Module):
    """Three products of one X."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(normal(8, 8, seed=i)) for i in range(3)])

    def forward(self, x: Any) -> Any:
        a, b, c = [x @ w for w in self.w]
        return (hooked(a) * b + c.sin()).sum()


def fan(mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
    model, x = Fan(), normal(8, 8, seed=5)
    apply, params = sl.parallelize(model, [("*", "x y")], inputs={"x": "x y"})

    def step() -> list[Tensor]:
        with sl.algorithm(matmul="streamed"):
            loss, grads = sl.value_and_grad(lambda p: apply(p, x))(params)
        return [sl.unshard(loss), *[sl.unshard(grads[n]) for n in params]]

    loss = model(x)
    return step, [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


class Model(nn.Module):
    """Blocks alike, the first of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)]).to(REAL)

    def forward(self, x: Any) -> Any:
        for block in (*self.h, self.h[0]):
            x = torch.tanh(block(x))
            if x.requires_grad:
                hooked(x)
        return x.square().mean()


def _dense(update: bool) -> list[Tensor]:
    model = Model()
    with counting():
        loss = model(normal(8, 16))
        grads = torch.autograd.grad(loss, list(model.parameters()))
    if not update:
        return [loss.detach(), *grads]
    return [
        loss.detach(),
        *[p.detach() - 0.1 * g for p, g in zip(model.parameters(), grads, strict=True)],
    ]


def training(stage: int, keep: bool = False, into: bool = True) -> Any:
    """ZeRO of a stage, two small buckets at least, one step of SGD."""

    def make(mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
        axis = tuple(mesh)
        apply, whole = sl.parallelize(Model(), [("*", "...")], inputs={"x": ROWS[len(axis)]})
        how = {"keep": keep} if stage == 3 else {}
        tx = sl.optim.zero(sl.optim.sgd(0.1), axis, stage, bucket_mb=0.002, **how)
        x = normal(8, 16)

        def step() -> list[Tensor]:
            params = {n: p.clone() for n, p in whole.items()}
            params = tx.shard(params) if stage == 3 else params
            given: Any = {"into": tx} if into else {"pending": axis}
            loss, grads = sl.value_and_grad(lambda p: apply(p, x), **given)(params)
            updates, _ = tx.update(grads, tx.init(params), params)
            params = sl.optim.apply_updates(params, updates)
            found = sl.optim.state_dict(params)
            return [sl.unshard(loss), *[sl.unshard(found[n]) for n in whole]]

        return step, _dense(True)

    return make


def gathered(plain: bool) -> Any:
    """Weights gathered for each product, the next one ahead; ``plain``: the loss is no sharded value."""

    def make(mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
        axis = tuple(mesh)
        rules = [("*.weight", ROWS[len(axis)]), ("*", "...")]
        apply, params = sl.parallelize(Model(), rules, inputs={"x": ROWS[len(axis)]})
        x = normal(8, 16)

        def step() -> list[Tensor]:
            for p in params.values():
                p.requires_grad_().grad = None
            loss = apply(params, x)
            (sl.unshard(loss) if plain else loss).backward()
            return [sl.unshard(loss.detach()), *[sl.unshard(p.grad) for p in params.values()]]

        return step, _dense(False)

    return make


def stage_3_without_sink(mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
    """Parts that are gathered ahead in both passes, of a loss that is a plain tensor."""
    axis = tuple(mesh)
    apply, whole = sl.parallelize(Model(), [("*", "...")], inputs={"x": ROWS[len(axis)]})
    tx = sl.optim.zero(sl.optim.sgd(0.1), axis, 3, keep=False, bucket_mb=0.002)
    x = normal(8, 16)

    def step() -> list[Tensor]:
        params = tx.shard({n: p.detach().clone() for n, p in whole.items()})
        raws = [p.requires_grad_().raw for p in params.values()]
        loss = apply(params, x)
        found = torch.autograd.grad(sl.unshard(loss), raws)
        values = {n: p.becomes(g) for (n, p), g in zip(params.items(), found, strict=True)}
        grads = type(params)(values, params.index, params.mesh)
        found = sl.optim.state_dict(grads)
        return [sl.unshard(loss.detach()), *[sl.unshard(found[n]) for n in whole]]

    return step, _dense(False)


def together(mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
    """Gradients of replicated leaves, summed in few transfers."""
    axis = tuple(mesh)
    apply, params = sl.parallelize(Model(), [("*", "...")], inputs={"x": ROWS[len(axis)]})
    x = normal(8, 16)

    def step() -> list[Tensor]:
        loss, grads = sl.value_and_grad(lambda p: apply(p, x))(params)
        return [sl.unshard(loss), *[sl.unshard(grads[n]) for n in params]]

    return step, _dense(False)


def body(mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
    """Asynchronous collectives of one's own."""
    (axis, *_), x = tuple(mesh), normal(8, 4)
    p = mesh[axis]

    def inner(v: Any) -> Any:
        one = start(sl.psum, v, axis)
        two = start(sl.collectives.shift, v, axis)
        three = start(sl.all_gather, v, axis)
        return one.wait() + two.wait() + three.wait().unflatten(0, (p, -1)).sum(0)

    def step() -> list[Tensor]:
        with torch.no_grad():
            f = sl.shard_map(inner, in_layouts=axis + " .", out_layouts=axis + " .")
            return [sl.unshard(f(sl.shard(x, axis + " .")))]

    parts = x.unflatten(0, (p, -1))
    return step, [(2 * parts.sum(0) + parts.roll(1, 0)).flatten(0, 1)]


def moved(mesh: dict[str, int]) -> tuple[Step, list[Tensor]]:
    """A change of layout in rounds of neighbours."""
    x = normal(16, 4)

    def step() -> list[Tensor]:
        a = sl.shard(x, sl.Ring(tuple(mesh), 0, "zigzag"))
        return [sl.unshard(sl.reshard(a, sl.Ring(tuple(mesh), 0, "striped")))]

    return step, [x]


class Algorithm(NamedTuple):
    make: Callable[[dict[str, int]], tuple[Step, list[Tensor]]]
    mesh: dict[str, int]


FLAT, SQUARE = {"x": 4}, {"x": 2, "y": 2}


def _attention(name: Any) -> Callable[[dict[str, int]], tuple[Step, list[Tensor]]]:
    return lambda mesh: attention(name, mesh)


ALGORITHMS: dict[str, Algorithm] = {
    **{n: Algorithm(_attention(n), FLAT) for n in
       ("ring", "ring_bidirectional", "allgather", "pass_q", "ulysses", "rsa", "canonical")},
    "double_ring": Algorithm(_attention(sl.extend.DoubleRing(2) if hasattr(sl.extend, "DoubleRing")
                                        else "double_ring"), FLAT),
    "usp": Algorithm(_attention("usp"), SQUARE),
    **{n: Algorithm(product(n, "x y", "x y"), SQUARE) for n in
       ("summa", "summa_y", "summa_x", "summa_w", "cannon", "mm3")},
    "streamed": Algorithm(fan, SQUARE),
    **{f"matmul {n}": Algorithm(product(n, "x .", ". x"), FLAT) for n in ("ring", "ring2")},
    "matmul ring of sums": Algorithm(product("ring", ". x", "x .", "x ."), FLAT),
    **{f"zero {s}": Algorithm(training(s), FLAT) for s in (1, 2, 3)},
    "zero 3 kept": Algorithm(training(3, keep=True), SQUARE),
    "zero 2 pending": Algorithm(training(2, into=False), SQUARE),
    "stage 3 without sink": Algorithm(stage_3_without_sink, FLAT),
    "prefetch": Algorithm(gathered(False), FLAT),
    "prefetch of a plain loss": Algorithm(gathered(True), FLAT),
    "joined sums": Algorithm(together, SQUARE),
    "body": Algorithm(body, FLAT),
    "moved": Algorithm(moved, FLAT),
}  # fmt: skip


# ---------------------------------------------------------------- one case


def gap(found: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a - b).abs().max().detach()) for a, b in zip(found, want, strict=True))


def play(name: str, draws: list[tuple[float, int]]) -> list[str]:
    """Raise at places of an algorithm, as shares of all; what is wrong afterwards."""
    wrong = []
    make, mesh = ALGORITHMS[name]
    step, dense = make(mesh)
    with counting() as table:
        for _ in range(2):  # orders are learnt by the first
            PLACES.passed = 0
            if (far := gap(step(), dense)) > 1e-10:
                return [f"{name}: {far} from dense before any exception"]
        for share, which in draws:
            count, PLACES.passed = PLACES.passed, 0
            place = PLACES.at = 1 + int(share * count)
            PLACES.error, kept = ERRORS[which]("mine"), None
            try:
                step()
                if not isinstance(PLACES.error, RuntimeError):
                    wrong.append(f"{name}: place {place} of {count} raised nothing")
                posted.drain()  # a call of the fast path that ran out of memory ran once more
            except BaseException as e:
                if e is not PLACES.error:
                    raise
                kept = e  # as sys.last_exc does: its frames hold what was posted
            if table:
                wrong.append(f"{name}: {len(table)} left posted by place {place} of {count}")
            for _ in range(2):  # the first learns orders again
                PLACES.passed = 0
                if (far := gap(step(), dense)) > 1e-10:
                    wrong.append(f"{name}: {far} from dense after place {place} of {count}")
            del kept
    return wrong


def drawn(names: list[str], count: int, seed: int) -> dict[str, list[tuple[float, int]]]:
    draw = random.Random(seed)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for i in range(count):
        found[names[i % len(names)]].append((draw.random(), draw.randrange(len(ERRORS))))
    return {name: draws for name, draws in found.items() if draws}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Exceptions in the middle of algorithms, drawn.")
    p.add_argument("--count", type=int, default=60)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", choices=list(ALGORITHMS))
    p.add_argument("--simulated", action="store_true", help="simulated ranks only")
    p.add_argument("--real", action="store_true", help="real ranks only")
    args = p.parse_args(argv)
    cases = drawn([args.only] if args.only else list(ALGORITHMS), args.count, args.seed)
    failed = 0
    pool = None if args.simulated else Pool(4)
    for name, draws in cases.items():
        wrong: list[str] = []
        if not args.real:
            with sl.simulate(**ALGORITHMS[name].mesh):
                try:
                    wrong += [f"simulated {line}" for line in play(name, draws)]
                except Exception:
                    wrong.append(f"simulated {name}: {traceback.format_exc()}")
        if pool is not None:
            try:
                for lines in pool.run(play, name, draws, seconds=60.0, **ALGORITHMS[name].mesh):
                    wrong += [f"real {line}" for line in lines]
            except AssertionError as e:
                wrong.append(f"real {name}: {e}")
        failed += bool(wrong)
        print(
            f"{'FAIL' if wrong else 'ok  '} {name}: {len(draws)} exceptions",
            *wrong,
            sep="\n    ",
            flush=True,
        )
    if pool is not None:
        pool.close()
    print(f"{args.count} exceptions, {failed} algorithms wrong")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
