"""Objects from a configuration's tables: mesh, module, dataset, rules, optimizer and loss.

Every function here passes a table to one public function as its arguments, see config.py.
"""

import inspect
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import optree
import torch
from torch import Tensor, nn

from shardlib import optim
from shardlib.checkpoint import load_hf
from shardlib.command import datasets
from shardlib.command.config import (
    Config,
    ConfigError,
    arguments,
    call,
    imported,
    keys_of,
    make,
    missing,
    named,
    named_as,
    near,
    optional,
    shown,
    told,
    typed,
    unknown,
)
from shardlib.data import Batches, data
from shardlib.dtypes import wide
from shardlib.errors import BadArgument, LayoutSyntax, ShardError, UnevenSplit
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, current_mesh, launched, make_mesh, record, simulate
from shardlib.mesh.mesh import check_timeout
from shardlib.microbatches import MicroBatches
from shardlib.modules import init, parallelize, recipes
from shardlib.modules.apply import Apply, positional
from shardlib.modules.apply import arguments as arguments_of
from shardlib.modules.rules import Rules as ModuleRules
from shardlib.optim import Precision, Transform
from shardlib.pipeline.stages import Stages
from shardlib.planning.plan import loss_of
from shardlib.tensor import ShardedTensor, layout_of

RecipeName = Literal["megatron1d", "optimus2d", "tesseract", "cube3d", "ring", "ddp", "fsdp"]
RECIPES: tuple[str, ...] = get_args(RecipeName)
SOURCES = ("text", "documents", "tokens", "dataset")
LOADING = ("missing", "extra", "cast", "timeout")  # of load_hf, in [model]
# of data, in [data]
DATA = ("batch", "layout", "shuffle", "seed", "last", "workers")
EVAL = ("batch", "layout", "workers")  # and in [eval]
# arguments of recipes that are other texts
NO_AXES = ("schedule", "mlp", "experts")
# of parallelize, in [layout]
PLACING = ("pad", "axes", "inputs")
# of init, in other tables than [init]
BESIDE_INIT = ("mesh", "remat", "stages", "host", *PLACING)
# tables below [optimizer], the innermost first
WRAPPERS: dict[str, Callable[..., Any]] = {
    "clip": optim.clip_by_global_norm,
    "skip_nonfinite": optim.skip_nonfinite,
    "ema": optim.ema,
    "zero": optim.zero,
    "loss_scale": optim.loss_scale,
}


Table = Mapping[str, Any]
Params = Mapping[str, Tensor]


# ---------------------------------------------------------------- [mesh]


def axes_of(config: Config, fixed: bool = False) -> dict[str, int]:
    """Return the axis sizes of ``[mesh]``.

    ``fixed``  nothing but the file gives them, so a size of -1 is refused.
    Raises: ConfigError.
    """
    own = keys_of(make_mesh)
    axes = {k: v for k, v in config.table("mesh").items() if k not in own}
    for axis, n in axes.items():
        if type(n) is not int or (n < 1 and n != -1):
            hint = near(axis, own) or "; an axis has a whole number of ranks, 1 at least"
            raise config.error(("mesh", axis), f"{shown(n)} is no size of an axis{hint}")
        if fixed and n == -1:
            text = "-1 is found from torchrun's number of processes: write a number, or start it so"
            raise config.error(("mesh", axis), text)
    if not axes:
        raise config.error(("mesh",), "a mesh has an axis: write data = 2 in [mesh]")
    return axes


def how_to_make(config: Config) -> dict[str, Any]:
    """Return the keys of ``[mesh]`` that are no axes: device and timeout.

    Raises: ConfigError.
    """
    known = arguments(make_mesh, config, ("mesh",), beside=axes_of(config))
    try:
        key = "device"
        torch.device(known.get(key, "cpu"))
        key = "timeout"
        check_timeout(known.get(key, 1.0), "make_mesh", "")
    except (RuntimeError, ShardError) as e:
        text = getattr(e, "message", f"{shown(known[key])}: {e}")
        raise config.error(("mesh", key), text) from None
    return known


def under_launcher() -> bool:
    """Return whether torchrun, or another launcher, started this process with its rank."""
    return launched("shardlib")


_PLAYED = {"simulate": simulate, "record": record}


def mesh_of(config: Config, kind: str = "ranks") -> Mesh:
    """Make the mesh: of these processes, or by ``simulate`` or ``record``.

    Raises: ConfigError.
    """
    if kind in _PLAYED:
        return _PLAYED[kind](**axes_of(config, fixed=True))
    how: dict[str, Any] = {**how_to_make(config), **axes_of(config)}
    try:
        return make_mesh(**how)
    except ShardError as e:
        raise config.error(("mesh",), e.message) from None


# ---------------------------------------------------------------- [model]


@dataclass
class Module:
    """A module, and the source of its values: a ``directory``, or the module itself."""

    module: nn.Module
    directory: str = ""
    load: Mapping[str, Any] = field(default_factory=dict)


def hugging_face(
    directory: str,
    values: Literal["load", "init"] = "load",
    attn_implementation: str = "sdpa",
    real: bool = False,
) -> Module:
    """Make the causal language model that a Hugging Face directory's ``config.json`` describes.

    ``directory``  written by ``save_pretrained``; its ``config.json`` names the model.
    ``values``  "load": the directory's tensors; "init": drawn at random, see the table [init].
    ``attn_implementation``  the attention function of transformers.
    It is made on the meta device, in its configuration's dtype; ``real``: with random values.
    """
    try:
        import transformers
    except ImportError:
        text = f"directory={directory} is read by transformers: pip install transformers"
        raise BadArgument(text, op="model") from None
    if not os.path.isfile(os.path.join(directory, "config.json")):
        raise BadArgument(f"directory={directory} holds no config.json", op="model")
    transformers.logging.set_verbosity_error()
    found = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("cpu" if real else "meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = transformers.AutoModelForCausalLM.from_config(
            found, attn_implementation=attn_implementation
        )
    return Module(module.train(), directory if values == "load" else "")


def module_of(config: Config, meta: bool = False, real: bool = False) -> Module:
    """Make the module of ``[model]``; ``meta``: without its values, ``real``: with them.

    Raises: ConfigError.
    """
    table = config.table("model")
    if ("make" in table) == ("directory" in table):
        text = 'write make = "module:function" or directory = "a Hugging Face directory"'
        wanted = [] if "make" in table else ["make", "directory"]
        raise missing(config, ("model",), wanted, text)
    if "directory" in table:
        made = call(hugging_face, config, ("model",), beside=LOADING, real=real)
        others = keys_of(load_hf).keys() - LOADING | keys_of(hugging_face).keys()
        made.load = arguments(load_hf, config, ("model",), beside=others)
        return made
    with torch.device("meta") if meta or ("init" in config.tables and not real) else nullcontext():
        module = make(config, ("model",))
    if not isinstance(module, nn.Module):
        raise config.error(("model", "make"), f"this makes {type(module).__name__}, not a module")
    return Module(module)


# ---------------------------------------------------------------- [layout]


@dataclass
class Rules:
    """Rules for ``parallelize``, and the layouts of token ids and labels [B, S]."""

    rules: ModuleRules
    tokens: str
    labels: str


def placing(config: Config) -> dict[str, Any]:
    """Return the arguments of ``parallelize`` in ``[layout]``, without the rules.

    Raises: ConfigError for a key that neither it nor the recipe takes.
    """
    name = config.table("layout").get("recipe")
    own = keys_of(getattr(recipes, name), 2, PLACING) if name in RECIPES else ()
    others = keys_of(parallelize, 2).keys() - PLACING
    return arguments(parallelize, config, ("layout",), 2, others, ("recipe", "rules", *own))


def rules_of(config: Config, module: nn.Module, mesh: Mesh) -> Rules:
    """Return the rules of ``[layout]``, by a recipe or written out.

    Raises: ConfigError.
    """
    table = config.table("layout")
    if ("recipe" in table) == ("rules" in table):
        text = 'write recipe = "megatron1d" or rules = [["*.weight", "x ."], ["*", "..."]]'
        raise config.error(("layout",), text)
    if "recipe" in table:
        found = _recipe(config, ("layout",), module, mesh)
        return Rules(found, found.tokens, found.labels)
    rows = typed(table["rules"], list, config, ("layout", "rules"))
    where = "data ..." if "data" in mesh.names else "..."
    return Rules([tuple(r) if isinstance(r, list) else r for r in rows], where, where)


def _recipe(config: Config, path: tuple[str, ...], module: nn.Module, mesh: Mesh) -> recipes.Recipe:
    """Return the rules of a table's ``recipe``; ``weights`` is a table of another recipe."""
    table = config.table(*path)
    name = typed(table.get("recipe"), RecipeName, config, (*path, "recipe"))
    function = getattr(recipes, name)
    _check_apart(config, path, function)
    more: dict[str, object] = {}
    if "weights" in table:
        if "weights" not in keys_of(function):
            raise unknown(config, path, "weights", keys_of(function, 2))
        more["weights"] = _recipe(config, (*path, "weights"), module, mesh)
    beside = ("recipe", "weights", "inputs", *(PLACING if path == ("layout",) else ()))
    with warnings.catch_warnings():
        # guessed roles are still right
        warnings.simplefilter("ignore")
        return call(function, config, path, module, mesh, beside=beside, **more)


def _check_apart(config: Config, path: tuple[str, ...], recipe: Callable[..., object]) -> None:
    """Refuse one axis for two arguments of a recipe."""
    table = config.table(*path)
    own = keys_of(recipe, 2, NO_AXES)
    axes = {n: table.get(n, p.default) for n, p in own.items() if isinstance(p.default, str)}
    for key, other in itertools.permutations(axes, 2):
        if key in table and axes[key] and axes[other] == axes[key]:
            text = f"{axes[key]!r} is the axis that {table['recipe']} takes for {other}"
            raise config.error((*path, key), text)


# ---------------------------------------------------------------- [data]


def evaluating(config: Config) -> Config:
    """Return the configuration in which ``[eval]`` has its own batch and layout, or ``[data]``'s."""
    data = {k: v for k, v in config.table("data").items() if k in ("batch", "layout")}
    return replace(config, tables={**config.tables, "eval": {**data, **config.table("eval")}})


def check_data(config: Config, where: str = "data", beside: Iterable[str] = ()) -> None:
    """Check ``[data]``, or ``[eval]``, without reading rows."""
    others = keys_of(data, 1).keys() - {"data": DATA, "eval": EVAL}[where]
    own = arguments(data, config, (where,), 1, others, (*SOURCES, *beside))
    if own.get("workers", 0) > 1024:
        raise config.error((where, "workers"), f"1,024 at most, not {own['workers']}")
    name = source_of(config, where)
    if name != "dataset":
        given = arguments(getattr(datasets, name), config, (where, name))
        words = given.get("tokenizer", "bytes")
        if words != "bytes" and not os.path.isdir(words):
            text = f'{shown(words)} is no directory: write "bytes", or a directory with a tokenizer'
            raise config.error((where, name, "tokenizer"), text)


def source_of(config: Config, where: str) -> str:
    """Return the name of the table of ``[data]`` with the source of its rows."""
    given = [k for k in SOURCES if k in config.table(where)]
    if len(given) != 1:
        *tables, last = (f"[{where}.{k}]" for k in SOURCES)
        text = f"rows come from one of the tables {', '.join(tables)} and {last}"
        raise config.error((where,), text)
    return given[0]


def rows_of(config: Config, where: str = "data") -> Any:
    """Make the dataset of ``[data]``, or of ``[eval]``.

    Raises: ConfigError.
    """
    name = source_of(config, where)
    if name == "dataset":
        return make(config, (where, name))
    return call(getattr(datasets, name), config, (where, name))


def batches(
    made: "Built", rows: Any, state: Mapping[str, int] | None = None, where: str = "data"
) -> Batches:
    """Make the batches of ``[data]``, in the layouts of the recipe.

    ``where``  "eval" for those of ``[eval]``, which are in order.
    Raises: ConfigError.
    """
    config = made.config
    try:
        first = rows[0]
    except (TypeError, KeyError, IndexError) as e:
        raise config.error((where,), f"a dataset has a length and rows: {e}") from None
    own = config.table(where)
    if where == "data" and own.get("batch", 1) > len(rows):
        text = f"{own['batch']} rows of a dataset that has {len(rows)}"
        raise config.error(("data", "batch"), text)
    layout = own["layout"] if "layout" in own else _lying(first, made.rules)
    more: dict[str, Any] = {"mesh": made.mesh, "state": state, "layout": layout}
    if where == "eval":
        more["shuffle"] = False
    if isinstance(first, tuple | list):
        # the last field of a pair is its labels
        more["ignore"] = {len(first) - 1: -100}
    try:
        return call(data, config, (where,), rows, beside=("layout", "every", *SOURCES), **more)
    except ConfigError as e:
        key = {UnevenSplit: "batch", LayoutSyntax: "layout"}.get(type(e.__cause__))
        if key is None:
            raise
        raise config.error((where, key), e.__cause__.message) from None


def labels_of(batch: object) -> Any:
    """Return the labels of a batch: the field of that name, or the last of several."""
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return datasets.fields(batch)[-1]


def counted(batch: object) -> Any:
    """Count the labels that are not ignored; 1 for a batch without such labels."""
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return 1
    return (labels != -100).sum()


def _lying(row: Any, rules: Rules) -> object:
    """Return a layout per field of a row: the recipe's for labels, its tokens' for others."""
    paths, leaves, tree = optree.tree_flatten_with_path(row)
    last = len(leaves) - 1
    out = []
    for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        is_labels = path[-1] == "labels" if path and isinstance(path[-1], str) else i == last > 0
        text = rules.labels if is_labels else rules.tokens
        if not text.endswith("...") and getattr(x, "ndim", 0) != 1:
            text = f"{Layout.parse(text).dims[0]} ..."
        out.append(text)
    return optree.tree_unflatten(tree, out)


# ---------------------------------------------------------------- [optimizer], [precision]


def optimizer(config: Config, module: nn.Module | None = None) -> Transform:
    """Make the transform of ``[optimizer]`` and of its inner tables.

    Raises: ConfigError.
    """
    table = config.table("optimizer")
    if not table:
        text = 'this table must be there: [optimizer], name = "adamw", lr = 3e-4'
        raise config.error(("optimizer",), text)
    more = {}
    if table.get("name") == "muon" and module is not None and "matrices" not in table:
        more["matrices"] = recipes.matrices(module)
    tx: Any = named("optimizer", config, ("optimizer",), beside=WRAPPERS, **more)
    policy = optional(Precision, config, "precision")
    for name, wrapper in WRAPPERS.items():
        path = ("optimizer", name)
        if name == "clip" and name in table:
            tx = optim.chain(call(wrapper, config, path), tx)
        elif name == "zero":
            tx = _zero(config, policy, tx)
        elif name in table:
            tx = call(wrapper, config, path, tx)
    return tx


def _zero(config: Config, policy: Precision | None, tx: Transform) -> Transform:
    """Make ``[optimizer.zero]``, with the dtypes of ``[precision]`` and the tiers of ``[tiers]``.

    Without it ``[precision]`` has a transform of its own.
    """
    own, more = config.table("optimizer", "zero"), dict[str, Any]()
    tiers = optional(optim.Tiers, config, "tiers")
    if tiers is not None:
        if own.get("stage") != 3:
            text = "blocks are loaded as stage 3 gathers them: write stage = 3 in [optimizer.zero]"
            raise config.error(("tiers",), text)
        more["tiers"] = tiers
    if "zero" not in config.table("optimizer"):
        return tx if policy is None else optim.mixed(tx, policy)
    if policy is not None:
        more |= {k: v for k, v in policy.for_zero().items() if k not in own and v is not None}
    return call(optim.zero, config, ("optimizer", "zero"), tx, **more)


# ---------------------------------------------------------------- all of it


@dataclass
class Built:
    """The objects of a training step: the module, its parameters, the optimizer and the loss."""

    config: Config
    mesh: Mesh
    module: nn.Module
    apply: Apply
    params: Params
    rules: Rules
    tx: Transform
    loss: Callable[..., Tensor]
    policy: Precision | None

    @property
    def accumulate(self) -> int:
        """Batches per update."""
        return self.config.tables.get("accumulate", 1)

    @property
    def whole(self) -> bool:
        """Whether each rank keeps complete blocks of parameters: true but at ZeRO's stage 3."""
        return self.config.table("optimizer", "zero").get("stage", 1) < 3

    def start(self) -> Params:
        """Return the parameters that are trained: at stage 3 this rank's parts.

        Raises: ConfigError if ``[tiers]`` does not hold them.
        """
        if self.whole:
            return self.params
        try:
            return self.tx.shard(self.params)
        except ShardError as e:
            if e.op != "tiers":
                raise
            raise self.config.error(("tiers",), told(e)) from e

    def named(self, params: Params) -> Any:
        """Return parameters by their names, for a checkpoint or an export."""
        return params if self.whole else optim.state_dict(params)


def state_of(made: Built, params: Params) -> Any:
    """Make the optimizer's first state.

    Raises: ConfigError if it refuses the parameters.
    """
    try:
        return made.tx.init(params)
    except ShardError as e:
        zero = e.op == "zero" and "axis" in made.config.table("optimizer", "zero")
        raise made.config.error(("optimizer", *("zero", "axis") * zero), told(e)) from e


def built(config: Config, values: bool = True) -> Built:
    """Make everything but the dataset on the mesh in scope; ``values=False``: on the meta device.

    Raises: ConfigError.
    """
    mesh = current_mesh()
    made = module_of(config, meta=not values)
    takes = inspect.signature(made.module.forward).parameters
    packed = "documents" in config.table("data") and "loss" not in config.tables
    if packed and "position_ids" not in takes:
        raise config.error(
            ("data", "documents"),
            f"{type(made.module).__name__}.forward takes no position_ids, so it would attend "
            "across documents: write [data.text], or loss with a mask of its own",
        )
    rules = rules_of(config, made.module, mesh)
    apply, params = _placed(config, made, rules, mesh, values)
    _check_axes(config, mesh, rules, params)
    policy = optional(Precision, config, "precision")
    if policy is not None:
        params = policy.to_param(params)
    tx = optimizer(config, made.module)
    loss = loss_function(config, made.module, apply)
    if policy is not None and policy.compute not in (None, policy.param):
        inner = loss
        loss = lambda p, batch: inner(policy.to_compute(p), batch)  # noqa: E731
    return Built(config, mesh, made.module, apply, params, rules, tx, loss, policy)


def _placed(
    config: Config, made: Module, rules: Rules, mesh: Mesh, values: bool
) -> tuple[Apply, dict[str, ShardedTensor]]:
    """Call ``parallelize``, ``init`` or ``load_hf``, as the file's tables require."""
    remat = list(config.table("remat").items())
    how: dict[str, Any] = {"mesh": mesh, "remat": remat, **placing(config)}
    how["stages"] = _stages(config, made.module, rules, mesh)
    # from there they are taken; the device need not hold them all
    how["host"] = "tiers" in config.tables
    try:
        if values and made.directory:
            return load_hf(made.directory, made.module, rules.rules, **made.load, **how)
        meta = any(p.is_meta for p in made.module.parameters())
        if values and (meta or "init" in config.tables):
            own = arguments(init, config, ("init",), 2, BESIDE_INIT)
            return init(made.module, rules.rules, **own, **how)
        return parallelize(made.module, rules.rules, **how)
    except ShardError as e:
        raise config.error(_table_of(e, remat), e.message) from e


class _Called(BaseException):
    """Raised by what stands for the module, with the arguments of its first call."""


def _stages(config: Config, module: nn.Module, rules: Rules, mesh: Mesh) -> Stages | None:
    """Return the stages of the file; for ``memory`` with the inputs of a first micro-batch."""
    found = optional(Stages, config, "stages")
    if found is None or found.memory is None:
        return found
    takes = arguments_of(module.forward)

    def apply(params: Params, *args: Any, **kwargs: Any) -> None:
        raise _Called(dict(zip(positional(takes, len(args)), args, strict=True)) | kwargs)

    loss: Any = loss_function(config, module, cast(Any, apply))
    made = Built(config, mesh, module, cast(Any, apply), {}, rules, cast(Any, None), loss, None)
    batch = next(iter(batches(made, rows_of(config))))
    (first,), _ = MicroBatches((batch,), {}, config.tables.get("microbatches", 1))[0]
    try:
        loss({}, first)
    except _Called as e:
        return replace(found, example=e.args[0])
    raise config.error(("stages", "memory"), "the loss calls no module with stages")


def _table_of(e: ShardError, remat: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    if "sl.Stages" in (e.fix or ""):
        return ("stages",)
    if "remat" in e.message:
        return ("remat", *(k for k, v in remat if repr(k) in e.message or repr(v) in e.message))[:2]
    return ("model", "directory") if e.op == "load_hf" else ("layout",)


def _check_axes(
    config: Config, mesh: Mesh, rules: Rules, params: Mapping[str, ShardedTensor]
) -> None:
    """Refuse an axis of several ranks over which nothing is split: they would do equal work.

    A plan may want that, and its file says so: ``[layout] axes`` has the axis under its own name.
    """
    texts = [rules.tokens, rules.labels, str(config.table("data").get("layout", ""))]
    used = set(re.findall(r"\w+", " ".join(texts)))
    for layout in map(layout_of, params.values()):
        used.update(layout.named)
    used.update(datasets.fields(config.table("optimizer", "zero").get("axis", ())))
    used.add(config.table("stages").get("axis", ""))
    said = config.table("layout").get("axes", {})
    used.update(name for name, axis in said.items() if name == axis)
    own = keys_of(getattr(recipes, config.table("layout").get("recipe", "ddp")))
    names = used | {p.default for p in own.values() if isinstance(p.default, str)} - {*mesh.axes}
    for axis, n in mesh.axes.items():
        if n > 1 and axis not in used:
            left = getattr(rules.rules, "left", {})
            why = "".join([f": {name}: {text}" for name, text in left.items()][:1])
            text = f"nothing is split over these {n} ranks{near(axis, names)}{why}"
            raise config.error(("mesh", axis), text)


def loss_function(config: Config, module: nn.Module, apply: Apply) -> Callable[..., Tensor]:
    """Return ``loss(params, batch)``: the file's function, else a loss from forward's output.

    See docs/command.md.
    """
    text = config.tables.get("loss")
    if text:
        return _own_loss(config, imported(text, partial(config.error, ("loss",))), apply)
    takes = inspect.signature(module.forward).parameters
    known = [n for n, p in takes.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    foreign = hasattr(module, "config") and hasattr(module, "main_input_name")
    fixed = {"use_cache": False} if foreign and "use_cache" in takes else {}

    def output(params: Params, batch: object) -> object:
        if isinstance(batch, Mapping):
            given = dict(batch)
            if foreign or "labels" not in known:
                given.pop("labels", None)
            if foreign or given.keys() <= takes.keys():
                return apply(params, **given, **fixed)
        return apply(params, *datasets.fields(batch)[: len(known)])

    return lambda params, batch: _scalar(config, output(params, batch), labels_of(batch))


def _own_loss(config: Config, own: Callable[..., Any], apply: Apply) -> Callable[..., Tensor]:
    """Return a file's function of (apply, params, batch).

    Raises: ConfigError if it is no such function.
    """
    name = named_as(own)
    try:
        inspect.signature(own).bind(apply, {}, {})
    except TypeError as e:
        text = f"{name} must be a function of (apply, params, batch): {e}"
        raise config.error(("loss",), text) from None
    except ValueError:
        # a builtin without a signature
        pass

    def loss(params: Params, batch: object) -> Tensor:
        found = own(apply, params, batch)
        if not isinstance(found, Tensor) or found.ndim:
            text = f"{name} gives {_shape(found, list)}, not a loss: a tensor without dimensions"
            raise config.error(("loss",), text)
        return wide(found)

    return loss


def _scalar(config: Config, out: object, labels: object) -> Tensor:
    found = loss_of(out, labels)
    if found is not None:
        return found
    out = getattr(out, "logits", out)
    text = (
        f"forward gives {_shape(out, tuple)}, no loss and no logits: write loss = "
        '"module:function", a function of (apply, params, batch)'
    )
    raise config.error(("loss",), text)


def _shape(x: object, form: Callable[..., object]) -> object:
    """Return the shape of a tensor, or the name of another type."""
    return form(x.shape) if isinstance(x, Tensor) else type(x).__name__
