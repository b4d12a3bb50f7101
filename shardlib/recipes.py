"""Lists of rules for Transformers, to use as they are or to edit.

A recipe looks at a module's Linear, Embedding and norm layers, decides what each weight's role
is, and writes one rule per kind of parameter, with layer numbers as ``*``.  ``torch.nn.Linear``
stores its weight (out, in).

Roles.  *Expanding* layers feed something wide (fused qkv, the MLP's first layer); *contracting*
layers come back from it: their input is wider than their output, or their name says so
(``c_proj``, ``o_proj``, ``out_proj``, ``down_proj``, ``dense``, ``wo``, ...).

Every recipe takes batches over a ``data`` axis as well, where the mesh has one.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardlib.mesh import as_mesh

__all__ = ["Recipe", "cube3d", "megatron1d", "optimus2d", "roles", "tesseract"]

_BACK = re.compile(r"(^|\.)(c_proj|o_proj|out_proj|down_proj|dense|proj|wo|w2|fc2|linear2)$")
_FUSED = re.compile(r"(^|\.)(c_attn|qkv|qkv_proj|query_key_value|Wqkv|in_proj)$")


class Recipe(list[tuple[str, ...]]):
    """A list of rules, and where its token ids and its labels [B, S] lie."""

    def __init__(self, rules: Iterable[tuple[str, ...]], tokens: str, labels: str) -> None:
        super().__init__(rules)
        self.tokens, self.labels = tokens, labels


def megatron1d(
    model: nn.Module, mesh: Any = None, *, axis: str = "x", data: str = "data", sequence: bool = False
) -> Recipe:
    """Columns then rows: heads and MLP width split over ``axis``.

    The residual stream is whole over ``axis``, or with ``sequence`` split along the sequence: the
    sums are then scattered and gathered, and norms and dropout hold 1/p of the positions.

    Source: arXiv 1909.08053, section 3; arXiv 2205.05198 for the sequence.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(x=2):
    ...     megatron1d(mlp)
    ...     megatron1d(mlp, sequence=True)[2]
    [('0.weight', 'x .'), ('0.bias', 'x'), ('2.weight', '. x'), ('2.bias', '.')]
    ('2.weight', '. x', '. x ...')
    """
    batch = _batch(mesh, data, axis)
    contract = (f". {axis}", ".", f"{batch} {axis} ...") if sequence else (f". {axis}", ".")
    where = f"{batch} {axis}" if sequence else f"{batch} ."
    layouts = {
        "expand": (f"{axis} .", axis),
        "fused": (f"(3 {axis}) .", f"(3 {axis})"),
        "contract": contract,
        "tokens": (f"{axis} .", ""),
        "positions": (". .", ""),
        "norm": (".", "."),
    }
    return Recipe(_rules(model, layouts), where, f"{batch} .")


def optimus2d(model: nn.Module, mesh: Any = None, *, rows: str = "x", cols: str = "y", data: str = "data") -> Recipe:
    """Every matrix in 2D blocks: activations ``(data rows) . cols``; the wide side never moves.

    An expanding weight is stored ``cols rows`` so that its output stays (Y-stationary), a
    contracting one ``rows cols`` so that its input stays (X-stationary).

    Source: arXiv 2104.05343, which keeps Y stationary always; the choice follows the sizes here.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(data=2, x=2, y=2):
    ...     rules = optimus2d(mlp)
    >>> rules, rules.tokens
    ([('0.weight', 'y x'), ('0.bias', 'y'), ('2.weight', 'x y'), ('2.bias', 'y')], '(data x) .')
    """
    where = f"{_batch(mesh, data, rows, cols, over=(rows,))} ."
    return Recipe(_rules(model, _plane(rows, cols), widest=True), where, where)


def tesseract(
    model: nn.Module, mesh: Any = None, *, rows: str = "x", cols: str = "y", depth: str = "d", data: str = "data"
) -> Recipe:
    """2.5D: a plane of 2D blocks per depth; activations ``(depth rows) . cols``, weights copied over depth.

    The sum of each weight's gradient over depth is the product's own.

    Source: arXiv 2105.14500, section 3.

    >>> import shardlib as sl
    >>> with sl.simulate(d=2, x=2, y=2):
    ...     rules = tesseract(nn.Sequential(nn.Linear(4, 16)))
    >>> rules, rules.tokens
    ([('0.weight', 'y x'), ('0.bias', 'y')], '(d x) .')
    """
    where = f"{_batch(mesh, data, depth, rows, cols, over=(depth, rows))} ."
    return Recipe(_rules(model, _plane(rows, cols), widest=True), where, where)


def cube3d(
    model: nn.Module, mesh: Any = None, *, x: str = "x", y: str = "y", z: str = "z", data: str = "data"
) -> Recipe:
    """3D: activations ``(x y) . z``, weights ``(z x) y``, wide activations ``(x z) . y``.

    The axes may have any sizes: with one of size 1 this is 2D, with two 1D.  Tokens are split
    over x and y, labels over x and z, where the logits come out.

    Source: arXiv 2105.14450, section 3; general grids as in arXiv 2305.13525.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(x=2, y=2, z=2):
    ...     rules = cube3d(mlp)
    >>> rules, rules.tokens, rules.labels
    ([('0.weight', 'y (z x)'), ('0.bias', 'y'), ('2.weight', 'z (y x)'), ('2.bias', 'z')], '(x y) .', '(x z) .')
    """
    layouts = {
        "expand": (f"{y} ({z} {x})", y),
        "fused": (f"(3 {y}) ({z} {x})", f"(3 {y})"),
        "contract": (f"{z} ({y} {x})", z),
        "tokens": (f"{y} ({z} {x})", ""),
        "positions": (f". {z}", ""),
        "norm": (z, z),
    }
    tokens, labels = (f"{_batch(mesh, data, x, y, z, over=over)} ." for over in ((x, y), (x, z)))
    return Recipe(_rules(model, layouts), tokens, labels)


def _plane(rows: str, cols: str) -> dict[str, tuple[str, ...]]:
    return {
        "expand": (f"{cols} {rows}", cols),
        "fused": (f"(3 {cols}) {rows}", f"(3 {cols})"),
        "contract": (f"{rows} {cols}", cols),
        "tokens": (f"{rows} {cols}", ""),
        "positions": (f". {cols}", ""),
        "norm": (cols, cols),
    }


def _batch(mesh: Any, data: str, *axes: str, over: tuple[str, ...] = ()) -> str:
    """The token of a batch dimension over ``data``, if the mesh has it, and ``over``."""
    m = as_mesh(mesh)
    for axis in axes:
        m.axis_size(axis)
    split = [a for a in (data, *over) if a in m.names]
    return f"({' '.join(split)})" if len(split) > 1 else split[0] if split else "."


def _role(name: str, module: nn.Module, tokens: set[str], widest: bool) -> str:
    if isinstance(module, nn.Embedding):
        return "tokens" if name in tokens else "positions"
    if isinstance(module, nn.Linear):
        if _FUSED.search(name) and module.out_features == 3 * module.in_features:
            return "fused"
        if module.in_features > module.out_features or (_BACK.search(name) and not widest):
            return "contract"
        return "expand"
    return "norm"


def roles(model: nn.Module, widest: bool = False) -> dict[str, str]:
    """Module name -> expand, fused, contract, tokens, positions or norm; for modules that hold parameters.

    ``widest``  a square layer expands, whatever its name.

    >>> roles(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4), nn.LayerNorm(4)))
    {'0': 'expand', '2': 'contract', '3': 'norm'}
    """
    embeddings = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    tokens = {n for n, m in embeddings.items() if id(m.weight) in tied} or set(list(embeddings)[:1])
    holding = [(n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    return {n: _role(n, m, tokens, widest) for n, m in holding}


def _rules(model: nn.Module, layouts: Mapping[str, tuple[str, ...]], widest: bool = False) -> list[tuple[str, ...]]:
    found = roles(model, widest)
    rules: dict[str, tuple[str, ...]] = {}
    for full, value in model.named_parameters():
        owner, _, _ = full.rpartition(".")
        weight, vector, *out = layouts[found[owner]]
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", full)
        rules.setdefault(pattern, (weight, *out) if value.ndim > 1 else (vector if value.ndim else "",))
    return [(pattern, *layouts) for pattern, layouts in rules.items()]
