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

from shardlib.errors import RankFailed, ShardError, clipped, meant, similar

# name -> help; each is the module of that name in this folder
COMMANDS = {
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


def main(arguments: Sequence[str]) -> int:
    """Run one command, and return its exit code."""
    parser = _parser(*arguments[:1])
    try:
        said = parser.parse_args(arguments)
    except SystemExit:
        # argparse has printed the help
        return DONE
    except _Wrong as e:
        return _report(clipped(str(e)), "", WRONG, "--json" in arguments)
    if said.command != "plan":
        gc.enable()
    try:
        if getattr(said, "print_config", False):
            return _module("keys").print_config(said)
        return _module(said.command).main(said)
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
    from shardlib.command.config import ConfigError, one_line

    if isinstance(e, ConfigError):
        return WRONG, str(e)
    if not isinstance(e, ShardError):
        own = [f for f in traceback.extract_tb(e.__traceback__) if not _foreign(f.filename)]
        return FAILED, f"{one_line(e, own)}; --traceback shows the way there"
    words = _without_frames(e)
    if command in ("plan", "ckpt", "desync"):  # they run no user's code
        words = " ".join(f"{e.op}: {e.message}".split())
    return (FAILED, LOST)[isinstance(e, RankFailed)], _noted(e, words)


def script() -> None:
    """Run the entry point of the console's ``shardlib`` and of ``python -m shardlib``."""
    # with it on, importing torch and transformers, and planning, take a fifth longer
    gc.disable()
    if sys.argv[1:2] == ["plan"]:
        _keep_stdout()
    raise SystemExit(main(sys.argv[1:]))


def _keep_stdout() -> None:
    """Keep stdout to what this process prints; what a solver writes from C++ goes to stderr."""
    own = sys.stdout
    own.flush()
    sys.stdout = open(os.dup(1), "w", encoding=own.encoding, errors=own.errors)  # noqa: SIM115
    os.dup2(2, 1)


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
            message += meant(similar(wrong[1], choices, 1, 0.5))
        raise _Wrong(f"{self.prog}: {message}")


def _parser(name: str = "") -> argparse.ArgumentParser:
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
    at = "".join(f" ({Path(file).name}:{line})" for file, line in own[-1:])
    words = next((line for line in last if re.match(r"[\w.]+(:|$)", line)), "")
    return f"{head.strip()} {words}{at}; --traceback shows the way there"


def _foreign(file: str) -> bool:
    here = str(Path(__file__).parent.parent)
    return file.startswith((here, "<")) or any(
        p in file for p in ("/torch/", "/optree/", "/lib/python")
    )


def _failed(said: argparse.Namespace, code: int, text: str) -> int:
    """Print an error, on rank 0 alone if every rank has the same one."""
    if not said.traceback:
        text = clipped(text)
    if os.environ.get("RANK") in (None, "", "0") or code != WRONG:
        _report(text, f"shardlib {said.command}: ", code, said.json)
    return code


def _report(error: str, head: str, code: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": error, "code": code}))
    else:
        print(f"{head}{error}", file=sys.stderr)
    return code
