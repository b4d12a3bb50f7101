"""The first operator with a wrong value: each is run again as torch's own on whole operands."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import optree
import torch
from torch import Tensor

from shardlib.errors import ShardError, user_line
from shardlib.grad import grad
from shardlib.mesh import within
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import shard
from shardlib.tensor import ShardedTensor, typeof
from shardlib.testing.compare import difference, whole

__all__ = ["Found", "Places"]


@dataclass(frozen=True)
class Found:
    """The first operator whose value, or gradient, differs from torch's."""

    call: str
    line: str
    off: float
    gradient: bool


class Places:
    """A watcher of every function called on sharded tensors; it records the first wrong one."""

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients
        self.found: Found | None = None
        self.inside = False

    def chose(self, match: object, product: bool = False) -> None:
        """Ignore the algorithm: only the value is checked."""

    def __call__(
        self, implementation: Callable[..., object], func: Func, args: Args, kwargs: Kwargs
    ) -> object:
        name = getattr(func, "__name__", str(func))
        if self.inside or self.found is not None or _draws(name):
            return implementation(func, args, kwargs)
        line = user_line()
        given: Any = (args, kwargs)
        self.inside = True
        try:
            before = _whole(given)
            kept = optree.tree_map(_kept, given) if self.gradients else None
            out = implementation(func, args, kwargs)
            off = self._gradient(func, kept, before) if kept else _value(func, before, out)
        finally:
            self.inside = False
        # in fp64, rounding of one operator is far below this
        if off > 1e-9:
            types = [typeof(x) for x in optree.tree_leaves(given) if _ours(x)]
            self.found = Found(f"{name}({', '.join(types)})", line, off, self.gradients)
        return out

    def _gradient(self, func: Func, kept: Any, whole: Any) -> float:
        """Return the largest relative error of the operator's gradients, for one cotangent."""
        leaves, tree = optree.tree_flatten(kept)
        dense = optree.tree_leaves(whole)
        at = [i for i, x in enumerate(leaves) if _ours(x) and x.is_floating_point()]
        if not at:
            return 0.0

        def loss(over: Sequence[Any], given: Sequence[Any]) -> Tensor:
            filled = list(given)
            for i, x in zip(at, over, strict=True):
                filled[i] = x
            args, kwargs = optree.tree_unflatten(tree, filled)
            outs = [x for x in optree.tree_leaves(func(*args, **kwargs)) if _floats(x)]
            return sum((_weighed(x) for x in outs), start=torch.zeros((), device="cpu"))  # type: ignore[return-value]

        try:
            with torch.enable_grad(), within(watcher=None):
                mine: Any = grad(lambda o: loss(o, leaves))([leaves[i] for i in at])
                right: Any = grad(lambda o: loss(o, dense))([dense[i] for i in at])
        except (ShardError, RuntimeError, TypeError):
            return 0.0  # it is not differentiable, or cannot be run alone
        return max(difference(m, r) for m, r in zip(mine, right, strict=True))


def _weighed(x: Tensor) -> Tensor:
    """Compute a scalar with a different weight for each element."""
    places = torch.arange(float(math.prod(x.shape)), device=x.device)
    weights = torch.cos(places).reshape(x.shape).to(x.dtype)
    if isinstance(x, ShardedTensor):
        weights = shard(weights, str(x.sharding.bare), x.mesh)
    return (x * weights).sum()


def _value(func: Func, whole: Any, out: Any) -> float:
    args, kwargs = whole
    try:
        with torch.no_grad():
            right = func(*args, **kwargs)
    except (ShardError, RuntimeError, TypeError, ValueError, IndexError):
        return 0.0
    pairs = list(zip(optree.tree_leaves(out), optree.tree_leaves(right), strict=False))
    return max(
        [difference(m, r) for m, r in pairs if isinstance(m, ShardedTensor) and _floats(r)],
        default=0.0,
    )


def _draws(name: str) -> bool:
    words = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "multinomial", "exponential")
    return any(w in name for w in words)


def _ours(x: object) -> TypeGuard[ShardedTensor]:
    return isinstance(x, ShardedTensor)


def _floats(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point()


def _kept(x: object) -> object:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _whole(tree: Any) -> Any:
    def one(x: object) -> object:
        return whole(x).clone() if isinstance(x, Tensor) else x

    with torch.no_grad():
        return optree.tree_map(one, tree)
