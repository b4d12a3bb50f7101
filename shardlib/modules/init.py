"""Initialisation of sharded parameters: ``init`` is ``parallelize`` for a module without values.

Every submodule's own code runs, ``reset_parameters`` or the model's ``_init_weights``, with sharded
parameters in place of its own.  It fills blocks by global position, so the values are the same
under every layout and mesh, and no rank holds a whole tensor, except in ``orthogonal_`` and
temporaries of that code itself.  Random keys of a submodule do not depend on the draws of others,
so that a stage of a pipeline runs the code of its own submodules alone.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.collectives import flat_blocks, holds_values, pmax, storage_shape, unwrap, wrap
from shardlib.errors import ShardError, UnknownParameter, similar
from shardlib.layouts import Dim, Layout, LayoutLike
from shardlib.memory_sharing import writes
from shardlib.mesh import Mesh, MeshLike, as_mesh, bind, within
from shardlib.modules.apply import Apply, needed
from shardlib.modules.copies import swapped
from shardlib.modules.parallelize import CutsIntoStages, placing
from shardlib.modules.remat import Remat
from shardlib.modules.rules import LogicalAxes, Named, Rules, matches
from shardlib.placing import lengthened, reshard, shard
from shardlib.random import Draws, next_key, rewind, rewound, seeded
from shardlib.tensor import Place, ShardedTensor, promoting, real_axes, replicated

Fill = Mapping[Any, Callable[[Tensor], Any] | Tensor]
Keys = Iterator[AbstractContextManager[None]]
"""Contexts in each of which the random keys are others, whether or not one is entered."""

_MOST_KEYS = 1 << 20
"""Number of random keys that one submodule may draw."""


def init(
    module: nn.Module,
    rules: Rules,
    seed: int | None = None,
    *,
    mesh: MeshLike | None = None,
    axes: LogicalAxes = None,
    inputs: Mapping[str, LayoutLike] | None = None,
    pad: bool = False,
    remat: Remat = (),
    fill: Fill | None = None,
    stages: CutsIntoStages | None = None,
    host: bool = False,
) -> tuple[Apply, dict[str, ShardedTensor]]:
    """Make ``(apply, params)`` as ``parallelize`` does, with fresh values, drawn shard by shard.

    ``module``  best made on the meta device, where it takes no memory: ``with torch.device("meta"):
                ...``.
    ``seed``    of these values alone, the same on every rank; None draws from the key in use
                (``sl.random``).
    ``fill``    pattern -> function that fills a tensor in place, or its value: for parameters and
                buffers that no ``reset_parameters`` or ``_init_weights`` writes, or to replace the
                values of others.
    The other arguments are those of ``parallelize``.  The module is read, never changed.

    A submodule's values come from the ``_init_weights(submodule)`` of the nearest module around it
    that has one (as models of transformers do); without one, or for tensors that it leaves out,
    from its own ``reset_parameters``.  Other effects of a constructor are not repeated; values set
    in a constructor are kept where the module is not on the meta device.
    Raises: UnknownParameter naming each tensor that has no value; RuleLint, UnevenSplit,
            UnknownAxis.

    >>> import torch, shardlib as sl; from torch import nn
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    >>> with sl.simulate(x=2):
    ...     apply, params = sl.init(model, [("0.*", "x ..."), ("*", "...")], seed=0)
    ...     sl.typeof(params["0.weight"]), apply(params, torch.ones(2, 8)).shape
    ('f32[16@x, 8]', torch.Size([2, 16]))
    """
    apply, params = placing(stages)(
        module, rules, mesh=as_mesh(mesh), src=None, axes=axes, inputs=inputs, pad=pad,
        remat=remat, host=host, blank=True,
    )  # fmt: skip
    mesh = apply.mesh
    if not holds_values(mesh):
        return apply, params
    apply.buffers = {n: _blank(b, mesh) if b.raw.is_meta else b for n, b in apply.buffers.items()}
    tensors: dict[str, ShardedTensor] = {**params, **apply.buffers}
    with seeded(mesh, seed):
        todo = _Unwritten(module, tensors, mesh, apply.elsewhere(params))
        missing = _write(apply, todo, fill or {})
    if missing:
        zeros = ", ".join(f"{n!r}: torch.nn.init.zeros_" for n in missing)
        fix = f"sl.init(module, rules, fill={{{zeros}}})"
        raise _valueless(missing, "no", op="init", mesh=mesh, fix=fix)
    return apply, params


def restored(
    module: nn.Module,
    apply: Apply,
    params: Mapping[str, ShardedTensor],
    names: Sequence[str],
    mesh: Mesh,
) -> None:
    """Write into these parameters and buffers the values that the module's own code makes.

    For all others, which have values, that code writes to temporaries.
    Raises: UnknownParameter naming each that it does not write.
    """
    if not names:
        return
    apply.buffers |= {n: _blank(apply.buffers[n], mesh) for n in names if n in apply.buffers}
    every, others = {**params, **apply.buffers}, apply.elsewhere(params)
    aside = {n: torch.empty_like(x, device="meta") for n, x in _real(module).items()}
    aside |= {n: others[n] for n in names if n in others}
    todo = _Unwritten(module, {n: every[n] for n in names if n in every}, mesh, aside)
    if missing := _write(apply, todo, {}):
        fix = f"apply.buffers[{missing[0]!r}] = sl.shard(value, '...')"
        raise _valueless(missing, "no file, and no", op="load_hf", mesh=mesh, fix=fix)


def _real(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _write(apply: Apply, todo: "_Unwritten", fill: Fill) -> list[str]:
    """Give tensors the values of ``fill``, of the module's code or of its constructor.

    Return the names of those that got none.
    """
    with torch.no_grad(), _keys(todo.mesh) as keys:
        for path, sub, owner, names in _submodules(todo.module, "", None, set()):
            own = [n for n in (apply.tied.get(n, n) for n in names) if n in todo.tensors]
            with next(keys):
                if own or any(n.startswith(path) for n in todo.tensors):
                    todo.run(own, partial(_initialise, todo, own, sub, owner))
        todo.fill(fill, keys)
        todo.keep()
    return todo.names(todo.tensors)


def _valueless(names: Sequence[str], lacks: str, op: str, mesh: Mesh, fix: str) -> UnknownParameter:
    who = f"{lacks} reset_parameters or _init_weights writes there"
    why = f"nothing gives a value to {', '.join(names)}: {who}"
    return UnknownParameter(why, op=op, mesh=mesh, fix=fix)


def _blank(b: ShardedTensor, mesh: Mesh) -> ShardedTensor:
    """Return a buffer without values in place of one on the meta device."""
    block = torch.zeros(tuple(b.padded_shape), dtype=b.dtype, device=mesh.device)
    return replicated(block.fill_(float("nan")) if block.is_floating_point() else block, mesh)


# ---------------------------------------------------------------- initialisation code of submodules


def _submodules(
    sub: nn.Module, path: str, owner: nn.Module | None, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, nn.Module | None, list[str]]]:
    """List (path, submodule, module whose ``_init_weights`` fills it, its own tensors), children
    first.
    """
    seen.add(sub)
    owner = sub if _initialises(sub) else owner
    for name, child in sub.named_children():
        if child not in seen:
            yield from _submodules(child, f"{path}{name}.", owner, seen)
    own = {**sub._parameters, **sub._buffers}
    yield path, sub, owner, [f"{path}{n}" for n, x in own.items() if x is not None]


def _initialises(module: nn.Module) -> bool:
    """Check whether a module has an ``_init_weights(submodule)``."""
    found = getattr(type(module), "_init_weights", None)
    return found is not None and needed(found) == 2


def _initialise(
    todo: "_Unwritten", names: list[str], sub: nn.Module, owner: nn.Module | None
) -> None:
    """Run the code that fills a submodule's own tensors, of these names."""
    reset: Any = getattr(sub, "reset_parameters", None) or getattr(sub, "_reset_parameters", None)
    if owner is not None:
        owner._init_weights(sub)  # type: ignore[operator]
    if callable(reset) and names and todo.names(names):
        reset()
        if owner is not None:
            owner._init_weights(sub)  # type: ignore[operator]


def _moved(x: ShardedTensor, on: int) -> ShardedTensor:
    """Make blank blocks of the same tensor, split along dimension ``on`` alone or not at all."""
    axes = real_axes(x.mesh, x.sharding.axes)
    if not axes:
        return x
    dims = [Dim()] * x.ndim
    if -x.ndim <= on < 0 and x.shape[on] % x.mesh.axis_size(axes) == 0:
        dims[on] = Dim(axes)
    layout = Layout(tuple(dims))
    local = layout.local_shape(tuple(x.shape), x.mesh)
    raw = x.raw.new_full(storage_shape(x.mesh, *local), float("nan"))
    return ShardedTensor(raw, Place(layout, torch.Size(x.shape), x.mesh))


def _back(x: ShardedTensor, like: ShardedTensor) -> Tensor:
    """Reshard a filled tensor to the parameter's own layout."""
    if like.is_padded:
        sizes = zip(x.dims, like.shape, like.padded_shape, strict=True)
        if any(real_axes(x.mesh, dim.axes) for dim, n, s in sizes if n != s):
            x = reshard(x, "...")
        raw = lengthened(x.raw, like.shape, like.padded_shape)
        x = ShardedTensor(raw, Place(x.sharding, like.padded_shape, x.mesh))
    return reshard(x, like.sharding).raw


@dataclass(eq=False)
class _Unwritten:
    """Tensors of a module without values, and the ways to give them one; alike on every rank.

    ``aside``  temporaries for the module's other tensors, to which its code may write.
    """

    module: nn.Module
    tensors: Mapping[str, ShardedTensor]
    mesh: Mesh
    aside: Named
    written: set[str] = field(default_factory=set)
    at: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for n, t in self.tensors.items():
            self._track(n, t)

    def run(self, names: list[str], code: Callable[[], None]) -> None:
        """Run one submodule's code.

        Where it needs a whole dimension that is split, retry with another one split, or none.
        """
        tensors, at, refusals = self.tensors, rewound(self.mesh), list[ShardError]()
        most = max((len(tensors[n].shape) for n in names), default=0)
        for on in (None, *range(-1, -most - 1, -1), most):
            stand = {n: tensors[n] if on is None else _moved(tensors[n], on) for n in names}
            state = {**self.aside, **tensors, **stand}
            for n, t in stand.items():
                if t.raw is not self.at[n][0]:
                    self._track(n, t)
            try:
                swapped(self.module, state, code)
            except ShardError as e:
                refusals.append(e)
                rewind(self.mesh, at)
                continue
            for n, t in stand.items():
                if t is not tensors[n]:
                    tensors[n].raw.copy_(_back(t, tensors[n]))
                    if self._is_written(n):
                        self.written.add(n)
                    self._track(n, tensors[n])
            return
        raise refusals[0]

    def fill(self, fill: Fill, keys: Keys) -> None:
        """Give the values that the caller names by patterns."""
        every = {**self.aside, **self.tensors}
        for i, (pattern, value) in enumerate(fill.items()):
            names = [n for n in _real(self.module) if matches(pattern, n, every[n])]
            if not names:
                near = similar(str(pattern), list(every), 1, 0.0)
                why = f"fill: {pattern!r} matches no parameter or buffer"
                given = {"tensors": ", ".join(every)}
                fix = f"fill = {{{(near or ['*'])[0]!r}: fill.pop(list(fill)[{i}]), **fill}}"
                raise UnknownParameter(why, op="init", operands=given, fix=fix)
            for name, own in zip(names, keys, strict=False):
                if name in self.tensors:
                    to = self.tensors[name]
                    with own, promoting():
                        to.copy_(value) if isinstance(value, Tensor) else value(to)
                    self.written.add(name)

    def keep(self) -> None:
        """Keep a constructor's value of each tensor that the module's initialisation left out."""
        real = _real(self.module)
        for name in self.names(self.tensors):
            if not real[name].is_meta:
                to = self.tensors[name]
                kept = shard(real[name].detach(), to.sharding, self.mesh, src=0, pad=to.is_padded)
                to.raw.copy_(kept.raw)
                self.written.add(name)

    def _track(self, name: str, x: ShardedTensor) -> None:
        """Watch writes to ``x``, which is the tensor or stands in its place."""
        self.at[name] = x.raw, writes(x.raw)

    def names(self, among: Any) -> list[str]:
        return [n for n in among if n in self.at and not self._is_written(n)]

    def _is_written(self, name: str) -> bool:
        raw, version = self.at[name]
        if name in self.written or writes(raw) != version:
            return True
        if not raw.is_floating_point():
            return False
        # writes through ``weight.data`` do not change this version counter
        flag = flat_blocks(raw.isnan(), self.mesh).any(-1).float()
        axes = tuple(a for a in self.mesh.names if self.mesh.axes[a] > 1)
        if axes:
            with bind(self.mesh):
                flag = unwrap(pmax(wrap(flag, self.mesh), axes))
        return not bool(flag.any())


@contextmanager
def _keys(mesh: Mesh) -> Iterator[Keys]:
    """Draw from the mesh's stream in the contexts that it gives, which stands after them at last."""
    places = itertools.count(Draws.begun(mesh), _MOST_KEYS)
    yield (_alike(mesh, first) for first in places)
    Draws.passed(mesh, next(places))


@contextmanager
def _alike(mesh: Mesh, first: int) -> Iterator[None]:
    """Draw from a place of the mesh's stream, and plain tensors alike on every rank.

    The state of torch's generators is restored afterwards.
    """
    own = [] if mesh.device.type in ("cpu", "meta") else [mesh.device]
    kind: Any = {"device_type": mesh.device.type} if own else {}
    with torch.random.fork_rng(own, **kind), within(draws=Draws(mesh, first).instead):
        key = next_key(mesh)
        torch.default_generator.manual_seed(key)
        for device in own:
            state = torch.Generator(device).manual_seed(key).get_state()
            torch.get_device_module(device).set_rng_state(state, device)
        yield
