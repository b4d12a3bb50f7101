"""Process index and count of the job, the launcher's environment, and printing on rank 0."""

import os
from typing import TextIO

import torch.distributed as dist

from shardlib.errors import MeshError


def launched(op: str) -> bool:
    """Check whether torchrun, or another launcher, started this process with a rank.

    Raises: MeshError if only part of its environment is set, or holds no numbers.
    """
    rank, world = (os.environ.get(n) for n in ("RANK", "WORLD_SIZE"))
    if rank is None and world is None:
        return False
    wrong = [
        f"{name} is {'not set' if text is None else repr(text[:40])}"
        for name, text in (("RANK", rank), ("WORLD_SIZE", world))
        if text is None or not (text.isascii() and text.isdecimal())
    ]
    if not wrong and int(rank or 0) >= int(world or 0):
        wrong = [f"RANK is {rank}, and WORLD_SIZE {world}"]
    if not wrong:
        return True
    why = f"a launcher sets RANK and WORLD_SIZE, and here {' and '.join(wrong)}"
    fix = "torchrun --nproc-per-node 4 script.py   # or, in one process: unset RANK WORLD_SIZE"
    raise MeshError(why, op=op, fix=fix)


def world_size(op: str) -> int:
    """Count the processes of the job, also before the process group is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if launched(op) else 1


def process_index() -> int:
    """Return the index of this process in the job: 0 if it is alone, or simulates every rank.

    ``if sl.process_index() == 0:`` is true once under torchrun, ``sl.launch`` and ``sl.simulate``
    alike; calls that all ranks must make (collectives, ``unshard``, ``save``) belong outside it.
    Raises: MeshError if only part of a launcher's environment is set.

    >>> import shardlib as sl
    >>> sl.launch(sl.process_index, x=2), sl.process_index()
    ([0, 1], 0)
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if launched("process_index") else 0


def rank0_print(
    *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = True
) -> None:
    """Print on process 0 alone: once, however many ranks run.

    All ranks call it; arguments that need communication (``unshard``) are computed on every rank.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=4):
    ...     sl.rank0_print("mean", sl.shard(torch.arange(8.0), "x").mean().item())
    mean 3.5
    """
    if process_index() == 0:
        # one write, so that other processes cannot print inside the line
        print(sep.join(map(str, values)) + end, end="", file=file, flush=flush)
