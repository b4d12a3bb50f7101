"""Named meshes of ranks, what is ambient, and starting processes."""

from shardlib.mesh.failures import RECENT, Job, current_job, lost, number, spelled
from shardlib.mesh.launch import launch
from shardlib.mesh.mesh import (
    Link,
    Mesh,
    MeshLike,
    Registered,
    as_mesh,
    coordinates,
    current_mesh,
    make_mesh,
    rank_along,
    record,
    remember,
    simulate,
    unknown_axis,
    use_mesh,
)
from shardlib.mesh.scope import Entered, Scope, bind, enter, leave, scope, within

__all__ = [
    "RECENT", "Entered", "Job", "Link", "Mesh", "MeshLike", "Registered", "Scope", "as_mesh",
    "bind", "coordinates", "current_job", "current_mesh", "enter", "launch", "leave", "lost",
    "make_mesh", "number", "rank_along", "record", "remember", "scope", "simulate", "spelled",
    "unknown_axis", "use_mesh", "within",
]  # fmt: skip
