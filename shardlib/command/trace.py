"""``shardlib trace run.toml``: the timeline of a step, and what the host waits for."""

import argparse
from dataclasses import asdict
from pathlib import Path

from shardlib.collectives import trace
from shardlib.collectives.count import Wait, listed
from shardlib.command.config import Config, ConfigError, answer, takes_file
from shardlib.command.from_config import mesh_of, under_launcher
from shardlib.command.train import Training, checked
from shardlib.errors import BadArgument
from shardlib.mesh import use_mesh
from shardlib.seeing import Timeline, timeline
from shardlib.seeing.canvas import refuse_foreign


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    takes_file(parser)
    parser.add_argument(
        "--out", default="", help="step.json for ui.perfetto.dev, or a picture: .png, .svg, .pdf"
    )
    parser.add_argument("--by", default="seconds", choices=["seconds", "bytes", "count"])
    parser.add_argument("--step", type=int, default=2, help="which step; the first is slower")


def main(given: argparse.Namespace) -> int:
    """Run the command: under torchrun on every rank, else on simulated ranks in one process."""
    if given.out:
        _check_out(given.out)
    if given.step < 1:
        raise ConfigError(f"--step {given.step}: 1 at least")
    found, waits = trace_run(checked(given.file, given.set), given.step)
    if under_launcher() and 0 not in found.ranks:
        return 0
    lines = [found.text(given.by), f"waits and uploads of the next step: {len(waits)}"]
    if waits:
        lines.append(listed(waits))
    if given.out:
        found.save(given.out)
        lines.append(f"wrote {given.out}")
    told = {"rows": found.rows(given.by), "waits": [asdict(w) for w in waits]}
    return answer(given, told | {"out": given.out}, "\n".join(lines))


def _check_out(file: str) -> None:
    if Path(file).suffix not in (".json", ".png", ".svg", ".pdf"):
        raise ConfigError(f"--out {file}: write step.json, step.png, step.svg or step.pdf")
    try:
        refuse_foreign(file, "trace", "shardlib trace run.toml --out {}")
    except BadArgument as e:
        raise ConfigError(f"--out {e.message}") from None


def trace_run(config: Config, step: int = 2) -> tuple[Timeline, list[Wait]]:
    """Run a file's first steps; record the last of them, merged over ranks if there are several.

    One more is run for the waits of this rank's host, whose list makes a step slower.
    """
    with use_mesh(mesh_of(config, ("simulate", "ranks")[under_launcher()])):
        training = Training(config)
        for _ in range(step):
            taken = training.take()
            with timeline() as line:
                with line.phase("gradients"):
                    found = training.gradients(taken)
                with line.phase("update"):
                    training.update(*found)
        taken = training.take()
        with trace(waits=True) as seen:
            training.update(*training.gradients(taken))
        return line.gathered(), seen.waits
