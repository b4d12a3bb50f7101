"""``shardlib ckpt ls|verify|reshard|to-hf|from-hf``: checkpoints at a prompt."""

import argparse
import os
from dataclasses import asdict

from shardlib.checkpoint import describe, from_hf, reshard, steps, to_hf, verify
from shardlib.command.config import ConfigError, answer
from shardlib.errors import CheckpointError, ShardError

_ACTIONS = {
    "ls": "the checkpoints of a run, and what the newest holds",
    "verify": "read every byte and compare all checksums",
    "reshard": "write a checkpoint anew, as another mesh would have",
    "to-hf": "write parameters as from_pretrained reads them",
    "from-hf": "make a checkpoint of a Hugging Face directory",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ones = {name: actions.add_parser(name, help=text) for name, text in _ACTIONS.items()}
    for name, one in ones.items():
        one.add_argument("path")
        for flag in ("--json", "--traceback"):
            one.add_argument(flag, action="store_true", default=argparse.SUPPRESS)
        if name in ("ls", "verify"):
            continue
        one.add_argument("target")
        one.add_argument("--overwrite", action="store_true", help="replace what is there")
        if name != "reshard":
            one.add_argument(
                "--subtree", default="params", help="where the parameters are in the tree"
            )
    one, rule = ones["reshard"], 'as "*.weight=x ."'
    one.add_argument("--mesh", required=True, help="axis sizes, as data=2,x=4")
    one.add_argument("--rule", action="append", default=[], metavar="PATTERN=LAYOUT", help=rule)
    one.add_argument("--pad", action="store_true", help="allow sizes that do not divide")
    text = "a directory whose configuration and tokenizer are copied: weights alone do not load"
    ones["to-hf"].add_argument("--config", required=True, help=text)


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    if not os.path.exists(given.path):
        raise ConfigError(f"{given.path}: no such file or directory")
    if given.action in ("ls", "verify"):
        about = {"ls": describe, "verify": verify}[given.action](given.path)
        kept = steps(given.path)
        lines = ["every byte is as it was written"]
        if given.action == "ls":
            lines = [f"step {step:>8}  {path}" for step, path in kept]
        data = {**asdict(about), "steps": [n for n, _ in kept]}
        return answer(given, data, "\n".join([*lines, str(about)]))
    more = {"overwrite": given.overwrite}
    if given.action == "reshard":
        rules = [_rule(r) for r in given.rule]
        axes, layouts = _axes(given.mesh), rules or None
        try:
            reshard(given.path, given.target, axes, layouts=layouts, pad=given.pad, **more)
        except CheckpointError:
            raise
        except ShardError as e:
            raise ConfigError(" ".join(e.message.split())) from e
    elif given.action == "to-hf":
        to_hf(given.path, given.target, subtree=given.subtree, config=given.config, **more)
    else:
        from_hf(given.path, given.target, subtree=given.subtree, **more)
    return answer(given, {"wrote": given.target}, f"wrote {given.target}")


def _axes(text: str) -> dict[str, int]:
    """Parse axis sizes such as ``data=2,x=4``.

    Raises: ConfigError.
    """
    try:
        pairs = [part.split("=") for part in text.replace(",", " ").split()]
        sizes = {name: int(n) for name, n in pairs}
        if not sizes or len(sizes) < len(pairs) or min(sizes.values()) < 1:
            raise ValueError(text)
        return sizes
    except ValueError:
        raise ConfigError(f"--mesh {text}: write --mesh data=2,x=4") from None


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, layout = text.rpartition("=")
    if not equals:
        raise ConfigError(f'--rule {text}: write --rule "*.weight=x ."')
    return pattern, layout
