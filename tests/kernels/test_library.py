"""Found and loaded, never built here; arguments as the sources declare them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib.kernels.build import sources
from shardlib.kernels.library import SIGNATURES, _fits, call, why
from tests.kernels.host import built, needs_host


def declared() -> dict[str, str]:
    """What the sources say: name -> kinds of the arguments, the stream left out."""
    out = {}
    for path in sources():
        for name, given in re.findall(
            r"^API int shardlib_(\w+)\((.*?)\) \{", path.read_text(), re.S | re.M
        ):
            kinds = []
            for argument in re.split(r",\s*", re.sub(r"\s+", " ", given))[:-1]:
                plain = {"int64_t": "l", "int": "i", "float": "f"}
                kinds.append("p" if "*" in argument else plain[argument.split()[-2]])
            out[name] = " ".join(kinds)
    return out


def test_signatures_are_the_sources() -> None:
    assert declared() == SIGNATURES


@needs_host
def test_a_launcher_refuses_what_it_cannot_take() -> None:
    assert built()
    x, strides = torch.zeros(64), [0] * 6
    with pytest.raises(sl.ShardError, match="multiple of its element"):
        call("add", 2, x, x.data_ptr() + 1, 1, 1, 1, 8, strides)
    with pytest.raises(sl.ShardError, match="does not take these dtypes"):
        call("add", 9, x, x, 1, 1, 1, 8, strides)
    with pytest.raises(sl.ShardError, match="sizes do not fit") as e:
        call("add", 0, x, x, 1, -1, 1, 8, strides)
    assert e.value.op == "kernels.add" and "float32 [64]" in str(e.value)


@pytest.mark.parametrize(
    ("name", "capability", "fits"),
    [
        ("kernels-cuda-80-90.so", (8, 0), True),
        ("kernels-cuda-80-90.so", (8, 6), True),  # sm_80's binary
        ("kernels-cuda-80-90.so", (9, 0), True),
        ("kernels-cuda-80-90.so", (10, 0), True),  # PTX
        ("kernels-cuda-80-90.so", (7, 5), False),
        ("kernels-cuda-90.so", (8, 0), False),
        ("kernels-host.so", (9, 0), False),
    ],
)
def test_a_file_fits_a_gpu_by_its_binaries_or_its_ptx(
    name: str, capability: tuple[int, int], fits: bool
) -> None:
    assert _fits(Path(name), capability) is fits


def test_a_device_without_kernels_says_why() -> None:
    assert why(torch.device("meta")) == (None, "there are no kernels for meta")
    if not torch.cuda.is_available():
        assert why(torch.device("cuda"))[1] == "torch sees no CUDA device"


def test_import_builds_and_loads_nothing(tmp_path: Path) -> None:
    code = (
        "import subprocess, ctypes\n"
        "def no(*a, **k): raise SystemExit(f'{a}')\n"
        "subprocess.Popen.__init__ = no\n"
        "import torch\n"
        "init = ctypes.CDLL.__init__\n"
        "def load(self, name, *a, **k): no(name) if 'kernels' in str(name) else init(self, name, *a, **k)\n"
        "ctypes.CDLL.__init__ = load\n"
        "import shardlib as sl\n"
        "print(sl.kernels.info())\n"
    )
    env = {"SHARDLIB_CACHE": str(tmp_path), "PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        timeout=120, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing is built" in done.stdout and not list(tmp_path.iterdir())
