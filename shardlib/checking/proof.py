"""The comparison of a module on every mesh with the same module on one device.

Everything runs in this process, in fp64, so that rounding cannot hide or fake an error: every
tensor of the output, the loss, every gradient, their norm, the parameters after some optimizer
steps, and, where the module draws random numbers in training, all of these in training too.  Casts
to fp32 or less inside the module, such as those of a transformers loss, become casts to fp64.  If
anything differs, each operator of the forward is run again as torch's own on whole operands, then
its gradient, to find the first wrong one.
"""

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple, TypeGuard

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardlib.errors import ModelDiffers, ShardError, mesh_text, user_line
from shardlib.grad import grad, value_and_grad
from shardlib.layouts import Layout, LayoutLike
from shardlib.mesh import Mesh, simulate, use_mesh, within
from shardlib.modules.dim_trace import called_with
from shardlib.modules.parallelize import CutsIntoStages, parallelize
from shardlib.modules.rules import Named, Rules
from shardlib.opspec import Args, Func, Kwargs, draws
from shardlib.optim import adamw, apply_updates, global_norm
from shardlib.placing import shard
from shardlib.tensor import ShardedTensor, typeof
from shardlib.testing.compare import difference, whole

Batch = Tensor | Sequence[object] | Mapping[str, object]
MeshOf = Mesh | Mapping[str, int]
Call = tuple[Args, Kwargs]

_RATE = 1e-2


@dataclass
class Proof:
    """A comparison: mesh -> quantity -> largest difference, relative to its largest value.

    ``left``    parts of the output without a tensor that could be compared.
    ``raised``  calls that cast to fp32 or less in the module, and to fp64 here.
    """

    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """A table of the quantities in evaluation, and below it one of those in training."""
        names = list(dict.fromkeys(n for row in self.errors.values() for n in row))
        trains = [n for n in names if n.startswith("train ")]
        plain = [n for n in names if n not in trains]
        tables = (("mesh", plain), ("in training", trains))
        lines = [self._table(head, some) for head, some in tables if some or head == "mesh"]
        notes = {"computed in float64 here": self.raised, "not compared": self.left}
        lines += [f"{what}: {', '.join(names)}" for what, names in notes.items() if names]
        return "\n".join(lines)

    def _table(self, head: str, names: Sequence[str]) -> str:
        width = max(map(len, [head, *self.errors]))
        lines = [f"{head:<{width}}" + "".join(f"{n.removeprefix('train '):>11}" for n in names)]
        for mesh, row in self.errors.items():
            cells = (f"{row[n]:>11.1e}" if n in row else " " * 11 for n in names)
            lines.append(f"{mesh:<{width}}" + "".join(cells))
        return "\n".join(lines)


def check_model(
    module: nn.Module,
    rules: Rules | Callable[..., Rules],
    meshes: Sequence[MeshOf] | MeshOf,
    batch: Batch,
    *,
    loss: Callable[..., Tensor] | None = None,
    inputs: Mapping[str | int, LayoutLike] | None = None,
    steps: int = 3,
    tolerance: float = 1e-9,
    pad: bool = False,
    stages: CutsIntoStages | None = None,
) -> Proof:
    """Compare a module on every mesh with the same module on one device, in one process.

    ``rules``   as for ``parallelize``, or a recipe: a function of (module, mesh) that returns them.
    ``meshes``  axis sizes, as ``{"x": 2, "y": 2}``, one or several; they are simulated.
    ``batch``   forward's arguments: a mapping by name, a sequence by position, or one tensor.
    ``loss``    a function of forward's output; by default the output's ``loss``, the output if it
                is a scalar, or the mean of y (y + 1) over its tensors.
    ``inputs``  name or position -> layout; by default the recipe's ``labels`` for an argument of
                that name and its ``tokens`` for other arguments of as many dimensions, unsplit
                otherwise.
    ``stages``  as for ``parallelize``: run the module as a pipeline, in one micro-batch.
    ``steps``   of AdamW, after each of which every parameter is compared.
    It compares every tensor of the output, inside mappings, dataclasses, caches and other objects,
    the loss, every gradient, their norm and these steps with torch's own values in evaluation mode.
    If the module trains (``module.training``), it compares the same in training with one simulated
    rank, which draws the same random numbers, such as dropout's masks.
    The module is copied and computed in fp64, also where it casts to fp32 inside; the original is
    not changed.  ``Proof.left`` names the parts of an output that could not be compared.
    Raises: ModelDiffers, an AssertionError, naming the first tensor that differs by more than
    ``tolerance`` relative to its largest value, the operator that made it, and by how much;
    ShardError if the output has no tensor to compare.

    >>> import torch, shardlib as sl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    >>> rules = [("0.weight", "x ."), ("0.bias", "x"), ("2.weight", ". x"), ("2.bias", ".")]
    >>> proof = sl.check_model(model, rules, {"x": 2}, torch.randn(6, 8))
    >>> list(proof.errors), max(proof.errors["x=2"].values()) < 1e-12
    (['x=2'], True)
    """
    several = [meshes] if isinstance(meshes, Mesh | Mapping) else list(meshes)
    model = copy.deepcopy(module).double()
    given = _arguments(lambda _, x: x.double() if _is_float(x) else x, *called_with(batch))
    proof = Proof()
    case = _ProofCase(
        model, rules, given, loss or _loss, dict(inputs or {}), steps, pad, proof, stages
    )
    with torch.random.fork_rng():
        for mesh in several:
            if not isinstance(mesh, Mesh):
                mesh = simulate(**mesh)
            row = proof.errors[mesh_text(mesh)] = {}
            model.eval()
            want = _dense(case)
            case.learns = "norm" in want
            _compare(case, mesh, want, row, tolerance, "")
            if module.training:
                model.train()
                alone = simulate(**dict.fromkeys(mesh.axes, 1))
                _compare(case, mesh, _sharded(case, alone), row, tolerance, "train ")
    return proof


@dataclass
class _ProofCase:
    model: nn.Module
    rules: Any
    batch: Call
    loss: Callable[[Any], Tensor]
    inputs: dict[str | int, LayoutLike]
    steps: int
    pad: bool
    proof: Proof
    stages: CutsIntoStages | None = None
    learns: bool = True
    """Whether the loss has a gradient."""


Quantities = dict[str, Tensor]
"""Name -> value, in the order of computation."""


def _outputs(output: object, left: list[str]) -> Quantities:
    """Map "output", with the path, to each tensor of any object; ``left`` gets the other parts."""
    found: Quantities = {}
    inside: set[int] = set()

    def walk(value: object, path: str) -> None:
        if isinstance(value, Tensor):
            found[f"output {path}".rstrip()] = value
            return
        items = None if id(value) in inside else _items(value)
        if items is None:
            said = f"output {path}".rstrip() + f" ({type(value).__name__})"
            if said not in left:
                left.append(said)
            return
        inside.add(id(value))
        for name, one in items:
            walk(one, f"{path}.{name}".lstrip("."))
        inside.discard(id(value))

    walk(output, "")
    return found


def _compared(output: object, left: list[str]) -> Quantities:
    """List the tensors of an output to compare.  Raises: ShardError if there is none."""
    found = _outputs(output, left)
    if not found:
        raise ShardError(
            "the module returns no tensor that can be compared",
            op="check_model",
            operands={"output": type(output).__name__, "not compared": ", ".join(left)},
            fix="return {'logits': logits}  # a tensor, or tensors in a mapping, list or dataclass",
        )
    return found


def _items(value: object) -> list[tuple[Any, Any]] | None:
    """List the parts of an object; None if its type is opaque."""
    if value is None or isinstance(value, _PLAIN):
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list | Set):
        names = getattr(value, "_fields", range(len(value)))
        return list(zip(names, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if callable(value) or not hasattr(value, "__dict__"):
        return None
    return list(vars(value).items())


_PLAIN = (str, bytes, int, float, complex, torch.dtype, torch.device, torch.layout)


_LOWER = (torch.float32, torch.bfloat16, torch.float16)


class _Doubles(TorchFunctionMode):
    """A mode that turns casts to fp32 or less into casts to fp64; ``raised`` lists those calls."""

    def __init__(self, raised: list[str]) -> None:
        super().__init__()
        self.raised = raised

    def __torch_function__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        asked = [x for x in (*args[1:], *kwargs.values()) if _fp64_for(x) is not x]
        if name in ("float", "half", "bfloat16"):
            asked, func = [getattr(torch, name)], Tensor.double
            args = args[:1]
        if asked and name != "view":
            # view reads the same bits as another dtype
            text = f"{name} to {str(asked[0]).removeprefix('torch.')}"
            if text not in self.raised:
                self.raised.append(text)
            args = tuple(_fp64_for(x) for x in args)
            kwargs = {k: _fp64_for(x) for k, x in kwargs.items()}
        return func(*args, **kwargs)


def _fp64_for(x: object) -> object:
    return torch.float64 if isinstance(x, torch.dtype) and x in _LOWER else x


@contextmanager
def _doubles(case: "_ProofCase") -> Iterator[None]:
    """Compute in fp64 inside the ``with``, including constants without a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubles(case.proof.raised):
            yield
    finally:
        torch.set_default_dtype(before)


def _loss(output: object) -> Tensor:
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    leaves = [x for x in _outputs(output, []).values() if x.is_floating_point()]
    if not leaves:
        raise ShardError(
            "the module returns no floating point tensor, so it has no loss",
            op="check_model",
            fix="sl.check_model(module, rules, {'x': 2}, batch, loss=f)",
        )
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return leaves[0]
    return reduce(operator.add, [(x * (x + 1)).mean() for x in leaves])


class _Forward(NamedTuple):
    """The outputs and the loss of a forward, and its gradients; None where the loss has none."""

    outputs: Named
    loss: Tensor
    gradients: Named | None


def _steps(
    case: _ProofCase,
    params: Named,
    forward: Callable[[Named], _Forward],
    norm: Callable[[Named], Tensor],
    update: Callable[[Named, Named], Named],
) -> Quantities:
    """Compute every quantity of a run: of the first step, and the parameters after each."""
    found: Quantities = {}
    for step in range(max(1, case.steps)):
        torch.manual_seed(step)
        with _doubles(case):
            outputs, loss, gradients = forward(params)
        if step == 0:
            found |= {n: _value(x) for n, x in outputs.items()}
            found["loss"] = _value(loss)
        if gradients is None:
            return found
        if step == 0:
            found |= {f"gradient of {n}": _value(g) for n, g in gradients.items()}
            found["norm"] = _value(norm(gradients))
        if case.steps:
            params = update(gradients, params)
            found |= {f"{n} after step {step + 1}": _value(p) for n, p in params.items()}
    return found


def _value(x: Tensor) -> Tensor:
    return whole(x).clone()


def _dense(case: _ProofCase) -> Quantities:
    """Run the module and torch's own AdamW on one device."""
    model = copy.deepcopy(case.model)
    args, kwargs = case.batch
    named = dict(model.named_parameters())
    groups = list(named.values()) or [torch.zeros(1, requires_grad=True, device="cpu")]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, weight_decay=0.01)

    def forward(params: Named) -> _Forward:
        output = model(*args, **kwargs)
        loss, outputs = case.loss(output), _compared(output, case.proof.left)
        if not loss.requires_grad:
            return _Forward(outputs, loss, None)
        gradients = {n: torch.zeros_like(p) for n, p in params.items() if p.requires_grad}
        for n, g in gradients.items():
            params[n].grad = g
        loss.backward()  # adds to these
        return _Forward(outputs, loss, gradients)

    def norm(gradients: Named) -> Tensor:
        squares = [g.square().sum() for g in gradients.values()]
        return sum(squares, torch.zeros((), dtype=torch.float64, device="cpu")).sqrt()

    def update(gradients: Named, params: Named) -> Named:
        optimizer.step()
        return params

    return _steps(case, named, forward, norm, update)


def _sharded(case: _ProofCase, mesh: Mesh, places: "Places | None" = None) -> Quantities:
    """Run the same on a mesh; ``places`` watches every operator of a single forward."""
    with use_mesh(mesh):
        rules: Any = case.rules(case.model, mesh) if callable(case.rules) else case.rules
        apply, params = parallelize(case.model, rules, pad=case.pad, stages=case.stages)
        batch = _placed(case, rules, mesh)
        outputs: Quantities = {}

        def run(params: Named, args: Args, kwargs: Kwargs) -> Tensor:
            output = apply(params, *args, **kwargs)
            outputs.update(_outputs(output, []))
            return case.loss(output)

        if places is not None:
            torch.manual_seed(0)
            # outside a step, stages run forward alone
            learns = torch.set_grad_enabled(case.stages is None)
            with _doubles(case), within(watcher=places), learns:
                run(params, *batch)
            return {}
        tx = adamw(_RATE, weight_decay=0.01)
        state = tx.init(params)

        def forward(params: Named) -> _Forward:
            if not case.learns:
                loss = run(params, *batch)
                return _Forward(outputs, loss, None)
            loss, grads = value_and_grad(run)(params, *batch)
            learned = {n: g for n, g in grads.items() if params[n].requires_grad}
            return _Forward(outputs, loss, learned)

        def update(gradients: Named, params: Named) -> Named:
            nonlocal state
            updates, state = tx.update(gradients, state, params)
            return apply_updates(params, updates)

        return _steps(case, params, forward, global_norm, update)


def _placed(case: _ProofCase, rules: Any, mesh: Mesh) -> Call:
    tokens = getattr(rules, "tokens", None) or "..."
    labels = getattr(rules, "labels", None) or "..."

    def place(name: str | int, x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        where = labels if name == "labels" else tokens
        if len(Layout.parse(str(where)).dims) != x.ndim:
            where = "..."
        return shard(x, case.inputs.get(name) or where, mesh)

    return _arguments(place, *case.batch)


def _arguments(f: Callable[[str | int, object], object], args: Args, kwargs: Kwargs) -> Call:
    """Apply a function of name, or position, and value to the arguments of a call."""
    return tuple(f(i, x) for i, x in enumerate(args)), {k: f(k, x) for k, x in kwargs.items()}


def _compare(
    case: _ProofCase,
    mesh: Mesh,
    want: Quantities,
    row: dict[str, float],
    tolerance: float,
    mode: str,
) -> None:
    got = _sharded(case, mesh)
    if parted := list(want.keys() ^ got.keys()):
        raise ModelDiffers(
            f"{mode}{parted[0]} is on {'one device' if parted[0] in want else 'the mesh'} alone",
            op="check_model",
            operands={"on one device": _listed(want), "on the mesh": _listed(got)},
            mesh=mesh,
        )
    for name, right in want.items():
        mine = got[name]
        off = float("inf")
        if mine.dtype == right.dtype:
            off = difference(mine, right)
        kind = mode + name.split(" ")[0 if name.split(" ")[0] in _KINDS else -2]
        row[kind] = max(row.get(kind, 0.0), off)
        if not off <= tolerance:
            raise _differs(case, mesh, mode, name, mine, right, off)


_KINDS = ("output", "loss", "gradient", "norm")


def _differs(
    case: _ProofCase, mesh: Mesh, mode: str, name: str, mine: Tensor, right: Tensor, off: float
) -> ModelDiffers:
    rows: dict[str, object] = {"on one device": _shown(right), "on the mesh": _shown(mine)}
    for gradients in (False, True):
        places = Places(gradients)
        try:
            _sharded(case, mesh, places)
        except ShardError as e:
            rows["looking for it"] = e.message
            break
        if places.found:
            break
    rows["made by"] = places.found or "no single operator: each equals torch's on the same operands"
    return ModelDiffers(
        f"{mode}{name} differs by {off:.1e} relative to its largest value",
        op="check_model",
        operands=rows,
        mesh=mesh,
    )


def _listed(found: Quantities) -> str:
    return ", ".join(n for n in found if n.partition(" ")[0] == "output")


def _shown(x: Tensor) -> str:
    flat = x.reshape(-1)[:4].tolist()
    more = ", ..." if x.numel() > 4 else ""
    values = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in flat)
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} [{values}{more}]"


# ---------------------------------------------------------------- the first wrong operator


class Places:
    """A watcher of every function called on sharded tensors; it records the first wrong one.

    ``found``  the operator whose value, or gradient, differs from torch's; "" if there is none.
    """

    def __init__(self, gradients: bool) -> None:
        self.gradients, self.found = gradients, ""
        self.inside = False

    def chose(self, match: object, product: bool = False) -> None:
        """Ignore the algorithm: only the value is checked."""

    def __call__(
        self, implementation: Callable[..., object], func: Func, args: Args, kwargs: Kwargs
    ) -> object:
        name = getattr(func, "__name__", str(func))
        if self.inside or self.found or draws(func, args, kwargs):
            return implementation(func, args, kwargs)
        line = user_line()
        given: Any = (args, kwargs)
        self.inside = True
        try:
            before = _each(_value, given)
            kept = _each(lambda x: x.detach().clone(), given) if self.gradients else None
            out = implementation(func, args, kwargs)
            off = self._gradient(func, kept, before) if kept else _error_of(func, before, out)
        finally:
            self.inside = False
        # in fp64, rounding of one operator is far below this
        if off > 1e-9:
            types = [typeof(x) for x in optree.tree_leaves(given) if _ours(x)]
            self.found = f"{name}({', '.join(types)}), at {line}: off by {off:.1e}"
            if self.gradients:
                self.found = f"the gradient of {self.found}"
        return out

    def _gradient(self, func: Func, kept: Any, whole: Any) -> float:
        """Return the largest relative error of the operator's gradients, for one cotangent."""
        leaves, tree = optree.tree_flatten(kept)
        dense = optree.tree_leaves(whole)
        at = [i for i, x in enumerate(leaves) if _ours(x) and x.is_floating_point()]
        if not at:
            return 0.0

        def gradients(given: list[Any]) -> Any:
            def loss(over: Sequence[Any]) -> Tensor:
                filled = dict(enumerate(given)) | dict(zip(at, over, strict=True))
                args, kwargs = optree.tree_unflatten(tree, filled.values())
                outs = [x for x in optree.tree_leaves(func(*args, **kwargs)) if _is_float(x)]
                return sum((_weighed(x) for x in outs), start=torch.zeros((), device="cpu"))  # type: ignore[return-value]

            return grad(loss)([given[i] for i in at])

        try:
            with torch.enable_grad(), within(watcher=None):
                mine, right = gradients(leaves), gradients(dense)
        except (ShardError, RuntimeError, TypeError):
            # it is not differentiable, or cannot be run alone
            return 0.0
        return max(difference(m, r) for m, r in zip(mine, right, strict=True))


def _weighed(x: Tensor) -> Tensor:
    """Compute a scalar with a different weight for each element."""
    places = torch.arange(float(math.prod(x.shape)), device=x.device)
    weights = torch.cos(places).reshape(x.shape).to(x.dtype)
    if isinstance(x, ShardedTensor):
        weights = shard(weights, str(x.sharding.bare), x.mesh)
    return (x * weights).sum()


def _error_of(func: Func, whole: Any, out: Any) -> float:
    args, kwargs = whole
    try:
        with torch.no_grad():
            right = func(*args, **kwargs)
    except (ShardError, RuntimeError, TypeError, ValueError, IndexError):
        return 0.0
    pairs = list(zip(optree.tree_leaves(out), optree.tree_leaves(right), strict=False))
    return max(
        [difference(m, r) for m, r in pairs if isinstance(m, ShardedTensor) and _is_float(r)],
        default=0.0,
    )


def _ours(x: object) -> TypeGuard[ShardedTensor]:
    return isinstance(x, ShardedTensor)


def _is_float(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point()


def _each(f: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of a tree, outside the graph."""
    with torch.no_grad():
        return optree.tree_map(lambda x: f(x) if isinstance(x, Tensor) else x, tree)
