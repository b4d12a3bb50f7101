"""torch's optimizers as transforms, and transforms as one of torch's optimizers."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.errors import BadArgument, ShardError, Unsupported
from shardlib.optim.combine import InjectState
from shardlib.optim.names import load_state_dict, state_dict
from shardlib.optim.transform import (
    Step,
    Transform,
    at_step,
    begun,
    check_transform,
    run_in_place,
)
from shardlib.optim.trees import State, Tree, each, need, pieces, ready, trainable
from shardlib.tensor import ShardedTensor, raw_of

ELEMENTWISE = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)


REFUSED = {"LBFGS": "evaluates the loss itself", "SparseAdam": "is for sparse gradients"}


class TorchState(NamedTuple):
    """Steps taken, and torch's state by name: a tree, or one tensor for all parameters.

    Its values are placeholders before the first step.
    """

    count: int
    kept: dict[str, Any]


def from_torch(
    optimizer: Callable[..., torch.optim.Optimizer], *, trait: str | None = None, **how: Any
) -> Transform:
    """Wrap a torch.optim class, or a compatible one, as a transform.

    torch's own elementwise optimizers run on blocks.  Others run on the sharded values, so their
    operators communicate as usual (``with sl.implicit():`` if they gather).
    ``lr``     a number or a schedule.
    ``trait``  see ``Transform``; known for torch's own elementwise optimizers.  ``zero`` refuses
               others unless it is given.
    Raises: Unsupported for an optimizer that needs a closure.

    >>> tx = from_torch(torch.optim.SGD, lr=0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
    {'w': tensor([-0.5000, -0.5000])}
    """
    if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        given = repr(optimizer) if isinstance(optimizer, str) else f"one {type(optimizer).__name__}"
        raise BadArgument(
            f"a class of optimizers is expected, not {given}",
            op="from_torch",
            fix="sl.optim.from_torch(torch.optim.AdamW, lr=1e-3)",
        )
    name = getattr(optimizer, "__name__", "optimizer")
    if name in REFUSED:
        raise Unsupported(
            f"{name} {REFUSED[name]}",
            op="from_torch",
            fix="sl.optim.from_torch(torch.optim.AdamW, lr=1e-3)",
        )
    known = name in ELEMENTWISE and getattr(torch.optim, name, None) is optimizer
    run = _TorchRun(optimizer, how, known)
    tx = Transform(run.init, run.update, trait or ("elementwise" if known else None), run.donate)
    check_transform(tx, "from_torch")
    return tx


class _TorchRun:
    """Steps of one of torch's optimizers, made anew for each: its state is a value.

    ``how``    its arguments.
    ``known``  whether it is elementwise: then blocks suffice, padded ones too.
    """

    def __init__(
        self, optimizer: Callable[..., torch.optim.Optimizer], how: dict[str, Any], known: bool
    ) -> None:
        self.optimizer = optimizer
        self.how = how
        self.known = known

    def init(self, params: Tree) -> TorchState:
        """Return the state after a step of zeros, on copies."""
        rows, tree = optree.tree_flatten(trainable(params), none_is_leaf=True)
        held = [i for i, p in enumerate(rows) if isinstance(p, Tensor)]
        copies = [rows[i].detach().clone() for i in held]
        zeros, kept = [torch.zeros_like(p) for p in copies], [{} for _ in held]
        if held:
            kept = self.stepped(copies, zeros, kept, 0)
        return TorchState(0, _by_name(kept, held, rows, tree))

    def update(self, grads: Tree, state: TorchState, params: Tree = None) -> tuple[Any, TorchState]:
        """Return the differences that a step on copies makes."""
        ready(grads, "from_torch")
        need(params, "from_torch")
        new = each(lambda p: p.detach().clone(), params)
        after = self._advanced(new, grads, state, copy=True)
        return each(lambda g, p, n: n - p, grads, params, new), after

    def donate(self, grads: Tree, state: TorchState, params: Tree, step: Step) -> TorchState:
        """Step the parameters in place."""
        ready(grads, "from_torch")
        step.unscale(grads)
        step.lr = self.at(state.count).get("lr")
        return self._advanced(params, grads, state)

    def at(self, count: int) -> dict[str, Any]:
        """Return the optimizer's arguments at a step."""
        lr = self.how.get("lr")
        return self.how if lr is None else self.how | {"lr": at_step(lr, count)}

    def _advanced(
        self, params: Tree, grads: Tree, state: TorchState, copy: bool = False
    ) -> TorchState:
        """Step the parameters in place, and the state too unless it is copied."""
        rows, tree = optree.tree_flatten(params, none_is_leaf=True)
        given = optree.tree_leaves(grads, none_is_leaf=True)
        held = [i for i, g in enumerate(given) if isinstance(g, Tensor)]
        before = _by_leaf(state, held, len(rows), copy)
        kept = self.stepped([rows[i] for i in held], [given[i] for i in held], before, state.count)
        return TorchState(state.count + 1, _by_name(kept, held, rows, tree))

    def stepped(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        kept: list[dict[str, Any]],
        count: int,
    ) -> list[dict[str, Any]]:
        """Run one step on these tensors, in place; return the optimizer's state of each."""
        bare = raw_of if self.known else lambda x: x
        leaves = [bare(p.detach()).requires_grad_() for p in params]
        made = self.optimizer(leaves, **self.at(count))
        for p, g, state in zip(leaves, grads, kept, strict=True):
            # zero gives sums of halves in fp32; torch takes a gradient in its parameter's dtype
            p.grad = bare(g.detach()).to(p.dtype)
            # Adagrad fills its state when it is made; torch 2.11 does not where a step finds none
            made.state[p].update({n: bare(v) for n, v in state.items()})
        made.step()
        found = [dict(made.state[p]) for p in leaves]
        return list(map(_lying, found, params)) if self.known else found


def _lying(state: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """Give blocks of the optimizer's state the layout of their parameter."""
    if not isinstance(like, ShardedTensor):
        return state
    shape = like.raw.shape
    blocks = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.shape == shape}
    return state | {n: like.detach().becomes(v) for n, v in blocks.items()}  # type: ignore[attr-defined]


def _by_name(
    kept: list[dict[str, Any]], held: list[int], rows: list[Any], tree: Any
) -> dict[str, Any]:
    """Convert torch's state to a tree per name; equal counts are stored once."""
    out: dict[str, Any] = {}
    scalars = not any(rows[i].ndim for i in held)
    for name in dict.fromkeys(itertools.chain(*kept)):
        values = {i: row.get(name) for i, row in zip(held, kept, strict=True)}
        if scalars or any(isinstance(v, Tensor) and v.ndim for v in values.values()):
            out[name] = tree.unflatten([values.get(i) for i in range(len(rows))])
        else:
            out[name] = kept[0].get(name)
    return out


def _by_leaf(
    state: TorchState, held: list[int], count: int, copy: bool = False
) -> list[dict[str, Any]]:
    """Convert it back to torch's state per parameter, which is empty before the first step."""
    out: list[dict[str, Any]] = [{} for _ in held]
    for name, value in state.kept.items() if state.count else ():
        rows = optree.tree_leaves(value, none_is_leaf=True)
        shared = len(rows) == 1 and count > 1
        for row, i in zip(out, held, strict=True):
            one = rows[0] if shared else rows[i]
            again = isinstance(one, Tensor) and (copy or shared)
            row[name] = one.clone() if again else one
    return out


class as_torch(torch.optim.Optimizer):
    """A transform as one of torch's optimizers, for torch's learning rate schedulers and Lightning.

    ``params``  tensors, plain or sharded, or a mapping of names to them, which masks match, or
                pairs such as ``module.named_parameters()``.
    ``param_groups[0]["lr"]`` is the rate if ``tx`` was made by ``inject_hyperparams``, each of
    which has its own group; else it starts at 1.0 and multiplies the updates.
    Steps run in place, and may overwrite gradients.  ``state_dict`` has global tensors by name.
    Raises: ShardError if there are no parameters, or for a state of others.

    >>> import shardlib as sl
    >>> model = torch.nn.Linear(2, 1)
    >>> adamw = sl.optim.inject_hyperparams(sl.optim.adamw)(lr=0.1)
    >>> tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), adamw)
    >>> optimizer = as_torch(tx, model.parameters())
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4, 2)).sum().backward()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> optimizer.param_groups[0]["lr"]
    0.025
    """

    def __init__(
        self,
        tx: Transform,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    ) -> None:
        check_transform(tx, "as_torch")
        pairs = _pairs(params)
        if not pairs:
            raise ShardError(
                "there are no parameters",
                op="as_torch",
                fix="sl.optim.as_torch(tx, dict(model.named_parameters()))",
            )
        self._tx, self._params = tx, dict(pairs)
        self._state = tx.init(self._params)
        injected = _injected(self._state)
        first = dict(injected[0].hyperparams) if injected else {"lr": 1.0}
        super().__init__([p for _, p in pairs], first)
        for other in injected[1:]:
            self.param_groups.append(dict(other.hyperparams) | {"params": []})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the transform's state was made for the first parameters.

        Raises: ShardError.
        """
        if self.param_groups:
            raise ShardError(
                "the state was made for the parameters of before",
                op="as_torch",
                fix="optimizer = sl.optim.as_torch(tx, dict(module.named_parameters()))",
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters in place by their gradients; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # a step in place may overwrite gradients, and these stay in the parameters
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in self._params.items()}
        injected = _injected(self._state)
        for state, group in zip(injected, self.param_groups, strict=False):
            state.hyperparams.update({k: float(group[k]) for k in state.hyperparams})
        factor = 1.0 if injected else float(self.param_groups[0]["lr"])
        if factor == 1.0:
            state = begun(self._state)
            self._state = run_in_place(self._tx, grads, state, self._params, Step())
        else:
            updates, self._state = self._tx.update(grads, self._state, self._params)
            for p, u in zip(*pieces(self._params, updates), strict=True):
                p.add_(u, alpha=factor)
        for state, group in zip(_injected(self._state), self.param_groups, strict=False):
            # the transform's own schedules
            group.update(state.hyperparams)
        return loss

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the state by name, and the parameter groups in torch's form."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"state": state_dict(self._state), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a result of ``state_dict``, also from another mesh or layout.

        Raises: ShardError.
        """
        self._state = load_state_dict(self._tx.init(self._params), state_dict["state"])
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            mine.update(theirs)


def _pairs(params: Tree) -> list[tuple[str, Tensor]]:
    """List names and parameters.

    Raises: BadArgument for other objects, such as a group in a dict: use ``partition`` for rates.
    """
    fix = "sl.optim.as_torch(tx, dict(module.named_parameters()))"
    if isinstance(params, Tensor | torch.nn.Module) or not isinstance(params, Iterable):
        kind = type(params).__name__
        raise BadArgument(f"parameters are expected, not one {kind}", op="as_torch", fix=fix)
    if isinstance(params, Mapping):
        pairs = list(params.items())
    else:
        rows = list(params)
        named = all(isinstance(p, tuple) and len(p) == 2 for p in rows)
        pairs = rows if named else [(str(i), p) for i, p in enumerate(rows)]
    for _, p in pairs:
        if not isinstance(p, Tensor):
            raise BadArgument(
                f"a parameter is a tensor, not {type(p).__name__}; rates of groups are partition's",
                op="as_torch",
                fix=fix,
            )
    return pairs


def _injected(state: State) -> list[InjectState]:
    """List the states of ``inject_hyperparams`` in a state, the outermost first."""
    if isinstance(state, InjectState):
        return [state, *_injected(state.inner)]
    if isinstance(state, ShardedTensor | Tensor):
        return []
    if isinstance(state, Mapping):
        return [s for x in state.values() for s in _injected(x)]
    if isinstance(state, tuple | list):
        return [s for x in state for s in _injected(x)]
    return []
