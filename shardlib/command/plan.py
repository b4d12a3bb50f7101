"""``shardlib plan MODEL --ranks 8,64``: meshes for a model, with time and memory."""

import argparse
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import optree
import torch.distributed as dist
from torch import nn

from shardlib.capacity import bytes_in
from shardlib.command.config import Config, ConfigError, answer, near, takes_file, told
from shardlib.command.explain import explain_run
from shardlib.command.from_config import axes_of, hugging_face, module_of, rows_of, under_launcher
from shardlib.command.keys import explained
from shardlib.command.train import checked
from shardlib.errors import BadArgument
from shardlib.mesh import Link
from shardlib.planning.cluster import CLUSTERS, Cluster, measured
from shardlib.planning.explanation import size
from shardlib.planning.plan import RECIPES, Plan, Weighed, plan


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
    parser.add_argument("--cluster", default="h100", choices=[*CLUSTERS], help="of these nodes")
    doc = inspect.getdoc(plan) or ""
    for name, (kind, example) in _ARGUMENTS.items():
        parser.add_argument(f"--{name}", type=kind, help=explained(doc, name) + example)
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
    config = None
    if given.model.endswith(".toml"):
        config = checked(given.model, given.set, whole=False)
        if "tiers" in config.tables:
            return _in_tiers(given, config)
    model, said = _model(given, config)
    cluster = _cluster(given)
    if under_launcher() and int(os.environ["RANK"]) > 0:
        # it took part in the measurement; one rank plans
        return 0
    how = {k: v for k in _ARGUMENTS if (v := said.get(k, getattr(given, k))) is not None}
    try:
        found = {n: plan(model, n, cluster=cluster, **how) for n in said["ranks"]}
    except BadArgument as e:
        raise ConfigError(f"--{e.message}" if re.match(r"\w+=", e.message) else told(e)) from e
    count = sum(p.numel() for p in model.parameters())
    lines = [
        f"{type(model).__name__}, {count:,} parameters, "
        f"{said['batch']} x {said['sequence']} tokens a step"
    ]
    for n, p in found.items():
        lines.append(f"\n{n} ranks: {p}")
        if p.best is not None:
            lines.append(_tables(p.best, p.batch))
    answer(given, [{"ranks": n, **_plain(p)} for n, p in found.items()], "\n".join(lines))
    return 4 * any(p.best is None for p in found.values())


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
    """Return the cluster, with links from the arguments or measured by this job's ranks."""
    found = CLUSTERS[given.cluster]
    if under_launcher() and not (given.inside and given.between):
        found = measured(found)
        # one rank plans, the others end here
        dist.destroy_process_group()
    said = {n: link for n in ("inside", "between") if (link := getattr(given, n)) is not None}
    node = given.node or found.node
    return replace(found, **said, node=node, source=_source(found.source, said))


def _source(source: str, said: Mapping[str, Link]) -> str:
    """Write where the figures of the links come from, if some are given."""
    if not said:
        return source
    others = [f"{n} {source}" for n in ("inside", "between") if n not in said]
    return ", ".join([f"{n} as given" for n in said] + others) if others else "as given"


def _model(given: argparse.Namespace, config: Config | None) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module on the meta device; ranks, batch and sequence.

    ``config``  of a file, which was read.
    Raises: ConfigError.
    """
    said: dict[str, Any] = {n: getattr(given, n) or 0 for n in ("batch", "sequence", "accumulate")}
    ranks = given.ranks
    if config is not None:
        model = module_of(config, meta=True).module
        said = _of_file(config, said)
        if not ranks:
            ranks = [abs(math.prod(axes_of(config).values()))]
    elif os.path.isdir(given.model):
        try:
            model = hugging_face(given.model, "init").module
        except BadArgument as e:
            raise ConfigError(e.message.removeprefix("directory=")) from e
    elif ":" in given.model:
        model = module_of(Config({"model": {"make": given.model}}), meta=True).module
    else:
        text = f"{given.model}: no directory, no MODULE:FUNCTION and no file that ends in .toml"
        raise ConfigError(text)
    for key in ("batch", "sequence"):
        if said[key] < 1:
            raise ConfigError(f"--{key} must be given, as --{key} 1024")
    if not ranks:
        raise ConfigError("--ranks must be given, as --ranks 8,64")
    return model, {**said, "accumulate": said["accumulate"] or 1, "ranks": ranks}


def _of_file(config: Config, said: Mapping[str, int]) -> dict[str, Any]:
    """Return batch and sequence of a file, where the command line has none."""
    data = config.table("data")
    own = int(config.tables.get("accumulate", 1))  # each of [data]'s batch
    return {
        "batch": said["batch"] or own * int(data.get("batch", 0)),
        "sequence": said["sequence"] or _length(config, data),
        "accumulate": said["accumulate"] or own,
    }


def _length(config: Config, data: Mapping[str, Any]) -> int:
    """Count the tokens in a row of the data; 0 if its first field is not a sequence."""
    for name in ("text", "documents", "tokens"):
        if isinstance(data.get(name), Mapping):
            return int(data[name].get("context", 0))
    if "dataset" not in data:
        return 0
    first = optree.tree_leaves(rows_of(config)[0])[0]  # type: ignore[arg-type]
    return len(first) if getattr(first, "ndim", 0) == 1 else 0


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


def _recipes(text: str) -> list[str]:
    names = [n for n in text.split(",") if n] or [text]
    for n in names:
        if n not in RECIPES:
            hint = f"{near(n, RECIPES)} (there are {', '.join(RECIPES)})"
            raise argparse.ArgumentTypeError(f"{n}{hint}")
    return names


_ARGUMENTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "batch": (_count, ""),
    "sequence": (_count, ""),
    "accumulate": (_count, ""),
    "memory": (_bytes, ", as 80GiB"),
    "state": (float, ""),
    "recipe": (_recipes, ", as megatron1d,fsdp"),
    "most": (int, ""),
    "pipe": (_count, ""),
}
"""Argument of ``sl.plan`` -> its type here, and an example of it."""


# ---------------------------------------------------------------- output


def _plain(found: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    return {
        "fits": found.best is not None,
        "memory": found.memory,
        "batch": found.batch,
        "links": _links(found.cluster),
        "looked": found.looked,
        "table": [_row(w) for w in found.table],
    }


def _links(cluster: Cluster | None) -> dict[str, Any]:
    if cluster is None:
        return {}
    plain = asdict(cluster)
    return {n: plain[n] for n in ("inside", "between", "node", "source")}


def _row(w: Weighed) -> dict[str, Any]:
    way = {n: getattr(w.way, n) for n in ("recipe", "mesh", "stage", "remat", "accumulate")}
    held = "parameters gradients state saved temporary peak bytes messages seconds".split()
    figures = {n: float(getattr(w, n)) for n in held}
    return {**way, "mesh": dict(w.way.mesh), "fits": w.fits, **figures}


def _tables(w: Weighed, batch: int) -> str:
    """Format the tables of a file that trains this way."""
    count = w.way.accumulate
    lines = []
    piped = w.way.pipe > 1
    if count > 1:
        lines.append(f"{'microbatches' if piped else 'accumulate'} = {count}")
    lines += ["[mesh]", *(f"{a} = {n}" for a, n in w.way.mesh.items())]
    lines += ["[layout]", f'recipe = "{w.way.recipe}"', "pad = true"]
    if piped:
        lines += ["[stages]", 'axis = "pipe"']
    # a batch is cut into micro-batches, or is one of several
    lines += ["[data]", f"batch = {batch if piped else batch // count}"]
    if w.way.stage:
        axis = ", ".join(f'"{a}"' for a in w.way.copies)
        if len(w.way.copies) > 1:
            axis = f"[{axis}]"
        lines += ["[optimizer.zero]", f"axis = {axis}", f"stage = {w.way.stage}"]
    if w.way.remat:
        lines += ["[remat]", *(f'"{p}.*" = "{w.way.remat}"' for p in w.layers)]
    return "write\n" + "\n".join(f"    {line}" for line in lines)
