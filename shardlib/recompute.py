"""Recomputation with the scope of the forward, and the kernel results that it reuses.

torch.utils.checkpoint recomputes in backward, when the mesh, ``implicit``, ``saving``,
``algorithm`` and the parameters of ``apply`` are no longer in scope, or on a thread where they
never were.  ``Kept`` holds the results of a region's products and attention, so that its second
run computes everything except these (``remat="products"``, see modules/remat.py).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardlib._compat import FUSED_ATTENTION, PRODUCTS, DispatchMode, intercept_recompute, patch
from shardlib.mesh import bind, scope, within
from shardlib.opspec import Args, Func, Kwargs
from shardlib.random import marks, replayed


def kept(run: Callable[..., Any]) -> Callable[..., Any]:
    """Save the current scope with ``run``, for any time and thread; draws are repeated."""
    region = getattr(scope().call.stage, "region", lambda: lambda: None)()
    with within(stage=None):
        # a stage has its outputs, whose graph has this function: neither would ever be freed
        here, at = scope(), marks()

    def again(*args: object) -> Any:
        with bind(here), replayed(at), within(stage=region()):
            return run(*args) if here.call.again is None else here.call.again(lambda: run(*args))

    return again


patch("recompute", lambda: intercept_recompute(kept))


class Kept:
    """Results of one region's operations, in order: its first run stores them, later ones load.

    An operation calls ``given()``; where that is None it computes and calls ``keep(results)``, or
    ``keep()`` where its backward needs more than its results.  A result that was written to
    in place since is not returned.

    >>> import torch
    >>> region = Kept()
    >>> for run in range(2):
    ...     region.begin()
    ...     found = region.given()
    ...     if found is None:
    ...         region.keep(torch.ones(2))
    ...     print(found)
    None
    (tensor([1., 1.]),)
    """

    def __init__(self) -> None:
        self.results: list[tuple[tuple[Any, ...], list[tuple[Tensor, int]]]] = []
        # the operation that called given() last
        self.at = -1
        # whether this is the first run
        self.first = False

    def begin(self) -> None:
        """Start another run of the region from its first operation."""
        self.at, self.first = -1, not self.results

    def given(self) -> tuple[Any, ...] | None:
        """Return the next operation's results, where the first run kept them."""
        self.at += 1
        if self.first:
            return None
        found, watched = self.results[self.at]
        if any(x._version != version for x, version in watched):
            return None
        return tuple(_alias(x) for x in found) or None

    def keep(self, *results: object) -> None:
        """Keep results for ``given()`` in later runs; without any, the operation runs again."""
        if self.first:
            held = tuple(_alias(x) for x in results)
            self.results.append((held, []))
            for x in held:
                if isinstance(x, Tensor):
                    self.watch(x)

    def watch(self, x: Tensor) -> None:
        """Return the results only while nothing is written to ``x``, which shares their memory."""
        self.results[self.at][1].append((x.detach(), x._version))


def _alias(x: object) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def once(run: Callable[[], Tensor]) -> Tensor:
    """Return ``run()``, one call of torch's product or attention; its kernel runs once a region."""
    region = scope().call.region
    if region is None:
        return run()
    kernel = _Kernel(region.given())
    with kernel:
        out = run()
    region.keep(*(kernel.results[0] if len(kernel.results) == 1 else ()))
    region.watch(out)
    return out


class _Kernel(DispatchMode):  # type: ignore[misc, valid-type]
    """Mode below autograd: the kernel returns ``found``, or its result is added to ``results``."""

    def __init__(self, found: tuple[Any, ...] | None) -> None:
        super().__init__()
        self.found = found
        self.results: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        product = func in PRODUCTS
        if not product and func not in FUSED_ATTENTION:
            return func(*args, **(kwargs or {}))
        if self.found is not None:
            return self.found[0] if product else self.found
        out = func(*args, **(kwargs or {}))
        self.results.append(tuple(_alias(x) for x in ([out] if product else out)))
        return out
