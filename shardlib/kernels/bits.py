"""Random bits as a function of a key and a position, by torch's integer operations.

Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014; the
constants of the finaliser are Stafford's variant 13.
"""

from torch import Tensor


def signed(x: int) -> int:
    """Return the int64 with the same 64 bits: values from 2**63 on become negative.

    >>> signed(2**64 - 1)
    -1
    """
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def bits(index: Tensor, key: int) -> Tensor:
    """Make 64 random bits for each index, as int64."""
    x = index * -7046029254386353131  # 0x9E3779B97F4A7C15
    x += signed(key)
    # the mask clears copies of the sign bit: int64 has no logical shift
    x ^= (x >> 30).bitwise_and_(0x3FFFFFFFF)
    x *= -4658895280553007687  # 0xBF58476D1CE4E5B9
    x ^= (x >> 27).bitwise_and_(0x1FFFFFFFFF)
    x *= -7723592293110705685  # 0x94D049BB133111EB
    x ^= (x >> 31).bitwise_and_(0x1FFFFFFFF)
    return x
