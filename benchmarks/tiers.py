"""Memory tiers behind a throttled link, against memory, torch's offload, and what is computed.

    python -m benchmarks.tiers link       step time by load over compute, with and without depth
    python -m benchmarks.tiers overhead   everything resident over stage 3, and Python per chunk
    python -m benchmarks.tiers largest --width 512 --tokens 2 --limit 32
                                          the largest model within MiB of the device, by bisection
    python -m benchmarks.tiers gpu        the same within 8 and 24 GiB of a GPU, with tokens a second
    python -m benchmarks.tiers peers --width 512 --tokens 512
                                          against FSDP2 with CPUOffloadPolicy, on two gloo ranks

A step is forward, backward, a clip by the global norm and AdamW, of equal blocks of two square
matrices, in one process of one thread (and the threads of the tiers).  All contestants of a part
are interleaved step by step, figures are medians of each round's ratio.

Behind the throttled link a product is a pause of so many milliseconds, as on a device that computes
while the host moves: processors that others use change no figure.
"""

import argparse
import gc
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import shardlib as sl
from benchmarks.overlap import Paced

__all__ = ["main"]

o = sl.optim


class Block(nn.Module):
    """Two square matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


@dataclass
class Contestant:
    """A training step; the seconds of each, of the clock and of the processor."""

    step: Callable[[], float]
    tiers: Any = None
    cache: Any = None
    loss: Any = None
    held: Any = None
    tx: Any = None
    seconds: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    def run(self, whole: bool = False) -> None:
        """Time a step; ``whole``: with the updates that it has posted."""
        began, used = time.perf_counter(), time.process_time()
        self.step()
        for chunk in self.cache.chunks if whole and self.cache else ():
            self.cache.wait(chunk)
        self.seconds.append(time.perf_counter() - began)
        self.used.append(time.process_time() - used)


def network(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(layers)])


def contestant(
    layers: int, width: int, tokens: int, tiers: Any, product: float = 0.0, mesh: Any = None
) -> Contestant:
    """Make a training step, in memory or in tiers, by default on one rank.

    ``product``  the seconds of a product, if it is paced.
    """
    with sl.use_mesh(mesh) if mesh else sl.simulate(data=1) as mesh:
        net = network(layers, width).to(mesh.device)
        apply, params = sl.parallelize(net, [("*", "...")], inputs={"input": "data ."})
        inner = o.chain(o.clip_by_global_norm(1.0), o.adamw(1e-3))
        tx = o.zero(inner, "data", 3, tiers=tiers)
        held: Any = [tx.shard(params)]
        held.append(tx.init(held[0]))
        x = torch.randn(tokens, width, device=mesh.device)
        loss_of = lambda p: apply(p, x).square().mean()  # noqa: E731
        run = sl.value_and_grad(loss_of, into=tx)

    mode: Any = Paced(product / (2 * tokens * width**2)) if product else nullcontext()

    def step() -> float:
        with sl.use_mesh(mesh), mode:
            loss, grads = run(held[0])
            held[0], held[1], _ = o.step(tx, held[0], grads, held[1])
        return loss.item()

    return Contestant(step, tiers, held[0].cache if tiers else None, loss_of, held, tx)


def interleaved(some: dict[str, Contestant], rounds: int, whole: bool = False) -> None:
    """Run each once to warm up, then round by round, the order turned at each."""
    for c in some.values():
        c.step()
        c.step()
    names = list(some)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            some[name].run(whole)


def ratio(a: Contestant, b: Contestant, what: str = "seconds") -> float:
    """Return the median of each round's ratio."""
    return statistics.median(x / y for x, y in zip(getattr(a, what), getattr(b, what), strict=True))


# ---------------------------------------------------------------- a throttled link


def link(args: argparse.Namespace) -> int:
    """Print step times over those in memory, and over the larger of link and compute.

    ``explain``  what ``sl.explain`` says before, from the pace of products and the link.
    ``phases``  the larger of both in forward, where all blocks are loaded after their update, and in
                backward, where all gradients are sent before the next one: the least there is.
    """
    L, room, part = args.layers, args.room, 8 * args.width**2
    forward = 2 * args.product / 1e3
    made = (L, args.width, args.tokens)
    some = {"memory": contestant(*made, None, args.product / 1e3)}
    for load in args.loads:
        for depth in (None, 0):
            tiers = o.Tiers(device=(2 + room) * part, rate=part / (load * forward), depth=depth)
            some[f"{load} {depth}"] = contestant(*made, tiers, args.product / 1e3)
    interleaved(some, args.rounds)
    memory = some.pop("memory")
    step = statistics.median(memory.seconds)
    print(
        f"{L} blocks of {part / 1e6:.2f} MB, room for {room}: forward {1e3 * forward:.0f} ms a block, "
        f"a step in memory {step:.3f} s, {2 * L - room} loads"
    )
    print("load/forward depth  busy  / memory  / larger  / phases  / explain")
    for name, c in some.items():
        load, depth = name.split()[0], c.cache.depth
        one = float(load) * forward
        busy = (2 * L - room) * one / step
        # forward loads all blocks, backward sends all gradients, and neither may begin sooner
        phases = max(L * one, L * forward) + max(L * one, step - L * forward)
        over, took = ratio(c, memory), statistics.median(c.seconds)
        # products at the pace, without what Python takes beside them
        pace = 2 * args.tokens * args.width**2 / (args.product / 1e3)
        how = sl.planning.Cluster(memory=1.0, flops=pace, host=part / one)
        said = sl.explain(c.loss, c.held[0], tx=c.tx, cluster=how).tiers
        print(
            f"{load:>12}{depth:>6}{busy:>6.2f}{over:>10.3f}{over / max(busy, 1.0):>10.3f}"
            f"{over * step / phases:>10.3f}{took / said.seconds:>11.3f}"
        )
    return 0


# ---------------------------------------------------------------- everything resident


def overhead(args: argparse.Namespace) -> int:
    """Print the processor's time of a step in tiers without a budget over stage 3 in memory."""
    for width, tokens in ((512, 1024), (64, 16)):
        some = {
            "memory": contestant(args.layers, width, tokens, None),
            "tiers": contestant(args.layers, width, tokens, o.Tiers()),
        }
        rounds = args.rounds if width > 64 else 10 * args.rounds
        interleaved(some, rounds, whole=True)
        a, b = some["tiers"], some["memory"]
        more = statistics.median(x - y for x, y in zip(a.used, b.used, strict=True))
        print(
            f"{args.layers} blocks of {8 * width**2 / 1e6:.2f} MB: processor {ratio(a, b, 'used'):.3f}, "
            f"time {ratio(a, b):.3f} of {1e3 * statistics.median(b.seconds):.1f} ms, "
            f"{1e3 * more / args.layers:.3f} ms more a block"
        )
    return 0


# ---------------------------------------------------------------- torch's offload


def fsdp2(args: argparse.Namespace) -> Contestant:
    """The same step by FSDP2 with CPUOffloadPolicy."""
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    net = network(args.layers, args.width)
    how = CPUOffloadPolicy(pin_memory=args.device == "cuda")
    for block in (*net, net):
        fully_shard(block, mesh=mesh, offload_policy=how)
    update = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.01, fused=True)
    x = torch.randn(args.tokens, args.width, device=args.device)
    x = x.chunk(dist.get_world_size())[dist.get_rank()]

    def step() -> float:
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        update.step()
        update.zero_grad()
        dist.all_reduce(mean := loss.detach())
        return float(mean) / dist.get_world_size()

    return Contestant(step)


def ranked(rank: int, port: int, args: argparse.Namespace) -> None:
    """Run by every rank: print our times over those of FSDP2, on the same ranks."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    part = 8 * args.width**2
    mesh = sl.make_mesh(device="cpu", data=args.ranks)
    made = (args.layers, args.width, args.tokens)
    theirs = fsdp2(args)
    some = {
        "memory": contestant(*made, None, mesh=mesh),
        "tiers, all": contestant(*made, o.Tiers(), mesh=mesh),
        # gathered and reduced: two of each, beside three parts
        "tiers": contestant(*made, o.Tiers(device=8 * part + 3 * part // args.ranks), mesh=mesh),
        "FSDP2, offload": theirs,
    }
    first = {name: c.step() for name, c in some.items()}
    interleaved(some, args.rounds)
    last = {name: c.step() for name, c in some.items()}
    for c in some.values():
        used = torch.tensor(c.used, dtype=torch.float64)
        dist.all_reduce(used)
        c.used = used.tolist()
    if rank == 0:
        print(f"{args.ranks} ranks, {args.layers} blocks of {part / 1e6:.1f} MB; medians of ratios")
        print("                  seconds  / FSDP2  processor / FSDP2  losses")
        for name, c in some.items():
            print(
                f"{name:<16}{statistics.median(c.seconds):>9.3f}{ratio(c, theirs):>9.2f}"
                f"{ratio(c, theirs, 'used'):>19.2f}  {first[name]:.6f} {last[name]:.6f}"
            )
        for name in ("tiers, all", "tiers"):
            peak = {t: f"{n / 1e6:.1f} MB" for t, n in some[name].tiers.ledger.peak.items()}
            print(f"{name}: peaks of a rank {peak}")
    dist.barrier()
    dist.destroy_process_group()


def peers(args: argparse.Namespace) -> int:
    """Print a step in tiers over one of FSDP2 with CPUOffloadPolicy, on the same gloo ranks."""
    multiprocessing.spawn(ranked, (_free_port(), args), args.ranks)
    return 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


# ---------------------------------------------------------------- the largest model


def trial(args: argparse.Namespace) -> int:
    """Train two steps with the device held to ``--limit``; print parameters and tokens a second.

    The limit counts from training on: of a CPU what the process takes in private memory, of a GPU
    what its allocator gives.
    """
    gpu, limit = args.device == "cuda", args.limit << 20
    tiers = o.Tiers(device=0.6 * limit) if args.where == "tiers" else None
    if tiers is not None:
        # the stacks of threads are private memory
        tiers.movers(torch.device(args.device))
    # what is imported and made once
    contestant(2, 8, 8, None).step()
    contestant(2, 8, 8, o.Tiers()).step()
    base = _private()
    if args.where == "fsdp2":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        dist.init_process_group("nccl" if gpu else "gloo", rank=0, world_size=1)
        c = fsdp2(args)
    else:
        with sl.simulate(data=1, device=args.device) as mesh:
            c = contestant(args.layers, args.width, args.tokens, tiers, mesh=mesh)
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (base + limit,) * 2)
    c.step()
    c.run()
    print(
        json.dumps({"numbers": 2 * args.layers * args.width**2, "rate": args.tokens / c.seconds[0]})
    )
    return 0


def _private() -> int:
    found = next(s for s in open("/proc/self/status") if s.startswith("VmData"))  # noqa: SIM115
    return int(found.split()[1]) << 10


def tried(where: str, layers: int, args: argparse.Namespace) -> dict[str, float] | None:
    """Run a trial in a process of its own; None where it does not fit."""
    given = {"width": args.width, "tokens": args.tokens, "limit": args.limit, "device": args.device}
    more = [x for k, v in given.items() for x in (f"--{k}", str(v))]
    command = [sys.executable, "-m", "benchmarks.tiers", "trial", "--where", where]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [*command, "--layers", str(layers), *more], capture_output=True, text=True, env=env
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    full = ("allocate memory", "out of memory", "MemoryError", "do not fit", "needs")
    if not any(word in done.stderr for word in full):
        raise RuntimeError(done.stderr[-2000:])
    return None


def largest(args: argparse.Namespace) -> int:
    """Bisect the layers that fit within ``--limit`` MiB, ``--most`` at the most."""
    found = {}
    for where in ("memory", "tiers", *["fsdp2"] * (args.device == "cuda")):
        low, high = 0, 1
        while high <= args.most and tried(where, high, args):
            low, high = high, 2 * high
        high = min(high, args.most + 1)
        while high - low > max(low // 16, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if tried(where, middle, args) else (low, middle)
        found[where] = low
    common = max(min(found.values()), 1)
    print(f"within {args.limit} MiB of {args.device}, blocks of {2 * args.width**2:,} parameters")
    for where, layers in found.items():
        at = tried(where, common, args)
        rate = "-" if at is None else f"{at['rate']:,.0f}"
        more = " or more" if layers >= args.most else ""
        print(
            f"{where:<8} {layers} blocks{more}, {2 * layers * args.width**2 / 1e6:,.1f} M parameters; "
            f"{rate} tokens a second at {common} blocks"
        )
    return 0


def gpu(args: argparse.Namespace) -> int:
    """The largest model within 8 and 24 GiB of a GPU, and tokens a second at a size all train."""
    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device")
        return 0
    for gib in (8, 24):
        how = {"device": "cuda", "limit": gib << 10, "width": 4096, "tokens": 4096, "most": 512}
        largest(argparse.Namespace(**{**vars(args), **how}))
    return 0


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("part", choices=["link", "overhead", "peers", "largest", "gpu", "trial"])
    p.add_argument("--device", default="cpu")
    p.add_argument("--limit", type=int, default=32, help="MiB of the device")
    p.add_argument("--most", type=int, default=256, help="blocks")
    p.add_argument("--where", default="tiers", choices=["memory", "tiers", "fsdp2"])
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--tokens", type=int, default=16)
    p.add_argument("--room", type=int, default=3)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--product", type=float, default=10.0, help="milliseconds of a paced product")
    p.add_argument(
        "--loads", type=lambda t: [float(x) for x in t.split(",")], default=[0.5, 0.9, 1.5, 3.0]
    )
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    return globals()[args.part](args)


if __name__ == "__main__":
    raise SystemExit(main())
