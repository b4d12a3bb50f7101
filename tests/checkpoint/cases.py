"""Trees and layouts that the tests of checkpoints share."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import shardlib as sl

MESHES = [{"x": 1}, {"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 2}]
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool,
    torch.complex64, torch.complex128, torch.uint16, torch.int64, torch.float8_e5m2fnuz,
]  # fmt: skip


@st.composite
def layouts(draw: Any, ndim: int, mesh: dict[str, int]) -> str:
    """A layout of so many dimensions: any axes, in any order of positions."""
    tokens: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(list(mesh))):
        d = draw(st.integers(-1, ndim - 1))
        if d >= 0:
            tokens[d].append(axis)
    out = []
    for axes in tokens:
        how = draw(st.sampled_from(["plain", "zigzag", "striped", "groups"]))
        body = " ".join(axes)
        text = {"plain": f"({body})", "groups": f"(3 {body})"}.get(how, f"{how}({body})")
        out.append(text if axes else ".")
    return " ".join(out)


def value(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=g).to(dtype)


_AS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def put(x: Tensor, layout: str) -> Any:
    """``sl.shard``, also for dtypes that torch cannot index: the bits are moved."""
    bits = x if x.is_complex() else x.view(_AS[x.element_size()])
    out = sl.shard(bits, layout, pad=True)
    return out.becomes(out.raw.view(x.dtype))


def whole(x: Any) -> Tensor:
    if x.dtype.is_complex:
        return sl.unshard(x)
    return sl.unshard(x.becomes(x.raw.view(_AS[x.raw.element_size()]))).view(x.dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    kind = _AS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def tree() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(64, 48, generator=g), "v": torch.randn(300, generator=g), "step": 3}


def placed(w: str = "x y", v: str = "...") -> dict[str, Any]:
    t = tree()
    return {"w": sl.shard(t["w"], w), "v": sl.shard(t["v"], v), "step": 3}
