"""``shardlib explain run.toml``: each operation of a step, on the meta device."""

import argparse

from shardlib.command.config import Config, answer, read
from shardlib.command.from_config import batches, built, mesh_of, rows_of
from shardlib.command.train import check
from shardlib.mesh import use_mesh
from shardlib.planning.explain import Explanation, explain


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("file", help="a TOML file, see docs/command.md")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="replace a key")
    parser.add_argument("--by", default="order", choices=["order", "bytes", "memory"])


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    config = read(given.file, given.set)
    check(config)
    found = explain_run(config)
    return answer(given, found.json(), found.text(given.by))


def explain_run(config: Config) -> Explanation:
    """Explain a step of a file's run: forward, backward and the optimizer's memory."""
    mesh = mesh_of(config, "record")
    with use_mesh(mesh):
        made = built(config, mesh, values=False)
        batch = next(iter(batches(config, rows_of(config), made.rules, mesh)))
        return explain(made.loss, made.params, (batch,), tx=made.tx)
