"""``shardlib trace run.toml``: the timeline of a step, and what the host waits for."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardlib.collectives import trace
from shardlib.collectives.count import Wait, listed
from shardlib.command.config import Config, ConfigError, answer, takes_file
from shardlib.command.from_config import mesh_of, under_launcher
from shardlib.command.train import Training, checked
from shardlib.errors import BadArgument
from shardlib.mesh import process_index, use_mesh
from shardlib.seeing import Timeline, step_chart, timeline
from shardlib.seeing.canvas import refuse_foreign


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    takes_file(parser)
    parser.add_argument(
        "--out", default="", help="step.json for ui.perfetto.dev, or a picture: .png, .svg, .pdf"
    )
    parser.add_argument(
        "--schedule", default="", help="of stages, a picture of the step, predicted over measured"
    )
    parser.add_argument("--by", default="seconds", choices=["seconds", "bytes", "count"])
    parser.add_argument("--step", type=int, default=2, help="which step; the first is slower")


def main(given: argparse.Namespace) -> int:
    """Run the command: under torchrun on every rank, else on simulated ranks in one process."""
    check_out("trace", "--out", given.out, ".json", ".png", ".svg", ".pdf")
    check_out("trace", "--schedule", given.schedule, ".png", ".svg", ".pdf")
    if given.step < 1:
        raise ConfigError(f"--step {given.step}: 1 at least")
    config = checked(given.file, given.set)
    staged = "stages" in config.tables
    if given.schedule and not staged:
        raise ConfigError(f"--schedule {given.schedule}: the run has no table [stages]")
    found, waits = trace_run(config, given.step)
    if process_index():
        # every rank has the timeline of all of them
        return 0
    lines = [found.text(given.by), f"waits and uploads of the next step: {len(waits)}"]
    if waits:
        lines.append(listed(waits))
    told: dict[str, Any] = {"rows": found.rows(given.by), "waits": [asdict(w) for w in waits]}
    told["out"] = given.out
    if staged:
        chart = step_chart(found)
        lines.append(str(chart))
        told["schedule"] = chart.json()
        if given.schedule:
            chart.save(given.schedule)
            lines.append(f"wrote {given.schedule}")
    if given.out:
        found.save(given.out)
        lines.append(f"wrote {given.out}")
    return answer(given, told, "\n".join(lines))


def check_out(command: str, option: str, file: str, *kinds: str) -> None:
    """Check a file to write before the work is done.  Raises: ConfigError."""
    if not file:
        return
    if Path(file).suffix not in kinds:
        names = ", ".join(f"step{kind}" for kind in kinds)
        raise ConfigError(f"{option} {file}: write {' or '.join(names.rsplit(', ', 1))}")
    try:
        refuse_foreign(file, command, f"shardlib {command} run.toml {option} {{}}")
    except BadArgument as e:
        raise ConfigError(f"{option} {e.message}") from None


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
