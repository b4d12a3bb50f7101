"""Configurations: tables of a TOML file, the line of each key, and calls with a table's keys.

A table holds the arguments of a function.  Its possible keys, their types and defaults are read
from that function's signature, so a file and a call always accept the same.
"""

import argparse
import collections.abc
import contextlib
import importlib
import inspect
import json
import os
import re
import sys
import tomllib
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardlib import optim
from shardlib.errors import ShardError, meant, similar
from shardlib.optim import Transform
from shardlib.optim.schedules import Schedule

Keys = tuple[str, ...]


class ConfigError(ValueError):
    """Raised for an invalid configuration: one line with the key, its place, and a correction."""


@dataclass(frozen=True)
class Config:
    """The tables of a configuration, and the line of each key.

    ``places``  path of a key -> ``run.toml:12``, or the ``--set`` that gave it.
    """

    tables: Mapping[str, Any]
    places: Mapping[Keys, str] = field(default_factory=dict)
    file: str = ""

    def table(self, *path: str) -> Mapping[str, Any]:
        """Return the table of this name; empty if the file has none."""
        found: object = self.tables
        for i, key in enumerate(path):
            found = found.get(key, {})
            if not isinstance(found, Mapping):
                raise self.error(path[: i + 1], f"must be a table, not {shown(found)}")
        return found

    def error(self, path: Sequence[str], message: str) -> ConfigError:
        """Build the error of the key at ``path``, with its place in front of a message."""
        path = tuple(path)
        inner = (k for k in self.places if path and k[: len(path)] == path)
        around = (path[:n] for n in range(len(path) - 1, 0, -1))
        places = (self.places[k] for k in (path, *inner, *around) if k in self.places)
        where = next(places, self.file or "config")
        text = re.sub(r"\s*\n\s*", "; ", message.strip())
        if path:
            where += f": {spelled(path, self.tables)}"
        return ConfigError(f"{where}: {text}")


def spelled(path: Sequence[str], tables: Mapping[str, Any]) -> str:
    """Format a path as in the file: ``[table]`` or ``[table] key``.

    >>> spelled(("data", "batch"), {"data": {"batch": 4}}), spelled(("data",), {"data": {}})
    ('[data] batch', '[data]')
    """
    found: object = tables
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    names = [k if re.fullmatch(r"[\w-]+", k) else f'"{k}"' for k in path]
    if isinstance(found, Mapping):
        return f"[{'.'.join(names)}]"
    *tables_of, key = names
    return f"[{'.'.join(tables_of)}] {key}" if tables_of else key


# ---------------------------------------------------------------- reading


def read(file: str | os.PathLike[str], sets: Sequence[str] = ()) -> Config:
    """Read a TOML file, and replace the keys of ``--set a.b=c``.

    Raises: ConfigError if it is not TOML, with the line.
    """
    name = os.fspath(file)
    try:
        text = Path(name).read_text()
        tables = tomllib.loads(text)
    except OSError as e:
        raise ConfigError(f"{name}: {e.strerror or e}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{name}: this is no TOML: {e}") from None
    places = {k: f"{name}:{n}" for k, n in _lines(text).items()}
    for one in sets:
        path = _set(tables, one)
        places = {k: place for k, place in places.items() if k[: len(path)] != path}
        places[path] = f"--set {one}"
    return Config(tables, places, name)


def _set(tables: dict[str, Any], said: str) -> Keys:
    """Put the value of ``table.key=value`` into the tables; return the path of its key."""
    key, equals, text = said.partition("=")
    path = _keys(key)
    if not equals or path is None:
        raise ConfigError(f"--set {said}: write --set table.key=value, as --set data.batch=8")
    for key in path[:-1]:
        tables = tables.setdefault(key, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--set {said}: {key} is a value, not a table")
    tables[path[-1]] = text
    with contextlib.suppress(tomllib.TOMLDecodeError):
        # a word without quotes is text
        tables[path[-1]] = tomllib.loads(f"v = {text}")["v"]
    return path


def _keys(text: str) -> Keys | None:
    """Split a dotted key into its names; None if it is not a key."""
    try:
        found: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    while isinstance(found, dict):
        if len(found) != 1:
            return None
        ((key, found),) = found.items()
        path.append(key)
    return tuple(path)


def _lines(text: str) -> dict[Keys, int]:
    """Map the path of each key or table to its line.

    >>> found = _lines("steps = 1\\n[mesh]  # axes\\nx = 2\\n[optimizer.lr]\\nname = 'cosine'")
    >>> found["optimizer", "lr", "name"]
    5
    """
    found: dict[Keys, int] = {}
    table: Keys = ()
    for number, line in enumerate(text.splitlines(), 1):
        # tomllib gives no line numbers, so headers and keys are found again
        head = re.match(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$", line)
        if head and (keys := _keys(head[1])):
            table = keys
            found.setdefault(table, number)
            continue
        # the first "=" that ends a valid key: keys may be quoted and contain "="
        for equals in re.finditer("=", line):
            if keys := _keys(line[: equals.start()].strip()):
                found.setdefault(table + keys, number)
                break
    return found


# ---------------------------------------------------------------- a table as a call


def call(
    function: Callable[..., Any],
    config: Config,
    path: Sequence[str],
    *given: object,
    beside: Iterable[str] = (),
    **more: object,
) -> Any:
    """Call ``function`` with the table at ``path`` as its arguments, in addition to those given.

    ``beside``  keys of the table for other functions.
    Raises: ConfigError in one line, also for errors of the function itself.
    """
    kwargs = arguments(function, config, path, len(given), more, beside)
    try:
        return function(*given, **kwargs, **more)
    except ShardError as e:
        said = [k for k in kwargs if re.search(rf"(?<!\w){re.escape(k)}\s*=", e.message)]
        raise config.error((*path, *said[:1]), told(e)) from e
    except ConfigError:  # from an inner table
        raise
    except Exception as e:
        # the user's code: its message; with its line unless a value is refused
        said = " ".join(str(e).split())
        if not said or not isinstance(e, ValueError | OSError):
            said = one_line(e, traceback.extract_tb(e.__traceback__))
        raise config.error(path, f"{named_as(function)} refuses it: {said}") from e


def optional(function: Callable[..., Any], config: Config, table: str) -> Any:
    """Call ``function`` with the keys of a table; None without the table."""
    return call(function, config, (table,)) if table in config.tables else None


def make(config: Config, path: Sequence[str]) -> Any:
    """Call the function that the table's ``make`` names with its other keys.

    Raises: ConfigError.
    """
    if "make" not in config.table(*path):
        raise missing(config, path, ["make"], 'make must be given, as make = "module:function"')
    function = imported(config.table(*path)["make"], partial(config.error, (*path, "make")))
    return call(function, config, path, beside=("make",))


def one_line(e: Exception, frames: Sequence[traceback.FrameSummary]) -> str:
    """Format an error in one line: its type, message, and the last of these frames."""
    words = ": ".join(filter(None, [type(e).__name__, " ".join(str(e).split())]))
    return words + "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in frames[-1:])


def imported(text: object, error: Callable[[str], ConfigError] = ConfigError) -> Callable[..., Any]:
    """Import ``module:function``, from the working directory too.

    ``error``  makes the error of a message.
    Raises: ConfigError.

    >>> imported("torch.nn:Linear").__name__
    'Linear'
    """
    if not isinstance(text, str) or not re.fullmatch(r"[\w.]+:[\w.]+", text):
        raise error(f'write "module:function", not {shown(text)}')
    module, _, name = text.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module)
    except ImportError as e:
        raise error(f"cannot import {module!r}: {e}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            hint = near(part, [n for n in vars(found) if not n.startswith("_")])
            raise error(f"{module!r} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise error(f"{text!r} is {shown(found)}, nothing to call")
    return found


def arguments(
    function: Callable[..., object],
    config: Config,
    path: Sequence[str],
    given: int = 0,
    taken: Iterable[str] = (),
    beside: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the keys of the table at ``path`` as arguments of ``function``, each of its type.

    ``given``   number of its first arguments that are given already; ``taken``  the same by name.
    ``beside``  keys of the table for other functions.
    Raises: ConfigError for unknown keys, wrong types, and missing arguments.
    """
    table, others = config.table(*path), list(beside)
    known = {n: p for n, p in keys_of(function, given, taken).items() if n not in others}
    hints = _hints(function)
    loose = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    out = {}
    for key, value in table.items():
        if key in others:
            continue
        if key not in known and not loose:
            raise unknown(config, path, key, [*known, *others])
        out[key] = typed(value, hints.get(key, Any), config, (*path, key))
    lacking = [n for n, p in known.items() if p.default is p.empty and n not in table]
    if lacking:
        raise config.error(path, f"{', '.join(lacking)} must be given, for {named_as(function)}")
    return out


def unknown(config: Config, path: Sequence[str], key: str, known: Iterable[str]) -> ConfigError:
    """Build the error for a key that no function takes."""
    names = list(known)
    listed = ", ".join(names) or "no keys"
    return config.error((*path, key), f"unknown key{near(key, names)} (it may have {listed})")


def missing(config: Config, path: Sequence[str], wanted: Sequence[str], text: str) -> ConfigError:
    """Build the error for a missing key, or for the misspelt one in its place."""
    for key in config.table(*path):
        if similar(key, wanted, 1, 0.5):
            return unknown(config, path, key, wanted)
    return config.error(path, text)


def keys_of(
    function: Callable[..., Any], positional: int = 0, taken: Iterable[str] = ()
) -> dict[str, inspect.Parameter]:
    """List the arguments of ``function`` that a table may give."""
    rows = list(inspect.signature(function).parameters.items())[positional:]
    loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p for n, p in rows if p.kind not in loose and n not in set(taken)}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.__init__ if isinstance(function, type) else function
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        # a foreign function's own annotations
        return {}


def named_as(function: Callable[..., Any]) -> str:
    """Return a function's name for a message."""
    return getattr(function, "__qualname__", repr(function))


def told(e: ShardError) -> str:
    """Return the first line of an error, with the keys that its fix suggests, or its remark."""
    code, _, remark = e.fix.partition("  # ")
    if code.startswith(("x=", "y=")):
        remark = f"write {e.fix}"
    return "; ".join(filter(None, (e.message.split("\n")[0], remark)))


def near(word: object, words: Iterable[str]) -> str:
    """Format a hint at the nearest of ``words``.

    >>> near("bacth", ["batch", "seed"])
    "; did you mean 'batch'?"
    """
    found = similar(word, words, 1, 0.5) if isinstance(word, str) else ()
    return meant(found)


def shown(value: object) -> str:
    """Format a value as in a file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a table"
    return f'"{value}"' if isinstance(value, str) else str(value)


def takes_file(parser: argparse.ArgumentParser, name: str = "file", text: str = "") -> None:
    """Add the arguments of a command for a TOML file."""
    parser.add_argument(name, help=text or "a TOML file, see docs/command.md")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="replace a key")


def answer(given: argparse.Namespace, data: object, text: object) -> int:
    """Print a command's answer, as JSON if that is asked for."""
    if given.json:
        text = json.dumps(data, default=repr)
    print(text)
    return 0


# ---------------------------------------------------------------- types


class _Unfit(Exception):
    """Raised for a value of the wrong type: the right one, and a hint."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


def typed(value: object, hint: object, config: Config, path: Sequence[str]) -> Any:
    """Convert a value of the file to an annotated type.

    Numbers, text, lists and tables stay as they are; a dtype is its name, a schedule or a transform
    a number or a table with its ``name``, another function ``"module:function"``.
    Raises: ConfigError.
    """
    try:
        return _fit(value, hint, config, path)
    except _Unfit as e:
        raise config.error(path, f"must be {e}, not {shown(value)}{e.hint}") from None


def _fit(value: object, hint: object, config: Config, path: Sequence[str]) -> object:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, inner, config, path)
    if origin is typing.Literal:
        # True == 1 in Python, but not in a file
        if value not in inner or isinstance(value, bool) != isinstance(inner[0], bool):
            raise _Unfit(f"one of {', '.join(map(shown, inner))}", near(value, map(str, inner)))
        return value
    if isinstance(hint, type):
        return _plain(value, hint, config, path)
    if origin is collections.abc.Callable:
        return _function(value, inner == ([int], float), config, path)
    if isinstance(origin, type):
        return _container(value, origin, inner, config, path)
    return value


def _plain(value: Any, hint: type, config: Config, path: Sequence[str]) -> object:
    """Convert a value to a class."""
    if hint in _PLAIN:
        kinds, text = _PLAIN[hint]
        # True is an int in Python, but not in a file
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            raise _Unfit(text)
        return float(value) if hint is float else value
    if hint is torch.dtype:
        if isinstance(value, str) and value in _DTYPES:
            return _DTYPES[value]
        raise _Unfit('the name of a dtype, as "bfloat16"', near(value, sorted(_DTYPES)))
    if hint is Transform and isinstance(value, Mapping):
        return named("optimizer", config, path)
    return value


_DTYPES = {n: d for n, d in vars(torch).items() if isinstance(d, torch.dtype)}


def _function(value: object, is_schedule: bool, config: Config, path: Sequence[str]) -> object:
    """Return the function of ``"module:function"``, or the schedule of a table."""
    if is_schedule and isinstance(value, Mapping):
        return named("schedule", config, path)
    if is_schedule:
        raise _Unfit(f'a table [{".".join(path)}] with name = "{next(iter(SCHEDULES))}"')
    if isinstance(value, str):
        return imported(value, partial(config.error, path))
    raise _Unfit('"module:function"')


def _container(
    value: object, origin: type, inner: Sequence[object], config: Config, path: Sequence[str]
) -> object:
    if issubclass(origin, collections.abc.Mapping) and not isinstance(value, Mapping):
        raise _Unfit("a table")
    if not issubclass(origin, collections.abc.Sequence | tuple):
        return value
    if not isinstance(value, list):
        raise _Unfit("a list")
    if len(inner) == 1 or (len(inner) == 2 and inner[1] is Ellipsis):
        return [_fit(v, inner[0], config, path) for v in value]
    return value


def _one_of(value: object, hints: Sequence[object], config: Config, path: Sequence[str]) -> object:
    texts, hinted = [], ""
    for hint in hints:
        if hint is type(None):  # TOML has none
            continue
        try:
            return _fit(value, hint, config, path)
        except _Unfit as e:
            texts.append(str(e))
            hinted = hinted or e.hint
    raise _Unfit(" or ".join(dict.fromkeys(texts)), hinted)


_PLAIN: dict[Any, tuple[type | tuple[type, ...], str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    **dict.fromkeys((str, os.PathLike, Path), (str, "text")),
    dict: (Mapping, "a table"),
    list: (list, "a list"),
    type(None): ((), "not given"),
}
"""Annotation -> the types that a file's value may have, and their text."""


# ---------------------------------------------------------------- transforms and schedules by name


def named(
    kind: str, config: Config, path: Sequence[str], beside: Iterable[str] = (), **more: object
) -> Any:
    """Make the transform or schedule of a table's ``name``, with its other keys.

    ``kind``  "optimizer" or "schedule".
    Raises: ConfigError.
    """
    known: Mapping[str, Callable[..., Any]] = SCHEDULES if kind == "schedule" else TRANSFORMS
    name = config.table(*path).get("name")
    if name is None:
        text = f'name must be given, as name = "{next(iter(known))}"'
        raise missing(config, path, ["name"], text)
    if isinstance(name, str) and name.startswith("torch.optim.") and kind == "optimizer":
        return _torchs(name, config, path, ("name", *beside))
    if name not in known:
        text = f"no {kind} {shown(name)}{near(name, known)} (there are {', '.join(known)})"
        raise config.error((*path, "name"), text)
    return call(known[name], config, path, beside=("name", *beside), **more)


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    n: getattr(optim, n)
    for n in "adamw adam sgd lion lamb muon adafactor adam8bit adagrad rmsprop".split()
}
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    n: getattr(optim, n) for n in "constant linear cosine warmup_cosine wsd".split()
}


def _torchs(name: str, config: Config, path: Sequence[str], beside: Iterable[str]) -> Transform:
    """Make a transform from one of torch's own optimizers."""
    known = [n for n in vars(torch.optim) if isinstance(getattr(torch.optim, n), type)]
    last = name.rpartition(".")[2]
    if last not in known:
        raise config.error((*path, "name"), f"torch.optim has no {last!r}{near(last, known)}")
    made = getattr(torch.optim, last)
    kwargs = arguments(made, config, path, 1, (), beside)
    try:
        return optim.from_torch(made, **kwargs)
    except ShardError as e:
        raise config.error(path, told(e)) from e
