"""``shardlib keys``: every key that a TOML file may have, read from the functions' signatures."""

import argparse
import inspect
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from shardlib import optim
from shardlib.checkpoint import load_hf
from shardlib.command import datasets, from_config
from shardlib.command.config import ConfigError, near, parameters
from shardlib.command.progress import log
from shardlib.command.train import Checkpoints, Evaluation, Export, train
from shardlib.data import data
from shardlib.mesh import make_mesh
from shardlib.modules import init, parallelize, recipes

__all__ = ["Key", "listed"]


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
    plain = [n for n, p in parameters(train).items() if p.annotation is not from_config.Table]
    yield from _of("", train, only=plain)
    yield Key("mesh", "NAME", "int", "", "an axis and its size; -1: as many as torchrun started")
    yield from _of("mesh", make_mesh)
    yield Key("model", "make", "str", "", '"module:function"; the other keys are its arguments')
    yield from _of("model", from_config.hugging_face, but=("real",))
    yield from _of("model", load_hf, only=from_config.LOADING)
    yield from _of("init", init, only=("seed",))
    yield from _of("data", data, only=from_config.DATA)
    yield from _of("data.text", datasets.text)
    yield from _of("data.documents", datasets.documents)
    yield from _of("data.tokens", datasets.tokens)
    yield Key(
        "data.dataset", "make", "str", "", '"module:function"; the other keys are its arguments'
    )
    yield Key("layout", "rules", "list", "", "pairs of a pattern and a layout")
    yield Key("layout", "recipe", "str", "", ", ".join(from_config.RECIPES))
    for name in from_config.RECIPES:
        yield from _of(f"layout, {name}", getattr(recipes, name), but=("model", "mesh", "inputs"))
    yield from _of("layout", parallelize, only=from_config.PLACING)
    for name, function in from_config.transforms().items():
        yield from _of(f'optimizer, name = "{name}"', function)
    for name, function in from_config.schedules().items():
        yield from _of(f'optimizer.lr, name = "{name}"', function)
    for name, function in from_config.WRAPPERS.items():
        yield from _of(f"optimizer.{name}", function, but=("tx",))
    yield from _of("precision", optim.Precision)
    yield Key(
        "remat",
        "PATTERN",
        '"full", "products", "host", "all"',
        "",
        "what modules of this name keep",
    )
    yield from _of("checkpoint", Checkpoints)
    yield from _of("eval", Evaluation)
    yield from _of("eval", data, only=from_config.EVAL)
    yield from _of("export", Export)
    yield from _of("log", log)


def _of(
    table: str,
    function: Callable[..., Any],
    only: Collection[str] | None = None,
    but: tuple[str, ...] = (),
) -> Iterator[Key]:
    doc = inspect.getdoc(function) or ""
    for name, p in parameters(function, taken=but).items():
        if only is None or name in only:
            default = "" if p.default is p.empty else _default(p.default)
            yield Key(table, name, _type(p.annotation), default, _said(doc, name))


def _default(value: object) -> str:
    text = getattr(value, "__name__", None) or str(value)
    return text.removeprefix("torch.")


def _type(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"typing\.|collections\.abc\.|torch\.(?=dtype)|shardlib\.[\w.]+\.", "", text)
    return "" if "empty" in text else text


def _said(doc: str, name: str) -> str:
    """Return the first sentence on an argument: of its definition, else one that mentions it.

    >>> _said("Do.\\n\\nFor ``b``, no.\\n``a``, ``b``  one of v. 1\\n          or two.  Or three.", "b")
    'one of v. 1 or two'
    >>> _said("Split ``x`` over ``axis``: blocks.  Then stop.", "axis")
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


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("table", nargs="?", default="", help="only this table")


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    rows = [k for k in listed() if not given.table or k.table.split(",")[0] == given.table]
    if not rows:
        names = list(dict.fromkeys(k.table.split(",")[0] for k in listed() if k.table))
        raise ConfigError(
            f"no table [{given.table}]{near(given.table, names)} (there are {', '.join(names)})"
        )
    if given.json:
        print(json.dumps([k._asdict() for k in rows]))
        return 0
    table = None
    for key in rows:
        if key.table != table:
            table = key.table
            print(f"\n[{table}]" if table else "at the top")
        value = f"{key.name} = {key.default}" if key.default else key.name
        print(f"  {value:<28} {key.type:<24} {key.text}".rstrip())
    return 0
