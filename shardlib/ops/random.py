"""Random functions of torch on sharded tensors: every number is keyed by its global position.

In-place fills, rand_like and others, samples of given distributions.  ``generator=`` is honoured:
rank 0's draw from it is the key.  Arguments are checked by torch, on a tensor of at most one
element.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from shardlib._compat import builtin
from shardlib.collectives import storage_shape
from shardlib.errors import ImplicitCommunication, ShardError, Unsupported
from shardlib.kernels.bits import signed
from shardlib.layouts import Dim, Layout
from shardlib.ops.candidates import best
from shardlib.ops.counter_rng import (
    DIGITS,
    Make,
    Maker,
    drawn,
    gaussian,
    half_open,
    open_unit,
    then,
    unit,
)
from shardlib.ops.declare import Bound, by_signature
from shardlib.ops.dims import Labels, rows_call
from shardlib.ops.elementwise import aligned
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs, lines
from shardlib.random import branch, next_key
from shardlib.tensor.gradients import real_axes
from shardlib.tensor.lifting import lift
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, call_error, implements


def _asked(func: Func, x: ShardedTensor, args: Args, kwargs: Kwargs) -> None:
    """Raise torch's own error for bad arguments."""
    # without elements torch accepts any dtype, so integers are checked on one element
    few = 0 if x.dtype.is_floating_point or x.dtype.is_complex else 1
    device = "cpu" if x.raw.is_meta else x.raw.device
    try:
        func(torch.zeros(few, dtype=x.dtype, device=device), *args, **kwargs)
    except TypeError as e:
        name = func.__name__
        fix = f"x.{name}({'0.5' if name == 'geometric_' else ''})"
        raise call_error(ShardError, str(e), name, fix, x=x) from None


# ---------------------------------------------------------------- distributions


def uniform(low: float, high: float, dtype: torch.dtype) -> Maker:
    """Return a maker of numbers in [low, high), also after rounding to ``dtype``."""
    top = low
    if high > low:
        ends = torch.tensor([high, low], dtype=dtype, device="cpu")
        top = torch.nextafter(*ends).item()
    return then(unit(dtype), lambda u: u.mul_(high - low).add_(low).to(dtype).clamp_(max=top))


def spread(mean: float, std: float, dtype: torch.dtype) -> Maker:
    return then(gaussian(dtype), lambda z: z.mul_(std).add_(mean))


def exponential(rate: float) -> Make:
    return lambda h: open_unit(h).log_().div_(-rate)


def cauchy(median: float, sigma: float) -> Make:
    return lambda h: open_unit(h).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def geometric(p: float) -> Make:
    """Return a maker of the number of trials until the first success."""
    if p == 1:
        return torch.ones_like
    rate = math.log1p(-p)
    return lambda h: open_unit(h).log_().div_(rate).ceil_().clamp_(min=1)


def log_normal(mean: float, std: float, dtype: torch.dtype) -> Maker:
    return then(gaussian(dtype), lambda z: z.mul_(std).add_(mean).exp_())


def bernoulli(p: float) -> Make:
    return lambda h: half_open(h).lt(p)


def integers(low: int, high: int) -> Make:
    """Return a maker of integers in [low, high), uniform up to one part in 2**63 / (high - low)."""
    span = high - low
    if span == 1 << 64:
        return lambda h: h
    if span < 1 << 63:
        return lambda h: (h >> 1).bitwise_and_((1 << 63) - 1).remainder_(span).add_(low)

    # int64 has no unsigned remainder; for spans this large one subtraction is enough
    def wide(h: Tensor) -> Tensor:
        # with the sign bit flipped, int64 compares as unsigned
        over = (h ^ signed(1 << 63)) >= signed(span ^ (1 << 63))
        return h - over * signed(span) + low

    return wide


def _end(dtype: torch.dtype) -> int:
    """Return the end of ``random_()``'s range: integers up to it are exact in the dtype."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return 2 ** DIGITS[dtype] + 1
    return torch.iinfo(dtype).max + (dtype != torch.int64)


# ---------------------------------------------------------------- in place


def draw_into(x: ShardedTensor, make: Maker, generator: Generator | None = None) -> ShardedTensor:
    """Draw ``x``'s elements in place; no second block is made where its memory is dense."""
    raw = x.raw
    if torch.is_grad_enabled() and raw.requires_grad and raw.is_leaf:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    key = next_key(x.mesh, generator)
    here = raw.is_contiguous() and not (torch.is_grad_enabled() and raw.requires_grad)
    if raw.is_complex():
        parts = [drawn(x, branch(key, lane), make, raw.real.dtype) for lane in range(2)]
        raw.copy_(torch.complex(*parts))
    elif here:
        drawn(x, key, make, raw.dtype, out=raw.detach())
    else:
        raw.copy_(drawn(x, key, make, raw.dtype))
    return x


# torch's names, of which one is reserved in Python
_ENDS = {"from": "low", "to": "high"}


def _halved(x: ShardedTensor, std: float) -> float:
    """Return the deviation of each part of a complex number, whose variance they share."""
    return std / math.sqrt(2) if x.is_complex() else std


def _between(b: Bound, x: ShardedTensor) -> Make:
    """Make integers for random_(), random_(to), random_(from, to); to=None: to the last one."""
    top = _end(x.dtype)
    high = b.get("high", top)
    if high is None:
        high = top + (x.dtype == torch.int64)
    return integers(b.get("low", 0), high)


_IN_PLACE: dict[str, Callable[[Bound, ShardedTensor], Maker]] = {
    "normal_(input, mean=0.0, std=1.0, *, generator=None)": lambda b, x: spread(
        b["mean"], _halved(x, b["std"]), x.dtype.to_real()
    ),
    "exponential_(input, lambd=1.0, *, generator=None)": lambda b, x: exponential(b["lambd"]),
    "cauchy_(input, median=0.0, sigma=1.0, *, generator=None)": lambda b, x: cauchy(
        b["median"], b["sigma"]
    ),
    "geometric_(input, p, *, generator=None)": lambda b, x: geometric(b["p"]),
    "log_normal_(input, mean=1.0, std=2.0, *, generator=None)": lambda b, x: log_normal(
        b["mean"], b["std"], x.dtype
    ),
    "uniform_(input, low=0.0, high=1.0, *, generator=None)": lambda b, x: uniform(
        b["low"], b["high"], x.dtype.to_real()
    ),
    """
    random_(input, *, generator=None)
    random_(input, high, *, generator=None)
    random_(input, low, high, *, generator=None)
    """: _between,
}
"""Signature -> the maker of numbers for its arguments and a tensor."""


def _drawn_in_place(
    bind: Func, make: Func, func: Func, args: Args, kwargs: Kwargs
) -> ShardedTensor:
    x = args[0]
    _asked(func, x, args[1:], kwargs)
    b = bind(*args, **{_ENDS.get(k, k): v for k, v in kwargs.items()})
    return draw_into(x, make(b, x), b["generator"])


for _signature, _make in _IN_PLACE.items():
    for _name in lines(_signature):
        _fill = partial(_drawn_in_place, binder(_signature), _make)
        implements(getattr(Tensor, _name), takes="padding skew")(_fill)


# ---------------------------------------------------------------- with probabilities of their own


def _without_gradient(raw: Tensor, *parameters: Tensor) -> Tensor:
    """Return a sample; as in torch, the parameters of its distribution have a gradient of zero."""
    for t in parameters:
        if t.requires_grad:
            raw = raw + t.masked_fill(torch.ones_like(t, dtype=torch.bool), 0)
    return raw


def _sampled(x: ShardedTensor, sample: Tensor) -> ShardedTensor:
    """Return a sample from the distributions whose parameters are ``x``, in its dtype."""
    return x.becomes(_without_gradient(sample.to(x.dtype), x.raw))


def _probabilities(name: str, p: Tensor) -> None:
    if p.device.type == "cpu" and not bool(((p >= 0) & (p <= 1)).all()):
        raise RuntimeError(f"{name}: Expected p_in >= 0 && p_in <= 1 to be true")


def _uniforms(x: ShardedTensor, key: int) -> Tensor:
    return drawn(x, key, half_open, torch.float64)


_bernoulli = binder("bernoulli(input, p=None, *, generator=None)")
_bernoulli_ = binder("bernoulli_(input, p=0.5, *, generator=None)")


@implements(torch.bernoulli, Tensor.bernoulli, takes="plain")
def bernoulli_of(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Draw 1 with each element as probability, or with ``p`` everywhere."""
    b = _bernoulli(*args, **kwargs)
    x, p = b["input"], b["p"]
    if isinstance(p, Tensor):
        return torch.empty_like(x).bernoulli_(p, generator=b["generator"])
    _asked(func, x, args[1:], kwargs)
    if p is None:
        _probabilities("bernoulli", x.raw)
    u = _uniforms(x, next_key(x.mesh, b["generator"]))
    if p is None:
        return _sampled(x, u < x.raw.detach())
    return x.becomes((u < p).to(x.dtype))


@implements(Tensor.bernoulli_, takes="padding skew")
def bernoulli_(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Draw in place: bernoulli_(p), p a number or a tensor that broadcasts."""
    b = _bernoulli_(*args, **kwargs)
    x, p = b["input"], b["p"]
    if not isinstance(x, ShardedTensor):
        why = "a plain tensor cannot take a sharded value in place"
        fix = "x = torch.bernoulli(p)"
        raise call_error(ImplicitCommunication, why, func, fix, tensor=x)
    if not isinstance(p, Tensor):
        _asked(func, x, args[1:], kwargs)
        return draw_into(x, bernoulli(p), b["generator"])
    p = lift(p, x.mesh, "bernoulli_")
    _probabilities("bernoulli_", p.raw)
    raws, place = aligned("bernoulli_", [x, p])
    if (place.layout, place.shape) != (x.sharding, x.padded_shape):
        why = "the probabilities lie otherwise than the tensor they are drawn for"
        raise call_error(ImplicitCommunication, why, func, "torch.bernoulli(p)", tensor=x, p=p)
    u = _uniforms(x, next_key(x.mesh, b["generator"]))
    x.raw.copy_(u < raws[1])
    return x


@by_signature("normal(mean, std=1.0, *, generator=None)", torch.normal, takes="padding skew")
def normal_of(func: Func, mean: Any, std: Any, generator: Generator | None) -> Tensor:
    """Draw mean + std z, for tensors that broadcast."""
    held = std.raw if isinstance(std, ShardedTensor) else torch.as_tensor(std)
    if held.numel() and not held.is_meta and held.min() < 0:
        least = float(held.min())
        raise RuntimeError(f"normal expects all elements of std >= 0.0, but found std {least}")
    with torch.no_grad():
        frame = mean + std * 0 if isinstance(std, Tensor) else mean + 0.0
        key, dtype = next_key(frame.mesh, generator), frame.dtype
        z = drawn(frame, key, gaussian(dtype), dtype)
        out = mean + std * frame.becomes(z)
    return _without_gradient(out, *filter(torch.is_tensor, (mean, std)))


@implements(torch.poisson, takes="plain")
def poisson(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Draw Poisson counts with the elements as rates."""
    b = binder("poisson(input, generator=None)")(*args, **kwargs)
    x = b["input"]
    _asked(func, x, args[1:], kwargs)
    if not x.raw.is_meta and bool((x.raw < 0).any()):
        raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
    key = next_key(x.mesh, b["generator"])
    rate = x.raw.detach().double()
    sample = torch.zeros_like(rate) if rate.is_meta else _counts(x, rate, key)
    return _sampled(x, sample)


def _counts(x: ShardedTensor, rate: Tensor, key: int) -> Tensor:
    """Draw counts: small rates by inverting the distribution, large ones by rejection.

    Source: Hoermann, The transformed rejection method for generating Poisson random variables,
            1993, PTRS.
    """
    out = torch.zeros_like(rate)
    small = rate < 10
    u = _uniforms(x, branch(key, 0))
    term = torch.exp(-rate)
    # P(k >= 200) is below 1e-170 at these rates
    below = term.clone()
    k = 0
    while bool((todo := small & (u >= below) & (k < 200)).any()):
        k += 1
        term = term * rate / k
        out += todo
        below = below + term
    todo = ~small
    turn = 1
    # constants of PTRS in the paper
    r = rate.clamp(min=10)
    b = 0.931 + 2.53 * r.sqrt()
    a = -0.059 + 0.02483 * b
    inverse = 1.1239 + 1.1328 / (b - 3.4)
    squeeze = 0.9277 - 3.6224 / (b - 2)
    while bool(todo.any()):
        u = _uniforms(x, branch(key, turn)) - 0.5
        v = drawn(x, branch(key, turn + 1), open_unit, torch.float64)
        turn += 2
        us = 0.5 - u.abs()
        found = ((2 * a / us + b) * u + r + 0.43).floor()
        some = found.clamp(min=0)
        # most draws are accepted here, without logarithms
        fast = (us >= 0.07) & (v <= squeeze)
        left = v.log() + inverse.log() - (a / (us * us) + b).log()
        right = -r + some * r.log() - torch.lgamma(some + 1)
        good = fast | ((found >= 0) & ~((us < 0.013) & (v > us)) & (left <= right))
        out = torch.where(todo & good, found, out)
        todo = todo & ~good
    return out


# ---------------------------------------------------------------- rand_like and others


_OPTIONS = (
    "dtype=None, layout=None, device=None, pin_memory=False, requires_grad=False, "
    "memory_format=None, generator=None"
)
_rand = binder(f"rand_like(input, *, {_OPTIONS})")
_randint = binder(
    f"randint_like(input, high: int, *, {_OPTIONS})\nrandint_like(input, low, high, *, {_OPTIONS})"
)
_LIKE: dict[Func, tuple[Func, Func, Func]] = {
    torch.rand_like: (_rand, Tensor.uniform_, lambda t: uniform(0.0, 1.0, t.to_real())),
    torch.randn_like: (
        _rand,
        Tensor.normal_,
        lambda t: spread(0.0, 2**-0.5 if t.is_complex else 1.0, t.to_real()),
    ),
    torch.randint_like: (_randint, Tensor.random_, lambda t, low, high: integers(low, high)),
}
"""Function -> its arguments' names, the method that fills so, and the maker of numbers of a dtype."""


@implements(*_LIKE, takes="all")
def like(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Draw uniform or normal numbers, or integers in [low, high), in the tensor's layout."""
    bind, fill, make = _LIKE[func]
    b = bind(*args, **kwargs)
    x, dtype = b["input"], b["dtype"] or b["input"].dtype
    ends: tuple[int, ...] = ()
    if "high" in b:
        ends = int(b.get("low", 0)), int(b["high"])
    device, memory = b["device"], b["memory_format"]
    elsewhere = device is not None and torch.device(device).type != x.raw.device.type
    why = ""
    if elsewhere or b["layout"] not in (None, torch.strided) or b["pin_memory"]:
        why = "its result lies where the tensor lies, dense"
    elif memory not in (None, torch.preserve_format, torch.contiguous_format):
        why = f"the memory format {memory}"
    if why:
        raise call_error(Unsupported, why, func, f"torch.{func.__name__}(x)", input=x)
    raw = x.raw.new_empty(x.raw.shape, dtype=dtype)
    out = ShardedTensor(raw, Place(x.sharding.bare, x.shape, x.mesh, x.padded_shape))
    _asked(fill, out, ends, {})
    draw_into(out, make(dtype, *ends), b["generator"])
    return out.requires_grad_(b["requires_grad"])


# ---------------------------------------------------------------- samples of rows


@by_signature(
    "multinomial(input, num_samples: int, replacement=False, *, generator=None)",
    torch.multinomial, Tensor.multinomial, takes="plain",
)  # fmt: skip
def multinomial(
    func: Func, x: ShardedTensor, count: int, again: bool, generator: Generator | None
) -> ShardedTensor:
    """Draw indices with the row's weights: the largest of log(weight) + Gumbel noise.

    The row may be split.

    Without replacement the ``num_samples`` largest, with replacement the largest of each of so many
    draws.  For a split row only each rank's candidates are communicated.
    Source: Efraimidis and Spirakis, Weighted random sampling
            with a reservoir, 2006; Gumbel's maximum.
    """
    _check_weights(x, count, again)
    raw = x.raw.detach()
    key = next_key(x.mesh, generator)
    weight = raw.double().log()

    def noise(lane: int) -> Tensor:
        # -log of an exponential number is Gumbel noise
        return weight - drawn(x, branch(key, lane), exponential(1.0), torch.float64).log_()

    if again:
        least = "sum of probabilities <= 0"
        picks = [_largest(x, noise(lane), 1) for lane in range(count)]
    else:
        least = "with replacement=False, not enough non-negative category to sample"
        picks = [_largest(x, noise(0), count)]
    top = picks[0][0]
    if not raw.is_meta and bool((top[..., -1] == -math.inf).any()):
        raise RuntimeError(f"invalid multinomial distribution ({least})")
    layout = Layout((*x.dims[:-1], Dim()))
    place = Place(layout, torch.Size((*x.padded_shape[:-1], count)), x.mesh)
    return ShardedTensor(torch.cat([where for _, where in picks], -1), place)


def _check_weights(x: ShardedTensor, count: int, again: bool) -> None:
    """Raise torch's own errors."""
    if x.ndim not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    why = ""
    if count <= 0:
        why = "0 samples"
    elif count > x.shape[-1] and not again:
        why = "sample n_sample > prob_dist.size(-1) samples without replacement"
    if why:
        raise RuntimeError(f"multinomial: cannot draw {count} samples: {why}")
    if not x.is_floating_point():
        raise RuntimeError(
            f"multinomial only supports floating-point dtypes for input, got: {x.dtype}"
        )
    raw = x.raw
    if not raw.is_meta and not bool(((raw >= 0) & raw.isfinite()).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")


def _largest(x: ShardedTensor, scores: Tensor, count: int) -> Sequence[Tensor]:
    """Return the largest scores along the last dimension, and their positions in the row."""
    if not real_axes(x.mesh, x.dims[-1].axes):
        return scores.topk(count, -1)
    value = ShardedTensor(scores, Place(x.sharding, x.shape, x.mesh))
    return [t.raw for t in best(value, count, x.ndim - 1)]


# ---------------------------------------------------------------- pooling at random positions


@by_signature(
    "pool(input, kernel_size, output_size=None, output_ratio=None, return_indices=False, "
    "_random_samples=None)",
    F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d,
    F.fractional_max_pool3d_with_indices, takes="plain",
)  # fmt: skip
def fractional_max_pool(
    func: Func, x: ShardedTensor, window: Any, size: Any, ratio: Any, indices: bool, places: Any
) -> object:
    """Pool windows that begin at positions drawn per sample and channel."""
    d = 3 if "3d" in func.__name__ else 2
    if size is None and ratio is None:
        raise ValueError(
            f"fractional_max_pool{d}d requires specifying either an output_size or an output_ratio"
        )
    if size is None:
        size = [int(n * r) for n, r in zip(x.shape[-d:], _each(ratio, d), strict=True)]
    if places is None:
        places = _starts(x, d)
    named = ("n", "c") if x.ndim == d + 2 else ("c",)

    def labels(a: Args, k: Kwargs) -> Labels:
        return {
            a[0].at: (*named, *[None] * d),
            a[3].at: (*(None,) * (2 - len(named)), *named, None),
        }

    pool = builtin(f"fractional_max_pool{d}d")
    out = rows_call(pool, (x, _each(window, d), _each(size, d), places), {}, labels)
    return out if func.__name__.endswith("indices") or indices else out[0]


def _each(value: Any, d: int) -> Sequence[Any]:
    """Return a value for each of ``d`` dimensions, where one stands for all."""
    return value if isinstance(value, tuple | list) else (value,) * d


def _starts(x: ShardedTensor, d: int) -> Tensor:
    """Draw a number in [0, 1) for each sample, channel and dimension."""
    single = x.ndim == d + 1
    layout = Layout((*[Dim()] * single, *x.dims[:-d], Dim()))
    shape = torch.Size([*[1] * single, *x.shape[:-d], d])
    block = x.raw.new_empty(storage_shape(x.mesh, *layout.local_shape(shape, x.mesh)))
    return torch.rand_like(ShardedTensor(block, Place(layout, shape, x.mesh)))
