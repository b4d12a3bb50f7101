"""Run a function in local processes, one for each rank of a
mesh: start them, wait, tell what went wrong.
"""

import math
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardlib.errors import ShardError
from shardlib.mesh.mesh import make_mesh, sizes_of

__all__ = ["launch"]


def launch(
    fn: Callable[..., Any], *args: Any, device: str = "cpu", timeout: float = 300.0, **axes: int
) -> list[Any]:
    """Run ``fn(*args)`` in local processes, one per rank of the mesh, each with the mesh in scope.

    Returns the results by rank.  The first error stops all and is raised here with its rank.
    ``fn``, ``args`` and results are pickled.

    >>> import shardlib as sl
    >>> sl.launch(sl.axis_index, "y", x=1, y=2)  # two processes start, meet over gloo, and end
    [0, 1]
    """
    sizes = sizes_of("launch", axes)
    _check_travels(fn, args)
    world = math.prod(sizes.values())
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank_main,
            (world, folder, fn, args, sizes, device),
            nprocs=world,
            join=False,
            start_method="spawn",
        )
        error: Exception | None = None
        lost: int | None = None  # a rank ended by a signal: what the others say is its consequence
        try:
            until = time.monotonic() + timeout
            while not context.join(timeout=1.0):
                if time.monotonic() > until:
                    raise ShardError(
                        f"no result after {timeout:.0f} s",
                        op="launch",
                        mesh=sizes,
                        fix=f"timeout={2 * timeout:.0f}",
                    )
        except ShardError as e:
            error = e
        except Exception as e:
            error = ShardError(f"a rank died: {e}", op="launch", mesh=sizes)
            ends = [p.exitcode or 0 for p in context.processes]
            lost = next(
                (r for r, code in enumerate(ends) if code < 0 and code != -signal.SIGTERM), None
            )
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        failed = [f for f in os.listdir(folder) if f.startswith("error")]
        # the first is the cause
        failed.sort(key=lambda f: os.stat(os.path.join(folder, f)).st_mtime_ns)
        if lost is not None:
            raise ShardError(
                f"rank {lost} was ended by {signal.Signals(-ends[lost]).name}",
                op="launch",
                mesh=sizes,
            )
        if failed:
            rank = int(failed[0][5:])
            with open(os.path.join(folder, failed[0]), "rb") as file:
                cause, text = pickle.load(file)
            raise ShardError(f"rank {rank} failed:\n{text}", op="launch", mesh=sizes) from cause
        if error is not None:
            raise error
        results = []
        for rank in range(world):
            with open(os.path.join(folder, f"result{rank}"), "rb") as file:
                results.append(pickle.load(file))
        return results


def _check_travels(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Say so here where a new process could not find the function."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    last = name.split(".")[-1]
    fix = (
        f"from my_module import {last if last.isidentifier() else 'fn'}  # a function that a "
        "module of its own defines"
    )
    if getattr(fn, "__module__", "") == "__main__" and not hasattr(
        sys.modules["__main__"], "__file__"
    ):
        raise ShardError(
            f"{name} was defined at a prompt, where new processes cannot find it",
            op="launch",
            fix=fix,
        )
    try:
        pickle.dumps((fn, args))
    except Exception as e:
        raise ShardError(
            f"{name} or its arguments cannot be pickled: {e}", op="launch", fix=fix
        ) from e


def _rank_main(
    rank: int,
    world: int,
    folder: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    axes: dict[str, int],
    device: str,
) -> None:
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        if device == "cuda":
            torch.cuda.set_device(rank)
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world
        )
        with make_mesh(device=device, **axes):
            result = fn(*args)
        with open(os.path.join(folder, f"result{rank}"), "wb") as file:
            pickle.dump(result, file)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as e:
        text = traceback.format_exc()
        try:
            blob = pickle.dumps((e, text))
            pickle.loads(blob)
        except Exception:
            blob = pickle.dumps((None, text))
        with open(os.path.join(folder, f"error{rank}"), "wb") as file:
            file.write(blob)
        raise SystemExit(1) from None
