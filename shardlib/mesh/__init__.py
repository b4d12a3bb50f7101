"""Named meshes of ranks, the ambient scope, and starting processes."""

from shardlib.mesh.devices import accelerator, brought
from shardlib.mesh.failures import (
    RECENT,
    JobProcesses,
    current_job,
    join_job,
    lost,
    number,
    spelled,
)
from shardlib.mesh.launch import launch
from shardlib.mesh.memo import GROUPS, Memo
from shardlib.mesh.mesh import (
    Axes,
    Axis,
    Coord,
    Link,
    Mesh,
    MeshKey,
    MeshLike,
    Outer,
    Sizes,
    as_mesh,
    auto_mesh,
    axes_of,
    axis_sizes,
    coordinates,
    current_mesh,
    make_mesh,
    rank_along,
    record,
    simulate,
    unknown_axis,
    use_mesh,
)
from shardlib.mesh.posted import POSTED, drain, refuse_posted
from shardlib.mesh.process import launched, process_index, rank0_print, world_size
from shardlib.mesh.scope import Entered, Scope, bind, bound_scope, enter, leave, scope, within
from shardlib.mesh.tables import uploaded
