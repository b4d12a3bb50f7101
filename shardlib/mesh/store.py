"""Key-value store client with a timeout on every call.

torch's own client is locked for as long as one of its calls waits (for the addresses of a new
group), and a call to a host that is stopped never returns.  This one has a connection of its own,
and a thread that makes the calls; the caller waits for the answer at most until the timeout.
"""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from shardlib.errors import RankFailed


class Client:
    """Calls to a store, each of at most ``seconds``.

    ``cause``  returns the error text once a call fails; later calls then fail at once.
    """

    def __init__(self, store: Any, seconds: float, cause: Callable[[], str]) -> None:
        self.seconds, self.cause, self.gone = seconds, cause, False
        self._store, self._pid = store.clone(), os.getpid()
        self._asked: SimpleQueue[tuple[SimpleQueue[Any], str, tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="shardlib store", daemon=True).start()

    def check(self, *keys: str) -> bool:
        """Check whether all of these keys are set."""
        return self._call("check", list(keys))

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if it is not set."""
        return self._call("get", key) if self.check(key) else None

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, value)

    def add(self, key: str, amount: int) -> int:
        return self._call("add", key, amount)

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write ``value`` if the current value is ``expected``; return the value afterwards."""
        return self._call("compare_set", key, expected, value).decode()

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._call("delete_key", key)

    def _call(self, name: str, *args: Any) -> Any:
        """Make a call.  Raises: RankFailed if the store does not answer, or is gone."""
        answer: SimpleQueue[Any] = SimpleQueue()
        error: BaseException | None = None
        if not self.gone and os.getpid() == self._pid:
            self._asked.put((answer, name, args))
            try:
                error, value = answer.get(timeout=self.seconds)
                if error is None:
                    return value
            except Empty:
                pass
        self.gone = True
        raise RankFailed(self.cause(), op="store") from error

    def _serve(self) -> None:
        while True:
            # a daemon thread: it ends with the process
            answer, name, args = self._asked.get()
            try:
                answer.put((None, getattr(self._store, name)(*args)))
            except RuntimeError as e:
                answer.put((e, None))
            # else a large value would stay alive until the next call
            del answer, args
