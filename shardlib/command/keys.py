"""``shardlib keys``: every key that a TOML file may have, read from the functions' signatures.

``--print-config`` prints a file with every ``--set``, and each default in a comment.
"""

import argparse
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from shardlib import optim, toml_text
from shardlib.checkpoint import load_hf
from shardlib.command import datasets, from_config
from shardlib.command.config import (
    SCHEDULES,
    TRANSFORMS,
    Config,
    ConfigError,
    answer,
    keys_of,
    near,
)
from shardlib.command.progress import Log
from shardlib.command.train import Checkpoints, Evaluation, Export, checked, train
from shardlib.data import data
from shardlib.mesh import make_mesh
from shardlib.modules import init, parallelize, recipes
from shardlib.pipeline.stages import Stages


class Key(NamedTuple):
    """A key, its table, and the first sentence about it in its function's docstring."""

    table: str
    name: str
    type: str
    default: str
    text: str


def listed() -> Iterator[Key]:
    """List every key, table by table.

    >>> next(k for k in listed() if k.table == "checkpoint").name
    'path'
    """
    plain = [n for n, p in keys_of(train).items() if p.annotation is not from_config.Table]
    yield from _of("", train, only=plain)
    yield Key("mesh", "NAME", "int", "", "an axis and its size; -1: as many as torchrun started")
    yield from _of("mesh", make_mesh)
    yield from _made("model")
    yield from _of("model", from_config.hugging_face, but=("real",))
    yield from _of("model", load_hf, only=from_config.LOADING)
    yield from _of("init", init, only=("seed",))
    yield from _of("data", data, only=from_config.DATA)
    yield from _of("data.text", datasets.text)
    yield from _of("data.documents", datasets.documents)
    yield from _of("data.tokens", datasets.tokens)
    yield from _made("data.dataset")
    yield Key("layout", "rules", "list", "", "pairs of a pattern and a layout")
    yield Key("layout", "recipe", "str", "", ", ".join(from_config.RECIPES))
    for name in from_config.RECIPES:
        yield from _of(f"layout, {name}", getattr(recipes, name), but=("model", "mesh", "inputs"))
    yield from _of("layout", parallelize, only=from_config.PLACING)
    yield from _of("stages", Stages, but=("example",))
    for name, function in TRANSFORMS.items():
        yield from _of(f'optimizer, name = "{name}"', function)
    for name, function in SCHEDULES.items():
        yield from _of(f'optimizer.lr, name = "{name}"', function)
    for name, function in from_config.WRAPPERS.items():
        yield from _of(f"optimizer.{name}", function, but=("tx", "tiers"))
    yield from _of("tiers", optim.Tiers)
    yield from _of("precision", optim.Precision)
    policies = '"full", "products", "host", "all"'
    yield Key("remat", "PATTERN", policies, "", "what modules of this name keep")
    yield from _of("checkpoint", Checkpoints)
    yield from _of("eval", Evaluation)
    yield from _of("eval", data, only=from_config.EVAL)
    yield from _of("export", Export)
    yield from _of("log", Log)


def _made(table: str) -> Iterator[Key]:
    yield Key(table, "make", "str", "", '"module:function"; the other keys are its arguments')


def _of(
    table: str,
    function: Callable[..., Any],
    only: Collection[str] | None = None,
    but: tuple[str, ...] = (),
) -> Iterator[Key]:
    doc = inspect.getdoc(function) or ""
    for name, p in keys_of(function, taken=but).items():
        if only is None or name in only:
            yield Key(table, name, _type(p.annotation), _default(p.default), explained(doc, name))


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return ""
    text = getattr(value, "__name__", None) or str(value)
    return text.removeprefix("torch.")


def _type(annotation: object) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = inspect.formatannotation(annotation)
    return re.sub(r"typing\.|collections\.abc\.|torch\.(?=dtype)|shardlib\.[\w.]+\.", "", text)


def explained(doc: str, name: str) -> str:
    """Return the first sentence on an argument: of its definition, else one that mentions it.

    >>> explained("Do.\\n\\nFor ``b``, no.\\n``a``, ``b``  one of v. 1\\n          or two.  Or three.", "b")
    'one of v. 1 or two'
    >>> explained("Split ``x`` over ``axis``: blocks.  Then stop.", "axis")
    'Split ``x`` over ``axis``: blocks'
    """
    lines = doc.splitlines()
    for at, line in enumerate(lines):
        found = re.match(rf"( *)(?:``\w+``, )*``{name}``(?:, ``\w+``)*(?: {{2,}}|$)(.*)", line)
        if found:
            deeper = re.compile(rf" {{{len(found[1]) + 1},}}\S")
            rest = itertools.takewhile(deeper.match, lines[at + 1 :])
            return _sentences(" ".join([found[2], *rest]))[0]
    parts = re.split(r"\n *\n|\n(?=``|Raises|Source)", doc)
    spoken = (s for part in parts for s in _sentences(part) if f"``{name}``" in s)
    return next(spoken, "")


def _sentences(text: str) -> list[str]:
    """Split prose into sentences, without their full stops."""
    whole = re.sub(r"\s+", " ", text).strip()
    return [s.removesuffix(".") for s in re.split(r"(?<=\.) (?=[A-Z`])", whole)]


# ---------------------------------------------------------------- --print-config


def printed(config: Config) -> str:
    """Format a configuration as TOML, and the keys that it does not have as comments.

    >>> print(printed(Config({"steps": 2, "checkpoint": {"path": "out"}})))
    steps = 2
    # seed = 0
    # accumulate = 1
    # microbatches =
    <BLANKLINE>
    [checkpoint]
    path = "out"
    # every = 0
    # keep =
    # resume = true
    # wait = false
    """
    known = list(listed())
    return "\n\n".join("\n".join(lines) for lines in _tables(config.tables, (), known))


def _tables(
    table: Mapping[str, Any], path: tuple[str, ...], known: list[Key]
) -> Iterator[list[str]]:
    """Yield the lines of a table and of each table in it."""
    lines = []
    if path:
        lines.append(f"[{'.'.join(map(toml_text.key, path))}]")
    lines += [
        f"{toml_text.key(k)} = {toml_text.value(v)}"
        for k, v in table.items()
        if not isinstance(v, Mapping)
    ]
    variant = table.get("name", table.get("recipe"))
    for key in known:
        base, _, which = key.table.partition(", ")
        mine = base == ".".join(path) and which in ("", variant, f'name = "{variant}"')
        if mine and key.default and key.name not in table:
            lines.append(f"# {key.name} = {_as_toml(key.default)}".rstrip())
    if lines:
        yield lines
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            yield from _tables(inner, (*path, name), known)


def _as_toml(text: str) -> str:
    """Format a default of Python: text in quotes, and nothing for None, which TOML lacks."""
    if text in ("None", "True", "False"):
        return {"None": ""}.get(text, text.lower())
    if re.match(r"[-+\d(\[{]", text):
        return text
    return toml_text.value(text)


# ---------------------------------------------------------------- the command


def print_config(given: argparse.Namespace) -> int:
    """Print the configuration of ``shardlib train``."""
    config = checked(given.file, given.set)
    return answer(given, {"config": config.tables}, printed(config))


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("table", nargs="?", default="", help="only this table")


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    rows = [k for k in listed() if not given.table or k.table.split(",")[0] == given.table]
    if not rows:
        names = list(dict.fromkeys(filter(None, (k.table.split(",")[0] for k in listed()))))
        text = f"no table [{given.table}]{near(given.table, names)} (there are {', '.join(names)})"
        raise ConfigError(text)
    lines = []
    for table, keys in itertools.groupby(rows, key=lambda k: k.table):
        lines.append(f"\n[{table}]" if table else "at the top")
        for key in keys:
            value = " = ".join(filter(None, (key.name, key.default)))
            lines.append(f"  {value:<28} {key.type:<24} {key.text}".rstrip())
    return answer(given, [k._asdict() for k in rows], "\n".join(lines))
