"""``shardlib train run.toml``: a training run from a file; the same command continues it."""

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
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
from shardlib.command import from_config
from shardlib.command.config import (
    Config,
    ConfigError,
    answer,
    arguments,
    call,
    keys_of,
    optional,
    read,
    takes_file,
    told,
)
from shardlib.command.from_config import Built, Params, Table
from shardlib.command.progress import Log, flops_of, number, peak_of
from shardlib.errors import BadArgument, RankFailed, ShardError
from shardlib.grad import staged_mesh, value_and_grad
from shardlib.mesh import accelerator, launch, use_mesh
from shardlib.microbatches import inward
from shardlib.modules import init
from shardlib.pipeline.stages import Stages
from shardlib.seeing.summary import size, summary

# the most processes that are started without a launcher
MOST = 64


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

    @property
    def newest(self) -> str | None:
        """The checkpoint to continue from, or None."""
        return latest(self.path) if self.resume else None

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


_NONE: Table = {}


def train(
    steps: int,
    *,
    seed: int = 0,
    accumulate: int = 1,
    microbatches: int | None = None,
    loss: str = "",
    mesh: Table = _NONE,
    model: Table = _NONE,
    init: Table = _NONE,
    data: Table = _NONE,
    layout: Table = _NONE,
    stages: Table = _NONE,
    optimizer: Table = _NONE,
    tiers: Table = _NONE,
    precision: Table = _NONE,
    remat: Table = _NONE,
    checkpoint: Table = _NONE,
    eval: Table = _NONE,
    export: Table = _NONE,
    log: Table = _NONE,
) -> Report:
    """Train as the tables specify, on the ranks of ``[mesh]``.

    ``steps``       updates in all, including those of a run that this one continues.
    ``seed``        of dropout and all other random numbers.
    ``accumulate``  batches per update; their gradients are averaged.
    ``microbatches``  parts into which each batch is cut; of a model in stages, those that are at
                    different stages at the same time.
    ``loss``        "module:function" of (apply, params, batch); by default the loss of forward's
                    output, or its logits against the labels.
    The tables are those of docs/command.md.
    Raises: ConfigError in one line; ShardError for failures of the run.
    """
    given = {k: v for k, v in locals().items() if v not in ({}, "", None)}
    config = Config(given)
    check(config)
    return start(config)


def checked(file: str, sets: Sequence[str], whole: bool = True) -> Config:
    """Read a file, and check it.

    Raises: ConfigError.
    """
    config = read(file, sets)
    check(config, whole)
    return config


def check(config: Config, whole: bool = True) -> None:
    """Refuse every error of keys and types, and what a run would need only at its end.

    ``whole``  whether all tables of a run must be there.
    Raises: ConfigError.
    """
    lacks = not whole and "steps" not in config.tables
    arguments(train, config, (), beside=("steps",) * lacks)
    for key in ("steps", "accumulate", "microbatches"):
        if config.tables.get(key, 1) < 1:
            raise config.error((key,), f"1 at least, not {config.tables[key]}")
    for path in (("seed",), ("init", "seed"), ("data", "seed")):
        seed = config.table(*path[:-1]).get("seed", 0)
        if isinstance(seed, int) and not -(2**63) <= seed < 2**63:
            raise config.error(path, f"a number of 64 bits, not {seed}")
    tables = {
        "data": from_config.check_data,
        "layout": from_config.placing,
        "optimizer": from_config.optimizer,
    }
    if whole:
        tables = {"mesh": from_config.how_to_make, "model": lambda config: None, **tables}
    for name, check_table in tables.items():
        if name in config.tables:
            check_table(config)
        elif whole:
            raise config.error((), f"the table [{name}] is missing")
    if whole:
        _check_run(config)


def _check_run(config: Config) -> None:
    """Refuse what a run would need only later: figures, evaluation, checkpoints and an export."""
    arguments(init, config, ("init",), 2, from_config.BESIDE_INIT)
    optional(Stages, config, "stages")
    optional(Checkpoints, config, "checkpoint")
    if "eval" in config.tables:
        from_config.check_data(from_config.evaluating(config), "eval", keys_of(Evaluation))
        _evaluation(config)
    asked = optional(Export, config, "export")
    for table, key in (("checkpoint", "path"), ("log", "jsonl")):
        path = config.table(table).get(key)
        if asked and path and Path(path).resolve().is_relative_to(Path(asked.path).resolve()):
            raise config.error(("export", "path"), f"[{table}] {key} lies in it, {path}")
    call(Log, config, ("log",))


def _evaluation(config: Config) -> Evaluation:
    return call(Evaluation, config, ("eval",), beside=(*from_config.SOURCES, *from_config.EVAL))


def start(config: Config, simulated: bool = False, as_json: bool = False) -> Report:
    """Run on the present processes, on simulated ranks, or on processes started here."""
    axes = from_config.axes_of(config)
    total = math.prod(axes.values())
    # here, so that an error is raised once, before ranks start
    if -1 not in axes.values() and total <= MOST:
        rehearse(config)
    if simulated:
        return _ranks(config, "simulate", as_json)
    if from_config.under_launcher() or total in (1, -1):
        return _ranks(config, "ranks", as_json)
    return _launched(config, from_config.axes_of(config, fixed=True), as_json)


def _launched(config: Config, axes: Mapping[str, int], as_json: bool) -> Report:
    """Run on local processes that are started here, on GPUs where there are enough."""
    total = math.prod(axes.values())
    if total > MOST:
        raise config.error(
            ("mesh",),
            f"{total} ranks are more than one machine is given ({MOST}): start them by torchrun, "
            "or look with shardlib plan",
        )
    how = from_config.how_to_make(config)
    device = how.pop("device", None)
    if device is None:
        here, device = accelerator(), "cpu"
        if here is not None and torch.accelerator.device_count() >= total:
            device = here.type
    if not as_json:
        print(f"starting {total} local processes", flush=True)
    try:
        return launch(run, config, as_json, device=device, **how, **axes)[0]
    except ShardError as e:
        if isinstance(e.__cause__, ConfigError):
            raise e.__cause__ from None
        raise


def rehearse(config: Config) -> None:
    """Build everything on the meta device, so that errors are raised before processes start.

    Raises: ConfigError.
    """
    with use_mesh(from_config.mesh_of(config, "record")):
        made = from_config.built(config, values=False)
        from_config.state_of(made, made.start())
        words = config.table("data").get("text", {}).get("tokenizer", "bytes")
        if words == "bytes":  # tokenizing takes long
            dealt = from_config.batches(made, from_config.rows_of(config))
            try:
                next(iter(dealt))
            except ShardError as e:
                path = ("data", "layout") if "layout" in config.table("data") else ("data",)
                raise config.error(path, told(e)) from e


def _ranks(config: Config, kind: str, as_json: bool) -> Report:
    mesh = from_config.mesh_of(config, kind)
    try:
        with use_mesh(mesh):
            return run(config, as_json)
    finally:
        if kind == "ranks" and dist.is_initialized() and not from_config.under_launcher():
            dist.destroy_process_group()


# ---------------------------------------------------------------- the loop


def run(config: Config, as_json: bool = False) -> Report:
    """Run the training loop, on every rank of the mesh in scope."""
    steps = config.tables["steps"]
    training = Training(config)
    made, report, saving = training.made, training.report, training.saving
    writer: Log = call(Log, config, ("log",))
    training.resume()
    writer.open(as_json, report.first, lead=not dist.is_initialized() or dist.get_rank() == 0)
    writer.say(_opening(training, steps))
    judges = [Evaluator(made) for name in config.tables if name == "eval"]
    meter = _Meter(made, training.rows, writer.flops)
    under_way = Saving("")
    # steps whose loss is not finite are skipped by the optimizer
    guarded = not {"skip_nonfinite", "loss_scale"}.isdisjoint(config.table("optimizer"))
    for step in range(report.first + 1, steps + 1):
        with trace() as t:
            taken = training.take()
            info = training.update(*training.gradients(taken))
        meter.count(taken)
        if _due(step, steps, writer.every) or step == report.first + 1:
            loss = training.settle()
            report.bytes = float(t.bytes)
            row = meter.row(step, loss, info, t)
            if not (guarded or math.isfinite(loss)):
                raise ShardError(f"the loss of step {step} is {loss}", op="train")
            writer.record(row, steps)
        for judge in judges:
            if _due(step, steps, judge.every):
                report.evaluations[step] = judge(training.params)
                writer.record({"step": step, "eval_loss": report.evaluations[step]}, steps)
        if saving is not None and _due(step, steps, saving.every):
            under_way = training.save(saving)
    under_way.wait()
    report.export = _exported(made, training.params)
    writer.close()
    report.seconds = meter.total
    return report


def _due(step: int, steps: int, every: int) -> bool:
    """Return whether something that is done every so many steps, and after the last, is due."""
    return step == steps or (every > 0 and step % every == 0)


class Training:
    """The values that a training loop changes: parameters, optimizer state, batches, report.

    ``losses``  of the steps since the last record, not yet read from the device.
    """

    def __init__(self, config: Config) -> None:
        self.saving = optional(Checkpoints, config, "checkpoint")
        torch.manual_seed(config.tables.get("seed", 0))
        self.report = Report()
        self.losses: dict[int, Tensor] = {}
        self.rows = from_config.rows_of(config)
        self.made = from_config.built(config)
        self.params = self.made.start()
        self.state = from_config.state_of(self.made, self.params)
        self.dealt = from_config.batches(self.made, self.rows)
        if self.made.accumulate > len(self.dealt):
            count = f"{self.made.accumulate} batches of an update"
            raise config.error(("accumulate",), f"{count}, where the rows make {len(self.dealt)}")
        # again: building the model has drawn numbers
        torch.manual_seed(config.tables.get("seed", 0))
        self.stepper, self.epochs = stepper(self.made), self.dealing()

    def dealing(self) -> Iterator[Any]:
        """Yield batches, epoch after epoch."""
        while True:
            yield from self.dealt

    def take(self) -> list[Any]:
        """Return the batches of the next update."""
        return [next(self.epochs) for _ in range(self.made.accumulate)]

    def gradients(self, taken: list[Any]) -> tuple[Tensor, Any]:
        """Return the loss and the gradients of some batches."""
        return self.stepper(self.params, self.state, taken)

    def update(self, loss: Tensor, grads: Any) -> Any:
        """Update the parameters; return what the optimizer says."""
        self.params, self.state, info = optim.step(self.made.tx, self.params, grads, self.state)
        self.report.step += 1
        self.losses[self.report.step] = loss
        return info

    def settle(self) -> float:
        """Read the losses since the last record; return that of the last step."""
        self.report.losses |= {step: loss.item() for step, loss in self.losses.items()}
        self.losses = {}
        return self.report.losses[self.report.step]

    def tree(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        named = self.made.named(self.params)
        kept = {"params": named, "state": optim.state_dict(self.state), "step": self.report.step}
        return kept | {"data": self.dealt.state(), "key": keys.get_state()}

    def save(self, saving: Checkpoints) -> Saving:
        """Write a checkpoint of the present step."""
        step = self.report.step
        self.report.path = os.path.join(saving.path, f"step_{step:08d}")
        return save(saving.path, self.tree(), step=step, keep=saving.keep, wait=saving.wait)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one.

        Raises: ConfigError if it does not fit.
        """
        newest = self.saving and self.saving.newest
        if newest is None:
            return
        otherwise = "write resume = false or another path"
        try:
            found = load(newest, self.tree())
        except ShardError as e:
            text = f"{newest} does not go on here: {e.message.splitlines()[0]}; {otherwise}"
            raise self.made.config.error(("checkpoint", "path"), text) from e
        try:
            self.dealt = from_config.batches(self.made, self.rows, found["data"])
        except ConfigError as e:
            text = f"{newest} does not go on with these rows: {otherwise} in [checkpoint]"
            raise ConfigError(f"{e}; {text}") from e
        params = found["params"]
        self.params = params if self.made.whole else optim.load_state_dict(self.params, params)
        self.state = optim.load_state_dict(self.state, found["state"])
        keys.set_state(found["key"])
        self.report.step = self.report.first = int(found["step"])
        self.report.path = newest


class Evaluator:
    """The loss of parameters on the rows of ``[eval]``: the mean over their labels."""

    def __init__(self, made: Built) -> None:
        self.every = _evaluation(made.config).every
        self.made = replace(made, config=from_config.evaluating(made.config))
        self.rows = from_config.rows_of(made.config, "eval")

    def __call__(self, params: Params) -> float:
        made, key = self.made, keys.get_state()
        training = {m: m.training for m in made.module.modules()}
        made.module.eval()
        total, count = 0.0, 0
        stage = staged_mesh(params)
        here = partial(inward, stage=stage) if stage else lambda x: x
        try:
            with torch.no_grad():
                for batch in from_config.batches(made, self.rows, where="eval"):
                    each = int(from_config.counted(batch))
                    placed = optree.tree_map(here, batch)
                    total += each * made.loss(params, placed).item()
                    count += each
        finally:
            keys.set_state(key)
            for module, mode in training.items():
                module.training = mode
        return total / max(count, 1)


def _exported(made: Built, params: Params) -> str:
    """Export the trained model with its tokenizer; return the directory, or "" without [export]."""
    config = made.config
    asked = optional(Export, config, "export")
    if asked is None:
        return ""
    rows = config.table("data", from_config.source_of(config, "data"))
    given = (asked.tokenizer, rows.get("tokenizer", ""), config.table("model").get("directory", ""))
    tokenizer = next((t for t in given if t and _has_tokenizer(t)), None)
    more: dict[str, Any] = {}
    if hasattr(made.module, "save_pretrained"):
        more["module"] = made.module
    if tokenizer is not None:
        from transformers import AutoTokenizer

        more["tokenizer"] = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    save_hf(asked.path, made.named(params), overwrite=True, **more)
    return asked.path


def stepper(made: Built) -> Callable[..., tuple[Tensor, Any]]:
    """Make ``(params, state, batches) -> (loss, gradients)``: the means over some batches."""
    zero = made.config.table("optimizer", "zero")
    how: dict[str, Any] = {"pending": zero.get("axis", ())}
    if made.tx.sink is not None and (made.accumulate == 1 or zero.get("stage", 1) >= 2):
        how = {"into": made.tx}
    if (count := made.config.tables.get("microbatches")) is not None:
        how["microbatches"] = count
        if "loss" not in made.config.tables:
            how["weigh"] = lambda batch, *_: from_config.counted(batch)

    def scaled(params: Params, batch: object, by: float) -> Tensor:
        return made.loss(params, batch) * by

    both: Callable[..., Any] = value_and_grad(scaled, **how)
    plain: Callable[..., Any] = value_and_grad(made.loss, **how)

    def step(params: Params, state: Any, taken: list[Any]) -> tuple[Tensor, Any]:
        scale = getattr(state, "scale", None)
        if scale is None and len(taken) == 1:
            return plain(params, taken[0])
        scale = 1.0 if scale is None else scale
        by = scale / len(taken)
        total, sum_of = both(params, taken[0], by)
        for batch in taken[1:]:
            loss, grads = both(params, batch, by)
            total = total + loss
            # in place: two copies of the gradients are held, not three
            sum_of = optree.tree_map(Tensor.add_, sum_of, grads)
        return total / scale, sum_of

    return step


def _opening(training: Training, steps: int) -> str:
    made, report, saving = training.made, training.report, training.saving
    found = summary(dict(made.params))
    held = f"{size(found.bytes)} of {size(found.whole)} on each rank"
    lines = [f"{type(made.module).__name__}, {found.elements:,} parameters, {held}, {found.mesh}"]
    if report.first:
        lines.append(f"goes on from step {report.first}: {report.path}")
    if saving is not None and saving.resume and report.first < steps:
        when = "after the last step"
        if saving.every:
            when = f"every {saving.every} steps"
        lines.append(f"saved {when} in {saving.path}, from where the same command goes on")
    if report.first >= steps:
        lines.append(f"step {steps} was reached: nothing is left to do")
    return "\n".join(lines)


class _Meter:
    """A meter of time, tokens and operations since the last record.

    ``share``  of the peak that one row of a second takes; None if it is not known.
    """

    def __init__(self, made: Built, rows: Any, flops: float | None) -> None:
        self.began = self.last = perf_counter()
        self.tokens = self.rows = 0
        self.device = made.mesh.device
        dtype = next((p.dtype for p in made.module.parameters()), torch.float32)
        if made.policy is not None:
            dtype = made.policy.compute or made.policy.param
        peak = flops or peak_of(self.device, dtype)
        each = flops_of(made.module, rows[0]) if peak is not None else None
        self.share = each / (peak * made.mesh.size) if peak and each else None

    @property
    def total(self) -> float:
        return perf_counter() - self.began

    def count(self, taken: list[Any]) -> None:
        for batch in taken:
            leaves: list[Any] = optree.tree_leaves(batch)
            first = leaves[0]
            self.tokens += math.prod(first.shape[: 1 + (first.ndim == 2)])
            self.rows += first.shape[0]

    def row(self, step: int, loss: float, info: Any, t: Any) -> dict[str, Any]:
        """Return the figures of the steps since the last record."""
        now = perf_counter()
        took = max(now - self.last, 1e-9)
        out: dict[str, Any] = {"step": step, "loss": loss}
        out |= {"norm": number(info.norm), "lr": number(info.lr)}
        out |= {"tokens_per_second": self.tokens / took, "bytes": float(t.bytes)}
        mfu = None if self.share is None else self.rows * self.share / took
        out |= {"mfu": mfu, "seconds": now - self.began}
        if (taken := most_taken(self.device)) is not None:
            out["memory"] = taken
        self.last = now
        self.tokens = self.rows = 0
        return out


# ---------------------------------------------------------------- the command


def add(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    takes_file(parser)
    parser.add_argument("--simulate", action="store_true", help="one process plays all ranks")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the file with every --set and each default, and run nothing",
    )


def main(given: argparse.Namespace) -> int:
    """Run the command."""
    config = checked(given.file, given.set)
    try:
        report = start(config, given.simulate, given.json)
    except (KeyboardInterrupt, RankFailed) as e:
        e.add_note(_again(config))
        raise
    if from_config.under_launcher() and int(os.environ["RANK"]):
        return 0
    pairs = {n: list(getattr(report, n).items()) for n in ("losses", "evaluations")}
    text = f"done: {report.step} steps in {report.seconds:.1f} s"
    if report.path:
        text += f", saved in {report.path}"
    if report.export:
        text += f", exported to {report.export}"
    return answer(given, {"done": vars(report) | pairs}, text)


def _again(config: Config) -> str:
    """Return a note: how the same command continues after this run was interrupted."""
    saving = optional(Checkpoints, config, "checkpoint")
    if saving is None or not saving.resume:
        return "the same command begins anew: a [checkpoint] that resumes would go on"
    if saving.newest is None:
        return "the same command begins anew: nothing was saved yet"
    return f"the same command goes on from {saving.newest}"
