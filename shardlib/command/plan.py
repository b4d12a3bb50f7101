"""``shardlib plan MODEL --ranks 8,64``: how to train a model on so many ranks."""

import argparse
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlib.capacity import bytes_in
from shardlib.command.config import Config, ConfigError, answer, near, optional, takes_file, told
from shardlib.command.explain import explain_run
from shardlib.command.from_config import (
    axes_of,
    hugging_face,
    loss_function,
    module_of,
    optimizer,
    rows_of,
    under_launcher,
)
from shardlib.command.trace import check_out
from shardlib.command.train import checked
from shardlib.errors import BadArgument, NoPlanFits
from shardlib.mesh import Link
from shardlib.optim import Precision
from shardlib.planning.cluster import CLUSTERS, Cluster, cluster_of, measured
from shardlib.planning.explanation import size
from shardlib.planning.plan import Plan, plan
from shardlib.seeing import PlanChart


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    text = "a Hugging Face directory (its config.json is enough), MODULE:FUNCTION, or a TOML file"
    takes_file(parser, "model", text)
    parser.add_argument(
        "--ranks",
        type=_several,
        default=[],
        metavar="N",
        help="how many, as 8 or 8,64,512; of a file its mesh's",
    )
    counts = {
        "batch": "rows of a step, over all ranks and micro-batches; of a file its data's",
        "sequence": "tokens of a row; of a file its data's",
        "microbatches": "of a step; else as many as the memory asks for",
        "pipe": "stages of a pipeline; else every number is considered",
    }
    for name, text in counts.items():
        parser.add_argument(f"--{name}", type=_count, help=text)
    parser.add_argument("--memory", type=_bytes, help="bytes of one rank, as 80GiB")
    parser.add_argument("--host", type=_bytes, help="of a rank's host memory, for memory tiers")
    parser.add_argument(
        "--picture", default="", help="what ranks hold and where a step's seconds go: .png, .svg"
    )
    parser.add_argument(
        "--cluster", default="h100", metavar="NAME",
        help=f"of these nodes: {', '.join(CLUSTERS)}, or a file that ends in .toml",
    )  # fmt: skip
    parser.add_argument(
        "--measure", default="", metavar="FILE",
        help="measure this device, and the links between torchrun's ranks; write the cluster: .toml",
    )  # fmt: skip
    for which, where in (("inside", "within a node"), ("between", "between nodes")):
        parser.add_argument(
            f"--{which}", type=_link, metavar="SECONDS,BYTES",
            help=f"a link {where}: seconds per message, bytes per second, as 5e-6,200e9; "
            "else what torchrun's ranks measure, else the cluster's",
        )  # fmt: skip
    parser.add_argument(
        "--node", type=_count, default=0, help="ranks of a node; else the cluster's"
    )


def main(given: argparse.Namespace) -> int:
    """Run the command: return 0, or 4 if nothing fits for one of the numbers of ranks."""
    check_out("plan", "--picture", given.picture, ".png", ".svg", ".pdf")
    check_out("plan", "--measure", given.measure, ".toml")
    config = Config({})
    if given.model.endswith(".toml"):
        config = checked(given.model, given.set, whole=False)
        if "tiers" in config.tables:
            return _in_tiers(given, config)
    model = _model(given, config)
    ranks, batch = _step(given, config)
    cluster = _cluster(given)
    if under_launcher() and int(os.environ["RANK"]) > 0:
        # it took part in the measurement; one rank plans
        return 0
    found = {n: _planned(given, config, model, batch, n, cluster) for n in ranks}
    count = sum(p.numel() for p in model.parameters())
    rows, *rest = optree.tree_leaves(batch)[0].shape
    shape = " x ".join(map(str, [rows, *rest]))
    lines = [f"{type(model).__name__}, {count:,} parameters, {shape} a step"]
    for n, p in found.items():
        if isinstance(p, Plan):
            write = "\n".join(f"    {line}" for line in p.toml().splitlines() if line)
            lines.append(f"\n{n} ranks: {p.summary()}\nwrite\n{write}")
        else:
            lines.append(f"\n{n} ranks: {p.message}")
    lines.append(cluster.told())
    plans = [p for p in found.values() if isinstance(p, Plan)]
    if given.picture and plans:
        PlanChart(plans).save(given.picture)
        lines.append(f"wrote {given.picture}")
    data = [{"ranks": n, "fits": isinstance(p, Plan), **_plain(p)} for n, p in found.items()]
    answer(given, data, "\n".join(lines))
    return 4 * any(isinstance(p, NoPlanFits) for p in found.values())


def _planned(
    given: argparse.Namespace, config: Config, model: nn.Module, batch: Any, ranks: int,
    cluster: Cluster,
) -> Plan | NoPlanFits:  # fmt: skip
    """Return the plan, or the error where none fits."""
    leaves, tree = optree.tree_flatten(batch)
    policy = optional(Precision, config, "precision")
    if policy is not None and policy.param is not None:
        model = model.to(policy.param)

    def loss(apply: Any, params: Any, *inputs: Tensor) -> Tensor:
        if policy is not None:
            params = policy.to_compute(params)
        rows = optree.tree_unflatten(tree, inputs)
        return loss_function(config, model, apply)(params, rows)

    tx = None
    if config.table("optimizer"):
        # the plan says whether there is ZeRO
        own = {k: v for k, v in config.table("optimizer").items() if k != "zero"}
        tx = optimizer(replace(config, tables={**config.tables, "optimizer": own}), model)
    how: dict[str, Any] = {n: getattr(given, n) for n in ("memory", "host", "microbatches", "pipe")}
    try:
        return plan(model, leaves, ranks=ranks, optimizer=tx, cluster=cluster, loss=loss, **how)  # type: ignore[arg-type]
    except NoPlanFits as e:
        return e
    except BadArgument as e:
        raise ConfigError(f"--{e.message}" if re.match(r"\w+=", e.message) else told(e)) from e


def _in_tiers(given: argparse.Namespace, config: Config) -> int:
    """Print where the bytes of a file with ``[tiers]`` lie on one rank, and a step's seconds."""
    cluster, held = _cluster(given), config.table("tiers").get("host")
    most = None if held is None else bytes_in(held)
    found = explain_run(config, cluster)
    use = found.tiers
    assert use is not None, "a file with [tiers] has its parameters in them"
    fits = most is None or sum(use.host.values()) <= most
    text = f"device      {size(use.device + found.transient)}: parameters {size(use.device)}\n{use}"
    if most is not None and not fits:
        text += f"\nthe host may hold {size(int(most))}"
    data = {"fits": fits, "transient": found.transient, **asdict(use), "host": dict(use.host)}
    answer(given, data, f"{text}\n{cluster.told()}")
    return 4 * (not fits)


def _cluster(given: argparse.Namespace) -> Cluster:
    """Return the cluster, with links from the arguments or measured by this job's ranks.

    Raises: ConfigError.
    """
    try:
        found = cluster_of(given.cluster)
    except BadArgument as e:
        raise ConfigError(f"--cluster {e.message}{near(given.cluster, CLUSTERS)}") from e
    if given.measure or (under_launcher() and not (given.inside and given.between)):
        found = measured(found)
        if under_launcher():
            # one rank plans, the others end here
            dist.destroy_process_group()
    said = {n: link for n in ("inside", "between") if (link := getattr(given, n)) is not None}
    node = given.node or found.node
    found = replace(found, **said, node=node, source=_source(found.source, said))
    if given.memory is not None:
        found = replace(found, memory=given.memory)
    if given.measure and not int(os.environ.get("RANK", 0)):
        found.save(given.measure)
    return found


def _source(source: str, said: Mapping[str, Link]) -> str:
    """Write where the figures of the links come from, if some are given."""
    if not said:
        return source
    others = [f"{n} {source}" for n in ("inside", "between") if n not in said]
    return ", ".join([f"{n} as given" for n in said] + others) if others else "as given"


def _model(given: argparse.Namespace, config: Config) -> nn.Module:
    """Return the module on the meta device.

    Raises: ConfigError.
    """
    if config.tables:
        return module_of(config, meta=True).module
    if os.path.isdir(given.model):
        try:
            return hugging_face(given.model, "init").module
        except BadArgument as e:
            raise ConfigError(e.message.removeprefix("directory=")) from e
    if ":" in given.model:
        return module_of(Config({"model": {"make": given.model}}), meta=True).module
    text = f"{given.model}: no directory, no MODULE:FUNCTION and no file that ends in .toml"
    raise ConfigError(text)


def _step(given: argparse.Namespace, config: Config) -> tuple[list[int], Any]:
    """Return the numbers of ranks, and the batch of a step on the meta device.

    Raises: ConfigError.
    """
    data, ranks = config.table("data"), given.ranks
    accumulated = int(config.tables.get("accumulate", 1))  # each of [data]'s batch
    rows = given.batch or accumulated * int(data.get("batch", 0))
    if rows < 1:
        raise ConfigError("--batch must be given, as --batch 1024")
    if not ranks and config.tables:
        ranks = [abs(math.prod(axes_of(config).values()))]
    if not ranks:
        raise ConfigError("--ranks must be given, as --ranks 8,64")
    length = given.sequence
    for name in ("text", "documents", "tokens"):
        if length is None and isinstance(data.get(name), Mapping):
            length = int(data[name].get("context", 0))
    if length is None and "dataset" in data:
        made: Any = optree.tree_map(
            lambda x: torch.empty(rows, *x.shape, dtype=x.dtype, device="meta"),
            rows_of(config)[0],
        )
        return ranks, made
    if not length:
        raise ConfigError("--sequence must be given, as --sequence 1024")
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    return ranks, {"input_ids": ids, "labels": ids}


# ---------------------------------------------------------------- types of the arguments


def _count(text: str) -> int:
    if text.isdecimal() and 0 < int(text) <= 2**40:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: a whole number, 1 at least")


def _several(text: str) -> list[int]:
    return [_count(n) for n in text.split(",") if n]


def _link(text: str) -> Link:
    try:
        alpha, rate = map(float, text.split(","))
        if 0 <= alpha < math.inf and 0 < rate < math.inf:
            return Link(alpha, 1 / rate)
    except ValueError:
        pass
    what = "seconds per message and bytes per second, as 5e-6,200e9"
    raise argparse.ArgumentTypeError(f"{text}: {what}")


def _bytes(text: str) -> float:
    try:
        return bytes_in(text)
    except BadArgument:
        raise argparse.ArgumentTypeError(f"{text}: write 80GiB") from None


# ---------------------------------------------------------------- output


def _plain(found: Plan | NoPlanFits) -> dict[str, Any]:
    """Return a plan as JSON values."""
    if not isinstance(found, Plan):
        return {"why": found.message}
    cluster = asdict(found.asked.cluster)
    return {
        **found.json(),
        "links": {n: cluster[n] for n in ("inside", "between", "node", "source")},
    }
