"""``shardlib train run.toml``: a training run from a file; the same command continues it."""

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from shardlib import optim
from shardlib import random as keys
from shardlib.capacity import most_taken
from shardlib.checkpoint import Saving, latest, load, save, save_hf
from shardlib.checkpoint.folder import occupied
from shardlib.collectives import trace
from shardlib.command.config import Config, ConfigError, arguments, call, read, told
from shardlib.command.config import parameters as keys_of
from shardlib.command.from_config import (
    EVAL,
    SOURCES,
    Built,
    Params,
    Table,
    axes_of,
    batches,
    built,
    check_data,
    evaluating,
    fixed_axes,
    how_to_make,
    init_keys,
    labels_of,
    mesh_of,
    optimizer,
    placing,
    rows_of,
    state_of,
    under_launcher,
)
from shardlib.command.progress import Log, flops_of, log, number, peak_of, seconds
from shardlib.errors import BadArgument, RankFailed, ShardError
from shardlib.grad import value_and_grad
from shardlib.mesh import Mesh, accelerator, launch, use_mesh
from shardlib.seeing.summary import size, summary

__all__ = [
    "Checkpoints", "Evaluation", "Export", "Report", "check", "start", "stepper", "train",
]  # fmt: skip

MOST = 64  # the most processes that are started without a launcher


@dataclass
class Report:
    """The result of a run.

    ``losses``  step -> loss, of the steps that ran here.
    ``evaluations``  step -> loss on the rows of ``[eval]``.
    ``step``    the last one.
    ``first``   the step that it continued from.
    ``path``    its newest checkpoint.
    ``export``  the Hugging Face directory that was written.
    """

    step: int = 0
    first: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    bytes: float = 0.0
    seconds: float = 0.0
    path: str = ""
    export: str = ""


@dataclass(frozen=True)
class Checkpoints:
    """Directory and interval of a run's checkpoints: the table ``[checkpoint]``.

    ``path``    the directory of the run's checkpoints.
    ``every``   steps between two; 0: only after the last.
    ``keep``    how many of them stay; None: all.
    ``resume``  continue from the newest checkpoint, if there is one; false: start over.
    ``wait``    false: they are written in the background.

    >>> Checkpoints("out", every=100).keep
    """

    path: str
    every: int = 0
    keep: int | None = None
    resume: bool = True
    wait: bool = False

    def __post_init__(self) -> None:
        _check_path(self.path, "checkpoint")
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise BadArgument(f"path={self.path} is no directory", op="checkpoint")
        _check_every(self.every, "checkpoint")
        if self.keep is not None and self.keep < 1:
            raise BadArgument(f"keep={self.keep}: 1 at least", op="checkpoint")


@dataclass(frozen=True)
class Evaluation:
    """Intervals and rows of the loss in evaluation mode: the table ``[eval]``.

    ``every``  steps between two; 0: only after the last.

    >>> Evaluation(every=100).every
    100
    """

    every: int = 0

    def __post_init__(self) -> None:
        _check_every(self.every, "eval")


@dataclass(frozen=True)
class Export:
    """Directory of the trained model, in the form of ``from_pretrained``: the table ``[export]``.

    ``path``       a directory: a new one, or one that an export wrote.
    ``tokenizer``  a directory whose tokenizer is copied; by default that of the rows, or of the
                   model's directory.

    >>> Export("out/model").path
    'out/model'
    """

    path: str
    tokenizer: str = ""

    def __post_init__(self) -> None:
        _check_path(self.path, "export")
        if why := occupied(os.path.realpath(self.path)):
            raise BadArgument(f"path={self.path} would not be replaced: {why}", op="export")
        if self.tokenizer and not _has_tokenizer(self.tokenizer):
            text = f"tokenizer={self.tokenizer} is no directory of a tokenizer"
            raise BadArgument(text, op="export")


def _check_path(path: str, op: str) -> None:
    if not path:
        raise BadArgument('path="": write a directory', op=op)


def _check_every(every: int, op: str) -> None:
    if every < 0:
        raise BadArgument(f"every={every}: 0 or more", op=op)


def _has_tokenizer(directory: str) -> bool:
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    return any(os.path.isfile(os.path.join(directory, f)) for f in files)


def train(
    steps: int,
    *,
    seed: int = 0,
    accumulate: int = 1,
    loss: str = "",
    mesh: Table = {},  # noqa: B006  tables are read, never written
    model: Table = {},  # noqa: B006
    init: Table = {},  # noqa: B006
    data: Table = {},  # noqa: B006
    layout: Table = {},  # noqa: B006
    optimizer: Table = {},  # noqa: B006
    precision: Table = {},  # noqa: B006
    remat: Table = {},  # noqa: B006
    checkpoint: Table = {},  # noqa: B006
    eval: Table = {},  # noqa: B006
    export: Table = {},  # noqa: B006
    log: Table = {},  # noqa: B006
) -> Report:
    """Train as the tables specify, on the ranks of ``[mesh]``.

    ``steps``       updates in all, including those of a run that this one continues.
    ``seed``        of dropout and all other random numbers.
    ``accumulate``  batches per update; their gradients are averaged.
    ``loss``        "module:function" of (apply, params, batch); by default the loss of forward's
                    output, or its logits against the labels.
    The tables are those of docs/command.md.
    Raises: ConfigError in one line; ShardError for failures of the run.
    """
    given = {k: v for k, v in locals().items() if v not in ({}, "")}
    config = Config(given)
    check(config)
    return start(config)


def check(config: Config, whole: bool = True) -> None:
    """Refuse every error of keys and types, and what a run would need only at its end.

    ``whole``  whether all tables of a run must be there.
    Raises: ConfigError.
    """
    arguments(train, config, (), beside=() if whole or "steps" in config.tables else ("steps",))
    for key in ("steps", "accumulate"):
        if config.tables.get(key, 1) < 1:
            raise config.error((key,), f"1 at least, not {config.tables[key]}")
    for path in (("seed",), ("init", "seed"), ("data", "seed")):
        seed = config.table(*path[:-1]).get("seed", 0)
        if isinstance(seed, int) and not -(2**63) <= seed < 2**63:
            raise config.error(path, f"a number of 64 bits, not {seed}")
    there = {"data": check_data, "layout": placing, "optimizer": optimizer}
    needed = {"mesh": how_to_make, "model": lambda config: None, **there}
    for name, check_table in (needed if whole else there).items():
        if name in config.tables:
            check_table(config)
        elif whole:
            raise config.error((), f"the table [{name}] is missing")
    if whole:
        _check_run(config)


def _check_run(config: Config) -> None:
    """Refuse what a run would need only later: figures, evaluation, checkpoints and an export."""
    init_keys(config)
    _checkpoints(config)
    if "eval" in config.tables:
        check_data(evaluating(config), "eval", keys_of(Evaluation))
        _evaluation(config)
    asked = _export(config)
    for table, key in (("checkpoint", "path"), ("log", "jsonl")):
        path = config.table(table).get(key)
        if asked and path and _lies_in(path, asked.path):
            raise config.error(("export", "path"), f"[{table}] {key} lies in it, {path}")
    call(log, config, ("log",))


def _lies_in(path: str, folder: str) -> bool:
    whole = os.path.realpath(folder)
    return os.path.commonpath([whole, os.path.realpath(path)]) == whole


def _checkpoints(config: Config) -> Checkpoints | None:
    if "checkpoint" not in config.tables:
        return None
    return call(Checkpoints, config, ("checkpoint",))


def _evaluation(config: Config) -> Evaluation:
    return call(Evaluation, config, ("eval",), beside=(*SOURCES, *EVAL))


def _export(config: Config) -> Export | None:
    if "export" not in config.tables:
        return None
    return call(Export, config, ("export",))


def start(config: Config, simulated: bool = False, as_json: bool = False) -> Report:
    """Run on the present processes, on simulated ranks, or on processes started here."""
    axes = axes_of(config)
    total = math.prod(axes.values())
    # here, so that an error is raised once, before ranks start
    if -1 not in axes.values() and total <= MOST:
        rehearse(config)
    if simulated or under_launcher() or total in (1, -1):
        return _ranks(config, "simulate" if simulated else "ranks", as_json)
    return _launched(config, fixed_axes(config), total, as_json)


def _launched(config: Config, axes: Mapping[str, int], total: int, as_json: bool) -> Report:
    """Run on local processes that are started here, on GPUs where there are enough."""
    if total > MOST:
        raise config.error(
            ("mesh",),
            f"{total} ranks are more than one machine is given ({MOST}): start them by torchrun, "
            "or look with shardlib plan",
        )
    here = accelerator()
    enough = here is not None and torch.accelerator.device_count() >= total
    how = how_to_make(config)
    device = how.pop("device", None) or (here.type if here and enough else "cpu")
    if not as_json:
        print(f"starting {total} local processes", flush=True)
    try:
        return launch(_rank, config, as_json, device=device, **how, **axes)[0]
    except ShardError as e:
        if isinstance(e.__cause__, ConfigError):
            raise e.__cause__ from None
        raise


def rehearse(config: Config) -> None:
    """Build everything on the meta device, so that errors are raised before processes start.

    Raises: ConfigError.
    """
    mesh = mesh_of(config, "record")
    with use_mesh(mesh):
        made = built(config, mesh, values=False)
        state_of(config, made, made.start())
        words = config.table("data").get("text", {}).get("tokenizer", "bytes")
        if words == "bytes":  # tokenizing takes long
            dealt = batches(config, rows_of(config), made.rules, mesh)
            try:
                next(iter(dealt))
            except ShardError as e:
                key = ("layout",) if "layout" in config.table("data") else ()
                raise config.error(("data", *key), told(e)) from e


def _rank(config: Config, as_json: bool) -> Report:
    """Run the training in a process started by ``launch``, with its mesh in scope."""
    from shardlib.mesh import current_mesh

    return run(config, current_mesh(), as_json)


def _ranks(config: Config, kind: str, as_json: bool) -> Report:
    mesh = mesh_of(config, kind)
    try:
        with use_mesh(mesh):
            return run(config, mesh, as_json)
    finally:
        if kind == "ranks" and dist.is_initialized() and not under_launcher():
            dist.destroy_process_group()


# ---------------------------------------------------------------- the loop


def run(config: Config, mesh: Mesh, as_json: bool = False) -> Report:
    """Run the training loop, on every rank of the mesh in scope."""
    steps, accumulate = config.tables["steps"], config.tables.get("accumulate", 1)
    saving = _checkpoints(config)
    training = _Training(config, mesh, accumulate)
    made, report = training.made, training.report
    writer: Log = call(log, config, ("log",))
    if saving is not None and saving.resume and (newest := latest(saving.path)) is not None:
        training.resume(newest)
    writer.open(as_json, report.first, lead=not dist.is_initialized() or dist.get_rank() == 0)
    writer.say(_opening(made, training.params, training.state, report, steps))
    judge = Evaluator(config, made) if "eval" in config.tables else None
    meter = _Meter(made, training.rows, writer, mesh)
    under_way = None
    batch_of = itertools.chain.from_iterable(itertools.repeat(training.dealt))
    losses = {}
    for step in range(report.first + 1, steps + 1):
        with trace() as t:
            taken = [next(batch_of) for _ in range(accumulate)]
            losses[step], info = training.step(taken)
        meter.count(taken)
        report.step = step
        if _due(step, steps, writer.every) or step == report.first + 1:
            report.losses |= {s: x.item() for s, x in losses.items()}
            losses = {}
            report.bytes = float(t.bytes)
            row = meter.row(step, report.losses[step], info, t)
            _check_finite(config, step, report.losses[step])
            writer.record(row, steps)
        if judge is not None and _due(step, steps, judge.every):
            report.evaluations[step] = judge(training.params)
            writer.record({"step": step, "eval_loss": report.evaluations[step]}, steps)
        if saving is not None and _due(step, steps, saving.every):
            under_way = training.save(saving)
    if under_way is not None:
        under_way.wait()
    report.export = _exported(config, made, training.params)
    writer.close()
    report.seconds = meter.total
    return report


def _check_finite(config: Config, step: int, loss: float) -> None:
    """Refuse a loss that is not finite, unless the optimizer skips such steps."""
    guarded = not {"skip_nonfinite", "loss_scale"}.isdisjoint(config.table("optimizer"))
    if not (guarded or math.isfinite(loss)):
        raise ShardError(f"the loss of step {step} is {loss}", op="train")


def _due(step: int, steps: int, every: int) -> bool:
    """Return whether something that is done every so many steps, and after the last, is due."""
    return step == steps or (every > 0 and step % every == 0)


class _Training:
    """The values that a training loop changes: parameters, optimizer state, batches, report."""

    def __init__(self, config: Config, mesh: Mesh, accumulate: int) -> None:
        torch.manual_seed(config.tables.get("seed", 0))
        self.config, self.report = config, Report()
        self.rows = rows_of(config)
        self.made = built(config, mesh)
        self.params = self.made.start()
        self.state = state_of(config, self.made, self.params)
        self.dealt = batches(config, self.rows, self.made.rules, mesh)
        if accumulate > len(self.dealt):
            text = f"{accumulate} batches of an update, where the rows make {len(self.dealt)}"
            raise config.error(("accumulate",), text)
        # again: building the model has drawn numbers
        torch.manual_seed(config.tables.get("seed", 0))
        self.gradients = stepper(config, self.made, accumulate)

    def step(self, taken: list[Any]) -> tuple[Tensor, Any]:
        """Update the parameters; return the loss before, and what the optimizer says."""
        loss, grads = self.gradients(self.params, self.state, taken)
        self.params, self.state, info = optim.step(self.made.tx, self.params, grads, self.state)
        return loss, info

    def tree(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        named = self.params if self.made.whole else optim.state_dict(self.params)
        kept = {"params": named, "state": optim.state_dict(self.state), "step": self.report.step}
        return kept | {"data": self.dealt.state(), "key": keys.get_state()}

    def save(self, saving: Checkpoints) -> Saving:
        """Write a checkpoint of the present step."""
        step = self.report.step
        self.report.path = os.path.join(saving.path, f"step_{step:08d}")
        return save(saving.path, self.tree(), step=step, keep=saving.keep, wait=saving.wait)

    def resume(self, newest: str) -> None:
        """Continue from a checkpoint.

        Raises: ConfigError if it does not fit.
        """
        found = _resumed(self.config, newest, self.tree())
        params = found["params"]
        self.params = params if self.made.whole else optim.load_state_dict(self.params, params)
        self.state = optim.load_state_dict(self.state, found["state"])
        self.dealt = _redealt(self.config, newest, self.rows, self.made, found["data"])
        keys.set_state(found["key"])
        self.report.step = self.report.first = int(found["step"])
        self.report.path = newest


class Evaluator:
    """The loss of parameters on the rows of ``[eval]``: the mean over their labels."""

    def __init__(self, config: Config, made: Built) -> None:
        self.every = _evaluation(config).every
        self.made, self.config = made, evaluating(config)
        self.rows = rows_of(config, "eval")

    def __call__(self, params: Params) -> float:
        made, key = self.made, keys.get_state()
        training = {m: m.training for m in made.module.modules()}
        made.module.eval()
        total, count = 0.0, 0
        try:
            with torch.no_grad():
                for batch in batches(self.config, self.rows, made.rules, made.mesh, where="eval"):
                    labels = labels_of(batch)
                    whole = labels is None or labels.is_floating_point()
                    each = 1 if whole else int((labels != -100).sum().item())
                    total += each * made.loss(params, batch).item()
                    count += each
        finally:
            keys.set_state(key)
            for module, mode in training.items():
                module.training = mode
        return total / max(count, 1)


def _exported(config: Config, made: Built, params: Params) -> str:
    """Export the trained model with its tokenizer; return the directory, or "" without [export]."""
    asked = _export(config)
    if asked is None:
        return ""
    rows = next((config.table("data", n) for n in SOURCES if n in config.table("data")), {})
    given = (asked.tokenizer, rows.get("tokenizer", ""), config.table("model").get("directory", ""))
    tokenizer = next((t for t in given if t and _has_tokenizer(t)), None)
    named: Any = params if made.whole else optim.state_dict(params)
    module = made.module if hasattr(made.module, "save_pretrained") else None
    words = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        words = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    save_hf(asked.path, named, module, tokenizer=words, overwrite=True)
    return asked.path


def _resumed(config: Config, newest: str, like: dict[str, Any]) -> Any:
    try:
        return load(newest, like)
    except ShardError as e:
        raise config.error(
            ("checkpoint", "path"),
            f"{newest} does not go on here: {e.message.splitlines()[0]}; "
            "write resume = false or another path",
        ) from e


def _redealt(config: Config, newest: str, rows: Any, made: Built, state: Any) -> Any:
    """Return the batches after the step of the checkpoint."""
    try:
        return batches(config, rows, made.rules, made.mesh, state=state)
    except ConfigError as e:
        raise ConfigError(
            f"{e}; {newest} does not go on with these rows: "
            "write resume = false or another path in [checkpoint]"
        ) from e


def stepper(config: Config, made: Built, accumulate: int) -> Callable[..., tuple[Tensor, Any]]:
    """Make ``(params, state, batches) -> (loss, gradients)``: the means over some batches."""
    zero = config.table("optimizer", "zero")
    several = accumulate > 1 and zero.get("stage", 1) < 2
    into = made.tx if made.tx.sink is not None and not several else None
    how: dict[str, Any] = {"into": into} if into is not None else {"pending": zero.get("axis", ())}

    def scaled(params: Params, batch: object, by: float) -> Tensor:
        return made.loss(params, batch) * by

    both: Callable[..., Any] = value_and_grad(scaled, **how)
    plain: Callable[..., Any] = value_and_grad(made.loss, **how)

    def step(params: Params, state: Any, taken: list[Any]) -> tuple[Tensor, Any]:
        scale = getattr(state, "scale", None)
        if scale is None and len(taken) == 1:
            return plain(params, taken[0])
        by = (1.0 if scale is None else scale) / len(taken)
        total, sum_of = None, None
        for batch in taken:
            loss, grads = both(params, batch, by)
            total = loss if total is None else total + loss
            # in place: two copies of the gradients are held, not three
            sum_of = grads if sum_of is None else optree.tree_map(Tensor.add_, sum_of, grads)
        assert total is not None, "a step has a batch"
        return (total if scale is None else total / scale), sum_of

    return step


def _opening(made: Built, params: Params, state: Any, report: Report, steps: int) -> str:
    found = summary(made.params if made.params is params else dict(made.params))
    held = f"{size(found.bytes)} of {size(found.whole)} on each rank"
    lines = [f"{type(made.module).__name__}, {found.elements:,} parameters, {held}, {found.mesh}"]
    if report.first:
        lines.append(f"goes on from step {report.first}: {report.path}")
    saving = _checkpoints(made.config)
    if saving is not None and saving.resume and report.first < steps:
        when = f"every {saving.every} steps" if saving.every else "after the last step"
        lines.append(f"saved {when} in {saving.path}, from where the same command goes on")
    if report.first >= steps:
        lines.append(f"step {steps} was reached: nothing is left to do")
    return "\n".join(lines)


class _Meter:
    """A meter of time, tokens and operations since the last record."""

    def __init__(self, made: Built, rows: Any, writer: Log, mesh: Mesh) -> None:
        self.began = self.last = seconds()
        self.tokens = 0
        dtype = next((p.dtype for p in made.module.parameters()), torch.float32)
        if made.policy is not None:
            dtype = made.policy.compute or made.policy.param
        peak = writer.flops or peak_of(mesh.device, dtype)
        self.device, self.ranks = mesh.device, mesh.size
        self.peak = None if peak is None else peak * mesh.size
        self.each = flops_of(made.module, rows[0]) if peak is not None else None
        self.rows = 0

    @property
    def total(self) -> float:
        return seconds() - self.began

    def count(self, taken: list[Any]) -> None:
        for batch in taken:
            leaves: list[Any] = optree.tree_leaves(batch)
            first = leaves[0]
            self.tokens += first.numel() if first.ndim == 2 else first.shape[0]
            self.rows += first.shape[0]

    def row(self, step: int, loss: float, info: Any, t: Any) -> dict[str, Any]:
        """Return the figures of the steps since the last record."""
        now = seconds()
        took = max(now - self.last, 1e-9)
        out: dict[str, Any] = {"step": step, "loss": loss}
        out |= {"norm": number(info.norm), "lr": number(info.lr)}
        out |= {"tokens_per_second": self.tokens / took, "bytes": float(t.bytes)}
        mfu = None
        if self.peak is not None and self.each is not None:
            mfu = self.rows * self.each / took / self.peak
        out |= {"mfu": mfu, "seconds": now - self.began}
        if (taken := most_taken(self.device)) is not None:
            out["memory"] = taken
        self.last = now
        self.tokens = 0
        self.rows = 0
        return out


# ---------------------------------------------------------------- the command


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("file", help="a TOML file, see docs/command.md")
    parser.add_argument("--simulate", action="store_true", help="one process plays all ranks")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the file with every --set and each default, and run nothing",
    )
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="replace a key")


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    config = read(given.file, given.set)
    check(config)
    try:
        report = start(config, given.simulate, given.json)
    except (KeyboardInterrupt, RankFailed) as e:
        e.add_note(_again(config))
        raise
    lead = not under_launcher() or int(os.environ["RANK"]) == 0
    if lead and given.json:
        pairs = {n: list(getattr(report, n).items()) for n in ("losses", "evaluations")}
        print(json.dumps({"done": vars(report) | pairs}))
    elif lead:
        print(
            f"done: {report.step} steps in {report.seconds:.1f} s"
            + (f", saved in {report.path}" if report.path else "")
            + (f", exported to {report.export}" if report.export else "")
        )
    return 0


def _again(config: Config) -> str:
    """Return a note: how the same command continues after this run was interrupted."""
    saving = _checkpoints(config)
    if saving is None or not saving.resume:
        return "the same command begins anew: a [checkpoint] that resumes would go on"
    newest = latest(saving.path)
    if newest is None:
        return "the same command begins anew: nothing was saved yet"
    return f"the same command goes on from {newest}"
