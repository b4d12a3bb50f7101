"""The matmul family where bytes cost time: an MLP, forward and backward, one table per world size.

    python -m benchmarks.family                     4 and 8 ranks, 50 Mbit/s; out/family.csv and .png

X [M, h] W1 [h, 4h] W2 [4h, h], dX, dW1 and dW2, fp32, no activation between.  All contestants of a
table run in turn in one process group, ratios are medians over repetitions of one run, and nothing
is reported where the rig's control says the machine is disturbed.  The published schemes are pinned
rules of this library: ``summa_y`` on 2D blocks (Optimus), the same per depth (Tesseract), the
three-axis product that keeps its gathered operands on a cube.  torch's are DTensor's own.  "blocks"
stores W2 transposed over the mesh, so that the wide side stays; "alike" stores every matrix [S0,
S1], and ours turns W2's blocks before it is used.  Eight ranks make two 2D grids: 4 x 2, on which
even DTensor gathers the narrow sides, and 2 x 4.
"""

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardlib as sl
from benchmarks import rig
from shardlib.planning.candidates import recipe_meshes
from shardlib.planning.work import Rates

__all__ = ["contest", "main"]

M, H = 2048, 256


def _dense() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((M, H), (H, 4 * H), (4 * H, H), (M, H))
    x, w1, w2, g = (torch.randn(s, generator=draw) / 16 for s in shapes)
    return x, w1, w2, g


def _ours(
    axes: dict[str, int], layouts: tuple[str, str, str, str], rule: str, turned: str = ""
) -> Callable[[], list[Tensor]]:
    """One step under pinned rules; ``layouts`` of X, W1, W2 and
    Y, and of W2 where it is used, if another.
    """
    mesh = sl.make_mesh(device="cpu", **axes)
    with sl.use_mesh(mesh):
        x, w1, w2, g = _dense()
        placed = [
            sl.shard(t, lay).requires_grad_()
            for t, lay in zip((x, w1, w2), layouts[:3], strict=True)
        ]
        cotangent = sl.shard(g, layouts[3])

    def step() -> list[Tensor]:
        with sl.use_mesh(mesh), sl.algorithm(matmul=rule):
            a, b, c = placed
            y = sl.matmul(a @ b, sl.reshard(c, turned) if turned else c, out=layouts[3])
            return list(torch.autograd.grad(y, placed, cotangent))

    return step


def _torchs(
    shape: tuple[int, ...], x: Any, w1: Any, w2: Any, y: Any, inside: Any = None
) -> Callable[[], list[Tensor]]:
    """One step of DTensor's own rules; placements of X, W1, W2 and Y, and of X where it is used."""
    names = tuple("abc"[: len(shape)])
    mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dense = _dense()
    placed = [
        distribute_tensor(t, mesh, p).requires_grad_()
        for t, p in zip(dense, (x, w1, w2), strict=False)
    ]
    cotangent = distribute_tensor(dense[3], mesh, y)

    def step() -> list[Tensor]:
        a, b, c = placed
        first = a if inside is None else a.redistribute(mesh, inside)
        wide = first @ b
        if inside is None:
            wide = wide.redistribute(mesh, y)
        out = (wide @ c).redistribute(mesh, y)
        # in whatever placements autograd left them
        grads = torch.autograd.grad(out, placed, cotangent)
        return [g.redistribute(mesh, p.placements) for g, p in zip(grads, placed, strict=True)]

    return step


def _grid(m: int, k: int, n: int, rule: str) -> Callable[[], list[Tensor]]:
    return _ours({"m": m, "k": k, "n": n}, ("(m n) k", "(k m) n", "(n m) k", "(m n) k"), rule)


def _contestants(ranks: int) -> dict[str, Callable[[], list[Tensor]]]:
    s0, s1, whole = Shard(0), Shard(1), Replicate()
    blocks, plane = ("x y", "x y", "y x", "x y"), ("x y", "x y", "x y", "x y")
    found = {}
    for rows, cols in _planes(ranks):
        axes, grid = {"x": rows, "y": cols}, f"{rows}x{cols}"
        found[f"blocks {grid}"] = _ours(axes, blocks, "mm3_xw")
        found[f"alike {grid}"] = _ours(axes, plane, "mm3_xw", "y x")
        found[f"DTensor, blocks {grid}"] = _torchs(
            (rows, cols), [s0, s1], [s0, s1], [s1, s0], [s0, s1]
        )
        found[f"DTensor, alike {grid}"] = _torchs(
            (rows, cols), [s0, s1], [s0, s1], [s0, s1], [s0, s1]
        )
    rows, cols = _planes(ranks)[0]
    found |= {
        f"SUMMA {rows}x{cols}": _ours({"x": rows, "y": cols}, blocks, "summa"),
        "DTensor, Col/Row": _torchs((ranks,), [whole], [s1], [s0], [whole], inside=[whole]),
        "DTensor, Col/Row + SP": _torchs((ranks,), [s0], [s1], [s0], [s0], inside=[whole]),
    }
    if ranks == 4:
        found["Optimus"] = _ours({"x": 2, "y": 2}, plane, "summa_y")
    else:
        found["Tesseract"] = _ours(
            {"d": 2, "x": 2, "y": 2}, ("(d x) y", "x y", "x y", "(d x) y"), "summa_y"
        )
        found["cube"] = _grid(2, 2, 2, "mm3_xw")
        found["Optimus 4x2"] = _ours({"x": 4, "y": 2}, plane, "summa_y")
    for m, k, n in _grids(ranks):
        found[f"grid {m} {k} {n}"] = _grid(m, k, n, "mm3_xw")
    return found


def _grids(ranks: int) -> list[tuple[int, int, int]]:
    return [(g["x"], g["z"], g["y"]) for g in recipe_meshes("cube3d", ranks)]


def _planes(ranks: int) -> list[tuple[int, int]]:
    return [(2, 2)] if ranks == 4 else [(4, 2), (2, 4)]


def _flops() -> float:
    """Multiply-adds x 2 per second of one rank while all of them multiply."""
    a, b = torch.randn(M // 4, H), torch.randn(H, 2 * H)
    times = []
    for _ in range(8):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(8):
            a @ b
        times.append((time.perf_counter() - began) / 8)
    told = torch.tensor(
        [2 * a.shape[0] * H * 2 * H / statistics.median(times)], dtype=torch.float64
    )
    dist.all_reduce(told)
    return float(told) / dist.get_world_size()


def contest(repeats: int, only: list[str]) -> dict[str, Any]:
    """Run by every rank: correctness of each contestant, then all of them in turn."""
    ranks = dist.get_world_size()
    link, flops = sl.probe(sl.make_mesh(device="cpu", x=ranks), repeats=3)["x"], _flops()
    predicted = {f"grid {m} {k} {n}": _price(m, k, n, link, flops) for m, k, n in _grids(ranks)}
    x, w1, w2, g = (t.requires_grad_() for t in _dense())
    want = torch.autograd.grad((x @ w1) @ w2, (x, w1, w2), g)
    found = {n: step for n, step in _contestants(ranks).items() if not only or n in only}
    for name, step in found.items():
        for mine, dense in zip(step(), want, strict=True):
            whole = mine.full_tensor() if isinstance(mine, DTensor) else sl.unshard(mine)
            error = float((whole - dense).abs().max() / dense.abs().max())
            assert error < 1e-4, f"{name}: {error:.1e}"
        rig.say(f"  equals dense  {name}")
    rows = rig.compare(found, repeats, told=True)
    counted = {}
    for name, step in found.items():
        with sl.trace() as t:
            step()
        counted[name] = float(t.bytes)
    return {
        "rows": [(r.name, r.seconds, r.sent) for r in rows],
        "counted": counted,
        "predicted": predicted,
        "chosen": min(predicted, key=predicted.__getitem__),
        "link": (link.alpha, link.beta),
    }


def _price(m: int, k: int, n: int, link: sl.planning.Link, flops: float) -> float:
    """Return the seconds that a step on a grid should take."""
    x, w1, w2, _ = (t.to("meta") for t in _dense())
    with sl.record(m=m, k=k, n=n), sl.algorithm(matmul="mm3_xw"):
        params = [sl.shard(w1, "(k m) n"), sl.shard(w2, "(n m) k")]
        given = sl.shard(x, "(m n) k").requires_grad_()
        found = sl.explain(lambda p, x: ((x @ p[0]) @ p[1]).sum(), params, (given,))
    return Rates(dict.fromkeys("mkn", link), flops).seconds(found.work)


def _table(ranks: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [rig.Row(*r) for r in found["rows"]]
    names = list(dict.fromkeys(r.name for r in rows))
    chosen, table = found["chosen"], []
    for name in names:
        mine = [r for r in rows if r.name == name]
        table.append(
            {
                "ranks": ranks,
                "contestant": name,
                "MiB sent": statistics.median(r.sent for r in mine) / 2**20,
                "MiB counted": found["counted"][name] / 2**20 or math.nan,
                "seconds": statistics.median(r.seconds for r in mine),
                "bytes over chosen": rig.ratio(rows, name, chosen, "sent"),
                "time over chosen": rig.ratio(rows, name, chosen),
                "predicted": found["predicted"].get(name, math.nan),
            }
        )
    return table


def _print(table: list[dict[str, Any]], found: dict[str, Any], control: list[float]) -> None:
    rows = [rig.Row(*r) for r in found["rows"]]
    ranks, chosen = table[0]["ranks"], found["chosen"]
    print(
        f"\n{ranks} ranks, M={M} h={H}; control {control[0]:.2f} before, {control[1]:.2f} after; "
        f"chosen: {chosen}"
    )
    print(
        f"{'':<24}{'MiB sent':>9}{'seconds':>9}{'bytes':>8}{'time':>7}   over the chosen grid's; "
        "predicted"
    )
    for row in table:
        said = (
            ""
            if math.isnan(row["predicted"])
            else f"{row['seconds'] / row['predicted']:.2f} of {row['predicted']:.2f}"
        )
        print(
            f"{row['contestant']:<24}{row['MiB sent']:>9.2f}{row['seconds']:>9.3f}"
            f"{row['bytes over chosen']:>8.2f}{row['time over chosen']:>7.2f}   {said}"
        )
    grids = [r for r in table if r["contestant"].startswith("grid")]
    regret = 1 / min(r["time over chosen"] for r in grids)
    off = statistics.median(max(q, 1 / q) for r in grids for q in [r["seconds"] / r["predicted"]])
    print(
        f"regret of the choice {regret:.3f}; measured and predicted differ by {off:.2f} in the "
        "median"
    )
    for theirs in (
        r["contestant"]
        for r in table
        if r["contestant"].startswith(("DTensor, blocks", "DTensor, alike"))
    ):
        for ours in (theirs.removeprefix("DTensor, "), chosen):
            sent, took = (rig.ratio(rows, theirs, ours, what) for what in ("sent", "seconds"))
            print(f"{theirs} over {ours}: bytes {sent:.2f}, time {took:.2f}")


def _plot(tables: list[list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panes = plt.subplots(1, len(tables), figsize=(8 * len(tables), 7), squeeze=False)
    for pane, table in zip(panes[0], tables, strict=True):
        for i, row in enumerate(sorted(table, key=lambda row: row["MiB sent"])):
            ours = row["contestant"].startswith(("grid", "blocks", "alike"))
            at = (row["MiB sent"], row["seconds"])
            pane.scatter(*at, color="tab:blue" if ours else "tab:red")
            pane.annotate(
                row["contestant"],
                at,
                fontsize=6,
                xytext=(4, 3 if i % 2 else -8),
                textcoords="offset points",
            )
        pane.set_title(f"{table[0]['ranks']} ranks; blue: three-axis products, red: the others")
        pane.set_xscale("log"), pane.set_yscale("log")
        pane.set_xlabel("MiB sent per rank"), pane.set_ylabel("seconds per step")
        pane.set_xlim(right=1.8 * max(row["MiB sent"] for row in table))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--ranks", type=int, nargs="*", default=[4, 8])
    p.add_argument("--rate", type=float, default=50.0, help="Mbit/s each way")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--only", nargs="*", default=[], help="contestants, by name")
    p.add_argument("--out", default="out")
    args = p.parse_args()
    if reason := rig.unavailable():
        print(f"skipped: {reason}")
        return 0
    tables = []
    for ranks in args.ranks:
        print(f"{ranks} ranks behind links of {args.rate:.0f} Mbit/s", flush=True)
        try:
            *answers, control = rig.run(
                "benchmarks.family:contest", ranks, args.rate, args.repeats, args.only, seconds=1800
            )
        except rig.Disturbed as error:
            print(error)
            return 1
        tables.append(_table(ranks, answers[0]))
        _print(tables[-1], answers[0], control)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "family.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, list(tables[0][0]))
        writer.writeheader()
        writer.writerows(row for table in tables for row in table)
    _plot(tables, out / "family.png")
    print(f"wrote {out}/family.csv, {out}/family.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
