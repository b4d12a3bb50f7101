"""StepWork of a step on one rank: transfers, operations, bytes read and written; and its seconds."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardlib._compat import tree_flatten
from shardlib.collectives import Event
from shardlib.cost import Cost, slowest
from shardlib.memory_tracker import Live, tensors_in
from shardlib.mesh import Link
from shardlib.opspec import Args, Func, Kwargs
from shardlib.planning.constant_folding import operator_of, result_of

_MOVES_NOTHING = ("empty", "new_empty", "_unsafe_view")


class KernelClass(NamedTuple):
    """Class of operators that run at about one rate.

    ``kind``  "matmul" or "attention", and the dtype: "matmul float32".
    ``size``  the smallest dimension of a product; the length of attention.
    """

    kind: str
    size: int


@dataclass
class StepWork:
    """Work of a pass of a call, on one rank.

    ``along``    axes -> (bytes, messages) that it receives.
    ``kernels``  operations of products and of attention, and bytes that these read and write.
    ``touched``  bytes that all operators read and write; ``calls`` how many operators run.
    ``away``     bytes that go to host memory, and come back: ``remat`` "host".
    """

    along: dict[str, tuple[float, float]] = field(default_factory=dict)
    kernels: dict[KernelClass, tuple[float, float]] = field(default_factory=dict)
    touched: float = 0.0
    calls: float = 0
    away: float = 0.0

    @property
    def flops(self) -> float:
        """Operations of products and of attention."""
        return sum(flops for flops, _ in self.kernels.values())

    def compute(self, kernel: KernelClass, flops: float, touched: float) -> None:
        """Add operations of a class, and the bytes that they read and write."""
        had = self.kernels.get(kernel, (0.0, 0.0))
        self.kernels[kernel] = had[0] + flops, had[1] + touched

    def add(self, events: Sequence[Event]) -> None:
        """Add transfers."""
        for e in events:
            self.receive(e.axis.split(), float(e.bytes), e.messages)

    def receive(self, axes: Sequence[str], nbytes: float, messages: float) -> None:
        """Add a transfer over axes."""
        at = " ".join(axes)
        had = self.along.get(at, (0.0, 0.0))
        self.along[at] = had[0] + nbytes, had[1] + messages

    def join(self, other: "StepWork", times: float = 1) -> None:
        """Add the work of a part that runs so many times, or as a share of ranks."""
        for axes, (nbytes, messages) in other.along.items():
            self.receive(axes.split(), times * nbytes, times * messages)
        for kernel, (flops, touched) in other.kernels.items():
            self.compute(kernel, times * flops, times * touched)
        self.touched += times * other.touched
        self.calls += times * other.calls
        self.away += times * other.away


def update_work(parameters: float, state: float, ratio: float) -> StepWork:
    """Return the work of an update, where an explanation ends with backward.

    A parameter and its state are read and written once, and its gradient is read, as fused kernels
    do; operations of matrices, as Muon's, are not counted.

    ``parameters``, ``state``  bytes of a rank; ``ratio`` of the state per byte of a parameter.
    """
    own = parameters
    if ratio:
        # those of ZeRO's parts
        own = state / ratio
    return StepWork(touched=3 * own + 2 * state)


KernelRates = Mapping[str, Mapping[int, float]]
"""Kind of kernel -> size -> operations per second, as ``measure_device`` finds them."""


@dataclass(frozen=True)
class Rates:
    """Seconds of work: a link per axis, operations and bytes per second, seconds per operator.

    ``kernels``  rates of kinds of kernels by size; of all others ``flops`` is the rate.
    ``host``     bytes per second to host memory, and from it.

    >>> rates = Rates({}, 1e9, kernels={"matmul float32": {16: 1e9, 64: 4e9}})
    >>> [f"{rates.rate(KernelClass('matmul float32', n)):.0e}" for n in (1, 16, 32, 64, 1024)]
    ['1e+09', '1e+09', '2e+09', '4e+09', '4e+09']
    """

    links: Mapping[str, Link]
    flops: float
    bandwidth: float = math.inf
    call: float = 0.0
    kernels: KernelRates = field(default_factory=dict)
    host: float = math.inf

    def seconds(self, work: StepWork) -> float:
        """Add the seconds of computing and of transfers; none overlap."""
        return self.computing(work) + self.moving(work.along) + 2 * work.away / self.host

    def computing(self, work: StepWork) -> float:
        """Add the seconds of operators; a rate of kernels has the bytes that these touch in it."""
        products, touched = work.flops / self.flops, work.touched
        if self.kernels:
            products = sum(n / self.rate(kernel) for kernel, (n, _) in work.kernels.items())
            touched -= sum(
                n for kernel, (_, n) in work.kernels.items() if kernel.kind in self.kernels
            )
        return products + touched / self.bandwidth + work.calls * self.call

    def rate(self, kernel: KernelClass) -> float:
        """Return the operations per second of a class: on a line between the logarithms of two."""
        found = sorted(self.kernels.get(kernel.kind, {}).items())
        if not found:
            return self.flops
        at = bisect.bisect_left(found, (kernel.size, 0.0))
        if at in (0, len(found)):
            return found[min(at, len(found) - 1)][1]
        (low, slow), (high, fast) = found[at - 1], found[at]
        share = math.log(kernel.size / low) / math.log(high / low)
        return slow * (fast / slow) ** share

    def moving(self, along: Mapping[str, tuple[float, float]]) -> float:
        """Add the seconds of transfers."""
        return sum(slowest(axes.split(), self.links).seconds(*m) for axes, m in along.items())

    def least(self, cost: Cost) -> float:
        """Return the seconds of an algorithm's transfers at the least: each over its fastest axis."""
        return sum(
            min(slowest([a], self.links).seconds(float(nbytes), messages) for a in axes)
            for axes, nbytes, messages in cost.along
        )


class Meter(Live):
    """Bytes alive on paper, and the work of the operators that run.

    ``work``   what is added to.
    ``known``  tensors whose memory was there before.

    >>> import torch
    >>> x = torch.empty(4, 4, device="meta")
    >>> with Meter(StepWork(), [x]) as meter:
    ...     y = x @ x + 1
    >>> meter.work.flops, meter.work.touched, meter.now, meter.peak
    (128.0, 320.0, 64, 128)
    """

    def __init__(self, work: StepWork, known: Sequence[Tensor] = ()) -> None:
        super().__init__(paper=True)
        self.work = work
        for x in known:
            self._note(x, new=False)

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = operator_of(func)
        if operator.views:
            # of a tensor from elsewhere it is no new memory
            self._note(args[0], new=False)
            return func(*args, **kwargs)
        known = result_of(operator, func, args, kwargs)
        if known is None:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            kernel, flops, nbytes = _cost(func, out, args, kwargs)
        else:
            out = known.of(args)
            for x in tensors_in(out) if known.forms else ():
                self._note(x, new=True)
            if known.cost is None:
                known.cost = _cost(func, out, args, kwargs)
            kernel, flops, nbytes = known.cost
        if kernel is not None:
            self.work.compute(kernel, flops, nbytes)
        self.work.touched += nbytes
        self.work.calls += bool(flops or nbytes)
        return out


def _cost(
    func: Func, out: object, args: Args, kwargs: Kwargs
) -> tuple[KernelClass | None, float, int]:
    operands = tensors_in((args, kwargs))
    flops = operations(func, out, args, kwargs)
    kernel = kernel_of(func, out, operands, flops) if flops else None
    return kernel, flops, touched(func, operands, out)


def kernel_of(func: Func, out: object, operands: Sequence[Tensor], flops: float) -> KernelClass:
    """Return the class of an operator that has so many operations.

    >>> import torch
    >>> a, b = torch.empty(8, 4, 32), torch.empty(8, 32, 64)
    >>> kernel_of(torch.ops.aten.bmm.default, a @ b, [a, b], 2 * 8 * 4 * 32 * 64)
    KernelClass(kind='matmul float32', size=4)
    """
    name, dtype = func.__name__, str(operands[0].dtype).removeprefix("torch.")
    if "attention" in name:
        return KernelClass(f"attention {dtype}", operands[0].shape[-2])
    if isinstance(out, Tensor) and out.dim() < 4:
        size = min(*out.shape[-2:], round(flops / (2 * out.numel())))
    else:
        # of a convolution: its channels, or what is read for one of them
        weight = operands[1 + name.startswith("convolution_backward")]
        size = min(weight.shape[0], weight[0].numel())
    return KernelClass(f"matmul {dtype}", size)


def touched(func: Func, operands: Iterable[Tensor], out: object) -> int:
    """Count the bytes that an operator reads and writes: none for a view, or for empty memory."""
    if operator_of(func).views or func.__name__.startswith(_MOVES_NOTHING):
        return 0
    made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
    return sum(x.nbytes for x in [*operands, *made])


def operations(func: Func, out: object, args: Args, kwargs: Kwargs) -> float:
    """Count the floating point operations of an operator: of products, convolutions, attention."""
    count = flop_registry.get(_counted(func))
    return 0.0 if count is None else count(*args, **kwargs, out_val=out)


@cache
def _counted(func: Func) -> Any:
    """Return the operator whose operations torch counts, for one in place or the CPU's attention."""
    names = {op.__name__: op for op in flop_registry}
    return names.get(func.overloadpacket.__name__.replace("_for_cpu", "").rstrip("_"))
