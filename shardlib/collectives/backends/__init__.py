"""Who plays the ranks, and how blocks move between them: one protocol, three back ends."""

from shardlib.collectives.backends import dist, record, stacked
from shardlib.collectives.backends.backend import Backend
from shardlib.mesh import Mesh

__all__ = ["BACKENDS", "Backend", "backend"]

BACKENDS: dict[str, Backend] = {"dist": dist, "stacked": stacked, "record": record}
"""By the kind of a mesh."""


def backend(mesh: Mesh) -> Backend:
    """Find the back end that plays a mesh."""
    return BACKENDS[mesh.kind]
