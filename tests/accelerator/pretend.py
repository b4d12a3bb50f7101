"""Importing this gives torch a device "pretend": what an accelerator would refuse or wait for, on any machine.

``counting()`` counts what makes the host wait, and uploads, by the line of the library that asked.
``late(True)`` runs kernels when something waits for them and no sooner, on streams of their own.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("device.cpp")
LIBRARY = f"{os.sep}shardlib{os.sep}"


def _build() -> ModuleType:
    """Compile the source once for each torch, Python and text of it, and import what came out."""
    made_of = f"{torch.__version__} {sys.version} {SOURCE.read_text()}".encode()
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
            ["g++", *flags, *(f"-I{i}" for i in includes), str(SOURCE), "-o", str(part)]
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
    def synchronize(_: Any = None) -> None:
        torch.accelerator.synchronize()


torch.utils.rename_privateuse1_backend("pretend")
_extension = _build()
torch._register_device_module("pretend", _Device)
torch.utils.generate_methods_for_privateuse1_backend()

DEVICE = torch.device("pretend", 0)
host = _extension.host
late = _extension.late


@dataclass
class Counts:
    """Waits, uploads and downloads, and the lines that asked for them."""

    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    downloads: Counter[str] = field(default_factory=Counter)

    def __call__(self, kind: str, name: str) -> None:
        frames = traceback.extract_stack()[:-1]
        asked = next((f for f in reversed(frames) if LIBRARY in f.filename), None)
        at = "elsewhere" if asked is None else f"{asked.filename.split(LIBRARY)[-1]}:{asked.lineno}"
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
