"""Rules of ``parallelize``: matching parameters by name, logical names of dimensions, and lint.

A rule is (pattern, layout): the first rule that matches a name decides, every parameter must match
a rule, and every rule must match a parameter.  A recipe's rules may be shadowed by earlier ones.

Patterns also name modules in ``remat`` and paths in optimizers.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from torch import Tensor

from shardlib.errors import (
    AxisReused,
    LayoutSyntax,
    RankMismatch,
    RuleLint,
    ShardError,
    UnevenSplit,
    UnknownAxis,
    similar,
)
from shardlib.layouts import Dim, Layout, LayoutLike, as_layout
from shardlib.mesh import Mesh, unknown_axis
from shardlib.placing import padded_size

T = TypeVar("T")

Pattern = str | re.Pattern[str] | Callable[[str, T], bool]


def matches(pattern: Pattern[T], name: str, value: T) -> bool:
    """Check whether a glob, a regex or a function of name and value matches.

    >>> [matches(p, "h.0.mlp", None) for p in ("h.*", re.compile(r"mlp$"), lambda n, v: v is None)]
    [True, True, True]
    """
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return bool(pattern(name, value))


Axes: TypeAlias = str | tuple[str, ...] | None
"""Mesh axes that split a logical dimension: one, several, or None."""

LogicalAxes: TypeAlias = Mapping[str, Axes] | None
"""Logical dimension -> mesh axes."""

Named: TypeAlias = Mapping[str, Tensor]
Layouts: TypeAlias = Mapping[str, Layout]
"""Tensors and layouts, by the names of parameters or inputs."""

Rules = Sequence[
    tuple[Pattern[Tensor], LayoutLike]
    | tuple[Pattern[Tensor], LayoutLike, LayoutLike]
    | tuple[str, ...]
]

UNFIT = (UnevenSplit, RankMismatch, UnknownAxis, AxisReused, LayoutSyntax, RuleLint)
"""Errors of a layout that does not fit a tensor or a mesh."""


class Suggested(tuple[str, ...]):
    """Rule written by a recipe: unlike a user's, it may be shadowed completely by earlier rules.

    ``padded``  the rule for ``pad=True``: a vocabulary that does not divide is split, and padded.
    """

    padded: tuple[str, ...]

    def __new__(cls, rule: Iterable[str], padded: tuple[str, ...] = ()) -> "Suggested":
        made = super().__new__(cls, rule)
        made.padded = padded or made
        return made


def stars(name: str) -> str:
    """Return a dotted name with ``*`` for every number: the same in every layer.

    >>> stars("h.0.mlp2.w")
    'h.*.mlp2.w'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


# ---------------------------------------------------------------- matching


def match_rules(
    named: Named,
    rules: Rules,
    axes: LogicalAxes = None,
    pad: bool = False,
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Find the layout of every parameter, and that of its products where the rule names one.

    First match wins; every parameter and every rule must be used.
    ``pad``  parameters are padded: use the padded variants of a recipe's rules.

    Raises: RuleLint listing the parameters no rule matches and the rules that match nothing.
    """
    for rule in rules:
        _check_form(rule)
    first = {name: _first(rules, name, value) for name, value in named.items()}
    taken = {name: at for name, at in first.items() if at is not None}
    layouts: dict[str, Layout] = {}
    out_layouts: dict[str, Layout] = {}
    for name, at in taken.items():
        value, rule = named[name], rules[at]
        _, layout, *out = rule.padded if pad and isinstance(rule, Suggested) else rule
        with naming(name, rules, named):
            read = read_layout(layout, axes, shape=value.shape, weight=True)
            layouts[name] = read.resolve(value.ndim)
            if out:
                out_layouts[name] = read_layout(out[0], axes)
    _refuse_unused(named, rules, taken)
    return layouts, out_layouts


def _refuse_unused(named: Named, rules: Rules, taken: Mapping[str, int]) -> None:
    """Refuse parameters without a rule, and rules of the user's that no parameter takes."""
    unmatched = [name for name in named if name not in taken]
    used = set(taken.values())
    unused = [rule[0] for i, rule in enumerate(rules) if i not in used and not _spare(rule, named)]
    if unmatched or unused:
        raise rule_error(
            _lint(unmatched, unused, named, rules),
            f"rules = [{_kept(unused, rules)}]" if unused else "rules = [*rules, ('*', '...')]",
        )


def _check_form(rule: object) -> None:
    """Refuse what is no (pattern, layout) or (pattern, layout, layout of products)."""
    fix = "sl.parallelize(module, [('*', '...')])"
    if not isinstance(rule, tuple | list) or len(rule) not in (2, 3):
        raise rule_error(
            "a rule is (pattern, layout) or (pattern, layout, layout of its products), not "
            f"{rule!r}",
            fix,
        )
    if not is_pattern(rule[0]):
        raise rule_error(
            "a pattern is a glob, a compiled regex or a function of (name, tensor), not "
            f"{rule[0]!r}",
            fix,
        )


def is_pattern(given: object) -> bool:
    """Check for a glob, a regex or a function."""
    return isinstance(given, str | re.Pattern) or callable(given)


def _first(rules: Rules, name: str, value: Tensor) -> int | None:
    """Return the number of the first rule that matches a parameter."""
    return next((i for i, (p, *_) in enumerate(rules) if matches(p, name, value)), None)


def _spare(rule: object, named: Named) -> bool:
    """Check for a recipe's rule that earlier rules shadow, which is no mistake of the user's."""
    return isinstance(rule, Suggested) and any(matches(rule[0], n, v) for n, v in named.items())


def read_layout(
    layout: object,
    axes: LogicalAxes,
    mesh: Mesh | None = None,
    shape: Sequence[int] = (1,),
    weight: bool = False,
) -> Layout:
    """Return the layout of a rule or an input, its logical names resolved, on ``mesh`` if given."""
    if not isinstance(layout, str):
        layout = as_layout(layout, "parallelize", "{}", shape=shape, mesh=mesh, weight=weight)
    found = logical(str(layout), axes or {})
    if mesh is not None:
        for axis in (a for a in found.named if a not in mesh.axes):
            # ``renamed`` adds the fix
            raise unknown_axis(axis, mesh.axes, "parallelize", "")
    return found


def logical(text: str, axes: Mapping[str, Axes]) -> Layout:
    """Resolve logical dimension names: ``embed (3 heads hd)`` with heads="x" -> ``. (3 x)``.

    Inside a group an integer is an unsplit factor, a name with a mesh axis splits, and names
    mapped to ``.`` end the group.

    >>> logical("embed (3 heads hd)", {"embed": ".", "heads": "x", "hd": "."})
    Layout('. (3 x)')
    >>> logical("vocab embed", {"vocab": ("x", "y"), "embed": None})
    Layout('(x y) .')
    """
    tokens = re.findall(r"\([^)]*\)|\S+", text)
    named = {name: _written(axis) for name, axis in axes.items()}

    def resolve(token: str) -> str:
        if not re.fullmatch(r"\(.*\)", token):
            return named.get(token, token)
        parts = [q for p in token[1:-1].split() for q in named.get(p, p).strip("()").split()]
        while parts and parts[-1] == ".":
            parts.pop()
        if "." in parts:
            raise rule_error(
                f"{token!r}: {'.'!r} may only end a group; give the factor's size as a number",
                "sl.parallelize(module, rules, axes=dict(heads='x', hd='.'))",
                operands={"layout": text},
            )
        return f"({' '.join(parts)})" if parts else "."

    return Layout.parse(" ".join(resolve(t) for t in tokens))


def _written(axis: Axes) -> str:
    """Write the mesh axes of a logical dimension: one, several as a tuple, or None, as in JAX."""
    if axis is None or isinstance(axis, str):
        return axis or "."
    return str(Dim(tuple(axis)))


def rule_error(why: str, fix: str, operands: Mapping[str, object] | None = None) -> RuleLint:
    """Return the error for rules, or arguments like them, that do not fit a module."""
    return RuleLint(why, op="parallelize", operands=operands, fix=fix)


# ---------------------------------------------------------------- lint


def _lint(unmatched: list[str], unused: list[Pattern[Tensor]], named: Named, rules: Rules) -> str:
    lines = []
    for name in unmatched:
        globs = [p for p, *_ in rules if isinstance(p, str)]
        near = nearest(similar(name, globs, 1, 0.5), "nearest rule")
        lines.append(f"no rule matches parameter {name!r}{near}")
    for pattern in unused:
        shadow = [n for n, v in named.items() if matches(pattern, n, v)]
        text = _pattern_text(pattern)
        if shadow:
            lines.append(
                f"rule {text} is never reached: an earlier rule takes {', '.join(shadow[:3])}"
            )
            continue
        near = nearest(similar(text.strip("'*"), list(named), 1, 0.4))
        lines.append(f"rule {text} matches no parameter{near}")
    return "\n    ".join(lines)


def nearest(names: Sequence[str], what: str = "nearest") -> str:
    """Write the first of the names most like one that is unknown; nothing without any."""
    return "".join(f" ({what}: {name!r})" for name in names[:1])


def _pattern_text(pattern: Pattern[Tensor]) -> str:
    if isinstance(pattern, str):
        return repr(pattern)
    return f"re.compile({pattern.pattern!r})" if isinstance(pattern, re.Pattern) else repr(pattern)


def _kept(unused: Sequence[Pattern[Tensor]], rules: Rules) -> str:
    """Write a generator of all rules but these, by text, or by number if one is a function."""
    if all(isinstance(p, str | re.Pattern) for p in unused):
        texts = "".join(f"{_pattern_text(p)}, " for p in unused)
        return f"r for r in rules if r[0] not in ({texts.rstrip()})"
    numbers = tuple(i for i, (p, *_) in enumerate(rules) if any(p is u for u in unused))
    return f"r for i, r in enumerate(rules) if i not in {numbers}"


@contextmanager
def naming(
    name: str,
    rules: Rules,
    named: Named,
    others: Callable[[], Sequence[str]] = tuple,
) -> Iterator[None]:
    """Refuse a layout that does not fit a parameter, with a rule for it and all ``others``."""
    try:
        yield
    except UNFIT as e:
        names = list(dict.fromkeys([name, *others()]))
        whole = ", ".join(f"({n!r}, '...')" for n in names)
        fix = f"sl.parallelize(module, [{whole}{_rest(names, rules, named)}])"
        raise renamed(f"the rule of parameter {name!r} does not fit it", e, fix) from None


def renamed(what: str, e: ShardError, fix: str) -> ShardError:
    """Return a layout's error with the name of its parameter or input, and the line to write."""
    return type(e)(
        f"{what}: {e.message}", op="parallelize", operands=e.operands, mesh=e.mesh, fix=fix
    )


def misfits(named: Named, layouts: Layouts, mesh: Mesh, pad: bool) -> list[str]:
    """List the parameters that their layouts do not fit."""
    found = []
    for n, p in named.items():
        try:
            size = padded_size(layouts[n], p, mesh, pad)
            layouts[n].check(tuple(size), mesh)
        except UNFIT:
            found.append(n)
    return found


def _rest(names: Sequence[str], rules: Rules, named: Named) -> str:
    """Write the rules that still match something after rules for these parameters come first."""
    first = [_first(rules, n, v) for n, v in named.items() if n not in names]
    kept = [rules[i][0] for i in first if i is not None]
    if not kept:
        return ""
    unused = [p for p, *_ in rules if p not in kept]
    return f", *({_kept(unused, rules)})" if unused else ", *rules"
