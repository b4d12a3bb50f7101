"""One way down: each room imports only from rooms above it, and private torch stays in _compat."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardlib"

ORDER = [  # each may import from those before it
    "errors",
    "optional",
    "toml_text",
    "filesystem",
    "_compat",
    "opspec",
    "dtypes",
    "memory_tracker",
    "mesh.tables",
    "mesh.posted",
    "mesh.memo",
    "mesh.scope",
    "mesh.store",
    "mesh.failures",
    "mesh.devices",
    "mesh.process",
    "mesh.mesh",
    "mesh",
    "capacity",
    "kernels.build",
    "kernels.library",
    "kernels.active",
    "kernels",
    "cost",
    "layouts",
    "collectives",
    "random",
    "autocast",
    "memory_sharing",
    "tensor.place",
    "tensor.tensor",
    "tensor.grad_coalescing",
    "tensor.gradients",
    "tensor.lifting",
    "tensor",
    "dtensor_convert",
    "placing",
    "shard_map",
    "sequence",
    "data",
    "autograd_function",
    "ops.registry",
    "ops.signatures",
    "ops.each_rank",
    "ops.padding",
    "ops.fix_line",
    "ops.fallback",
    "ops.dims",
    "ops.declare",
    "ops.id_bounds",
    "recompute",
    "ops.elementwise",
    "ops.counter_rng",
    "ops.reduce",
    "ops.candidates",
    "ops.random",
    "ops.einsum",
    "ops.matmul",
    "ops",
    "pipeline.schedules",
    "extend",
    "testing",
    "dtensor",
    "microbatches",
    "grad",
    "modules.paths",
    "modules.weightless_copy",
    "modules.experts",
    "modules.rules",
    "modules.remat",
    "modules.copies",
    "modules.apply",
    "modules.parallelize",
    "modules.init",
    "modules.as_module",
    "modules.dim_factors",
    "modules.dim_trace",
    "modules.param_roles",
    "modules.colossalai",
    "modules.recipes",
    "modules",
    "tiers",
    "optim.tiles",
    "optim.buckets",
    "optim.trees",
    "optim.transform",
    "optim.schedules",
    "optim.norms",
    "optim.groups",
    "optim.adaptive",
    "optim.precision",
    "optim.index",
    "optim.sink",
    "optim.stage3",
    "optim.tiered_room",
    "optim.chunk_cache",
    "optim.tiered",
    "optim.chunk_trees",
    "optim.tiered_step",
    "optim",
    "checking",
    "checkpoint",
    "planning.constant_folding",
    "planning.layer_dedup",
    "planning.work",
    "planning.device",
    "planning.cluster",
    "planning.explanation",
    "planning.tier_use",
    "planning.explain",
    "planning.calls",
    "planning.parts",
    "planning.strategies",
    "planning.candidates",
    "planning.pareto",
    "planning.program",
    "planning.columns",
    "planning.layer_rules",
    "planning.question",
    "pipeline.flow",
    "pipeline.forward",
    "pipeline.units",
    "pipeline.cut",
    "pipeline.step",
    "pipeline.prices",
    "pipeline",
    "planning.joint",
    "planning.plan",
    "planning",
    "seeing.canvas",
    "seeing.frames",
    "seeing.timeline",
    "seeing.pipelines",
    "seeing.plans",
    "seeing.blocks",
    "seeing.summary",
    "seeing",
    "masks",
    "attention",
    "desync",
    "testing.plugin",
    "command.config",
    "command.datasets",
    "command.progress",
    "command.from_config",
    "command.train",
    "command.explain",
    "command",
    "__main__",
]

OPTIONAL = {"matplotlib", "numpy", "transformers"}  # imported inside functions only
# whatever the object is called
DTENSORS_OWN = {"_local_tensor", "_spec", "_op_dispatcher", "_redistribute"}
# torch's docs name it for wrapper subclasses; same since 1.11
DOCUMENTED = {"_make_wrapper_subclass"}

KINDS = {"dist", "stacked", "record"}  # of meshes

MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted(PACKAGE.rglob("*.py"))
}
BELOW = [name for name in MODULES if name != "shardlib"]  # the package itself may import every room


def room(module: str) -> int:
    """Place in ORDER of a module below shardlib: the longest entry that is a prefix of it."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in ORDER:
            return ORDER.index(name)
    raise AssertionError(f"{module} is in no room: add it to ORDER in {Path(__file__).name}")


def imports(module: str) -> set[str]:
    """Modules of shardlib that one of them imports, also inside functions."""
    found = set()
    for target, _ in source(module).imports:
        if target.split(".")[0] == "shardlib":
            while target not in MODULES:  # a name out of a module
                target = target.rpartition(".")[0]
            found.add(target)
    return found


def imported(module: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """(dotted target, name it is bound to) of every import among nodes, relative ones resolved."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for a in node.names:
                yield a.name, a.asname or a.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = (
                    module.split(".")
                    if MODULES[module].name == "__init__.py"
                    else module.split(".")[:-1]
                )
                base = ".".join([*here[: len(here) - node.level + 1], *base.split(".")]).rstrip(".")
            for a in node.names:
                yield f"{base}.{a.name}", a.asname or a.name


class Source(NamedTuple):
    """What the laws below ask of a module, of which one tree is made and gone through once."""

    imports: list[tuple[str, str]]
    at_import: list[tuple[str, str]]
    """Those outside functions."""
    private: list[str]
    kinds: list[str]
    cuda: bool


@cache
def source(module: str) -> Source:
    nodes = parsed(MODULES[module].read_text())
    found = list(imported(module, nodes))
    private, kinds, cuda = private_torch(module, nodes), kinds_asked(nodes), cuda_named(nodes)
    for scope in nodes:
        if isinstance(scope, ast.FunctionDef):
            scope.body = []
    return Source(found, list(imported(module, ast.walk(nodes[0]))), private, kinds, cuda)


def parsed(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def private_torch(module: str, nodes: list[ast.AST]) -> list[str]:
    """Dotted names below torch with a private part, through
    whatever alias, and DTensor's own attributes.
    """
    found, bound = [], {"torch": "torch"}
    for target, name in imported(module, nodes):
        if target.split(".")[0] == "torch":
            found.append(target)
            bound[name] = "torch" if name == "torch" else target
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if node.attr in DTENSORS_OWN:
                found.append(f"torch.{node.attr}")
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in bound:
                found.append(".".join([bound[inner.id], *reversed(chain)]))
    private = re.compile(r"^_(?!_)")
    return sorted(
        {t for t in found if any(private.match(p) and p not in DOCUMENTED for p in t.split("."))}
    )


@pytest.mark.parametrize("module", BELOW)
def test_no_import_goes_up(module: str) -> None:
    here = room(module)
    for target in imports(module):
        assert target != "shardlib", f"{module} imports the whole package, which imports it"
        assert room(target) <= here, f"{module} imports {target}, which is below it"


def test_no_import_goes_in_a_circle() -> None:
    """Also inside a room, where ORDER says nothing; a package's __init__ only hands names on."""
    graph = {m: {t for t in imports(m) if MODULES[t].name != "__init__.py"} for m in BELOW}
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def test_every_room_exists() -> None:
    assert not [r for r in ORDER if f"shardlib.{r}" not in MODULES]


@pytest.mark.parametrize("module", BELOW)
def test_private_torch_is_in_one_file(module: str) -> None:
    assert module == "shardlib._compat" or source(module).private == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed._functional_collectives import all_reduce",
        "import torch.distributed._tensor",
        "def f():\n    from torch._C import x",
        "import torch\ntorch._foreach_add([], 1)",
        "import torch.distributed as dist\ndist._coalescing_manager()",
        "from torch import distributed as d\nd.tensor._x()",
        "def f(t):\n    return t._local_tensor",
    ],
)
def test_private_torch_is_seen(text: str) -> None:
    assert private_torch("shardlib.tensor", parsed(text))


@pytest.mark.parametrize("module", BELOW)
def test_optional_packages_are_imported_in_functions_only(module: str) -> None:
    assert not {t for t, _ in source(module).at_import if t.split(".")[0] in OPTIONAL}


def kinds_asked(nodes: list[ast.AST]) -> list[str]:
    """List where code asks what kind a mesh is: ``mesh.kind``, a comparison with a kind's name or of
    its ``device_mesh``, a mesh made of a kind by name, a back end by name.
    """
    found = []
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "kind"
            and ast.unparse(node.value).endswith(("mesh", "m"))
        ):
            found.append(node)
        if isinstance(node, ast.Compare) and any(
            isinstance(c, ast.Constant) and c.value in KINDS for c in ast.walk(node)
        ):
            found.append(node)
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Attribute)
            and node.left.attr == "device_mesh"
        ):
            found.append(node)
        if (
            isinstance(node, ast.keyword)
            and node.arg == "kind"
            and isinstance(node.value, ast.Constant)
        ):
            found += [node.value] if node.value.value in KINDS else []
        if isinstance(node, ast.ImportFrom) and "backends" in (node.module or ""):
            found.append(node)
    return [f"{n.lineno}: {ast.unparse(n)}" for n in found]


@pytest.mark.parametrize(
    "module", [m for m in BELOW if m.split(".")[1] not in ("collectives", "mesh")]
)
def test_nobody_asks_what_kind_a_mesh_is(module: str) -> None:
    """But those who make meshes and back ends: others ask ``lead``,
    ``played``, ``storage``, ``holds_values``.
    """
    assert source(module).kinds == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x.mesh.kind != 'x'",
        "if m.kind: pass",
        "def f(k):\n    return k in ('dist', 'record')",
        "if x.mesh.device_mesh is None: pass",
        "Mesh({}, kind='record')",
        "from shardlib.collectives.backends import dist",
    ],
)
def test_a_question_for_the_kind_is_seen(text: str) -> None:
    assert kinds_asked(parsed(text))


CUDA_ALONE = {  # where CUDA is meant, and no other accelerator
    "modules/colossalai.py": "the other library's word in its own files",
    "ops/attention/kernels.py": "torch has these kernels for CUDA",
    "ops/matmul/function.py": "torch's product of halves in fp32 is CUDA's",
    "placing.py": "a method of torch's tensors",
}


def cuda_named(nodes: list[ast.AST]) -> bool:
    """Say whether code names CUDA: ``torch.cuda``, ``x.is_cuda``, "cuda", "cuda:0"."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            return True
        if isinstance(node, ast.Constant) and re.match(r"cuda(:|$)|nccl$", str(node.value)):
            return True
    return False


def test_no_device_is_named_but_where_it_alone_is_meant() -> None:
    named = set()
    for module, file in MODULES.items():
        name = file.relative_to(PACKAGE).as_posix()
        mine = not name.startswith(("kernels/", "collectives/backends/"))  # CUDA's, and NCCL's
        if mine and source(module).cuda:
            named.add(name)
    assert named == set(CUDA_ALONE)


@pytest.mark.parametrize("text", ["torch.cuda.synchronize()", "x.is_cuda", "f('cuda:1')"])
def test_a_device_that_is_named_is_seen(text: str) -> None:
    assert cuda_named(parsed(text))


def test_no_module_is_called_utils() -> None:
    assert not [m for m in BELOW if m.rpartition(".")[2] in ("utils", "common", "helpers", "misc")]


def test_no_path_of_one_machine() -> None:
    """A path under somebody's home or work folder works on that machine alone."""
    local = re.compile(r"""(?<![\w.:/-])/(home|root|work|Users|tmp)/""")
    folders = ("shardlib", "tests", "examples", "benchmarks", "docs", "notebooks", ".ci")
    files = [*ROOT.glob("*"), *(p for folder in folders for p in (ROOT / folder).rglob("*"))]
    texts = {
        p
        for p in files
        if p.is_file()
        and (p.suffix in (".py", ".md", ".toml", ".ipynb") or p.name in ("Makefile", "run"))
    }
    for path in texts - {Path(__file__)}:
        hits = [line for line in path.read_text().splitlines() if local.search(line)]
        assert not hits, (path, hits)
