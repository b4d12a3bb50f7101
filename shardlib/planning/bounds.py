"""A lower bound on the words that any algorithm must move.

Source: Al Daas et al., SPAA 2022.
"""

import math

__all__ = ["lower_bound"]


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
