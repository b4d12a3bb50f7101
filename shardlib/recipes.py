"""Lists of rules for Transformers, to use as they are or to edit.

A recipe looks at a module's Linear, Embedding and norm layers, decides what each weight's role
is, and writes one rule per kind of parameter, with layer numbers as ``*``.  ``torch.nn.Linear``
stores its weight (out, in).

Roles.  *Expanding* layers feed something wide (fused qkv, the MLP's first layer); *contracting*
layers come back from it: their input is wider than their output, or their name says so
(``c_proj``, ``o_proj``, ``out_proj``, ``down_proj``, ``dense``, ``wo``, ...).
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardlib.mesh import as_mesh

__all__ = ["batch_layout", "megatron1d", "optimus2d"]

_BACK = re.compile(r"(^|\.)(c_proj|o_proj|out_proj|down_proj|dense|proj|wo|w2|fc2|linear2)$")
_FUSED = re.compile(r"(^|\.)(c_attn|qkv|qkv_proj|query_key_value|Wqkv|in_proj)$")

RuleList = list[tuple[str, str]]


def megatron1d(model: nn.Module, mesh: Any = None, *, axis: str = "x") -> RuleList:
    """Columns then rows: activations whole over ``axis``, heads and MLP width split.

    Source: arXiv 1909.08053, section 3.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(x=2):
    ...     megatron1d(mlp)
    [('0.weight', 'x .'), ('0.bias', 'x'), ('2.weight', '. x'), ('2.bias', '.')]
    """
    as_mesh(mesh).axis_size(axis)
    return _rules(
        model,
        {
            "expand": (f"{axis} .", axis),
            "fused": (f"(3 {axis}) .", f"(3 {axis})"),
            "contract": (f". {axis}", "."),
            "tokens": (f"{axis} .", ""),
            "positions": (". .", ""),
            "norm": (".", "."),
        },
    )


def optimus2d(model: nn.Module, mesh: Any = None, *, rows: str = "x", cols: str = "y") -> RuleList:
    """Every matrix in 2D blocks: activations ``(data rows) . cols``; the wide side never moves.

    An expanding weight is stored ``cols rows`` so that its output stays (Y-stationary), a
    contracting one ``rows cols`` so that its input stays (X-stationary).

    Source: arXiv 2104.05343, which keeps Y stationary always; the choice follows the sizes here.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(x=2, y=2):
    ...     optimus2d(mlp)
    [('0.weight', 'y x'), ('0.bias', 'y'), ('2.weight', 'x y'), ('2.bias', 'y')]
    """
    m = as_mesh(mesh)
    m.axis_size(rows), m.axis_size(cols)
    return _rules(
        model,
        {
            "expand": (f"{cols} {rows}", cols),
            "fused": (f"(3 {cols}) {rows}", f"(3 {cols})"),
            "contract": (f"{rows} {cols}", cols),
            "tokens": (f"{rows} {cols}", ""),
            "positions": (f". {cols}", ""),
            "norm": (cols, cols),
        },
        widest=True,
    )


def batch_layout(mesh: Any = None, *, data: str = "data", rows: str | None = None) -> str:
    """The layout of a batch of token ids [B, S]: over ``data``, and over ``rows`` for optimus2d.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2, x=2, y=2):
    ...     batch_layout(), batch_layout(rows="x")
    ('data .', '(data x) .')
    """
    axes = [a for a in (data, rows) if a and a in as_mesh(mesh).names]
    return f"{axes[0]} ." if len(axes) == 1 else f"({' '.join(axes)}) ." if axes else ". ."


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


def _rules(model: nn.Module, layouts: Mapping[str, tuple[str, str]], widest: bool = False) -> RuleList:
    embeddings = [n for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    by_name = dict(model.named_modules())
    tokens = {n for n in embeddings if id(by_name[n].weight) in tied} or set(embeddings[:1])
    rules: dict[str, str] = {}
    for full, value in model.named_parameters():
        owner, _, _ = full.rpartition(".")
        weight, vector = layouts[_role(owner, by_name[owner], tokens, widest)]
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", full)
        rules.setdefault(pattern, weight if value.ndim > 1 else vector if value.ndim else "")
    return list(rules.items())
