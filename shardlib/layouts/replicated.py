"""The two layouts without a split: the same everywhere, and a sum still pending."""

from shardlib.layouts.layout import Layout

__all__ = ["Partial", "Replicated"]


def Replicated() -> Layout:
    """Keep the whole tensor on every rank.

    >>> Replicated()
    Layout('...')
    """
    return Layout(ellipsis=0)


def Partial(*axes: str) -> Layout:
    """Say that the value is the sum of the blocks over ``axes``.

    >>> Partial("x")
    Layout('... + sum(x)')
    """
    return Layout(partial=axes, ellipsis=0)
