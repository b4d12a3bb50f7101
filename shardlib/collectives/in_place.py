"""Collectives that write into memory of the caller, without a gradient: for schedules and buckets."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardlib.collectives.backends import BACKENDS, dist
from shardlib.collectives.backends.backend import Finish, Landing
from shardlib.collectives.posted import (
    ALL_GATHER,
    PREDUCE,
    PSUM_SCATTER,
    is_on_host,
    keep_posted,
    on_side_stream,
    posted,
    watched,
)
from shardlib.collectives.simulate import Stacked
from shardlib.collectives.types import after_move, group, held, unwrap
from shardlib.mesh import GROUPS, RECENT, Axes, Mesh, current_mesh, number, scope


def preduce_into(
    target: Tensor, x: Tensor, axis: str, root: int, wire: torch.dtype | None = None
) -> None:
    """Write ``preduce(x, axis, root)`` into the root's ``target``; the others' do not change.

    x is sent in ``wire``, which is the target's dtype unless given, and may be wider: the root's
    own part and the sum are rounded once, to the target.  In place and without a gradient, for
    schedules.
    Moves:  the bytes of preduce in the dtype of the wire.
    """
    wire = wire or target.dtype
    mesh = current_mesh()
    g = group(mesh, (axis,))
    if g.size == 1:
        target.copy_(x)
        return
    raw = held(x, mesh)
    varies = after_move("preduce", x, g, ())
    if type(target) is Stacked and target.varies is not None:
        target.varies.join(varies and varies.axes)
    into = BACKENDS[mesh.kind].preduce_into

    def post() -> Callable[[], object]:
        return into(unwrap(target), raw, g, root, wire)

    watched(posted(post, PREDUCE, raw, g, (root,), wire), PREDUCE, raw, g)()


def reductions(
    axis: str, like: Tensor, wire: torch.dtype | None = None
) -> Callable[[Tensor, Tensor, int], Callable[[], object]]:
    """Return ``preduce_into(target, x, axis, root, wire)`` as a function of target, x and root.

    For loops in schedules.
    It posts the transfer; call its result to finish.  ``like``  one of the targets, as above.
    """
    now = scope()
    mesh = current_mesh() if now.mesh is None else now.mesh
    found = None if now.listeners.traces else mesh.memo[GROUPS].get((reductions, axis, wire))
    if found is None:
        if mesh.kind != "dist" or now.listeners.traces or mesh.axis_size(axis) == 1:
            return lambda target, x, root: partial(preduce_into, target, x, axis, root, wire)
        found = mesh.memo[GROUPS][reductions, axis, wire] = dist.reductions(
            group(mesh, (axis,)), wire
        )
    RECENT.append((number(), "preduce", (axis,), like.shape, wire or like.dtype))
    return found


def scatter_into(
    flat: Tensor,
    out: Tensor,
    mesh: Mesh,
    axes: Axes,
    *,
    wire: torch.dtype | None = None,
    land: Tensor | None = None,
    ahead: bool = False,
) -> Finish:
    """Post ``psum_scatter`` of a storage of vectors [n]; its ``finish`` writes ``out`` [n / p].

    ``land``   memory to receive in, of n elements, or of any number unless ``ahead``; allocating
               fresh pages costs as much time as the sum.
    ``ahead``  other work comes between this call and ``finish``: all parts are sent meanwhile.
               Without it the ring runs inside ``finish``, needs less memory, and fills slow links
               better.
    Moves the bytes of psum_scatter.  Each part is summed round the ring, its owner last, in the
    same order on all but NCCL; half precision in fp32, which ``out`` may keep.  ``flat`` and
    ``land`` must stay until it is finished.
    """
    to = Landing(out, None if wire == flat.dtype else wire, land, ahead)
    params = (0,) if to.wire is None else (0, to.wire)
    g = group(mesh, axes)
    if g.size == 1:
        return lambda: out.copy_(flat)

    move = partial(BACKENDS[mesh.kind].psum_scatter_into, flat, g, to)

    def post() -> Finish:
        return posted(move, PSUM_SCATTER, flat, g, params)

    memory = (flat, out) if land is None else (flat, out, land)
    finish = on_side_stream("sum", post, g, *memory) if ahead else post()
    return keep_posted(watched(finish, PSUM_SCATTER, flat, g)).wait


def gather_into(flat: Tensor, mesh: Mesh, axes: Axes, *, ahead: bool = False) -> Finish:
    """Post ``all_gather`` of vectors in place: each rank's part of ``flat`` [n] is already set.

    ``ahead``  other work comes between this call and ``finish``, as in ``scatter_into``.
    Moves the bytes of all_gather of the parts.
    """
    g = group(mesh, axes)
    if g.size == 1:
        return lambda: flat
    if is_on_host(flat, mesh):
        there = gather_into(flat.to(mesh.device), mesh, axes, ahead=ahead)
        return lambda: flat.copy_(there())

    into = partial(BACKENDS[mesh.kind].all_gather_into, flat, g, ahead)

    def post() -> Finish:
        part = flat.narrow(-1, 0, flat.shape[-1] // g.size)
        return posted(into, ALL_GATHER, part, g, (0,))

    finish = on_side_stream("gather", post, g, flat) if ahead else post()
    return keep_posted(watched(finish, ALL_GATHER, flat, g)).wait
