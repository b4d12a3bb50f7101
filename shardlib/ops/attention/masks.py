"""Attention masks as values in global positions, independent of the layout.

A mask has two methods.  ``relation`` takes two runs of positions and returns, in constant time, the
bounds of the allowed differences q - k, so that a plan can skip empty blocks and compute full ones
without a mask.  ``allowed`` returns booleans, for blocks where bounds are not enough.
Masks combine with ``&``: allowed by both.
"""

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.layouts.orders import Run
from shardlib.mesh import uploaded
from shardlib.tensor import call_error


class Relation(NamedTuple):
    """Bounds between two runs: allowed pairs have lo <= q - k <= hi; all such pairs if ``exact``.

    >>> window, causal = Relation(lo=-2, hi=2), Relation(lo=0)
    >>> window & causal
    Relation(lo=0, hi=2, exact=True)
    >>> Causal().relation(Run(8, 1, 4), Run(0, 1, 4))  # of all pairs of these runs, k <= q
    Relation(lo=0, hi=inf, exact=True)
    """

    lo: float = float("-inf")
    hi: float = float("inf")
    exact: bool = True

    def __and__(self, other: "Relation") -> "Relation":
        return Relation(max(self.lo, other.lo), min(self.hi, other.hi), self.exact and other.exact)


EVERYTHING = Relation()
NOTHING = Relation(float("inf"), float("-inf"))
SOMETHING = Relation(exact=False)


class At(NamedTuple):
    """Batch entries and heads (of the queries) of a block's rows, as global indices.

    >>> at = At(batch=torch.tensor([0]), heads=torch.tensor([2, 3]))  # two heads of four
    >>> ALiBi([0.5, 0.25, 0.125, 0.0]).scores(torch.tensor([4]), torch.arange(3), at).shape
    torch.Size([2, 1, 3])
    """

    batch: Tensor
    heads: Tensor


class Mask(ABC):
    """Mask: for each position of the queries, the positions of the keys it may attend to.

    To write your own, subclass it and define ``allowed``.  It is then right on every engine, which
    calls it for each block of scores.  The other methods are optional:

    ``relation``  makes it fast: a plan skips blocks without allowed pairs, and computes those that
                  are allowed as a whole without a mask.  A class that overrides ``allowed`` does
                  not inherit ``relation``, which described another mask.
    ``cuts``      positions at which ``relation`` changes, so that it is called on either side.
    ``scores``    is added to the scores; a mask that overrides only this allows everything:
                  ``allowed`` returns None.
    ``check``     refuses sequences that the mask was not made for.

    A mask is a value: hashable, and equal only to masks with the same results, as a frozen
    dataclass is, since plans are cached by it.  ``allowed`` and ``scores`` are pure functions of
    positions; every rank calls them for its own rows, forward and again backward.
    ``sl.testing.check_mask`` tests a mask for all of this.

    >>> import shardlib as sl
    >>> @dataclass(frozen=True)
    ... class Dilated(Mask):
    ...     step: int
    ...
    ...     def allowed(self, q, k, at):
    ...         return (q[:, None] - k) % self.step == 0
    >>> x = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    >>> seen = Dilated(3).allowed(torch.arange(8), torch.arange(8), None)
    >>> with sl.simulate(s=4):
    ...     q = sl.shard(x, sl.Ring("s", dim=2, schedule="zigzag"))
    ...     out = sl.unshard(sl.ring_attention(q, q, q, mask=Dilated(3)))
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(x, x, x, seen))
    True
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "allowed" in vars(cls) and "relation" not in vars(cls):
            # the inherited one describes the ``allowed`` that is overridden here
            cls.relation = Mask.relation

    @abstractmethod
    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor | None:
        """Return booleans that broadcast to [b, h, nq, nk], True where allowed; None: all.

        q [nq], k [nk] are global positions, ``at`` the global batch entries and heads of the block.
        """

    def relation(self, q: Run, k: Run) -> Relation:
        """Bound the differences q - k that are allowed between two runs of positions."""
        return SOMETHING

    def scores(self, q: Tensor, k: Tensor, at: At) -> Tensor | None:
        """Return values to add to the scores, broadcast as ``allowed``; None: nothing."""
        return None

    def cuts(self) -> tuple[Sequence[int], Sequence[int]]:
        """List positions of q and of k at which the relation may change: runs are cut there."""
        return (), ()

    def check(self, batch: int, heads: int, q: int, k: int) -> None:  # noqa: B027 optional, and empty
        """Raise ShardError if the mask is for other sizes."""

    @property
    def biased(self) -> bool:
        """Whether ``scores`` may add anything."""
        return type(self).scores is not Mask.scores

    def __and__(self, other: "Mask") -> "Mask":
        """Return the mask that allows what both allow.

        >>> Causal() & Window(3) & Full()
        Causal() & Window(left=3, right=None)
        """
        if not isinstance(other, Mask):
            other = MaskMod(other)
        parts = tuple(m for m in (*_parts(self), *_parts(other)) if type(m) is not Full)
        if len(parts) == 1:
            return parts[0]
        return _All(parts) if parts else Full()


def as_mask(mask: Any) -> Mask:
    """Return a mask as a Mask: None as Full, a function as a MaskMod.

    Raises: ShardError for any other value, and for a mask that is not hashable.
    """
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return _hashable(mask)
    if callable(mask) and not isinstance(mask, Tensor):
        function: Any = mask
        return MaskMod(function)
    what, given = f"not {mask!r}", "mask=sl.masks.Causal()"
    if isinstance(mask, Tensor):
        what, given = "a tensor is a bias", "bias=mask"
    why = f"a mask is a value or a function of (b, h, q, k); {what}"
    raise ShardError(why, op="ring_attention", fix=f"sl.ring_attention(q, k, v, {given})")


def _hashable(mask: Mask) -> Mask:
    try:
        hash(mask)
    except TypeError as e:
        why = f"plans are remembered by their mask, and {type(mask).__name__} cannot be hashed: {e}"
        fix = "sl.ring_attention(q, k, v, mask=lambda b, h, i, j: i >= j)"
        raise ShardError(why, op="ring_attention", fix=fix) from None
    return mask


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, _All) else (mask,)


class _Unbounded(Mask):
    """Base of masks that allow every pair."""

    def relation(self, q: Run, k: Run) -> Relation:
        return EVERYTHING

    def allowed(self, q: Tensor, k: Tensor, at: At) -> None:
        return None


@dataclass(frozen=True)
class Full(_Unbounded):
    """No mask: every query attends to every key.

    >>> import shardlib as sl
    >>> x = torch.randn(1, 2, 8, 4)
    >>> with sl.simulate(s=2):
    ...     q = sl.shard(x, sl.Ring("s", dim=2))
    ...     out = sl.unshard(sl.ring_attention(q, q, q, mask=Full()))
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(x, x, x), atol=1e-6)
    True
    """


@dataclass(frozen=True)
class Causal(Mask):
    """Causal mask: each position attends to itself and earlier ones, k <= q.

    >>> Causal().allowed(torch.arange(3), torch.arange(3), None).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """

    def relation(self, q: Run, k: Run) -> Relation:
        return Relation(lo=0)

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        return q[:, None] >= k


@dataclass(frozen=True)
class Window(Mask):
    """Sliding window: q - left <= k <= q + right; None: no bound on that side.

    >>> Window(2).allowed(torch.tensor([5]), torch.arange(8), None)
    tensor([[False, False, False,  True,  True,  True,  True,  True]])
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if side is not None and not (isinstance(side, int) and side >= 0):
                why = f"a window reaches so many positions, or None for all, not {side!r}"
                raise ShardError(why, op="Window", fix="sl.masks.Window(256, 0)")

    def relation(self, q: Run, k: Run) -> Relation:
        lo = float("-inf") if self.right is None else -self.right
        hi = float("inf") if self.left is None else self.left
        return Relation(lo, hi)

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor | None:
        back = q[:, None] - k
        lo, hi, _ = self.relation(Run(0, 1, 1), Run(0, 1, 1))
        return (back >= lo) & (back <= hi)


@dataclass(frozen=True)
class Prefix(Mask):
    """Causal mask with a prefix: all positions attend to the first ``length`` ones (prefix LM).

    >>> Prefix(2).allowed(torch.arange(4), torch.arange(4), None).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """

    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.length, int):
            why = f"a prefix is a number of positions, not {self.length!r}"
            raise ShardError(why, op="Prefix", fix="sl.masks.Prefix(128)")

    def relation(self, q: Run, k: Run) -> Relation:
        return EVERYTHING if k.last < self.length else Relation(lo=0, exact=k.start >= self.length)

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        return (q[:, None] >= k) | (k < self.length)

    def cuts(self) -> tuple[Sequence[int], Sequence[int]]:
        return (), (self.length,)


@dataclass(frozen=True)
class Padding(Mask):
    """Padding mask: keys at or beyond the length are hidden; one length, or one per batch entry.

    >>> Padding([3, 5]).lengths
    (3, 5)
    """

    lengths: Any

    def __post_init__(self) -> None:
        given = self.lengths.tolist() if isinstance(self.lengths, Tensor) else self.lengths
        object.__setattr__(
            self, "lengths", (int(given),) if isinstance(given, int) else tuple(map(int, given))
        )

    def relation(self, q: Run, k: Run) -> Relation:
        if k.last < min(self.lengths):
            return EVERYTHING
        return NOTHING if k.start >= max(self.lengths) else SOMETHING

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        lengths = uploaded(self.lengths, k.device)
        lengths = lengths if len(self.lengths) == 1 else lengths[at.batch]
        return (k < lengths[:, None])[:, None, None, :]

    def cuts(self) -> tuple[Sequence[int], Sequence[int]]:
        return (), sorted(set(self.lengths)) if len(set(self.lengths)) <= 8 else ()

    def check(self, batch: int, heads: int, q: int, k: int) -> None:
        if len(self.lengths) not in (1, batch):
            why = f"{len(self.lengths)} lengths for a batch of {batch}"
            raise _misfit(self, why, "sl.masks.Padding(lengths=7)")


@dataclass(frozen=True)
class Documents(Mask):
    """Document mask: each position attends to its own document; ``& Causal()`` for earlier ones.

    ``documents``  borders ``cu_seqlens`` (0, 5, 9, ...), the same for every batch entry; or a
                   tensor of document numbers [s] or [b, s].
    ``keys``       the same for the keys, if they are another sequence.

    >>> Documents((0, 2, 5)).allowed(torch.arange(3), torch.arange(3), None).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """

    documents: Any
    keys: Any = None
    _q: "_DocumentNumbers" = field(init=False, repr=False, compare=False)
    _k: "_DocumentNumbers" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        q = _DocumentNumbers.of(self.documents)
        object.__setattr__(self, "_q", q)
        object.__setattr__(self, "_k", q if self.keys is None else _DocumentNumbers.of(self.keys))
        object.__setattr__(self, "documents", q.value)
        object.__setattr__(self, "keys", None if self.keys is None else self._k.value)

    def relation(self, q: Run, k: Run) -> Relation:
        (q_low, q_high), (k_low, k_high) = self._q.range(q), self._k.range(k)
        if self._q.rising and self._k.rising:  # plain numbers
            if q_low > k_high or k_low > q_high:
                return NOTHING
            return EVERYTHING if q_low == q_high == k_low == k_high else SOMETHING
        q_low, q_high, k_low, k_high = map(torch.as_tensor, (q_low, q_high, k_low, k_high))
        if bool((q_low > k_high).all() or (k_low > q_high).all()):
            return NOTHING
        same = bool(((q_low == q_high) & (k_low == k_high) & (q_low == k_low)).all())
        return EVERYTHING if same else SOMETHING

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        a, b = self._q.on(q.device), self._k.on(k.device)
        a, b = (t if t.shape[0] == 1 else t[at.batch] for t in (a, b))
        same = a[:, q, None] == b[:, None, k]
        return same[0] if same.shape[0] == 1 else same[:, None]

    def cuts(self) -> tuple[Sequence[int], Sequence[int]]:
        return self._q.borders, self._k.borders

    def check(self, batch: int, heads: int, q: int, k: int) -> None:
        for numbers, n in ((self._q, q), (self._k, k)):
            rows, length = numbers.numbers.shape
            if length != n or rows not in (1, batch):
                why = f"documents of {rows} x {length} positions for {batch} x {n}"
                fix = f"sl.masks.Documents(torch.zeros({batch}, {n}, dtype=torch.int64))"
                raise _misfit(self, why, fix)


@dataclass(frozen=True, eq=False)
class _DocumentNumbers:
    """Document numbers [1 or b, s], borders if one row suffices, and a value for comparison."""

    numbers: Tensor
    borders: tuple[int, ...]
    value: Any
    # 0, 1, 2, ... between the borders
    rising: bool = False
    there: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(given: Any) -> "_DocumentNumbers":
        # a value that was converted before, passed again by replace()
        if isinstance(given, tuple) and given and isinstance(given[0], tuple):
            given = torch.tensor(given, device="cpu")
        if isinstance(given, Tensor):
            numbers = given.detach().cpu().reshape(-1, given.shape[-1])
            value = tuple(map(tuple, numbers.tolist()))
            changes = (numbers[:, 1:] != numbers[:, :-1]).any(0).nonzero().flatten() + 1
            return _DocumentNumbers(
                numbers, tuple(changes.tolist()) if len(changes) <= 1024 else (), value
            )
        borders = tuple(int(b) for b in given)
        if borders[:1] != (0,) or list(borders) != sorted(borders):
            why = f"borders of documents start at 0 and rise, not {borders}"
            raise ShardError(why, op="Documents", fix="sl.masks.Documents((0, 5, 9))")
        lengths = torch.tensor(
            [b - a for a, b in itertools.pairwise(borders)], dtype=torch.int64, device="cpu"
        )
        return _DocumentNumbers(
            torch.repeat_interleave(lengths)[None], borders[1:-1], borders, True
        )

    def on(self, device: torch.device) -> Tensor:
        """Copy the numbers to a device once."""
        if device not in self.there:
            with torch.inference_mode(False):
                self.there[device] = self.numbers.to(device)
        return self.there[device]

    def range(self, run: Run) -> tuple[Any, Any]:
        """Return the least and the largest number of a run, per row."""
        if self.rising:
            return bisect.bisect_right(self.borders, run.start), bisect.bisect_right(
                self.borders, run.last
            )
        held = self.numbers[:, run.start : run.last + 1 : run.stride]
        return held.amin(1), held.amax(1)


@dataclass(frozen=True)
class MaskMod(Mask):
    """Mask by ``function(b, h, q, k)`` of global indices, tensors that broadcast, to booleans.

    ``sl.masks.mask_mod``; a plain function given as ``mask=`` becomes one.  Two are equal if their
    function is the same object: define it once, outside the loop.

    >>> from shardlib.masks import mask_mod
    >>> near = mask_mod(lambda b, h, q, k: (q - k).abs() <= h + 1)  # wider for later heads
    >>> near.allowed(torch.arange(3), torch.arange(3), At(torch.arange(1), torch.arange(2))).int()
    tensor([[[1, 1, 0],
             [1, 1, 1],
             [0, 1, 1]],
    <BLANKLINE>
            [[1, 1, 1],
             [1, 1, 1],
             [1, 1, 1]]], dtype=torch.int32)
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        return self.function(at.batch[:, None, None, None], at.heads[:, None, None], q[:, None], k)


@dataclass(frozen=True)
class ALiBi(_Unbounded):
    """ALiBi: a penalty -slope |q - k| added to the scores of each head (arXiv 2108.12409).

    >>> at = At(torch.arange(1), torch.arange(2))
    >>> ALiBi([0.5, 0.25]).scores(torch.tensor([3]), torch.arange(4), at).squeeze()
    tensor([[-1.5000, -1.0000, -0.5000, -0.0000],
            [-0.7500, -0.5000, -0.2500, -0.0000]], dtype=torch.float64)
    """

    slopes: Any

    def __post_init__(self) -> None:
        given = self.slopes.tolist() if isinstance(self.slopes, Tensor) else self.slopes
        object.__setattr__(self, "slopes", tuple(map(float, given)))

    def scores(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        slopes = uploaded(self.slopes, q.device, torch.float64)[at.heads]
        return -slopes[:, None, None] * (q[:, None] - k).abs()

    def check(self, batch: int, heads: int, q: int, k: int) -> None:
        if len(self.slopes) != heads:
            why = f"{len(self.slopes)} slopes for {heads} heads"
            raise _misfit(self, why, f"sl.masks.ALiBi([0.5] * {heads})")


@dataclass(frozen=True, eq=False)
class Bias(_Unbounded):
    """Constant bias [.., s, t] added to the scores, broadcast over batch and heads.

    For a learned one use ``ring_attention(bias=)``.

    >>> Bias(torch.zeros(3, 3)).scores(torch.tensor([2]), torch.arange(3), None).shape
    torch.Size([1, 3])
    """

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.requires_grad:
            why = "a mask is a constant, and this bias asks for a gradient"
            raise call_error(
                ShardError, why, "Bias", "sl.ring_attention(q, k, v, bias=bias)", bias=self.values
            )

    def scores(self, q: Tensor, k: Tensor, at: At) -> Tensor:
        out = self.values
        if out.ndim > 3 and out.shape[-4] > 1:
            out = out[at.batch.to(out.device)]
        if out.ndim > 2 and out.shape[-3] > 1:
            out = out.index_select(-3, at.heads.to(out.device))
        return out.index_select(-2, q.to(out.device)).index_select(-1, k.to(out.device))

    def check(self, batch: int, heads: int, q: int, k: int) -> None:
        shape = self.values.shape
        lead = zip(reversed(shape[:-2]), (heads, batch), strict=False)
        fits = 2 <= len(shape) <= 4 and shape[-2:] == (q, k)
        if not fits or any(n not in (1, want) for n, want in lead):
            why = f"a bias {list(shape)} for scores {[batch, heads, q, k]}"
            raise _misfit(self, why, f"sl.masks.Bias(torch.zeros({q}, {k}))")


@dataclass(frozen=True)
class _All(Mask):
    """Conjunction of masks: allowed by every part."""

    parts: tuple[Mask, ...]

    def relation(self, q: Run, k: Run) -> Relation:
        out = EVERYTHING
        for part in self.parts:
            out &= part.relation(q, k)
        return out

    def allowed(self, q: Tensor, k: Tensor, at: At) -> Tensor | None:
        return _combined([m.allowed(q, k, at) for m in self.parts], torch.Tensor.__and__)

    def scores(self, q: Tensor, k: Tensor, at: At) -> Tensor | None:
        return _combined([m.scores(q, k, at) for m in self.parts], torch.Tensor.__add__)

    def cuts(self) -> tuple[Sequence[int], Sequence[int]]:
        q, k = zip(*(m.cuts() for m in self.parts), strict=True)
        return sorted({c for cuts in q for c in cuts}), sorted({c for cuts in k for c in cuts})

    def check(self, batch: int, heads: int, q: int, k: int) -> None:
        for part in self.parts:
            part.check(batch, heads, q, k)

    @property
    def biased(self) -> bool:
        return any(m.biased for m in self.parts)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))


def _combined(
    values: list[Tensor | None], join: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    given = [value for value in values if value is not None]
    return reduce(join, given) if given else None


def _misfit(mask: Mask, what: str, fix: str) -> ShardError:
    return ShardError(what, op=type(mask).__name__, operands={"mask": repr(mask)[:200]}, fix=fix)
