"""Train a small GPT on real text, every matrix in 2D blocks, the optimizer split over data.

    python -m examples.train_gpt                              8 local processes, data=2 x=2 y=2
    python -m examples.train_gpt --mesh data=1,x=2,y=2        4 local processes
    python -m examples.train_gpt --mesh x=2,y=2,z=2 --recipe cube3d
    python -m examples.train_gpt --mesh data=2,s=4 --recipe ring
    torchrun --nproc-per-node 8 -m examples.train_gpt

Then the second half is trained once more, from the checkpoint that the run wrote half-way, on half
the processes and under another recipe.  One of those processes is killed on the way (kill -9), and
they start again from the checkpoint: the losses are those of the run.  At last the same steps run in
one process without shardlib's layouts, and both curves are compared.

Where a weight's blocks lie is on screen before anything runs, the losses' curve and what to run
next at the end.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from examples.corpus import Windows, load
from examples.gpt import GPT, GPTConfig, generate
from shardlib.errors import RankFailed
from shardlib.seeing import draw

Report = dict[str, Any]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--mesh", default="data=2,x=2,y=2", help="axis sizes, as data=2,x=2,y=2")
    p.add_argument(
        "--recipe",
        default="optimus2d",
        choices=["megatron1d", "optimus2d", "tesseract", "cube3d", "ring"],
    )
    p.add_argument("--corpus", default="topics", help="topics, stdlib, or a file")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--ctx", type=int, default=128)
    p.add_argument("--layers", type=int, default=5)
    p.add_argument("--embed", type=int, default=128)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--warmup", type=int, default=10)
    p.add_argument("--out", default="out")
    p.add_argument("--device", default=None)
    return p.parse_args(argv)


def sizes(mesh: str) -> dict[str, int]:
    axes = {
        name: int(size)
        for name, size in (part.split("=") for part in mesh.replace(",", " ").split())
    }
    return {"data": 1} | axes


def model(args: argparse.Namespace) -> GPT:
    c = GPTConfig(
        ctx=args.ctx, layers=args.layers, heads=args.heads, embed=args.embed, dropout=args.dropout
    )
    return GPT(c)


def optimizer(args: argparse.Namespace) -> sl.optim.Transform:
    """AdamW with a linear warm-up, clipped: the same value for both runs."""
    adamw = sl.optim.adamw(lambda step: args.lr * min(1.0, (step + 1) / args.warmup), b2=0.95)
    return sl.optim.chain(sl.optim.clip_by_global_norm(1.0), adamw)


def train(args: argparse.Namespace, resume: int | None = None, kill: int | None = None) -> Report:
    """The sharded run, on every rank of the mesh in scope; from step ``resume`` on if it is given.

    ``kill``  the step before which the last rank dies, as of kill -9.
    """
    out, rank = Path(args.out), dist.get_rank() if dist.is_initialized() else 0
    rules = getattr(sl.recipes, args.recipe)(model(args))
    apply, params = sl.parallelize(model(args), rules)
    tx = sl.optim.zero(optimizer(args), axis="data")
    state, first = tx.init(params), resume or 0
    windows = Windows(load(args.corpus), args.ctx)
    rows = sl.data(windows, args.batch, (rules.tokens, rules.labels), ignore={1: -100})
    torch.manual_seed(0)  # dropout's draws; the same on every rank

    def everything() -> Report:
        kept = {"params": params, "state": sl.optim.state_dict(state)}
        return kept | {"data": rows.state(), "key": sl.random.get_state()}

    if resume is not None:
        found = sl.load(out / "checkpoint" / f"step_{resume:08d}", everything())
        params, state = found["params"], sl.optim.load_state_dict(state, found["state"])
        rows = sl.data(windows, args.batch, rows.layout, ignore={1: -100}, state=found["data"])
        sl.random.set_state(found["key"])
    step_fn = sl.value_and_grad(
        lambda p, ids, targets: apply(p, ids, targets=targets), pending="data"
    )
    losses, kinds, total, saving = [], {}, 0, None
    began = time.perf_counter()
    for step, (ids, targets) in zip(range(first, args.steps), forever(rows), strict=False):
        if step == kill and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with sl.trace() as t:
            loss, grads = step_fn(params, ids, targets)
            updates, state = tx.update(grads, state, params)
            params = sl.optim.apply_updates(params, updates)
        losses.append(loss.item())
        total = t.bytes
        for kind, n in t.by_kind().items():
            kinds[kind] = kinds.get(kind, 0) + n
        if rank == 0:
            speed = (step + 1 - first) * ids.numel() / (time.perf_counter() - began)
            _bar(
                step + 1,
                args.steps,
                f"loss {losses[-1]:.4f}  {speed:,.0f} tokens/s  "
                f"{float(total) / 2**20:.2f} MiB received per rank and step",
            )
        if resume is None and step + 1 in (args.steps // 2, args.steps):
            saving = sl.save(out / "checkpoint", everything(), step=step + 1, wait=False)
    if resume is None and rank == 0:
        print()
    if saving is not None:
        saving.wait()
    return {
        "losses": losses,
        "kinds": {k: float(v) for k, v in kinds.items()},
        "bytes": float(total),
        "params": sum(_held(p) for p in params.values()),
        "state": sum(_held(x) for x in _tensors(state)),
        "seconds": time.perf_counter() - began,
    }


def forever(rows: Any) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    while True:
        yield from rows


def _held(x: sl.ShardedTensor) -> int:
    return x.local.numel() * x.raw.element_size()


def _tensors(tree: Any) -> list[Any]:
    if isinstance(tree, sl.ShardedTensor):
        return [tree]
    items = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    )
    return [x for item in items for x in _tensors(item)]


def _bar(done: int, steps: int, text: str) -> None:
    width = 24
    filled = width * done // steps
    end = "\n" if not sys.stdout.isatty() and done % 10 == 0 else ""
    start = "\r" if sys.stdout.isatty() else ""
    if sys.stdout.isatty() or done % 10 == 0:
        print(
            f"{start}[{'#' * filled}{'.' * (width - filled)}] {done:>3}/{steps}  {text}",
            end=end,
            flush=True,
        )


def train_alone(args: argparse.Namespace) -> Report:
    """The same steps in one process: plain tensors, plain autograd."""
    torch.set_num_threads(1)  # of so small a model's products each waits longer than it computes
    m = model(args).to(args.device or "cpu")
    params: dict[str, torch.Tensor] = dict(m.named_parameters())
    tx = optimizer(args)
    state = tx.init(params)
    losses = []
    with sl.simulate(data=1) as one:
        rows = sl.data(Windows(load(args.corpus), args.ctx), args.batch, mesh=one, ignore={1: -100})
    began = time.perf_counter()
    for _, batch in zip(range(args.steps), forever(rows), strict=False):
        where = next(iter(params.values())).device
        ids, targets = (sl.unshard(x).to(where) for x in batch)
        tied = {**params, "lm_head.weight": params["wte.weight"]}
        loss = torch.func.functional_call(m, tied, (ids, targets))
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        updates, state = tx.update(grads, state, params)
        params = sl.optim.apply_updates(params, updates)
        losses.append(loss.item())
    held = sum(p.numel() * p.element_size() for p in params.values())
    return {
        "losses": losses,
        "params": held,
        "state": 2 * held,
        "seconds": time.perf_counter() - began,
    }


def on_paper(args: argparse.Namespace) -> Report:
    """The parameters as the run's mesh holds them, on shapes alone."""
    with torch.device("meta"):
        m = model(args)
    with sl.record(**sizes(args.mesh)) as mesh:
        return sl.parallelize(m, getattr(sl.recipes, args.recipe)(m, mesh), mesh=mesh)[1]


def layout_of(args: argparse.Namespace) -> str:
    """Which ranks hold which block of a weight, as text."""
    weight = on_paper(args)["h.0.mlp.c_fc.weight"]
    return (
        f"one weight under {args.recipe}: h.0.mlp.c_fc.weight is {sl.typeof(weight)},\n"
        "each size with the mesh axes it is split over after @; in each block: its ranks, and where they are\n"
        f"{sl.visualize(weight)}"
    )


def curve(losses: list[float], width: int = 60, height: int = 9) -> str:
    """The losses as a curve of text.

    >>> print(curve([3.0, 2.0, 1.0], width=3, height=3))
      3.00 |*
      2.00 | *
      1.00 |  *
           +---
    """
    low, high = min(losses), max(losses)
    span = max(high - low, 1e-9)
    columns = min(width, len(losses))
    last = max(columns - 1, 1)
    picked = [losses[round(i * (len(losses) - 1) / last)] for i in range(columns)]
    rows = [round((high - loss) / span * (height - 1)) for loss in picked]
    lines = [
        f"{high - r * span / (height - 1):>6.2f} |{''.join('*' if r == row else ' ' for row in rows)}".rstrip()
        for r in range(height)
    ]
    return "\n".join([*lines, f"{'':>6} +{'-' * columns}"])


def report(args: argparse.Namespace, ours: Report, alone: Report) -> float:
    """Print and plot both runs side by side; the largest difference of their losses."""
    print("\nstep   sharded   one process   difference")
    every = max(1, args.steps // 10)
    for i in sorted({*range(0, args.steps, every), args.steps - 1}):
        a, b = ours["losses"][i], alone["losses"][i]
        print(f"{i + 1:>4}  {a:8.5f}  {b:12.5f}  {abs(a - b):11.2e}")
    worst = max(abs(a - b) for a, b in zip(ours["losses"], alone["losses"], strict=True))
    print(
        f"largest difference over {args.steps} steps: {worst:.2e}"
        + ("" if args.dropout else "  (at most 1e-4)")
    )
    print(f"\nmemory per rank, MiB       sharded   one process   (mesh {args.mesh})")
    for what in ("params", "state"):
        label = {"params": "parameters", "state": "optimizer state"}[what]
        print(f"  {label:<22} {ours[what] / 2**20:9.3f}  {alone[what] / 2**20:12.3f}")
    print("\nreceived per step and rank, MiB, by collective")
    for kind, n in sorted(ours["kinds"].items(), key=lambda kv: -kv[1]):
        print(f"  {kind:<22} {n / args.steps / 2**20:9.3f}")
    print(f"  {'all':<22} {ours['bytes'] / 2**20:9.3f}")
    m = model(args)
    saved = Path(args.out) / "checkpoint" / f"step_{args.steps:08d}"
    weights = sl.load(saved)["params"]  # one process reads what eight wrote
    m.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]})
    text = generate(m.eval(), b"The ", 200, args.ctx)
    print(f"\nsample after {args.steps} steps, read back from {args.out}/checkpoint:")
    print(repr(text.decode(errors="replace")))
    print(f"\nloss of the sharded run, steps 1 to {args.steps}")
    print(curve(ours["losses"]))
    _plot(args, ours["losses"], alone["losses"])
    shown = ("wte", "h.0.attn.c_attn", "h.0.mlp.c_fc", "h.0.mlp.c_proj")
    held = on_paper(args)
    draw({n: held[n] for n in (f"{n}.weight" for n in shown)}, str(Path(args.out) / "layouts.png"))
    print(
        f"\nwrote {args.out}/loss.png (both curves), {args.out}/layouts.png (which rank holds what)"
    )
    print(f"and {args.out}/checkpoint (steps {args.steps // 2} and {args.steps})")
    return worst


def _plot(args: argparse.Namespace, ours: list[float], alone: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, low) = plt.subplots(2, 1, figsize=(6, 5), sharex=True, height_ratios=(3, 1))
    steps = range(1, len(ours) + 1)
    top.plot(steps, alone, lw=4, alpha=0.35, label="one process")
    top.plot(steps, ours, lw=1.2, label=f"sharded, {args.mesh}")
    top.set_ylabel("loss"), top.legend()
    low.semilogy(steps, [max(abs(a - b), 1e-9) for a, b in zip(ours, alone, strict=True)])
    low.set_ylabel("difference"), low.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(Path(args.out) / "loss.png", dpi=150)
    plt.close(figure)


def elsewhere(args: argparse.Namespace, count: int) -> tuple[argparse.Namespace, dict[str, int]]:
    """The same run under another recipe, on ``count`` processes in another mesh."""
    x = 2 if count % 2 == 0 and args.heads % 2 == 0 else 1
    axes = {"data": count // x, "x": x}
    return argparse.Namespace(**vars(args) | {"recipe": "megatron1d"}), axes


def compare(args: argparse.Namespace, ours: Report, again: Report, axes: dict[str, int]) -> float:
    """Print how far the resumed half is from the run's own."""
    first = args.steps // 2
    worst = max(abs(a - b) for a, b in zip(ours["losses"][first:], again["losses"], strict=True))
    mesh = " ".join(f"{n}={s}" for n, s in axes.items())
    print(
        f"resumed at step {first} on {mesh}: largest difference to the run's losses {worst:.2e}  (at most 1e-4)"
    )
    return worst


NEXT = (  # what to run after this, and what it is
    ("train examples/demo.toml", "the same run as a file; stop it, and it goes on"),
    ("plan examples/demo.toml --ranks 8,64", "which mesh, and will it fit"),
    ("trace examples/demo.toml --out out/step.png", "what a step does, and when"),
)


def what_next() -> str:
    """Three commands that run as they stand."""
    here = os.path.relpath(sys.executable)
    python = sys.executable if here.startswith("..") else here
    rows = [(f"{python} -m shardlib {command}", text) for command, text in NEXT]
    wide = max(len(command) for command, _ in rows)
    return "\n".join(["next", *(f"  {command:<{wide}}  # {text}" for command, text in rows)])


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    axes, half = sizes(args.mesh), args.steps // 2
    device = args.device or "cpu"
    if int(os.environ.get("RANK", 0)) == 0:
        print(layout_of(args), flush=True)
    if "RANK" in os.environ:  # under torchrun
        with sl.use_mesh(sl.make_mesh(device=args.device, **axes)):
            ours = train(args)
        other, there = elsewhere(args, dist.get_world_size())
        with sl.use_mesh(sl.make_mesh(device=args.device, **there)):
            again = train(other, half)
        first = dist.get_rank() == 0
        dist.barrier()
        dist.destroy_process_group()
        if not first:
            return 0
    else:
        count = math.prod(axes.values())
        print(
            f"\ntraining on {count} local processes, mesh {args.mesh}; they start in some seconds",
            flush=True,
        )
        ours = sl.launch(train, args, device=device, timeout=3600, **axes)[0]
        other, there = elsewhere(args, max(1, count // 2))
        kill = half + min(5, (args.steps - half) // 2)
        on = f"{math.prod(there.values())} processes"
        print(
            f"\nthe second half again, on {on}; the last of them is killed after step {kill}",
            flush=True,
        )
        try:
            sl.launch(train, other, half, kill, device=device, timeout=3600, **there)
        except RankFailed as e:
            print(f"  {str(e).splitlines()[0]}")
        print(f"so they start again, from the checkpoint of step {half}", flush=True)
        again = sl.launch(train, other, half, device=device, timeout=3600, **there)[0]
    print("\nthe same steps in one process, without shards", flush=True)
    worst = report(args, ours, train_alone(args))
    resumed = compare(args, ours, again, there)
    print(f"\n{what_next()}")
    return 0 if resumed < 1e-4 and (args.dropout or worst < 1e-4) else 1


if __name__ == "__main__":
    sys.exit(main())
