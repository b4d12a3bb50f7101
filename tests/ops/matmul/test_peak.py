"""Peak temporaries, by counting every storage allocated on a real rank."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardlib as sl
from shardlib.mesh import bind
from shardlib.ops.matmul.cannon import Cannon
from shardlib.ops.matmul.function import panels
from shardlib.ops.matmul.summa import Summa


class Live(TorchDispatchMode):
    """Bytes of storages made while it is open and still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for t in tree_leaves(out):
            if (
                isinstance(t, torch.Tensor)
                and t.untyped_storage().data_ptr() not in old | self.seen
            ):
                s = t.untyped_storage()
                if s.nbytes():
                    self.seen.add(s.data_ptr())
                    self.now += s.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(s, self.free, s.nbytes(), s.data_ptr())
        return out

    def free(self, nbytes: int, pointer: int) -> None:
        self.now -= nbytes
        self.seen.discard(pointer)


def peaks(schedule: str, n: int) -> dict[str, float]:
    """Per form: peak bytes beside operands and result, in blocks."""
    mesh = sl.current_mesh()
    a, b = (torch.randn(n, n) for _ in range(2))
    block = n * n * 4
    out, grid = {}, Summa("x", "y", panels(2, 2)) if schedule == "summa" else Cannon("x", "y")
    for form in ("ab", "abt", "atb"):
        with torch.no_grad(), bind(mesh), Live() as live:
            c = grid.multiply(form, a, b)
        assert c.shape == (n, n)
        out[form] = live.peak / block - 1
    return out


def test_summa_holds_at_most_four_blocks_and_cannon_three(pool: Any) -> None:
    """Forward (AB) and both backward products, on every rank; the result is not counted."""
    for schedule, bar in (("summa", 4), ("cannon", 3)):
        for rank, forms in enumerate(pool.run(peaks, schedule, 64, x=2, y=2)):
            for form, blocks in forms.items():
                assert 0 < blocks <= bar, (schedule, rank, form, blocks)


def test_the_counter_sees_a_gathered_operand() -> None:
    x = torch.randn(64, 64)
    with Live() as live:
        y = torch.cat([x, x])
        del y
        _ = torch.cat([x, x, x])
    assert live.peak == 3 * 64 * 64 * 4 and live.now == 3 * 64 * 64 * 4
