"""Arguments of ``zero``, what is refused of them, and what its stages share."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from shardlib.errors import ShardError, Unsupported
from shardlib.optim.buckets import Buckets, Hops
from shardlib.optim.clip import global_norm
from shardlib.optim.index import MOST, IndexCache
from shardlib.optim.masters import ZeroState, begun, step_parts
from shardlib.optim.memory import Memory
from shardlib.optim.precision import Master
from shardlib.optim.transform import Step, Transform

__all__ = ["ZeroSettings", "ZeroStage"]


_Refusal = tuple[type[ShardError], object, str, str]
"""The class of an error, whether it is raised, its message and its fix."""


class ZeroSettings(NamedTuple):
    """The arguments of ``zero``, with the axes as a tuple."""

    tx: Transform
    axes: tuple[str, ...]
    stage: int
    bucket_mb: float | None
    master: Master | None
    reduce_dtype: torch.dtype | None
    gather_dtype: torch.dtype | None
    inner: str | None
    keep: bool

    @property
    def axis(self) -> Any:
        """The axes as a caller writes them: the name of a single one."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes over which buckets are cut, major first."""
        return self.axes if self.inner is None else (self.inner, *self.axes)

    @property
    def hops(self) -> Hops:
        """The axes of each collective between a bucket and its parts."""
        return (self.cut,) if self.inner is None else ((self.inner,), self.axes)

    def indices(self) -> IndexCache:
        """Make a cache of indices; at stage 3 with one bucket per module block, of any size."""
        if self.stage == 3:
            return IndexCache(self.hops, 1 << 62, self.tx.groups, apart=True, keep=self.keep)
        most = MOST if self.bucket_mb is None else int(self.bucket_mb * 2**20)
        return IndexCache(self.hops, most, self.tx.groups)

    def check(self) -> None:
        """Refuse what does not fit together.

        Raises: ShardError, Unsupported.
        """
        for refusals in (self._in_stage, self._in_dtypes):
            for kind, wrong, message, fix in refusals():
                if wrong:
                    raise kind(message, op="zero", fix=fix)

    def _in_stage(self) -> Iterator[_Refusal]:
        """List refusals of axes, stage and transform."""
        yield (
            ShardError,
            not self.axes,
            "there is no axis to split over",
            'sl.optim.zero(tx, axis="data")',
        )
        name, stage = repr(self.axis), self.stage
        yield (
            ShardError,
            type(stage) is not int or not 0 <= stage <= 3,
            f"there is no stage {stage}; 1 splits state, 2 gradients too, 3 parameters too",
            f"sl.optim.zero(tx, axis={name}, stage=2)",
        )
        yield (
            ShardError,
            not stage and bool(self.master or self.gather_dtype or self.reduce_dtype),
            "stage 0 splits nothing, so it has no master and no dtypes of its own",
            f"sl.optim.zero(tx, axis={name}, stage=0)",
        )
        yield (
            Unsupported,
            stage and self.tx.trait in (None, "tree"),
            "nobody said what this transform's update of one element depends on, and zero shows it "
            "flat vectors of many parameters"
            if self.tx.trait is None
            else "this transform looks at the tree, and zero shows it flat vectors of many parameters",
            f'tx = sl.optim.zero(tx._replace(trait="elementwise"), axis={name})  # if that alone',
        )
        yield (
            ShardError,
            self.inner is not None and self.inner in self.axes,
            f"inner={self.inner!r} is in axis= already",
            f"sl.optim.zero(tx, axis={name})",
        )
        most = self.bucket_mb
        yield (
            ShardError,
            most is not None and not (isinstance(most, int | float) and 0 < most < 2**40),
            f"bucket_mb={most!r}: a bucket has more than 0 MiB",
            'sl.optim.zero(tx, axis="data", bucket_mb=4.0)',
        )

    def _in_dtypes(self) -> Iterator[_Refusal]:
        """List refusals of the master, and of the dtypes in which values are sent."""
        name, narrow = repr(self.axis), self.gather_dtype
        yield (
            ShardError,
            self.master not in (None, "fp32", "bf16+rem"),
            f"master={self.master!r} is none of 'fp32', 'bf16+rem', None",
            f'sl.optim.zero(tx, axis={name}, master="fp32")',
        )
        for what, dtype in (("reduce_dtype", self.reduce_dtype), ("gather_dtype", narrow)):
            floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            yield (
                ShardError,
                dtype is not None and not floats,
                f"{what}={dtype!r} is no floating point dtype",
                f"sl.optim.zero(tx, axis={name}, {what}=torch.bfloat16)",
            )
        yield (
            ShardError,
            narrow is not None and self.master != "fp32",
            "parameters gathered in another dtype than their own lose what no master keeps",
            f'sl.optim.zero(tx, axis={name}, master="fp32", gather_dtype={narrow})',
        )
        yield (
            Unsupported,
            narrow is not None and self.stage == 3,
            "the parts of stage 3 are gathered in their own dtype",
            f'sl.optim.zero(tx, axis={name}, stage=3, master="fp32")  # of bfloat16 parameters',
        )


class ZeroStage:
    """Base of the stages: settings, indices, memory, and the state of parts."""

    def __init__(self, how: ZeroSettings) -> None:
        self.how = how
        self.cache = how.indices()
        self.memory = Memory()

    def transform(self) -> Transform:
        """Return these methods as a transform."""
        trait = self.how.tx.trait
        how: Any = {"donate": self.donate, "sink": self.sink, "shard": self.shard, "heeds": True}
        return Transform(self.init, self.update, trait, **how)

    def init(self, params: Any) -> Any:
        """Initialise the state."""
        raise NotImplementedError

    def shard(self, params: Any) -> Any:
        """Return the parameters as this stage keeps them."""
        return params

    def sink(self, params: Any) -> Any:
        """Return a sink for one backward's gradients, or None."""
        raise NotImplementedError

    def updated(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Return updates and the new state."""
        raise NotImplementedError

    def stepped(self, grads: Any, state: Any, params: Any, step: Step) -> Any:
        """Step in place; return the state."""
        raise NotImplementedError

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return updates and the new state; there are none with a master."""
        if params is None:
            raise ShardError(
                "zero needs the parameters", op="zero", fix="tx.update(grads, state, params)"
            )
        if self.how.master is not None:
            raise Unsupported(
                "an update added to half precision parameters would round the master away",
                op="zero",
                fix="params, state, info = sl.optim.step(tx, params, grads, state)",
            )
        return self.updated(grads, state, params)

    def donate(self, grads: Any, state: Any, params: Any, step: Step) -> Any:
        """Step in place, after a check of the state's master."""
        master = self.how.master
        if (master is None) == isinstance(state, ZeroState):
            kept = "one" if master is None else "none"
            raise ShardError(
                f"master={master!r}, and the state was made with {kept}",
                op="zero",
                fix="state = tx.init(params)",
            )
        return self.stepped(grads, state, params, step)

    def begin(self, parts: Buckets) -> Any:
        """Initialise the state of parts of parameters."""
        return begun(self.how.tx, parts, self.how.master, self.how.axis)

    def step_parts(self, grads: Buckets, state: Any, mine: Buckets, step: Step) -> Any:
        """Step parts in place, or their masters; the gradients' views are those of the last step."""
        key = grads.index, [x.raw.data_ptr() for x in grads.values()]
        grads.__dict__["pieces"] = self.cache.kept("pieces", key, lambda: grads.pieces)
        if step.ask and step.norm is None:
            step.norm = global_norm(grads)
        return step_parts(self.how.tx, grads, state, mine, step, self.how.master, self.memory)
