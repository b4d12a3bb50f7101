"""Layouts without a split: replicated, and a pending sum."""

from shardlib.layouts.layout import Layout

__all__ = ["Partial", "Replicated"]


def Replicated() -> Layout:
    """Keep the whole tensor on every rank.

    >>> Replicated()
    Layout('...')
    """
    return Layout(ellipsis=0)


def Partial(*axes: str) -> Layout:
    """Mark the value as the pending sum of the blocks over ``axes``.

    >>> Partial("x")
    Layout('... + sum(x)')
    """
    return Layout(partial=axes, ellipsis=0)
