"""Side streams of an accelerator for transfers posted ahead, and timing events.

Each kind of transfer has a side stream: "gather" for values that are read next, "sum" for
gradients, "host" for copies to and from host memory.  By events, a side stream waits for the work
submitted to the caller's stream before, and the caller's stream waits for the result where it is
used; the host waits for neither.  Tensors that a transfer reads are recorded on its stream, so that
the allocator does not reuse their memory too early.  Results are allocated on the side stream:
their memory is reused there only, by a later transfer, which waits for the caller's stream first.
NCCL has its own streams, with the same order between the stream that posts and the one that waits.

There are no side streams on the CPU, on a device without streams, and with a transport for which
the host waits (gloo): there a transfer runs from when it is posted.
"""

import threading
import weakref
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from shardlib.collectives.backends.backend import Finish


@lru_cache(maxsize=64)
def side(device: torch.device, kind: str) -> torch.Stream | None:
    """Return a device's side stream of a kind; None where it has no streams, as the CPU.

    >>> side(torch.device("cpu"), "gather") is None
    True
    """
    if device.type in ("cpu", "meta"):
        return None
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError, TypeError):
        # a device of one queue
        return None


def beside(kind: str, post: Callable[[], Finish], *memory: Tensor) -> Finish:
    """Post a whole transfer on the side stream of its kind; return a function that waits for it.

    ``memory``  tensors that it reads and writes, made outside it.
    """
    device = memory[0].device
    stream = None if torch.compiler.is_compiling() else side(device, kind)
    if stream is None:
        return post()
    _follow(stream, torch.accelerator.current_stream(device).record_event())
    with stream:
        out = post()()
        through = stream.record_event()
    for x in memory:
        _use(x, stream)
    return partial(_arrive, out, through)


def _arrive(out: Tensor, through: torch.Event) -> Tensor:
    _follow(torch.accelerator.current_stream(out.device), through)
    return out


def _follow(stream: torch.Stream, event: torch.Event) -> None:
    """Make a stream wait for an event of another stream."""
    stream.wait_event(event)


def _use(x: Tensor, stream: torch.Stream) -> None:
    """Prevent reuse of a tensor's memory until a stream has done the work submitted so far."""
    x.record_stream(stream)


class Away:
    """Tensor kept in host memory until ``back()``.

    Its device memory is freed when two more have been sent, so that the compute stream need not
    wait for the copy; ``back()`` also prefetches the one that was sent before it.  Where a device
    has no streams, both copies end at once.
    """

    __slots__ = ("__weakref__", "arrived", "before", "device", "near", "stream", "there", "through")

    def __init__(self, x: Tensor) -> None:
        self.device, self.stream = x.device, side(x.device, "host")
        self.arrived: torch.Event | None = None
        self.near: Tensor | None = None
        self.before: weakref.ref[Away] | None = None
        self._send(x)
        if not self._is_late():
            return
        self.near, self.before = x.detach(), getattr(_sent, "last", None)
        _sent.last = weakref.ref(self)
        one = self._before()
        two = one and one._before()
        if two is not None:
            two._leave()

    def back(self) -> Tensor:
        """Return the tensor on its device, and prefetch the one that was sent before it."""
        self._fetch()
        if (one := self._before()) is not None:
            one._fetch()
        x, self.near = self.near, None
        assert x is not None, "it was fetched"
        if self.arrived is not None:
            x = _arrive(x, self.arrived)
        return x

    def _is_late(self) -> bool:
        """Return whether copies go on while the device computes."""
        return self.stream is not None

    def _before(self) -> "Away | None":
        return self.before and self.before()

    def _send(self, x: Tensor) -> None:
        # with its strides: kernels round by them
        self.there = torch.empty_like(x, device="cpu", pin_memory=self.stream is not None)
        if self.stream is None:
            self.there.copy_(x)
            return
        _follow(self.stream, torch.accelerator.current_stream(self.device).record_event())
        with self.stream:
            self.there.copy_(x, non_blocking=True)
            self.through = self.stream.record_event()

    def _leave(self) -> None:
        """Free the device memory, which the compute stream may reuse after the copy."""
        if self.near is not None and self.arrived is None:
            _follow(torch.accelerator.current_stream(self.device), self.through)
            self.near = None

    def _fetch(self) -> None:
        if self.near is not None:
            return
        if self.stream is None:
            self.near = self.there.to(self.device)
            return
        _follow(self.stream, torch.accelerator.current_stream(self.device).record_event())
        with self.stream:
            self.near = self.there.to(self.device, non_blocking=True)
            self.arrived = self.stream.record_event()


_sent = threading.local()
"""Last ``Away`` that a thread made."""


class Moment:
    """Timing event on the current stream, which the device reaches later than the host.

    ``seconds_since(other)`` is valid once the device has reached both.
    """

    __slots__ = ("event",)

    def __init__(self, device: torch.device) -> None:
        self.event = torch.Event(device, enable_timing=True)
        self.event.record(torch.accelerator.current_stream(device))

    def seconds_since(self, other: "Moment") -> float:
        """Return the seconds from another moment to this one, by the device's clock."""
        return other.event.elapsed_time(self.event) / 1e3
