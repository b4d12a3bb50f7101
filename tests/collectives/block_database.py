"""Torch's operator database on simulated local blocks: each call against one call per rank.

python -m tests.collectives.block_database              every sample, about a minute
python -m tests.collectives.block_database --samples 1
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import shardlib as sl
from shardlib.collectives import Stacked, unwrap, wrap

__all__ = ["calls", "main", "wrong"]

RANKS = 2
Call = tuple[str, Callable[..., Any], Any]
"""Name of an operator, a form of it, and its operands as a tree."""

# what draws or is empty has no one answer, a value of each rank is refused; a stack is dense
LEFT_OUT = """item bernoulli multinomial normal rand randn randint rand_like randn_like randint_like empty
    empty_like empty_strided empty_permuted new_empty new_empty_strided geometric exponential cauchy
    log_normal uniform svd_lowrank pca_lowrank to_sparse nn.functional.dropout
    nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout
    nn.functional.feature_alpha_dropout nn.functional.rrelu nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward""".split()


def calls(samples: int) -> Iterator[Call]:
    for op in op_db:
        dtype = torch.float64 if torch.float64 in op.dtypes else torch.float32
        if op.name in LEFT_OUT or dtype not in op.dtypes:
            continue
        forms = {op.op, op.method_variant, op.inplace_variant} - {None}
        for sample, _ in zip(op.sample_inputs("cpu", dtype), range(samples), strict=False):
            given = (sample.input, *sample.args), sample.kwargs
            if all(t.layout is torch.strided for t in tensors(given)):
                yield from ((op.formatted_name, form, given) for form in forms)


def tensors(tree: Any) -> list[Tensor]:
    return [t for t in optree.tree_leaves(tree) if isinstance(t, Tensor)]


def on_rank(t: Any, rank: int) -> Any:
    """Return an operand of a rank: other values of the same kind, elsewhere in the tensor."""
    if not isinstance(t, Tensor):
        return t
    other = rank and (t.is_floating_point() or t.is_complex())
    return (t.detach() * 0.75).roll(1) if other else t.detach().clone()


def wrong(call: Call, mesh: sl.Mesh) -> str:
    """Compare a call on simulated blocks with one call per rank.

    Returns "": equal, or one that torch refuses on a rank.
    """
    _, form, given = call
    ranks = [optree.tree_map(lambda t, k=k: on_rank(t, k), given) for k in range(RANKS)]
    blocks = optree.tree_map(
        lambda *of: wrap(torch.stack(of), mesh) if isinstance(of[0], Tensor) else of[0], *ranks
    )
    try:
        want = [form(*args, **kwargs) for args, kwargs in ranks]
    except Exception:  # some forms do not take some samples
        return ""
    shapes = [[x.shape for x in tensors(w)] for w in want]
    resized = ranks[0][0][0] is want[0] and blocks[0][0].shape != want[0].shape
    try:
        got = form(*blocks[0], **blocks[1])
        for mine, *theirs in zip(tensors(got), *map(tensors, want), strict=True):
            whole = unwrap(mine) if type(mine) is Stacked else torch.stack([mine] * RANKS)
            torch.testing.assert_close(
                whole, torch.stack(theirs), rtol=1e-9, atol=1e-9, equal_nan=True
            )
    except sl.errors.Unsupported as e:
        by_memory = "memory of all ranks" in str(e)
        return "" if by_memory or shapes[0] != shapes[1] else str(e)
    except Exception as e:  # any other end is a fault
        return "" if resized else f"{type(e).__name__}: {e}"
    return ""


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--samples", type=int, default=8, help="of each operator")
    given = p.parse_args(argv)
    count, faults = 0, 0
    with warnings.catch_warnings(), sl.simulate(x=RANKS) as mesh:
        warnings.simplefilter("ignore")
        for call in calls(given.samples):
            count += 1
            if found := wrong(call, mesh):
                faults += 1
                print(f"{call[0]} {call[1].__name__}: {found}")
    print(f"{count} calls, {faults} wrong")
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
