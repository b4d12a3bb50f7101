"""``shardlib explain run.toml``: each operation of a step, on the meta device."""

import argparse

from shardlib.command.config import Config, answer, takes_file
from shardlib.command.from_config import batches, built, mesh_of, rows_of
from shardlib.command.train import checked
from shardlib.mesh import use_mesh
from shardlib.planning.cluster import Cluster
from shardlib.planning.explain import explain
from shardlib.planning.explanation import Explanation


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    takes_file(parser)
    parser.add_argument("--by", default="order", choices=["order", "bytes", "memory"])


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    found = explain_run(checked(given.file, given.set))
    return answer(given, found.json(), found.text(given.by))


def explain_run(config: Config, cluster: str | Cluster = "h100") -> Explanation:
    """Explain a step of a file's run: forward, backward and the optimizer's memory."""
    with use_mesh(mesh_of(config, "record")):
        made = built(config, values=False)
        batch = next(iter(batches(made, rows_of(config))))
        params = made.params if "stages" in config.tables else made.start()
        how = {"tx": made.tx, "microbatches": config.tables.get("microbatches")}
        return explain(made.loss, params, (batch,), cluster=cluster, **how)
