"""Named meshes, and the one in scope.

A ``Mesh`` is a grid of ranks with named axes.  Its ``kind`` is ``dist`` for real processes, one per
rank, ``stacked`` where one process simulates all ranks, ``record`` where none has values (shapes
and bytes only), and ``forked`` in a process that was forked from a rank.
"""

import atexit
import gc
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, Never

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.types import Device

from shardlib._compat import patch_torch, set_timeout
from shardlib.errors import (
    AxisReused,
    MeshError,
    NoMesh,
    UnknownAxis,
    axes_text,
    lettered,
    meant,
    mesh_text,
    similar,
)
from shardlib.mesh import posted
from shardlib.mesh.devices import accelerator, backend_of, placed, take_device
from shardlib.mesh.failures import current_job, join_job
from shardlib.mesh.memo import GROUPS, Memo
from shardlib.mesh.process import launched, world_size
from shardlib.mesh.scope import Entered, enter, leave, scope

Kind = Literal["dist", "stacked", "record", "forked"]

Axes = tuple[str, ...]
Axis = str | Axes
Sizes = Mapping[str, int]
"""Axis -> number of its ranks."""

Coord = Mapping[str, int]
"""Axis -> index of a rank along it."""

MeshKey = tuple[tuple[str, int], ...]
"""Axes and sizes as a key of a cache."""


@dataclass(frozen=True)
class Link:
    """Price of communication along an axis: ``alpha`` seconds per message, ``beta`` per byte.

    Measured by ``sl.probe``; these defaults are for axes that were not measured.

    >>> link = Link(alpha=1e-5, beta=1e-10)  # 10 microseconds, 10 GB/s
    >>> f"{link.seconds(2**20, 6):.6f} s for 6 messages and 1 MiB"
    '0.000165 s for 6 messages and 1 MiB'
    """

    alpha: float = 2e-5
    beta: float = 1e-9

    def seconds(self, nbytes: float, messages: float = 1) -> float:
        """Compute the seconds that so many bytes take."""
        return self.alpha * messages + self.beta * nbytes


@dataclass(eq=False)
class Outer:
    """Mesh around that of one stage of a pipeline, see ``Mesh.without``.

    ``axis``     the axis of ``mesh`` along which the stages are placed.
    ``models``   each module in stages -> parameter name -> the places on the axis that hold it,
                 first the one that counts it in sums over stages.
    ``tied``     names that several places hold, each in a bucket of its own.
    ``copies``   those that another place than this rank's counts.
    ``staged``   whether a module was cut into stages on it.
    ``frozen``   whether the models train no parameter of this rank's stages, and others.
    ``other``    the mesh of the models that differ in this.
    """

    mesh: "Mesh"
    axis: str
    models: Any = field(default_factory=weakref.WeakKeyDictionary)
    tied: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    staged: bool = False
    frozen: bool = False
    other: "Mesh | None" = None

    def hold(self, model: object, holders: Mapping[str, tuple[int, ...]], here: int) -> None:
        """Note which places hold the parameters of a model.

        Raises: MeshError where another model in use has one of the names at other places.
        """
        if self._at_other_places(holders):
            # a model that is no longer in use may wait for the collector
            gc.collect()
        if (name := self._at_other_places(holders)) is not None:
            why = f"two models in stages on one mesh have a parameter {name!r} at other stages"
            fix = "nn.ModuleDict({'first': first, 'second': second})"
            raise MeshError(why, op="parallelize", mesh=self.mesh, fix=fix)
        self.models[model] = holders
        self.tied.clear()
        self.copies.clear()
        for held in self.models.values():
            several = [n for n, places in held.items() if len(places) > 1]
            self.tied.update(several)
            self.copies.update(n for n in several if here in held[n][1:])

    def _at_other_places(self, holders: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return a parameter that another model has at other places, if there is one."""
        pairs = ((n, held[n]) for held in self.models.values() for n in holders if n in held)
        return next((n for n, places in pairs if places != holders[n]), None)


class Mesh(Mapping[str, int]):
    """Axis names and sizes of a grid of ranks, and its kind; also a mapping axis -> size.

    ``with mesh:`` puts it in scope.  Made by ``make_mesh``, ``simulate`` and ``record``.

    >>> import shardlib as sl
    >>> mesh = sl.simulate(x=2, y=3)
    >>> mesh, mesh.size, dict(mesh), mesh.axis_size(("x", "y"))
    (Mesh(x=2 y=3, stacked), 6, {'x': 2, 'y': 3}, 6)
    """

    def __init__(
        self,
        axes: Sizes,
        *,
        kind: Kind = "stacked",
        device: torch.device | str | int = "cpu",
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        patch_torch()
        self.axes = dict(axes)
        self.names, self.sizes = tuple(self.axes), tuple(self.axes.values())
        self.size = math.prod(self.sizes)
        self.kind: Kind = kind
        self.device = placed(device)
        # type of device that the ranks compute on; of recorded ranks the one that record was given
        self.device_type = self.device.type
        self.device_mesh = device_mesh
        # seconds that a transfer may take; None: torch's own
        self.timeout: float | None = None
        # axis -> its measured price; see sl.probe
        self.links: dict[str, Link] = {}
        self._coord: dict[str, int] | None = None
        # the group of all ranks when the mesh was made; not kept alive
        self.world: Callable[[], Any] = lambda: None
        if device_mesh is not None:
            if dist.is_initialized():
                self.world = weakref.ref(dist.group.WORLD)
            here = device_mesh.get_coordinate()
            if here is not None:
                self._coord = dict(zip(self.names, here, strict=True))
        self._known: dict[Axis, int] = dict(self.axes)
        self.memo = Memo()
        # of random draws; filled by random.py
        self.stream: Any = None
        # of the mesh of one stage
        self.outer: Outer | None = None
        # axis -> the mesh of one stage along it; never dropped, since its ranks made it together
        self.stages: dict[str, Mesh] = {}

    @property
    def coord(self) -> dict[str, int] | None:
        """Coordinate of this rank: axis -> index; None where this process is not in the mesh.

        Where one process simulates all ranks this is None, except while ``sl.from_local`` reads a
        rank's part: then it is the coordinate of this rank, on every kind of mesh.  Local code
        calls ``sl.axis_index``.

        >>> import shardlib as sl
        >>> with sl.simulate(data=2) as mesh:
        ...     sl.from_local(lambda: torch.tensor([mesh.coord["data"]]), "data").local
        data=0: tensor([0])
        data=1: tensor([1])
        """
        read = scope().reading
        return read[1] if read is not None and read[0] is self else self._coord

    @coord.setter
    def coord(self, value: dict[str, int] | None) -> None:
        self._coord = value

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the job in this mesh, in order; 0, 1, ... where one process simulates them."""
        if self.device_mesh is None:
            return tuple(range(self.size))
        # torch builds it at each access
        return tuple(self.device_mesh.mesh.flatten().tolist())

    @cached_property
    def key(self) -> str:
        """Axes and ranks as text: a name in the job's store that stages do not have in common."""
        return f"{self} of {'-'.join(map(str, self.ranks))}"

    @property
    def forked(self) -> bool:
        """Whether this process was forked from a rank, and is none itself."""
        return self.kind == "forked"

    def axis_size(self, axis: Axis, op: str = "axis_size", fix: str = "mesh.axis_size({})") -> int:
        """Return the size of an axis, or the product of several.

        ``op``, ``fix``  for the error: the caller's name, and its fix line with {} for the axis.
        Raises: UnknownAxis, AxisReused.
        """
        found = self._known.get(axis)
        if found is None:
            axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
            for a in axes:
                if a not in self.axes:
                    near = next(iter([*similar(str(a), self.axes), *self.axes]), "")
                    right = dict.fromkeys(near if b == a else b for b in axes)
                    raise unknown_axis(a, self.axes, op, fix.format(axes_text(right)))
            if len(set(axes)) < len(axes):
                why = f"axis {axis!r} names a mesh axis twice"
                line = fix.format(axes_text(dict.fromkeys(axes)))
                raise AxisReused(why, op=op, mesh=self, fix=line)
            found = self._known[axes] = math.prod([self.axes[a] for a in axes])
        return found

    def without(self, axis: str) -> "Mesh":
        """Return the mesh of one stage of a pipeline: the other axes, at this rank's place on it.

        Its ranks are those with the same index on ``axis``; where no other axis is left it has one,
        "one", of size 1.  All ranks call this together, once.

        >>> import shardlib as sl
        >>> mesh = sl.simulate(pipe=4, x=2)
        >>> mesh.without("pipe"), mesh.without("pipe").outer.mesh is mesh
        (Mesh(x=2, stacked), True)
        """
        self.axis_size(axis, "without", "mesh.without({})")
        if axis not in self.stages:
            self.stages[axis] = _stage_mesh(self, axis)
        return self.stages[axis]

    def for_model(self, frozen: bool) -> "Mesh":
        """Return the mesh of a stage for a model of which all parameters here are frozen, or not.

        It is this one or, while a model that differs in this is in use, one with the same groups:
        whether a tree without a trained leaf is frozen is known by its mesh.
        """
        assert self.outer is not None
        if frozen != self.outer.frozen:
            # a model that is no longer in use may wait for the collector
            gc.collect()
        if frozen != self.outer.frozen and self.outer.models:
            if self.outer.other is None:
                self.outer.other = new = object.__new__(Mesh)
                outer = Outer(self.outer.mesh, self.outer.axis, staged=True)
                vars(new).update(vars(self), memo=Memo(), outer=outer)
                new.memo[GROUPS] = self.memo[GROUPS]
            return self.outer.other.for_model(frozen)
        self.outer.frozen = frozen
        return self

    def __getitem__(self, axis: str) -> int:
        return self.axes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    __hash__ = object.__hash__  # type: ignore[assignment]  # compared as objects, not as mappings
    __eq__ = object.__eq__

    def __str__(self) -> str:
        return mesh_text(self.axes)

    def __repr__(self) -> str:
        return f"Mesh({self}, {self.kind})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        return self

    def __reduce__(self) -> Any:
        if self.kind == "dist":
            why = "a running job's mesh cannot be pickled"
            fix = "dict(mesh.axes)"
            raise MeshError(why, op="pickle", mesh=self, fix=fix)
        return _again, (dict(self.axes), self.kind)

    def __enter__(self) -> "Mesh":
        enter(self, mesh=self)
        return self

    def __exit__(self, *error: object) -> None:
        leave(self)
        _refuse_left(error)


def _stage_mesh(mesh: Mesh, axis: str) -> Mesh:
    axes = {a: n for a, n in mesh.axes.items() if a != axis}
    grid = mesh.device_mesh
    if grid is None:
        new = Mesh(axes or {"one": 1}, kind=mesh.kind, device=mesh.device)
        new.device_type = mesh.device_type
    else:
        if not axes:
            alone = grid.mesh.reshape(-1, 1)
            grid = DeviceMesh(grid.device_type, alone, mesh_dim_names=(axis, "one"))
        part = grid[tuple(axes) or ("one",)]
        new = Mesh(axes or {"one": 1}, kind="dist", device=part.device_type, device_mesh=part)
        # not the view of these ranks: another mesh may have the same, and no stages or others
        _VIEWS[part, grid] = new
        join_job(new)
        with_timeout(new, mesh.timeout)
    new.links = {a: link for a, link in mesh.links.items() if a != axis}
    new.outer = Outer(mesh, axis)
    return new


def coordinates(sizes: Sizes) -> list[dict[str, int]]:
    """List every coordinate of a mesh, in rank order: the last axis changes first.

    >>> coordinates({"x": 2, "y": 2})
    [{'x': 0, 'y': 0}, {'x': 0, 'y': 1}, {'x': 1, 'y': 0}, {'x': 1, 'y': 1}]
    """
    places = itertools.product(*(range(n) for n in sizes.values()))
    return [dict(zip(sizes, place, strict=True)) for place in places]


def rank_along(axes: Iterable[str], coord: Coord, sizes: Sizes) -> int:
    """Return a rank's index on several axes taken as one, the first axis major.

    >>> rank_along(("x", "y"), {"x": 1, "y": 2}, {"x": 2, "y": 3})
    5
    """
    rank = 0
    for a in axes:
        rank = rank * sizes[a] + coord[a]
    return rank


def axis_sizes(mesh: object, op: str = "layout") -> Sizes:
    """Map axis names to sizes, for a mapping, a Mesh or a DeviceMesh."""
    if isinstance(mesh, Mapping):
        return mesh
    names = getattr(mesh, "mesh_dim_names", None)
    shape = tuple(getattr(mesh, "shape", (2, 2)))
    if not names:
        device = getattr(mesh, "device_type", "cpu")
        fix = f"init_device_mesh({device!r}, {shape}, mesh_dim_names={tuple('xyzw'[: len(shape)])})"
        raise MeshError("this mesh has no axis names", op=op, operands={"shape": shape}, fix=fix)
    return dict(zip(names, shape, strict=True))


def axes_of(axis: str | Iterable[str]) -> Axes:
    """Return one axis or several as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def unknown_axis(axis: str, axes: Sizes, op: str, fix: str) -> UnknownAxis:
    """Build the error for an axis that is not in the mesh, with similar names."""
    hint = meant(similar(str(axis), axes))
    why = f"unknown axis {axis!r}; this mesh has {', '.join(axes)}{hint}"
    return UnknownAxis(why, op=op, mesh=dict(axes), fix=fix)


# ---------------------------------------------------------------- the mesh in scope


def current_mesh() -> Mesh:
    """Return the mesh in scope.

    Raises: NoMesh where there is none.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     current_mesh()
    Mesh(x=2 y=2, stacked)
    """
    mesh = scope().mesh
    if mesh is None:
        raise NoMesh(
            "no mesh is in scope", op="current_mesh", fix="with sl.simulate(x=2, y=2): ..."
        )
    return mesh


# Kept until the group of all ranks ends: garbage is collected at different times on the ranks, so
# a view that ended with its last user could exist on some ranks only, and the ranks would
# communicate in different groups.
_VIEWS: dict[DeviceMesh | tuple[DeviceMesh, DeviceMesh], Mesh] = {}


MeshLike = Mesh | DeviceMesh
"""A Mesh, or a DeviceMesh of torch, which must have axis names."""


def as_mesh(mesh: MeshLike | None = None) -> Mesh:
    """Return a mesh as a Mesh: itself, a DeviceMesh with axis names, or (None) the one in scope."""
    if mesh is None:
        return current_mesh()
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"not a mesh: {mesh!r}", op="use_mesh", fix="sl.use_mesh(sl.simulate(x=2, y=2))"
        )
    # DeviceMeshes are equal by their ranks, also across a restart of the group
    same = (view for view in _VIEWS.values() if view.device_mesh is mesh)
    found = next(same, _VIEWS.get(mesh))
    if found is None or (found.device_mesh is not mesh and found.world() is not dist.group.WORLD):
        axes = axis_sizes(mesh, "use_mesh")
        _forget_ended()
        found = _VIEWS[mesh] = Mesh(axes, kind="dist", device=mesh.device_type, device_mesh=mesh)
        if dist.is_initialized():
            join_job(found)
    return found


def _forget_ended() -> None:
    """Drop the views of a job that is over; at the exit of Python all are dropped."""
    if not _VIEWS:
        atexit.register(_let_go)
    for mesh, view in list(_VIEWS.items()):
        if view.world() is not dist.group.WORLD:
            del _VIEWS[mesh]


def _let_go() -> None:
    """End the groups that views hold: an open group at the exit of Python can abort the process."""
    for view in list(_VIEWS.values()):
        # another mesh may have them too
        view.memo[GROUPS].clear()
        view.memo.clear()
    _VIEWS.clear()
    # a group's threads end with its last handle, which must not be at teardown
    gc.collect()


class use_mesh(Entered):
    """Put a mesh in scope: a Mesh, or a DeviceMesh with axis names.

    ``with sl.use_mesh(init_device_mesh("cuda", (2, 4), mesh_dim_names=("x", "y"))):``

    >>> import shardlib as sl
    >>> with sl.use_mesh(sl.simulate(x=2)) as mesh:
    ...     sl.current_mesh() is mesh
    True
    """

    def __init__(self, mesh: MeshLike) -> None:
        self.mesh = as_mesh(mesh)

    def __enter__(self) -> Mesh:
        enter(self, mesh=self.mesh)
        return self.mesh

    def __exit__(self, *error: object) -> None:
        leave(self)
        _refuse_left(error)


def _refuse_left(error: tuple[object, ...]) -> None:
    """Refuse to leave the last mesh with transfers under way, in a checked program."""
    if posted.CHECKED and not any(error) and scope().mesh is None:
        posted.refuse_posted("check", 0)
        for trace in scope().listeners.traces:
            trace.ended()


_FIRST = {"launch": "fn, *args, "}
"""Arguments of a call before its axes, for fix lines."""


def sizes_of(op: str, axes: Sizes) -> dict[str, int]:
    bad = {n: s for n, s in axes.items() if not isinstance(s, int) or s is True or s < 1}
    if bad or not axes:
        why = f"axis sizes must be positive integers, got {bad or 'no axis at all'}"
        fix = f"sl.{op}({_FIRST.get(op, '')}x=2, y=2)"
        raise MeshError(why, op=op, fix=fix)
    named = {n: s for n, s in axes.items() if not (n.isidentifier() and n.isascii())}
    if named:
        # the text of a layout could not contain it
        wrong = ", ".join(map(repr, named))
        right = ", ".join(f"{n}={s}" for n, s in lettered(axes.values()).items())
        why = f"{wrong} cannot name an axis: letters, digits and underscores do"
        raise MeshError(why, op=op, fix=f"sl.{op}({_FIRST.get(op, '')}{right})")
    return dict(axes)


def _by_name(op: str, given: tuple[Any, ...]) -> None:
    """Refuse sizes without names, or in a mapping; the fix line has them as keywords."""
    if given:
        text = ", ".join(f"{n}={s}" for n, s in _named_sizes(*given).items()) or "x=2, y=2"
        raise MeshError("axes are named: one keyword each", op=op, fix=f"sl.{op}({text})")


def _named_sizes(sizes: object, *more: object) -> dict[Any, Any]:
    """Name sizes given as a mapping, as a list with a list of names, or one by one."""
    if isinstance(sizes, Mapping):
        return dict(sizes)
    names = more[0] if more and isinstance(more[0], tuple | list) else "xyzuvw"
    if not isinstance(sizes, tuple | list):
        sizes = [s for s in (sizes, *more) if isinstance(s, int)]
    return dict(zip(names, sizes, strict=False))


def simulate(*given: Never, device: Device = None, **axes: int) -> Mesh:
    """Simulate every rank of a mesh in this one process.

    ``device``  for the blocks: torch's default device (the CPU, if not changed) unless given.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a = sl.shard(torch.eye(4), "x y")
    ...     sl.unshard(a @ a).sum().item()
    4.0
    """
    _by_name("simulate", given)
    return Mesh(
        sizes_of("simulate", axes), kind="stacked", device=device or torch.get_default_device()
    )


def record(*given: Never, device: Device = None, **axes: int) -> Mesh:
    """Record shapes on the meta device and count bytes, without values, for meshes of any size.

    ``device``  type of the device that the ranks would compute on, which this machine need not
                have: its classes of autocast are taken, and muon chooses by its speed.  Unless
                given, the CPU's, or those of the accelerator whose autocast is on.
    Raises: MeshError for a name that is none of torch's devices.

    >>> import shardlib as sl
    >>> with sl.record(x=16, y=32), sl.trace() as t:
    ...     a = sl.shard(torch.empty(4096, 4096, device="meta"), "x y")
    ...     _ = a @ a
    >>> t.bytes
    6029312
    """
    _by_name("record", given)
    mesh = Mesh(sizes_of("record", axes), kind="record", device="meta")
    if device is not None:
        try:
            mesh.device_type = torch.device(device).type
        except (RuntimeError, TypeError) as e:
            why = f"device={device!r} is none of torch's devices"
            fix = 'sl.record(x=2, device="cuda")'
            raise MeshError(why, op="record", fix=fix) from e
    return mesh


# ---------------------------------------------------------------- real processes


def make_mesh(
    *given: Never, device: str | None = None, timeout: float | None = None, **axes: int
) -> Mesh:
    """Make a mesh over all running processes: ``sl.make_mesh(x=2, y=-1)``, where -1 is inferred.

    Starts the process group from torchrun's environment where none runs, with the backend that
    torch has for the device: nccl on CUDA, gloo on CPU.
    ``device``   a device type of torch: its accelerator where there is one, else the CPU, unless
                 given.
    ``timeout``  seconds that a transfer may take before its ranks raise RankFailed: 100 unless
                 given, or the timeout of a process group that exists already.
    Raises: MeshError where the sizes do not fit the world exactly, or not all ranks connect within
    300 seconds.

    >>> import shardlib as sl
    >>> with sl.make_mesh(x=-1, device="cpu") as mesh:  # under torchrun, as many as it started
    ...     sl.typeof(sl.shard(torch.ones(4), "x"))
    'f32[4@x]'
    >>> mesh
    Mesh(x=1, dist)
    >>> dist.destroy_process_group()
    """
    _sizes(given, timeout, axes, "make_mesh")
    device = check_device(device, "make_mesh", axes) or (accelerator() or torch.device("cpu")).type
    started = not dist.is_initialized()
    axes = _inferred(axes, world_size("make_mesh"))
    if started:
        _start(device)
    mesh = _made_before(device, axes)
    if mesh is None:
        _gather(timeout)
        grid = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        mesh = as_mesh(grid)
    return with_timeout(mesh, timeout or (TIMEOUT if started else None))


def _inferred(axes: dict[str, int], world: int) -> dict[str, int]:
    """Return the axes with the size that is inferred; all ranks are in them.  Raises: MeshError."""
    known = math.prod(s for s in axes.values() if s != -1)
    if world % known == 0:
        axes = {n: world // known if s == -1 else s for n, s in axes.items()}
    total = math.prod(axes.values())
    if total == world:
        return axes
    running = "1 process is" if world == 1 else f"{world} processes are"
    why = f"{mesh_text(axes)} needs {abs(total)} ranks, {running} running"
    fix = (
        f"torchrun --nproc-per-node {abs(total)} script.py   # or, in one process: "
        f"sl.simulate({', '.join(f'{n}={abs(s)}' for n, s in axes.items())})"
    )
    raise MeshError(why, op="make_mesh", mesh=dict(axes), fix=fix)


def _gather(timeout: float | None) -> None:
    """Wait for all ranks of a running job, by its clock: torch makes groups for half an hour."""
    if (job := current_job()) is not None:
        job.allow(timeout or job.seconds)
        job.meet("make_mesh", range(job.world), None, "make_mesh", "all ranks make its groups")


def auto_mesh(
    *given: Never, device: str | None = None, timeout: float | None = None, **axes: int
) -> Mesh:
    """Make a mesh over the processes that a launcher started; simulate it where none did.

    So one file runs under ``python``, in a notebook and under ``torchrun``: there this is
    ``make_mesh``, and -1 is inferred from the processes; here ``simulate``, and -1 is one rank.
    ``device``   as in these two.
    ``timeout``  of real processes, as in ``make_mesh``.
    Raises: MeshError where the sizes do not fit the processes, or only part of a launcher's
    environment is set.

    >>> import shardlib as sl
    >>> with sl.auto_mesh(data=-1, x=2) as mesh:
    ...     mesh, sl.typeof(sl.shard(torch.ones(4), "x"))
    (Mesh(data=1 x=2, stacked), 'f32[4@x]')
    """
    if dist.is_initialized() or launched("auto_mesh"):
        return make_mesh(*given, device=device, timeout=timeout, **axes)
    for name, count in _STEPS.items():
        if os.environ.get(count, "1") not in ("", "1"):
            raise MeshError(
                f"{name} started {os.environ[count]} processes, which RANK, WORLD_SIZE, MASTER_ADDR "
                "and MASTER_PORT would have to join",
                op="auto_mesh",
                mesh=dict(axes),
                fix=f"{name} torchrun --nnodes {os.environ[count]} --rdzv-endpoint $HOST:29500 "
                "--rdzv-backend c10d --nproc-per-node 4 script.py",
            )
    check_device(device, "auto_mesh", axes)
    return simulate(device=device, **_sizes(given, timeout, axes, "auto_mesh"))


_STEPS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}
"""Launchers that set no RANK -> their variable for the number of processes."""


def _sizes(given: tuple[Any, ...], timeout: float | None, axes: Sizes, op: str) -> dict[str, int]:
    """Check a call's arguments; return the sizes, 1 for one that is to be inferred.

    Raises: MeshError.
    """
    _by_name(op, given)
    check_timeout(timeout, op, f"sl.{op}(x=-1, timeout=100.0)")
    free = [n for n, s in axes.items() if s == -1]
    if len(free) > 1:
        why = f"only one axis can be inferred, not {', '.join(free)}"
        fix = f"sl.{op}(x=-1, y=2)"
        raise MeshError(why, op=op, fix=fix)
    return sizes_of(op, {**axes, **dict.fromkeys(free, 1)})


def check_device(device: Any, op: str, axes: Sizes) -> str | None:
    """Return a device's type; refuse one that this process does not have.  Raises: MeshError."""
    device = device.type if isinstance(device, torch.device) else device
    here = ["cpu", *([found.type] if (found := accelerator()) else [])]
    if device is not None and device not in here:
        text = ", ".join(f"{n}={s}" for n, s in axes.items())
        why = f"device={str(device)!r} is none of those that this process has: {', '.join(here)}"
        fix = f"sl.{op}({_FIRST.get(op, '')}{text or 'x=2'}, device={here[-1]!r})"
        raise MeshError(why, op=op, fix=fix)
    return device


def _made_before(device: str, axes: dict[str, int]) -> Mesh | None:
    """Return an equal mesh of this job, whose groups exist already."""
    for view in list(_VIEWS.values()):
        alike = tuple(view.axes.items()) == tuple(axes.items()) and view.device.type == device
        if (
            alike
            and view.outer is None
            and view.world() is dist.group.WORLD
            and view.ranks == tuple(range(view.size))
        ):
            return view
    return None


TIMEOUT = 100.0
"""Seconds that a transfer may take in training."""

_COMING = timedelta(seconds=300)
"""Timeout of the first ranks for the last to start."""


def check_timeout(seconds: float | None, op: str, fix: str) -> None:
    """Refuse a timeout that is not positive, or too long for the clock.  Raises: MeshError."""
    if seconds is not None and not 0 < seconds < 1e9:
        raise MeshError(f"timeout={seconds!r} is no time", op=op, fix=fix)


def with_timeout(mesh: Mesh, seconds: float | None) -> Mesh:
    """Set the timeout of transfers on a mesh of real processes, and return the mesh."""
    if seconds is None or mesh.device_mesh is None:
        return mesh
    mesh.timeout = float(seconds)
    for group in {dist.group.WORLD, *(mesh.device_mesh.get_group(n) for n in mesh.names)}:
        set_timeout(group, mesh.timeout)
    if (job := current_job()) is not None:
        job.allow(mesh.timeout)
    return mesh


def _start(device: str) -> None:
    """Start the default process group."""
    backend = backend_of(device, "make_mesh")
    if not launched("make_mesh"):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        take_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(n)]
        if missing:
            why = f"a launcher says where the ranks meet, and {' and '.join(missing)} is not set"
            fix = f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']} script.py"
            raise MeshError(why, op="make_mesh", fix=fix)
        try:
            store, rank, world = next(dist.rendezvous("env://", timeout=_COMING))
            # torchrun with a fixed master port restarts on the store of the processes that failed,
            # whose addresses must not be used for the new processes
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"start {again}", store),
                rank=rank,
                world_size=world,
                timeout=_COMING,
            )
        except dist.DistError as e:
            raise MeshError(
                f"rank {os.environ['RANK']} waited {_COMING.total_seconds():.0f} s for the other "
                f"{int(os.environ['WORLD_SIZE']) - 1}: {e}",
                op="make_mesh",
                fix=f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']} script.py",
            ) from e
    atexit.register(_leave)


def _forked() -> None:
    """Mark every mesh as forked, in a process forked from a rank, such as a DataLoader's worker.

    It has the rank's connections, and other ranks would take its messages for the rank's.
    """
    atexit.unregister(_leave)
    atexit.unregister(_let_go)
    for mesh in list(_VIEWS.values()):
        if mesh.size > 1:
            mesh.kind = "forked"
            mesh.memo.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _leave() -> None:
    """Leave the job that ``make_mesh`` joined."""
    _let_go()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _again(axes: dict[str, int], kind: Kind) -> Mesh:
    """Rebuild a pickled mesh: the one in scope, where kind and axes are equal."""
    now = scope().mesh
    if now is not None and (now.kind, list(now.axes.items())) == (kind, list(axes.items())):
        return now
    return Mesh(axes, kind=kind)


torch.serialization.add_safe_globals([_again])
