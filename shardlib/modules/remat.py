"""Rematerialization: ``parallelize(..., remat=[(pattern, policy)])`` limits what backward keeps.

    "all"       keep what autograd keeps
    "products"  keep the inputs and the results of products and attention; recompute the rest
    "full"      keep the inputs; recompute everything, with its communication
    "host"      keep what autograd keeps in host memory, and fetch it in backward

A rule takes the outermost modules whose names match (module lists, which are never called,
excepted), each module the first rule that takes it; a rule may name modules inside those of
another.  Random draws are repeated, so that dropout masks the same elements, and gradients are bit
for bit those of "all".

Source: Chen et al., arXiv 1604.06174 (checkpoints); Korthikanti et al., arXiv 2205.05198 (selective
recomputation in a Transformer's block).
"""

import enum
import io
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardlib._compat import backward_now
from shardlib.collectives import Away
from shardlib.errors import RuleLint, similar
from shardlib.memory_sharing import SavedTensor, TensorForm, unpacked, writes
from shardlib.mesh import scope, within
from shardlib.modules.rules import Pattern, is_pattern, matches, nearest, rule_error
from shardlib.modules.weightless_copy import Around
from shardlib.recompute import Kept
from shardlib.tensor import ShardedTensor, raw_of
from shardlib.tensor.place import Place

POLICIES = ("all", "products", "full", "host")

Remat = Sequence[tuple[Pattern[nn.Module], str]]


def regions(module: nn.Module, remat: Remat) -> dict[str, str]:
    """Map each module that a rule takes, by its name, to its policy.

    Raises: RuleLint for an unknown policy, a pattern that matches no module, and one that
    matches a list of modules, which is never called itself.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.GELU()), nn.Linear(2, 2))
    >>> regions(model, [("0", "full"), ("*.0", "products")])
    {'0': 'full', '0.0': 'products'}
    """
    names = {n: m for n, m in module.named_modules() if n}
    taken: dict[str, str] = {}
    for pattern, policy in _read(remat):
        found = [n for n, m in names.items() if matches(pattern, n, m)]
        called = [n for n in found if not _is_list(names[n])]
        if not called:
            raise _no_module(pattern, policy, names, found)
        for n in called:
            if not any(n.startswith(f"{o}.") for o in called):
                # the outermost alone
                taken.setdefault(n, policy)
    return taken


def _no_module(
    pattern: Pattern[nn.Module], policy: str, names: Mapping[str, nn.Module], lists: Sequence[str]
) -> RuleLint:
    """Return the error for a pattern that matches lists alone, or nothing; with the nearest name."""
    if lists:
        return rule_error(
            f"remat: {lists[0]!r} is a {type(names[lists[0]]).__name__}, which is never called "
            "itself",
            f"sl.parallelize(module, rules, remat=[({lists[0] + '.*'!r}, {policy!r})])",
        )
    near = similar(str(pattern).strip("*."), names, 1, 0.4)
    told = (near or list(names) or ["*"])[0]
    if told in names and _is_list(names[told]):
        told += ".*"
    return rule_error(
        f"remat: {pattern!r} matches no module{nearest([told] if near else [])}",
        f"sl.parallelize(module, rules, remat=[({told!r}, {policy!r})])",
        operands={"modules": ", ".join([*list(names)[:6], "..."][: len(names)])},
    )


def _is_list(module: nn.Module) -> bool:
    """Check whether a module has no forward of its own, such as ModuleList."""
    return type(module).forward in _NEVER_CALLED


_NEVER_CALLED = {nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward}


def _read(remat: Remat) -> Iterable[tuple[Pattern[nn.Module], str]]:
    """Return the rules, after checking their form."""
    given: list[Any] = [remat] if isinstance(remat, str) else list(remat)
    for rule in given:
        well = isinstance(rule, tuple | list) and len(rule) == 2
        if not well or not is_pattern(rule[0]):
            raise rule_error(
                f"remat is a list of (pattern, policy) over names of modules, not {rule!r}",
                "sl.parallelize(module, rules, remat=[('*', 'full')])",
            )
        if rule[1] not in POLICIES:
            near = similar(str(rule[1]), POLICIES, 1) or ["full"]
            raise rule_error(
                f"remat: unknown policy {rule[1]!r}; there are {', '.join(POLICIES)}",
                f"sl.parallelize(module, rules, remat=[({rule[0]!r}, {near[0]!r})])",
            )
        yield rule[0], rule[1]


def remembering(module: nn.Module, policies: Mapping[str, str]) -> None:
    """Wrap the forwards of these modules to keep tensors for backward by their policies."""
    for name, policy in policies.items():
        m = module.get_submodule(name)
        if policy == "host":
            Around(m, "forward", _on_host)
        elif policy != "all":
            Around(m, "forward", _made_again, policy == "products")


def _made_again(
    module: nn.Module, forward: Callable[..., Any], keeps: bool, /, *args: Any, **kwargs: Any
) -> object:
    """Run forward as a region of torch's checkpoint; ``keeps`` the results of its products.

    The second run gets the same inputs as the first: mutable arguments as they were, such as a
    cache of keys that the first run filled; its writes to buffers are dropped.
    """

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    kept = Kept() if keeps else None
    before = {k: _Twin(v) for k, v in [*enumerate(args), *kwargs.items()] if _may_change(v)}
    written: list[Tensor] | None = None

    def region(*args: object, **kwargs: object) -> object:
        nonlocal written
        if kept is not None:
            kept.begin()
        with within(region=kept):
            # None until the first run ends; a later run recomputes in backward
            if written is None:
                marks = [(b, writes(raw_of(b))) for b in module.buffers()]
                try:
                    return forward(*args, **kwargs)
                finally:
                    written = [b for b, version in marks if writes(raw_of(b)) != version]
            args = tuple(before[i]() if i in before else a for i, a in enumerate(args))
            kwargs = {k: before[k]() if k in before else v for k, v in kwargs.items()}
            held = [b.clone() for b in written]
            try:
                return forward(*args, **kwargs)
            finally:
                with torch.no_grad():
                    for b, value in zip(written, held, strict=True):
                        b.copy_(value)

    return checkpoint(region, *args, use_reentrant=False, **kwargs)


_FIXED = (
    Tensor, nn.Module, int, float, complex, str, bytes, enum.Enum, type, FunctionType,
    torch.dtype, torch.device, torch.Size, range, slice, type(None), type(...),
)  # fmt: skip


def _may_change(x: Any) -> bool:
    """Check whether an argument holds an object that a call may change (no tensor, number, ...)."""
    return not all(isinstance(leaf, _FIXED) for leaf in optree.tree_leaves(x, none_is_leaf=True))


class _Twin:
    """Snapshot of an object that shares its tensors and modules: each call returns a new copy."""

    def __init__(self, x: object) -> None:
        self.shared: list[Any] = []
        self.x, self.text = x, io.BytesIO()
        writer = pickle.Pickler(self.text)
        writer.persistent_id = self._place  # type: ignore[method-assign]
        try:
            writer.dump(x)
        except Exception:
            # not picklable: a lock, a file, a local class
            self.text = io.BytesIO()

    def _place(self, x: object) -> int | None:
        if not isinstance(x, Tensor | nn.Module):
            return None
        self.shared.append(x)
        return len(self.shared) - 1

    def __call__(self) -> object:
        if not self.text.getbuffer():
            return self.x
        reader = pickle.Unpickler(io.BytesIO(self.text.getvalue()))
        reader.persistent_load = self.shared.__getitem__  # type: ignore[method-assign]
        return reader.load()


SMALL = 4096
"""Bytes of a rank below which a move costs more than the memory that it saves."""


def _on_host(
    module: nn.Module, forward: Callable[..., Any], /, *args: object, **kwargs: object
) -> Any:
    """Run forward with its large saved tensors in host memory until backward; the weights stay.

    Those of stage 3 are gathered again.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    parts = scope().call.gathers
    weights = [*module.buffers()]
    if parts is None:
        weights += module.parameters()
    stay = {raw_of(w).untyped_storage()._cdata for w in weights}
    with saved_tensors_hooks(partial(_packed, parts, stay), unpacked):
        return forward(*args, **kwargs)


def _packed(parts: Any, stay: Collection[int], x: Tensor) -> Any:
    """Return what is kept of a saved tensor.

    ``parts``  the reading of parameters in parts, if they are; ``stay``  storages that stay.
    """
    if type(x) is ShardedTensor and x.is_stored:
        # an input of a region inside, which is recomputed
        return _SavedValue(_packed(parts, stay, x.raw), x.place, x.raw.requires_grad)
    if type(x) not in (Tensor, nn.Parameter):
        return x
    if parts is not None and (weight := parts.weight(x)):
        return weight
    tier = parts and parts.room.activations
    shares = tier.shares if tier else 1
    small = x.nbytes < SMALL * shares or x.layout is not torch.strided
    # what a recomputation saves is needed at once
    if small or x.untyped_storage()._cdata in stay or backward_now() != -1:
        return SavedTensor(x)
    if tier:
        return tier.keep(x)
    if x.device.type == "cpu":
        return SavedTensor(x)
    return _OnPaper(x) if x.is_meta else Away(x)


class _SavedValue(NamedTuple):
    """A sharded value whose block is kept elsewhere."""

    kept: Any
    place: Place
    asks: bool

    def back(self) -> Tensor:
        """Return the value."""
        return ShardedTensor(unpacked(self.kept).detach().requires_grad_(self.asks), self.place)


class _OnPaper(Away):
    """Tensor of a planned call that would be kept in host memory: on the device it counts as there."""

    def _is_late(self) -> bool:
        return True

    def _send(self, x: Tensor) -> None:
        self.form = TensorForm.of(x)
        told = getattr(scope().listeners.watcher, "away", None)
        if told is not None:
            told(x.nbytes)

    def _leave(self) -> None:
        self.near = None

    def _fetch(self) -> None:
        if self.near is None:
            self.near = self.form.empty("meta")
