"""Skeleton: a copy of a module's tree without weights, on which calls run, to free the weights.

``skeleton(module)`` is a shallow copy of the tree: new Module objects of the same classes, whose
parameters are on the meta device.  References from the module back to itself refer to the copy:
shared submodules and tensors, bound methods, partials and closures in attributes and hooks, lists
and dicts of its parameters or submodules.  Everything else is shared with the module:
configurations, locks, generators, hooks and other objects, tensors that are neither parameters nor
buffers, modules that are not registered.

``Around`` wraps a method of a module so that copies of the module run on their own parameters.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardlib._compat import is_wrapped_hook


class Around:
    """Wrapper of ``module.name``, set as attribute: calls ``run(module, method, *given, ...)``.

    ``run``    a function that can be imported by its name, so that it can be pickled.
    ``given``  its arguments after the method.

    >>> def doubled(module, forward, factor, x):
    ...     return factor * forward(x)
    >>> import copy, torch
    >>> layer = nn.Linear(2, 2)
    >>> _ = Around(layer, "forward", doubled, 2)
    >>> again = copy.deepcopy(layer)
    >>> _ = again.requires_grad_(False).weight.zero_(), again.bias.fill_(3.0)
    >>> again(torch.ones(1, 2))
    tensor([[6., 6.]])
    """

    def __init__(
        self, module: nn.Module, name: str, run: Callable[..., Any], *given: object
    ) -> None:
        self.module, self.__name__, self.run, self.given = module, name, run, given
        self.before = vars(module).get(name)
        vars(module)[name] = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method before wrapping, which also gives the wrapper its signature."""
        if self.before is not None:
            return self.before
        return MethodType(getattr(type(self.module), self.__name__), self.module)

    @property
    def __code__(self) -> Any:
        """Code object of the method, whose file torch.export names."""
        return getattr(self.__wrapped__, "__code__", None)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.run(self.module, self.__wrapped__, *self.given, *args, **kwargs)


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
    swap: dict[int, Tensor] = {}
    for p in module.parameters():
        blank = torch.empty(p.shape, dtype=p.dtype, device="meta")
        swap[id(p)] = nn.Parameter(blank, requires_grad=p.requires_grad)
    swap |= {id(b): given[n] for n, b in module.named_buffers() if n in given}
    return copied(module, swap)[id(module)]


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
                # parameters, hooks: additions must not affect the original
                own[key] = value.copy()
        # set by module.compile(); it calls the original
        own.pop("_compiled_call_impl", None)
        if "_orig_mod" in own.get("_modules", {}):
            # a torch.compile wrapper calls the original too
            own["forward"] = own["_modules"]["_orig_mod"]
    return copies


class _Exchange:
    """Recursive replacement of values by their copies, for values that reference a copied one."""

    def __init__(self, instead: Mapping[int, Any]) -> None:
        self.instead = dict(instead)
        # values found to reference no copied object
        self.apart: dict[int, Any] = {}

    def __call__(self, value: object) -> Any:
        if id(value) in self.instead:
            return self.instead[id(value)]
        return self._rebuilt(value) if self._reaches(value) else value

    def _reaches(self, value: object) -> bool:
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
    if kind in _PARTS:
        return [*_PARTS[kind](value)]
    if kind is CellType:
        try:
            return [value.cell_contents]
        except ValueError:  # the cell is empty
            return []
    return [value.__dict__] if kind is Around or is_wrapped_hook(value) else None


_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: iter,
    tuple: iter,
    dict: dict.values,
    OrderedDict: dict.values,
    MethodType: lambda method: [method.__self__],
    weakref.ref: lambda ref: [ref()],
    functools.partial: lambda f: [f.func, f.args, f.keywords, f.__dict__],
    FunctionType: lambda f: [*(f.__closure__ or ()), f.__defaults__, f.__kwdefaults__, f.__dict__],
}
"""Kind of a value -> the references that it holds."""
