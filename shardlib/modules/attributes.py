"""Attribute changes in forward, which a pure function would lose: detection and a warning."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["reported"]


@contextmanager
def reported(module: nn.Module) -> Iterator[None]:
    """Warn of attributes that change while a module runs, with the name of the submodule.

    Buffers are not included: ``apply`` returns them.  Detected are attributes that are set,
    tensors that are written to, and lists, dictionaries and sets that grow or shrink.

    >>> from shardlib.modules.attributes import reported
    >>> layer = nn.Linear(2, 2)
    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("always")
    ...     with reported(layer):
    ...         layer.calls = 1
    >>> str(seen[0].message).split(":")[0]
    "forward changed attribute 'calls' of the module"
    """
    before = _attributes(module)
    yield
    after = _attributes(module)
    none: Any = (None, None)
    names = {**before, **after}
    changed = [at for at in names if _differ(before.get(at, none), after.get(at, none))]
    if changed:
        path, name = changed[0]
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        warnings.warn(
            f"forward changed attribute {name!r} of {path or 'the module'}{more}: what runs again, "
            "or on another rank, need not see it; a buffer is handed on by apply.mutable",
            stacklevel=3,
        )


_OWN = frozenset(vars(nn.Module())) | {"_forward_hooks_called"}


def _attributes(module: nn.Module) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Map (submodule, name) to the value, kept so that its id stays unique, and its content."""
    return {
        (path, name): (value, _content(value))
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _OWN
    }


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if torch.is_inference(value) else getattr(value, "raw", value)._version
    if isinstance(value, list | dict | set):
        return len(value)
    return None


def _differ(a: Any, b: Any) -> bool:
    if a[1] != b[1]:
        return True
    if a[0] is b[0]:
        return False
    plain = (int, float, complex, str, tuple, type(None))
    return not (isinstance(a[0], plain) and type(a[0]) is type(b[0]) and a[0] == b[0])
