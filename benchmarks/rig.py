"""A rig where bytes cost time: every rank behind its own bandwidth-limited link.

Each rank is a process in its own network namespace, joined to a bridge by a veth pair with a token
bucket (tc tbf) on both ends: a full-duplex port of a fixed rate.  gloo runs over it unchanged, and
``/proc/net/dev`` counts what was really sent.  Needs Linux with ip, tc and unshare, as root or
where unprivileged user namespaces are on; ``unavailable()`` says what is missing.

    python -m benchmarks.rig            the control: measured against the rate

The hub is process 1 of its own process namespace: when it goes, so does everything it started.
"""

import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "Disturbed",
    "Row",
    "bytes_sent",
    "compare",
    "control",
    "private",
    "ratio",
    "run",
    "say",
    "unavailable",
]

_MIB = 2**20


class Disturbed(RuntimeError):
    """The machine was too busy for the figures to mean anything."""


@dataclass(frozen=True)
class Row:
    """One repetition of one contestant: seconds of the slowest
    rank, bytes sent by the average one.
    """

    name: str
    seconds: float
    sent: float


# ---------------------------------------------------------------- inside a rank


def bytes_sent() -> int:
    """Bytes this rank has put on its link, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("e0:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("no link e0 here: this runs inside rig.run")


def say(line: str) -> None:
    """Print a figure as soon as it is known, on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def compare(
    contestants: dict[str, Callable[[], Any]], repeats: int = 5, warmup: int = 1, told: bool = False
) -> list[Row]:
    """Run every contestant in turn, again and again, so that a disturbance meets all of them.

    ``told``  print every repetition as it ends.
    """
    rows = []
    for turn in range(warmup + repeats):
        for name, work in contestants.items():
            dist.barrier()
            sent, began = bytes_sent(), time.perf_counter()
            work()
            took = time.perf_counter() - began
            dist.barrier()
            slowest, mean = (
                torch.tensor([took]),
                torch.tensor([float(bytes_sent() - sent)], dtype=torch.float64),
            )
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(mean)
            if turn >= warmup:
                rows.append(Row(name, float(slowest), float(mean) / dist.get_world_size()))
                if told:
                    where = f"turn {turn - warmup + 1} of {repeats}"
                    say(f"  {where}  {name:<26}{rows[-1].seconds:>8.3f} s"
                        f"{rows[-1].sent / _MIB:>9.2f} MiB sent")  # fmt: skip
    return rows


def control(rate_mbit: float, repeats: int = 5, tries: int = 3, good: float = 1.15) -> float:
    """Seconds of a 4 MiB exchange with the neighbours over the ideal; 1.04 is headers alone.

    The best of ``tries`` medians: a passing disturbance is waited out, a lasting one is seen.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    out, into = torch.zeros(_MIB), torch.empty(_MIB)

    def ring() -> None:
        ops = [
            dist.P2POp(dist.isend, out, (rank + 1) % world),
            dist.P2POp(dist.irecv, into, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    ideal, best = 4 * _MIB * 8 / (rate_mbit * 1e6), float("inf")
    for _ in range(tries):
        best = min(
            best, statistics.median(row.seconds for row in compare({"ring": ring}, repeats)) / ideal
        )
        if best <= good:  # the same on every rank: compare gives all of them one figure
            break
    return best


# ---------------------------------------------------------------- outside


def ratio(rows: list[Row], a: str, b: str, what: str = "seconds") -> float:
    """The median over repetitions of a's figure divided by b's in the same repetition."""
    pairs = zip([r for r in rows if r.name == a], [r for r in rows if r.name == b], strict=True)
    return statistics.median(getattr(x, what) / getattr(y, what) for x, y in pairs)


def private(module: str, arguments: list[str]) -> int:
    """Run a benchmark again with a loopback device of its own, whose bytes
    are then nobody else's; its exit status.
    """
    up = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    return subprocess.run(
        [*_namespaces(), *up, sys.executable, "-m", module, *arguments]
    ).returncode


def _namespaces() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]


def unavailable() -> str | None:
    """Why no rig can be built here, or None."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        return (
            f"no {', '.join(missing)}"
            if missing
            else f"network namespaces are Linux's; this is {sys.platform}"
        )
    links = "ip link add br0 type bridge && ip link add h0 type veth peer name e0"
    trial = f"{links} && tc qdisc add dev h0 root tbf rate 1mbit burst 64kb limit 1mb"
    done = subprocess.run(
        [*_namespaces(), "sh", "-c", trial], capture_output=True, text=True, timeout=30
    )
    return (
        None
        if done.returncode == 0
        else f"namespaces, veth or tbf: {done.stderr.strip().splitlines()[-1:]}"
    )


def run(
    target: str,
    ranks: int,
    rate_mbit: float,
    *args: Any,
    seconds: float = 600,
    disturbed: float = 1.2,
) -> list[Any]:
    """Call ``module:function(*args)`` on every rank behind a link of ``rate_mbit``.

    Returns each rank's JSON answer and, last, what the control said before and after.  What a rank
    prints is seen at once.
    Raises: Disturbed if it took more than ``disturbed`` times the ideal; RuntimeError with the
    traceback of a rank that failed, or after ``seconds``.
    """
    if reason := unavailable():
        raise RuntimeError(f"no rig here: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        spec = {"target": target, "ranks": ranks, "rate": rate_mbit, "args": args, "folder": folder}
        # under a wide bar a control is not repeated until it is good
        spec["good"] = max(1.15, disturbed / 2)
        command = [
            *_namespaces(),
            sys.executable,
            "-m",
            "benchmarks.rig",
            "--hub",
            json.dumps(spec),
        ]
        sys.stdout.flush()
        errors = Path(folder, "errors")
        with errors.open("w") as file:
            hub = subprocess.Popen(command, stderr=file, start_new_session=True)
        try:
            failed, late = hub.wait(seconds) != 0, ""
        except subprocess.TimeoutExpired:
            failed, late = True, f"no answer within {seconds:.0f} s\n"
        finally:
            if hub.poll() is None:
                os.killpg(hub.pid, signal.SIGKILL)
                hub.wait()
        answers = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        if failed or not all(a.exists() for a in answers):
            raise RuntimeError(f"the rig failed:\n{late}{errors.read_text()[-4000:]}")
        found = [json.loads(a.read_text()) for a in answers]
    worst = max(found[0]["control"])
    if worst > disturbed:
        load = os.getloadavg()[0]
        raise Disturbed(
            f"the control took {worst:.2f} of the ideal (bar {disturbed}), at a load of {load:.1f}: "
            "figures taken meanwhile mean nothing"
        )
    return [f["answer"] for f in found] + [found[0]["control"]]


def _hub(spec: dict[str, Any]) -> int:
    """Process 1 of the namespaces: the bridge, a rank behind each port, and their answers."""

    def sh(line: str) -> None:
        subprocess.run(line.split(), check=True, capture_output=True)

    sh("ip link set lo up"), sh("ip link add br0 type bridge"), sh("ip link set br0 up")
    me = os.readlink("/proc/self/ns/net")
    ranks = []
    for rank in range(spec["ranks"]):
        command = [
            "unshare",
            "--net",
            sys.executable,
            "-m",
            "benchmarks.rig",
            "--rank",
            json.dumps(spec | {"rank": rank}),
        ]
        ranks.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        )
    bucket = f"root tbf rate {spec['rate']}mbit burst 64kb limit 8mb"
    for rank, process in enumerate(ranks):
        while os.readlink(f"/proc/{process.pid}/ns/net") == me:
            time.sleep(0.01)
        inside = f"nsenter -t {process.pid} -n"
        sh(f"ip link add h{rank} type veth peer name e0 netns {process.pid}")
        (
            sh(f"ip link set h{rank} master br0"),
            sh(f"ip link set h{rank} up"),
            sh(f"tc qdisc add dev h{rank} {bucket}"),
        )
        sh(f"{inside} ip addr add 10.77.0.{rank + 1}/24 dev e0"), sh(f"{inside} ip link set e0 up")
        sh(f"{inside} ip link set lo up"), sh(f"{inside} tc qdisc add dev e0 {bucket}")
        # No slow start, no small windows: what is measured is the link, and TCP only fills it.
        sh(f"{inside} ip route change 10.77.0.0/24 dev e0 initcwnd 4000 initrwnd 4000")
        for name, value in (
            ("slow_start_after_idle", "0"),
            ("rmem", "4096 4194304 8388608"),
            ("wmem", "4096 4194304 8388608"),
        ):
            subprocess.run(
                [*inside.split(), "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/tcp_{name}"],
                check=True,
            )
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
    left = set(ranks)
    while left:
        for process in list(left):
            if process.poll() is not None:
                left.remove(process)
                if process.returncode:
                    return 1  # the others would wait for it forever; they go with this process
        time.sleep(0.02)
    return 0


def _rank(spec: dict[str, Any]) -> None:
    sys.stdin.readline()  # the link is up
    os.environ["GLOO_SOCKET_IFNAME"] = "e0"
    torch.set_num_threads(1)
    folder, rank, world = spec["folder"], spec["rank"], spec["ranks"]
    store = dist.FileStore(os.path.join(folder, "store"), world)  # no host names to look up
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    module, _, function = spec["target"].partition(":")
    work = getattr(importlib.import_module(module), function)
    before = control(spec["rate"], good=spec["good"])
    answer = work(*spec["args"])
    after = control(spec["rate"], good=spec["good"])
    Path(folder, f"{rank}.json").write_text(
        json.dumps({"answer": answer, "control": [before, after]})
    )
    dist.barrier()
    dist.destroy_process_group()


def collectives(mib: int) -> list[dict[str, Any]]:
    """An all_gather and an all_reduce of ``mib`` MiB in all."""
    world = dist.get_world_size()
    x, out = (
        torch.zeros(mib * _MIB // 4 // world),
        [torch.empty(mib * _MIB // 4 // world) for _ in range(world)],
    )
    whole = torch.zeros(mib * _MIB // 4)
    rows = compare(
        {
            "all_gather": lambda: dist.all_gather(out, x),
            "all_reduce": lambda: dist.all_reduce(whole),
        }
    )
    return [asdict(row) for row in rows]


def main() -> int:
    if "--hub" in sys.argv:
        return _hub(json.loads(sys.argv[-1]))
    if "--rank" in sys.argv:
        _rank(json.loads(sys.argv[-1]))
        return 0
    if reason := unavailable():
        print(f"skipped: {reason}")
        return 0
    ranks, rate, mib = 4, 50.0, 4
    rows = [Row(**row) for row in run("benchmarks.rig:collectives", ranks, rate, mib)[0]]
    print(f"{ranks} ranks, {rate:.0f} Mbit/s each way, {mib} MiB; load {os.getloadavg()[0]:.1f}")
    for name, share in (
        ("all_gather", (ranks - 1) / ranks),
        ("all_reduce", 2 * (ranks - 1) / ranks),
    ):
        mine = [r for r in rows if r.name == name]
        sent, took = (
            statistics.median(r.sent for r in mine),
            statistics.median(r.seconds for r in mine),
        )
        ideal = share * mib * _MIB
        slower = took * rate * 1e6 / 8 / ideal
        print(
            f"{name:<11} sent {sent / ideal:.3f} of {ideal / _MIB:.2f} MiB, took {slower:.3f} of "
            "the ideal"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
