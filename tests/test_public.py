"""The public face: these names and no other, each where it is said to be."""

import ast
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import shardlib as sl

FACE = """
    shard unshard reshard constrain from_local data pack shard_sequence typeof layout_of ShardedTensor
    Layout Row Col Layout2D Layout25D Layout3D Ring Replicated Partial P LayoutLike
    Mesh MeshLike make_mesh simulate record use_mesh current_mesh launch auto_mesh process_index rank0_print
    shard_map psum pmean pmax all_gather psum_scatter all_to_all ppermute axis_index axis_size
    matmul ring_attention linear_cross_entropy grad value_and_grad parallelize Stages init as_module save load latest save_hf load_hf
    algorithm saving implicit constants why explain trace expect_comm check check_model plan choose probe visualize summary
    ShardError
""".split()
MODULES = {
    "attention": "AllGather BothWays Canonical DoubleRing Halo OneWay PassQ RSA Ulysses linformer_attention",
    "collectives": """Event Pending Stacked Trace all_gather all_to_all axis_index axis_size expect_comm pbroadcast
        pcast pick pmax pmean ppermute preduce pslice psum psum_scatter pvary shift start trace""",
    "checkpoint": """About Saved Saving describe from_hf latest load load_hf reshard save save_hf steps to_hf
        verify""",
    "dtensor": "from_dtensor rules to_dtensor",
    "errors": """AxisReused BadArgument CheckpointError ImplicitCommunication LayoutSyntax MeshError ModelDiffers NoMesh NoImplementation NoPlanFits NotExpressible
        OutOfRange PartialEscape PlainTensor RankFailed RankMismatch RuleLint ShardError StageFailed UnevenSplit
        UnexpectedComm UnknownAxis
        UnknownParameter Unsupported WrongAxes""",
    "extend": """At AttentionCase AttentionJob AttentionMove AttentionPlan Cost Engine LayoutFamily LocalQueries Mask Match MatmulCase Moves OpSpec Relation Run
        Schedule add_sink algorithm gathered local_queries moving operator positions register_engine remove
        scattered schedule started
        summing sums_like viewed""",
    "kernels": "build info use",
    "masks": "ALiBi Bias Causal Documents Full Mask Padding Prefix Window mask_mod",
    "optim": """Info Precision Tiers Transform ZeroState adafactor adagrad adam adam8bit adamw apply_updates as_torch
        averaged chain clip_by_global_norm clip_by_parameter_norm clip_by_value constant cosine ema
        from_torch global_norm identity inject_hyperparams is_finite joined lamb linear lion load_state_dict
        loss_scale masked mixed multi_steps muon partition rmsprop scale scale_by_schedule set_to_zero sgd
        skip_nonfinite soap state_dict step value_and_step warmup_cosine wsd zero""",
    "planning": "Cluster Link Plan ReshardPlan attention_plan choose lower_bound measured plan probe schedule",
    "random": "get_state seed set_state",
    "recipes": "Legacy Recipe beside cube3d ddp from_colossalai_config fsdp matrices megatron1d optimus2d ring roles tesseract widening",
    "seeing": "Frames PlanChart Summary Timeline draw frames merged step_chart style summary timeline visualize",
    "testing": "check_algorithm check_engine check_layout check_mask dense_attention",
}


def test_the_face_is_these_names() -> None:
    assert sorted(sl.__all__) == sorted([*FACE, *MODULES])
    assert [name for name in dir(sl) if not name.startswith("__")] == sorted(sl.__all__)
    assert len(FACE) <= 73


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_the_face_has_these_names(module: str) -> None:
    found = getattr(sl, module)
    assert sorted(found.__all__) == sorted(MODULES[module].split())
    assert not [n for n in found.__all__ if isinstance(getattr(found, n), types.ModuleType)]


def test_no_name_is_a_module_unless_it_is_said() -> None:
    assert not [name for name in FACE if isinstance(getattr(sl, name), types.ModuleType)]
    assert all(isinstance(getattr(sl, name), types.ModuleType) for name in MODULES)


def of_the_face() -> Iterator[tuple[str, Any]]:
    """Every public name once, as a user writes it."""
    found = {}
    for module, names in [("sl", FACE), *((f"sl.{m}", MODULES[m].split()) for m in MODULES)]:
        for name in names:
            value = getattr(sl if module == "sl" else getattr(sl, module[3:]), name)
            found.setdefault(id(value), (f"{module}.{name}", value))
    return iter(found.values())


ALIASES = {"sl.LayoutLike", "sl.MeshLike"}  # unions of types: Python gives them no docstring
DOCUMENTED = [(name, value) for name, value in of_the_face() if name not in ALIASES]
UNSHOWN: set[str] = set()


@pytest.mark.parametrize(("name", "value"), DOCUMENTED, ids=[name for name, _ in DOCUMENTED])
def test_a_public_name_says_what_it_does_and_shows_it(name: str, value: Any) -> None:
    """A first line that is whole, an imperative where it is a function's, and an example.

    The functions of ``sl.optim`` are named after the transforms that they make, as classes are.
    """
    lines = inspect.cleandoc(vars(value)["__doc__"] if isinstance(value, type) else value.__doc__)
    first, *others = lines.splitlines()
    assert first.endswith((".", ":")) and not (others and others[0]), f"{first!r} goes on"
    assert len(first) <= 100 - len('    """'), f"{len(first)} columns"
    if not isinstance(value, type) and not name.startswith("sl.optim."):
        verb = re.match("[A-Z][a-z]+ ", first)
        assert verb, f"{first!r} does not begin with a verb"
        assert verb[0].strip() not in NOUNS and not verb[0].endswith(("s ", "ing ")), verb[0]
    assert (">>> " in lines) is (name not in UNSHOWN), "no example, or one where none is expected"


FOLDERS = """
    tensor ops collectives mesh layouts modules kernels testing planning checking seeing command optim
    checkpoint
""".split()
FOLDERS.append("")  # shardlib's own files
OPENINGS = "The What Whether Where Of A An How Who That".split()


def public_functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each public function's place and docstring; properties say what they are."""

    def within(node: ast.AST) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name.startswith("_"):
                continue
            text = ast.get_docstring(child) if isinstance(child, ast.FunctionDef) else None
            if text and "property" not in " ".join(map(ast.unparse, child.decorator_list)):
                yield f"{path.name}:{child.lineno} {child.name}", text
            if not isinstance(child, ast.expr):
                yield from within(child)

    return within(ast.parse(path.read_text()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_public_function_says_what_it_does(folder: str) -> None:
    """Its first line begins with a verb, not with what it gives or when."""
    root = Path(sl.__file__).parent / folder
    found = [
        f for path in root.glob("**/*.py" if folder else "*.py") for f in public_functions(path)
    ]
    assert found
    assert not [(at, text) for at, text in found if text.split()[0].strip(",:") in OPENINGS]


APART = """
import doctest, inspect, sys
from tests.test_public import DOCUMENTED

runner = doctest.DocTestRunner()
for name, value in DOCUMENTED:
    if "make_mesh(" in value.__doc__:
        for test in doctest.DocTestFinder(recurse=False).find(value, name, inspect.getmodule(value)):
            runner.run(test)
print(runner.summarize())
"""


def test_examples_that_start_a_process_group_run() -> None:
    """In a process of their own: conftest.py says why."""
    done = subprocess.run(
        [sys.executable, "-c", APART],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    failed, tried = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1])[:2])
    assert (failed, tried > 10) == (0, True), done.stdout + done.stderr


NOUNS = "A All An Bytes Each Every It One The This What Where Whether Which Within".split()


VERBS = [sl.shard, sl.unshard, sl.reshard, sl.constrain, sl.parallelize, sl.ring_attention, sl.grad, sl.value_and_grad,
         sl.matmul, sl.shard_sequence, sl.typeof, sl.layout_of, sl.init,
         sl.from_local, sl.data, sl.explain, sl.check_model, sl.summary, sl.visualize, sl.checkpoint.reshard,
         sl.optim.step, sl.optim.apply_updates, sl.optim.state_dict, sl.optim.load_state_dict,
         sl.extend.algorithm]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=lambda f: f.__name__)
def test_nothing_that_a_user_types_is_any(verb: Callable[..., object]) -> None:
    for form in [verb, *typing.get_overloads(verb)]:
        for name, kind in inspect.get_annotations(form).items():
            if verb is not sl.init or name != "fill":  # a table of functions of a user's own
                assert "Any" not in str(kind), (name, kind)


def test_a_family_is_its_layout_of_activations() -> None:
    with sl.simulate(x=2, y=2, z=2):
        x = torch.ones(8, 8)
        for family in (sl.Layout3D("x", "y", "z"), sl.Layout25D("x", "y", "z")):
            assert sl.layout_of(sl.shard(x, family)) == family.act.resolve(2)
            assert sl.layout_of(sl.reshard(sl.shard(x, "..."), family)) == family.act.resolve(2)
            assert sl.layout_of(sl.shard({"a": x}, family)["a"]) == family.act.resolve(2)
            double = sl.shard_map(lambda t: 2 * t, in_layouts=family, out_layouts=family)
            assert torch.equal(sl.unshard(double(sl.shard(x, family))), 2 * x)
            linear = torch.nn.Linear(8, 8, bias=False)
            apply, params = sl.parallelize(
                linear, [("*", family.weight.T)], inputs={"input": family}
            )
            assert torch.allclose(sl.unshard(apply(params, x)), linear(x), atol=1e-6)
            with pytest.raises(
                sl.errors.LayoutSyntax, match=r"for activations, .act, and one for weights"
            ) as e:
                sl.parallelize(linear, [("weight", family)])
            eval(e.value.fix, {"sl": sl, "module": linear, "rules": [("weight", family)]})


NOT_LAYOUTS = [
    (None, "'...'"),
    (("x", "."), "'x .'"),
    (("x .",), "'x .'"),
    (("x", 3), "'...'"),
    (((("x", None)), None), "'...'"),
    ([Shard(0), None], "'...'"),
    (3, "'...'"),
    (sl.Row, "sl.Row('x')"),
    (sl.Col, "sl.Col('x')"),
    (sl.Layout2D, "sl.Layout2D('x', 'y')"),
    (sl.Layout3D, "'...'"),  # the mesh has two axes
    (sl.Ring, "sl.Ring('x')"),
    (sl.Replicated, "sl.Replicated()"),
    (sl.P, "sl.P('x')"),
]


@pytest.mark.parametrize(
    ("given", "fix"), NOT_LAYOUTS, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_what_is_no_layout_is_refused_with_the_line_to_write(given: Any, fix: str) -> None:
    x = torch.arange(16.0).reshape(4, 4)
    with sl.simulate(x=2, y=2):
        whole = sl.shard(x, "...")
        tries = {
            f"sl.shard(x, {fix})": lambda: sl.shard(x, given),
            f"sl.reshard(x, {fix})": lambda: sl.reshard(whole, given),
        }
        for line, call in tries.items():
            with pytest.raises(sl.errors.LayoutSyntax, match="is no layout: ") as e:
                call()
            assert e.value.fix == line
            assert torch.equal(
                sl.unshard(eval(line, {"sl": sl, "x": x if "sl.shard" in line else whole})), x
            )
        linear = torch.nn.Linear(4, 4, bias=False)
        for refused in (
            lambda: sl.matmul(whole, whole, 3 if given is None else given),
            lambda: sl.constrain(whole, given),
            lambda: sl.parallelize(linear, [("*", given)]),
            lambda: sl.parallelize(linear, [("*", "...")], inputs={"input": given}),
            lambda: sl.shard_sequence(x.long(), given),
            lambda: sl.shard({"a": x}, given),
        ):
            with pytest.raises(sl.errors.LayoutSyntax, match="is no layout") as e:
                refused()
            assert e.value.fix


def test_every_mesh_is_a_context() -> None:
    """A mesh of real ranks too: tests/mesh/test_mesh.py makes one in a process of its own."""
    for made in (sl.simulate(x=2), sl.record(x=2)):
        with made:
            assert sl.typeof(sl.shard(torch.ones(4), "x")) == "f32[4@x]"
            assert sl.current_mesh() is made
