"""What torchrun starts in ``tests/mesh/test_failures.py``: 20 steps, a checkpoint after each.

    torchrun --nproc-per-node 2 --max-restarts 1 tests/restarts.py FOLDER

Rank 1 is killed at step 7 of the first attempt; the second goes on from the newest checkpoint that
verifies.
"""

import os
import signal
import sys

import torch

import shardlib as sl


def steps(folder: str, killed: bool = False) -> tuple[int, float]:
    """Go on to step 20 on the mesh in scope, or until this process is killed: where from, and the sum."""
    w, begun = sl.shard(torch.arange(16.0), "x"), 0
    if (newest := sl.latest(folder, verify=True)) is not None:
        found = sl.load(newest, like={"w": w, "step": 0})
        w, begun = found["w"], found["step"]
    for step in range(begun, 20):
        w = w * 0.9 + 0.2 * sl.unshard(w.mean()).item()
        sl.save(folder, {"w": w, "step": step + 1}, step=step + 1, keep=2)
        if step == 7 and killed:
            os.kill(os.getpid(), signal.SIGKILL)
    return begun, float(sl.unshard(w).sum())


if __name__ == "__main__":
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    with sl.make_mesh(x=-1, device="cpu", timeout=60):
        print("ended", *steps(sys.argv[1], first and os.environ["RANK"] == "1"))
