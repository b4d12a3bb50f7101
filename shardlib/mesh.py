"""Named meshes, the mesh in scope, and launching local processes.

A ``Mesh`` is our view of a grid of ranks with named axes.  Its ``kind`` says who plays the
ranks: ``dist`` real processes, ``stacked`` one process playing all of them, ``record`` nobody
(shapes and bytes only).
"""

import atexit
import difflib
import gc
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlib.errors import AxisReused, MeshError, NoMesh, ShardError, UnknownAxis

__all__ = [
    "Link", "Mesh", "as_mesh", "bind", "current_mesh", "launch", "make_mesh", "record", "simulate", "use_mesh",
]  # fmt: skip

Kind = Literal["dist", "stacked", "record"]


@dataclass(frozen=True)
class Link:
    """What moving along a mesh axis takes: ``alpha`` seconds per message and ``beta`` per byte received."""

    alpha: float = 2e-5
    beta: float = 1e-9


class Mesh(Mapping[str, int]):
    """Axis names and sizes, and who plays the ranks.  Also a mapping axis -> size."""

    def __init__(
        self,
        axes: Mapping[str, int],
        *,
        kind: Kind = "stacked",
        device: torch.device | str = "cpu",
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self.axes = dict(axes)
        self.names, self.sizes = tuple(self.axes), tuple(self.axes.values())
        self.size = math.prod(self.sizes)
        self.kind: Kind = kind
        self.device = torch.device(device)
        self.device_mesh = device_mesh
        self.links: dict[str, Link] = {}  # axis -> what was measured along it; see sl.probe
        self.coord: dict[str, int] | None = None
        self.world: Callable[[], Any] = lambda: None  # the group of all ranks when the mesh was made; not kept alive
        if device_mesh is not None:
            if dist.is_initialized():
                self.world = weakref.ref(dist.group.WORLD)
            here = device_mesh.get_coordinate()
            if here is not None:
                self.coord = dict(zip(self.names, here, strict=True))
        self._known: dict[str | tuple[str, ...], int] = dict(self.axes)
        self.groups: dict[Any, Any] = {}  # filled by collectives/dist.py; dies with the mesh
        self.plans: dict[Any, Any] = {}  # what operators found out about operands laid out so; likewise
        self.stream: Any = None  # of random draws; filled by random.py

    def axis_size(self, axis: str | tuple[str, ...]) -> int:
        """Size of an axis, or the product of several.  Raises: UnknownAxis."""
        found = self._known.get(axis)
        if found is None:
            if isinstance(axis, str):
                raise unknown_axis(axis, self.axes)
            if len(set(axis)) < len(axis):
                raise AxisReused(
                    f"axis {axis!r} names a mesh axis twice", mesh=self, fix=repr(tuple(dict.fromkeys(axis)))
                )
            found = self._known[tuple(axis)] = math.prod([self.axis_size(a) for a in axis])
        return found

    def __getitem__(self, axis: str) -> int:
        return self.axes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __str__(self) -> str:
        return " ".join(f"{n}={s}" for n, s in self.axes.items())

    def __repr__(self) -> str:
        return f"Mesh({self}, {self.kind})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        return self


def unknown_axis(axis: str, axes: Mapping[str, int], op: str = "") -> UnknownAxis:
    """The error for an axis that is not in the mesh, with its neighbours."""
    near = difflib.get_close_matches(axis, list(axes), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UnknownAxis(
        f"unknown axis {axis!r}; this mesh has {', '.join(axes)}{hint}",
        op=op,
        mesh=dict(axes),
        fix=repr((near or list(axes) or [""])[0]),
    )


# ---------------------------------------------------------------- the mesh in scope


class _Scope(threading.local):
    """Each thread's own; ``entered``: what stood in scope before each ``with sl.simulate(...)`` here."""

    mesh: Mesh | None = None

    def __init__(self) -> None:
        self.entered: list[Mesh | None] = []


_SCOPE = _Scope()


class bind:
    """Put a mesh in scope with as little ado as possible; for rules' forward and backward."""

    __slots__ = ("before", "mesh")

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __enter__(self) -> Mesh:
        self.before = _SCOPE.mesh
        _SCOPE.mesh = self.mesh
        return self.mesh

    def __exit__(self, *_: object) -> None:
        _SCOPE.mesh = self.before


def current_mesh() -> Mesh:
    """The mesh in scope.  Raises: NoMesh."""
    if _SCOPE.mesh is None:
        raise NoMesh("no mesh is in scope", op="current_mesh", fix="with sl.use_mesh(sl.simulate(x=2, y=2)): ...")
    return _SCOPE.mesh


_VIEWS: "weakref.WeakKeyDictionary[DeviceMesh, Mesh]" = weakref.WeakKeyDictionary()


def as_mesh(mesh: Mesh | DeviceMesh | None = None) -> Mesh:
    """Our view of a mesh: itself, a named DeviceMesh, or (None) the one in scope."""
    if mesh is None:
        return current_mesh()
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"not a mesh: {mesh!r}", op="use_mesh", fix="sl.use_mesh(sl.simulate(x=2, y=2))")
    found = _VIEWS.get(mesh)  # DeviceMeshes are equal by their ranks, also across a restart of the group
    if found is None or (found.device_mesh is not mesh and found.world() is not dist.group.WORLD):
        names = mesh.mesh_dim_names
        if not names:
            raise MeshError(
                "this DeviceMesh has no axis names",
                op="use_mesh",
                operands={"shape": tuple(mesh.shape)},
                fix=f"init_device_mesh({mesh.device_type!r}, {tuple(mesh.shape)}, "
                f"mesh_dim_names={tuple('xyzw'[: mesh.ndim])})",
            )
        axes = dict(zip(names, mesh.shape, strict=True))
        index = f":{torch.cuda.current_device()}" if mesh.device_type == "cuda" else ""
        _VIEWS.pop(mesh, None)
        found = _VIEWS[mesh] = Mesh(axes, kind="dist", device=f"{mesh.device_type}{index}", device_mesh=mesh)
    return found


@contextmanager
def use_mesh(mesh: Mesh | DeviceMesh) -> Iterator[Mesh]:
    """Put a mesh in scope: ``with sl.use_mesh(sl.make_mesh(x=2, y=2)):``."""
    with bind(as_mesh(mesh)) as m:
        yield m


class _Played(Mesh):
    """A mesh that is its own context manager: ``with sl.simulate(x=2, y=2):``."""

    def __enter__(self) -> Mesh:
        _SCOPE.entered.append(_SCOPE.mesh)
        _SCOPE.mesh = self
        return self

    def __exit__(self, *_: object) -> None:
        _SCOPE.mesh = _SCOPE.entered.pop()


_FIRST = {"launch": "fn, "}
"""What a call takes before its axes."""


def _sizes(op: str, axes: Mapping[str, int]) -> dict[str, int]:
    bad = {n: s for n, s in axes.items() if not isinstance(s, int) or s < 1}
    if bad or not axes:
        raise MeshError(
            f"axis sizes must be positive integers, got {bad or 'no axis at all'}",
            op=op,
            fix=f"sl.{op}({_FIRST.get(op, '')}x=2, y=2)",
        )
    named = {n: s for n, s in axes.items() if not (n.isidentifier() and n.isascii())}
    if named:  # a layout could not name it
        raise MeshError(
            f"{', '.join(map(repr, named))} cannot name an axis: letters, digits and underscores do",
            op=op,
            fix=f"sl.{op}({_FIRST.get(op, '')}"
            f"{', '.join(f'{n}={s}' for n, s in zip('xyzuvw', axes.values(), strict=False))})",
        )
    return dict(axes)


def _by_name(op: str, given: tuple[Any, ...]) -> None:
    """Refuse sizes without names, or in a mapping, with the line that says them."""
    if given:
        first = given[0]
        names = given[1] if len(given) > 1 and isinstance(given[1], tuple | list) else "xyzuvw"
        sizes = dict(first) if isinstance(first, Mapping) else None
        if sizes is None:
            many = first if isinstance(first, tuple | list) else [s for s in given if isinstance(s, int)]
            sizes = dict(zip(names, many, strict=False))
        text = ", ".join(f"{n}={s}" for n, s in sizes.items()) or "x=2, y=2"
        raise MeshError("axes are named: one keyword each", op=op, fix=f"sl.{op}({text})")


def simulate(*given: Any, **axes: int) -> _Played:
    """Play every rank of a mesh in this one process.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a = sl.shard(torch.eye(4), "x y")
    ...     sl.unshard(a @ a).sum().item()
    4.0
    """
    _by_name("simulate", given)
    return _Played(_sizes("simulate", axes), kind="stacked")


def record(*given: Any, **axes: int) -> _Played:
    """Play nobody: shapes on the meta device and counted bytes, for meshes of any size.

    >>> import shardlib as sl
    >>> with sl.record(x=16, y=32), sl.trace() as t:
    ...     a = sl.shard(torch.empty(4096, 4096, device="meta"), "x y")
    ...     _ = a @ a
    >>> t.bytes
    6029312
    """
    _by_name("record", given)
    return _Played(_sizes("record", axes), kind="record", device="meta")


# ---------------------------------------------------------------- real processes


def make_mesh(*given: Any, device: str | None = None, **axes: int) -> DeviceMesh:
    """A named DeviceMesh over all running processes; ``-1`` infers one axis.

    Starts the process group from torchrun's environment where none runs: nccl on CUDA, gloo on
    CPU.  Raises: MeshError where the sizes do not fit the world exactly.
    """
    _by_name("make_mesh", given)
    if device == "cuda" and not torch.cuda.is_available():
        text = ", ".join(f"{n}={s}" for n, s in axes.items())
        raise MeshError("this process sees no GPU", op="make_mesh", fix=f'sl.make_mesh({text}, device="cpu")')
    free = [n for n, s in axes.items() if s == -1]
    if len(free) > 1:
        raise MeshError(
            f"only one axis can be inferred, not {', '.join(free)}", op="make_mesh", fix="sl.make_mesh(x=-1, y=2)"
        )
    _sizes("make_mesh", {n: s for n, s in axes.items() if s != -1} or {"x": 1})
    if not axes:
        raise MeshError("a mesh needs an axis", op="make_mesh", fix="sl.make_mesh(x=2, y=2)")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    world = _world(device)
    known = math.prod(s for s in axes.values() if s != -1)
    if free and world % known == 0:
        axes = axes | {free[0]: world // known}
    total = math.prod(axes.values())
    if total != world:
        text = " ".join(f"{n}={s}" for n, s in axes.items())
        running = "1 process is" if world == 1 else f"{world} processes are"
        fix = (
            f"torchrun --nproc-per-node {abs(total)} script.py   # or, in one process: "
            f"sl.simulate({', '.join(f'{n}={abs(s)}' for n, s in axes.items())})"
        )
        raise MeshError(f"{text} needs {abs(total)} ranks, {running} running", op="make_mesh", mesh=dict(axes), fix=fix)
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _world(device: str) -> int:
    """Start the default process group if need be; its size."""
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if device == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    return dist.get_world_size()


def _leave() -> None:
    """A group that is still up when Python exits can abort the process; end the ones we hold."""
    for mesh in list(_VIEWS.values()):
        mesh.groups.clear()
    _VIEWS.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group's threads end when its last handle goes, which must not be at teardown


def launch(fn: Callable[..., Any], *args: Any, device: str = "cpu", timeout: float = 300.0, **axes: int) -> list[Any]:
    """Run ``fn(*args)`` in local processes, one per rank of the mesh, each with the mesh in scope.

    Returns the results by rank.  The first error stops all and is raised here with its rank.
    ``fn``, ``args`` and results are pickled.
    """
    sizes = _sizes("launch", axes)
    _check_travels(fn, args)
    world = math.prod(sizes.values())
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank_main, (world, folder, fn, args, sizes, device), nprocs=world, join=False, start_method="spawn"
        )
        error: Exception | None = None
        lost: int | None = None  # a rank ended by a signal: what the others say is its consequence
        try:
            until = time.monotonic() + timeout
            while not context.join(timeout=1.0):
                if time.monotonic() > until:
                    raise ShardError(
                        f"no result after {timeout:.0f} s", op="launch", mesh=sizes, fix=f"timeout={2 * timeout:.0f}"
                    )
        except ShardError as e:
            error = e
        except Exception as e:
            error = ShardError(f"a rank died: {e}", op="launch", mesh=sizes)
            ends = [p.exitcode or 0 for p in context.processes]
            lost = next((r for r, code in enumerate(ends) if code < 0 and code != -signal.SIGTERM), None)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        failed = [f for f in os.listdir(folder) if f.startswith("error")]
        failed.sort(key=lambda f: os.stat(os.path.join(folder, f)).st_mtime_ns)  # the first is the cause
        if lost is not None:
            raise ShardError(f"rank {lost} was ended by {signal.Signals(-ends[lost]).name}", op="launch", mesh=sizes)
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
        f"from my_module import {last if last.isidentifier() else 'fn'}  # a function that a module of its own defines"
    )
    if getattr(fn, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ShardError(f"{name} was defined at a prompt, where new processes cannot find it", op="launch", fix=fix)
    try:
        pickle.dumps((fn, args))
    except Exception as e:
        raise ShardError(f"{name} or its arguments cannot be pickled: {e}", op="launch", fix=fix) from e


def _rank_main(
    rank: int, world: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...], axes: dict[str, int], device: str
) -> None:
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        if device == "cuda":
            torch.cuda.set_device(rank)
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world)
        with use_mesh(make_mesh(device=device, **axes)):
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
