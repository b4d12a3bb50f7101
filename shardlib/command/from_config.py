"""Objects from a configuration's tables: mesh, module, dataset, rules, optimizer and loss.

Every function here passes a table to one public function as its arguments, see config.py.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

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
    called,
    missing,
    named,
    near,
    schedules,
    shown,
    told,
    transforms,
    unknown,
)
from shardlib.command.config import parameters as keys_of
from shardlib.data import Batches, data
from shardlib.errors import BadArgument, LayoutSyntax, ShardError, UnevenSplit
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, accelerator, launched, make_mesh, record, simulate
from shardlib.mesh.mesh import check_timeout
from shardlib.modules import init, parallelize, recipes
from shardlib.modules.apply import Apply
from shardlib.optim import Precision, Transform
from shardlib.planning.plan import loss_of
from shardlib.tensor import ShardedTensor, layout_of

__all__ = [
    "Built", "axes_of", "batches", "built", "check_data", "check_init", "check_layout",
    "check_tables", "hugging_face", "labels_of", "loss_function", "mesh_of", "module_of", "optimizer",
    "precision", "rows_of", "rules_of", "schedules", "state_of", "transforms", "under_launcher",
]  # fmt: skip

RECIPES = ("megatron1d", "optimus2d", "tesseract", "cube3d", "ring", "ddp", "fsdp")
SOURCES = ("text", "documents", "tokens", "dataset")
LOADING = ("missing", "extra", "cast", "timeout")  # of load_hf, in [model]
DATA = ("batch", "layout", "shuffle", "seed", "last", "workers")  # of data, in [data]
EVAL = ("batch", "layout", "workers")  # and in [eval]
PLACING = ("pad", "axes", "inputs")  # of parallelize, in [layout]
WRAPPERS: dict[str, Callable[..., Any]] = {  # tables below [optimizer], the innermost first
    "clip": optim.clip_by_global_norm,
    "skip_nonfinite": optim.skip_nonfinite,
    "ema": optim.ema,
    "zero": optim.zero,
    "loss_scale": optim.loss_scale,
}


def check_tables(config: Config, run: Callable[..., Any]) -> None:
    """Refuse top-level tables and keys of the file that are no arguments of ``run``."""
    known = keys_of(run)
    for key, value in config.tables.items():
        if key not in known:
            raise unknown(config, (), key, known)
        if known[key].annotation is Table and not isinstance(value, Mapping):
            raise config.error((key,), f"must be a table: write [{key}] on a line of its own")
    plain = {k: v for k, v in config.tables.items() if known[k].annotation is not Table}
    arguments(run, config, (), plain)


Table = Mapping[str, Any]


# ---------------------------------------------------------------- [mesh]


def axes_of(config: Config) -> dict[str, int]:
    """Return the axis sizes of ``[mesh]``.

    Raises: ConfigError.
    """
    own = keys_of(make_mesh)
    axes = {}
    for key, value in config.table("mesh").items():
        if key in own:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            said = near(key, own) if near(key, own) else "; axes have whole numbers"
            raise config.error(("mesh", key), f"this is no size of an axis{said}")
        if value < 1 and value != -1:
            raise config.error(("mesh", key), f"an axis has 1 rank at least, not {value}")
        axes[key] = value
    _mesh_arguments(config, axes)
    if not axes:
        raise config.error(("mesh",), "a mesh has an axis: write data = 2 in [mesh]")
    return axes


def _mesh_arguments(config: Config, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the other keys of ``[mesh]``, which are not axes.

    Raises: ConfigError.
    """
    table = {k: v for k, v in config.table("mesh").items() if k not in axes}
    known = arguments(make_mesh, config, ("mesh",), table)
    device = known.get("device", "cpu")
    try:
        torch.device(device)
    except RuntimeError:
        here = [found.type] if (found := accelerator()) else []
        text = f"no such device {shown(device)}: write {' or '.join(map(shown, [*here, 'cpu']))}"
        raise config.error(("mesh", "device"), text) from None
    if "timeout" in known:
        try:
            check_timeout(known["timeout"], "make_mesh", "")
        except ShardError as e:
            raise config.error(("mesh", "timeout"), e.message) from None
    return known


def under_launcher() -> bool:
    """Return whether torchrun, or another launcher, started this process with its rank."""
    return launched("shardlib")


def mesh_of(config: Config, kind: str = "ranks") -> Mesh:
    """Make the mesh: of these processes, or by ``simulate`` or ``record``.

    Raises: ConfigError.
    """
    axes = axes_of(config)
    if kind != "ranks":
        free = [n for n, s in axes.items() if s == -1]
        if free:
            raise config.error(
                ("mesh", free[0]), "-1 is found from the number of processes: write a number"
            )
        return simulate(**axes) if kind == "simulate" else record(**axes)
    known = _mesh_arguments(config, axes)
    try:
        how: dict[str, Any] = {**known, **axes}
        return make_mesh(**how)
    except ShardError as e:
        raise config.error(("mesh",), e.message) from None


# ---------------------------------------------------------------- [model]


@dataclass
class Module:
    """A module, and the source of its values: a ``directory``, or the module itself."""

    module: nn.Module
    directory: str = ""
    load: Mapping[str, Any] | None = None


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
        raise BadArgument(
            f"directory={directory} is read by transformers: pip install transformers", op="model"
        ) from None
    if not os.path.isfile(os.path.join(directory, "config.json")):
        raise BadArgument(f"directory={directory} holds no config.json", op="model")
    transformers.logging.set_verbosity_error()
    found: Any = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
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
        own = (*keys_of(hugging_face, taken=("real",)), *LOADING)
        for key in table:
            if key not in own:
                raise unknown(config, ("model",), key, own)
        how = {k: v for k, v in table.items() if k in LOADING}
        made = call(hugging_face, config, ("model",), but=LOADING, real=real)
        made.load = arguments(load_hf, config, ("model",), how, 3)
        return made
    function = called(table["make"], config, ("model", "make"))
    with torch.device("meta") if meta or ("init" in config.tables and not real) else nullcontext():
        module = call(function, config, ("model",), but=("make",))
    if not isinstance(module, nn.Module):
        raise config.error(("model", "make"), f"this makes {type(module).__name__}, not a module")
    return Module(module)


# ---------------------------------------------------------------- [layout]


@dataclass
class Rules:
    """Rules for ``parallelize``, and the layouts of token ids and labels [B, S]."""

    rules: Any
    tokens: str
    labels: str


def _placing(config: Config) -> dict[str, Any]:
    """Return the arguments of ``parallelize`` in ``[layout]``, without the rules."""
    table = {k: v for k, v in config.table("layout").items() if k in PLACING}
    return arguments(parallelize, config, ("layout",), table, 2)


def rules_of(config: Config, module: nn.Module, mesh: Mesh) -> Rules:
    """Return the rules of ``[layout]``, by a recipe or written out.

    Raises: ConfigError.
    """
    table = config.table("layout")
    check_layout(config)
    if "rules" in table:
        rows = [tuple(r) if isinstance(r, list) else r for r in table["rules"]]
        where = "data ..." if "data" in mesh.names else "..."
        return Rules(rows, where, where)
    found = _recipe(config, ("layout",), module, mesh)
    return Rules(found, found.tokens, found.labels)


def check_layout(config: Config) -> None:
    """Check ``[layout]`` without a module: its keys, its recipe, and the mesh's axes."""
    table, axes = config.table("layout"), axes_of(config)
    own = _layout_keys(config)
    for key in table:
        if key not in own and near(key, ("recipe", "rules")):
            raise unknown(config, ("layout",), key, own)
    if ("recipe" in table) == ("rules" in table):
        text = 'write recipe = "megatron1d" or rules = [["*.weight", "x ."], ["*", "..."]]'
        raise config.error(("layout",), text)
    zeros = _zero_axes(config)
    used = _rules_axes(config) if "rules" in table else _recipe_axes(config, ("layout",))
    names = sorted(used | zeros)
    if "recipe" in table:
        _check_apart(config)
    for axis in axes:
        if axis not in names:
            raise config.error(
                ("mesh", axis),
                f"nothing is split over this axis{near(axis, names)} "
                f"({table.get('recipe', 'the rules')} and [optimizer.zero] name {', '.join(names)})",
            )
    for axis in _needed(config, ("layout",)) if "recipe" in table else ():
        if axis not in axes:
            text = f"{table['recipe']} splits over the axis {axis!r}: write {axis} = 2"
            raise config.error(("mesh",), text)
    for axis in sorted(zeros):
        if axis not in axes:
            text = f"[mesh] has no axis {axis!r}{near(axis, axes)}"
            raise config.error(("optimizer", "zero", "axis"), text)


def _zero_axes(config: Config) -> set[str]:
    """Return the axes of ``[optimizer.zero]``."""
    axis = config.table("optimizer", "zero").get("axis", ())
    zeros = [axis] if isinstance(axis, str) else axis
    if not isinstance(zeros, list | tuple) or not all(isinstance(a, str) for a in zeros):
        text = f'write axis = "data" or ["data", "s"], not {zeros!r}'
        raise config.error(("optimizer", "zero", "axis"), text)
    return set(zeros)


def _rules_axes(config: Config) -> set[str]:
    """Return the axes in written rules and in the layout of the rows."""
    table = config.table("layout")
    for key in table:
        if key not in ("rules", *PLACING):
            raise unknown(config, ("layout",), key, ("rules", *PLACING))
    if not isinstance(table["rules"], list):
        text = 'this is a list: [["*.weight", "x ."], ["*", "..."]]'
        raise config.error(("layout", "rules"), text)
    texts = [t for r in table["rules"] if isinstance(r, list) for t in r[1:]]
    texts.append(config.table("data").get("layout", "data ..."))
    return {a for t in texts for a in _axes_in(str(t))}


def _check_apart(config: Config) -> None:
    """Refuse one axis for two arguments of a recipe."""
    table, first = config.table("layout"), {}
    for name, axis in _axis_arguments(config, ("layout",)).items():
        other = first.setdefault(axis, name)
        if not axis or other == name or not {name, other} & set(table):
            continue
        written, taken = (name, other) if name in table else (other, name)
        text = f"{axis!r} is the axis that {table['recipe']} takes for {taken}"
        raise config.error(("layout", written), text)


def _layout_keys(config: Config) -> list[str]:
    name = config.table("layout").get("recipe")
    own = keys_of(getattr(recipes, name), 2) if name in RECIPES else ()
    return list(dict.fromkeys(["recipe", "rules", *PLACING, *own]))


def _axes_in(text: str) -> set[str]:
    try:
        found = Layout.parse(text)
    except ShardError:
        return set()  # the error is raised where the rules are read
    return {*found.axes, *found.partial}


def _function(config: Config, path: Sequence[str]) -> Callable[..., Any]:
    name = config.table(*path).get("recipe")
    if name not in RECIPES:
        hint = near(str(name), RECIPES)
        raise config.error(
            (*path, "recipe"), f"no such recipe{hint} (there are {', '.join(RECIPES)})"
        )
    return getattr(recipes, name)


def _axis_arguments(config: Config, path: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a recipe that are mesh axes, with their values."""
    table = config.table(*path)
    given = {}
    for n, p in keys_of(_function(config, path), 2).items():
        if isinstance(p.default, str) and n not in ("schedule", "mlp", "experts"):
            given[n] = str(table.get(n, p.default))
    return given


def _recipe_axes(config: Config, path: Sequence[str]) -> set[str]:
    inner = config.table(*path).get("weights")
    more = _recipe_axes(config, (*path, "weights")) if inner is not None else set()
    experts = str(config.table(*path).get("experts", "")).split()
    return {*_axis_arguments(config, path).values(), *more, *experts}


def _needed(config: Config, path: Sequence[str]) -> list[str]:
    inner = config.table(*path).get("weights")
    more = _needed(config, (*path, "weights")) if inner is not None else []
    own = _axis_arguments(config, path)
    wanted = (
        own.values()
        if config.table(*path)["recipe"] == "ddp"
        else (a for n, a in own.items() if n != "data")
    )
    return [*wanted, *more]


def _recipe(config: Config, path: Sequence[str], module: nn.Module, mesh: Mesh) -> Any:
    function = _function(config, path)
    own = PLACING if path == ("layout",) else ()
    more: dict[str, Any] = {}
    if "weights" in config.table(*path):
        if "weights" not in keys_of(function):
            raise unknown(config, path, "weights", keys_of(function, 2))
        more["weights"] = _recipe(config, (*path, "weights"), module, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guessed roles are still right
        return call(
            function, config, path, module, mesh, but=("recipe", "weights", "inputs", *own), **more
        )


# ---------------------------------------------------------------- [data]


def check_data(config: Config, where: str = "data", more: Iterable[str] = ()) -> str:
    """Check ``[data]`` without reading rows; return the name of the table with their source.

    ``where``  "eval" for the rows of evaluation, whose table has ``more`` keys.
    """
    table = config.table(where)
    known = (*(DATA if where == "data" else EVAL), *more, *SOURCES)
    for key in table:
        if key not in known:
            raise unknown(config, (where,), key, known)
    given = [k for k in SOURCES if k in table]
    if len(given) != 1:
        tables = " and ".join(f"[{where}.{k}]" for k in SOURCES).replace(" and ", ", ", 2)
        raise config.error((where,), f"rows come from one of the tables {tables}")
    name = given[0]
    if not isinstance(table[name], Mapping):
        key = "make" if name == "dataset" else "path"
        raise config.error(
            (where, name), f'must be a table: write [{where}.{name}] and {key} = "..." below'
        )
    own = {k: v for k, v in table.items() if k not in (*SOURCES, *more)}
    lacks = {"batch": 1} if where == "eval" else {}
    if arguments(data, config, (where,), lacks | own, 1).get("workers", 0) > 1024:
        raise config.error((where, "workers"), f"1,024 at most, not {own['workers']}")
    if name == "dataset":
        if "make" not in table[name]:
            text = 'make must be given, as make = "module:function"'
            raise missing(config, (where, name), ["make"], text)
    else:
        given = arguments(getattr(datasets, name), config, (where, name), table[name])
        words = given.get("tokenizer", "bytes")
        if words != "bytes" and not os.path.isdir(words):
            text = f'{shown(words)} is no directory: write "bytes", or a directory with a tokenizer'
            raise config.error((where, name, "tokenizer"), text)
    return name


def rows_of(config: Config, where: str = "data", more: Iterable[str] = ()) -> Any:
    """Make the dataset of ``[data]``, or of ``[eval]``.

    Raises: ConfigError.
    """
    name = check_data(config, where, more)
    path = (where, name)
    if name == "dataset":
        function = called(config.table(*path)["make"], config, (*path, "make"))
        return call(function, config, path, but=("make",))
    return call(getattr(datasets, name), config, path)


def batches(
    config: Config, rows: Any, rules: Rules, mesh: Mesh, state: Any = None, where: str = "data"
) -> Batches:
    """Make the batches of ``[data]``, in the layouts of the recipe.

    ``where``  "eval" for those of ``[eval]``: in order, and of the same size unless ``[eval]`` has
               a ``batch``.
    Raises: ConfigError.
    """
    try:
        first = rows[0]
    except (TypeError, KeyError, IndexError) as e:
        raise config.error((where,), f"a dataset has a length and rows: {e}") from None
    own = config.table(where)
    batch = own.get("batch", config.table("data").get("batch", 1))
    if where == "data" and batch > len(rows):
        raise config.error(("data", "batch"), f"{batch} rows of a dataset that has {len(rows)}")
    given = own.get("layout", config.table("data").get("layout"))
    more: dict[str, Any] = {"mesh": mesh, "state": state}
    if where == "eval":
        more |= {"shuffle": False, "batch": batch}
    layout = given if given is not None else _lying(first, rules)
    if isinstance(first, tuple | list):  # the last field of a pair is its labels
        more["ignore"] = {len(first) - 1: -100}
    but = ("layout", *SOURCES, *(k for k in own if k not in DATA or k in more))
    try:
        return call(data, config, (where,), rows, but=but, layout=layout, **more)
    except ConfigError as e:
        if isinstance(e.__cause__, UnevenSplit):
            raise config.error((where, "batch"), e.__cause__.message) from None
        if isinstance(e.__cause__, LayoutSyntax):
            raise config.error((where, "layout"), e.__cause__.message) from None
        raise


def labels_of(batch: Any) -> Any:
    """Return the labels of a batch: the field of that name, or the last of several."""
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return batch[-1] if isinstance(batch, tuple | list) else batch


def _lying(row: Any, rules: Rules) -> Any:
    """Return a layout per field of a row: the recipe's for labels, its tokens' for others."""
    paths, leaves, tree = optree.tree_flatten_with_path(row)
    last = len(leaves) - 1
    out = []
    for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        is_labels = path[-1] == "labels" if path and isinstance(path[-1], str) else i == last > 0
        text = rules.labels if is_labels else rules.tokens
        dims = getattr(x, "ndim", 0) + 1
        out.append(text if text.endswith("...") or dims == 2 else _first(text))
    return optree.tree_unflatten(tree, out)


def _first(text: str) -> str:
    return f"{Layout.parse(text).dims[0]} ..."


# ---------------------------------------------------------------- [optimizer], [precision]


def precision(config: Config) -> Precision | None:
    """Return the dtypes of ``[precision]``; None keeps those of the module.

    Raises: ConfigError.
    """
    return call(Precision, config, ("precision",)) if "precision" in config.tables else None


def optimizer(config: Config, module: nn.Module | None = None) -> Transform:
    """Make the transform of ``[optimizer]`` and of its inner tables.

    Raises: ConfigError.
    """
    table = config.table("optimizer")
    if not table:
        raise config.error(
            ("optimizer",), 'this table must be there: [optimizer], name = "adamw", lr = 3e-4'
        )
    more = {}
    if table.get("name") == "muon" and module is not None:
        more["matrices"] = recipes.matrices(module)
    more = {k: v for k, v in more.items() if k not in table}
    tx: Any = named("optimizer", config, ("optimizer",), but=WRAPPERS, **more)
    policy = precision(config)
    for name in WRAPPERS:
        if name in table and not isinstance(table[name], Mapping):
            raise config.error(("optimizer", name), f"must be a table: write [optimizer.{name}]")
    if "clip" in table:
        tx = optim.chain(call(WRAPPERS["clip"], config, ("optimizer", "clip")), tx)
    for name in ("skip_nonfinite", "ema"):
        if name in table:
            tx = call(WRAPPERS[name], config, ("optimizer", name), tx)
    if "zero" in table:
        own = {} if policy is None else policy.for_zero()
        more = {k: v for k, v in own.items() if k not in table["zero"] and v is not None}
        tx = call(WRAPPERS["zero"], config, ("optimizer", "zero"), tx, **more)
    elif policy is not None:
        tx = optim.mixed(tx, policy)
    if "loss_scale" in table:
        tx = call(WRAPPERS["loss_scale"], config, ("optimizer", "loss_scale"), tx)
    return tx


# ---------------------------------------------------------------- all of it


@dataclass
class Built:
    """The objects of a training step: the module, its parameters, the optimizer and the loss."""

    config: Config
    mesh: Mesh
    module: nn.Module
    apply: Apply
    params: Any
    rules: Rules
    tx: Transform
    loss: Callable[..., Tensor]
    policy: Precision | None

    @property
    def whole(self) -> bool:
        """Whether each rank keeps complete blocks of parameters: true but at ZeRO's stage 3."""
        return self.config.table("optimizer", "zero").get("stage", 1) < 3

    def start(self) -> Any:
        """Return the parameters that are trained: at stage 3 this rank's parts."""
        return self.params if self.whole else self.tx.shard(self.params)


def state_of(config: Config, made: "Built", params: Any) -> Any:
    """Make the optimizer's first state.

    Raises: ConfigError if it refuses the parameters.
    """
    try:
        return made.tx.init(params)
    except ShardError as e:
        zero = e.op == "zero" and "axis" in config.table("optimizer", "zero")
        raise config.error(("optimizer", *(("zero", "axis") if zero else ())), told(e)) from e


def built(config: Config, mesh: Mesh, values: bool = True) -> Built:
    """Make everything but the dataset; with ``values=False`` on the meta device.

    Raises: ConfigError.
    """
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
    policy = precision(config)
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
    how: dict[str, Any] = {"mesh": mesh, **_placing(config)}
    remat = [(k, v) for k, v in config.table("remat").items()]
    try:
        if values and made.directory:
            how["remat"] = remat
            known = keys_of(load_hf)
            return load_hf(
                made.directory, made.module, rules.rules, **(made.load or {}),
                **{k: v for k, v in how.items() if k in known},
            )  # fmt: skip
        meta = any(p.is_meta for p in made.module.parameters())
        if values and (meta or "init" in config.tables):
            own = check_init(config)
            return init(made.module, rules.rules, remat=remat, **own, **how)
        return parallelize(made.module, rules.rules, remat=remat, **how)
    except ShardError as e:
        raise config.error(_table_of(e, remat), e.message) from e


def _table_of(e: ShardError, remat: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    if "remat" in e.message:
        return ("remat", *(k for k, v in remat if repr(k) in e.message or repr(v) in e.message))[:2]
    return ("model", "directory") if e.op == "load_hf" else ("layout",)


def check_init(config: Config) -> dict[str, Any]:
    """Check the arguments of ``[init]``; keys that other tables have are refused here."""
    return arguments(
        init, config, ("init",), config.table("init"), 2, taken=("mesh", "remat", *PLACING)
    )


def _check_axes(
    config: Config, mesh: Mesh, rules: Rules, params: Mapping[str, ShardedTensor]
) -> None:
    """Refuse an axis of several ranks over which nothing is split: they would do equal work."""
    texts = [rules.tokens, rules.labels, str(config.table("data").get("layout", ""))]
    zero = config.table("optimizer", "zero").get("axis", ())
    used = {a for text in texts for a in _axes_in(text)}
    used |= {a for p in params.values() for a in (*layout_of(p).axes, *layout_of(p).partial)}
    used |= {zero} if isinstance(zero, str) else set(zero)
    for axis, n in mesh.axes.items():
        if n > 1 and axis not in used:
            left = getattr(rules.rules, "left", {})
            why = next((f": {name}: {text}" for name, text in left.items()), "")
            raise config.error(("mesh", axis), f"nothing is split over these {n} ranks{why}")


def loss_function(config: Config, module: nn.Module, apply: Apply) -> Callable[..., Tensor]:
    """Return ``loss(params, batch)``: the file's function, else a loss from forward's output.

    See docs/command.md.
    """
    text = config.tables.get("loss")
    if text:
        return _own_loss(config, called(text, config, ("loss",)), apply)
    takes = inspect.signature(module.forward).parameters
    known = [n for n, p in takes.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    foreign = hasattr(module, "config") and hasattr(module, "main_input_name")
    fixed = {"use_cache": False} if foreign and "use_cache" in takes else {}

    def loss(params: Any, batch: Any) -> Tensor:
        fields = dict(batch) if isinstance(batch, Mapping) else None
        labels = labels_of(batch)
        if fields is not None:
            given = {
                k: v
                for k, v in fields.items()
                if k != "labels" or ("labels" in known and not foreign)
            }
            if all(k in takes for k in given) or foreign:
                out = apply(params, **given, **fixed)
            else:
                out = apply(params, *list(fields.values())[: len(known)])
        else:
            every = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
            out = apply(params, *every[: len(known)])
        return _scalar(config, out, labels)

    return loss


def _own_loss(config: Config, own: Callable[..., Any], apply: Apply) -> Callable[..., Tensor]:
    """Return a file's function of (apply, params, batch).

    Raises: ConfigError if it is no such function.
    """
    name = getattr(own, "__qualname__", repr(own))
    try:
        inspect.signature(own).bind(apply, {}, {})
    except TypeError as e:
        text = f"{name} must be a function of (apply, params, batch): {e}"
        raise config.error(("loss",), text) from None
    except ValueError:  # a builtin without a signature
        pass

    def loss(params: Any, batch: Any) -> Tensor:
        found = own(apply, params, batch)
        if not isinstance(found, Tensor) or found.ndim:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise config.error(
                ("loss",), f"{name} gives {shape}, not a loss: a tensor without dimensions"
            )
        return found.float() if found.dtype in (torch.bfloat16, torch.float16) else found

    return loss


def _scalar(config: Config, out: Any, labels: Any) -> Tensor:
    found = loss_of(out, labels)
    if found is not None:
        return found
    out = getattr(out, "logits", out)
    shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    raise config.error(
        ("loss",),
        f"forward gives {shape}, no loss and no logits: write loss = "
        '"module:function", a function of (apply, params, batch)',
    )
