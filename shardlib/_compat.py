"""Private torch API and renames: the only file that uses them.

Each entry: what it is, the versions that have it, and what to do when torch removes it ("when it
goes").  "2.11 to 2.15": checked in 2.11, 2.13 and 2.15.
"""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from contextvars import Context, ContextVar, copy_context
from datetime import timedelta
from functools import cache, partial
from importlib.abc import MetaPathFinder
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from shardlib.errors import BadArgument

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# torch 2.13 renames all_gather_into_tensor to all_gather_single and reduce_scatter_tensor to
# reduce_scatter_single (same arguments) and warns on the old names; 2.11 has the old ones only.
# When 2.13 is the oldest supported version: call dist's new names directly.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

# The context in which a subclass's own __torch_function__ is not called.  In 2.11 to 2.15;
# torch's page "Extending PyTorch" names it.  When it goes: Tensor.__torch_function__'s own body.
no_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass

# The context in which no dispatch mode sees a call: of values made for their sizes alone, which are
# no work of a step.  In 2.11 to 2.15.  When it goes: contextlib.nullcontext, and explain counts
# them as if they were computed.
unseen: Callable[[], AbstractContextManager[Any]] = _disable_current_modes

# A reference that does not keep a storage alive: ``cdata``, ``expired()``.  In 2.11 to 2.15,
# where torch's own compiler uses it.  When it goes: weakref.ref of tensor.untyped_storage(), if
# that object then lives as long.
StorageWeakRef: Any = reductions.StorageWeakRef


class DispatchMode(TorchDispatchMode):  # type: ignore[misc]
    """Base of modes that intercept every aten call.

    In 2.11 to 2.15 under this underscored name; torch's page "Extending PyTorch" documents it.
    When it goes: allocations are not counted, and attention's peak memory is not predicted.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else a mode's first call imports torch's compiler, which takes more time than most models
        return False


# Flattening by torch's own registry, in which transformers has its outputs and caches, dicts by
# class.  In 2.11 to 2.15; torch.utils has no public name for it.  When it goes: optree, with each
# class of transformers registered.
_LEAF = _pytree.tree_structure(0)
tree_unflatten: Callable[[Any, Any], Any] = _pytree.tree_unflatten


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Flatten a tree of the containers that torch knows; a tensor costs a tenth of torch's time."""
    return ([tree], _LEAF) if isinstance(tree, torch.Tensor) else _pytree.tree_flatten(tree)


def watcher() -> Any:
    """Return the dispatch mode that intercepts aten calls now, or None.

    In 2.11 to 2.15.  When it goes: any object, and every operation on the meta device runs each time.
    """
    return _get_current_dispatch_mode()


# The ops that torch's attention runs below autograd, unless it uses its math form; each returns the
# output first, then what its backward needs.  In 2.11 to 2.15.  When one goes: a region that
# keeps its attention (``remat="products"``) computes that again in backward.
FUSED_ATTENTION: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention "
        "fused_attention_overrideable"
    ).split()
)

# The ops that torch's products run below autograd.  In 2.11 to 2.15; as above.
PRODUCTS: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")
)


def is_dtensor(x: object) -> "TypeGuard[DTensor]":
    """Check whether a value is a DTensor.

    Its module takes longer to import than torch; until it is imported there is no DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    # None while it is being imported
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(x, kind)


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Return the table that DTensor's dispatcher consults before its own rules.

    In 2.11 to 2.15 as ``DTensor._op_dispatcher._custom_op_handlers``; torch's context
    parallel replaces the dict, so it is looked up at each use.  When it goes:
    ``sl.dtensor.rules`` goes too, and ``sl.dtensor.from_dtensor`` remains.
    """
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher._custom_op_handlers


def is_strided(placement: object) -> bool:
    """Check whether a placement is DTensor's strided shard, which nests axes against mesh order.

    In 2.11 to 2.15 as ``_StridedShard``.  The check compares the name, so
    nothing breaks when it goes.
    """
    return type(placement).__name__ == "_StridedShard"


# op -> the leading names of its arguments
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal attn_mask "
    "scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "grad_out query key value out logsumexp "
    "dropout_p is_causal attn_mask scale",
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask "
    "scale",
    "_scaled_dot_product_flash_attention_backward": "grad_out query key value out logsumexp "
    "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed philox_offset scale",
    "_scaled_dot_product_efficient_attention": "query key value attn_bias compute_log_sumexp "
    "dropout_p is_causal scale",
    "_scaled_dot_product_efficient_attention_backward": "grad_out_ query key value attn_bias out "
    "logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal scale",
    "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp dropout_p "
    "is_causal return_debug_mask scale",
    "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp "
    "philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale",
}


def attention_op(name: str) -> Callable[..., Any] | None:
    """Find one of aten's fused attention ops, which return the log-sum-exp; None where it changed.

    A ring merges blocks by the log-sum-exp.

    In 2.11 to 2.15 with the arguments in ``_ATTENTION``, which are compared by name.
    When one goes, or its arguments change: the kernel that needs it is not offered, and the math
    block of ops/attention/kernels.py runs.
    """
    op = getattr(torch.ops.aten, name, None)
    if op is None:
        return None
    found = [a.name for a in op.default._schema.arguments]
    return op if found == _ATTENTION[name].split() else None


# Raise on the device where a tensor is false, without waiting for it.  An aten operator without a
# public name, in 2.11 to 2.15.  When it goes: ids on CUDA are not checked where a vocabulary
# is split.
assert_async: Callable[[Any], None] = torch._assert_async


# The namespaces of torch.nn.functional's and torch.linalg's builtins; their functions reach
# __torch_function__ under these objects.  In 2.11 to 2.15.  When it goes: those run on whole
# operands.
builtin_homes: tuple[Any, ...] = (torch._C._nn, torch._C._linalg)


def builtin(name: str) -> Callable[..., Any]:
    """Find one of those functions; see ``builtin_homes``."""
    return next(f for home in builtin_homes if (f := getattr(home, name, None)) is not None)


PATCHES: dict[str, Callable[[], object]] = {}
"""Patches of torch, by name, which the first mesh installs."""

_INSTALLED: set[str] = set()


def patch(name: str, install: Callable[[], object]) -> None:
    """Register a patch of torch, installed with the first mesh: an import changes nothing."""
    PATCHES[name] = install


def patch_torch() -> None:
    """Install each patch once, except those in ``SHARDLIB_UNPATCHED``, a list with commas."""
    if len(_INSTALLED) == len(PATCHES):
        return
    off = os.environ.get("SHARDLIB_UNPATCHED", "").replace(" ", "").split(",")
    if wrong := set(off) - {"", *PATCHES}:
        why = f"SHARDLIB_UNPATCHED names {', '.join(sorted(wrong))}, of {', '.join(PATCHES)}"
        fix = f"SHARDLIB_UNPATCHED={next(iter(PATCHES))}"
        raise BadArgument(why, op="make_mesh", fix=fix)
    for name, install in PATCHES.items():
        if name not in _INSTALLED:
            _INSTALLED.add(name)
            if name not in off:
                install()


_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_OPENED: dict[str, dict[str, Any]] = {}


def opened(func: object) -> Callable[..., Any] | None:
    """Return the Python body of a torch function without its check for tensor subclasses.

    None where it has none.

    torch.nn.functional, torch.functional and torch._tensor begin with ``if has_torch_function...``;
    the same code runs with that False, and each operator inside it dispatches on its own.
    The functions of torch.foreach, new in 2.15, check in a decorator: theirs is what it wraps.  In
    2.11 to 2.15.  When it goes: such functions run on whole operands.
    """
    if not isinstance(func, FunctionType):
        return None
    if not any(n in func.__globals__ for n in _ASKS):
        asks = "_has_torch_function" in func.__globals__
        return getattr(func, "__wrapped__", None) if asks else None
    module = func.__module__
    if module not in _OPENED:
        _OPENED[module] = func.__globals__ | dict.fromkeys(_ASKS, lambda *_: False)
    new = FunctionType(
        func.__code__, _OPENED[module], func.__name__, func.__defaults__, func.__closure__
    )
    new.__kwdefaults__ = func.__kwdefaults__
    return new


class _Seeded:
    """Count of torch's seedings in this process, and the last seed."""

    calls = 0
    last = 0

    def holds(self) -> bool:
        """Check that ``fork_rng`` or ``set_rng_state`` did not undo the last seeding."""
        # torch documents 2**64 - 1 + s for a negative seed s; 2.13 uses 2**64 + s
        return torch.initial_seed() in (self.last % 2**64, (self.last - 1) % 2**64)


SEEDED = _Seeded()


def _hear_seeds() -> None:
    """Record ``torch.manual_seed`` and ``torch.seed``, which both pass the seed to custom devices.

    Users import them by name before shardlib, so replacing them would miss calls.
    ``torch.random._seed_custom_device`` in 2.11 to 2.15.  When it goes: wrap
    ``torch.manual_seed`` and ``torch.seed``.
    """
    tell = torch.random._seed_custom_device

    def heard(seed: int) -> None:
        SEEDED.calls, SEEDED.last = SEEDED.calls + 1, int(seed)
        tell(seed)

    torch.random._seed_custom_device = heard


patch("seeds", _hear_seeds)


def intercept_init(instead: dict[str, Callable[..., Any]], wrappers: frozenset[type]) -> None:
    """Make ``torch.nn.init`` functions call ``instead[name]`` where their argument is a wrapper.

    Only those that have no check for ``__torch_function__`` of their own.

    They draw with ``torch.randperm``, or write single elements, where the operators do not show
    that the tensor is a wrapper.  Callers import them by name, so their code is replaced, under the
    same signature.  In 2.11 to 2.15.  When it goes, or torch checks itself: register the functions
    as the others are.
    """
    for name, ours in instead.items():
        func = getattr(torch.nn.init, name)
        inner = FunctionType(
            func.__code__, func.__globals__, name, func.__defaults__, func.__closure__
        )
        names = func.__code__.co_varnames[: func.__code__.co_argcount]

        def asked(
            *args: Any, inner: Callable[..., object] = inner, ours: Callable[..., object] = ours
        ) -> object:
            return (ours if type(args[0]) in wrappers else inner)(*args)

        func.__globals__[f"_shardlib_{name}"] = asked
        scope: dict[str, Any] = {}
        exec(f"def {name}({', '.join(names)}): return _shardlib_{name}({', '.join(names)})", scope)
        func.__code__ = scope[name].__code__


def job_store() -> dist.Store:
    """Return the key-value store through which the processes of a job initialized.

    ``torch.distributed.distributed_c10d._get_default_store`` in 2.11 to 2.15;
    ``get_group_store`` of a process group is private too.  When it goes: make a ``dist.TCPStore``
    in ``make_mesh``.

    Processes that torchrun restarts may use the store of those that failed, and must not
    read their keys: the count of restarts is a prefix.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if again == "0" else dist.PrefixStore(f"restart {again}", store)


def set_timeout(group: object, seconds: float) -> None:
    """Set how long a transfer of this group may take, gloo's sends and receives included.

    Seen in 2.11 to 2.15 as ``_set_default_timeout`` of each backend: torch's own
    ``_set_pg_timeout``, public in 2.15 as ``torch.distributed.set_timeout``, passes over devices
    other than the CPU and CUDA with a warning.  When that is gone: call the public one.
    """
    for device in group._device_types:
        with suppress(RuntimeError, AttributeError):
            # one that takes no timeout
            group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))


def backend_name(group: object, device: torch.device) -> str:
    """Name the backend that moves a group's tensors of one device: gloo, nccl, ...

    ``torch.distributed.get_backend`` gives what the group was made with, also "cpu:gloo,cuda:nccl"
    or "undefined".  Seen in 2.11 to 2.15; when it goes: ``torch.distributed.get_backend_config``.
    """
    return group._get_backend(device).name()


def group_timeout(group: object) -> float:
    """Return the timeout in seconds of this group's transfers.

    In 2.11 to 2.15 as ``options._timeout`` of a backend.  When it goes: torch's own default.
    """
    found = [group._get_backend(device) for device in group._device_types]
    waits = [b.options._timeout.total_seconds() for b in found if hasattr(b, "options")]
    return max(waits, default=1800.0)


# ---------------------------------------------------------------- autograd.Function


def foreach_ops() -> dict[str, Callable[..., Any]]:
    """List torch's functions of lists, ``torch._foreach_add_`` as "add_".

    torch.optim and clip_grad_norm_ call them.

    In 2.11 to 2.15; each checks ``__torch_function__``.  When one goes, so does its caller.
    """
    return {
        n.removeprefix("_foreach_"): getattr(torch, n)
        for n in dir(torch)
        if n.startswith("_foreach_")
    }


def fused_steps() -> list[Callable[..., Any]]:
    """List ``torch._fused_adamw_`` and the like: in place on params, grads, moments and steps.

    In 2.11 to 2.15.
    """
    return [getattr(torch, f"_fused_{n}_") for n in ("adam", "adamw", "sgd", "adagrad")]


def fused_step(name: str) -> Callable[..., None] | None:
    """Return one of them as ``run(lists, steps, **how)``; None where torch has none of this name.

    ``lists`` are parameters, gradients and the optimizer's state.

    When they go: transforms run through ``update``.
    """
    kernel = getattr(torch, f"_fused_{name}_", None)
    if kernel is None:
        return None
    # the arguments differ in the position of the list of steps, and in lists that may be empty
    if name in ("adam", "adamw"):
        return lambda lists, steps, **how: kernel(
            *lists[:4], list(lists[4:5] and lists[4]), steps, **how
        )
    if name == "adagrad":
        return lambda lists, steps, **how: kernel(*lists, steps, **how)
    return lambda lists, steps, **how: kernel(*lists[:2], list(lists[2:3] and lists[2]), **how)


# copy_all(to, given): copies tensors to others in one call.  In 2.11 to 2.15, and torch's own
# optimizers call it.  When it goes: ``for t, x in zip(to, given): t.copy_(x)``, which takes longer.
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_

# The context that skips autograd's dispatch: for an operator without a formula autograd looks
# through all operands, 6 % of a fused step over 200 small tensors.  In 2.11 to 2.15.  When it
# goes: ``contextlib.nullcontext``, and the calls take that much longer.
below_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd

# The op that torch.amp.GradScaler.unscale_ calls: (grads, found_inf, inv_scale), in place.  In 2.11
# to 2.15.  When it goes: its successor needs the same rule, or a rank would not receive another's
# overflow.
amp_unscale: Callable[..., Any] = torch._amp_foreach_non_finite_check_and_unscale_

# Whether ``param.data = new`` may replace a tensor's storage by another's; nn.Module.to calls it.
# In 2.11 to 2.15.
may_swap_data: Callable[..., Any] = torch._has_compatible_shallow_copy_type

# The first method that torch.export and fake tensors call on a tensor that they describe.
# In 2.11 to 2.15.  When it goes: the method that they then call first.
describes_memory: Callable[..., Any] = torch.Tensor._is_view

# The first call of torch.func.jvp, jacfwd and torch.autograd.forward_ad.  In 2.11 to 2.15.
begins_forward_ad: Callable[..., Any] = torch._make_dual

# The first call of the older vmap, of torch.autograd.functional's ``vectorize``.  In 2.11 to 2.15.
begins_vmap: Callable[..., Any] = torch._add_batch_dim


def transform_called() -> str:
    """Name the function of torch.func that a caller entered first ("vmap", "jacrev", "hessian"...).

    Read from the call stack, for the text of an error alone; "" where there is none.

    ``torch._functorch`` in 2.11 to 2.15.  When it goes: errors say "torch.func's transforms".
    """
    name, frame = "", inspect.currentframe()
    while frame is not None:
        if "_functorch" in frame.f_code.co_filename:
            name = frame.f_code.co_qualname.partition(".")[0].strip("_")
        frame = frame.f_back
    return name.partition("_with_argnums")[0].removesuffix("_impl")


def under_transform(x: torch.Tensor | None = None) -> str:
    """Name the torch.func transform that runs ("vmap", "grad", "jvp"); "" where there is none.

    With ``x``, also the transform whose value ``x`` is.

    ``torch._C._functorch`` in 2.11 to 2.15.  When it goes: users read functorch's own
    assertion.
    """
    if x is not None and not torch._C._functorch.is_functorch_wrapped_tensor(x):
        return ""
    if torch._C._functorch.maybe_current_level() is None:
        return ""
    return str(torch._C._functorch.peek_interpreter_stack().key()).rpartition(".")[2].lower()


# The parts of ``torch.func.vmap(..., randomness="same")`` over first dimensions: ``vmap_begin(size,
# "same")`` returns the level for ``vmap_split(x, 0, level)`` and ``vmap_join(out, level, size, 0)``.
# Without vmap's checks of its arguments they take a tenth of its time.  In 2.13; when they go:
# torch.func.vmap.
vmap_begin: Callable[[int, str], int] = torch._C._functorch._vmap_increment_nesting
vmap_end: Callable[[], int] = torch._C._functorch._vmap_decrement_nesting
vmap_split: Callable[..., torch.Tensor] = torch._C._functorch._add_batch_dim
vmap_join: Callable[..., torch.Tensor] = torch._C._functorch._remove_batch_dim


@cache
def load_vmap() -> None:
    """Make the first call of vmap, which registers the decompositions that it needs."""
    torch.func.vmap(torch.neg)(torch.zeros(1, device="cpu"))


Ctx = Any
"""The ``ctx`` of a Function, on which forward stores whatever its backward reads."""
Grads = tuple[torch.Tensor | None, ...]
"""The gradients that a Function's backward returns, one for each argument of its forward."""

_FunctionBase: Any = torch._C._FunctionBase

# The ``setup_context`` that a Function inherits if it defines none.  In 2.11 to 2.15.
NO_SETUP: Any = torch.autograd.function._SingleLevelFunction.setup_context

# The identity whose graph node has the module backward hooks.  In 2.11 to 2.15; torch compares
# its node's name.  When it goes: full backward hooks must be refused.
HookFunction: Any = torch.nn.modules._functions.BackwardHookFunction


class Local(torch.autograd.Function):
    """Base of the library's own Functions, on raw blocks only: apply is torch's C entry, directly.

    ``torch._C._FunctionBase.apply`` in 2.11 to 2.15.  When it goes: drop the line.
    """

    apply = _FunctionBase.__dict__["apply"]

    def __init_subclass__(cls) -> None:
        """Run backward without autocast, wherever it is called: the forward chose its dtypes."""
        run = cls.__dict__.get("backward")
        if isinstance(run, staticmethod):
            cls.backward = staticmethod(_uncast(run.__func__))  # type: ignore[method-assign]


def _uncast(backward: Callable[..., Any]) -> Callable[..., Any]:
    def run(ctx: Ctx, *grads: object) -> object:
        if not any_autocast():
            return backward(ctx, *grads)
        other = torch.accelerator.current_accelerator()
        kind = "cpu" if other is None else other.type
        with torch.autocast("cpu", enabled=False), torch.autocast(kind, enabled=False):
            return backward(ctx, *grads)

    return run


# Whether autocast is on for any device, in one C call of 40 ns.  In 2.11 to 2.15.  When it
# goes: torch.is_autocast_enabled per device.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


# The hooks on tensors that are saved now, or None.  In 2.11 to 2.15.  When it goes: lambda: None,
# and regions of torch.utils.checkpoint in stages of zero bubble schedules raise.
saved_hooks: Callable[[], object] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)


# Whether a TorchFunctionMode is on, in one C call.  In 2.11 to 2.15.  When it goes:
# ``lambda: True``, and ShardedTensor.backward takes torch's way.
function_modes: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


def intercept_functions(
    wrappers: frozenset[type],
    instead: Callable[[Any, tuple[Any, ...]], Any],
    hid: Callable[[Any, tuple[Any, ...], Any], Any],
) -> None:
    """Replace a user's ``Function.apply`` by ``instead`` or ``hid`` for wrappers.

    ``instead(cls, args)`` runs where a wrapper is among the arguments; ``hid(cls, args, out)``
    where one is among the results alone (it came in a list, or in a closure).

    ``Function.apply`` ends in ``super().apply``, the method of ``_SingleLevelFunction``.  Its
    replacement here receives the arguments after defaults are bound, and leaves
    ``Function.apply`` itself, which torch.compile finds by name, as it is.  In 2.11 and 2.13.
    In 2.15 ``Function.apply`` is C's own entry, which binds defaults and checks functorch: it is
    replaced by ``whole``, which does both for a wrapper.
    """
    base = torch.autograd.function._SingleLevelFunction
    inherited = _FunctionBase.__dict__["apply"].__get__

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        if wrappers.isdisjoint(map(type, args)) and not kwargs:
            out = inherited(None, cls)(*args)
            if type(out) is torch.Tensor:
                return out
            hidden = type(out) in wrappers or (
                type(out) is tuple and not wrappers.isdisjoint(map(type, out))
            )
            return hid(cls, args, out) if hidden else out
        if kwargs and wrappers.isdisjoint(map(type, [*args, *kwargs.values()])):
            return inherited(None, cls)(*args, **kwargs)
        return instead(cls, args)

    function = torch.autograd.Function
    if function.__dict__["apply"] is not _FunctionBase.__dict__["apply"]:
        base.apply = classmethod(apply)
        return

    def whole(cls: Any, *args: object, **kwargs: object) -> object:
        if not torch._C._are_functorch_transforms_active():
            if cls.setup_context is not NO_SETUP and not wrappers.isdisjoint(
                map(type, [*args, *kwargs.values()])
            ):
                bound = inspect.signature(cls.forward).bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
            return apply(cls, *args, **kwargs)
        return inherited(None, cls)(*args, **kwargs)

    function.apply = classmethod(whole)  # type: ignore[assignment]


def intercept_recompute(kept: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace every checkpointed region's ``recompute`` by ``kept(recompute)`` when it is made.

    ``torch.utils.checkpoint._CheckpointFrame`` is made once per region of the non-reentrant kind,
    by ``checkpoint``, ``checkpoint_sequential``, the composable API and checkpoint wrappers alike;
    callers import these functions by name, so only the class is common to all of them.  In
    2.11 to 2.15.  When it goes: checkpointing inside ``apply`` must be refused.
    """
    from torch.utils.checkpoint import _CheckpointFrame

    made = _CheckpointFrame.__init__

    def init(
        self: _CheckpointFrame, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        made(self, kept(recompute_fn), *args, **kwargs)

    _CheckpointFrame.__init__ = init  # type: ignore[method-assign]


class _SavedInputs:
    """Saved inputs of a region in torch 2.11, wrapped again when they are read."""

    def __init__(self, kept: object, wraps: dict[int, Callable[[Any], Any]]) -> None:
        # the tensor keeps its graph node alive
        self.kept, self.wraps = kept, wraps

    @property
    def grad_fn(self) -> "_SavedInputs":
        return self

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]:
        return self.kept.grad_fn.saved_tensors

    def get_args(self, saved: object) -> list[Any]:
        out = self.kept.grad_fn.get_args(saved)
        for i, wrap in self.wraps.items():
            out[i] = wrap(out[i])
        return out


def intercept_inputs(
    wrappers: frozenset[type], open_: Callable[[Any], tuple[Any, Callable[[Any], Any]]]
) -> dict[Any, Callable[..., Any]]:
    """Make a checkpointed region save its wrapper arguments as raw blocks.

    ``open_(x)`` is (raw, function that wraps it).

    torch saves them as SavedTensors, whose C++ side keeps ``requires_grad`` and the graph; a
    wrapper has neither there.  Without this a region nested in a region recomputes from inputs that
    need no gradient, and saves another number of tensors.  ``save_inputs`` and ``get_inputs`` in
    2.13 and 2.15; in 2.11 a Function, ``_NoopSaveInputs``, does this: the result has the
    substitutes for such Functions.
    """
    import torch.utils.checkpoint as module

    frame: Any = module._CheckpointFrame

    def opened(args: Any) -> tuple[list[Any], dict[int, Callable[[Any], Any]]]:
        given, wraps = list(args), {}
        for i, x in enumerate(args):
            if type(x) in wrappers:
                given[i], wraps[i] = open_(x)
        return given, wraps

    if not hasattr(frame, "save_inputs"):
        saver: Any = module._NoopSaveInputs  # type: ignore[attr-defined]

        def instead(dummy: object, *args: object) -> object:
            given, wraps = opened(args)
            out = saver.apply(dummy, *given)
            return out if out.grad_fn is None else _SavedInputs(out, wraps)

        return {saver: instead}
    save, get = frame.save_inputs, frame.get_inputs

    def save_inputs(self: Any, *args: object) -> None:
        given, self.wraps = opened(args)
        save(self, *given)

    def get_inputs(self: Any) -> list[Any]:
        out = get(self)
        for i, wrap in self.wraps.items():
            out[i] = wrap(out[i])
        return out

    frame.save_inputs, frame.get_inputs = save_inputs, get_inputs
    return {}


def intercept_proxies(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call ``begin(mode)`` and ``end(mode)`` around each trace of torch's make_fx.

    make_fx, and torch.export after it, run the traced function in ``ProxyTorchDispatchMode``;
    operators on wrappers' blocks would be recorded as constants.  Importing torch imports it.
    In 2.11 to 2.15.  When it goes: ``__torch_function__`` checks whether a trace is on.
    """
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as Mode

    enter, leave = Mode.__enter__, Mode.__exit__

    def entered(self: Mode) -> Mode:
        begin(self)
        return enter(self)

    def left(self: Mode, *args: Any) -> bool | None:
        try:
            return leave(self, *args)
        finally:
            end(self)

    Mode.__enter__, Mode.__exit__ = entered, left  # type: ignore[method-assign]


class _Untraced(MetaPathFinder):
    """Import hook that excludes the library from torch.compile: its frames run uncompiled.

    Dynamo would trace through ``__torch_function__`` and rebuild wrappers wrongly.  Its own switch
    for a package is ``torch._dynamo.trace_rules.add``, in 2.11 to 2.15; importing
    ``torch._dynamo`` takes a second, so the hook waits until other code imports it.  Costs no time
    per call, unlike ``torch._dynamo.disable``.  When it goes: ``torch.compiler.disable`` on both
    ``__torch_function__``.
    """

    name = "torch._dynamo.trace_rules"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None, "this very module is being imported"
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module.add("shardlib")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def run_uncompiled() -> None:
    """Make torch.compile leave the library uncompiled; see _Untraced."""
    found = sys.modules.get(_Untraced.name)
    if found is not None:
        found.add("shardlib")  # type: ignore[attr-defined]
    elif not any(isinstance(f, _Untraced) for f in sys.meta_path):
        sys.meta_path.insert(0, _Untraced())


patch("compile", run_uncompiled)


def owned(out: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that is no view, so that it can be changed in place.

    A view that an autograd Function returns cannot.  ``aten._unsafe_view`` as torch.matmul uses it;
    in 2.11 to 2.15.  Without it: ``out.clone()``.
    """
    return torch.ops.aten._unsafe_view.default(out, out.shape) if out._is_view() else out


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a compiled one, whose forward has the names of its arguments.

    ``OptimizedModule._orig_mod`` in 2.11 to 2.15; no other module has it.  When it goes:
    positional inputs of a compiled module are replicated.
    """
    while isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
        module = inner
    return module


def storage_users(x: torch.Tensor) -> int:
    """Count the tensors that share the memory of ``x``, itself included.

    ``torch._C._storage_Use_Count`` in 2.11 to 2.15, where torch's compiler uses it; the call
    itself counts as one.  When it goes: gathered buckets get new memory each time.
    """
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1


class _AtEnd:
    """Callback of a backward pass: ``run`` at its end; ``failed``, once, where one of both raises."""

    def __init__(self, run: Callable[[], object], failed: Callable[[], object] | None) -> None:
        self.run, self.failed = run, failed

    def __call__(self) -> None:
        self.run()
        self.failed = None

    def fail(self) -> None:
        failed, self.failed = self.failed, None
        if failed is not None:
            failed()

    # the engine drops it uncalled where the pass fails
    __del__ = fail


_ENDS: ContextVar[list[_AtEnd] | None] = ContextVar("shardlib.ends", default=None)
"""Callbacks of the backward pass that this context called."""


def after_backward(run: Callable[[], object], failed: Callable[[], object] | None = None) -> None:
    """Call ``run`` at the end of this thread's backward pass; ``failed`` if the pass raises.

    ``Variable._execution_engine.queue_callback`` in 2.11 to 2.15, where torch's FSDP
    uses it; a pass that raises frees its callbacks before the exception reaches its caller on the
    CPU, and a moment after it where a thread of the device runs the pass.  So ``failed`` is called
    by ``_keep_callers``, in the caller's thread and before the exception reaches its code.
    When it goes: transfers that were prefetched and not used are waited for at the next call.
    """
    end = _AtEnd(run, failed)
    torch.autograd.Variable._execution_engine.queue_callback(end)
    ends, caller = _ENDS.get(), backward_context()
    if ends is None and caller is not None:  # a thread of the device
        ends = caller.get(_ENDS)
    if ends is not None:
        ends.append(end)


def backward_now() -> int:
    """Return the number of this thread's backward pass, -1 outside any; numbers are not reused."""
    return torch._C._current_graph_task_id()


_CALLERS: dict[int, Context] = {}  # by thread


def _keep_callers() -> None:
    """Record the caller of backward, which ends its callbacks where it raises.

    2.11 to 2.15: ``torch.autograd.backward`` and ``grad`` go through ``_engine_run_backward``.  In
    2.11 it does not pass the caller's context to torch's own threads.
    """
    module: Any = torch.autograd
    run = module._engine_run_backward

    def noted(*args: object, **kwargs: object) -> object:
        ends: list[_AtEnd] = []
        outer, thread = _ENDS.set(ends), get_ident()
        # inside backward the outer caller counts
        first = not _PASSED_ON and backward_now() == -1
        if first:
            _CALLERS[thread] = copy_context()
        try:
            return run(*args, **kwargs)
        except BaseException:
            for end in ends:
                end.fail()
            raise
        finally:
            # copies of this context keep the list
            ends.clear()
            _ENDS.reset(outer)
            if first:
                del _CALLERS[thread]

    module._engine_run_backward = noted


_PASSED_ON = "_stash_obj_in_tls" in torch.autograd._engine_run_backward.__code__.co_names  # type: ignore[attr-defined]
patch("backward", _keep_callers)


def backward_of(
    out: torch.Tensor, gradient: torch.Tensor | None, retain: bool | None, create: bool, inputs: Any
) -> None:
    """Call ``torch.autograd.backward``, without its checks where the gradient is as the value is.

    They take as long as two small products, and the first of them imports sympy (0.4 s).

    ``torch.autograd._engine_run_backward`` in 2.11 to 2.15.  When it goes:
    ``torch.autograd.backward``, whose checks are these and more.
    """
    if (
        inputs is None
        and type(out) is type(gradient) is torch.Tensor
        and out.shape == gradient.shape
        and out.dtype == gradient.dtype
        and not torch._C._are_functorch_transforms_active()
    ):
        pass_of: Any = torch.autograd
        retain = create if retain is None else retain
        pass_of._engine_run_backward(
            (out,), (gradient,), retain, create, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(out, gradient, retain, create, inputs=inputs)


def backward_context() -> Context | None:
    """Return the context variables of the caller of the backward pass that runs.

    Also on autograd's own threads.

    ``torch.autograd.graph._engine_run_backward`` stores them in thread-local state, which the
    engine passes to its threads.  In 2.13 and 2.15; in 2.11 they are recorded here, and if two
    threads call backward at once the result is None.  When it goes: operations on a GPU's thread
    are counted by no trace.
    """
    if not _PASSED_ON:
        found = list(_CALLERS.values()) if backward_now() != -1 else []
        return found[0] if len(found) == 1 else None
    return _in_thread("context") if _is_in_thread("context") else None


_in_thread, _is_in_thread = torch._C._get_obj_in_tls, torch._C._is_key_in_tls


def l1_weight() -> Any:
    """Find the ``weight`` of the call of F.l1_loss that is being dispatched.

    torch dispatches the call without it.

    In 2.11 to 2.15.  When it goes: drop this.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.nn.functional.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weight")


def is_wrapped_hook(value: object) -> bool:
    """Check whether a hook of state dicts is stored with the module that it is called with.

    ``torch.nn.modules.module._WrappedHook`` in 2.11 to 2.15: attributes ``hook`` and
    ``module``, a weak reference.  When it goes: such a hook of a module that is dropped fails, with
    an error.
    """
    return (
        type(value).__name__ == "_WrappedHook"
        and type(value).__module__ == "torch.nn.modules.module"
    )
