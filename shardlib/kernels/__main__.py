"""Build the kernels, or list them with ``info``: ``python -m shardlib.kernels build --arch 80``."""

import argparse
import sys
from collections.abc import Sequence

from shardlib.errors import ShardError
from shardlib.kernels import build, info
from shardlib.kernels.build import ARCHS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 if it succeeded, 1 if nothing was built."""
    parser = argparse.ArgumentParser(prog="python -m shardlib.kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="compile cuda/*.cu into the user's cache")
    one.add_argument(
        "--arch",
        default=",".join(map(str, ARCHS)),
        help="compute capabilities, a comma between (80,90)",
    )
    one.add_argument("--host", action="store_true", help="the same sources by g++, for the CPU")
    commands.add_parser("info", help="which kernels are active, and why")
    given = parser.parse_args(arguments)
    if given.command == "build":
        try:
            archs = [int(a) for a in given.arch.split(",")]
        except ValueError:
            parser.error(f"--arch {given.arch}: numbers with a comma between, as in 80,90")
        try:
            print(build("host" if given.host else "cuda", archs))
        except ShardError as e:
            print(e, file=sys.stderr)
            return 1
    for name, what in info().items():
        print(f"{name}: {what}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
