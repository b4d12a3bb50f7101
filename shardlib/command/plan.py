"""``shardlib plan MODEL --ranks 8,64``: which mesh, and will it fit."""

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardlib.command.building import RECIPES, axes_of, hugging_face, module_of
from shardlib.command.config import Config, ConfigError, read
from shardlib.planning.plan import CLUSTERS, Plan, Weighed, plan

__all__: list[str] = []


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "model",
        help="a Hugging Face directory (its config.json is enough), MODULE:FUNCTION, or a TOML file",
    )
    parser.add_argument(
        "--ranks", default="", help="how many, as 8 or 8,64,512; of a file its mesh's"
    )
    parser.add_argument("--batch", type=int, default=0, help="rows of a global batch")
    parser.add_argument("--sequence", type=int, default=0, help="tokens of a row")
    parser.add_argument("--cluster", default="h100", help=", ".join(CLUSTERS))
    parser.add_argument("--memory", default="", help="of one rank, as 80GiB; else the cluster's")
    parser.add_argument(
        "--state", type=float, default=8.0, help="bytes per parameter that the optimizer keeps"
    )
    parser.add_argument("--recipe", default="", help="only these, as megatron1d,fsdp")
    parser.add_argument("--most", type=int, default=4, help="how many ways run on paper")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="replace a key")


def main(given: Any) -> int:
    """Run the command: 0, or 4 where nothing fits for one of the numbers of ranks."""
    if given.cluster not in CLUSTERS:
        raise ConfigError(f"--cluster {given.cluster}: there are {', '.join(CLUSTERS)}")
    model, said = _model(given)
    more: dict[str, Any] = {"memory": _bytes(given.memory)} if given.memory else {}
    if given.recipe:
        more["recipe"] = _recipes(given.recipe)
    found = {
        ranks: plan(
            model, ranks, batch=said["batch"], sequence=said["sequence"], cluster=given.cluster,
            state=given.state, most=given.most, **more,
        )
        for ranks in said["ranks"]
    }  # fmt: skip
    if given.json:
        print(json.dumps([{"ranks": n, **_plain(p)} for n, p in found.items()]))
    else:
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{type(model).__name__}, {count:,} parameters, {said['batch']} x {said['sequence']} tokens a step"
        )
        for n, p in found.items():
            print(f"\n{n} ranks: {p}")
            if p.best is not None:
                print(_tables(p.best))
    return 0 if all(p.best is not None for p in found.values()) else 4


def _model(given: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The module on the meta device; ranks, batch and sequence.  Raises: ConfigError."""
    said: dict[str, Any] = {"batch": given.batch, "sequence": given.sequence}
    ranks = [_whole(n, "--ranks") for n in given.ranks.split(",") if n]
    if given.model.endswith(".toml"):
        config = read(given.model, given.set)
        model = module_of(config, meta=True).module
        said = _of_file(config, said)
        if not ranks:
            sizes = axes_of(config).values()
            ranks = [1]
            for n in sizes:
                ranks[0] *= abs(n)
    elif os.path.isdir(given.model):
        model = hugging_face(given.model, "init").module
    elif ":" in given.model:
        model = module_of(Config({"model": {"make": given.model}}), meta=True).module
    else:
        raise ConfigError(
            f"{given.model}: no directory, no MODULE:FUNCTION and no file that ends in .toml"
        )
    for key in ("batch", "sequence"):
        if said[key] < 1:
            raise ConfigError(f"--{key} must be given, as --{key} 1024")
    if not ranks:
        raise ConfigError("--ranks must be given, as --ranks 8,64")
    return model, {**said, "ranks": ranks}


def _of_file(config: Config, said: Mapping[str, int]) -> dict[str, Any]:
    """Batch and sequence as a file has them, where the prompt does not say."""
    data = config.table("data")
    rows = next((data[n] for n in ("text", "tokens") if isinstance(data.get(n), Mapping)), {})
    return {
        "batch": said["batch"] or int(data.get("batch", 0)),
        "sequence": said["sequence"] or int(rows.get("context", 0)),
    }


def _whole(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{what} {text}: a whole number, as {what} 8") from None


def _bytes(text: str) -> float:
    units = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}
    unit = next((u for u in units if text.endswith(u)), "")
    text, scale = text.removesuffix(unit), units.get(unit, 2**30)
    try:
        return float(text) * scale
    except ValueError:
        raise ConfigError(f"--memory {text}: write --memory 80GiB") from None


def _recipes(text: str) -> list[str]:
    names = text.split(",")
    for n in names:
        if n not in RECIPES:
            raise ConfigError(f"--recipe {n}: there are {', '.join(RECIPES)}")
    return names


def _plain(found: Plan) -> dict[str, Any]:
    """A plan as plain values."""
    table = [_row(w) for w in found.table]
    return {
        "fits": found.best is not None,
        "memory": found.memory,
        "looked": found.looked,
        "table": table,
    }


def _row(w: Weighed) -> dict[str, Any]:
    names = (
        "parameters",
        "gradients",
        "state",
        "saved",
        "temporary",
        "peak",
        "bytes",
        "messages",
        "seconds",
    )
    way = {
        "recipe": w.way.recipe,
        "mesh": dict(w.way.mesh),
        "stage": w.way.stage,
        "remat": w.way.remat,
    }
    return {**way, "fits": w.fits, **{n: float(getattr(w, n)) for n in names}}


def _tables(w: Weighed) -> str:
    """What to write into a file for this way."""
    lines = ["[mesh]", *(f"{a} = {n}" for a, n in w.way.mesh.items())]
    lines += ["[layout]", f'recipe = "{w.way.recipe}"', "pad = true"]
    if w.way.stage:
        over = [f'"{a}"' for a in w.way.copies]
        axis = over[0] if len(over) == 1 else f"[{', '.join(over)}]"
        lines += ["[optimizer.zero]", f"axis = {axis}", f"stage = {w.way.stage}"]
    if w.way.remat:
        lines += ["[remat]", *(f'"{p}.*" = "{w.way.remat}"' for p in w.layers)]
    return "write\n" + "\n".join(f"    {line}" for line in lines)
