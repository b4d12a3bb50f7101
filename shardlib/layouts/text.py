"""Parser of a layout's text form into the fields of a ``Layout``; errors show the mistake."""

import re
from collections.abc import Sequence
from dataclasses import replace

from shardlib.errors import LayoutSyntax, ShardError, similar
from shardlib.layouts.dims import WHOLE, Dim
from shardlib.layouts.orders import ORDERS
from shardlib.mesh import Axes

Fields = tuple[tuple[Dim, ...], Axes, int | None]

NAME = re.compile(r"[A-Za-z_]\w*\Z")
_RUN = re.compile(r"[0-9]{1,18}:[0-9]{1,18}(:[1-9][0-9]{0,17})?")
_NUMBER = re.compile(r"[0-9]{1,18}")


def _is_given(order: str, text: str) -> bool:
    """Check whether ``text`` fits the order: borders from 0 on, or ranges between bars."""
    if order == "documents":
        words = text.split()
        return len(words) > 1 and words[0] == "0" and all(_NUMBER.fullmatch(w) for w in words)
    return all(_RUN.fullmatch(w) for w in text.replace("|", " ").split())


_WRITTEN = {"documents": "documents(s; 0 5 8)", "runs": "runs(s; 0:2 6:8 | 2:6)"}


# characters of a layout's text, a bound on the time of parsing
_MOST = 10_000


def read(text: str) -> Fields:
    """Read the dimensions, pending axes and place of ``...`` that a text names.

    Raises: LayoutSyntax.

    >>> dims, partial, ellipsis = read("x ... + sum(z)")
    >>> [str(d) for d in dims], partial, ellipsis
    (['x'], ('z',), 1)
    """
    if len(text) > _MOST:
        why = f"a text of {len(text):,} characters is no layout: {text[:40]!r}..."
        raise LayoutSyntax(why, op="layout", fix="sl.Layout.parse('x ... y')")
    body, _, skew = f" {text}".partition(" skew ")
    body, plus, tail = body.partition("+")
    partial: Axes = ()
    if plus:
        found = re.fullmatch(r"\s*sum\(([\w\s]+)\)\s*", tail)
        if not found:
            raise _bad(
                text, f"after '+' comes sum(axes), not {tail.strip()!r}", f"{body.strip()} + sum(z)"
            )
        partial = tuple(found[1].split())
    if skew.strip() not in ("", "a", "b"):
        raise _bad(text, f"a skew is 'a' or 'b', not {skew.strip()!r}", f"{body.strip()} skew a")
    dims, ellipsis = [], None
    for token in re.findall(r"\w*\([^()]*\)|[^\s()]+|[()]", body):
        if token == "...":
            if ellipsis is not None:
                raise _bad(text, "'...' stands once", "x ... y")
            ellipsis = len(dims)
        else:
            dims.append(_token(token, text))
    if skew.strip():
        dims = _skewed(dims, skew.strip(), text)
    return tuple(dims), partial, ellipsis


def _skewed(dims: list[Dim], skew: str, text: str) -> list[Dim]:
    """Return the tokens of a matrix whose columns (a) or rows (b) the other's axis moves on."""
    if len(dims) != 2 or any(len(d.parts) != 1 or not d.is_plain for d in dims):
        raise _bad(text, "a skew needs a matrix split over two axes", f"x y skew {skew}")
    rows, cols = dims
    if skew == "a":
        return [rows, replace(cols, by=rows.axes[0])]
    return [replace(rows, by=cols.axes[0]), cols]


def _token(token: str, text: str) -> Dim:
    if token == ".":
        return WHOLE
    order, parens, inner, given = "contiguous", False, token, ""
    if token.endswith(")"):
        order, _, inner = token[:-1].partition("(")
        inner, _, given = inner.partition(";")
        order, parens = order or "contiguous", True
    if order not in ORDERS:
        near = similar(order, ORDERS[:3], 1) or ["zigzag"]
        raise _bad(
            text,
            f"unknown order {order!r}; there are {', '.join(ORDERS)}",
            re.sub(rf"\b{order}\(", f"{near[0]}(", text),
        )
    ordered = order != "contiguous"
    parts = [_part(word, parens, ordered, text) for word in inner.split()]
    if not parts or (ordered and isinstance(parts[-1], int)):
        raise _bad(text, f"{token!r} names no axis", ". ...")
    if bool(given) != (order in ("documents", "runs")) or (given and not _is_given(order, given)):
        raise _bad(
            text,
            f"{order} is written {_WRITTEN.get(order, order + '(s)')}",
            f". {_WRITTEN.get(order, 's')}",
        )
    if given:
        order = f"{order}; {' '.join(given.split())}"
    while parts and isinstance(parts[-1], int):
        # a trailing factor does not change which positions a rank holds
        parts.pop()
    return Dim(tuple(parts), order)


def _part(word: str, parens: bool, ordered: bool, text: str) -> str | int:
    """Read an axis name or, in parentheses, a factor: above 1, or any in an order."""
    if _NUMBER.fullmatch(word) and int(word) > (not ordered) and parens:
        return int(word)
    if NAME.match(word):
        return word
    raise _bad(text, f"{word!r} is no axis name", "x ... y")


def _bad(text: str, what: str, example: str) -> LayoutSyntax:
    try:
        dims, partial, *_ = read(example)
        used = [*partial, *(a for d in dims for a in d.axes)]
        wrong = len(set(used)) < len(used)
    except ShardError:
        wrong = True
    if wrong:
        # the text has a second mistake, so the example could not be parsed either
        example = "x ... y"
    return LayoutSyntax(
        f"cannot read {text!r}: {what}", op="layout", fix=f"sl.Layout.parse({example!r})"
    )


def written(fields: Fields) -> str:
    """Write the text that ``read`` parses.

    >>> written(read("(d  x) ... y + sum( z )"))
    '(d x) ... y + sum(z)'
    """
    dims, partial, ellipsis = fields
    tokens = [str(d) for d in dims]
    if ellipsis is not None:
        tokens.insert(ellipsis, "...")
    body = " ".join(tokens)
    if partial:
        body += f" + sum({' '.join(partial)})"
    if skew := skew_of(dims):
        body += f" skew {skew}"
    return body.strip()


def skew_of(dims: Sequence[Dim]) -> str:
    """Return which operand of Cannon's product is stored so: "a", "b", or "" without a skew."""
    return next(("ba"[d] for d, dim in enumerate(dims) if dim.by), "")
