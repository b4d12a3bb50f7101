"""Commands: ``python -m shardlib desync FOLDER``, ``python -m shardlib check MODULE:FUNCTION``."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from shardlib.checking.proof import check_model
from shardlib.desync import desync
from shardlib.errors import ShardError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it went well, 1 if it found a fault, 2 if it was not understood."""
    parser = argparse.ArgumentParser(prog="shardlib", description="Sharded PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("desync", help="where the ranks of a failed job first parted")
    one.add_argument("folder", help="what the error of the job names")
    two = commands.add_parser("check", help="prove a sharded model against one device")
    two.add_argument("case", help="MODULE:FUNCTION, which returns the arguments of sl.check_model")
    given = parser.parse_args(arguments)
    try:
        if given.command == "desync":
            print(desync(given.folder))
            return 0
        return _check(given.case)
    except ShardError as e:
        print(e, file=sys.stderr)
        return 1


def _check(case: str) -> int:
    module, _, name = case.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    made = getattr(importlib.import_module(module), name)()
    proof = check_model(**made) if isinstance(made, dict) else check_model(*made)
    print(proof)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
