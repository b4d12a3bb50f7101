"""shardlib: sharded PyTorch, JAX style.  Layouts say where data sits, rules say how to compute."""

from shardlib import extend, ops, random, recipes, testing
from shardlib import functions as functions
from shardlib import recompute as recompute
from shardlib.checkpoint import load, save
from shardlib.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    expect_comm,
    pbroadcast,
    pick,
    pmax,
    pmean,
    ppermute,
    preduce,
    pslice,
    psum,
    psum_scatter,
    pvary,
    shift,
    start,
    trace,
)
from shardlib.dtensor import dtensor_rules, from_dtensor, to_dtensor
from shardlib.errors import ShardError
from shardlib.explain import explain
from shardlib.grad import grad, value_and_grad
from shardlib.init import init
from shardlib.layouts import (
    Col,
    Layout,
    Layout2D,
    Layout2p5D,
    Layout3D,
    Layout25D,
    Partial,
    Replicated,
    ReshardPlan,
    Ring,
    Row,
)
from shardlib.mesh import Link, Mesh, current_mesh, launch, make_mesh, record, simulate, use_mesh
from shardlib.ops.attention import (
    ALiBi,
    Bias,
    Causal,
    Documents,
    Full,
    Mask,
    Padding,
    Prefix,
    Window,
    attention_plan,
    linformer_attention,
    mask_mod,
    ring_attention,
)
from shardlib.ops.matmul import product as matmul
from shardlib.ops.registry import implicit, saving, why
from shardlib.ops.registry import pinned as algorithm
from shardlib.optim import (
    Transform,
    adam,
    adamw,
    apply_updates,
    chain,
    clip_by_global_norm,
    global_norm,
    identity,
    lion,
    masked,
    scale,
    scale_by_schedule,
    set_to_zero,
    sgd,
    zero,
)
from shardlib.parallelize import parallelize
from shardlib.placing import constrain, reshard, shard, unshard
from shardlib.plan import choose, lower_bound, probe
from shardlib.sequence import shard_sequence
from shardlib.shard_map import shard_map
from shardlib.sharded_module import as_module
from shardlib.tensor import ShardedTensor, layout_of, typeof
from shardlib.visualize import draw, visualize

__version__ = "0.1.0"

__all__ = [
    "ALiBi", "Bias", "Causal", "Col", "Documents", "Full", "Layout", "Layout25D", "Layout2D", "Layout2p5D",
    "Layout3D", "Link", "Mask", "Mesh", "Padding", "Partial", "Prefix", "Replicated", "ReshardPlan", "Ring",
    "Row", "ShardError", "ShardedTensor", "Transform", "Window", "adam", "adamw", "algorithm", "all_gather",
    "all_to_all", "apply_updates", "as_module", "attention_plan", "axis_index", "axis_size", "chain", "choose",
    "clip_by_global_norm", "constrain", "current_mesh", "draw", "dtensor_rules", "expect_comm", "explain", "extend",
    "from_dtensor", "global_norm", "grad", "identity", "implicit", "init", "launch", "layout_of", "linformer_attention",
    "lion", "load", "lower_bound", "make_mesh", "mask_mod", "masked", "matmul", "ops", "parallelize", "pbroadcast",
    "pick", "pmax", "pmean", "ppermute", "preduce", "probe", "pslice", "psum", "psum_scatter", "pvary", "random",
    "recipes", "record", "reshard", "ring_attention", "save", "saving", "scale", "scale_by_schedule",
    "set_to_zero", "sgd",
    "shard", "shard_map", "shard_sequence", "shift", "simulate", "start", "testing", "to_dtensor", "trace",
    "typeof", "unshard", "use_mesh", "value_and_grad", "visualize", "why", "zero",
]  # fmt: skip
