"""Launch of a function in local processes, one per rank of a mesh, and the report of failures.

The processes connect to a store that this one serves on the loopback interface; their transfers
use this interface too.
"""

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardlib.errors import RankFailed, ShardError, user_line
from shardlib.mesh.devices import backend_of, take_device
from shardlib.mesh.failures import ABORTED, CHECK_IT, current_job, lost, operations, position
from shardlib.mesh.mesh import TIMEOUT, Sizes, check_device, check_timeout, make_mesh, sizes_of

# seconds that processes may take to import the script and connect
_START = 180.0
# extra seconds before this process gives up: the ranks' own errors are better
_SLACK = 6.0


def launch(
    fn: Callable[..., Any], *args: Any, device: str = "cpu", timeout: float = TIMEOUT, **axes: int
) -> list[Any]:
    """Run ``fn(*args)`` in local processes, one per rank of the mesh, each with the mesh in scope.

    Returns the results by rank.  The first error stops all ranks and is raised here with its rank.
    ``fn``, ``args`` and results are pickled; a script calls this under
    ``if __name__ == "__main__":``, since the processes import it.
    ``device``   a device type of torch, as in ``make_mesh``; rank r uses device number r, counted
                 from 0 again where there are fewer devices than ranks.
    ``timeout``  seconds that a transfer may take, and that all ranks together may be idle (no
                 transfer, no computation); the length of the run has no limit.
    Raises: RankFailed where a rank died, left, stopped or called other operations, with the rank.

    >>> import shardlib as sl
    >>> sl.launch(sl.axis_index, "y", x=1, y=2)  # two processes start, connect over gloo, and end
    [0, 1]
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise _unguarded(os.environ.get(_FOLDER))
    sizes = sizes_of("launch", axes)
    device = check_device(device, "launch", sizes) or "cpu"
    backend_of(device, "launch")
    check_timeout(timeout, "launch", "sl.launch(fn, x=2, timeout=100.0)")
    _check_travels(fn, args)
    world = math.prod(sizes.values())
    with tempfile.TemporaryDirectory() as folder:
        store, port = loopback_store()
        os.environ[_FOLDER] = folder
        try:
            given = (world, folder, port, fn, args, sizes, device, timeout)
            context = mp.start_processes(
                _rank_main, given, nprocs=world, join=False, start_method="spawn"
            )
        finally:
            del os.environ[_FOLDER]
        try:
            idle = _wait(context.processes, Path(folder), timeout)
            ends = [p.exitcode for p in context.processes]
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join(_SLACK)
            del store
        _refuse_failed(Path(folder), ends, sizes, idle)
        return [pickle.loads(Path(folder, f"result{r}").read_bytes()) for r in range(world)]


_FOLDER = "SHARDLIB_LAUNCH_FOLDER"


def loopback_store() -> tuple[dist.TCPStore, int]:
    """Open the ranks' store, on the loopback interface; return it and its port."""
    # all ranks connect at about the same time, hence the backlog
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port


def _wait(processes: list[Any], folder: Path, timeout: float) -> dict[str, str] | None:
    """Wait until all are done or one fails; return the ranks' positions if all are idle."""
    begun = time.monotonic()
    while True:
        left = [p for p in processes if p.exitcode is None]
        ended = [r for r, p in enumerate(processes) if p.exitcode is not None]
        if any(processes[r].exitcode or not (folder / f"result{r}").exists() for r in ended):
            _hear_out(processes, folder)
            return None
        if not left:
            return None
        wait([p.sentinel for p in left], 0.5)
        beats = [folder / f"beat{r}" for r in range(len(processes))]
        quiet = time.monotonic() - begun
        if all(b.exists() for b in beats):
            quiet = time.time() - max(b.stat().st_mtime for b in beats)
            if quiet > timeout + _SLACK:
                return _roll(folder, len(processes))
        elif quiet > max(_START, timeout):
            return {"start": f"after {quiet:.0f} s not every rank had begun"}


def _hear_out(processes: list[Any], folder: Path) -> None:
    """Wait a second for the other ranks' errors: the first that ended may be a consequence."""
    until = time.monotonic() + 1.0
    while time.monotonic() < until and any(p.exitcode is None for p in processes):
        wait([p.sentinel for p in processes if p.exitcode is None], 0.1)


def _roll(folder: Path, world: int) -> dict[str, str]:
    """Collect the position of every rank, from their threads that still run."""
    (folder / "roll").touch()
    until = time.monotonic() + 3.0
    places = [folder / f"at{r}" for r in range(world)]
    while time.monotonic() < until and not all(p.exists() for p in places):
        time.sleep(0.1)
    return {f"rank {r}": p.read_text() if p.exists() else "no answer" for r, p in enumerate(places)}


def _refuse_ended(ends: list[int | None], failed: Callable[..., RankFailed]) -> None:
    for rank, code in enumerate(ends):
        if code:
            raise failed(f"rank {rank} ended with exit code {code}")


def _said(folder: Path, sizes: Sizes) -> list[Any]:
    """List (rank, error, text) of the ranks that lost others, in the order of time.

    Raises: ShardError for a rank with an error of its own.
    """
    errors = sorted(folder.glob("error*"), key=lambda f: f.stat().st_mtime_ns)
    said: list[Any] = [(int(f.name[5:]), *pickle.loads(f.read_bytes())) for f in errors]
    for rank, cause, text in said:
        if not isinstance(cause, RankFailed):
            raise ShardError(f"rank {rank} failed:\n{text}", op="launch", mesh=sizes) from cause
    return said


def _refuse_failed(
    folder: Path, ends: list[int | None], sizes: Sizes, idle: dict[str, str] | None
) -> None:
    """Raise the first cause, by each rank's exit code and error file, if a rank failed."""
    if (folder / "unguarded").exists():
        raise _unguarded(None)
    failed = partial(RankFailed, op="launch", mesh=sizes)
    _refuse_killed(ends, failed)
    said = _said(folder, sizes)
    left = {r for r, code in enumerate(ends) if code == 0} - {r for r, *_ in said}
    for rank in sorted(left):
        if not (folder / f"result{rank}").exists():
            raise failed(f"rank {rank} left with exit code 0 before its function returned")
    for _, cause, _ in said:
        raise failed(cause.message, operands=cause.operands, fix=cause.fix) from cause
    if idle is not None:
        axes = ", ".join(f"{n}={s}" for n, s in sizes.items())
        fix = f"sl.launch(fn, *args, {axes}, timeout=1000.0)"
        raise failed("no rank did anything for longer than its timeout", operands=idle, fix=fix)
    _refuse_ended(ends, failed)


def _refuse_killed(ends: list[int | None], failed: Callable[..., RankFailed]) -> None:
    """Raise for a rank that a signal ended; SIGABRT is often a consequence of another's end."""
    killed = [(r, -code) for r, code in enumerate(ends) if code is not None and code < 0]
    if killed:
        rank, number = min(killed, key=lambda end: end[1] == signal.SIGABRT)
        if number == signal.SIGABRT:
            raise failed(ABORTED.format(rank), fix=CHECK_IT)
        raise failed(f"rank {rank} was ended by {signal.Signals(number).name}")


def _unguarded(folder: str | None) -> ShardError:
    """Build the error for a script that calls launch where its processes import it."""
    if folder is not None:
        Path(folder, "unguarded").touch()
    return ShardError(
        "each rank imports the script that calls launch, and would call it again: the call stands "
        'outside `if __name__ == "__main__":`',
        op="launch",
        fix='if __name__ == "__main__": sl.launch(fn, x=2)',
    )


def _check_travels(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse here a function that a new process could not import or unpickle."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    try:
        pickle.dumps((fn, args))
        prompt = not hasattr(sys.modules["__main__"], "__file__")
        if not prompt or getattr(fn, "__module__", "") != "__main__":
            return
        cause, why = None, "was defined at a prompt, where new processes cannot find it"
    except Exception as e:
        cause, why = e, f"or its arguments cannot be pickled: {e}"
    last = name.split(".")[-1]
    last = last if last.isidentifier() else "fn"
    fix = f"from my_module import {last}  # a function that a module of its own defines"
    raise ShardError(f"{name} {why}", op="launch", fix=fix) from cause


def _rank_main(
    rank: int,
    world: int,
    folder: str,
    port: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    axes: dict[str, int],
    device: str,
    timeout: float,
) -> None:
    try:
        faulthandler.enable()
        threading.Thread(
            target=_beat, args=(Path(folder), rank), name="shardlib beat", daemon=True
        ).start()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        loopback = next((n for _, n in socket.if_nameindex() if n.startswith("lo")), None)
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        take_device(device, rank)
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
        dist.init_process_group(
            backend_of(device, "launch"),
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=max(_START, timeout)),
        )
        with make_mesh(device=device, timeout=timeout, **axes):
            result = fn(*args)
        Path(folder, f"result{rank}.part").write_bytes(pickle.dumps(result))
        try:
            dist.barrier()
        except RuntimeError as e:
            lost(e, ("?", "the end", tuple(axes), torch.Size(), torch.uint8))
            raise
        os.rename(Path(folder, f"result{rank}.part"), Path(folder, f"result{rank}"))
        if (job := current_job()) is not None:
            job.leave()
        dist.destroy_process_group()
    except BaseException as e:
        _tell(Path(folder), rank, e)
        sys.stdout.flush()
        sys.stderr.flush()
        # a group whose transfers failed can abort the process at its teardown
        os._exit(1)


def _tell(folder: Path, rank: int, error: BaseException) -> None:
    """Report the error that ended this rank to the other ranks, and to the parent process."""
    if (job := current_job()) is not None:
        job.raised(error)
    text = traceback.format_exc()
    if isinstance(error, SystemExit):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        text = f"it left by {error!r}, at {user_line(frame)}\n{text}"
    try:
        blob = pickle.dumps((error, text))
        pickle.loads(blob)
    except Exception:
        blob = pickle.dumps((None, text))
    part = folder / f"part{rank}"
    part.write_bytes(blob)
    part.rename(folder / f"error{rank}")


def _beat(folder: Path, rank: int) -> None:
    """Touch a file while this rank works, that is, communicates or uses CPU time."""
    beat, place = folder / f"beat{rank}", folder / f"at{rank}"
    count, used = -1, -1.0
    while folder.exists():
        now = operations()
        cpu = time.process_time()
        try:
            # a tenth of the 0.5 s between two beats; this thread itself uses less
            if now != count or cpu - used > 0.05:
                count = now
                beat.touch()
            used = cpu
            if (folder / "roll").exists() and not place.exists():
                place.write_text(position(threading.main_thread()))
        except OSError:  # the folder is gone
            return
        time.sleep(0.5)
