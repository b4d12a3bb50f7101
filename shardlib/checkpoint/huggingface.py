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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardlib.checkpoint.agree import Group, refuse_odd
from shardlib.checkpoint.boxes import BlockRun, Box, grid, meet, shared, size, whole
from shardlib.checkpoint.files import (
    FileChunk,
    Folder,
    WrittenPart,
    code_of,
    dtype_of,
    entries,
    fill,
    framed,
    layout_of_file,
)
from shardlib.checkpoint.folder import FORMAT, LOCK, Directory, Work, flushed, write_manifest
from shardlib.checkpoint.reading import check, known_choices, storages
from shardlib.checkpoint.stages import stage_of
from shardlib.checkpoint.tree import Names as Renames
from shardlib.checkpoint.tree import alone, boxes, renamed, renaming, sharded, some
from shardlib.checkpoint.writing import SaveJob
from shardlib.collectives import spans_processes
from shardlib.filesystem import READ_FOLDER, memory, new_file, parsed, write_all, write_new
from shardlib.layouts import LayoutLike
from shardlib.mesh import MeshLike, as_mesh
from shardlib.modules.apply import Apply
from shardlib.modules.init import restored
from shardlib.modules.parallelize import CutsIntoStages, placing
from shardlib.modules.remat import Remat
from shardlib.modules.rules import Axes, Rules
from shardlib.placing import unshard
from shardlib.tensor import ShardedTensor

Source = str | Sequence[str] | tuple[str, slice] | tuple[str, tuple[int, ...]]
Names = Mapping[str, Source] | Callable[[str], Source] | None

T = TypeVar("T")

_ONE, _ADAPTER = "model.safetensors", "adapter_model.safetensors"


def load_hf(
    directory: Directory | Sequence[Directory],
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
    stages: CutsIntoStages | None = None,
    host: bool = False,
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
    given = "directory, module, rules"
    known_choices("load_hf", given, missing=(missing, "init"), extra=(extra, "skip"))
    apply, params = placing(stages)(
        module, rules, mesh=as_mesh(mesh), src=None, axes=axes, inputs=inputs, pad=pad,
        remat=remat, host=host, blank=True,
    )  # fmt: skip
    if isinstance(directory, str | os.PathLike):
        directory = [directory]
    places = [os.fspath(p) for p in directory]

    known = {
        "names=names": names is not None,
        "pad=True": pad,
        "cast=True": cast,
        "missing='init'": missing == "init",
        "extra='skip'": extra == "skip",
    }
    call = ", ".join(["sl.load_hf(directory, module, rules", *filter(known.get, known)])
    group = Group("load_hf", timeout, not spans_processes(apply.mesh), call)
    alike = partial(refuse_odd, what="see different files")
    with group.phase("reading", alike) as phase, contextlib.ExitStack() as stack:
        table = _tables(places, group.progress, stack)
        about = [(n, c.file, c.offset, c.shape, str(c.dtype)) for n, c in table.items()]
        phase.value = hashlib.sha256(repr(sorted(about)).encode()).hexdigest()
        loading = _Loading(module, apply, params, table)
        plan, lacking = loading.plan(names, missing, extra)
        wanted, others = loading.wanted, apply.elsewhere(params)
        for name, source in plan.items():
            x = wanted[name]
            check(name, x, x.shape, source.dtype, cast)
            if name in apply.buffers:
                (raw,) = storages([x])
                apply.buffers[name] = x = x.becomes(raw)
            if name not in others:
                _fill(name, x, source)
        read = {id(c.folder): c.folder.bytes_read for c in table.values()}
        load_hf.bytes_read = sum(read.values())  # type: ignore[attr-defined]
    blank = [n for n, b in apply.buffers.items() if b.raw.is_meta]
    restored(module, apply, params, [*lacking, *blank], apply.mesh)
    return apply, params


load_hf.bytes_read = 0  # type: ignore[attr-defined]


Table = Mapping[str, FileChunk]
"""Name in the files -> the file's chunk."""


@dataclass(frozen=True)
class FilePiece:
    """A part of a parameter: a tensor of the files, whose box says where it lies in the parameter.

    ``wanted``  elements of it that are in the parameter; others have positions below 0.
    ``turn``    the order of its dimensions in the parameter.
    """

    name: str
    chunk: FileChunk
    wanted: int
    turn: tuple[int, ...]

    @staticmethod
    def of(
        table: Table,
        name: str,
        at: Mapping[int, int] = {},
        rows: Mapping[int, tuple[int, int]] = {},
        stack: int | None = None,
        turn: tuple[int, ...] = (),
    ) -> "FilePiece":
        """Place a tensor of the files in a parameter.

        ``at``     dimension -> its first position in the parameter, if not 0.
        ``rows``   dimension -> the positions (first, last) of it that are in the parameter.
        ``stack``  a dimension of the parameter that the tensor lacks.
        ``turn``   the order of its dimensions in the parameter, if it is another.
        """
        chunk = table[name]
        shape = list(chunk.shape)
        if stack is not None:
            shape.insert(stack, 1)
        box = []
        for d, n in enumerate(shape):
            first, last = rows.get(d, (0, n))
            last = max(first, last)
            runs = [(at.get(d, 0), first, last), (-n, 0, first), (-n, last, n)]
            held = sorted((b, BlockRun(start, 1, e - b, b)) for start, b, e in runs if e > b)
            box.append(tuple(run for _, run in held))
        wanted = math.prod(sum(r.length for r in held if r.start >= 0) for held in box)
        cuts = grid(whole(shape), tuple(shape), chunk.dtype.itemsize)
        turn = turn or tuple(range(len(shape)))
        return FilePiece(name, replace(chunk, box=tuple(box), cuts=cuts), wanted, turn)

    def turned(self, x: Sequence[T]) -> list[T]:
        """Return what belongs to the parameter's dimensions in the order of the file's."""
        return [x[self.turn.index(d)] for d in range(len(x))]

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether all that is wanted of it has its place in a parameter of this shape."""
        if len(shape) != len(self.turn):
            return False
        return self.wanted == shared(meet(self.chunk.box, whole(self.turned(shape))))

    def fill(self, block: Tensor, box: Box) -> int:
        """Copy the piece into its part of the block."""
        block = block.permute(self.turned(range(block.ndim)))
        return fill(block, tuple(self.turned(box)), self.chunk)


Reader = Callable[[Tensor, Box], int]
"""Function that fills a block with the values in a box, and counts them."""


class Origin(NamedTuple):
    """The values of a parameter: tensors of the files, and the reader that ``begin`` makes of them.

    ``pieces``  the tensors in their places; none if transformers' own code makes the parameter.
    """

    names: list[str]
    dtype: torch.dtype
    begin: Callable[[], Reader]
    pieces: Sequence[FilePiece] = ()

    @staticmethod
    def of(pieces: Sequence[FilePiece]) -> "Origin":
        """Make up a parameter of tensors in their places."""

        def read(block: Tensor, box: Box) -> int:
            return sum(piece.fill(block, box) for piece in pieces)

        return Origin([p.name for p in pieces], pieces[0].chunk.dtype, lambda: read, pieces)

    def check(self, name: str, x: Tensor, table: Table) -> None:
        """Check that the pieces fill a parameter.

        Raises: ValueError.
        """
        odd = [p for p in self.pieces if not p.fits(x.shape) or p.chunk.dtype != self.dtype]
        if not self.pieces or (not odd and sum(p.wanted for p in self.pieces) == x.numel()):
            return
        theirs = [*odd, *self.pieces][0].name
        shape = list(table[theirs].shape)
        text = f"{theirs!r} has shape {shape} in the file, {name!r} {list(x.shape)} in the module"
        if shape[::-1] == list(x.shape) and x.ndim == 2:
            text += f"; names={{{name!r}: ({theirs!r}, (1, 0))}} reads it transposed"
        raise ValueError(text)


def _reader_of(make: Callable[[str], Tensor], name: str) -> Reader:
    """Make a parameter by transformers' own code, and return the reader of its values."""
    made = make(name)

    def read(block: Tensor, box: Box) -> int:
        for pairs in itertools.product(*meet(whole(made.shape), box)):
            part = made[tuple(s for s, _ in pairs)]
            block[tuple(t for _, t in pairs)] = part.to(block.device, block.dtype)
        return size(box)

    return read


def _fill(name: str, x: ShardedTensor, source: Origin) -> None:
    """Fill a tensor's blocks with values read from files."""
    read = source.begin()
    if x.is_padded:
        x.raw.detach().zero_()
    for box, block in boxes(x):
        if read(block, box) != size(box):
            raise ValueError(f"the files do not have all of {name!r}")


# ---------------------------------------------------------------- tables of the files


def _tables(
    places: Sequence[str], progress: Callable[[], None], stack: contextlib.ExitStack
) -> Table:
    """Join the tables of several directories.

    Raises: ValueError, OSError.
    """
    table: dict[str, FileChunk] = {}
    for place in places:
        found = tensors_of(place, progress, stack)
        if twice := sorted(found.keys() & table.keys()):
            raise ValueError(f"{twice[0]!r} is in two of the directories")
        table |= found
    return table


def tensors_of(path: str, progress: Callable[[], None], stack: contextlib.ExitStack) -> Table:
    """List every tensor of a directory or a file, as one chunk each; ``stack`` closes the files.

    Raises: ValueError, OSError.
    """
    directory, only = path, ""
    if not os.path.isdir(path):
        directory, only = os.path.split(os.path.abspath(path))
    folder = stack.enter_context(Folder(os.open(directory, READ_FOLDER), True, progress))
    only = only or _main_file(os.listdir(directory), path)
    if not only.endswith(".index.json"):
        return _in_file(folder, only)
    index, found = _index(folder, only), {}
    for file in sorted(set(index.values())):
        for name, chunk in _in_file(folder, file).items():
            if (said := index.get(name)) != file:
                raise ValueError(f"{file} holds {name!r}, which the index puts in {said!r}")
            found[name] = chunk
    if lost := sorted(index.keys() - found.keys()):
        raise ValueError(f"{index[lost[0]]} lacks {lost[0]!r}, which the index puts there")
    return found


def _in_file(folder: Folder, file: str) -> dict[str, FileChunk]:
    """Describe each tensor of a file as a chunk."""
    table, _, begin = layout_of_file(folder.file(file), file)
    out = {}
    for name, entry in table.items():
        shape, dtype = tuple(entry["shape"]), dtype_of(entry["dtype"])
        assert dtype is not None, "an unknown dtype was refused"
        cuts = grid(whole(shape), shape, dtype.itemsize)
        at = begin + entry["data_offsets"][0]
        out[name] = FileChunk(folder, file, whole(shape), dtype, at, cuts, None)
    return out


def _main_file(there: Sequence[str], path: str) -> str:
    """Return the file of a directory that holds its tensors, or the index of several."""
    for kind in (_ONE, _ADAPTER, "diffusion_pytorch_model.safetensors"):
        for name in (f"{kind}.index.json", kind):
            if name in there:
                return name
    raise ValueError(f"{path} holds no {_ONE}, no index of several and no {_ADAPTER}")


def _index(folder: Folder, name: str) -> dict[str, str]:
    fd = folder.file(name)
    said = parsed(os.pread(fd, min(os.fstat(fd).st_size, 1 << 28), 0), name)
    index = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
        raise ValueError(f"{name} has no weight_map of names to files")
    return index


# ---------------------------------------------------------------- names: ours to the files'


@dataclass(frozen=True)
class _Loading:
    """A module to load, its applied form and parameters, and the tensors of the files."""

    module: nn.Module
    apply: Apply
    params: Mapping[str, Tensor]
    table: Table

    @property
    def wanted(self) -> dict[str, Any]:
        """The module's parameters, also those of other stages, and its buffers."""
        return {**self.apply.elsewhere(self.params), **self.params, **self.apply.buffers}

    def plan(self, names: Names, missing: str, extra: str) -> tuple[dict[str, Origin], list[str]]:
        """Map parameter names to their chunks, and list the parameters that no file has.

        Raises: ValueError.
        """
        plan, wanted = self._sources(names), self.wanted
        for name, source in plan.items():
            source.check(name, wanted[name], self.table)
        lacking = self._lacking(plan)
        words = []
        if lacking and missing == "error":
            words.append(f"no file has {some(lacking)} (missing='init' draws them)")
        spare = self._spare(plan)
        if spare and extra == "error":
            words.append(
                f"the module has no place for {some(spare)} (extra='skip' leaves them out)"
            )
        if words:
            raise ValueError(f"{', and '.join(words)}; there are {some(sorted(self.table))}")
        return plan, [n for n in lacking if n not in self.apply.buffers]

    def _lacking(self, plan: Mapping[str, Origin]) -> list[str]:
        """List the names without a source whose values neither a file nor the module has."""
        persistent = set(self.module.state_dict(keep_vars=True))
        own = {n for n, b in self.apply.buffers.items() if n not in persistent or not b.raw.is_meta}
        return [n for n in self.wanted if n not in plan and n not in own]

    def _spare(self, plan: Mapping[str, Origin]) -> list[str]:
        """List the tensors of the files that no parameter is made of, and that are needed.

        An alias of another tensor is not, nor is a table of constants.
        """
        used = {t for source in plan.values() for t in source.names}
        ignored = getattr(self.module, "_keys_to_ignore_on_load_unexpected", None) or ()
        ends = [*self.apply.tied, *self.apply.buffers]
        return [
            t
            for t in sorted(self.table)
            if t not in used
            and not any(t == n or n.endswith(f".{t}") or t.endswith(f".{n}") for n in ends)
            and not any(re.search(pattern, t) for pattern in ignored)
        ]

    def _sources(self, names: Names) -> dict[str, Origin]:
        """Map parameter names to the tensors of the files that they are made of."""
        ours = {n: [n] for n in self.wanted}
        if isinstance(names, Mapping) and (odd := sorted(set(names) - set(ours))):
            raise ValueError(f"names= has {odd[0]!r}, which the module does not")
        for alias, name in self.apply.tied.items():
            ours[name].append(alias)
        said = {n: renaming(names)(n) for n in ours}
        converted = self._converted()
        prefixes = _prefixes(ours, self.table)
        out: dict[str, Origin] = {}
        for name, called in ours.items():
            source = said[name]
            if source is not None:
                out[name] = self._said(name, source)
            elif name in converted:
                out[name] = converted[name]
            elif found := _found(called, prefixes, self.table):
                out[name] = self._piece(found)
        return out

    def _said(self, name: str, said: Source) -> Origin:
        """Return the pieces that ``names=`` gives a parameter."""
        called: list[Any] = [said] if isinstance(said, str) else [*said]
        some_of = len(called) == 2 and isinstance(called[1], slice | tuple)
        part = called.pop() if some_of else None
        if lost := [t for t in called if t not in self.table]:
            raise ValueError(f"names= calls {name!r} {lost[0]!r}, which no file has")
        theirs, shape = called[0], self.table[called[0]].shape
        if isinstance(part, slice):
            first, last, _ = part.indices(shape[0] if shape else 0)
            return self._piece(theirs, rows={0: (first, last)})
        if isinstance(part, tuple):
            if sorted(part) != list(range(len(shape))):
                text = f"{part} is no order of the dimensions of {theirs!r}, {list(shape)}"
                raise ValueError(text)
            return self._piece(theirs, turn=part)
        return self._concatenated(called, 0)

    def _piece(self, name: str, **where: Any) -> Origin:
        """Return a parameter of one tensor, placed as in ``FilePiece.of``."""
        return Origin.of([FilePiece.of(self.table, name, **where)])

    def _concatenated(self, names: Sequence[str], dim: int) -> Origin:
        """Put tensors one after another along a dimension."""
        ends = itertools.accumulate((self.table[n].shape[dim] for n in names), initial=0)
        places = zip(names, ends, strict=False)
        return Origin.of([FilePiece.of(self.table, n, at={dim: at}) for n, at in places])

    def _stacked(self, lists: Sequence[Sequence[str]], dim: int, along: int) -> Origin:
        """Stack the tensors of each list along ``dim``, and put the stacks one after another."""
        out = []
        for which, names in enumerate(lists):
            for index, name in enumerate(names):
                shape = list(self.table[name].shape)
                shape.insert(dim, 1)
                at = {along: which * shape[along], dim: index}
                out.append(FilePiece.of(self.table, name, at=at, stack=dim))
        return Origin.of(out)

    # -------------------------------------------------------- transformers' conversions

    def _converted(self) -> dict[str, Origin]:
        """Map parameters to tensors by transformers' renamings and conversions for the model."""
        mapping, module = _conversions(self.module), self.module
        if not mapping:
            return {}
        loading = importlib.import_module("transformers.core_model_loading")
        renamings = [m for m in mapping if isinstance(m, loading.WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, loading.WeightConverter)]
        state = module.state_dict(keep_vars=True)
        out: dict[str, Origin] = {}
        parts: dict[str, dict[str, list[str]]] = {}
        for theirs in sorted(self.table, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(
                theirs, renamings, converters, module.base_model_prefix, state
            )
            if name not in state or theirs in state:
                continue
            if pattern is None:
                out[name] = self._piece(theirs)
            else:
                parts.setdefault(name, {}).setdefault(pattern, []).append(theirs)
        of = {p: c for c in converters for p in c.source_patterns}
        for name, sources in parts.items():
            out |= self._run_on(of[next(iter(sources))], name, sources)
        return out

    def _run_on(
        self, converter: Any, name: str, sources: Mapping[str, list[str]]
    ) -> dict[str, Origin]:
        """Map the parameters that a converter makes to pieces if it only places tensors."""
        ordered = {p: sources[p] for p in converter.source_patterns if p in sources}
        found = self._joined(converter.operations, list(ordered.values()))
        if found is not None and len(converter.target_patterns) == 1:
            return {name: found}
        files = [t for some_of in ordered.values() for t in some_of]
        meta, make = self._conversion(converter, name, ordered)
        return {
            n: self._cut_from(converter.operations, files, meta, n)
            or Origin(files, x.dtype, partial(_reader_of, make, n))
            for n, x in meta.items()
        }

    def _conversion(
        self, converter: Any, name: str, sources: Mapping[str, list[str]]
    ) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
        """Return a converter's parameters on the meta device, and a function that computes one.

        ``sources``  its source pattern -> names in the files.
        Each result is held whole in memory until its parameter is filled.
        Raises: ValueError, also of the function.
        """
        kinds = " and ".join(type(op).__name__ for op in converter.operations)
        left: dict[str, Tensor] = {}

        def run(read: Callable[[FileChunk], Tensor]) -> dict[str, Tensor]:
            try:
                mine = copy.deepcopy(converter)
                for pattern, names in sources.items():
                    mine.collected_tensors[pattern] = [read(self.table[n]) for n in names]
                made = mine.convert(name, model=self.module, config=self.module.config)
            except Exception as e:
                raise ValueError(
                    f"{name!r} is made by {kinds} of transformers, which fails: {e}; load the "
                    "module with from_pretrained, and parallelize that"
                ) from e
            return {n: x[0] if isinstance(x, list) else x for n, x in made.items()}

        def make(target: str) -> Tensor:
            if target not in left:
                left.update(run(_read))
            return left.pop(target)

        return run(lambda chunk: chunk.empty("meta")), make

    def _joined(self, operations: Sequence[Any], lists: list[list[str]]) -> Origin | None:
        """Return pieces if transformers only stacks or concatenates tensors; else None."""
        kinds = [type(op).__name__ for op in operations]
        dims = [getattr(op, "dim", 0) for op in operations]
        if kinds == ["MergeModulelist"] and len(lists) == 1:
            return self._stacked(lists, dims[0], 0)
        if kinds == ["MergeModulelist", "Concatenate"]:
            return self._stacked(lists, dims[0], dims[1])
        if kinds == ["Concatenate"]:
            return self._concatenated([t for some_of in lists for t in some_of], dims[0])
        return None

    def _cut_from(
        self, operations: Sequence[Any], files: list[str], made: Mapping[str, Tensor], target: str
    ) -> Origin | None:
        """Return the piece if transformers only splits or transposes one tensor; else None."""
        kinds, op = [type(op).__name__ for op in operations], operations[0]
        if len(files) != 1:
            return None
        file, names, x = files[0], list(made), made[target]
        there = self.table[file].shape
        if kinds == ["Chunk"]:
            dim, index = op.dim % x.ndim, names.index(target)
            n = x.shape[dim]
            if there[dim] == len(names) * n:
                return self._piece(file, rows={dim: (index * n, (index + 1) * n)})
        if kinds == ["Transpose"] and not op.check_dims:
            order = list(range(x.ndim))
            order[op.dim0], order[op.dim1] = order[op.dim1], order[op.dim0]
            if [there[d] for d in order] == list(x.shape):
                return self._piece(file, turn=tuple(order))
        return None


def _found(called: Sequence[str], prefixes: Sequence[tuple[str, str]], table: Table) -> str | None:
    """Return the name in the files of a parameter with these names, or None."""
    tries = (_bare(form, way) for way in prefixes for alias in called for form in _forms(alias))
    return next((t for t in tries if t in table), None)


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


def _conversions(module: nn.Module) -> Sequence[Any]:
    """List transformers' renamings and conversions for a model."""
    if not hasattr(module, "base_model_prefix") or not hasattr(module, "config"):
        return ()
    try:
        importlib.import_module("transformers.core_model_loading")
        known = importlib.import_module("transformers.conversion_mapping")
        return known.get_model_conversion_mapping(module)
    except (ImportError, AttributeError):
        # transformers before 5 has no conversions
        return ()


def _read(chunk: FileChunk) -> Tensor:
    out = chunk.empty("cpu")
    fill(out, chunk.box, chunk)
    return out


# ---------------------------------------------------------------- writing


def save_hf(
    directory: Directory,
    params: Mapping[str, Tensor],
    module: Any = None,
    *,
    names: Renames = None,
    max_bytes: int = 5 << 30,
    overwrite: bool = False,
    tokenizer: Any = None,
    timeout: float | None = None,
) -> None:
    """Write whole tensors in the form of ``from_pretrained``, split by size; every rank calls.

    ``params``     name -> tensor, sharded or plain; each stage of a pipeline has its own.
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
    tensors = {n: sharded(x) for n, x in params.items()}
    mine = alone(list(tensors.values()))
    group = Group("save_hf", timeout, mine, "sl.save_hf(directory, params", _SAVE_FIXES)

    def parts() -> dict[str, WrittenPart]:
        return {
            n: WrittenPart.of_whole(theirs, tuple(x.shape), x.dtype, lambda x=x: _gathered(x))
            for n, (theirs, x) in _called(tensors, module, names).items()
        }

    def configure(path: str) -> None:
        adapters = list(getattr(module, "peft_config", {}).values())
        own = [getattr(module, "config", None), getattr(module, "generation_config", None)]
        for config in [*(adapters or own), tokenizer]:
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(path)

    one = _ADAPTER if hasattr(module, "peft_config") else _ONE
    stage = stage_of(tensors.values()) or []
    write_hf(group, directory, parts, configure, one, max_bytes, overwrite, stage)


_SAVE_FIXES = [
    ("is not replaced", "sl.save_hf('exports/new', params)"),
    ("the path is empty", "sl.save_hf('exports/new', params)"),
]


def _index_of(titles: Sequence[str], files: Sequence[Sequence[WrittenPart]]) -> bytes:
    """Return the text of an index: which of several files has each tensor."""
    places = {x.name: title for title, held in zip(titles, files, strict=True) for x in held}
    total = sum(x.nbytes for held in files for x in held)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return json.dumps(index, indent=1).encode()


def write_hf(
    group: Group,
    directory: Directory,
    parts: Callable[[], Mapping[str, WrittenPart]],
    configure: Callable[[str], None],
    one: str,
    max_bytes: int,
    overwrite: bool,
    stage: Sequence[int] = (),
) -> None:
    """Write a directory that appears complete or not at all.

    ``parts``      gives its tensors, by their names here.
    ``configure``  writes the other files into it.
    ``one``        the file's name if there is only one.
    ``stage``      the ranks of the stage of a pipeline that has these parts.
    Raises: CheckpointError, the same on every rank of the group.
    """
    job = SaveJob(group, os.fspath(directory), None, overwrite)
    files, here = _begun(job, parts, max_bytes, stage)
    stem = one.removesuffix(".safetensors")
    count = len(files)
    titles = [one]
    if count > 1:
        titles = [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]

    def gathered(x: WrittenPart) -> Tensor:
        group.progress()
        return x.get()

    def put(work: Work) -> list[Any]:
        tensors = map(gathered, itertools.chain.from_iterable(here))
        try:
            for i, (title, held, own) in enumerate(zip(titles, files, here, strict=True)):
                some = itertools.islice(tensors, len(own))
                if group.rank == job.team[i % len(job.team)] and (own or not held):
                    _write_whole(work.fd, title, held, own, some)
                deque(some, maxlen=0)
        except (OSError, ValueError):
            # all ranks take part in each
            deque(tensors, maxlen=0)
            raise
        return []

    def commit(work: Work, _: object) -> str:
        if count > 1:
            write_new(work.fd, f"{stem}.safetensors.index.json", _index_of(titles, files))
        configure(work.path)
        _say_dtype(work.path, itertools.chain.from_iterable(files))
        found = [{"file": name} for name in flushed(work.path)]
        about = {"format": f"{FORMAT} of Hugging Face", "id": work.id, "files": found}
        write_manifest(work.fd, about)
        said = work.commit(overwrite)
        os.unlink(LOCK, dir_fd=work.fd)
        return said

    job.finish(put, commit, together=True)


Parts = list[list[WrittenPart]]
"""The tensors of each file."""


def _begun(
    job: SaveJob,
    parts: Callable[[], Mapping[str, WrittenPart]],
    most: int,
    stage: Sequence[int],
) -> tuple[Parts, Parts]:
    """Agree on the tensors of all stages; return those of each file, and those that are of here."""
    ours: dict[str, WrittenPart] = {}
    said, error = {}, None
    try:
        for name, x in parts().items():
            ours[x.name], said[x.name] = x, [name, list(x.of), str(x.dtype)[6:]]
        _split(list(ours.values()), most)
    except Exception as e:
        error = e
    with job.leaving():
        job.begin(said, error=error, stage=stage, everywhere=True)
        ours = {n: x for n, x in ours.items() if job.writes(n)}
        every = [
            # without values where another stage writes it
            ours.get(n) or WrittenPart.of_whole(n, tuple(shape), getattr(torch, dtype), Tensor)
            for n, (_, shape, dtype) in job.leaves.items()
        ]
        files = _split(every, most)
    return files, [[x for x in held if x.name in ours] for held in files]


def _called(
    tensors: Mapping[str, Tensor], module: object, names: Renames
) -> dict[str, tuple[str, Tensor]]:
    """Return the tensors to write, with their names in the files."""
    if hasattr(module, "peft_config"):
        adapter = re.compile(r"\.(lora_\w+|modules_to_save|ia3_\w+|vera_\w+)(\.|$)")
        tensors = {_forms(n)[1]: x for n, x in tensors.items() if adapter.search(n)}
    if isinstance(names, Mapping):
        names = {n: t for n, t in names.items() if n in tensors}
    return {n: (theirs, tensors[n]) for n, theirs in renamed(list(tensors), names).items()}


def _split(tensors: Sequence[WrittenPart], most: int) -> Parts:
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


def _write_whole(
    folder: int,
    title: str,
    held: Sequence[WrittenPart],
    own: Sequence[WrittenPart],
    tensors: Iterator[Tensor],
) -> None:
    """Write a file's header and its ``own`` of its whole tensors, each when it is gathered.

    Raises: OSError, ValueError.
    """
    # sizes are known, so the header comes first
    table, _ = entries({x.name: x for x in held})
    header = framed(json.dumps({"__metadata__": {"format": "pt"}, **table}))
    with new_file(folder, title, shared=True) as fd:
        write_all(fd, memoryview(header))
        for part in own:
            x = next(tensors)
            at = len(header) + table[part.name]["data_offsets"][0]
            write_all(fd, memory(x.cpu().contiguous()), at)
            # before the next is gathered
            del x


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


def _say_dtype(directory: Directory, tensors: Iterable[WrittenPart]) -> None:
    """Put the floating dtype of most bytes into a model's ``config.json``, if it has one."""
    found: Counter[torch.dtype] = Counter()
    for x in tensors:
        if x.dtype.is_floating_point:
            found[x.dtype] += x.nbytes
    config = os.path.join(directory, "config.json")
    if not found or not os.path.exists(config):
        return
    with open(config, encoding="utf-8") as f:
        said = parsed(f.read(), "config.json")
    for key in {"dtype", "torch_dtype"} & set(said) or {"torch_dtype"}:
        said[key] = str(max(found, key=found.__getitem__)).removeprefix("torch.")
    with open(config, "w", encoding="utf-8") as f:
        f.write(json.dumps(said, indent=2) + "\n")
