"""``shardlib COMMAND ...``: runs a subcommand, and prints an error in one line.

Exit codes: 0 done; 1 failed: a run or a check found a fault; 2 wrong configuration or arguments;
3 a rank died, left or stopped; 4 no plan fits; 130 interrupted.
"""

import argparse
import gc
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardlib.errors import RankFailed, ShardError, clipped, similar

__all__ = ["COMMANDS", "main", "parser_of"]

COMMANDS = {  # name -> help; each is the module of that name in this folder
    "train": "train as a TOML file says, and go on where a run was killed",
    "plan": "which mesh: what a step moves and holds on each, and whether it fits",
    "explain": "every operation of a step: layouts, algorithm, bytes, memory; nothing runs",
    "trace": "run a step and draw its timeline, for Perfetto or as a picture",
    "check": "prove a sharded model against one device",
    "ckpt": "list, verify, reshard and convert checkpoints",
    "keys": "every key that a TOML file may have, with its type and default",
    "desync": "where the ranks of a failed job first parted",
    "completion": "a script for the shell that completes commands, options and keys",
}

DONE, FAILED, WRONG, LOST, UNFIT, INTERRUPTED = 0, 1, 2, 3, 4, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(given[0] if given else "")
    try:
        said = parser.parse_args(given)
    except SystemExit:  # argparse has printed the help
        return DONE
    except _Wrong as e:
        as_json = "--json" in given
        print(
            json.dumps({"error": clipped(str(e)), "code": WRONG}) if as_json else clipped(str(e)),
            file=None if as_json else sys.stderr,
        )
        return WRONG
    if said.command != "plan":
        gc.enable()
    try:
        name = "print_config" if getattr(said, "print_config", False) else said.command
        return _module(name).main(said)
    except BrokenPipeError:  # the reader closed its end, as `| head` does
        # Python flushes stdout at exit, which would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt as e:
        return _failed(said, INTERRUPTED, _noted(e, "interrupted"))
    except Exception as e:
        if said.traceback:
            traceback.print_exc()
        return _failed(said, *_told(e, said.command))


def _told(e: Exception, command: str) -> tuple[int, str]:
    """Return the exit code of an error, and its text in one line."""
    from shardlib.command.config import ConfigError

    if isinstance(e, ConfigError):
        return WRONG, str(e)
    if isinstance(e, ShardError):
        code = LOST if isinstance(e, RankFailed) else FAILED
        line = command in ("plan", "ckpt", "desync")  # they run no user's code
        words = " ".join(f"{e.op}: {e.message}".split()) if line else _without_frames(e)
        return code, _noted(e, words)
    return FAILED, f"{_in_one_line(e)}; --traceback shows the way there"


def script() -> None:
    """Run the entry point of the console's ``shardlib`` and of ``python -m shardlib``."""
    gc.disable()  # with it on, importing torch and transformers, and planning, take a fifth longer
    raise SystemExit(main())


def _noted(e: BaseException, text: str) -> str:
    return "; ".join([text, *getattr(e, "__notes__", [])])


class _Wrong(Exception):
    """Raised for wrong arguments."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with the nearest valid choice."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            choices = [c.strip(" '") for c in wrong[2].split(",")]
            found = similar(wrong[1], choices, 1, 0.5)
            message += f"; did you mean {found[0]!r}?" if found else ""
        raise _Wrong(f"{self.prog}: {message}")


def _parser(name: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="shardlib",
        description="Sharded PyTorch at a prompt.",
        epilog=(__doc__ or "").partition("\n\n")[2],  # python -OO has none
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, text in COMMANDS.items():
        one = commands.add_parser(command, help=text, description=text.capitalize() + ".")
        _common(one)
        if command == name:
            _module(command).add(one)
    return parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of one command's arguments."""
    parser = argparse.ArgumentParser()
    _common(parser)
    _module(command).add(parser)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every command."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--traceback", action="store_true", help="of an error, show the way there too"
    )


def _module(command: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"shardlib.command.{command}")


def _without_frames(e: Exception) -> str:
    """Format an error without frames; for a rank's error, with the lines around its traceback."""
    head, found, rest = str(e).partition("Traceback (most recent call last):\n")
    if not found:
        return str(e)
    frames = re.findall(r'^  File "(.+)", line (\d+)', rest, re.M)
    last = re.findall(r"^(?! |Traceback)\S.*", rest, re.M)
    own = [(file, line) for file, line in frames if not _foreign(file)]
    at = f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""
    words = next((line for line in last if re.match(r"[\w.]+(:|$)", line)), "")
    return f"{head.strip()} {words}{at}; --traceback shows the way there"


def _in_one_line(e: Exception) -> str:
    """Format an error of user code: type, message, and its line outside torch and shardlib."""
    own = [f for f in traceback.extract_tb(e.__traceback__) if not _foreign(f.filename)]
    at = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    words = " ".join(str(e).split())
    return f"{type(e).__name__}: {words}{at}" if words else f"{type(e).__name__}{at}"


def _foreign(file: str) -> bool:
    here = str(Path(__file__).parent.parent)
    return file.startswith((here, "<")) or any(
        p in file for p in ("/torch/", "/optree/", "/lib/python")
    )


def _failed(said: argparse.Namespace, code: int, text: str) -> int:
    """Print an error, on rank 0 alone if every rank has the same one."""
    text = text if said.traceback else clipped(text)
    if os.environ.get("RANK") in (None, "", "0") or code not in (WRONG,):
        if said.json:
            print(json.dumps({"error": text, "code": code}))
        else:
            print(f"shardlib {said.command}: {text}", file=sys.stderr)
    return code
