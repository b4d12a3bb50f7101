"""Asynchronous form of the collectives: a transfer is posted, and waited for later."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.collectives import transfers
from shardlib.collectives.backends import BACKENDS, dist
from shardlib.collectives.backends.backend import Finish
from shardlib.collectives.simulate import Stacked, of
from shardlib.collectives.types import Axis, following, held, mesh_of
from shardlib.collectives.varying import Varies, after_move, public_name
from shardlib.collectives.verbs import POSTABLE, axes_of, call, pairs_of, pbroadcast, ppermute
from shardlib.errors import ShardError
from shardlib.mesh import GROUPS, POSTED, RECENT, Mesh, current_mesh, lost, number, scope

__all__ = ["Pending", "broadcasts", "keep_posted", "start", "start_ppermutes"]


class Pending:
    """A transfer under way; ``wait()`` once for its result.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     later = sl.collectives.start(sl.psum, torch.ones(2), "x")  # under way
    ...     later.wait()
    tensor([2., 2.])
    """

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish

    def wait(self) -> Tensor:
        """Block until the transfer is done and return the block.

        Raises: ShardError the second time.
        """
        if self._finish is None:
            raise ShardError(
                "this transfer was waited for already", op="wait", fix="y = pending.wait()  # once"
            )
        POSTED.pop(self, None)
        try:
            out, self._finish = self._finish(), None
        except RuntimeError as e:
            lost(e)
            raise
        return out

    def _arrive(self) -> None:
        """Wait, and keep the result for ``wait``."""
        out = self.wait()
        self._finish = lambda: out


def keep_posted(finish: Finish) -> Pending:
    """Return a transfer that is kept until it is waited for, see mesh/posted.py."""
    pending = Pending(finish)
    POSTED[pending] = pending._arrive
    return pending


def start_ppermutes(
    xs: Sequence[Tensor], axis: Axis, perms: Sequence[Sequence[tuple[int, int]]]
) -> list[Pending]:
    """Post several ppermutes as one call, so that their sends and receives cannot deadlock.

    Each counts as its own; as with ``start``, for code that writes its own gradient.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    mesh = next((x.mesh for x in xs if type(x) is Stacked), None) or current_mesh()
    if mesh.axis_size(axes) == 1 or any(
        x.dtype not in transfers.SENT or x.requires_grad for x in xs
    ):
        return [start(ppermute, x, axis, perm) for x, perm in zip(xs, perms, strict=True)]
    tables = [pairs_of(x, axis, perm)[0] for x, perm in zip(xs, perms, strict=True)]
    raws = [held(x, mesh) for x in xs]
    ends: list[Any] = []
    if traces := scope().listeners.traces:
        for raw, pairs in zip(raws, tables, strict=True):
            ends.append(transfers.counted(traces, transfers.PPERMUTE, raw, mesh, axes, (pairs,)))
    for raw in raws:
        transfers.note_recent("ppermute", raw, mesh, axes)
    posted = BACKENDS[mesh.kind].ppermutes(raws, mesh, axes, tables)
    if ends:
        posted = [transfers.ended(finish, some) for finish, some in zip(posted, ends, strict=True)]
    if mesh.kind != "stacked":
        return [keep_posted(finish) for finish in posted]
    return [
        _pending(finish, mesh, after_move("ppermute", x, mesh, axes, (pairs,)))
        for x, finish, pairs in zip(xs, posted, tables, strict=True)
    ]


def _pending(finish: Finish, mesh: Mesh, varies: Varies | None) -> Pending:
    """Return a Pending whose result is a simulated block."""
    return keep_posted(lambda: following(finish(), mesh, varies))


def start(f: Callable[..., Tensor], x: Tensor, axis: Axis, *args: Any, **kwargs: Any) -> Pending:
    """Post a collective and continue: ``later = start(pbroadcast, x, "y", 0); ...; later.wait()``.

    For code that writes its own gradient.  Raises: ShardError if autograd would have to record it.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     block = sl.axis_index("x") * torch.ones(2)
    ...     later = start(sl.collectives.shift, block, "x")  # the neighbour's block is on its way
    ...     own = block @ block  # meanwhile
    ...     own + later.wait().sum()
    tensor(2.)
    """
    mesh = mesh_of(x)
    why = ""
    if x.requires_grad and torch.is_grad_enabled():
        why = "the asynchronous form has no gradient"
    elif f not in POSTABLE:
        why = f"no asynchronous form; these have one: {', '.join(g.__name__ for g in POSTABLE)}"
    if why:
        raise ShardError(why, op=f.__name__, fix=f"{public_name(f.__name__)}(x, {axis!r})")
    op, params = POSTABLE[f](x, axis, *args, **kwargs)
    axes = axes_of(axis, f.__name__)
    if mesh.axis_size(axes) == 1:
        out = call(op, x, axis, params)
        return Pending(lambda: out)
    if mesh.kind != "stacked":
        return keep_posted(transfers.begin_ahead(op, x, mesh, axes, params))
    varies = after_move(op.name, x, mesh, axes, params)
    return _pending(transfers.begin_ahead(op, of(x, mesh), mesh, axes, params), mesh, varies)


def broadcasts(axis: str, like: Tensor) -> Callable[[Tensor, int], Any]:
    """Return ``start(pbroadcast, x, axis, root)`` as a function of x and root, for schedules.

    ``like``  one of the blocks to be sent: all are recorded once, for reports of a lost rank.
    """
    now = scope()
    mesh = current_mesh() if now.mesh is None else now.mesh
    found = None if now.listeners.traces else mesh.memo[GROUPS].get((broadcasts, axis))
    if found is None:
        if mesh.kind != "dist" or now.listeners.traces or mesh.axis_size(axis) == 1:
            return lambda x, root: start(pbroadcast, x, axis, root)
        found = mesh.memo[GROUPS][broadcasts, axis] = dist.broadcasts(mesh, (axis,))
    RECENT.append((number(), "pbroadcast", (axis,), like.shape, like.dtype))
    return found
