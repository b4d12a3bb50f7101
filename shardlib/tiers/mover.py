"""Movers: jobs in order beside the computation, copies between tiers and updates on the host.

A mover is a thread.  For an accelerator the thread launches its jobs on a copy stream, which first
waits for what the submitter's stream had to do; to wait for a ticket there is to have the current
stream wait for its event.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

import torch

from shardlib.collectives import Moment
from shardlib.errors import user_line

SMALL = 1 << 16
"""Bytes of a copy that takes less time than to wake a thread."""


class Ticket:
    """A job that was given to a mover; ``span``: when it began and ended, on a link or a stream."""

    __slots__ = ("error", "event", "finished", "line", "result", "span")

    def __init__(self, line: str) -> None:
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self.event: torch.Event | None = None
        self.result: Any = None
        self.line = line
        self.span: tuple[Any, Any] | None = None

    def wait(self) -> Any:
        """Return the job's result; on an accelerator the current stream waits for it.

        Raises: the job's exception, with the line that submitted it.
        """
        self.finished.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            self.event.wait(torch.accelerator.current_stream())
        return self.result

    def on_host(self) -> Any:
        """Return the job's result when no part of it is under way on any stream."""
        self.finished.wait()
        if self.event is not None:
            self.event.synchronize()
        return self.wait()


class Mover:
    """A thread, or a stream of an accelerator, that runs jobs one after another.

    ``rate``   bytes a second to which a thread is held, in place of a link; None: any.
    ``small``  bytes of jobs that the caller runs at once, where none is before them: of copies, as
               a job that waits would have the caller wait.
    ``moved``  bytes so far.

    >>> mover = Mover("copies", torch.device("cpu"))
    >>> mover.submit(lambda: 1 + 1).wait()
    2
    >>> mover.close()
    """

    def __init__(
        self, name: str, device: torch.device, rate: float | None = None, small: int = 0
    ) -> None:
        self.name, self.moved, self.rate, self.small = name, 0, rate, small
        # of the last job; its ticket would keep memory alive
        self.last: threading.Event | None = None
        self.stream: Any = None
        if device.type != "cpu":
            with suppress(RuntimeError):
                # a registered device may have no streams: its jobs run on the default one
                self.stream = torch.Stream(device)
        self.due: SimpleQueue[Any] = SimpleQueue()
        # daemon: an interrupted main thread is not waited for by its movers
        args = self.due, self.stream, rate
        worker = threading.Thread(target=_serve, args=args, daemon=True, name=f"shardlib {name}")
        # before it starts: an interrupted start leaves no thread either
        self.close: Callable[[], object] = weakref.finalize(self, _close, self.due, worker)
        worker.start()

    def submit(
        self, job: Callable[[], Any], nbytes: int = 0, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """Run a job after all those before it, and after those of other movers in ``after``."""
        ticket = Ticket(user_line())
        self.moved += nbytes
        if 0 < nbytes <= self.small and self.stream is None and self.rate is None:
            ended = self.last is None or self.last.is_set()
            if ended and all(t.finished.is_set() and t.error is None for t in after):
                ticket.result = job()
                ticket.finished.set()
                return ticket
        self.last, begun = ticket.finished, None
        if self.stream is not None:
            begun = torch.Event(self.stream.device)
            begun.record(torch.accelerator.current_stream())
        self.due.put((copy_context(), job, nbytes, tuple(after), begun, ticket))
        return ticket


def copied(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each pair's second tensor to its first: the job of a mover."""
    with torch.no_grad():
        for to, x in pairs:
            to.copy_(x, non_blocking=True)


def _serve(due: SimpleQueue[Any], stream: Any, rate: float | None) -> None:
    """Run jobs until None comes."""
    # when the link is free again
    free = 0.0
    other: Any
    arrived: Any
    while (item := due.get()) is not None:
        context, job, nbytes, after, before, ticket = item
        began = time.perf_counter()
        for other in after:
            other.finished.wait()
        start: Any = time.perf_counter()
        if rate and nbytes:
            free = max(free, began, time.perf_counter()) + nbytes / rate
            time.sleep(max(free - time.perf_counter(), 0.0))
        with stream or nullcontext():
            if before is not None:
                stream.wait_event(before)
            try:
                for other in after:
                    # a thread without a stream reads the memory itself
                    arrived = other.wait
                    if stream is None:
                        arrived = other.on_host
                    arrived()
                if stream is not None:
                    start = Moment(stream.device)
                ticket.result = context.run(job)
            except BaseException as error:
                error.add_note(f"in a job of a memory tier, submitted at {ticket.line}")
                ticket.error = error
            end: Any = time.perf_counter()
            if stream is not None:
                end = Moment(stream.device)
                ticket.event = end.event
            ticket.span = start, end
        # before it is known to have ended: a buffer that a job refers to is in use
        del item, context, job, after, before
        other = arrived = None
        ticket.finished.set()
        del ticket


def _close(due: SimpleQueue[Any], worker: threading.Thread) -> None:
    """End a thread when its jobs are done: one that is inside torch at exit aborts the process."""
    due.put(None)
    # one whose start was interrupted ends by itself
    if worker is not threading.current_thread() and worker.is_alive():
        worker.join()
