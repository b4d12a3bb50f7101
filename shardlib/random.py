"""Random keys of sharded tensors, the same on every rank.

A number is a function of (seed, count of draws before, position in the global tensor).  So it
is the same under every layout, on every mesh and back end, and for every number of ranks; draws
of one rank from torch's own generator, for a log line or a shuffle, change nothing here.

The seed is the one passed to ``torch.manual_seed``, on rank 0 of the mesh: at the first draw, and
at the first draw after each ``torch.manual_seed``, the ranks agree on it through the job's store.
Their seeds may differ (``torch.manual_seed(seed + rank)``), but either all of them seed or none
does.  Where only some seed, those wait for the others up to the timeout of a transfer, and all
raise: ranks that go on with different keys would have different copies of one value.
``seed(n)`` sets the seed directly, and torch's is no longer used.

``torch.set_rng_state`` and ``fork_rng`` do not change the key; ``get_state`` and ``set_state`` do.
The recomputation of ``torch.utils.checkpoint`` repeats the draws of the forward.
"""

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import SEEDED
from shardlib.collectives import (
    all_gather,
    holds_values,
    pbroadcast,
    played,
    spans_processes,
    storage,
    unwrap,
    wrap,
)
from shardlib.errors import ShardError
from shardlib.mesh import JobProcesses, Mesh, MeshLike, as_mesh, bind, join_job, scope, within

__all__ = ["get_state", "seed", "set_state"]

_WORD = (1 << 64) - 1


@dataclass(eq=False)
class _Seed:
    """One seeding: the seed passed on this rank, and the seed that the ranks agreed on.

    ``exact``  the seed must be equal on all ranks; ``after``  draws since the seeding before.
    """

    given: int
    exact: bool = False
    after: int = 0
    agreed: int | None = None


class _Stream:
    """Draws of one set of ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.seed = self.first = _Seed(0)
        self.count = 0
        # counts of torch's and our seedings that were applied
        self.heard: tuple[int, int] | None = None
        # two threads that draw at once must get two keys
        self.lock = threading.Lock()

    def at(self, seed: "_Seed", count: int) -> "_Stream":
        """Return a stream of the same ranks with another seed and count."""
        other = _Stream(self.ranks)
        other.seed, other.first, other.count = seed, self.first, count
        other.heard = SEEDED.calls, _TOLD.calls
        return other

    def follow(self) -> _Seed:
        """Return the current seed; nothing is sent."""
        calls = SEEDED.calls, _TOLD.calls
        if self.heard == calls:
            return self.seed
        before, self.heard = self.heard, calls
        if before is None or before[1] != calls[1]:
            told = _TOLD.seed
            new = _Seed(
                torch.initial_seed() if told is None else told, told is not None, self.count
            )
        elif _TOLD.seed is None and SEEDED.holds():
            new = _Seed(torch.initial_seed(), after=self.count)
        else:
            return self.seed
        if before is None:
            self.first = new
        self.seed, self.count = new, 0
        return new

    def agree(self) -> int:
        """Return the seed that all ranks draw from."""
        new = self.follow()
        if new.agreed is None:
            job = join_job() if len(self.ranks) > 1 else None
            new.agreed = new.given if job is None else self._agree(job, new)
        return new.agreed

    def _agree(self, job: JobProcesses, mine: _Seed) -> int:
        fix = "torch.manual_seed(0)  # on every rank, or on none"
        where = f"seed/{'-'.join(map(str, self.ranks))}"
        word = [mine.given, self.count, mine.after]
        found = job.meet(where, self.ranks, word, "random", "its first draw since a seeding", fix)
        if len({after for _, _, after in found}) > 1:
            places = ", ".join(map(str, dict.fromkeys(after for _, _, after in found)))
            why = f"the ranks were seeded after different numbers of draws, {places}"
            raise ShardError(why, op="random", fix=fix)
        if mine.exact and len({(given, count) for given, count, _ in found}) > 1:
            keys = sorted({f"{given} ({count} draws)" for given, count, _ in found})
            why = f"the ranks were given different keys, {', '.join(keys)}"
            fix = "sl.random.seed(0)  # the same number on every rank"
            raise ShardError(why, op="random", fix=fix)
        return found[0][0]


class _Told:
    """Last argument of ``seed``."""

    calls = 0
    seed: int | None = None


_TOLD = _Told()
_HERE = _Stream((0,))  # of simulated ranks
_STREAMS: "weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], _Stream]]" = (
    weakref.WeakKeyDictionary()
)


def _stream(mesh: Mesh) -> _Stream:
    """Return the stream of a mesh's ranks, or its substitute in this scope."""
    found = mesh.stream
    if found is None:
        found = mesh.stream = _shared(mesh)
    return scope().random.draws.get(found, found)


def _shared(mesh: Mesh) -> _Stream:
    if not spans_processes(mesh):
        return _HERE
    while mesh.outer is not None:
        # the ranks of all stages of a pipeline draw from one seed
        mesh = mesh.outer.mesh
    ranks = tuple(sorted(mesh.ranks))
    return _STREAMS.setdefault(mesh.world(), {}).setdefault(ranks, _Stream(ranks))


def agreed(mesh: Mesh) -> int:
    """Return the seed of a mesh's draws, on which its ranks agree here if they have not yet.

    The ranks of all stages of a pipeline agree together, so all call this before they wait for
    one another's results: a later draw waits for no rank.
    """
    return _stream(mesh).agree()


def _streams() -> list[_Stream]:
    """List the random streams in use."""
    made = [_HERE, *(s for streams in _STREAMS.values() for s in streams.values())]
    return [s for s in made if s.heard is not None]


def mixed(x: int) -> int:
    """Mix a 64-bit number so that every bit depends on every bit of ``x``: splitmix64's finaliser.

    >>> hex(mixed(1)), hex(mixed(2))
    ('0x5692161d100b05e5', '0xdbd238973a2b148a')
    """
    x &= _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def branch(key: int, lane: int) -> int:
    """Return the key of one of several independent numbers per position."""
    # multiplier of the L64 generators (Steele and Vigna, 2021), as in Java's L64X128MixRandom
    return mixed(key + (lane + 1) * 0xD1342543DE82EF95)


def next_key(mesh: Mesh, generator: torch.Generator | None = None) -> int:
    """Return the key of the next draw on a mesh, the same on all its ranks.

    torch's own generator advances too, as in any draw.  A ``generator`` passed by the user gives
    the key itself: rank 0's, sent to all.  On a mesh without values nothing is drawn.
    """
    if not holds_values(mesh):
        if (whole := scope().call.stage) is not None:
            # the stages of a pipeline draw what the whole forward would
            whole.drawn += 1
        return 0
    if generator is not None:
        return _named(mesh, generator)
    stream = _stream(mesh)
    with stream.lock:
        # splitmix64's increment, 2**64 / golden ratio: seed 0 alone would be mixed to 0
        key = branch(mixed(stream.agree() + 0x9E3779B97F4A7C15), stream.count)
        stream.count += 1
    taken = scope().random.keys
    if taken is not None:
        taken[0] += 1
    torch.rand((), device="cpu")
    return key


def _named(mesh: Mesh, generator: torch.Generator) -> int:
    if not isinstance(generator, torch.Generator):
        why = f"a generator is a torch.Generator, not {generator!r}"
        fix = "torch.Generator()"
        raise ShardError(why, op="random", fix=fix)
    key = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=generator.device).to(
        mesh.device
    )
    axes = tuple(a for a in mesh.names if mesh.axes[a] > 1)
    if axes:
        with bind(mesh):
            raw = storage([key] * len(played(mesh)), mesh)
            key = unwrap(pbroadcast(wrap(raw, mesh), axes, 0)).flatten()
    return int(key[0]) & _WORD


class Plain:
    """Draw of plain tensors by a function such as ``torch.rand(shape)``, equal on all ranks.

    Such tensors count as replicated, but each rank's own generators make them, the host's and the
    device's.  Once a call has drawn, the ranks compare their generators before each call (8 bytes
    from each); where they differ, rank 0's are used, and afterwards the others continue from their
    own.
    """

    def __init__(self) -> None:
        self.drawn = False

    def alike(self, run: Callable[[], Any], mesh: Mesh) -> Any:
        """Call ``run()``, and again if it was the first call to draw and the generators differ."""
        if not spans_processes(mesh) or mesh.size == 1:
            return run()
        mine, at, around, keys = _states(mesh), rewound(mesh), scope().random.keys, [0]
        replaced = self.drawn and _rank_zeros(mesh, mine)
        with within(keys=keys):
            out = run()
            if not self.drawn and _moved_on(mine, mesh, keys[0]):
                self.drawn = True
                after = _states(mesh)
                if _rank_zeros(mesh, mine):
                    rewind(mesh, at)
                    out, replaced = run(), True
                else:
                    _set_states(mesh, after)
        if around is not None:
            around[0] += keys[0]
        if replaced and mesh.coord is not None and any(mesh.coord.values()):
            _set_states(mesh, mine)
            for device in {"cpu", mesh.device.type}:
                torch.rand((), device=device)
        return out


def _states(mesh: Mesh) -> list[Tensor]:
    """Return the states of torch's generators: the host's, and that of the mesh's device."""
    found = [torch.get_rng_state()]
    if mesh.device.type != "cpu":
        found.append(torch.get_device_module(mesh.device).get_rng_state(mesh.device))
    return found


def _set_states(mesh: Mesh, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(mesh.device).set_rng_state(state, mesh.device)


def _moved_on(since: Sequence[Tensor], mesh: Mesh, keys: int) -> bool:
    """Check whether torch's generators made more draws than the ``keys`` draws for keys."""
    now = _states(mesh)
    if not all(map(torch.equal, now[1:], since[1:])):
        return True
    if torch.equal(now[0], since[0]):
        return False
    again = torch.Generator()
    again.set_state(since[0])
    for _ in range(keys):
        torch.rand((), generator=again, device="cpu")
    return not torch.equal(now[0], again.get_state())


def _rank_zeros(mesh: Mesh, mine: Sequence[Tensor]) -> bool:
    """Set torch's generators to rank 0's states; False where all have these states already."""
    axes = tuple(a for a in mesh.names if mesh.axes[a] > 1)
    with bind(mesh):
        whole = torch.cat([*mine])
        digest = int.from_bytes(
            hashlib.blake2b(whole.numpy().tobytes(), digest_size=7).digest(), "little"
        )
        found = all_gather(torch.tensor([digest], device=mesh.device), axes)
        if bool((found == found[0]).all()):
            return False
        whole = pbroadcast(whole.to(mesh.device), axes, 0).cpu()
    # a generator reads the memory of a view from its start
    _set_states(mesh, [state.clone() for state in whole.split(list(map(len, mine)))])
    return True


# ---------------------------------------------------------------- for users


def seed(number: int | None) -> None:
    """Use this seed from here on, on every mesh, instead of ``torch.manual_seed``'s.

    None: use torch's again.

    Every rank passes the same number, which is checked at the next draw.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     x = sl.shard(torch.zeros(4), "x")
    ...     sl.random.seed(7)
    ...     a = torch.rand_like(x)
    ...     sl.random.seed(7)
    ...     torch.equal(sl.unshard(a), sl.unshard(torch.rand_like(x)))
    True
    >>> sl.random.seed(None)
    """
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        raise ShardError(
            f"a seed is a whole number, not {number!r}", op="random.seed", fix="sl.random.seed(0)"
        )
    _TOLD.seed = None if number is None else number & _WORD
    _TOLD.calls += 1


def get_state(mesh: MeshLike | None = None) -> dict[str, int]:
    """Return the key as plain numbers, to save with the model: seed and count of draws.

    Every rank of the mesh calls this.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     x = sl.shard(torch.zeros(4), "x")
    ...     saved = sl.random.get_state()
    ...     a = torch.rand_like(x)
    ...     sl.random.set_state(saved)
    ...     torch.equal(sl.unshard(a), sl.unshard(torch.rand_like(x)))
    True
    """
    mesh = as_mesh(mesh)
    return {"seed": agreed(mesh), "count": _stream(mesh).count}


def set_state(state: Mapping[str, int], mesh: MeshLike | None = None) -> None:
    """Continue from a key of ``get_state``, on this mesh or another, of any number of ranks.

    Every rank passes the same, which is checked at the next draw.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):
    ...     sl.random.seed(3)
    ...     x = sl.shard(torch.empty(4), "x")
    ...     before = sl.random.get_state()
    ...     a = torch.rand_like(x)
    ...     sl.random.set_state(before)
    ...     torch.equal(a, torch.rand_like(x))  # the same draws again
    True
    >>> sl.random.seed(None)
    """
    if (
        not isinstance(state, Mapping)
        or state.keys() != {"seed", "count"}
        or int(state["count"]) < 0
    ):
        why = f"a state has a seed and a count, not {state!r}"
        fix = "sl.random.set_state(sl.random.get_state())"
        raise ShardError(why, op="random.set_state", fix=fix)
    stream = _stream(as_mesh(mesh))
    stream.follow()
    stream.seed, stream.count = _Seed(int(state["seed"]) & _WORD, exact=True), int(state["count"])


# ---------------------------------------------------------------- parts of a program, out of order


class Draws:
    """Random keys of a mesh drawn from a chosen place of its stream, ``within(draws=d.instead)``.

    ``first``  the count of draws before the first of them.

    The stream itself does not advance: ``Draws.passed`` moves it past draws made so.
    """

    def __init__(self, mesh: Mesh, first: int) -> None:
        self.mesh, self.first = mesh, first
        self.stream = _stream(mesh)
        self.own = self.stream.at(self.stream.follow(), first)

    def replaced(self) -> "Draws":
        """Return the same draws from the stream that takes this one's place in this scope."""
        new = Draws(self.mesh, self.first)
        new.own = new.stream
        return new

    def go_to(self, n: int) -> None:
        """Draw next what would be the ``n``-th key from the first."""
        self.own.count = self.first + n

    @property
    def instead(self) -> dict["_Stream", "_Stream"]:
        """Map the streams of this scope to those that are drawn from, the mesh's from here."""
        return {**scope().random.draws, self.stream: self.own}

    @staticmethod
    def begun(mesh: Mesh) -> int:
        """Return the count of draws so far, once all ranks agree on the seed."""
        agreed(mesh)
        return _stream(mesh).count

    @staticmethod
    def passed(mesh: Mesh, count: int) -> None:
        """Continue the stream after ``count`` draws."""
        _stream(mesh).count = count


# ---------------------------------------------------------------- recomputation

Marks = dict[_Stream, tuple[_Seed, int]]


def marks() -> Marks:
    """Return seed and count of every random stream in use, or of its substitute in this scope."""
    draws = scope().random.draws
    here = [(s, draws.get(s, s)) for s in _streams()]
    return {s: (now.follow(), now.count) for s, now in here}


@contextmanager
def replayed(at: Marks) -> Iterator[None]:
    """Repeat, inside it, the draws after ``marks()``; the streams themselves do not advance."""
    told, draws = (SEEDED.calls, _TOLD.calls), scope().random.draws
    before = [draws.get(s, s) for s in _streams()]
    again = {s: s.at(*at.get(s, (s.first, 0))) for s in _streams()}
    try:
        with within(draws={**draws, **again}):
            yield
    finally:
        # seedings inside the context concerned the substitutes: the streams must skip them
        more = SEEDED.calls - told[0], _TOLD.calls - told[1]
        for s in before:
            assert s.heard is not None, "only streams in use are listed"
            s.heard = s.heard[0] + more[0], s.heard[1] + more[1]


@contextmanager
def seeded(mesh: Mesh, number: int | None) -> Iterator[None]:
    """Draw on ``mesh``, inside it, from a separate seed; None: from the stream as it is."""
    if number is None:
        yield
        return
    _stream(mesh).follow()
    with replayed(marks()):
        stream = _stream(mesh)
        stream.seed, stream.count = _Seed(number & _WORD, exact=True), 0
        yield


def rewound(mesh: Mesh) -> tuple[Any, int]:
    """Return the state that ``rewind`` needs to draw again from here."""
    stream = _stream(mesh)
    return stream.follow(), stream.count


def rewind(mesh: Mesh, at: tuple[Any, int]) -> None:
    stream = _stream(mesh)
    stream.seed, stream.count = at
