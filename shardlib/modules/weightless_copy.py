"""Skeleton: a copy of a module's tree without weights, on which calls run, to free the weights.

``skeleton(module)`` is a shallow copy of the tree: new Module objects of the same classes, whose
parameters are on the meta device.  References from the module back to itself refer to the copy:
shared submodules and tensors, bound methods, partials and closures in attributes and hooks, lists
and dicts of its parameters or submodules.  Everything else is shared with the module:
configurations, locks, generators, hooks and other objects, tensors that are neither parameters nor
buffers, modules that are not registered.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardlib._compat import is_wrapped_hook
from shardlib.modules.around import Around

__all__ = ["copied", "exchanged", "skeleton"]


def skeleton(module: nn.Module, buffers: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Copy a module's tree without weights.

    ``buffers``  the skeleton's, by name; None: the module's own.

    >>> bare = skeleton(nn.Sequential(nn.Linear(2, 3)))
    >>> bare, bare[0].weight.device, bare[0].weight.shape
    (Sequential(
      (0): Linear(in_features=2, out_features=3, bias=True)
    ), device(type='meta'), torch.Size([3, 2]))
    """
    given = buffers or {}
    swap: dict[int, Tensor] = {id(p): _stand_in(p) for p in module.parameters()}
    swap |= {id(b): given[n] for n, b in module.named_buffers() if n in given}
    return copied(module, swap)[id(module)]


def _stand_in(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad
    )


def copied(module: nn.Module, swap: Mapping[int, Tensor]) -> dict[int, nn.Module]:
    """Copy every module of a tree; return id of a module -> its copy.

    ``swap``  id of a tensor -> the tensor that replaces it in the copies.
    """
    copies = {id(m): object.__new__(type(m)) for m in module.modules()}
    exchange = _Exchange({**swap, **copies})
    for m in module.modules():
        own = copies[id(m)].__dict__
        for key, value in m.__dict__.items():
            own[key] = exchange(value)
            if own[key] is value and isinstance(value, dict) and key.startswith("_"):
                own[key] = value.copy()  # parameters, hooks: additions must not affect the original
        own.pop("_compiled_call_impl", None)  # set by module.compile(); it calls the original
        if "_orig_mod" in own.get("_modules", {}):  # a torch.compile wrapper calls the original too
            own["forward"] = own["_modules"]["_orig_mod"]
    return copies


class _Exchange:
    """Recursive replacement of values by their copies, for values that reference a copied one."""

    def __init__(self, instead: Mapping[int, Any]) -> None:
        self.instead = dict(instead)
        self.apart: dict[int, Any] = {}  # values found to reference no copied object

    def __call__(self, value: Any) -> Any:
        if id(value) in self.instead:
            return self.instead[id(value)]
        return self._rebuilt(value) if self._reaches(value) else value

    def _reaches(self, value: Any) -> bool:
        seen: dict[int, Any] = {}
        todo = [value]
        while todo:
            v = todo.pop()
            if id(v) in self.instead:
                return True
            if id(v) not in seen and id(v) not in self.apart and (parts := _parts(v)) is not None:
                seen[id(v)] = v
                todo += parts
        self.apart |= seen
        return False

    def _rebuilt(self, value: Any) -> Any:
        """Rebuild a value; it is registered before its parts, which may refer back to it."""
        kind, put = type(value), self.instead.__setitem__
        if kind is list:
            put(id(value), items := [])
            items += [self(v) for v in value]
            return items
        if kind in (dict, OrderedDict):
            put(id(value), named := kind())
            named.update((k, self(v)) for k, v in value.items())
            return named
        if kind is FunctionType:
            return self._function(value)
        if kind is CellType:
            put(id(value), cell := CellType())
            cell.cell_contents = self(value.cell_contents)
            return cell
        if kind is tuple:
            new: Any = tuple(self(v) for v in value)
        elif kind is MethodType:
            new = MethodType(value.__func__, self(value.__self__))
        elif kind is weakref.ref:
            new = weakref.ref(self(value()))
        elif kind is functools.partial:
            new = functools.partial(self(value.func), *self(value.args), **self(value.keywords))
            new.__dict__.update(self(value.__dict__))
        else:
            new = object.__new__(kind)
            new.__dict__.update(self(value.__dict__))
        put(id(value), new)
        return new

    def _function(self, f: FunctionType) -> FunctionType:
        """Rebuild a function over the copies of its closure cells, with its metadata."""
        open_cells = {
            id(c): CellType()
            for c in f.__closure__ or ()
            if id(c) not in self.instead and self._reaches(c)
        }
        self.instead |= open_cells
        cells = tuple(self.instead.get(id(c), c) for c in f.__closure__ or ())
        made = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, cells)
        self.instead[id(f)] = made
        for cell in f.__closure__ or ():
            if id(cell) in open_cells:
                open_cells[id(cell)].cell_contents = self(cell.cell_contents)
        made.__defaults__, made.__kwdefaults__ = self(f.__defaults__), self(f.__kwdefaults__)
        made.__qualname__ = f.__qualname__
        made.__dict__.update(self(f.__dict__))
        return made


def _parts(value: Any) -> list[Any] | None:
    """List the references of a value that can be rebuilt; None for any other."""
    kind = type(value)
    if kind in (list, tuple):
        return list(value)
    if kind in (dict, OrderedDict):
        return list(value.values())
    if kind is MethodType:
        return [value.__self__]
    if kind is weakref.ref:
        return [value()]
    if kind is functools.partial:
        return [value.func, value.args, value.keywords, value.__dict__]
    if kind is FunctionType:
        return [
            *(value.__closure__ or ()),
            value.__defaults__,
            value.__kwdefaults__,
            value.__dict__,
        ]
    if kind is CellType:
        try:
            return [value.cell_contents]
        except ValueError:  # the cell is empty
            return []
    return [value.__dict__] if kind is Around or is_wrapped_hook(value) else None


def slots(module: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """List (a dict, its key there, the first name) of each place that holds a tensor."""
    first: dict[int, str] = {}
    found = []
    for path, m in module.named_modules():
        for held in (m._parameters, m._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    name = first.setdefault(id(tensor), f"{path}.{key}" if path else key)
                    found.append((held, key, name))
    return found


@contextmanager
def exchanged(module: nn.Module, state: dict[str, Tensor]) -> Iterator[None]:
    """Set these tensors in the module, by their first names, inside the ``with``.

    Tensors that the module assigns meanwhile are put into ``state``.

    Places are restored in reverse: a submodule registered twice gets its own tensors back.
    """
    places = [(held, key, name) for held, key, name in slots(module) if name in state]
    own = [held[key] for held, key, _ in places]
    for held, key, name in places:
        held[key] = state[name]
    try:
        yield
    finally:
        for (held, key, name), tensor in zip(reversed(places), reversed(own), strict=True):
            state[name] = held.get(key, state[name])
            held[key] = tensor
