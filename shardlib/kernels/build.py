"""Compile ``cuda/*.cu`` into the user's cache: by nvcc for GPUs, or by g++ for this machine's CPU.

The file's name has the hash of the sources and flags, so a cached file always matches them and
nothing is compiled twice.  Nothing here runs unless it is called.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardlib.errors import BadArgument, Unsupported

HERE = Path(__file__).resolve().parent
ARCHS = (80, 90)
"""Compute capabilities that are compiled by default: A100, H100 and H200."""

# neither contracts a * b + c into an fma: GPU and CPU give the same bits
_FLAGS = {
    "cuda": "-std=c++17 -O3 -fmad=false -Xptxas -v -Xcompiler "
    "-fPIC,-fno-strict-aliasing,-fvisibility=hidden -shared",
    "host": "-std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -fPIC -shared "
    "-fvisibility=hidden -x c++",
}
_COMPILER = {"cuda": "nvcc", "host": "g++"}
_COMPILES = 1800.0
"""Seconds that a compiler may take."""


def sources() -> list[Path]:
    """List the sources: next to the package in a checkout, inside it where it is installed."""
    for folder in (HERE / "cuda", HERE.parents[1] / "cuda"):
        if folder.is_dir():
            return sorted([*folder.glob("*.cu"), *folder.glob("*.h")])
    return []


@functools.cache
def _digest(kind: str) -> str:
    found = hashlib.sha256(_FLAGS[kind].encode())
    for path in sources():
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _folder() -> Path:
    return Path(os.environ.get("SHARDLIB_CACHE") or Path.home() / ".cache" / "shardlib")


def packaged() -> Path:
    """Return the compiled file that a distribution may carry inside the package."""
    return HERE / "kernels-cuda-80-90.so"


def cached(kind: str) -> list[Path]:
    """List the cached files that were compiled from the present sources, the newest first."""
    found = _folder().glob(f"kernels-{kind}-{_digest(kind)}*.so") if sources() else []
    return sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)


def archs_of(path: Path) -> tuple[int, ...]:
    """Read the compute capabilities of a compiled file from its name.

    >>> archs_of(Path("kernels-cuda-80-90.so"))
    (80, 90)
    """
    return tuple(int(a) for a in re.findall(r"-(\d{2,3})(?=[-.])", path.name))


def compiled(kind: str, arch: Sequence[int]) -> Path:
    """Return the compiled file; compile it first if the cache has none of these sources.

    Several processes may compile at once: each writes a file of its own and renames it.
    """
    if kind not in _FLAGS:
        raise BadArgument(
            f"kind={kind!r} is neither 'cuda' nor 'host'",
            op="kernels.build",
            fix="sl.kernels.build('host')",
        )
    compiler = shutil.which(_COMPILER[kind])
    if not sources():
        raise _unbuilt("there are no sources")
    if compiler is None:
        raise _unbuilt(f"{_COMPILER[kind]} is not on the path")
    archs = sorted(arch) if kind == "cuda" else []
    names = "".join(f"-{a}" for a in archs)
    path = _folder() / f"kernels-{kind}-{_digest(kind)}{names}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    codes = [(a, f"sm_{a}") for a in archs] + [(a, f"compute_{a}") for a in archs[-1:]]
    flags = _FLAGS[kind].split()
    flags += [f"-gencode=arch=compute_{a},code={code}" for a, code in codes]
    files = [str(p) for p in sources() if p.suffix == ".cu"]
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        made = Path(work) / path.name
        said = _ran(_COMPILER[kind], [compiler, *flags, *files, "-o", str(made)])
        if kind == "cuda":
            table = made.with_suffix(".json")
            table.write_text(written(resources(said)))
            table.replace(path.with_suffix(".json"))
        made.replace(path)
    return path


def _ran(name: str, command: list[str]) -> str:
    """Run a compiler; return its output.

    Raises: Unsupported.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILES
        )
    except subprocess.TimeoutExpired as e:
        raise _unbuilt(f"{name} did not end within {_COMPILES:g} s") from e
    said = done.stdout + done.stderr
    if done.returncode:
        told = [line for line in said.splitlines() if re.search("error|fatal", line)]
        raise _unbuilt("\n".join([f"{name} refused the sources:", *told[:8]]))
    return said


def _unbuilt(text: str) -> Unsupported:
    return Unsupported(text, op="kernels.build", fix="print(sl.kernels.info())")


# ---------------------------------------------------------------- the output of ptxas

Resources = dict[str, list[int]]
"""Kernel and architecture -> registers per thread, bytes of them spilled or on a stack, bytes of
shared memory per block."""


def resources(said: str) -> Resources:
    """Parse the resources of each kernel from ``ptxas -v``; c++filt, if found, demangles names."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool:
        said = subprocess.run(
            [tool], input=said, capture_output=True, text=True, check=True, timeout=_COMPILES
        ).stdout
    out = {}
    for entry in said.split("Compiling entry function ")[1:]:
        title = re.match(r"'(.*)' for '(\w+)'", entry)
        assert title is not None, entry
        name = re.sub(r"^void |\(.*$", "", title[1])
        spilled = [int(n) for n in re.findall(r"(\d+) bytes (?:spill|stack)", entry)]
        shared = re.search(r"(\d+) bytes smem", entry)
        used = re.search(r"Used (\d+) registers", entry)
        assert used is not None, entry
        row = [int(used[1]), sum(spilled), int(shared[1]) if shared else 0]
        out[f"{name} {title[2]}"] = row
    return out


def written(table: Resources) -> str:
    """Write a table as JSON, one kernel a line.

    >>> written({"b": [1, 0, 0], "a": [2, 0, 0]})
    '{\\n"a": [2, 0, 0],\\n"b": [1, 0, 0]\\n}\\n'
    """
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"
