"""Muon on four gloo processes: what each way to compute matrices costs, and whether its price says so.

    python -m benchmarks.muon            a Llama's matrices, 1D and 2D, in four ways
    python -m benchmarks.muon sets       sets of weights: the way that is cheapest, and the one chosen

CPU seconds of all ranks, since ranks share cores here, and of the slowest one, which is what the
price foretells; median of ratios within a repetition.
"""

import math
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.ops.registry import Match
from shardlib.optim.muon import _How, _orthogonal
from shardlib.optim.newton_schulz import COEFFICIENTS

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
    ("1D", [((256, 256), "x .")]),  # from here on few matrices, of which owners have too few
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


def measured(grid: str, weights: list[tuple[tuple[int, int], str]], repetitions: int) -> Any:
    """Per way: CPU seconds of all ranks and wall seconds, bytes received, and the price."""
    how = _How(COEFFICIENTS, 5, 1e-7, None, math.inf, ())
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
        with sl.algorithm(muon=w), sl.trace() as t:
            _orthogonal(values, how)
        out[w]["bytes"] = float(t.bytes)
    for _ in range(repetitions):
        for w in WAYS:
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            with sl.algorithm(muon=w):
                _orthogonal(values, how)
            took = torch.zeros(dist.get_world_size(), dtype=torch.float64)
            took[dist.get_rank()] = time.process_time() - cpu
            dist.all_reduce(took)
            out[w]["cpu"].append(float(took.sum()))
            out[w]["slowest"].append(float(took.max()))
            out[w]["wall"].append(time.perf_counter() - wall)
    size = sum(math.prod(s) for s, _ in weights) * 4
    return out, size


def task(work: list[tuple[str, Any, int]]) -> Any:
    """All of them in one launch."""
    torch.set_num_threads(1)
    rows = []
    for grid, weights, repetitions in work:
        with sl.use_mesh(sl.make_mesh(device="cpu", **GRIDS[grid])):
            rows.append(measured(grid, weights, repetitions))
    return rows


def run(work: list[tuple[str, Any, int]]) -> Any:
    return sl.launch(task, work, r=4, timeout=500)[0]


def ways() -> None:
    print("CPU of all ranks and bytes per rank, against gathering every matrix on every rank")
    for (grid, _), (out, size) in zip(SETS[2:4], run([(*s, 5) for s in SETS[2:4]]), strict=True):
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


def sets() -> None:
    right, tied, lost = 0, 0, []
    for (grid, weights), (out, _) in zip(SETS, run([(*s, 5) for s in SETS]), strict=True):
        cpu = {w: statistics.median(out[w]["slowest"]) for w in WAYS}
        cheapest, chosen = min(cpu, key=cpu.__getitem__), min(WAYS, key=lambda w: out[w]["price"])
        right += cheapest == chosen
        lost.append(cpu[chosen] / cpu[cheapest])
        row = ", ".join(f"{w} {1e3 * cpu[w]:.0f} ({1e3 * out[w]['price']:.1f})" for w in WAYS)
        verdict = f"cheapest {cheapest}, chosen {chosen}"
        if cheapest != chosen:
            pairs = zip(out[chosen]["slowest"], out[cheapest]["slowest"], strict=True)
            ratios = [a / b for a, b in pairs]
            tie = min(ratios) < 1  # some repetition says the opposite: they cannot be told apart
            tied += tie
            verdict += f" [{min(ratios):.2f}-{max(ratios):.2f}]" + (", a tie" if tie else "")
        print(f"  {grid} {len(weights):2} x {weights[0][0]}: {row}: {verdict}")
    print(
        f"the price picks the cheapest way for {right} of {len(SETS)} sets, and for {tied} one that "
        f"repetitions cannot tell from it; what it picks takes at most {max(lost):.2f} of the cheapest"
    )


if __name__ == "__main__":
    sets() if "sets" in sys.argv else ways()
