"""``shardlib desync FOLDER``: the first collective at which a failed job's ranks differ."""

import argparse

from shardlib.command.config import answer
from shardlib.desync import desync


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("folder", help="what the error of the job names")


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    found = desync(given.folder)
    return answer(given, {"desync": str(found)}, found)
