"""One way down: each room imports only from rooms above it, and private torch stays in _compat."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent / "shardlib"

ORDER = [  # each may import from those before it
    "errors",
    "_compat",
    "mesh",
    "layouts",
    "collectives",
    "tensor",
    "border",
    "placing",
    "shard_map",
    "ops.registry",
    "ops.elementwise",
    "ops.reduce",
    "ops.matmul",
    "ops",
    "dtensor",
    "grad",
    "parallelize",
    "recipes",
    "optim",
    "checkpoint",
    "visualize",
]


def room(module: str) -> int:
    """Place in ORDER of a dotted module below shardlib."""
    parts = module.split(".")
    for length in (len(parts), 2, 1):
        name = ".".join(parts[:length])
        if name in ORDER:
            return ORDER.index(name)
    raise AssertionError(f"{module} is in no room: add it to ORDER in {Path(__file__).name}")


def imports(path: Path) -> set[str]:
    """Modules of shardlib that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardlib."):
            found.add(node.module.removeprefix("shardlib."))
        elif isinstance(node, ast.ImportFrom) and node.module == "shardlib":
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("shardlib.") for a in node.names if a.name.startswith("shardlib.")}
    return found


FILES = [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


def test_no_import_goes_up() -> None:
    for path in FILES:
        here = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for target in imports(path):
            same = target.split(".")[0] == here.split(".")[0]
            assert same or room(target) < room(here), f"{here} imports {target}"
            if same and here.startswith("ops") and target.startswith("ops"):
                assert room(target) <= room(here), f"{here} imports {target}"


def test_private_torch_is_in_one_file() -> None:
    private = re.compile(
        r"(import|from)\s+torch[\w.]*\._|torch\.(distributed|utils|testing)\.[\w.]*\._[a-z]|\._local_tensor\b|\._spec\b"
    )
    for path in FILES:
        if path.name != "_compat.py":
            hits = [line for line in path.read_text().splitlines() if private.search(line)]
            assert not hits, (path, hits)


def test_optional_packages_are_imported_in_functions_only() -> None:
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not any(n.split(".")[0] in ("matplotlib", "numpy", "transformers") for n in names), path


def test_no_room_is_called_utils() -> None:
    assert not [p for p in FILES if p.stem in ("utils", "common", "helpers", "misc")]
