"""``shardlib check run.toml`` or ``shardlib check module:function``: a model against one device."""

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

import optree
import torch

from shardlib.checking.proof import Proof, check_model
from shardlib.command import datasets
from shardlib.command.config import Config, ConfigError, answer, imported, takes_file
from shardlib.command.from_config import axes_of, module_of, rows_of, rules_of
from shardlib.command.train import checked, rehearse
from shardlib.mesh import simulate


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    text = "a TOML file, or MODULE:FUNCTION, which returns the arguments of sl.check_model"
    takes_file(parser, "case", text)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps that are compared")


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    if given.steps < 0:
        raise ConfigError(f"--steps {given.steps}: 0 at least")
    if given.case.endswith(".toml"):
        proof = check_run(checked(given.case, given.set), given.steps)
    else:
        made = imported(given.case)()
        proof = check_model(**made) if isinstance(made, dict) else check_model(*made)
    return answer(given, {"errors": proof.errors}, proof)


def check_run(config: Config, steps: int = 3) -> Proof:
    """Compare a file's model on its mesh with the same on one device, on one of its batches."""
    rehearse(config)
    axes = axes_of(config)
    made = module_of(config, real=True)
    with simulate(**axes) as mesh:
        rules = rules_of(config, made.module, mesh)
    rows = rows_of(config)
    count = int(config.table("data").get("batch", 1))
    first = [rows[i % len(rows)] for i in range(count)]
    batch: Any = optree.tree_map(lambda *x: torch.stack([torch.as_tensor(v) for v in x]), *first)
    takes = list(inspect.signature(made.module.forward).parameters)
    if isinstance(batch, Mapping):
        batch = {k: v for k, v in batch.items() if k in takes and k != "labels"}
        inputs = dict.fromkeys(batch, rules.tokens)
    else:
        batch = dict(zip(takes, datasets.fields(batch), strict=False))
        inputs = dict.fromkeys(batch, rules.tokens)
        if len(batch) > 1:
            inputs[list(batch)[-1]] = rules.labels
    pad = bool(config.table("layout").get("pad", False))
    return check_model(made.module, rules.rules, axes, batch, inputs=inputs, steps=steps, pad=pad)
