"""Where nvcc is, every kernel compiles, spills nothing, and takes what cuda/resources.json says."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

import shardlib as sl
from shardlib.kernels.build import (
    ARCHS,
    archs_of,
    cached,
    compiled,
    resources,
    sources,
    written,
)
from tests.kernels.host import built, needs_host

TABLE = Path(__file__).parents[2] / "cuda" / "resources.json"


def spills(table: dict[str, list[int]]) -> list[str]:
    """List the kernels that spill registers to memory."""
    return [name for name, (_, spilled, _) in table.items() if spilled]


SHARED, REGISTERS = 1.0, 1.1  # a kernel may take a tenth more registers with another compiler


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not here: nothing to compile with"
)
def test_no_kernel_spills_or_grows() -> None:
    """One compilation, for all architectures, kept in the user's cache by the sources' hash."""
    want = json.loads(TABLE.read_text())
    got = json.loads(compiled("cuda", ARCHS).with_suffix(".json").read_text())
    assert got.keys() == want.keys(), "python -m tests.kernels.test_build writes the table anew"
    assert spills(got) == []
    for name, (registers, _, shared) in got.items():
        assert registers <= REGISTERS * want[name][0] and shared <= SHARED * want[name][2], name


def test_the_table_names_every_architecture_and_no_spill() -> None:
    table = json.loads(TABLE.read_text())
    assert spills(table) == [] and written(table) == TABLE.read_text()
    for arch in ARCHS:
        assert {k.rpartition(" ")[0] for k in table if k.endswith(f"sm_{arch}")} == {
            k.rpartition(" ")[0] for k in table
        }
    assert max(registers for registers, _, _ in table.values()) <= 64  # four blocks of 256 threads


def test_what_ptxas_says_is_read() -> None:
    said = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4flatI3AddEvT_' for 'sm_90'
ptxas info    : Function properties for _Z4flatI3AddEvT_
    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 96 bytes smem, 400 bytes cmem[0]
"""
    (row,) = resources(said).values()
    assert row == [40, 24, 96]
    assert list(spills(resources(said))) == list(resources(said))


@needs_host
def test_nothing_is_compiled_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert built()
    before = compiled("host", ARCHS)
    stamp = before.stat().st_mtime_ns
    assert compiled("host", (90,)) == before and before.stat().st_mtime_ns == stamp
    assert cached("host")[0] == before
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    assert cached("host") == []


def test_the_sources_are_where_the_package_looks_for_them() -> None:
    names = {p.name for p in sources()}
    assert names >= {
        "common.h",
        "cross_entropy.cu",
        "norm.cu",
        "merge.cu",
        "adamw.cu",
        "pack.cu",
        "dropout.cu",
    }
    for path in sources():  # plain C: no header of torch's, none of CUDA's math libraries
        found = re.findall(r"#include [<\"](.*)[>\"]", path.read_text())
        assert set(found) <= {"math.h", "stdint.h", "string.h", "cuda_runtime.h", "common.h"}


def test_a_wheel_carries_the_sources_and_compiles_nothing() -> None:
    told = tomllib.loads((TABLE.parents[1] / "pyproject.toml").read_text())
    assert told["build-system"]["requires"] == ["hatchling"]
    wheel = told["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"]["cuda"] == "shardlib/kernels/cuda"
    assert not any("apex" in d for d in told["project"]["dependencies"])
    assert not any(
        "apex" in d for row in told["project"]["optional-dependencies"].values() for d in row
    )


def test_architectures_are_in_the_name() -> None:
    assert archs_of(Path("kernels-cuda-0123456789abcdef-80-90.so")) == (80, 90)
    assert archs_of(Path("kernels-cuda-80-100.so")) == (80, 100)
    assert archs_of(Path("kernels-host-0123456789abcdef.so")) == ()


def test_a_compiler_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    with pytest.raises(sl.errors.Unsupported, match="nvcc is not on the path"):
        sl.kernels.build()
    with pytest.raises(sl.errors.Unsupported, match=r"g\+\+ is not on the path"):
        sl.kernels.build("host")
    with pytest.raises(sl.errors.BadArgument, match="neither 'cuda' nor 'host'"):
        sl.kernels.build("metal")


if __name__ == "__main__":
    TABLE.write_text(compiled("cuda", ARCHS).with_suffix(".json").read_text())
    sys.exit(0)
