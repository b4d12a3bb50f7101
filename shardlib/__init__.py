# pyright: strict
"""shardlib: sharded PyTorch in JAX style.  Layouts state where data is, algorithms compute on it.

The functions and types of daily use are here; the rest is in modules:

``sl.attention``    engines of attention, by their arguments.
``sl.checkpoint``   files of a training run, and models of other libraries.
``sl.collectives``  data movement inside ``shard_map``.
``sl.dtensor``      to and from torch's own sharded tensors.
``sl.errors``       every error.
``sl.extend``       for authors of algorithms, engines, masks and layouts.
``sl.kernels``      fused operations.
``sl.masks``        masks of attention.
``sl.optim``        optimizers and ZeRO.
``sl.planning``     links, bounds, plans.
``sl.random``       keys of draws.
``sl.recipes``      rules for modules.
``sl.seeing``       pictures and timelines.
``sl.testing``      checks that a new algorithm must pass.
"""

from shardlib import (
    attention,
    checkpoint,
    collectives,
    dtensor,
    errors,
    extend,
    kernels,
    masks,
    optim,
    planning,
    random,
    seeing,
    testing,
)

# patches autograd.Function
from shardlib import autograd_function as autograd_function
from shardlib import ops as ops  # registers every operator
from shardlib import recompute as recompute
from shardlib.checking.proof import check_model
from shardlib.checkpoint import latest, load, load_hf, save, save_hf
from shardlib.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    check,
    expect_comm,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    trace,
)
from shardlib.data import data, from_local
from shardlib.errors import ShardError
from shardlib.grad import grad, value_and_grad
from shardlib.layouts import (
    Col,
    Layout,
    Layout2D,
    Layout3D,
    Layout25D,
    LayoutLike,
    P,
    Partial,
    Replicated,
    Ring,
    Row,
)
from shardlib.mesh import (
    Mesh,
    MeshLike,
    auto_mesh,
    current_mesh,
    launch,
    make_mesh,
    process_index,
    rank0_print,
    record,
    simulate,
    use_mesh,
)
from shardlib.modules import as_module, init, parallelize
from shardlib.modules import recipes as recipes
from shardlib.ops.attention import ring_attention
from shardlib.ops.linear_loss import linear_cross_entropy
from shardlib.ops.matmul import product as matmul
from shardlib.ops.registry import implicit, saving, why
from shardlib.ops.registry import pinned as algorithm
from shardlib.pipeline.stages import Stages
from shardlib.placing import constrain, reshard, shard, unshard
from shardlib.planning import choose, plan, probe
from shardlib.planning.explain import explain
from shardlib.seeing import summary, visualize
from shardlib.sequence import pack, shard_sequence
from shardlib.shard_map import shard_map
from shardlib.tensor import ShardedTensor, constants, layout_of, typeof

__version__ = "0.1.0"

__all__ = [
    # placing values
    "shard", "unshard", "reshard", "constrain", "from_local", "data", "pack", "shard_sequence", "typeof",
    "layout_of", "ShardedTensor",
    # layouts
    "Layout", "Row", "Col", "Layout2D", "Layout25D", "Layout3D", "Ring", "Replicated", "Partial",
    "P", "LayoutLike",
    # meshes
    "Mesh", "MeshLike", "make_mesh", "simulate", "record", "use_mesh", "current_mesh", "launch",
    "auto_mesh", "process_index", "rank0_print",
    # local code
    "shard_map", "psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute",
    "axis_index", "axis_size",
    # computing and training
    "matmul", "ring_attention", "linear_cross_entropy", "grad", "value_and_grad", "parallelize", "Stages",
    "init", "as_module", "save", "load", "latest", "save_hf", "load_hf",
    # choosing and seeing
    "algorithm", "saving", "implicit", "constants", "why", "explain", "trace", "expect_comm", "check",
    "check_model", "plan", "choose", "probe", "visualize", "summary",
    # errors, and the modules
    "ShardError", "attention", "checkpoint", "collectives", "dtensor", "errors", "extend", "kernels", "masks",
    "optim", "planning", "random", "recipes", "seeing", "testing",
]  # fmt: skip


def __dir__() -> list[str]:
    """List the public names; what else is here are the modules that these come from."""
    return sorted(
        [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
    )
