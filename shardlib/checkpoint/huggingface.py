"""Hugging Face directories: read block by block without a whole tensor, written split by size.

A directory of safetensors is a table of chunks, one whole tensor each and without checksums, so it
is read by the same code as shardlib's own checkpoints.  A parameter made of several tensors
(experts in one stack, a fused projection) has one chunk per tensor.
"""

import contextlib
import copy
import hashlib
import importlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardlib._compat import is_dtensor
from shardlib.checkpoint.agree import Group
from shardlib.checkpoint.boxes import BlockRun, Box, grid, meet, size, whole
from shardlib.checkpoint.contents import FORMAT, LOCK, flushed, write_manifest
from shardlib.checkpoint.disk import memory, write_all
from shardlib.checkpoint.files import (
    FileChunk,
    Folder,
    WrittenPart,
    code_of,
    dtype_of,
    fill,
    layout_of_file,
    parsed,
)
from shardlib.checkpoint.folder import Work
from shardlib.checkpoint.reading import Target, check, some, storages
from shardlib.checkpoint.tree import alone
from shardlib.checkpoint.writing import SaveJob
from shardlib.collectives import spans_processes
from shardlib.dtensor_convert import from_dtensor
from shardlib.errors import BadArgument
from shardlib.layouts import LayoutLike
from shardlib.mesh import MeshLike, as_mesh
from shardlib.modules.apply import Apply
from shardlib.modules.init import restored
from shardlib.modules.parallelize import placed
from shardlib.modules.remat import Remat
from shardlib.modules.rules import Axes, Rules
from shardlib.placing import unshard
from shardlib.tensor import ShardedTensor

__all__ = ["load_hf", "save_hf", "tensors_of", "write_hf"]

Source = str | Sequence[str] | tuple[str, slice] | tuple[str, tuple[int, ...]]
Names = Mapping[str, Source] | Callable[[str], Source] | None
Path = str | os.PathLike[str]

_ONE, _ADAPTER = "model.safetensors", "adapter_model.safetensors"


def load_hf(
    directory: Path | Sequence[Path],
    module: nn.Module,
    rules: Rules,
    *,
    mesh: MeshLike | None = None,
    axes: Mapping[str, Axes] | None = None,
    inputs: Mapping[str, LayoutLike] | None = None,
    pad: bool = False,
    remat: Remat = (),
    names: Names = None,
    missing: str = "error",
    extra: str = "error",
    cast: bool = False,
    timeout: float | None = None,
) -> tuple[Apply, dict[str, ShardedTensor]]:
    """Make ``(apply, params)`` as ``parallelize`` does, with values of a Hugging Face directory.

    ``directory``  written by ``save_pretrained``, in one file or several with their index, or a
                   single ``.safetensors`` file.  Several, such as a model's and its adapter's, are
                   read as one.
    ``module``     best made on the meta device.  Values that no file has, such as tables of rotary
                   positions, are computed by the module's own code, or copied from a real module.
    ``names``      a parameter's name -> the name in the files; a list of names, whose tensors are
                   concatenated along the first dimension; (name, slice) of its rows; or
                   (name, (1, 0)) with its dimensions permuted, as in ``Tensor.permute``.  Common
                   prefixes, peft's names and transformers' conversions for a model are found
                   automatically; a conversion that does more than place tensors is run by
                   transformers, with that parameter's tensors whole on every rank.
    ``missing``    "init": parameters that no file has are drawn by the module's own code.
    ``extra``      "skip": tensors without a parameter in the module are not read.
    ``cast``       allow another dtype than that of the files.
    Other arguments are ``parallelize``'s.  Every rank calls; each reads the slices of its blocks.
    Raises: CheckpointError, the same on every rank; RuleLint, UnevenSplit, ... as ``parallelize``.

    >>> import tempfile, torch, shardlib as sl; from torch import nn
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as d, sl.simulate(x=2):
    ...     save_file({"weight": torch.eye(4), "bias": torch.ones(4)}, d + "/model.safetensors")
    ...     with torch.device("meta"):
    ...         model = nn.Linear(4, 4)
    ...     apply, params = load_hf(d, model, [("weight", "x ."), ("bias", "x")])
    >>> sl.typeof(params["weight"]), sl.unshard(apply(params, torch.zeros(1, 4)))
    ('f32[4@x, 4]', tensor([[1., 1., 1., 1.]], grad_fn=<...>))
    """
    for word, value, other in (("missing", missing, "init"), ("extra", extra, "skip")):
        if value not in ("error", other):
            raise BadArgument(
                f"{word}= is 'error' or {other!r}, not {value!r}",
                op="load_hf",
                fix=f"sl.load_hf(directory, module, rules, {word}={other!r})",
            )
    mesh = as_mesh(mesh)
    apply, params = placed(
        module, rules, mesh=mesh, axes=axes, inputs=inputs, pad=pad, remat=remat, blank=True
    )
    several = not isinstance(directory, str | os.PathLike)
    places = [os.fspath(p) for p in directory] if several else [os.fspath(directory)]  # type: ignore[union-attr,arg-type]
    group = Group(
        "load_hf", timeout, not spans_processes(mesh), _fixes(names, pad, missing, extra, cast)
    )
    error = None
    digest = ""
    lacking = []
    read = 0
    with contextlib.ExitStack() as stack:
        try:
            table: dict[str, tuple[Folder, FileChunk]] = {}
            for place in places:
                folder, found = tensors_of(place, group.progress)
                stack.enter_context(folder)
                if twice := sorted(set(found) & set(table)):
                    raise ValueError(f"{twice[0]!r} is in two of the directories")
                table |= {n: (folder, c) for n, c in found.items()}
            about = [(n, c.file, c.offset, c.shape, str(c.dtype)) for n, (_, c) in table.items()]
            digest = hashlib.sha256(repr(sorted(about)).encode()).hexdigest()
            plan, lacking = _plan(module, apply, params, table, names, missing, extra)
            for name, chunks in plan.items():
                x = params.get(name, apply.buffers.get(name))
                assert x is not None, "only what the module has is planned"
                dtype = (
                    chunks.dtype(name) if isinstance(chunks, Conversion) else chunks[0].chunk.dtype
                )
                check(name, x, x.shape, dtype, cast)
                new = _filled(name, x, chunks, in_place=name in params)
                if name not in params:
                    apply.buffers[name] = new
            read = sum({id(f): f.bytes_read for f, _ in table.values()}.values())
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as e:
            error = e
    group.agree("reading", digest, error, _alike)
    load_hf.bytes_read = read  # type: ignore[attr-defined]
    blank = [n for n, b in apply.buffers.items() if b.raw.is_meta]
    restored(module, apply, params, [*lacking, *blank], mesh)
    return apply, params


load_hf.bytes_read = 0  # type: ignore[attr-defined]


def _fixes(names: Names, pad: bool, missing: str, extra: str, cast: bool) -> list[tuple[str, str]]:
    """Map the words of a message to its fix: the same call with one more argument."""
    call = "sl.load_hf(directory, module, rules"
    call += ", names=names" * (names is not None) + ", pad=True" * pad + ", cast=True" * cast
    call += ", missing='init'" * (missing == "init") + ", extra='skip'" * (extra == "skip")
    return [
        ("(missing='init' draws them), and", f"{call}, missing='init', extra='skip')"),
        ("missing='init'", f"{call}, missing='init')"),
        ("extra='skip'", f"{call}, extra='skip')"),
        ("cast=True", f"{call}, cast=True)"),
        ("does not divide", f"{call}, pad=True)"),
        ("said nothing", f"{call}, timeout=1000.0)"),
    ]


def _alike(digests: list[str]) -> None:
    odd = next((r for r, d in enumerate(digests) if d != digests[0]), None)
    if odd is not None:
        raise ValueError(f"rank {odd} and rank 0 see different files")


class SourcePiece(NamedTuple):
    """A tensor of the files, and the part of a parameter that it has.

    ``start``   of the tensor in the parameter: negative where its first rows are not wanted.
    ``shape``   of the tensor, with the parameter's dimensions.
    ``inside``  the sizes of the part that is wanted.
    ``turn``    the order of the tensor's dimensions in the parameter, if it is another.
    """

    name: str
    start: Sequence[int]
    shape: Sequence[int]
    inside: Sequence[int]
    turn: tuple[int, ...] | None = None


Pieces = list[SourcePiece]
Table = Mapping[str, tuple[Folder, FileChunk]]
"""Name in the files -> the file's chunk, and its directory."""


@dataclass(frozen=True)
class FilePiece:
    """A part of a parameter: a chunk of a file, and the order ``turn`` of its dimensions."""

    folder: Folder
    chunk: FileChunk
    turn: tuple[int, ...] | None = None

    def fill(self, block: Tensor, box: Box) -> int:
        """Copy the piece into its part of the block."""
        if self.turn is not None:
            # the block is seen with its dimensions in the order of the file
            order = [self.turn.index(d) for d in range(len(self.turn))]
            block, box = block.permute(order), tuple(box[d] for d in order)
        return fill(block, box, self.chunk, self.folder)


def _filled(
    name: str, x: ShardedTensor, pieces: "list[FilePiece] | Conversion", in_place: bool
) -> ShardedTensor:
    """Return the tensor with values read from files, in its own blocks or in new ones."""
    target = Target.of(x)
    raw = x.raw.detach() if in_place else storages([target])[0]
    if in_place and x.is_padded:
        raw.zero_()
    made = pieces.make(name) if isinstance(pieces, Conversion) else None
    for box, block in target.blocks(raw):
        if made is not None:
            for pairs in itertools.product(*meet(whole(made.shape), box)):
                part = made[tuple(s for s, _ in pairs)]
                block[tuple(t for _, t in pairs)] = part.to(block.device, block.dtype)
        elif sum(piece.fill(block, box) for piece in pieces) != size(box):  # type: ignore[union-attr]
            raise ValueError(f"the files do not have all of {name!r}")
    return x if in_place else x.becomes(raw)


class Conversion:
    """A conversion by transformers' own code: parameters computed from tensors of the files.

    ``converter``  of transformers.
    ``sources``    its source pattern -> names in the files.
    Each result is held whole in memory until its parameter is filled.
    """

    def __init__(
        self, converter: Any, name: str, sources: Mapping[str, list[str]], module: nn.Module
    ) -> None:
        self.converter = converter
        self.name = name
        self.sources = sources
        self.module = module
        self.table: Table = {}
        self.left: dict[str, Tensor] = {}
        self.meta: dict[str, Tensor] = {}

    @property
    def files(self) -> list[str]:
        """The names of the tensors in the files."""
        return [t for some_of in self.sources.values() for t in some_of]

    def plan(self, table: Table) -> dict[str, Tensor]:
        """Return shapes and dtypes of its parameters, as tensors on the meta device.

        Raises: ValueError.
        """
        self.table = table

        def blank(name: str) -> Tensor:
            chunk = table[name][1]
            return torch.empty(chunk.shape, dtype=chunk.dtype, device="meta")

        self.meta = self._run(blank)
        return self.meta

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one of its parameters."""
        return self.meta[name].dtype

    def make(self, name: str) -> Tensor:
        """Compute one of its parameters, whole.

        Raises: ValueError, OSError.
        """
        if name not in self.left:
            self.left = self._run(self._read)
        return self.left.pop(name)

    def _read(self, name: str) -> Tensor:
        folder, chunk = self.table[name]
        out = torch.empty(chunk.shape, dtype=chunk.dtype, device="cpu")
        fill(out, chunk.box, chunk, folder)
        return out

    def _run(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        kinds = " and ".join(type(op).__name__ for op in self.converter.operations)
        try:
            converter = copy.deepcopy(self.converter)
            for pattern, names in self.sources.items():
                converter.collected_tensors[pattern] = [read(n) for n in names]
            made = converter.convert(self.name, model=self.module, config=self.module.config)
        except Exception as e:
            raise ValueError(
                f"{self.name!r} is made by {kinds} of transformers, which fails: {e}; load the "
                "module with from_pretrained, and parallelize that"
            ) from e
        return {n: x[0] if isinstance(x, list) else x for n, x in made.items()}


# ---------------------------------------------------------------- tables of the files


def tensors_of(path: str, progress: Callable[[], None]) -> tuple[Folder, dict[str, FileChunk]]:
    """List every tensor of a directory or a file, as one chunk each.

    Raises: ValueError, OSError.
    """
    directory, only = path, ""
    if not os.path.isdir(path):
        directory, only = os.path.split(os.path.abspath(path))
    folder = Folder(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), True, progress)
    try:
        there = os.listdir(directory)
        index = None
        if not only:
            kinds = [_ONE, _ADAPTER, "diffusion_pytorch_model.safetensors"]
            known = [n for k in kinds for n in (f"{k}.index.json", k) if n in there]
            only = known[0] if known else ""
        if not only:
            raise ValueError(f"{path} holds no {_ONE}, no index of several and no {_ADAPTER}")
        files = [only]
        if only.endswith(".index.json"):
            index = _index(folder, only)
            files = sorted(set(index.values()))
        found: dict[str, FileChunk] = {}
        for file in files:
            table, _, begin = layout_of_file(folder.file(file), file)
            for name, t in table.items():
                if index is not None and index.get(name) != file:
                    said = index.get(name)
                    raise ValueError(f"{file} holds {name!r}, which the index puts in {said!r}")
                found[name] = _whole(file, t, begin)
        lost = sorted(set(index or {}) - set(found))
        if lost:
            raise ValueError(
                f"{(index or {})[lost[0]]} lacks {lost[0]!r}, which the index puts there"
            )
        return folder, found
    except BaseException:
        folder.__exit__()
        raise


def _index(folder: Folder, name: str) -> dict[str, str]:
    fd = folder.file(name)
    said = parsed(os.pread(fd, min(os.fstat(fd).st_size, 1 << 28), 0), name)
    index = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
        raise ValueError(f"{name} has no weight_map of names to files")
    return index


def _whole(file: str, entry: Any, begin: int) -> FileChunk:
    """Describe a whole tensor as a chunk."""
    shape, (a, b) = tuple(entry["shape"]), entry["data_offsets"]
    dtype = dtype_of(entry["dtype"])
    assert dtype is not None, "an unknown dtype was refused"
    box = whole(shape)
    cuts = grid(box, shape, dtype.itemsize)
    return FileChunk(file, box, dtype, begin + a, b - a, cuts, None)


# ---------------------------------------------------------------- names: ours to the files'


def _plan(
    module: nn.Module,
    apply: Apply,
    params: Mapping[str, Tensor],
    table: Table,
    names: Names,
    missing: str,
    extra: str,
) -> tuple[dict[str, list[FilePiece] | Conversion], list[str]]:
    """Map parameter names to their chunks, and list the parameters that no file has.

    Raises: ValueError.
    """
    aliases: dict[str, list[str]] = {n: [n] for n in params}
    for alias, name in apply.tied.items():
        aliases[name].append(alias)
    ours = {**aliases, **{n: [n] for n in apply.buffers}}
    wanted = {**params, **apply.buffers}
    sources = _sources(module, ours, table, names)
    plan = {
        n: found if isinstance(found, Conversion) else _chunks(n, wanted[n], found, table)
        for n, found in sources.items()
    }
    lacking = _lacking(module, apply, [n for n in ours if n not in plan])
    words = []
    if lacking and missing == "error":
        words.append(f"no file has {some(lacking)} (missing='init' draws them)")
    spare = _spare(module, apply, sources, table)
    if spare and extra == "error":
        words.append(f"the module has no place for {some(spare)} (extra='skip' leaves them out)")
    if words:
        raise ValueError(f"{', and '.join(words)}; there are {some(sorted(table))}")
    return plan, [n for n in lacking if n in params]


def _lacking(module: nn.Module, apply: Apply, left: Sequence[str]) -> list[str]:
    """List the names without a source whose values neither a file nor the module has."""
    persistent = set(module.state_dict(keep_vars=True))
    return [
        n
        for n in left
        if n not in apply.buffers or (n in persistent and apply.buffers[n].raw.is_meta)
    ]


def _spare(
    module: nn.Module, apply: Apply, sources: Mapping[str, Pieces | Conversion], table: Table
) -> list[str]:
    """List the tensors of the files that no parameter is made of."""
    used: set[str] = set()
    for found in sources.values():
        used |= set(found.files if isinstance(found, Conversion) else (p.name for p in found))
    return [t for t in sorted(table) if t not in used and not _known(t, module, apply)]


def _known(theirs: str, module: nn.Module, apply: Apply) -> bool:
    """Return whether a tensor is not needed: an alias of another, or a table of constants."""
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    ends = [*apply.tied, *apply.buffers]
    return any(
        theirs == n or n.endswith(f".{theirs}") or theirs.endswith(f".{n}") for n in ends
    ) or any(re.search(pattern, theirs) for pattern in ignored)


def _all_of(name: str, table: Table) -> Pieces:
    shape = table[name][1].shape
    return [SourcePiece(name, [0] * len(shape), shape, shape)]


def _rows_of(name: str, rows: slice, table: Table) -> Pieces:
    shape = table[name][1].shape
    first, last, _ = rows.indices(shape[0] if shape else 0)
    rest = shape[1:]
    return [SourcePiece(name, [-first, *(0 for _ in rest)], shape, [last - first, *rest])]


def _turned(name: str, order: tuple[int, ...], table: Table) -> Pieces:
    shape = table[name][1].shape
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"{order} is no order of the dimensions of {name!r}, {list(shape)}")
    return [SourcePiece(name, [0] * len(shape), shape, [shape[d] for d in order], order)]


def _equal_part(name: str, dim: int, index: int, count: int, table: Table) -> Pieces:
    """Take one of ``count`` equal parts of a tensor."""
    shape = table[name][1].shape
    inside = [n // count if d == dim else n for d, n in enumerate(shape)]
    start = [0] * len(shape)
    start[dim] = -index * inside[dim]
    return [SourcePiece(name, start, shape, inside)]


def _concatenated(names: Sequence[str], dim: int, table: Table) -> Pieces:
    """Put tensors one after another along a dimension."""
    out: Pieces = []
    at = 0
    for name in names:
        shape = table[name][1].shape
        start = [0] * len(shape)
        start[dim] = at
        at += shape[dim]
        out.append(SourcePiece(name, start, shape, shape))
    return out


def _stacked(lists: Sequence[Sequence[str]], dim: int, along: int, table: Table) -> Pieces:
    """Stack the tensors of each list along ``dim``, and put the stacks one after another."""
    out: Pieces = []
    for which, names in enumerate(lists):
        for index, name in enumerate(names):
            shape = list(table[name][1].shape)
            # one tensor of a stack lacks the stack's dimension
            shape.insert(dim, 1)
            start = [0] * len(shape)
            start[dim] = index
            start[along] += which * shape[along] if along != dim else 0
            out.append(SourcePiece(name, start, shape, shape))
    return out


def _sources(
    module: nn.Module, ours: Mapping[str, list[str]], table: Table, names: Names
) -> dict[str, Pieces | Conversion]:
    """Map parameter names to the tensors of the files that they are made of."""
    if names is not None and not callable(names) and (odd := sorted(set(names) - set(ours))):
        raise ValueError(f"names= has {odd[0]!r}, which the module does not")
    given = names if callable(names) else (names or {}).get
    said = {name: given(name) for name in ours}
    converted = _converted(module, table)
    prefixes = _prefixes(ours, table)
    out: dict[str, Pieces | Conversion] = {}
    for name, called in ours.items():
        source = said[name]
        if source is not None:
            out[name] = _said(name, source, table)
        elif name in converted:
            out[name] = converted[name]
        elif found := _found(called, prefixes, table):
            out[name] = _all_of(found, table)
    return out


def _found(called: Sequence[str], prefixes: Sequence[tuple[str, str]], table: Table) -> str | None:
    """Return the name in the files of a parameter with these names, or None."""
    tries = (_bare(form, way) for way in prefixes for alias in called for form in _forms(alias))
    return next((t for t in tries if t in table), None)


def _said(name: str, said: Source, table: Table) -> Pieces:
    """Return the pieces that ``names=`` gives a parameter."""
    two = not isinstance(said, str) and len(said) == 2
    apart = two and isinstance(said[1], slice | tuple)
    called = [said] if isinstance(said, str) else said[:1] if apart else said
    if lost := [t for t in map(str, called) if t not in table]:
        raise ValueError(f"names= calls {name!r} {lost[0]!r}, which no file has")
    if isinstance(said, str):
        return _all_of(said, table)
    if two and isinstance(said[1], slice):
        return _rows_of(str(said[0]), said[1], table)
    if two and isinstance(said[1], tuple):
        return _turned(str(said[0]), said[1], table)
    return _concatenated([str(t) for t in said], 0, table)


def _forms(name: str) -> list[str]:
    """List a parameter's name, and its names without peft's adapter around it."""
    plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return [name, re.sub(r"(\.(lora_\w+|modules_to_save))\.\w+(?=\.|$)", r"\1", name), plain]


_PREFIXES = ("", "model.", "transformer.", "module.", "_orig_mod.", "base_model.model.")


def _prefixes(ours: Mapping[str, Any], table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List (prefix of ours to drop, prefix of theirs to add), those with most matches first."""
    ways = [("", ""), *(("", p) for p in _PREFIXES[1:]), *((p, "") for p in _PREFIXES[1:])]
    return sorted(ways, key=lambda w: -sum(_bare(n, w) in table for n in ours))[:3]


def _bare(name: str, way: tuple[str, str]) -> str:
    return way[1] + name.removeprefix(way[0])


def _converted(module: nn.Module, table: Table) -> dict[str, Pieces | Conversion]:
    """Map parameters to tensors by transformers' renamings and conversions for the model."""
    if not hasattr(module, "base_model_prefix") or not hasattr(module, "config"):
        return {}
    try:
        known = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        mapping = known.get_model_conversion_mapping(module)
    except (ImportError, AttributeError):  # transformers before 5 has no conversions
        return {}
    renamings = [m for m in mapping if isinstance(m, loading.WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, loading.WeightConverter)]
    of = {p: c for c in converters for p in c.source_patterns}
    state = module.state_dict(keep_vars=True)
    out: dict[str, Pieces | Conversion] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for theirs in sorted(table, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(
            theirs, renamings, converters, module.base_model_prefix, state
        )
        if name not in state or theirs in state:
            continue
        if pattern is None:
            out[name] = _all_of(theirs, table)
        else:
            parts.setdefault(name, {}).setdefault(pattern, []).append(theirs)
    for name, by_pattern in parts.items():
        converter = of[next(iter(by_pattern))]
        patterns = [p for p in converter.source_patterns if p in by_pattern]
        ordered = {p: by_pattern[p] for p in patterns}
        found = _joined(converter.operations, list(ordered.values()), table)
        if found is not None and len(converter.target_patterns) == 1:
            out[name] = found
            continue
        made = Conversion(converter, name, ordered, module)
        for target, x in made.plan(table).items():
            out[target] = _cut_from(converter.operations, made, target, x) or made
    return out


def _joined(operations: Sequence[Any], lists: list[list[str]], table: Table) -> Pieces | None:
    """Return pieces if transformers only stacks or concatenates tensors; else None."""
    kinds = [type(op).__name__ for op in operations]
    dims = [getattr(op, "dim", 0) for op in operations]
    if kinds == ["MergeModulelist"] and len(lists) == 1:
        return _stacked(lists, dims[0], 0, table)
    if kinds == ["MergeModulelist", "Concatenate"]:
        return _stacked(lists, dims[0], dims[1], table)
    if kinds == ["Concatenate"]:
        return _concatenated([t for some_of in lists for t in some_of], dims[0], table)
    return None


def _cut_from(operations: Sequence[Any], made: Conversion, target: str, x: Tensor) -> Pieces | None:
    """Return the piece if transformers only splits or transposes one tensor; else None."""
    kinds, op = [type(op).__name__ for op in operations], operations[0]
    if len(made.files) != 1:
        return None
    file, names = made.files[0], list(made.meta)
    if kinds == ["Chunk"]:
        dim = op.dim % x.ndim
        if made.table[file][1].shape[dim] == len(names) * x.shape[dim]:
            return _equal_part(file, dim, names.index(target), len(names), made.table)
    if kinds == ["Transpose"]:
        order = list(range(x.ndim))
        order[op.dim0], order[op.dim1] = order[op.dim1], order[op.dim0]
        there = made.table[file][1].shape
        turned = [there[d] for d in order] == list(x.shape)
        if not op.check_dims:
            return _turned(file, tuple(order), made.table) if turned else None
    return None


def _chunks(name: str, x: Tensor, pieces: Pieces, table: Table) -> list[FilePiece]:
    """Convert pieces to chunks with boxes of the parameter.

    Raises: ValueError if they do not fill its shape.
    """
    out: list[FilePiece] = []
    for p in pieces:
        folder, chunk = table[p.name]
        fits = len(p.inside) == x.ndim and all(
            max(s, 0) + n <= m for s, n, m in zip(p.start, p.inside, x.shape, strict=True)
        )
        if not fits or (out and chunk.dtype != out[0].chunk.dtype):
            raise ValueError(_misfit(name, x, p.name, chunk))
        runs = zip(p.start, p.shape, strict=True)
        box: Box = tuple((BlockRun(s, 1, n, 0),) if n else () for s, n in runs)
        cuts = grid(whole(p.shape), tuple(p.shape), chunk.dtype.itemsize)
        out.append(FilePiece(folder, replace(chunk, box=box, cuts=cuts), p.turn))
    if sum(math.prod(p.inside) for p in pieces) != x.numel():
        raise ValueError(_misfit(name, x, pieces[0].name, table[pieces[0].name][1]))
    return out


def _misfit(name: str, x: Tensor, theirs: str, chunk: FileChunk) -> str:
    text = (
        f"{theirs!r} has shape {list(chunk.shape)} in the file, "
        f"{name!r} {list(x.shape)} in the module"
    )
    if chunk.shape[::-1] == tuple(x.shape) and x.ndim == 2:
        text += f"; names={{{name!r}: ({theirs!r}, (1, 0))}} reads it transposed"
    return text


# ---------------------------------------------------------------- writing


def save_hf(
    directory: Path,
    params: Mapping[str, Tensor],
    module: Any = None,
    *,
    names: Mapping[str, str] | Callable[[str], str] | None = None,
    max_bytes: int = 5 << 30,
    overwrite: bool = False,
    tokenizer: Any = None,
    timeout: float | None = None,
) -> None:
    """Write whole tensors in the form of ``from_pretrained``, split by size; every rank calls.

    ``params``     name -> tensor, sharded or plain.
    ``module``     a model of transformers, whose configuration is written too, with the dtype of
                   ``params``; or of peft: then only the adapter is written, with its configuration.
    ``names``      a parameter's name -> the name in the files.
    ``max_bytes``  of one file; a larger tensor has its own file.  Ranks write files in turn.
    ``overwrite``  replace a directory that ``save_hf`` wrote; one with other files in it is
                   refused.
    ``tokenizer``  a tokenizer or processor that is written too, by its ``save_pretrained``.
    Every rank holds one whole tensor at a time.  The directory appears complete or not at all.
    Raises: CheckpointError, the same on every rank.

    >>> import tempfile, shardlib as sl
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as d, sl.simulate(x=2):
    ...     save_hf(d + "/m", {"w": sl.shard(torch.arange(4), "x")})
    ...     load_file(d + "/m/model.safetensors")
    {'w': tensor([0, 1, 2, 3])}
    """
    tensors = {n: from_dtensor(x) if is_dtensor(x) else x for n, x in params.items()}
    group = Group("save_hf", timeout, alone(list(tensors.values())), _SAVE_FIXES)
    error, whole_ones = None, []
    try:
        tensors = _called(tensors, module, names)
        whole_ones = [
            WrittenPart.of_whole(n, tuple(x.shape), x.dtype, lambda x=x: _gathered(x))
            for n, x in tensors.items()
        ]
    except (ValueError, TypeError) as e:
        error = e
    one = _ADAPTER if hasattr(module, "peft_config") else _ONE
    configure = lambda path: _configure(module, path, whole_ones, tokenizer)  # noqa: E731
    write_hf(group, directory, whole_ones, configure, one, max_bytes, overwrite, error)


_SAVE_FIXES = [
    ("is not replaced", "sl.save_hf('exports/new', params)"),
    ("the path is empty", "sl.save_hf('exports/new', params)"),
    ("overwrite=False", "sl.save_hf(directory, params, overwrite=True)"),
]


def write_hf(
    group: Group,
    directory: Path,
    tensors: Sequence[WrittenPart],
    configure: Callable[[str], None],
    one: str,
    max_bytes: int,
    overwrite: bool,
    error: Exception | None = None,
) -> None:
    """Write a directory that appears complete or not at all.

    ``configure``  writes the other files into it.
    ``one``        the file's name if there is only one.
    Raises: CheckpointError, the same on every rank of the group, also if one passed an ``error``.
    """
    job = SaveJob(group, os.fspath(directory), None, overwrite)
    files: list[list[WrittenPart]] = []
    digest = ""
    if error is None:
        try:
            files = _split(tensors, max_bytes)
            said = [(x.name, x.shape, str(x.dtype)) for held in files for x in held]
            digest = hashlib.sha256(repr((job.target, said)).encode()).hexdigest()
        except (ValueError, TypeError) as e:
            error = e

    def begin(digests: list[str]) -> str:
        odd = next((r for r, d in enumerate(digests) if d != digests[0]), None)
        if odd is not None:
            raise ValueError(f"rank {odd} and rank 0 do not save the same tensors to one directory")
        return job.make()

    job.name = group.agree("the tree", digest, error, begin)
    titles = _titles(len(files), one)

    def put(work: Work) -> tuple[list[Any], Exception | None]:
        error = None
        for i, held in enumerate(files):
            mine = i % group.world == group.rank and error is None
            error = _stream(work.fd, titles[i], held, mine, group.progress) or error
        return [], error

    def commit(work: Work, _: Any) -> str:
        _index_of(work, files, titles)
        configure(work.path)
        found = [{"file": name} for name in flushed(work.path)]
        about = {"format": f"{FORMAT} of Hugging Face", "id": work.id, "files": found}
        write_manifest(work.fd, about)
        said = work.commit(overwrite)
        os.unlink(LOCK, dir_fd=work.fd)
        return said

    job.finish(put, commit, together=True)


def _called(tensors: Mapping[str, Tensor], module: Any, names: Any) -> dict[str, Tensor]:
    """Return the tensors to write, under their names in the files."""
    if hasattr(module, "peft_config"):
        adapter = re.compile(r"\.(lora_\w+|modules_to_save|ia3_\w+|vera_\w+)(\.|$)")
        tensors = {_forms(n)[1]: x for n, x in tensors.items() if adapter.search(n)}
    to = names if callable(names) else lambda n: (names or {}).get(n, n)
    out: dict[str, Tensor] = {str(to(n)): x for n, x in tensors.items()}
    if len(out) < len(tensors):
        raise ValueError("names= calls two tensors by one name")
    return out


def _split(tensors: Sequence[WrittenPart], most: int) -> list[list[WrittenPart]]:
    """Distribute tensors over files.

    Raises: ValueError for a tensor that a safetensors file cannot store.
    """
    files: list[list[WrittenPart]] = [[]]
    at = 0
    for x in sorted(tensors, key=lambda x: x.name):
        code = code_of(x.dtype)
        if x.name == "__metadata__" or code is None or " " in code:
            raise ValueError(f"{x.name!r} of {x.dtype} cannot stand in a safetensors file")
        if files[-1] and at + x.nbytes > most:
            files.append([])
            at = 0
        files[-1].append(x)
        at += x.nbytes
    return files


def _titles(count: int, one: str) -> list[str]:
    if count == 1:
        return [one]
    stem = one.removesuffix(".safetensors")
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _stream(
    folder: int, title: str, held: Sequence[WrittenPart], mine: bool, progress: Callable[[], None]
) -> Exception | None:
    """Gather the tensors one by one, and write them if this rank's turn is ``mine``.

    After an error the gathering goes on, because all ranks take part in it.
    """
    error, fd = None, -1
    try:
        if mine:
            # sizes are known, so the header comes first and data is streamed
            table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            at = 0
            for x in held:
                table[x.name] = {
                    "dtype": code_of(x.dtype),
                    "shape": list(x.shape),
                    "data_offsets": [at, at + x.nbytes],
                }
                at += x.nbytes
            text = json.dumps(table).encode()
            # safetensors aligns the data to 8 bytes with spaces
            text += b" " * (-len(text) % 8)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(title, flags, 0o666, dir_fd=folder)
            write_all(fd, memoryview(len(text).to_bytes(8, "little") + text))
    except OSError as e:
        error = e
    for x in held:
        try:
            full = x.get()
            if mine and error is None:
                write_all(fd, memory(full.cpu().contiguous()))
            del full
        except (OSError, ValueError) as e:
            error = error or e
        progress()
    if fd >= 0:
        try:
            os.fsync(fd)
        except OSError as e:
            error = error or e
        os.close(fd)
    return error


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _gathered(x: Tensor) -> Tensor:
    """Gather a tensor of any dtype, as integers of the same width."""
    with torch.no_grad():
        x = x.detach()
        if not isinstance(x, ShardedTensor):
            return x.resolve_conj().resolve_neg()
        if x.dtype.is_complex:
            return unshard(x)
        bits = x.becomes(x.raw.view(_BITS[x.dtype.itemsize]))
        return unshard(bits).contiguous().view(x.dtype)


def _index_of(work: Work, files: Sequence[Sequence[WrittenPart]], titles: list[str]) -> None:
    """Write the index, which maps each tensor to its file, if there are several files."""
    if len(files) < 2:
        return
    index = {
        "metadata": {"total_size": sum(x.nbytes for held in files for x in held)},
        "weight_map": {x.name: t for t, held in zip(titles, files, strict=True) for x in held},
    }
    stem = re.sub(r"-\d{5}-of-\d{5}", "", titles[0])
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = os.open(f"{stem}.index.json", flags, 0o666, dir_fd=work.fd)
    try:
        write_all(fd, memoryview(json.dumps(index, indent=1).encode()))
        os.fsync(fd)
    finally:
        os.close(fd)


def _dtype(tensors: Iterable[WrittenPart]) -> torch.dtype | None:
    """Return the floating dtype of the most bytes, the one that a configuration gives a model."""
    found: Counter[torch.dtype] = Counter()
    for x in tensors:
        if x.dtype.is_floating_point:
            found[x.dtype] += x.nbytes
    return max(found, key=found.__getitem__, default=None)


def say_dtype(directory: Path, tensors: Iterable[WrittenPart]) -> None:
    """Put the dtype of the written tensors into a model's ``config.json``, if it has one."""
    config, dtype = os.path.join(directory, "config.json"), _dtype(tensors)
    if dtype is None or not os.path.exists(config):
        return
    with open(config, encoding="utf-8") as f:
        said = parsed(f.read(), "config.json")
    for key in {"dtype", "torch_dtype"} & set(said) or {"torch_dtype"}:
        said[key] = str(dtype).removeprefix("torch.")
    with open(config, "w", encoding="utf-8") as f:
        f.write(json.dumps(said, indent=2) + "\n")


def _configure(module: Any, path: str, tensors: Sequence[WrittenPart], tokenizer: Any) -> None:
    """Write the configuration of a model, or of an adapter, and a tokenizer."""
    adapters = list(getattr(module, "peft_config", {}).values())
    own = [getattr(module, "config", None), getattr(module, "generation_config", None)]
    for config in [*(adapters or own), tokenizer]:
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(path)
    say_dtype(path, tensors)
