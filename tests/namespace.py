"""Every public callable of torch's namespaces, called with sharded operands.

Each is called in the forms in which functions of tensors are: one to three operands, a dimension, a
list, a number.  A form that torch takes of whole tensors must give their value, or be refused by an
error of the library.  ``tests/database.py`` has operands that fit the operators that it knows;
``tests/fuzz_calls.py`` draws dtypes and layouts; this one passes over no name.

    python -m tests.namespace [--count N] [--seed 0]
"""

import argparse
import random
import warnings
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

import shardlib as sl
from tests.database import NEVER, close, drawn_layout

HOMES = {
    "torch": torch,
    "torch.Tensor": Tensor,
    "F": torch.nn.functional,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch.linalg": torch.linalg,
}
PASSED = NEVER | frozenset(
    """
    set_default_device set_default_dtype set_default_tensor_type set_deterministic_debug_mode compile
    set_flush_denormal set_float32_matmul_precision set_grad_enabled set_num_interop_threads
    set_num_threads set_printoptions set_rng_state set_warn_always set_anomaly_enabled manual_seed
    seed use_deterministic_algorithms set_autocast_cache_enabled set_autocast_dtype
    set_autocast_enabled init_num_threads autocast_increment_nesting autocast_decrement_nesting save
    load import_ir_module fork wait cudnn_is_acceptable data_ptr share_memory_ module_load cuda xpu
    ipu to_mkldnn pin_memory is_pinned set_ set_data new_tensor backward
    """.split()
)
"""Names whose call changes the process, reads a file, or gives memory as it was found."""


def names() -> list[tuple[str, str]]:
    """List (home, name) of all that may be called."""
    return [
        (home, name)
        for home, where in HOMES.items()
        for name in sorted(dir(where))
        if not name.startswith("_") and name not in PASSED and callable(getattr(where, name))
        if not isinstance(getattr(where, name), type)
    ]


def forms(method: bool) -> list[tuple[Any, ...]]:
    """List arguments, ``x`` standing for the operand."""
    x = "x"
    found = [(x,), (x, x), (x, 0), (x, x, x), (x, -1), (x, 2.0), (x, 0, 1), ([x, x],), (x, x, 0)]
    return found + ([] if method else [([x, x], 0), ("ij->ji", x)])


def judge(home: str, name: str, args: tuple[Any, ...], dense: Tensor, ours: Any) -> str:
    """Say what is wrong with a call: nothing if it is dense's, or refused by the library."""
    call = getattr(HOMES[home], name)

    def given(x: Tensor) -> Any:
        return optree.tree_map(lambda a: x.clone() if a == "x" else a, list(args))

    try:
        want, again = call(*given(dense)), call(*given(dense))
    except Exception:
        return ""
    try:
        got = call(*given(ours))
        whole = [
            sl.unshard(t) if isinstance(t, sl.ShardedTensor) else t for t in optree.tree_leaves(got)
        ]
    except sl.ShardError:
        return ""
    except Exception as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    for a, b, c in zip(*map(optree.tree_leaves, (want, whole, again)), strict=False):
        if isinstance(a, Tensor) and (not isinstance(b, Tensor) or a.shape != b.shape):
            return f"gives {b!r}, not {list(a.shape)}"
        drawn = isinstance(a, Tensor) and not a.is_sparse and not close(a, c)
        if isinstance(a, Tensor) and not a.is_sparse and not drawn and not close(a, b):
            return "gives other values"
    return ""


def hunt(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Call ``count`` drawn names in every form; yield those that are wrong."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    known = names()
    mesh = {"x": 2, "y": 2}
    for home, name in draw.sample(known, min(count, len(known))):
        dense = torch.rand(4, 4, dtype=torch.float64, generator=numbers) + 0.5
        layout = drawn_layout(dense.shape, mesh, draw)
        for args in forms(home == "torch.Tensor"):
            with sl.simulate(**mesh), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = judge(home, name, args, dense, sl.shard(dense, layout))
            if said:
                yield f"{home}.{name}{args} of {layout}", said


def main() -> int:
    parser = argparse.ArgumentParser(description="Every name of torch, on sharded operands.")
    parser.add_argument("--count", type=int, default=10**6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    for call, said in hunt(given.count, given.seed):
        wrong += 1
        print(call, said, flush=True)
    print(f"{min(given.count, len(names()))} names, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
