"""``shardlib trace run.toml``: the timeline of a step, and what the host waits for."""

import argparse
from dataclasses import asdict
from pathlib import Path

from shardlib import optim
from shardlib.collectives import trace
from shardlib.collectives.count import Wait, listed
from shardlib.command.config import Config, ConfigError, answer, takes_file
from shardlib.command.from_config import batches, built, mesh_of, rows_of, state_of, under_launcher
from shardlib.command.train import checked, stepper
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
        made = built(config)
        params = made.start()
        state = state_of(made, params)
        rows, step_of = iter(batches(made, rows_of(config))), stepper(made)
        for _ in range(step):
            taken = [next(rows) for _ in range(made.accumulate)]
            with timeline() as line:
                with line.phase("gradients"):
                    _, grads = step_of(params, state, taken)
                with line.phase("update"):
                    params, state, _ = optim.step(made.tx, params, grads, state)
        taken = [next(rows) for _ in range(made.accumulate)]
        with trace(waits=True) as seen:
            _, grads = step_of(params, state, taken)
            optim.step(made.tx, params, grads, state)
        return line.gathered(), seen.waits
