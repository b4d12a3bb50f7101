"""Whether the fix line of an error is Python, and uses only what exists."""

import ast
import builtins
import math
from typing import Any

import torch
import torch.nn.functional as F

import shardlib as sl

MODULES: dict[str, Any] = {"sl": sl, "torch": torch, "F": F, "math": math}


def names(fix: str) -> set[str]:
    """The names a fix line reads that are neither modules, builtins nor bound in it.  Raises: SyntaxError."""
    tree = ast.parse(fix)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in found if isinstance(n.ctx, ast.Store)}
    bound |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in (*n.args, *n.kwonlyargs)}
    return {n.id for n in found if isinstance(n.ctx, ast.Load)} - bound - MODULES.keys() - set(dir(builtins))


def fault(fix: str) -> str:
    """What is wrong with a fix line on its own: not Python, or a function that does not exist."""
    if not fix or fix.startswith(("torchrun ", "pip install ")):
        return ""
    try:
        names(fix)
    except SyntaxError as e:
        return f"not Python: {e.msg}"
    for node in ast.walk(ast.parse(fix)):
        if isinstance(node, ast.Attribute):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain, inner = [inner.attr, *chain], inner.value
            if isinstance(inner, ast.Name) and inner.id in MODULES:
                where = MODULES[inner.id]
                for part in chain:
                    if not hasattr(where, part):
                        return f"{inner.id}.{'.'.join(chain)} does not exist"
                    where = getattr(where, part)
    return ""
