"""Train a small GPT on real text, every matrix in 2D blocks, the optimizer split over data.

    python -m examples.train_gpt                              8 local processes, data=2 x=2 y=2
    python -m examples.train_gpt --mesh data=1,x=2,y=2        4 local processes
    python -m examples.train_gpt --mesh x=2,y=2,z=2 --recipe cube3d
    python -m examples.train_gpt --mesh data=2,s=4 --recipe ring
    torchrun --nproc-per-node 8 -m examples.train_gpt

Then the same steps run in one process without shardlib's layouts, and both curves are compared.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from examples.corpus import batches, load
from examples.gpt import GPT, GPTConfig, generate
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


def train(args: argparse.Namespace) -> Report:
    """The sharded run, on every rank of the mesh in scope."""
    mesh = sl.current_mesh()
    rank = dist.get_rank() if dist.is_initialized() else 0
    rules = getattr(sl.recipes, args.recipe)(model(args))
    apply, params = sl.parallelize(
        model(args), rules, inputs={"idx": rules.tokens, "targets": rules.labels}
    )
    tx = sl.optim.zero(optimizer(args), axis="data")
    state = tx.init(params)
    step_fn = sl.value_and_grad(
        lambda p, ids, targets: apply(p, ids, targets=targets), pending="data"
    )
    losses, kinds, total = [], {}, 0
    torch.manual_seed(0)  # dropout's draws; the same on every rank
    began = time.perf_counter()
    for step, (ids, targets) in zip(
        range(args.steps), batches(load(args.corpus), args.batch, args.ctx), strict=False
    ):
        with sl.trace() as t:
            loss, grads = step_fn(params, ids.to(mesh.device), targets.to(mesh.device))
            updates, state = tx.update(grads, state, params)
            params = sl.optim.apply_updates(params, updates)
        losses.append(loss.item())
        total = t.bytes
        for kind, n in t.by_kind().items():
            kinds[kind] = kinds.get(kind, 0) + n
        if rank == 0:
            speed = (step + 1) * ids.numel() / (time.perf_counter() - began)
            _bar(
                step + 1,
                args.steps,
                f"loss {losses[-1]:.4f}  {speed:,.0f} tokens/s  {float(total) / 2**20:.2f} "
                "MiB/step/rank",
            )
    out = Path(args.out)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        print()
        shown = (
            "wte.weight",
            "h.0.attn.c_attn.weight",
            "h.0.mlp.c_fc.weight",
            "h.0.mlp.c_proj.weight",
        )
        draw({n: params[n] for n in shown}, str(out / "layouts.png"))
    sl.save(out / "checkpoint", params)
    return {
        "losses": losses,
        "kinds": {k: float(v) for k, v in kinds.items()},
        "bytes": float(total),
        "params": sum(_held(p) for p in params.values()),
        "state": sum(_held(x) for x in _tensors(state)),
        "seconds": time.perf_counter() - began,
    }


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
    m = model(args).to(args.device or "cpu")
    params = dict(m.named_parameters())
    tx = optimizer(args)
    state = tx.init(params)
    losses = []
    began = time.perf_counter()
    for _, (ids, targets) in zip(
        range(args.steps), batches(load(args.corpus), args.batch, args.ctx), strict=False
    ):
        where = next(iter(params.values())).device
        tied = {**params, "lm_head.weight": params["wte.weight"]}
        loss = torch.func.functional_call(m, tied, (ids.to(where), targets.to(where)))
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
        + ("" if args.dropout else "  (bar: 1e-4)")
    )
    print(f"\nmemory per rank, MiB       sharded   one process   (mesh {args.mesh})")
    for what in ("params", "state"):
        label = {"params": "parameters", "state": "optimizer state"}[what]
        print(f"  {label:<22} {ours[what] / 2**20:9.3f}  {alone[what] / 2**20:12.3f}")
    print("\ncommunicated per step and rank, MiB")
    for kind, n in sorted(ours["kinds"].items(), key=lambda kv: -kv[1]):
        print(f"  {kind:<22} {n / args.steps / 2**20:9.3f}")
    print(f"  {'all':<22} {ours['bytes'] / 2**20:9.3f}")
    m = model(args)
    weights = sl.load(Path(args.out) / "checkpoint")  # one process reads what eight wrote
    m.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]})
    text = generate(m.eval(), b"The ", 200, args.ctx)
    print(f"\nsample after {args.steps} steps, read back from {args.out}/checkpoint:")
    print(repr(text.decode(errors="replace")))
    _plot(args, ours["losses"], alone["losses"])
    print(f"\nwrote {args.out}/loss.png, {args.out}/layouts.png, {args.out}/checkpoint")
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


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    axes = sizes(args.mesh)
    if "RANK" in os.environ:  # under torchrun
        with sl.use_mesh(sl.make_mesh(device=args.device, **axes)):
            ours = train(args)
        first = dist.get_rank() == 0
        dist.barrier()
        dist.destroy_process_group()
        if not first:
            return 0
    else:
        count = 1
        for n in axes.values():
            count *= n
        print(f"training on {count} local processes, mesh {args.mesh}", flush=True)
        ours = sl.launch(train, args, device=args.device or "cpu", timeout=3600, **axes)[0]
    print("the same steps in one process", flush=True)
    worst = report(args, ours, train_alone(args))
    return 0 if args.dropout or worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
