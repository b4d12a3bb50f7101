"""Expert parallelism: stacks of experts split over mesh axes; each rank runs its own experts, and
the results are summed.

A *stack* is a module that holds its experts' parameters as [E, ...], has E as ``num_experts``, and
whose forward takes (hidden [T, D], index [T, k], weights [T, k]): row t of the result is the sum
over k of weights[t, k] times the output of expert index[t, k] for hidden[t].  The experts of
transformers' mixtures are stacks.  Where a layout splits E over some axes, a call of the stack is

    gather   hidden, index and weights to whole rows over these axes, where they are split over them
    run      the module's own forward, in the implementation that its configuration names, on the
             experts that the rank holds and on the rows that are routed to them
    sum      the results over these axes, to hidden's layout: an all-reduce, or a reduce-scatter

Each rank computes only its own experts' rows.  The router is unchanged: no row is dropped, and
none is computed by another expert than without the split.  Rows are gathered by all ranks, not sent
to their experts only.  A stack's output for a row must not depend on other rows.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.errors import BadArgument, ShardError
from shardlib.layouts import Dim, Layout
from shardlib.mesh import scope
from shardlib.modules.weightless_copy import Around
from shardlib.ops.dims import Labels, rows_call
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard, shard
from shardlib.tensor import ShardedTensor, implements, lift, typeof
from shardlib.tensor.weight_gradients import SplitProducts


def is_stack(module: nn.Module) -> bool:
    """Check whether a module holds experts' parameters as [E, ...] and takes the routing of rows.

    >>> is_stack(nn.Linear(4, 4))
    False
    """
    count = getattr(module, "num_experts", None)
    held = list(module.parameters(recurse=False))
    inside = len(list(module.parameters())) > len(held)
    if not isinstance(count, int) or inside or max((p.ndim for p in held), default=0) < 3:
        return False
    if any(p.shape[:1] != (count,) or p.ndim < 2 for p in held):
        return False
    takes = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(takes) == 3 and all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in takes)


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """List every stack of experts, by its name."""
    return {n: m for n, m in model.named_modules() if is_stack(m)}


def divide(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Wrap the forwards of the stacks whose experts these layouts split: ranks run their own.

    Stacks of transformers that are left whole are included.

    The latter run on each rank's own rows, which is safe: transformers splits experts itself, so
    rows are independent.
    Raises: ShardError where the parameters of one are not split alike, or in other dimensions too.
    """
    for name, stack in stacks(model).items():
        held = {f"{name}.{n}".lstrip("."): p for n, p in stack.named_parameters(recurse=False)}
        mine = {n: layouts[n].resolve(p.ndim) for n, p in held.items() if n in layouts}
        if len(mine) < len(held):
            continue
        token = next((lay.dims[0] for lay in mine.values() if lay.dims[0].is_split), None)
        whole = not any(lay.axes for lay in mine.values())
        if token is not None:
            _refuse_unlike(name, mine, token)
        if token is not None or (whole and hasattr(stack, "_is_expert_parallel")):
            Around(stack, "forward", _forward)


def _refuse_unlike(name: str, layouts: Mapping[str, Layout], token: Dim) -> None:
    """Refuse parameters of a stack that are not split alike, or in other dimensions too."""
    for n, lay in layouts.items():
        if (lay.dims[0], lay.axes) != (token, token.axes):
            below = f"{name}.".lstrip(".")
            raise ShardError(
                f"the experts of {name!r} are split {token}, and {n!r} is laid out {lay}: all "
                "parameters of a stack are split alike, along their first dimension alone",
                op="parallelize",
                operands=layouts,
                fix=f"sl.parallelize(module, [({f'{below}*'!r}, '{token} ...'), "
                f"*(r for r in rules if not str(r[0]).startswith({below!r}))])",
            )


def _forward(
    self: nn.Module, forward: Callable[..., Any], /, *args: object, **kwargs: object
) -> Tensor:
    """Run the forward of a stack whose parameters are split along E."""
    given = inspect.signature(forward).bind(*args, **kwargs).arguments
    held = {n: p for n, p in self._parameters.items() if p is not None}
    operands: Any = list(given.values())
    if not all(isinstance(v, Tensor) for v in operands) or _elsewhere(operands[0], held.values()):
        return forward(*args, **kwargs)
    return experts(weakref.ref(self), tuple(held), *operands, *held.values())


def _elsewhere(hidden: Tensor, held: Iterable[Tensor]) -> bool:
    """Check whether a whole stack gets split features, which it does not gather."""
    if not isinstance(hidden, ShardedTensor) or any(
        isinstance(p, ShardedTensor) and p.sharding.axes for p in held
    ):
        return False
    return (
        hidden.ndim != 2
        or hidden.sharding.resolve(2).dims[1].is_split
        or bool(hidden.sharding.partial)
    )


def experts(
    module: "weakref.ref[nn.Module]",
    names: tuple[str, ...],
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *params: Tensor,
) -> Tensor:
    """Compute the output of a stack of experts for these rows, with parameters of these names."""
    operands = (hidden, index, weights, *params)
    if has_torch_function(operands):
        return handle_torch_function(experts, operands, module, names, *operands)  # type: ignore[no-any-return]
    own = torch.arange(params[0].shape[0], device=index.device)
    return own_experts(module, names, hidden, index, weights, own, *params)


@implements(experts)
def _divided_experts(func: Func, args: Args, kwargs: Kwargs) -> Any:
    module, names, *given = args
    mesh = next(v.mesh for v in given if isinstance(v, ShardedTensor))
    hidden, index, weights, *params = [lift(v, mesh, "experts") for v in given]
    if (
        hidden.ndim != 2
        or index.ndim != 2
        or index.shape != weights.shape
        or index.shape[0] != hidden.shape[0]
    ):
        raise BadArgument(
            "experts take rows [T, D], numbers of experts [T, k] and weights [T, k]",
            op="experts",
            operands={"hidden": typeof(hidden), "index": typeof(index), "weights": typeof(weights)},
            mesh=mesh,
            fix="sl.unshard(x)",
        )
    token = params[0].sharding.resolve(params[0].ndim).dims[0]
    _refuse_unlike(
        "", {n: v.sharding.resolve(v.ndim) for n, v in zip(names, params, strict=True)}, token
    )
    place = Layout(hidden.sharding.resolve(2).dims)
    rows = Layout((_without(place.dims[0], token.axes), Dim()))
    moved = [reshard(v, rows) for v in (hidden, index, weights)]
    own = shard(torch.arange(params[0].shape[0], device=mesh.device), Layout((token,)), mesh)
    out = rows_call(
        own_experts, (module, names, *moved, own, *params), {}, _labels, sums=True, unsummed=True
    )
    return reshard(out, place)


def _without(token: Dim, axes: Sequence[str]) -> Dim:
    """Return the split of the rows without these axes."""
    if not set(token.axes) & set(axes):
        return token
    return Dim(tuple(a for a in token.axes if a not in axes)) if token.is_plain else Dim()


def _labels(args: Args, kwargs: Kwargs) -> Labels:
    _, _, hidden, index, weights, *held = args
    rows: Labels = {s.at: ("t", None) for s in (hidden, index, weights)}
    return rows | {s.at: ("e", *[None] * (s.ndim - 1)) for s in held}


def own_experts(
    module: "weakref.ref[nn.Module]",
    names: tuple[str, ...],
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    own: Tensor,
    *params: Tensor,
) -> Tensor:
    """Compute the contribution of the experts numbered ``own`` to each row.

    hidden [T, D], index and weights [T, k], own [E/p], params [E/p, ...] -> [T, D]
    """
    stack = module()
    assert stack is not None, "a call keeps its module alive"
    count = int(stack.num_experts)  # type: ignore[arg-type]
    place = own.new_full((count,), -1)
    place[own] = torch.arange(len(own), device=own.device)
    at = place[index]
    if hidden.is_meta:
        row, slot, number = _evenly(index, len(own), count)
    else:
        row, slot = (at >= 0).nonzero(as_tuple=True)
        number = at[row, slot]
    x, w = hidden[row], weights[row, slot][:, None]
    if len(row):
        local = object.__new__(type(stack))
        local.__dict__.update(stack.__dict__)
        local.__dict__.update(
            _parameters=dict(zip(names, params, strict=True)), num_experts=len(own)
        )
        try:
            with SplitProducts() if scope().policy.split_backward else nullcontext():
                y = type(stack).forward(local, x, number[:, None], w)
        except RuntimeError:
            if not hidden.is_meta:
                raise
            # it asks for values: use every operand, for the graph
            y = x * w.to(x.dtype) + sum(p.sum().to(x.dtype) for p in params)
    else:
        # without rows, keep params in the graph: gradients are summed over all ranks
        y = x * w.to(x.dtype) + sum(p.flatten()[:0].sum().to(x.dtype) for p in params)
    return torch.zeros_like(hidden).index_add(0, row, y.to(hidden.dtype))


def _evenly(index: Tensor, own: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, slots and experts as if as many rows were routed to each of ``count`` experts.

    On shapes, where routing has no values.
    """
    rows, k = index.shape
    routed = torch.arange(-(-rows * k * own // count), device=index.device)
    found = torch.stack([routed % rows, routed // rows % k], 1)
    return found[:, 0], found[:, 1], routed % own
