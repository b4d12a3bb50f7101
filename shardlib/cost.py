"""Cost of an algorithm for each rank: bytes, messages, temporary memory, seconds of computing."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from shardlib.mesh import Axes, Link, Sizes


@dataclass(frozen=True)
class Cost:
    """Cost for each rank: bytes received, messages, and bytes of temporaries at the peak.

    ``along``    (axes, bytes, messages) of each movement, for meshes whose axes differ in speed.
    ``compute``  seconds of computing, where the algorithms of one operation differ in that.

    Costs add: bytes, messages and seconds are summed; of temporaries the larger counts.

    >>> import shardlib as sl
    >>> gather = sl.extend.Cost(bytes=4096, messages=1, memory=4096)
    >>> gather + sl.extend.Cost(bytes=1024, messages=2, memory=1024)
    Cost(bytes=5120, messages=3, memory=4096, along=(), compute=0.0)
    """

    bytes: Fraction | int = 0
    messages: int = 0
    memory: Fraction | int = 0
    along: tuple[tuple[Axes, Fraction | int, int], ...] = ()
    compute: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.bytes + other.bytes,
            self.messages + other.messages,
            max(self.memory, other.memory),
            self.along + other.along,
            self.compute + other.compute,
        )

    def seconds(self, links: Mapping[str, Link] | None = None) -> float:
        """Estimate the alpha-beta time; a movement over several axes takes the slowest's links."""
        usual, links = Link(), links or {}
        total = self.compute + usual.alpha * self.messages + usual.beta * float(self.bytes)
        for axes, nbytes, messages in self.along:
            link = slowest(axes, links)
            total += (link.alpha - usual.alpha) * messages
            total += (link.beta - usual.beta) * float(nbytes)
        return total


def slowest(axes: Iterable[str], links: Mapping[str, Link]) -> Link:
    """Return the link of a movement over several axes: their worst latency and bandwidth.

    An axis without a link has the usual one.

    >>> slowest(("x", "y"), {"x": Link(1e-5, 1e-11), "y": Link(1e-6, 1e-10)})
    Link(alpha=1e-05, beta=1e-10)
    """
    met = [links.get(a, Link()) for a in axes] or [Link()]
    return Link(max(k.alpha for k in met), max(k.beta for k in met))


def moving(axes: Axes, nbytes: Fraction | int, messages: int, memory: Fraction | int = 0) -> Cost:
    """Price one movement over ``axes``.

    >>> p, block = 4, 4096  # an all-gather of blocks of 4096 bytes
    >>> price = moving(("x",), (p - 1) * block, p - 1)
    >>> price.bytes, price.messages, f"{price.seconds() * 1e6:.1f} us"
    (12288, 3, '72.3 us')
    """
    return Cost(nbytes, messages, memory, ((axes, nbytes, messages),) if axes else ())


def summing(nbytes: Fraction | int, axes: Axes, mesh: Sizes, width: int = 1) -> Cost:
    """Price a psum over ``axes``; its parts are ``width`` times as wide as the result.

    >>> price = summing(4096, ("x",), {"x": 4})
    >>> price.bytes, price.messages  # what a reduce-scatter and an all-gather move
    (Fraction(6144, 1), 6)
    """
    p = math.prod(mesh[a] for a in axes)
    return moving(axes, Fraction((1 + width) * (p - 1) * nbytes, p), 2 * (p - 1))


def lower_bound(m: int, k: int, n: int, ranks: int) -> float:
    """Compute a lower bound of the words that some rank receives for one product [m, k] x [k, n].

    It holds for every algorithm, does not depend on memory, and is tight.

    Source: Al Daas et al., SPAA 2022, theorem 3.

    >>> round(lower_bound(64, 64, 64, 8)), 3 * 64 * 64 // 8
    (1536, 1536)
    """
    a, b, c = sorted((m, k, n))
    p = ranks
    if p * b <= c:
        return (1 - 1 / p) * a * b
    if p * a * a <= b * c:
        return 2 * math.sqrt(a * a * b * c / p) - a * (b + c) / p
    return 3 * (a * b * c / p) ** (2 / 3) - (a * b + b * c + a * c) / p
