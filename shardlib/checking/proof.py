"""The dense proof: a module on every mesh against the same module on one device.

Everything runs in this process, in fp64, where rounding leaves no doubt: outputs, the loss, every
gradient, their norm, the parameters after some optimizer steps, and, where the module draws random
numbers in training, all of that with them.  Where something differs, each operator of the forward
is run once more beside torch's own on whole operands, then its gradient, to say where it was made.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, nn

from shardlib.checking.places import Found, Places
from shardlib.errors import ModelDiffers, ShardError, mesh_text
from shardlib.grad import value_and_grad
from shardlib.layouts import Layout, LayoutLike
from shardlib.mesh import Mesh, as_mesh, simulate, use_mesh, within
from shardlib.modules.parallelize import Rules, parallelize
from shardlib.optim import adamw, apply_updates, global_norm
from shardlib.placing import shard, unshard
from shardlib.tensor import ShardedTensor

__all__ = ["Proof", "check_model"]

Batch = Tensor | Sequence[object] | Mapping[str, object]
MeshOf = Mesh | Mapping[str, int]

_RATE = 1e-2


@dataclass
class Proof:
    """A comparison: mesh -> quantity -> largest difference, relative to its largest value."""

    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table of what was compared in evaluation, and below it one of training."""
        names = list(dict.fromkeys(n for row in self.errors.values() for n in row))
        trains = [n for n in names if n.startswith("train ")]
        plain = [n for n in names if n not in trains]
        tables = (("mesh", plain), ("in training", trains))
        return "\n".join(self._table(head, some) for head, some in tables if some or head == "mesh")

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
) -> Proof:
    """Compare a module on every mesh with the same module on one device, in one process.

    ``rules``   as for ``parallelize``, or a recipe: a function of (module, mesh) that gives them.
    ``meshes``  axis sizes, as ``{"x": 2, "y": 2}``, one or several; they are simulated.
    ``batch``   forward's arguments: a mapping by name, a sequence by position, or one tensor.
    ``loss``    of forward's output; by default its ``loss``, itself where it is a scalar, or the
                mean of y (y + 1) over what it holds.
    ``inputs``  name or position -> layout; a recipe's ``tokens`` for arguments of as many
                dimensions, whole otherwise.
    ``steps``   of AdamW, after each of which every parameter is compared.
    Compared are outputs, loss, every gradient, their norm and these steps with torch's own values
    in evaluation mode; where the module trains (``module.training``), the same once more with what
    it draws there, such as dropout's masks, with one simulated rank.
    The module is copied and cast to fp64; it is left as it was.
    Raises: ModelDiffers, an AssertionError, naming the first tensor that differs by more than
    ``tolerance`` relative to its largest value, where it was made, and by how much.

    >>> import torch, shardlib as sl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    >>> rules = [("0.weight", "x ."), ("0.bias", "x"), ("2.weight", ". x"), ("2.bias", ".")]
    >>> proof = sl.check_model(model, rules, {"x": 2}, torch.randn(6, 8))
    >>> list(proof.errors), max(proof.errors["x=2"].values()) < 1e-12
    (['x=2'], True)
    """
    several = [meshes] if isinstance(meshes, Mesh | Mapping) else list(meshes)
    model = copy.deepcopy(module).double()
    given = _doubled(batch)
    case = _Case(model, rules, given, loss or _loss, dict(inputs or {}), steps, pad)
    proof = Proof()
    with torch.random.fork_rng():
        for mesh in several:
            mesh = simulate(**mesh) if not isinstance(mesh, Mesh) else as_mesh(mesh)
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
class _Case:
    model: nn.Module
    rules: Any
    batch: tuple[tuple[Any, ...], dict[str, Any]]
    loss: Callable[[Any], Tensor]
    inputs: dict[str | int, LayoutLike]
    steps: int
    pad: bool
    learns: bool = True
    """Whether the loss has a gradient."""


Quantities = dict[str, Tensor]
"""Name -> value, in the order in which they are made."""


def _doubled(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    if isinstance(batch, Tensor):
        return (cast(batch),), {}
    if isinstance(batch, Mapping):
        return (), {k: cast(v) for k, v in batch.items()}
    return tuple(cast(x) for x in batch), {}


def _floats(output: Any) -> list[Tensor]:
    """List the tensors that a module returns and that have gradients; of an object its fields."""
    if not isinstance(output, Tensor | tuple | list | dict):
        output = dict(output) if isinstance(output, Mapping) else vars(output)
    tree: Any = output
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]


def _loss(output: Any) -> Tensor:
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    leaves = _floats(output)
    if not leaves:
        raise ShardError(
            "the module returns no floating point tensor, so it has no loss",
            op="check_model",
            fix="sl.check_model(module, rules, {'x': 2}, batch, loss=f)",
        )
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return leaves[0]
    total = (leaves[0] * (leaves[0] + 1)).mean()
    for x in leaves[1:]:
        total = total + (x * (x + 1)).mean()
    return total


def _dense(case: _Case) -> Quantities:
    """Run torch's own, on one device."""
    model = copy.deepcopy(case.model)
    args, kwargs = case.batch
    named = dict(model.named_parameters())
    found: Quantities = {}
    groups = list(named.values()) or [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, weight_decay=0.01)
    for step in range(max(1, case.steps)):
        optimizer.zero_grad()
        torch.manual_seed(step)
        output = model(*args, **kwargs)
        loss = case.loss(output)
        if step == 0:
            found |= {f"output {i}": x.detach().clone() for i, x in enumerate(_floats(output))}
            found["loss"] = loss.detach()
        if not loss.requires_grad:
            return found
        loss.backward()
        if step == 0:
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
            found |= {f"gradient of {n}": g.clone() for n, g in grads.items()}
            squares = [g.square().sum() for g in grads.values()]
            found["norm"] = (
                torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum().sqrt()
            )
        for p in named.values():
            p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
        if case.steps:
            optimizer.step()
        found |= {
            f"{n} after step {step + 1}": p.detach().clone() for n, p in named.items() if case.steps
        }
    return found


def _sharded(case: _Case, mesh: Mesh, watcher: Any = None) -> Quantities:
    """Run the same on a mesh; ``watcher`` hears of every operator of the first forward."""
    found: Quantities = {}
    with use_mesh(mesh):
        rules: Any = case.rules(case.model, mesh) if callable(case.rules) else case.rules
        apply, params = parallelize(case.model, rules, pad=case.pad)
        args, kwargs = _placed(case, rules, mesh)
        outputs: list[Tensor] = []

        def run(params: Any) -> Tensor:
            output = apply(params, *args, **kwargs)
            outputs[:] = _floats(output)
            return case.loss(output)

        tx = adamw(_RATE, weight_decay=0.01)
        state = tx.init(params)
        for step in range(max(1, case.steps)):
            torch.manual_seed(step)
            if watcher is not None:
                with within(watcher=watcher):
                    run(params)
                return found
            loss, grads = value_and_grad(run)(params) if case.learns else (run(params), {})
            if step == 0:
                found |= {f"output {i}": _whole(x) for i, x in enumerate(outputs)}
                found["loss"] = _whole(loss)
            if not case.learns:
                return found
            if step == 0:
                found |= {f"gradient of {n}": _whole(g) for n, g in grads.items() if g is not None}
                found["norm"] = _whole(global_norm(grads))
            if case.steps:
                updates, state = tx.update(grads, state, params)
                params = apply_updates(params, updates)
                found |= {f"{n} after step {step + 1}": _whole(p) for n, p in params.items()}
    return found


def _whole(x: Tensor) -> Tensor:
    return unshard(x).detach() if isinstance(x, ShardedTensor) else x.detach()


def _placed(case: _Case, rules: Any, mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tokens = getattr(rules, "tokens", None)

    def place(name: str | int, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        layout = case.inputs.get(name)
        if layout is None and tokens is not None:
            asked = Layout.parse(str(tokens))
            layout = tokens if len(asked.dims) == x.ndim else None
        return shard(x, "..." if layout is None else layout, mesh)

    args, kwargs = case.batch
    return (
        tuple(place(i, x) for i, x in enumerate(args)),
        {k: place(k, x) for k, x in kwargs.items()},
    )


def _compare(
    case: _Case, mesh: Mesh, want: Quantities, row: dict[str, float], tolerance: float, mode: str
) -> None:
    got = _sharded(case, mesh)
    for name, right in want.items():
        if name not in got:
            continue  # frozen: it has no gradient
        mine = got[name]
        off = _off(mine, right)
        kind = mode + name.split(" ")[0 if name.split(" ")[0] in _KINDS else -2]
        row[kind] = max(row.get(kind, 0.0), off)
        if not off <= tolerance:
            raise _differs(case, mesh, mode, name, mine, right, off)


_KINDS = ("output", "loss", "gradient", "norm")


def _off(mine: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    if mine.shape != right.shape or mine.dtype != right.dtype:
        return float("inf")
    if not right.numel():
        return 0.0
    same = (mine == right) | (mine.isnan() & right.isnan())
    apart = torch.where(same, torch.zeros_like(mine), mine - right).abs().max()
    scale = right.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1e-12)
    off = float(apart / scale)
    return off if off == off else float("inf")


def _differs(
    case: _Case, mesh: Mesh, mode: str, name: str, mine: Tensor, right: Tensor, off: float
) -> ModelDiffers:
    rows: dict[str, object] = {"on one device": _shown(right), "on the mesh": _shown(mine)}
    found: Found | None = None
    for gradients in (False, True):
        places = Places(gradients)
        try:
            _sharded(case, mesh, places)
        except ShardError as e:
            rows["looking for it"] = e.message
            break
        found = places.found
        if found is not None:
            break
    if found is None:
        rows["made by"] = "no single operator: each equals torch's on the same operands"
    else:
        what = f"the gradient of {found.call}" if found.gradient else found.call
        rows["made by"] = f"{what}, at {found.line}: off by {found.off:.1e}"
    return ModelDiffers(
        f"{mode}{name} differs by {off:.1e} relative to its largest value",
        op="check_model",
        operands=rows,
        mesh=mesh,
    )


def _shown(x: Tensor) -> str:
    flat = x.reshape(-1)[:4].tolist()
    more = ", ..." if x.numel() > 4 else ""
    values = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in flat)
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} [{values}{more}]"
