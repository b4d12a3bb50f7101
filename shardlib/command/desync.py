"""``shardlib desync FOLDER``: the first collective at which a failed job's ranks differ."""

import argparse
import json

from shardlib.desync import desync

__all__: list[str] = []


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("folder", help="what the error of the job names")


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    found = desync(given.folder)
    print(json.dumps({"desync": str(found)}) if given.json else found)
    return 0
