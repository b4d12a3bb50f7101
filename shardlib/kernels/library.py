"""The compiled kernels as functions: found and loaded by ctypes, never built here or at import.

Search order: the file inside the distribution, then the user's cache by hash of the sources; if
neither has one, every operation is eager.
"""

import ctypes
import functools
import threading
from collections.abc import Sequence
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.kernels.build import ARCHS, archs_of, cached, compiled, packaged
from shardlib.optional import unless_none

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Numbers of dtypes in the kernels' interface."""

SIGNATURES = {
    "ce_stats": "i p p p l l l l",
    "ce_loss": "p i p p p l l f l",
    "ce_back": "i p p p p p l l l l l l l l f l",
    "norm_stats": "i i p p l l l",
    "norm_settle": "p i p p l l f",
    "norm_apply": "i i p p p p p p l l l",
    "norm_back_sums": "i i p p p p p p l l l",
    "norm_back": "i i p p p p p p p l l l l",
    "norm_columns": "i p p p p p p l l l l",
    "merge": "i i p p p p p l l l l l p",
    "add": "i p p l l l l p",
    "adamw": "i i i p p f f f f f f f p",
    "adamw_halves": "i i p p f f f f f f f p",
    "copy": "i p p i p p p p p p p",
    "dropout": "i p p i p p p p l l i f",
}
"""Arguments of ``shardlib_NAME``, the stream left out: int, pointer, long (64 bits), float."""

_KINDS = {"i": c_int, "p": c_void_p, "l": c_int64, "f": c_float}
_REFUSALS = {
    -1: "it does not take these dtypes",
    -2: "the sizes do not fit together",
    -3: "a pointer is not a multiple of its element's size",
}
_LOCK = threading.Lock()


@functools.cache
def _loaded(path: Path) -> CDLL:
    """Load a file and declare the argument types of its functions."""
    found = CDLL(str(path))
    for name, kinds in SIGNATURES.items():
        function = getattr(found, f"shardlib_{name}")
        function.argtypes = [*(_KINDS[k] for k in kinds.split()), c_void_p]
        function.restype = c_int
    return found


def _fits(path: Path, capability: tuple[int, int]) -> bool:
    """Return whether a GPU runs one of a file's binaries, or its PTX."""
    archs, mine = archs_of(path), capability[0] * 10 + capability[1]
    # a binary runs on later minor versions of its major version; PTX runs on anything newer
    same = any(a // 10 == capability[0] and a <= mine for a in archs)
    return same or bool(archs and max(archs) <= mine)


@functools.cache
def _found(kind: str, capability: tuple[int, int]) -> tuple[Path | None, str]:
    """Return the file to load, or None, and the reason."""
    if kind == "host":
        here = cached("host")
        if here:
            return here[0], "built by g++"
        return None, "nothing is built: python -m shardlib.kernels build --host"
    candidates = [p for p in (packaged(), *cached("cuda")) if p.exists()]
    for path in candidates:
        if _fits(path, capability):
            return path, "packaged" if path == packaged() else "built by nvcc"
    if candidates:
        mine = f"{capability[0]}{capability[1]}"
        return None, f"what is built is not for this GPU: build --arch {mine}"
    return None, "nothing is built: python -m shardlib.kernels build"


def why(device: torch.device) -> tuple[Path | None, str]:
    """Return the file that serves a device, or None, and the reason."""
    if device.type == "cpu":
        return _found("host", (0, 0))
    if device.type != "cuda":
        return None, f"there are no kernels for {device.type}"
    if torch.version.hip is not None:
        return None, "these are CUDA kernels, and this torch is built for ROCm"
    if not torch.cuda.is_available():
        return None, "torch sees no CUDA device"
    return _found("cuda", torch.cuda.get_device_capability(device))


@functools.cache
def library(device: torch.device) -> CDLL | None:
    """Return the loaded kernels of a device, or None; each device is looked up once."""
    with _LOCK:
        path, _ = why(device)
        return unless_none(_loaded, path)


def build(kind: str = "cuda", arch: Sequence[int] = ARCHS) -> Path:
    """Compile the kernels into the user's cache, where this process finds them at once.

    ``kind``  "cuda", by nvcc; "host", the same sources by g++: for tests, which check on a CPU the
              code that a GPU will run, and for fused operations on CPUs inside ``use("native")``.
    ``arch``  compute capabilities; newer GPUs run the last one's PTX.
    Nothing is compiled where the cache has these sources already.  The cache is
    ``~/.cache/shardlib`` or ``$SHARDLIB_CACHE``.
    Raises: Unsupported where the compiler or the sources are missing, or it refuses them.

    >>> import shardlib as sl
    >>> try:
    ...     path = sl.kernels.build("metal")
    ... except sl.ShardError as e:
    ...     print(e.fix)
    sl.kernels.build('host')
    """
    path = compiled(kind, arch)
    for asked in (library, _found):
        asked.cache_clear()
    return path


def code(x: Tensor | torch.dtype) -> int:
    """Return the kernels' number of a dtype, or -1 if they do not take it."""
    return CODES.get(x.dtype if isinstance(x, Tensor) else x, -1)


def _launched(name: str, given: list[Any], device: torch.device) -> int:
    """Launch a kernel on a device and its current stream; return its status."""
    found = library(device)
    assert found is not None, "who calls has asked whether there is one"
    function = getattr(found, f"shardlib_{name}")
    if device.type == "cpu":
        return function(*given, None)
    with torch.cuda.device(device):
        # a launch goes to the current device, not to the pointers'
        return function(*given, torch.cuda.current_stream().cuda_stream)


def call(name: str, *args: Any) -> None:
    """Launch ``shardlib_NAME`` on the device and current stream of its first tensor.

    Tensors are given as their pointers, None as null, sequences of numbers and of tensors as arrays
    on the host.
    Raises: ShardError if the launcher refuses its arguments, or CUDA reports an error.
    """
    lists = (a if isinstance(a, list | tuple) else (a,) for a in args)
    like = next(x for some in lists for x in some if isinstance(x, Tensor))
    status = _launched(name, [_given(a) for a in args], like.device)
    if status:
        raise ShardError(
            _REFUSALS.get(status, f"CUDA error {status}"),
            op=f"kernels.{name}",
            operands={
                str(i): f"{a.dtype} {list(a.shape)} on {a.device}"
                for i, a in enumerate(args)
                if isinstance(a, Tensor)
            },
            fix="sl.kernels.use('eager')",
        )


def _given(a: Any) -> Any:
    if isinstance(a, Tensor):
        return a.data_ptr()  # null of an empty one
    if isinstance(a, list | tuple):
        pointers = any(isinstance(v, Tensor) or v is None for v in a)
        kind = c_void_p if pointers else c_int64
        return ctypes.cast((kind * len(a))(*map(_given, a)), c_void_p)
    return a


def dense_like(x: Tensor, *_: object) -> Tensor:
    """Make an uninitialised dense tensor of the shape and dtype of ``x``: the fake of many kernels."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
