"""Memo: the one way to keep a result that depends on a mesh, on layouts and shapes there.

A kind of result has a table of its own with a bound, and is dropped with the mesh.  Results also
end with the algorithms that they were made under: ``Memo.version`` counts registrations.  Pure
functions of plain values (layouts, sizes) use ``lru_cache``, whose bound is in their first line.
"""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

GROUPS = "group"
"""Kind of the process groups of a mesh and of the functions bound to one.

It has no bound, since all ranks make a group together: one that was dropped could not be remade.
"""

_MISSING: Any = object()


class Memo(dict[str, dict[Any, Any]]):
    """Kind -> its table; calling it looks a result up, or makes and keeps it.

    >>> memo = Memo()
    >>> memo("square", 3, lambda: 9), memo("square", 3, lambda: 10)
    (9, 9)
    >>> Memo.version += 1  # an algorithm was registered
    >>> memo("square", 3, lambda: 10)
    10
    """

    version: ClassVar[int] = 0
    """Algorithms registered or removed so far, in all meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.made_under = Memo.version

    def __missing__(self, kind: str) -> dict[Any, Any]:
        table = self[kind] = {}
        return table

    def __call__(self, kind: str, key: Hashable, make: Callable[[], T], most: int = 8192) -> T:
        """Return the result kept for ``key``, or that of ``make()``.

        For a key that cannot be hashed, a list among a call's arguments, it is made each time.

        ``most``  results of this kind; a full table is emptied.
        """
        if self.made_under != Memo.version:
            self.forget()
        try:
            found = self[kind].get(key, _MISSING)
        except TypeError:
            return make()
        return self.keep(kind, key, make(), most) if found is _MISSING else found

    def keep(self, kind: str, key: Hashable, value: T, most: int = 8192) -> T:
        """Keep a result that was made elsewhere, for callers that read ``memo[kind]`` themselves."""
        table = self[kind]
        if len(table) >= most:
            table.clear()
        table[key] = value
        return value

    def forget(self) -> None:
        """Drop all results but process groups."""
        self.made_under = Memo.version
        for kind in [k for k in self if k != GROUPS]:
            self[kind].clear()
