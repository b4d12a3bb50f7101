"""What is wrong in a file is one line that names the key, its place and what to write."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlib import optim
from shardlib.command.config import (
    SCHEDULES,
    TRANSFORMS,
    Config,
    ConfigError,
    call,
    keys_of,
    read,
    typed,
)
from shardlib.command.keys import listed
from shardlib.command.main import main
from shardlib.command.train import check, rehearse
from tests.command.test_train import DEMO

WRONG = {  # --set -> what the line says
    "data.batch=two": '[data] batch: must be a whole number, not "two"',
    "data.batch=7": "[data] batch: dimension 0 of size 7 does not divide",
    "data.shuffle=1": "[data] shuffle: must be true or false, not 1",
    "data.last=fil": "did you mean 'fill'?",
    "data.dataset.make=examples.corpus:window": "did you mean 'windows'?",
    "data.dataset.make=examples.corpsu:windows": "cannot import 'examples.corpsu'",
    "data.dataset.make=windows": 'write "module:function", not "windows"',
    "data=3": "must be a table",
    "data.text.path=README.md": "rows come from one of the tables",
    "mesh.x=0": "[mesh] x: 0 is no size of an axis; an axis has a whole number of ranks, 1 at least",
    "mesh.x=two": '[mesh] x: "two" is no size of an axis; an axis has a whole number of ranks',
    "mesh.x=3": "[data] batch: dimension 0 of size 16 does not divide over (data x)",
    "mesh.x=-1": "-1 is found from torchrun's number of processes: write a number",
    "mesh.dta=2": "[mesh] dta: nothing is split over these 2 ranks; did you mean 'data'?",
    "mesh.devic=cpu": "is no size of an axis; did you mean 'device'?",
    "mesh={}": "a mesh has an axis",
    "layout.recipe=optimus3d": "not \"optimus3d\"; did you mean 'optimus2d'?",
    "layout.recipe=cube3d": "unknown axis 'z'; this mesh has data, x, y; cube3d wants axes x, y, z",
    'layout.rules=[["*", "..."]]': "write recipe",
    'layout={"rules" = [["wte.*", "z ."], ["*", "..."]]}': "[layout]: the rule of parameter 'wte.weight' does not fit it: unknown axis 'z'; this mesh has",
    "optimizer.name=adamm": "did you mean 'adam'?",
    "optimizer.name=torch.optim.Adagad": "torch.optim has no 'Adagad'; did you mean 'Adagrad'?",
    "optimizer.lr=fast": '[optimizer] lr: must be a number or a table [optimizer.lr] with name = "constant"',
    "optimizer.lr.name=coisne": "no schedule \"coisne\"; did you mean 'cosine'?",
    "optimizer.b2=2.0": "[optimizer] b2: b2=2.0 is not at least 0",
    "optimizer.clip.max_norm=-1": "[optimizer.clip]",
    "optimizer.zero.axis=dat": "[optimizer.zero] axis: unknown axis 'dat'; this mesh has data, x, y; did you mean 'data'?",
    "optimizer.zero.stage=5": "there is no stage 5",
    "optimizer.zero.axis=3": "[optimizer.zero] axis: must be text or a list, not 3",
    "optimizer.lr.start=nan": "[optimizer.lr] start: start=nan is not 0 or more",
    "optimizer.lr.steps=2.5": "[optimizer.lr] steps: ",
    "optimizer.zero=1": "[optimizer] zero: must be a table, not 1",
    "model.heads=3": "[model]: gpt refuses it: 3 heads do not share 16 channels",
    "model.embed=-4": "[model]: gpt refuses it: embed=-4: 1 at least",
    "data.dataset.ctx=0": "[data.dataset]: windows refuses it",
    "model.layers=three": '[model] layers: must be a whole number, not "three"',
    "model.make=examples.gpt:gtp": "did you mean 'gpt'?",
    'model={"make" = "examples.corpus:load"}': "this makes Tensor, not a module",
    "model.directory=nowhere": "or directory",
    'model={"directory" = "nowhere"}': "nowhere holds no config.json",
    "checkpoint.keep=0": "[checkpoint] keep: keep=0: 1 at least",
    "log.every=0": "[log] every: every=0",
    "log.tensorboard=out": "pip install tensorboard",
    "precision.param=bfloat": 'must be the name of a dtype, as "bfloat16", not "bfloat"',
    "precision.master=fp31": "did you mean 'fp32'?",
    "precision.master=bf16+rem": "",
    'remat={"h.*" = "ful"}': "unknown policy 'ful'",
    'remat={"hh.*" = "full"}': '[remat] "hh.*"',
    "steps=0": "1 at least, not 0",
    "steps=many": 'steps: must be a whole number, not "many"',
    "loss=a:b": "cannot import 'a'",
    "mesh.y=3": "[mesh] y: nothing is split over these 3 ranks: wte.weight: dimension 1 of [256, 16]",
    "mesh.timeout=-1": "[mesh] timeout: timeout=-1.0 is no time",
    "mesh.timeout=inf": "is no time",
    'mesh.device=""': '[mesh] device: "": Device string must not be empty',
    'init={"seed" = "x"}': "[init] seed: must be a whole number",
    'init={"mesh" = 1}': "[init] mesh: unknown key",
    "seed=99999999999999999999": "a number of 64 bits",
    "data.batch=1000000": "rows of a dataset that has",
    "data.workers=99999": "1,024 at most",
    'data.layout=""': "[data] layout: ",
    "data.layout={}": "[data.layout]: {} is no layout",
    'data={"batch" = 4, "text" = {"path" = "README.md", "context" = 4, "tokenizer" = "nowhere"}}': "is no directory",
    'layout={"recipe" = "megatron1d", "data" = "x"}': "is the axis that megatron1d takes for axis",
    'optimizer={"name" = "adamw", "lr" = {"name" = "warmup_cosine", "peak" = -1.0, "warmup" = 1, "steps" = 2}}': "peak=-1.0 is not 0 or more",
    'optimizer={"name" = "adamw", "lr" = {"name" = "warmup_cosine", "peak" = 1.0, "warmup" = 3, "steps" = 2}}': "a warmup of 3 steps in a schedule of 2",
    'optimizer={"name" = "adamw", "lr" = 1e-3, "mask" = -1, "zero" = {"axis" = "data"}}': "[optimizer]: ",
    'checkpoint.path=""': "write a directory",
    "log.flops=-1": "more than 0",
    "log.flops=nan": "more than 0",
    f"loss={__name__}:of_two": "of_two must be a function of (apply, params, batch)",
    f"loss={__name__}:of_three": "of_three gives [3], not a loss",
    "optimizer": "write --set table.key=value",
}


def of_two(params: Any, batch: Any) -> Any:
    return params, batch


def of_three(apply: Any, params: Any, batch: Any) -> Any:
    return torch.ones(3)


def keys(table: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


def renamed(table: Any, path: tuple[str, ...], to: str) -> Any:
    first, *rest = path
    if not rest:
        return {to if k == first else k: v for k, v in table.items()}
    return {k: renamed(v, tuple(rest), to) if k == first else v for k, v in table.items()}


EVERY = [p for p in keys(read(DEMO).tables) if p[:1] != ("mesh",) or len(p) == 1]


@pytest.mark.parametrize("path", EVERY, ids=".".join)
def test_every_key_of_the_demo_misspelt_is_told_with_the_right_one(path: tuple[str, ...]) -> None:
    """Two letters change places: what was meant is named, and nothing runs."""
    good = path[-1]
    bad = good[1] + good[0] + good[2:] if len(good) > 2 else good + good[-1]
    tables = renamed(read(DEMO).tables, path, bad)
    with pytest.raises(ConfigError) as caught:
        check(Config(tables, {(*path[:-1], bad): "run.toml:7"}, "run.toml"))
        from shardlib.command.from_config import module_of, rows_of

        rows_of(Config(tables)), module_of(Config(tables))
    said = str(caught.value)
    assert "\n" not in said and repr(good) in said and (bad in said or "must" in said), said


@pytest.mark.parametrize("one", WRONG)
def test_what_is_wrong_is_one_line(
    one: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [
        *"steps=1 model.ctx=16 model.layers=1 model.embed=16 data.dataset.ctx=16".split(),
        f"checkpoint.path={tmp_path}",
        one,
    ]
    if one == "precision.master=bf16+rem":
        sets.append("precision.param=float32")
    given = [x for s in sets for x in ("--set", s)]
    code = main(["train", str(DEMO), "--simulate", *given])
    said = capsys.readouterr().err.strip()
    assert code == 2 and "\n" not in said and WRONG[one] in said, said
    assert said.startswith("shardlib train: ") and ("--set" in said or "demo.toml:" in said)


def test_a_file_that_is_no_toml_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[mesh]\nx = = 2\n")
    with pytest.raises(ConfigError, match=r"run.toml: this is no TOML: .*line 2"):
        read(file)
    with pytest.raises(ConfigError, match=r"nowhere.toml: No such file"):
        read(tmp_path / "nowhere.toml")


def test_each_key_knows_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 1\n[a.b] # c\n"h.*" = "x=y"\nd.e = [\n  1,\n]\n[[f]]\ng = 1\n')
    places = read(file).places
    lines = {k: int(p.rpartition(":")[2]) for k, p in places.items()}
    assert lines[("a", "b", "h.*")] == 3 and lines[("a", "b", "d", "e")] == 4
    assert lines[("f", "g")] == 8 and lines[("a", "b")] == 2


def test_set_replaces_a_key_as_toml_has_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[a]\nb = 1\n")
    sets = ["a.b=2.5", "a.c=word", 'a."d.e"=true', "f.g=[1, 2]", 'h={"i" = 1}']
    assert read(file, sets).tables == {
        "a": {"b": 2.5, "c": "word", "d.e": True}, "f": {"g": [1, 2]}, "h": {"i": 1},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="b is a value, not a table"):
        read(file, ["a.b.c=1"])


def test_a_tables_keys_are_the_functions_arguments() -> None:
    """A key that the function gets, or loses, is one of the file at once."""

    def one(a: int, b: float = 1.0, *, c: torch.dtype = torch.float32) -> Any:
        return a, b, c

    config = Config({"t": {"a": 1, "b": 2, "c": "bfloat16"}})
    assert call(one, config, ("t",)) == (1, 2.0, torch.bfloat16)
    for table, said in (({"a": 1, "d": 2}, "unknown key"), ({"b": 1.0}, "a must be given")):
        with pytest.raises(ConfigError, match=said):
            call(one, Config({"t": table}), ("t",))


def test_text_names_dtypes_schedules_and_functions() -> None:
    config = Config({"lr": {"name": "linear", "start": 1.0, "end": 0.0, "steps": 2}})
    rate = typed(config.tables["lr"], float | optim.schedules.Schedule, config, ("lr",))
    assert [rate(i) for i in range(3)] == [1.0, 0.5, 0.0]
    assert typed(3, float | optim.schedules.Schedule, config, ("lr",)) == 3.0


SETTINGS = {  # of a table, where the demo's own does not have it
    "data.text": ("data={batch=4}", 'data.text.path="README.md"', "data.text.context=16"),
    "data.tokens": ("data={batch=4}", 'data.tokens.path="README.md"', "data.tokens.context=16"),
    "megatron1d": ("layout={}", "mesh={data=2,x=2}"),
    "fsdp": ("layout={}", "mesh={data=2,x=2}"),
    "ddp": ("layout={}", "mesh={data=2}"),
    "ring": ("layout={}", "mesh={data=2,s=2}"),
    "tesseract": ("layout={}", "mesh={data=1,d=2,x=2,y=2}"),
    "cube3d": ("layout={}", "mesh={data=1,x=2,y=2,z=2}"),
}
NONSENSE = {  # type of a key -> values that it cannot have
    "bool": ("1", '"yes"', "[1]", "{}"),
    "int": ("1.5", '"x"', "true", "[1]", "{}", "nan"),
    "float": ('"x"', "true", "[1]", "nan"),
    "str": ("3", "true", "[1]", "{}"),
}


@pytest.mark.parametrize(
    "said",
    [
        "optimizer.lr=0",
        "optimizer.weight_decay=0",
        'optimizer.lr={name="warmup_cosine",peak=1e-3,warmup=0,steps=0}',
        "optimizer.weight_decay=1e30",
        "optimizer.lr=1e30",
    ],
)
def test_nothing_and_very_much_are_taken_as_they_are_said(said: str, tmp_path: Path) -> None:
    config = read(DEMO, [f"checkpoint.path={tmp_path}", said])
    check(config)
    rehearse(config)


def test_no_key_takes_nonsense(tmp_path: Path) -> None:
    """Every key of every table, with every value of another type, is refused in one line."""
    known = {f'"{n}"': f for n, f in (TRANSFORMS | SCHEDULES).items()}
    given = {
        "peak": 1e-3,
        "steps": 10,
        "warmup": 2,
        "start": 0,
        "end": 1e-3,
        "value": 1e-3,
        "decay": 2,
    }
    tried = 0
    for key in listed():
        table, _, name = key.table.replace(", name =", ",").partition(", ")
        kind = key.type.replace(" | None", "").partition(" | ")[0]
        if table == "model" or key.name in ("NAME", "make", "PATTERN") or kind not in NONSENSE:
            continue
        sets = [*SETTINGS.get(name or table, ())]
        if table == "layout" and name:
            sets.append(f"layout.recipe={name}")
        if name in known:
            sets += (
                ['optimizer={name="adamw"}'] if table == "optimizer.lr" else ["optimizer={lr=0.1}"]
            )
            sets += [f"{table}.name={name}"]
            own = keys_of(known[name]) if table == "optimizer.lr" else ()
            sets += [f"{table}.{n}={v}" for n, v in given.items() if n in own]
        for value in NONSENSE[kind]:
            one = f"{table}.{key.name}={value}" if table else f"{key.name}={value}"
            config = read(DEMO, [f"checkpoint.path={tmp_path}", "model.layers=1", *sets, one])
            with pytest.raises(ConfigError) as caught:
                check(config)
                rehearse(config)
            assert "\n" not in str(caught.value), one
            tried += 1
    assert tried > 150
