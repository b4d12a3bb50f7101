"""Conversion of Colossal-AI's legacy configuration to a mesh and a recipe.

The configuration is a dict: ``dict(parallel=dict(...), zero=..., fp16=...)``.
Source: the keys that ``colossalai.legacy.launch`` and ``initialize`` read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardlib.errors import BadArgument, Unsupported, meant, similar
from shardlib.optional import optional_text

KNOWN: dict[str, tuple[str, ...] | None] = {
    "": tuple(
        "parallel zero fp16 clip_grad_norm gradient_accumulation seed gradient_handler".split()
    ),
    "parallel": ("data", "pipeline", "tensor"),
    "parallel.tensor": ("size", "mode", "depth"),
    "zero": ("model_config", "optimizer_config", "stage", "level"),
    "zero.model_config": None,
    "zero.optimizer_config": None,
    "fp16": tuple(
        "mode dtype initial_scale min_scale growth_factor backoff_factor growth_interval "
        "hysteresis max_scale "
        "verbose log_num_zeros_in_grad clip_grad_norm enabled opt_level init_scale".split()
    ),
}
"""Table of a configuration -> its keys, None if any are taken; those of other tables: size."""

MODES = {
    "1d": ("megatron1d", "x"),
    "2d": ("optimus2d", "xy"),
    "2.5d": ("tesseract", "xy"),
    "3d": ("cube3d", "xyz"),
    "sequence": ("ring", "s"),
}
"""Mode of tensor parallelism -> the recipe, and the axes of equal size."""

FIX = (
    'sl.recipes.from_colossalai_config(dict(parallel=dict(data=2, tensor=dict(size=4, mode="2d"))))'
)


@dataclass(frozen=True)
class Legacy:
    """Legacy configuration converted to this library: mesh, recipe and options.

    ``mesh``        axis sizes; ``data`` is -1 where it follows from the number of processes.
    ``recipe``      the name of a recipe in ``sl.recipes``.
    ``zero``        arguments of ``sl.optim.zero``; ``precision``  of ``sl.optim.Precision``, as
                    text.
    ``clip``        the bound of ``clip_by_global_norm``.
    ``accumulate``  batches per update.
    ``notes``       settings without a counterpart that can be left out, and why.

    >>> print(Legacy({"data": 2, "x": 4}, "megatron1d", clip=1.0).toml().strip())
    [mesh]
    data = 2
    x = 4
    <BLANKLINE>
    [layout]
    recipe = "megatron1d"
    <BLANKLINE>
    [optimizer.clip]
    max_norm = 1.0
    """

    mesh: dict[str, int]
    recipe: str
    zero: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, str] = field(default_factory=dict)
    clip: float | None = None
    accumulate: int = 1
    seed: int | None = None
    notes: tuple[str, ...] = ()

    def toml(self) -> str:
        """Write the tables of a file for ``shardlib train``, all but [model], [data] and rates."""
        own = {"accumulate": self.accumulate, "seed": self.seed}
        lines = [f"{k} = {v}" for k, v in own.items() if v not in (1, None)]
        lines += ["[mesh]", *(f"{a} = {n}" for a, n in self.mesh.items())]
        tables = {
            "layout": {"recipe": self.recipe},
            "optimizer.clip": {} if self.clip is None else {"max_norm": self.clip},
            "optimizer.zero": self.zero,
            "precision": self.precision,
        }
        for name, table in tables.items():
            if table:
                lines += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
        return "\n".join([*lines, *(f"# {n}" for n in self.notes), ""])


def from_colossalai_config(config: Mapping[str, Any], world: int | None = None) -> Legacy:
    """Convert Colossal-AI's legacy configuration: mesh sizes, recipe name, ZeRO and precision.

    ``config``  ``dict(parallel=dict(data=, tensor=dict(size=, mode="2d", depth=)), zero=, fp16=,
                ...)``; names in capitals are the user's own, and ignored.
    ``world``   the number of processes, if ``data`` is not given.
    ``found.toml()`` writes it for ``shardlib train``.
    Raises: Unsupported naming a key that has no counterpart, as ``parallel.pipeline``;
            BadArgument.

    >>> found = from_colossalai_config(dict(parallel=dict(data=2, tensor=dict(size=4, mode="2d"))))
    >>> found.mesh, found.recipe
    ({'data': 2, 'x': 2, 'y': 2}, 'optimus2d')
    >>> config = dict(parallel=dict(tensor=dict(size=8, mode="2.5d", depth=2)))
    >>> from_colossalai_config(config, world=16).mesh
    {'data': 2, 'd': 2, 'x': 2, 'y': 2}
    """
    if not isinstance(config, Mapping):
        raise _bad(f"a configuration is a dict, not {type(config).__name__}")
    _table({k: v for k, v in config.items() if isinstance(k, str) and not k.isupper()}, "")
    parallel = _table(config.get("parallel"), "parallel")
    pipeline = _size(parallel.get("pipeline", 1), "parallel.pipeline")
    if pipeline != 1:
        raise _refused(
            f"parallel.pipeline of {pipeline} stages: there are no pipelines here; "
            "a mesh of the same number of ranks splits each layer instead"
        )
    mesh, recipe = _tensor(parallel.get("tensor"))
    data = _data(parallel.get("data"), math.prod(mesh.values()), world)
    notes: list[str] = []
    if "gradient_handler" in config:
        notes.append("gradient_handler: gradients are summed where they are needed")
    zero = _zero(config.get("zero"), notes)
    clip = _clip(config.get("clip_grad_norm"))
    accumulate = _size(config.get("gradient_accumulation", 1), "gradient_accumulation")
    precision = _precision(config.get("fp16"), notes)
    if data != 1 or zero or not mesh:
        mesh = {"data": data, **mesh}
    seed = config.get("seed")
    return Legacy(mesh, recipe, zero, precision, clip, accumulate, seed, tuple(notes))


def _tensor(given: object) -> tuple[dict[str, int], str]:
    """Return (mesh, recipe) for ``parallel.tensor``."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = {"size": given}
    table = _table(given, "parallel.tensor")
    size, mode = _size(table.get("size", 1), "parallel.tensor.size"), table.get("mode")
    if mode is not None:
        given, mode = mode, str(mode).lower()
        if mode not in MODES:
            hint = meant(similar(str(given), MODES, 1, 0.3))
            raise _bad(f"parallel.tensor.mode={given!r} is none of {', '.join(MODES)}{hint}")
    if "depth" in table and mode != "2.5d":
        raise _bad(f"parallel.tensor.depth is of mode '2.5d', not {mode!r}")
    if size == 1 and mode is None:
        return {}, "ddp"
    # known to be of mode 2.5d
    depth = _size(table.get("depth", 1), "parallel.tensor.depth")
    if size % depth:
        raise _bad(f"parallel.tensor: {size} ranks are no whole planes of depth={depth}")
    recipe, axes = MODES[mode or "1d"]
    side: int = round((size // depth) ** (1 / len(axes)))
    if side ** len(axes) != size // depth:
        what = {2: "square", 3: "cube"}[len(axes)]
        raise _bad(
            f"parallel.tensor: size={size} makes no {what} in mode {mode!r}; "
            "here a mesh need be none"
        )
    mesh = dict.fromkeys(axes, side)
    if mode == "2.5d":
        mesh = {"d": depth, **mesh}
    return mesh, recipe


def _data(given: object, tensor: int, world: int | None) -> int:
    if world is not None:
        _size(world, "world")
    if given is not None:
        size = _size(given, "parallel.data")
        if world is not None and size * tensor != world:
            raise _bad(
                f"data={size} times tensor={tensor} is {size * tensor}, not the {world} processes"
            )
        return size
    if world is None:
        return -1
    if world % tensor:
        raise _bad(f"{world} processes do not divide by tensor={tensor}")
    return world // tensor


def _zero(given: object, notes: list[str]) -> dict[str, Any]:
    """Return the arguments of ``zero`` for the table ``zero``, and add to the notes."""
    if given is None:
        return {}
    table = _table(given, "zero")
    stage = table.get("stage", table.get("level"))
    if stage is None:
        stage = 3 if "model_config" in table else 2
    if stage not in (1, 2, 3):
        raise _bad(f"zero.stage={stage!r} is none of 1, 2, 3")
    inner = {
        **_table(table.get("model_config"), "zero.model_config"),
        **_table(table.get("optimizer_config"), "zero.optimizer_config"),
    }
    policy = str(inner.get("tensor_placement_policy", "cuda"))
    if policy not in ("cuda", "auto") or inner.get("cpu_offload"):
        raise _refused(
            f"zero.model_config: tensor_placement_policy={policy!r} keeps parameters in host "
            'memory; what is kept for backward can go there: remat=[("h.*", "host")]'
        )
    if inner:
        notes.append(f"zero: {', '.join(inner)}: buckets are sized by zero's own bucket_mb")
    return {"axis": "data", "stage": stage}


def _precision(given: object, notes: list[str]) -> dict[str, str]:
    """Return the arguments of ``Precision`` for the table ``fp16``, and add to the notes."""
    if given is None:
        return {}
    table = _table(given, "fp16")
    mode = str(getattr(table.get("mode"), "value", table.get("mode", "naive"))).lower()
    if mode not in ("naive", "torch", "apex"):
        raise _bad(f"fp16.mode={table['mode']!r} is none of naive, torch, apex")
    scale = [k for k in table if k not in ("mode", "dtype", "enabled", "verbose")]
    note = "fp16 wants [optimizer.loss_scale]; bfloat16 does not"
    if scale:
        note = f"fp16: {', '.join(scale)}: write [optimizer.loss_scale]"
    notes.append(note)
    return {"param": "float16", "master": "fp32"}


def _table(given: object, name: str) -> Mapping[str, Any]:
    """Return a table, of known keys alone; an empty one if it is left out.

    Raises: BadArgument for another value; Unsupported naming a key without a counterpart.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _bad(f"{name} is a dict, not {given!r}")
    known = KNOWN.get(name, ("size",))
    for key in given:
        if known is not None and key not in known:
            hint = meant(similar(str(key), known, 1, 0.5)) or f" (there are {', '.join(known)})"
            where = optional_text("{}.", name) + str(key)
            raise _refused(f"{where} has no counterpart{hint}")
    return given


def _size(given: object, name: str) -> int:
    if isinstance(given, Mapping):
        given = _table(given, name).get("size", 1)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise _bad(f"{name}={given!r} is no number of ranks")
    return given


def _clip(given: Any) -> float | None:
    """Return the bound of the norm; there is none below a number above 0."""
    if given is None:
        return None
    if not isinstance(given, int | float) or isinstance(given, bool) or not math.isfinite(given):
        raise _bad(f"clip_grad_norm={given!r} is no number")
    return given if given > 0 else None


def _refused(message: str) -> Unsupported:
    return Unsupported(message, op="from_colossalai_config", fix=FIX)


def _bad(message: str) -> BadArgument:
    return BadArgument(message, op="from_colossalai_config", fix=FIX)
