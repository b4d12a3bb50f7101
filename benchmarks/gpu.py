"""Everything that needs a GPU, in one go of at most nine minutes: ``make gpu``.

Each part is a process with a time limit of its own; one that fails or is stopped ends no other.  Its
rows are written as they are known to a table for docs/measurements.md.  Runs on any device that torch
knows; ``--device pretend`` (tests/accelerator) and ``--quick`` try all of it where there is no GPU, so
that a slip costs no time on one: figures taken so mean nothing.

    python -m benchmarks.gpu [--device cuda] [--minutes 9] [--only fit,dispatch] [--out out/gpu.md]

    kernels    those of cuda/, built by nvcc, against fp64
    rates      the same as shares of the copy bandwidth, beside eager torch
    attention  each back end against fp64, and its time over scaled_dot_product_attention's
    suite      a sample of the tests with the device as torch's default, on simulated ranks
    ranks      every collective on the device's transport, on as many ranks as there are devices
    fit        what the price model assumes: products, copies, launches, links
    dispatch   what a call costs the host, over hand-written SUMMA and DTensor
    compile    a training step on one rank over plain torch, eager and by torch.compile
    parallel   a training step over torch's TP
    zero       a training step over DDP and FSDP2
"""

import argparse
import importlib
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

if os.environ.get("BENCHMARKS_DEVICE") == "pretend":  # in the processes that are launched, too
    importlib.import_module("tests.accelerator.pretend")

import shardlib as sl
from benchmarks.all import run as run_part
from shardlib.mesh.devices import backend_of
from shardlib.ops.attention.kernels import KERNELS, Block, unfit

Arguments = argparse.Namespace


class Table:
    """Rows of Markdown, written to a file and printed as they are known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def line(self, text: str = "") -> None:
        print(text, flush=True)
        with self.path.open("a") as file:
            file.write(text + "\n")

    def row(self, *cells: object) -> None:
        self.line(f"| {' | '.join(str(c) for c in cells)} |")

    def head(self, title: str, *columns: str) -> None:
        self.line(f"\n### {title}\n")
        self.row(*columns)
        self.row(*["---"] * len(columns))


# ---------------------------------------------------------------- time


def elapsed(work: Callable[[], object], device: str) -> float:
    """Seconds that the device takes; the host's on a CPU."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def best(ways: Mapping[str, Callable[[], object]], device: str, turns: int) -> dict[str, float]:
    """The best time of each way; they take turns, of which the first three do not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 3):
        for name, work in ways.items():
            took = elapsed(work, device)
            if turn >= 3:
                times[name].append(took)
    return {name: min(found) for name, found in times.items()}


def settled(device: str) -> None:
    """Wait until the device has done all."""
    if device != "cpu":
        torch.accelerator.synchronize()


# ---------------------------------------------------------------- correctness


class Counted:
    """A plugin of pytest: what came of how many tests; ends the run when its time is over."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.outcomes: dict[str, int] = {}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        real = {"pool", "pool8"}  # processes on gloo, which know no such device
        items[:] = [i for i in items if not real & set(getattr(i, "fixturenames", ()))]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
            if report.outcome == "failed":
                self.failed.append(report.nodeid)

    def pytest_runtest_protocol(self, item: Any) -> None:
        if time.monotonic() > self.until:
            item.session.shouldstop = "its time is over"


def tested(table: Table, title: str, files: Sequence[str], seconds: float) -> None:
    import pytest

    counted, began = Counted(seconds), time.monotonic()
    pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", *files], [counted])
    table.head(title, "passed", "failed", "skipped", "seconds")
    counts = [counted.outcomes.get(o, 0) for o in ("passed", "failed", "skipped")]
    table.row(*counts, f"{time.monotonic() - began:.0f}")
    for name in counted.failed[:20]:
        table.line(f"- failed: {name}")
    if counted.failed:
        raise SystemExit(1)


def kernels(args: Arguments, table: Table, seconds: float) -> None:
    """The properties of the kernels: nvcc's on CUDA, g++'s on the host elsewhere."""
    cuda = ["tests/kernels/test_gpu.py"]
    quick = ["tests/kernels/test_merge.py"]
    tested(table, "Kernels against fp64", cuda if args.device == "cuda" else quick, seconds)


SAMPLE = [
    "tests/ops/test_candidates.py",
    "tests/ops/test_elementwise.py",
    "tests/ops/matmul/test_matmul2d.py",
    "tests/ops/test_norm.py",
    "tests/ops/test_loss.py",
    "tests/ops/test_reduce.py",
    "tests/ops/test_embedding.py",
    "tests/ops/test_views.py",
    "tests/ops/test_dropout.py",
    "tests/ops/test_normalise.py",
    "tests/ops/test_along.py",
    "tests/ops/matmul/test_summa.py",
    "tests/ops/matmul/test_cannon.py",
    "tests/optim/test_adaptive.py",
]


def suite(args: Arguments, table: Table, seconds: float) -> None:
    if args.device == "pretend":
        importlib.import_module("tests.accelerator.pretend").default()
    else:
        torch.set_default_device(args.device)
    files = SAMPLE[:1] if args.quick else SAMPLE
    tested(table, "A sample of the suite, simulated ranks", files, seconds)


def collectives() -> list[str]:
    """Names of what is wrong on this rank, of every collective and of a product's gradients."""
    mesh = sl.current_mesh()
    n, me = mesh.size, sl.axis_index("x")
    blocks = [torch.arange(4.0 * n, device=mesh.device) + 100 * r for r in range(n)]
    x, parts = blocks[me], torch.stack(blocks).unflatten(1, (n, 4))
    right = {
        "psum": (lambda: sl.psum(x, "x"), sum(blocks)),
        "pmax": (lambda: sl.pmax(x, "x"), blocks[-1]),
        "all_gather": (lambda: sl.all_gather(x, "x"), torch.cat(blocks)),
        "psum_scatter": (lambda: sl.psum_scatter(x, "x"), parts.sum(0)[me]),
        "all_to_all": (lambda: sl.all_to_all(x, "x", 0, 0), parts[:, me].flatten()),
        "shift": (lambda: sl.collectives.shift(x, "x"), blocks[me - 1]),
        "pbroadcast": (lambda: sl.collectives.pbroadcast(x, "x", 0), blocks[0]),
        "started": (
            lambda: sl.collectives.start(sl.all_gather, x, "x").wait(),
            torch.cat(blocks),
        ),
    }
    wrong = [name for name, (f, want) in right.items() if not torch.equal(f(), want)]
    torch.manual_seed(0)
    with torch.device("cpu"):
        a, b = torch.randn(8 * n, 16), torch.randn(16, 8 * n)
    one = [t.double().requires_grad_() for t in (a, b)]
    (one[0] @ one[1]).square().sum().backward()
    mine = [
        sl.shard(t.to(mesh.device), where).requires_grad_() for t, where in ((a, "x ."), (b, ". x"))
    ]
    with sl.implicit(1 << 20):
        (mine[0] @ mine[1]).square().sum().backward()
    for name, got, want in zip("ab", mine, one, strict=True):
        g = sl.unshard(got.grad).cpu().double()
        true = want.grad
        assert true is not None
        if not (g - true).abs().max() <= 1e-5 * true.abs().max():
            wrong.append(f"gradient of {name}")
    return wrong


def count(device: str) -> int:
    """Ranks to start: as many as there are devices; two where they cost nothing."""
    return 2 if device in ("cpu", "pretend") else torch.accelerator.device_count()


def ranks(args: Arguments, table: Table, seconds: float) -> None:
    n = count(args.device)
    wrong = sorted({w for some in sl.launch(collectives, device=args.device, x=n) for w in some})
    table.head("Collectives on real ranks", "transport", "ranks", "collectives wrong")
    table.row(backend_of(args.device, "gpu"), n, ", ".join(wrong) or "none")
    if wrong:
        raise SystemExit(1)


# ---------------------------------------------------------------- rates


def rates(args: Arguments, table: Table, seconds: float) -> None:
    from benchmarks import kernels as measured

    measured.DEVICE = args.device
    if args.device == "cuda":
        sl.kernels.build()
    table.head(
        f"Kernels: {sl.kernels.info().get(args.device, 'the eager formulas')}",
        "kernel", "of copy", "TB/s", "x eager", *([] if args.quick else ["x compile"]),
    )  # fmt: skip
    for make in measured.cases(1024 if args.quick else 1):
        case = make()
        ways = {
            "copy": measured.copying(case.bytes),
            "kernel": case.kernel,
            "eager": case.eager,
        }
        if not args.quick:
            ways["compile"] = torch.compile(case.eager)
        t = best(ways, args.device, 2 if args.quick else 12)
        table.row(
            case.name, f"{t['copy'] / t['kernel']:.0%}", f"{case.bytes / t['kernel'] / 1e12:.2f}",
            *(f"{t[way] / t['kernel']:.2f}" for way in ("eager", "compile") if way in t),
        )  # fmt: skip
        del case, ways


def attention(args: Arguments, table: Table, seconds: float) -> None:
    table.head(
        "Attention, forward and backward, causal", "back end", "dtype", "heads of", "error / torch's",
        "ms", "over torch",
    )  # fmt: skip
    length = 128 if args.quick else 4096
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (64, 128):
            torch.manual_seed(0)
            q, k, v, g = (torch.randn(1, 16, length, width, device=args.device) for _ in range(4))
            q, k, v, g = (t.to(dtype) for t in (q, k, v, g))
            ways: dict[str, Callable[[], tuple[Tensor, ...]]] = {
                "torch": lambda q=q, k=k, v=v, g=g: torchs(q, k, v, g)
            }
            for name, kernel in KERNELS.items():
                if unfit(name, q, v, False, False):
                    continue
                block = Block(q, k, v, True, None, 1 / math.sqrt(width))

                def both(kernel: Any = kernel, block: Block = block, g: Tensor = g) -> Any:
                    out, lse = kernel.forward(block)
                    return out, *kernel.backward(block, g.to(out.dtype), None, out, lse)[:3]

                ways[name] = both
            want = torchs(*(t[:, :2].double() for t in (q, k, v, g)))
            errors = {}
            for name in list(ways):
                try:
                    errors[name] = max(
                        float((a[:, :2].double() - b).abs().max() / b.abs().max())
                        for a, b in zip(ways[name](), want, strict=True)
                    )
                except Exception as e:  # a back end that this build lacks
                    del ways[name]
                    text = (str(e).splitlines() or [type(e).__name__])[0][:60]
                    table.row(name, str(dtype)[6:], width, "failed: " + text, "", "")
            t = best(ways, args.device, 2 if args.quick else 10)
            for name in ways:
                table.row(
                    name, str(dtype)[6:], width, f"{errors[name] / max(errors['torch'], 1e-9):.2f}",
                    f"{t[name] * 1e3:.2f}", f"{t[name] / t['torch']:.2f}",
                )  # fmt: skip


def torchs(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """torch's own attention and its gradients."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), g)


def probed() -> dict[str, Any]:
    return {axis: (link.alpha, link.beta) for axis, link in sl.probe().items()}


def fit(args: Arguments, table: Table, seconds: float) -> None:
    device, turns = args.device, 2 if args.quick else 10
    table.head("What prices are made of", "what", "figure", "unit")
    n = 128 if args.quick else 8192
    for dtype in (torch.bfloat16, torch.float32):
        for size in (n // 8, n // 2, n):
            a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
            took = best({"mm": lambda a=a, b=b: a @ b}, device, turns)["mm"]
            table.row(
                f"product of {size}, {str(dtype)[6:]}",
                f"{2 * size**3 / took / 1e12:.1f}",
                "TFLOP/s",
            )
    nbytes = 1 << (16 if args.quick else 30)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device != "cpu")
    target = torch.empty_like(source)
    ways = {
        "copy on the device, read and written": (2, lambda: target.copy_(source)),
        "to pinned memory": (1, lambda: pinned.copy_(source, non_blocking=True)),
        "from pinned memory": (1, lambda: target.copy_(pinned, non_blocking=True)),
    }
    t = best({name: f for name, (_, f) in ways.items()}, device, turns)
    for name, (times, _) in ways.items():
        table.row(name, f"{times * nbytes / t[name] / 1e9:.1f}", "GB/s")
    x = torch.zeros(16, device=device)
    host = []
    for _ in range(turns + 3):
        settled(device)
        began = time.perf_counter()
        for _ in range(200):
            x.add_(1)
        host.append((time.perf_counter() - began) / 200)
    table.row("an operator of the host's", f"{min(host) * 1e6:.2f}", "us")
    world = count(device)
    if world > 1:
        for axis, (alpha, beta) in sl.launch(probed, device=device, x=world)[0].items():
            table.row(f"a message along {axis}, {world} ranks", f"{alpha * 1e6:.1f}", "us")
            table.row(f"bytes along {axis}, {world} ranks", f"{1e-9 / beta:.2f}", "GB/s")


# ---------------------------------------------------------------- ratios to torch's


def middle(a: Sequence[float], b: Sequence[float]) -> str:
    """Median and range of the ratios of paired times."""
    found = [x / y for x, y in zip(a, b, strict=True)]
    return f"{statistics.median(found):.2f} [{min(found):.2f}-{max(found):.2f}]"


def dispatch(args: Arguments, table: Table, seconds: float) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks import overhead

    served = dist.Backend.backend_capability["fake"]
    served += [args.device] * (args.device not in served)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    table.head(
        "Dispatch on 2 x 2, four blocks",
        "block",
        "shardlib us",
        "over hand-written SUMMA",
        "over DTensor",
    )
    for n in (16, 64):
        t = overhead.measure(n, 3 if args.quick else 20, 2 if args.quick else 25, args.device)
        settled(args.device)
        ours = t["shardlib"]
        ratios = [middle(ours, t[other]) for other in ("hand-written SUMMA", "DTensor")]
        table.row(f"[{n}, {n}]", f"{statistics.median(ours):.0f}", *ratios)
    dist.destroy_process_group()


def sizes(args: Arguments, **more: Any) -> dict[str, Any]:
    """The model of ``benchmarks.tensor_parallel``, at a size for the device."""
    big = {"layers": 8, "width": 1024, "length": 512, "batch": 8, "repeats": 7}
    small = {"layers": 1, "width": 64, "length": 16, "batch": 4, "repeats": 2}
    given = small if args.quick else big
    return {**given, "device": args.device, "agree": 1e-4, "update": True, "bucket": None, **more}


def contested(
    table: Table, title: str, rows: list[dict[str, Any]], against: dict[str, str]
) -> None:
    table.head(title, "", "ms", "time / theirs", "host's CPU / theirs", "theirs")
    for name in dict.fromkeys(r["name"] for r in rows):
        mine, other = ([r for r in rows if r["name"] == n] for n in (name, against.get(name, "")))
        ratios = ["", ""]
        if other:
            ratios = [
                middle([r[what] for r in mine], [r[what] for r in other])
                for what in ("seconds", "cpu")
            ]
        ms = statistics.median(r["seconds"] for r in mine) * 1e3
        table.row(name, f"{ms:.1f}", *ratios, against.get(name, ""))


def compiled(given: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank: plain torch, eager and compiled, and shardlib on a mesh of one."""
    from benchmarks.tensor_parallel import GPT, LEARNING, VOCAB, ours

    args = argparse.Namespace(**given)

    def plain(how: Callable[[Any], Any]) -> Callable[[Tensor, Tensor], float]:
        model = GPT(args.layers, args.width, args.length).to(args.device)
        update, f = torch.optim.AdamW(model.parameters(), LEARNING, fused=True), how(model)

        def step(idx: Tensor, targets: Tensor) -> float:
            loss = f(idx, targets)
            loss.backward()
            update.step()
            update.zero_grad()
            return loss.item()

        return step

    runs = {"eager torch": plain(lambda m: m), "shardlib": ours(args, False, False)}
    draw = torch.Generator().manual_seed(1)
    batch = torch.randint(0, VOCAB, (2, args.batch, args.length), generator=draw).to(args.device)
    rows = []

    def contest(runs: dict[str, Any]) -> None:
        losses = {name: [run(*batch) for _ in range(3)] for name, run in runs.items()}
        first = [found[0] for found in losses.values()]
        assert max(first) - min(first) < 1e-3, losses
        for turn in range(args.repeats):
            for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
                cpu, began = time.process_time(), time.perf_counter()
                run(*batch)
                took = time.perf_counter() - began
                rows.append({"name": name, "cpu": time.process_time() - cpu, "seconds": took})

    if given["compiles"]:
        runs["torch.compile"] = plain(torch.compile)
    contest(runs)
    return rows


def compile_(args: Arguments, table: Table, seconds: float) -> None:
    given = sizes(args, compiles=args.device in ("cpu", "cuda"))
    rows = sl.launch(compiled, given, device=args.device, data=1)[0]
    contested(
        table, "A training step on one rank", rows,
        {"shardlib": "eager torch", "torch.compile": "shardlib"},
    )  # fmt: skip


def parallel(args: Arguments, table: Table, seconds: float) -> None:
    from benchmarks.tensor_parallel import PAIRS, contest

    n = count(args.device)
    rows = sl.launch(contest, argparse.Namespace(**sizes(args)), device=args.device, x=n)[0]
    contested(table, f"A training step over tensor parallelism, {n} ranks", rows, dict(PAIRS))


def zero(args: Arguments, table: Table, seconds: float) -> None:
    from benchmarks.zero import AGAINST, contest

    n = count(args.device)
    names = ["DDP", "zero 1", "zero 2", "zero 3", "zero 3, kept", "FSDP2"]
    if args.device == "pretend":  # which lacks the futures that DDP asks for, and FSDP2's streams
        names = names[1:-1]
    rows = sl.launch(contest, sizes(args, names=names), device=args.device, data=n)[0]
    contested(table, f"A training step over DDP and FSDP2, {n} ranks", rows, AGAINST)


# ---------------------------------------------------------------- all of it

PARTS: dict[str, tuple[float, Callable[[Arguments, Table, float], None]]] = {
    "kernels": (70, kernels),
    "attention": (40, attention),
    "fit": (40, fit),
    "dispatch": (30, dispatch),
    "ranks": (30, ranks),
    "zero": (60, zero),
    "parallel": (50, parallel),
    "compile": (70, compile_),
    "rates": (70, rates),
    "suite": (80, suite),
}
"""Seconds that each may take of nine minutes, and what it does; the quick and the most wanted first."""


def needed() -> list[str]:
    """Packages that are not here, of those that the parts import."""
    names = ("optree", "einops", "safetensors", "pytest", "hypothesis", "numpy")
    return [name for name in names if importlib.util.find_spec(name) is None]


def head(args: Arguments, table: Table) -> None:
    name = platform.processor() or platform.machine()
    with suppress(AttributeError, RuntimeError):
        name = torch.get_device_module(args.device).get_device_name()
    table.line(f"## On one device of the kind {args.device}\n")
    table.line(
        f"`make gpu`, {name}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}{'; a trial: its figures mean nothing' * args.quick}."
    )


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--device", default="cuda", help="a device that torch knows, or pretend")
    p.add_argument("--minutes", type=float, default=9.0)
    p.add_argument("--only", default="", help="parts, by commas")
    p.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    p.add_argument("--out", type=Path, default=Path("out/gpu.md"))
    p.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    p.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    args = p.parse_args()
    table = Table(args.out)
    if args.part:
        torch.set_num_threads(1 if args.quick else min(8, os.cpu_count() or 1))
        PARTS[args.part][1](args, table, args.seconds)
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("")
    if missing := needed():
        print(f"not here: {', '.join(missing)}; the parts that import them will fail", flush=True)
    if args.device not in ("cpu", "pretend") and not torch.accelerator.is_available():
        print("torch sees no accelerator: there is nothing to measure", flush=True)
        return 0
    os.environ["BENCHMARKS_DEVICE"] = args.device
    head(args, table)
    end = time.monotonic() + 60 * args.minutes - 15  # to stop the last one
    ended, asked = [], args.only.split(",") if args.only else list(PARTS)
    for at, name in enumerate(asked):
        left, began = end - time.monotonic(), time.monotonic()
        # what a part does not use goes to those after it
        share = PARTS[name][0] / sum(PARTS[n][0] for n in asked[at:])
        limit = min(left * share * (1 + 3 * args.quick), left)  # small, on a machine that is shared
        if limit <= 5:
            table.line(f"\n{name}: no time was left")
            continue
        print(f"\n== {name}, at most {limit:.0f} s", flush=True)
        part = (
            f"gpu --part {name} --device {args.device} --seconds {limit * 0.8:.0f} --out {args.out}"
        )
        if run_part(part + " --quick" * args.quick, limit):
            ended.append(name)
        else:
            table.line(f"\n{name}: failed or was stopped after {time.monotonic() - began:.0f} s")
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{len(ended)} of {len(asked)} parts ended; the table is in {args.out}")
    return len(ended) != len(asked)


if __name__ == "__main__":
    sys.exit(main())
