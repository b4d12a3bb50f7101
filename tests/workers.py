"""A pool of real gloo processes, forked once and kept for the whole run.

``run`` sends a module-level function to every rank, inside the mesh asked for, and returns what
each returned.  A task that takes too long has its stacks dumped and the pool is started anew.
"""

import faulthandler
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl


class WorkerError(AssertionError):
    """A rank raised; the text is its traceback."""


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    meshes: dict[tuple[tuple[str, int], ...], Any] = {}
    while True:
        task = pipe.recv()
        if task is None:
            break
        fn, args, axes, seconds = task
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        try:
            key = tuple(axes.items())
            if key not in meshes:
                meshes[key] = sl.make_mesh(device="cpu", **axes)
            torch.manual_seed(0)
            with sl.use_mesh(meshes[key]):
                answer = (True, fn(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
    os._exit(0)


class Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        self._start()

    def _start(self) -> None:
        context = mp.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, self.folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any, seconds: float = 60.0, **axes: int) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((fn, args, axes, seconds))
        answers: list[Any] = []
        for rank, pipe in enumerate(self.pipes):
            try:
                answers.append(pipe.recv() if pipe.poll(seconds + 5) else None)
            except EOFError:
                answers.append(None)
            if answers[-1] is None or not answers[-1][0]:
                text = "no answer in time" if answers[-1] is None else answers[-1][1]
                self.close()
                self._start()
                raise WorkerError(f"rank {rank}:\n{text}")
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
