"""``--print-config``: the file that a run takes, with every ``--set`` and each default in a comment."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.command.config import Config, read
from shardlib.command.keys import Key, listed
from shardlib.command.train import check

__all__ = ["printed"]


def printed(config: Config) -> str:
    """Format a configuration as TOML, and the keys that it does not have as comments.

    >>> print(printed(Config({"steps": 2, "checkpoint": {"path": "out"}})))
    steps = 2
    # seed = 0
    # accumulate = 1
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
    lines = [f"[{'.'.join(map(_name, path))}]"] if path else []
    lines += [f"{_name(k)} = {_value(v)}" for k, v in table.items() if not isinstance(v, Mapping)]
    variant = table.get("name", table.get("recipe"))
    for key in known:
        base, _, which = key.table.partition(", ")
        mine = base == ".".join(path) and (
            not which or which.endswith((f'"{variant}"', f"{variant}"))
        )
        if mine and key.default and key.name not in table:
            lines.append(f"# {key.name} = {_default(key.default)}".rstrip())
    if lines:
        yield lines
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            yield from _tables(inner, (*path, name), known)


def _default(text: str) -> str:
    """Format a default of Python: text in quotes, and nothing for None, which TOML lacks."""
    if text in ("None", "True", "False"):
        return {"None": ""}.get(text, text.lower())
    return text if re.match(r"[-+\d(\[{]", text) else _value(text)


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: object) -> str:
    """Format a value as TOML does: text as in JSON, but for the one character that JSON keeps."""
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_name(k)} = {_value(v)}' for k, v in value.items())}}}"
    return str(value)


def main(given: argparse.Namespace) -> int:
    """Print the configuration of ``shardlib train``."""
    config = read(given.file, given.set)
    check(config)
    print(json.dumps({"config": config.tables}) if given.json else printed(config))
    return 0
