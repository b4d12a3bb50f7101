"""A checkpoint's manifest, and the reader of its tensors, which checks every byte."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardlib.checkpoint.boxes import Box, SavedPlace, chunk, held, meet, size
from shardlib.checkpoint.files import (
    FileChunk,
    Folder,
    Header,
    check_chunk,
    fill,
    read_header,
    uncollected,
)
from shardlib.checkpoint.folder import MANIFEST, read_manifest
from shardlib.checkpoint.tree import read_place, unspoken
from shardlib.errors import ShardError
from shardlib.filesystem import reason


@dataclass(frozen=True)
class Manifest:
    """The tensors, values and files of a checkpoint, in the directory that it reads them from."""

    folder: Folder
    id: str
    step: int | None
    places: dict[str, SavedPlace]
    values: dict[str, Any]
    skeleton: object
    files: list[dict[str, Any]]
    # of the files opened so far
    headers: dict[str, Header]

    @staticmethod
    @uncollected()
    def of(folder: Folder) -> "Manifest":
        """Read the manifest of a directory.

        Raises: ValueError, OSError.
        """
        said = read_manifest(folder.fd)
        try:
            files = said["files"]
            places = {n: read_place(a, len(files)) for n, a in said["tensors"].items()}
            values = {n: unspoken(v) for n, v in said["values"].items()}
            kinds = {tuple(type(f[key]) for key in ("file", "bytes", "crc")) for f in files}
            step = said.get("step")
            if kinds - {(str, int, int)} or set(places) & set(values):
                raise ValueError
            if type(step) not in (int, type(None)):
                raise ValueError
            return Manifest(folder, said["id"], step, places, values, said["tree"], files, {})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as e:
            if isinstance(e, ShardError):
                raise ValueError(f"{MANIFEST}: {e.message}") from None
            raise ValueError(f"{MANIFEST} does not describe a checkpoint") from None

    @property
    def names(self) -> set[str]:
        """The names of all tensors and values."""
        return {*self.places, *self.values}

    def chunk_of(self, name: str, rank: int, box: Box) -> FileChunk:
        """Return a rank's chunk of a tensor; the file and the layout must agree on its box."""
        return self._header(rank).get(name, box, self.places[name].dtype)

    def damage(self, files: Iterable[int]) -> list[str]:
        """List the damage of some files, numbered as in ``files``, reading every byte."""
        wanted: dict[int, list[tuple[str, Box]]] = {i: [] for i in files}
        for name, place in self.places.items():
            for rank, file in enumerate(place.ranks):
                if file in wanted and (box := chunk(name, place, rank)) is not None:
                    wanted[file].append((name, box))
        return [said for i, parts in wanted.items() for said in self._damage(i, parts)]

    def _damage(self, i: int, parts: list[tuple[str, Box]]) -> Iterator[str]:
        """Yield the damage of a file, which should hold these boxes of tensors."""
        file = self.files[i]["file"]
        try:
            header = self._header(i)
        except (OSError, ValueError) as e:
            yield _said(e, file, "")
            return
        if spare := sorted(set(header.said) - {name for name, _ in parts}):
            yield f"{file} holds {spare[0]!r}, which {MANIFEST} does not know"
        for name, box in parts:
            try:
                check_chunk(self.chunk_of(name, i, box))
            except (OSError, ValueError) as e:
                yield _said(e, file, name)

    def _header(self, i: int) -> Header:
        about = self.files[i]
        file = about["file"]
        if file not in self.headers:
            self.headers[file] = read_header(self.folder, file, about["bytes"], about["crc"])
        return self.headers[file]

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill a block with the values of ``box``.

        Raises: ValueError, OSError.
        """
        place, filled = self.places[name], 0
        for rank in _holders(place, box):
            part = chunk(name, place, rank)
            if part is None:
                continue
            try:
                found = self.chunk_of(name, place.ranks[rank], part)
                filled += fill(out, box, found)
            except FileNotFoundError:
                raise
            except (OSError, ValueError) as e:
                raise ValueError(_said(e, self.files[place.ranks[rank]]["file"], name)) from e
        if filled != size(box):
            raise ValueError(f"{filled} of {size(box)} elements of {name!r} are in the files")


def _said(error: OSError | ValueError, file: str, name: str) -> str:
    """Return the text of an error, with the names of the file and the tensor."""
    text = reason(error)
    text = text if file in text else f"{file}: {text}"
    return f"{text} ({name!r})" if name and repr(name) not in text else text


@lru_cache(maxsize=1 << 14)
def _holders(place: SavedPlace, box: Box) -> tuple[int, ...]:
    """List the ranks whose blocks intersect a box, which is a product over dimensions.

    A rank is a sum of one number per axis, so ranks are tested along one dimension's axes alone.
    """
    numbers: dict[str, range] = {}
    count = 1
    for axis, n in reversed(place.mesh):
        numbers[axis] = range(0, n * count, count)
        count *= n
    # with skew a rank's rows depend on its column, so dimensions cannot be tested alone
    if place.layout.skew:
        return tuple(r for r in range(count) if all(meet(held(place, r), box)))
    # any of their ranks may have written
    found = _along(numbers, numbers.keys() - place.layout.axes)
    for d, dim in enumerate(place.layout.dims):
        met = _met(place, d, box, _along(numbers, dim.axes))
        found = [a + b for a in found for b in met]
    return tuple(sorted(found))


def _along(numbers: Mapping[str, range], axes: Iterable[str]) -> list[int]:
    """List the sums of one number of each axis."""
    return [sum(at) for at in itertools.product(*(numbers[a] for a in axes))]


def _met(place: SavedPlace, d: int, box: Box, ranks: list[int]) -> list[int]:
    """List those of the ranks along a dimension whose blocks intersect a box there."""
    if place.layout.dims[d].is_plain and box[d]:
        # blocks are in their ranks' order
        block = place.tiled[d] // len(ranks)
        ranks = ranks[min(box[d]).start // block : max(r.last for r in box[d]) // block + 1]
    return [r for r in ranks if meet(held(place, r)[d : d + 1], box[d : d + 1])[0]]
