"""Muon on four gloo processes: what each way to compute matrices costs, and whether its price says so.

    python -m benchmarks.muon            a Llama's matrices, 1D and 2D, in four ways
    python -m benchmarks.muon sets       sets of layers: the way that is cheapest, and the one chosen
    python -m benchmarks.muon few        the same of one to three matrices
    python -m benchmarks.muon drawn 7    ten sets drawn from a seed

CPU seconds of all ranks, since ranks share cores here, and of the slowest one, which is what the
price foretells; median of ratios within a repetition.
"""

import math
import random
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.ops.registry import Match
from shardlib.optim.matrix_owners import flops
from shardlib.optim.muon import TORCHS, _case, _orthogonal, _ways

__all__: list[str] = []

WAYS = ("gathered", "owners", "blocks")
GRIDS: dict[str, dict[str, int]] = {"1D": {"x": 4}, "2D": {"x": 2, "y": 2}}


def llama(d: int, f: int, layers: int, grid: str) -> list[tuple[tuple[int, int], str]]:
    """(shape, layout) of the matrices between weights: q, k, v, o, gate, up, down."""
    one = [(d, d), (d // 4, d), (d // 4, d), (d, d), (f, d), (f, d), (d, f)]
    out = ["x .", "x .", "x .", ". x", "x .", "x .", ". x"] if grid == "1D" else ["y x"] * 7
    return list(zip(one, out, strict=True)) * layers


SETS: list[tuple[str, list[tuple[tuple[int, int], str]]]] = [
    ("1D", llama(128, 352, 2, "1D")),
    ("2D", llama(128, 352, 2, "2D")),
    ("1D", llama(256, 688, 4, "1D")),
    ("2D", llama(256, 688, 4, "2D")),
    ("1D", [((1024, 1024), "x .")]),
    ("2D", [((1024, 1024), "x y")]),
    ("2D", [((512, 512), "x y")] * 4),
    ("1D", [((64, 64), "x .")] * 12),
    ("2D", [((768, 256), "x y"), ((256, 768), "y x")] * 3),
    ("1D", [((256, 256), "x ."), ((256, 1024), ". x"), ((1024, 256), "x .")] * 2),
]
FEW: list[tuple[str, list[tuple[tuple[int, int], str]]]] = [  # owners have too few of them
    ("1D", [((256, 256), "x .")]),
    ("2D", [((384, 384), "x y")]),
    ("1D", [((512, 512), "x .")]),
    ("2D", [((768, 768), "x y")]),
    ("1D", [((768, 768), "x .")] * 2),
    ("2D", [((512, 512), "x y")] * 2),
    ("1D", [((1024, 256), "x .")]),
    ("2D", [((256, 1024), "x y")] * 3),
    ("1D", [((64, 64), "x .")]),
    ("2D", [((1024, 1024), "x y")] * 2),
]


def drawn(seed: int) -> list[tuple[str, list[tuple[tuple[int, int], str]]]]:
    """Ten sets: one to ten matrices of drawn sizes, in drawn layouts, of at most 15 GF."""
    draw, out = random.Random(seed), []
    while len(out) < 10:
        grid = draw.choice(["1D", "2D"])
        layouts = ["x .", ". x"] if grid == "1D" else ["x y", "y x"]
        weights = []
        for _ in range(draw.choice([1, 1, 1, 2, 2, 3, 6])):
            rows, cols = (draw.choice([64, 128, 192, 256, 384, 512, 768, 1024]) for _ in range(2))
            weights += [((rows, cols), draw.choice(layouts))] * draw.choice([1, 1, 1, 2])
        if sum(flops(*shape) for shape, _ in weights) < 15e9:
            out.append((grid, weights))
    return out


def measured(
    grid: str, weights: list[tuple[tuple[int, int], str]], repetitions: int, most: float
) -> Any:
    """Per way: CPU seconds of all ranks and wall seconds, bytes received, and the price.

    "chosen" is what a step takes, matrix by matrix.  A way that is priced at ``most`` times the
    cheapest and more runs twice, to see that it is not cheap.
    """
    g = torch.Generator().manual_seed(0)
    values = {
        str(i): sl.shard(torch.randn(shape, generator=g), layout)
        for i, (shape, layout) in enumerate(weights)
    }
    told, mesh = dict(sl.why("muon", values).verdicts), values["0"].mesh
    links = dict(mesh.links)
    out: dict[str, Any] = {w: {"cpu": [], "slowest": [], "wall": []} for w in WAYS}
    for w in WAYS:
        match = told[w]
        assert isinstance(match, Match), match
        out[w]["price"] = match.cost.seconds(links)
    taken = _ways(_case(values))
    pins: dict[str, Any] = {w: sl.algorithm(muon=w) for w in WAYS}
    if len(set(taken)) > 1:
        out["chosen"] = {"cpu": [], "slowest": [], "wall": [], "price": 0.0}
        pins["chosen"] = nullcontext()
    for w, pin in pins.items():
        with pin, sl.trace() as t:
            _orthogonal(values, TORCHS)
        out[w]["bytes"] = float(t.bytes)
    least = min(out[w]["price"] for w in WAYS)
    for i in range(repetitions):
        for w, pin in pins.items():
            if i > 1 and out[w]["price"] > most * least:
                continue
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            with pin:
                _orthogonal(values, TORCHS)
            took = torch.zeros(dist.get_world_size(), dtype=torch.float64)
            took[dist.get_rank()] = time.process_time() - cpu
            dist.all_reduce(took)
            out[w]["cpu"].append(float(took.sum()))
            out[w]["slowest"].append(float(took.max()))
            out[w]["wall"].append(time.perf_counter() - wall)
    size = sum(math.prod(s) for s, _ in weights) * 4
    return out, size, taken


def task(work: list[tuple[str, Any, int, float]]) -> Any:
    """All of them in one launch."""
    torch.set_num_threads(1)
    rows = []
    for grid, weights, repetitions, most in work:
        with sl.use_mesh(sl.make_mesh(device="cpu", **GRIDS[grid])):
            rows.append(measured(grid, weights, repetitions, most))
    return rows


def run(work: list[tuple[str, Any, int, float]]) -> Any:
    return sl.launch(task, work, r=4, timeout=500)[0]


def ways() -> None:
    print("CPU of all ranks and bytes per rank, against gathering every matrix on every rank")
    for (grid, _), (out, size, _) in zip(
        SETS[2:4], run([(*s, 5, math.inf) for s in SETS[2:4]]), strict=True
    ):
        base = out["gathered"]
        for w in WAYS:
            ratio = statistics.median(
                a / b for a, b in zip(out[w]["cpu"], base["cpu"], strict=True)
            )
            print(
                f"  {grid} {w:9} {ratio:5.2f} of its CPU ({1e3 * statistics.median(out[w]['cpu']):6.0f} ms), "
                f"{out[w]['bytes'] / base['bytes']:5.2f} of its bytes, {out[w]['bytes'] / size:.3f} of the "
                f"matrices; price {1e3 * out[w]['price']:6.1f} ms"
            )


def sets(which: list[Any]) -> None:
    """Compare what is chosen with the way that is cheapest; medians of paired ratios to tell."""
    right, tied, lost = 0, 0, []
    for (grid, weights), (out, _, taken) in zip(
        which, run([(*s, 9, 2.0) for s in which]), strict=True
    ):
        cpu = {w: statistics.median(out[w]["slowest"]) for w in out}
        chosen = taken[0] if len(set(taken)) == 1 else "chosen"
        cheapest = min(cpu, key=cpu.__getitem__)
        pairs = zip(out[chosen]["slowest"], out[cheapest]["slowest"], strict=False)
        ratios = sorted(a / b for a, b in pairs)
        right += cheapest == chosen
        lost.append(statistics.median(ratios))
        row = ", ".join(f"{w} {1e3 * cpu[w]:.0f} ({1e3 * out[w]['price']:.1f})" for w in out)
        verdict = f"cheapest {cheapest}, taken {', '.join(dict.fromkeys(taken))}"
        if cheapest != chosen:
            # the second least and largest of nine hold the median with a chance of 96 %
            low, high = ratios[1 if len(ratios) > 2 else 0], ratios[-2 if len(ratios) > 2 else -1]
            tie = low <= 1 <= high
            tied += tie
            verdict += f" [{low:.2f}-{high:.2f}]" + (", a tie" if tie else "")
        shapes = ", ".join(f"{list(shape)} {at}" for shape, at in list(dict.fromkeys(weights))[:3])
        print(f"  {grid} {len(weights):2} x {shapes}: {row}: {verdict}", flush=True)
    print(
        f"the price picks the cheapest way for {right} of {len(which)} sets, and for {tied} one that "
        f"repetitions cannot tell from it; what it picks takes at most {max(lost):.2f} of the cheapest"
    )


if __name__ == "__main__":
    if "drawn" in sys.argv:
        sets(drawn(int(sys.argv[-1])))
    elif "sets" in sys.argv or "few" in sys.argv:
        sets(SETS if "sets" in sys.argv else FEW)
    else:
        ways()
