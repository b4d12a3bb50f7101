"""Streams of an accelerator beside the one that computes, and moments on them.

What is posted ahead runs on the stream of its kind: "gather" brings what is read next, "sum" takes
gradients away, "host" moves what lies in host memory meanwhile.  Such a stream waits for what the
caller's stream was given before, by an event, and the caller's stream for the result when somebody
asks for it; the host waits for neither.  What it reads is recorded there, so that the allocator gives
the memory to nobody before it is through; what it makes lies in memory of its own, which is used again
after what the caller's stream was given meanwhile.  NCCL has streams of its own, which keep the same
order between the stream that posts and the one that waits.

On the CPU nothing of this happens, nor where a device has no streams, nor where a transport makes the
host wait (gloo): there a transfer is under way from when it is posted.
"""

import threading
import weakref
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from shardlib.collectives.backends.backend import Finish

__all__ = ["Away", "Moment", "beside", "side"]


@lru_cache(maxsize=64)
def side(device: torch.device, kind: str) -> torch.Stream | None:
    """Give a device's stream of a kind; None where it has none, as the CPU.

    >>> side(torch.device("cpu"), "gather") is None
    True
    """
    if device.type in ("cpu", "meta"):
        return None
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError, TypeError):  # a device of one queue
        return None


def beside(kind: str, post: Callable[[], Finish], *memory: Tensor) -> Finish:
    """Post a transfer on the stream of its kind, whole, and give what waits for it.

    ``memory``  what it reads and writes that others made.
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
    here = torch.accelerator.current_stream(out.device)
    _follow(here, through)
    return out


def _follow(stream: torch.Stream, event: torch.Event) -> None:
    """Let a stream go on once another one has come to an event."""
    stream.wait_event(event)


def _use(x: Tensor, stream: torch.Stream) -> None:
    """Keep a tensor's memory, once it is let go, until a stream has done what it was given."""
    x.record_stream(stream)


class Away:
    """A tensor that lies in host memory until ``back()``.

    It leaves the device when two more have been sent, so that the stream that computes need not
    wait for the copy; what is asked for brings the one that was sent before it.
    """

    __slots__ = ("__weakref__", "arrived", "before", "device", "near", "stream", "there", "through")

    def __init__(self, x: Tensor) -> None:
        self.device, self.stream = x.device, side(x.device, "host")
        self.arrived: torch.Event | None = None
        self.near: Tensor | None = None
        self.before: weakref.ref[Away] | None = None
        pin = self.stream is not None
        self.there = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pin)
        if self.stream is None:
            self.there.copy_(x)
            return
        _follow(self.stream, torch.accelerator.current_stream(self.device).record_event())
        with self.stream:
            self.there.copy_(x, non_blocking=True)
            self.through = self.stream.record_event()
        self.near, self.before = x.detach(), getattr(_sent, "last", None)
        _sent.last = weakref.ref(self)
        one = self._before()
        two = None if one is None else one._before()
        if two is not None:
            two._leave()

    def back(self) -> Tensor:
        """Give the tensor on its device again, and begin to fetch the one before it."""
        if self.stream is None:
            return self.there.to(self.device)
        self._fetch()
        if (one := self._before()) is not None:
            one._fetch()
        x, self.near = self.near, None
        assert x is not None, "it was fetched"
        if self.arrived is not None:
            x = _arrive(x, self.arrived)
        return x

    def _before(self) -> "Away | None":
        return None if self.before is None else self.before()

    def _leave(self) -> None:
        """Let go of the memory on the device, which the stream that computes may write to then."""
        if self.near is not None and self.arrived is None:
            _follow(torch.accelerator.current_stream(self.device), self.through)
            self.near = None

    def _fetch(self) -> None:
        if self.near is None and self.stream is not None:
            _follow(self.stream, torch.accelerator.current_stream(self.device).record_event())
            with self.stream:
                self.near = self.there.to(self.device, non_blocking=True)
                self.arrived = self.stream.record_event()


_sent = threading.local()
"""The one that a thread sent last."""


class Moment:
    """A moment of the current stream, which the device reaches later than the host.

    ``seconds_since(other)`` may be asked for once the device has reached both.
    """

    __slots__ = ("event",)

    def __init__(self, device: torch.device) -> None:
        self.event = torch.Event(device, enable_timing=True)
        self.event.record(torch.accelerator.current_stream(device))

    def seconds_since(self, other: "Moment") -> float:
        """Count the seconds from another moment to this one, of the device's clock."""
        return other.event.elapsed_time(self.event) / 1e3
