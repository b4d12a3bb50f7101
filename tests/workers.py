"""A pool of real processes on torch's default device, started once and kept for the whole run.

On the CPU they are forked and meet over gloo.  Where a test run is on the pretend accelerator, they
are forked from a server that has used no device: autograd has threads of its own where it has.

``run`` sends a module-level function to every rank, inside the mesh asked for, and returns what
each returned.  The first failure is raised at once, though others may wait for that rank.  A task
that takes too long has its stacks dumped.  After either the pool is started anew.

Tasks and answers are pickled here: a Connection's own pickler puts tensors in shared memory, which
outlives a killed process.

Between tasks the processes are stopped: a thread of gloo wakes every 10 ms, and those of all pools
took a tenth of a core from the tests.
"""

import ctypes
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

import shardlib as sl
from tests import fixes


class WorkerError(AssertionError):
    """A rank raised; the text is its traceback."""


# Garbage is collected at another time on each rank: what a rank asks of the others must not hang on
# when that is.
_COLLECTED = [(700, 10, 10), (150, 5, 5), (20_000, 50, 50), (400, 2, 2)]


_PRELOAD = [
    "shardlib",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",  # and all that every model needs
]
"""What is imported once for all processes that are forked."""


def forks(device: str) -> bool:
    """Whether processes on this device may be forked from one that runs tests."""
    # torch for CUDA has threads after a compiled backward, which no fork survives
    return device == "cpu" and torch.version.cuda is None


def start_forked(
    fn: Callable[..., None], given: tuple[Any, ...], start_method: str, **how: Any
) -> Any:
    """Start the processes of ``sl.launch`` by a fork where that can be: they need import little.

    They are forked from a process of one thread: the store of ``sl.launch`` has threads in this
    one, and what such a thread holds at a fork is held for ever in the new process.
    """
    if forks("cpu"):
        mp.get_context("forkserver").set_forkserver_preload([*_PRELOAD, "tests.frozen"])
        # the server's environment is that of when it began
        inside = dict(os.environ), fn, given
        return start_processes(_in_environment, inside, start_method="forkserver", **how)
    return start_processes(fn, given, start_method=start_method, **how)


def _in_environment(
    rank: int, environment: dict[str, str], fn: Callable[..., None], given: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    fn(rank, *given)


def share_loop() -> None:
    """Put all of this process's groups on one device of gloo, whose thread wakes every 10 ms.

    By itself torch makes a device for each group, and each mesh of a pool stays.
    """
    make = dist.ProcessGroupGloo.__init__
    device = dist.ProcessGroupGloo.create_default_device()

    def on_device(
        group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        if timeout is not None:
            options._timeout = timeout
        make(group, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = on_device


def _serve(rank: int, world: int, folder: str, pipe: Connection, device: str) -> None:
    faulthandler.enable()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # at its parent's death: nobody wakes it then
    # what was forked stays: threads that a store's or a group's destructor joins are not in here
    gc.freeze()
    torch.set_num_threads(1)
    if device != "cpu":
        importlib.import_module("tests.accelerator.pretend").default()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    share_loop()
    store = dist.FileStore(os.path.join(folder, "store"), world)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    gc.set_threshold(*_COLLECTED[rank % len(_COLLECTED)])
    while True:
        fn, args, axes, seconds = pickle.loads(pipe.recv_bytes())
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        try:
            torch.manual_seed(0)
            with sl.make_mesh(device=device, **axes):
                answer = pickle.dumps((True, fn(*args)))
                fixes.run_together()
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)


class Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        self._start()

    def _start(self) -> None:
        device = torch.get_default_device().type
        context = mp.get_context("fork" if forks(device) else "forkserver")
        # nothing on the CPU may find another device registered
        also = [] if device == "cpu" else ["tests.accelerator.pretend"]
        context.set_forkserver_preload([*_PRELOAD, *also, "tests.frozen"])
        if forks(device):
            for name in _PRELOAD:
                if name.partition(".")[0] in sys.modules:  # transformers: where a test asks for it
                    importlib.import_module(name)
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world, self.folder.name, theirs, device),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def run(
        self, fn: Callable[..., Any], *args: Any, seconds: float = 60.0, **axes: int
    ) -> list[Any]:
        seconds *= 1 if torch.get_default_device().type == "cpu" else 3  # whose kernels are slow
        task = pickle.dumps((fn, args, axes, seconds))
        self._send(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send_bytes(task)
        answers: dict[int, Any] = {}
        until = time.monotonic() + seconds + 5  # the workers' own alarm comes first
        while len(answers) < self.world:
            left = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(left, until - time.monotonic()) or left:
                rank = self.pipes.index(pipe)
                try:
                    done, value = (
                        pickle.loads(pipe.recv_bytes())
                        if pipe.poll()
                        else (False, "no answer in time")
                    )
                except EOFError:
                    done, value = (
                        False,
                        f"no answer within {seconds:.0f} s, or the process died; see its stacks "
                        "above",
                    )
                if not done:
                    self.close()
                    self._start()
                    raise WorkerError(f"rank {rank}:\n{value}")
                answers[rank] = value
        self._send(signal.SIGSTOP)
        return [answers[rank] for rank in range(self.world)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
