"""Print what of torch differs, by name, before and after shardlib is imported, and then its first mesh.

    python -m tests.torch_attributes

Objects of modules and classes are compared by identity, functions by their code too.  Registries that
torch offers for it are not compared: operators of torch.library, safe globals of torch.load.
"""

import sys
import warnings
from types import FunctionType
from typing import Any

REGISTRIES = {"torch._library.custom_ops", "torch.jit._builtins", "torch._weights_only_unpickler"}


def attributes() -> dict[str, Any]:
    found: dict[str, Any] = {"sys.meta_path": (sys.meta_path[0],)}
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] != "torch" or module is None or name in REGISTRIES:
            continue
        for key, value in [*vars(module).items()]:
            found[f"{name}.{key}"] = value, code(value)
            if isinstance(value, type) and value.__module__ == name:
                for inner, method in [*vars(value).items()]:
                    found[f"{name}.{key}.{inner}"] = method, code(method)
    return found


def code(value: object) -> object:
    return value.__code__ if isinstance(value, FunctionType) else None


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """List the names whose object or code changed, and what classes that were there have anew."""
    homes = {n: before.get(n.rpartition(".")[0], (None,))[0] for n in after if n not in before}
    added = [n for n, home in homes.items() if isinstance(home, type)]
    both = [(n, was, after[n]) for n, was in before.items() if n in after]
    changed = [n for n, was, now in both if any(a is not b for a, b in zip(was, now, strict=False))]
    return sorted([*changed, *added])


def main() -> None:

    first = attributes()
    import shardlib as sl

    imported = attributes()
    with sl.simulate(x=2):
        pass
    print(differing(first, imported), differing(imported, attributes()), sep="\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
