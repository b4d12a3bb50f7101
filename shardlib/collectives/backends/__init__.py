"""Back ends of the collectives: one protocol, for real, simulated and recorded ranks."""

from typing import Any, cast

from shardlib.collectives.backends import dist, record, stacked
from shardlib.collectives.backends.backend import Backend
from shardlib.errors import MeshError

__all__ = ["BACKENDS", "Backend"]


class _Forked:
    """Back end of a process forked from a rank: every use raises MeshError."""

    def __getattr__(self, name: str) -> Any:
        raise MeshError(
            "this process was forked from a rank, and is none: a worker of a DataLoader hands plain "
            "tensors to the rank, which places them",
            fix="batches = [sl.shard(x, '...') for x in DataLoader(data, num_workers=2)]",
        )


BACKENDS: dict[str, Backend[Any]] = {
    "dist": dist,
    "stacked": stacked,
    "record": record,
    "forked": cast(Backend[Any], _Forked()),
}
"""Back end by the kind of a mesh."""
