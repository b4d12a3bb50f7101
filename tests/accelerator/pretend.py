"""Importing this gives torch a device "pretend": what an accelerator would refuse or wait for, on any machine.

``counting()`` counts what makes the host wait, and uploads, by the line of the library that asked.
``late(True)`` runs kernels when something waits for them and no sooner, on streams of their own;
``late(True, hasty=True)`` those of the default stream alone, and of others at once.
Compiled by g++ at the first import, into a temporary directory or ``SHARDLIB_PRETEND`` (about a
minute).
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension
from torch.utils._device import DeviceContext

SOURCES = [Path(__file__).with_name(n) for n in ("device.cpp", "group.h")]
LIBRARY = f"{Path(__file__).parents[2] / 'shardlib'}{os.sep}"
TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def _build() -> ModuleType:
    """Compile the source once for each torch, Python and text of it, and import what came out."""
    made_of = f"{torch.__version__} {sys.version} {[s.read_text() for s in SOURCES]}".encode()
    folder = Path(
        os.environ.get("SHARDLIB_PRETEND", Path(tempfile.gettempdir()) / "shardlib-pretend")
    )
    name = f"pretend_{hashlib.blake2b(made_of, digest_size=8).hexdigest()}"
    found = folder / f"{name}.so"
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        libraries = cpp_extension.library_paths()
        part = found.with_suffix(f".{os.getpid()}")
        flags = ["-O1", "-w", "-std=c++20", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={name}"]
        subprocess.run(
            ["g++", *flags, *(f"-I{i}" for i in includes), str(SOURCES[0]), "-o", str(part)]
            + [f for d in libraries for f in (f"-L{d}", f"-Wl,-rpath,{d}")]
            + ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"],
            check=True,
        )
        part.rename(found)
    spec = importlib.util.spec_from_file_location(name, found)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Device:
    """What torch looks up under ``torch.pretend``."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    is_available = is_initialized

    @staticmethod
    def device(_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def set_device(_: Any) -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def _lazy_init() -> None:
        pass

    @staticmethod
    def manual_seed(seed: int) -> None:
        _extension.default_generator().manual_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(_: Any = None) -> torch.Tensor:
        return _extension.default_generator().get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, _: Any = None) -> None:
        _extension.default_generator().set_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def current_stream(_: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    @staticmethod
    def synchronize(_: Any = None) -> None:
        torch.accelerator.synchronize()


torch.utils.rename_privateuse1_backend("pretend")
_extension = _build()
torch._register_device_module("pretend", _Device)
torch.utils.generate_methods_for_privateuse1_backend()


def _group(store: Any, rank: int, world: int, timeout: Any) -> Any:
    """Make a process group of the device, over gloo's."""
    return _extension.Group(dist.ProcessGroupGloo(store, rank, world, timeout))


dist.Backend.register_backend("pretend", _group, devices=["pretend"])

DEVICE = torch.device("pretend", 0)
host = _extension.host
late = _extension.late
allocated = _extension.allocated


class _Default(DeviceContext):
    """Torch's default device for all code but the library's, whose users have the CPU as theirs.

    So a tensor that the library makes without naming a device is on the wrong one.
    """

    @property
    def device(self) -> torch.device:
        frame = sys._getframe(1)
        if frame.f_code.co_name != "__torch_function__":  # torch.get_default_device
            return DEVICE
        while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        in_library = frame.f_code.co_filename.startswith(LIBRARY)
        return torch.device("cpu") if in_library else DEVICE

    @device.setter
    def device(self, _: Any) -> None:
        pass


def default() -> None:
    """Make this the default device of tests, and of simulated meshes, in this thread from now on."""
    _Default(DEVICE).__enter__()


@dataclass
class Counts:
    """Waits, uploads and downloads, and the lines that asked for them."""

    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    downloads: Counter[str] = field(default_factory=Counter)

    def __call__(self, kind: str, name: str) -> None:
        frames = traceback.extract_stack()[:-1]
        asked = next((f for f in reversed(frames) if f.filename.startswith(LIBRARY)), None)
        at = "elsewhere" if asked is None else f"{asked.filename[len(LIBRARY) :]}:{asked.lineno}"
        counter = {"wait": self.waits, "upload": self.uploads, "download": self.downloads}[kind]
        counter[f"{name} at {at}"] += 1


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what makes the host wait for the device, while the body runs."""
    counts = Counts()
    _extension.listen(counts)
    try:
        yield counts
    finally:
        _extension.listen(None)
