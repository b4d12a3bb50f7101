"""torch.autocast casts sharded values to the dtypes to which it casts plain ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl

HALF = torch.bfloat16


def values() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"a": (8, 64), "b": (64, 8), "x": (8, 16), "w": (32, 16), "c": (32,), "img": (2, 4, 8, 8), "k": (4, 4, 3, 3),
              "q": (2, 4, 8, 16)}  # fmt: skip
    return {n: torch.randn(s, generator=g) for n, s in shapes.items()}


def _attends(d: dict[str, Tensor]) -> Tensor:
    h = d["x"].unsqueeze(1)
    return F.multi_head_attention_forward(
        h, h, h, 16, 2, torch.cat([d["w"], d["w"][:16]]), None, None, None, False, 0.0, d["w"][:16],
        None,
        training=False, need_weights=False,
    )[0]  # fmt: skip


FUNCTIONS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "matmul": lambda d: d["a"] @ d["b"],
    "mm": lambda d: torch.mm(d["a"], d["b"]),
    "linear": lambda d: F.linear(d["x"], d["w"], d["c"]),
    "softmax": lambda d: F.linear(d["x"], d["w"], d["c"]).softmax(-1),
    "layer_norm": lambda d: F.layer_norm(F.linear(d["x"], d["w"]), (32,)),
    "mse": lambda d: F.mse_loss(F.linear(d["x"], d["w"]), F.linear(d["x"], d["w"]) * 0),
    "conv2d": lambda d: F.conv2d(d["img"], d["k"]),
    "pad": lambda d: F.pad(d["img"].bfloat16(), (1, 2, 1, 1)),
    "pad by the nearest": lambda d: F.pad(d["img"].bfloat16(), (1, 2, 1, 1), mode="replicate"),
    "attention": lambda d: F.scaled_dot_product_attention(d["q"], d["q"], d["q"]),
    "add": lambda d: F.linear(d["x"], d["w"]) + d["c"],
    "gelu": lambda d: F.gelu(F.linear(d["x"], d["w"])),
    "mean": lambda d: F.linear(d["x"], d["w"]).mean(-1),
    "einsum": lambda d: torch.einsum("ij,kj->ik", d["x"], d["w"]),
    "einsum of rows": lambda d: torch.einsum("ij,ij->ij", d["x"], d["x"]),
    "tensordot": lambda d: torch.tensordot(d["x"], d["w"].T, 1),
    "addmm": lambda d: torch.addmm(d["c"], d["x"], d["w"].T),
    "prod": lambda d: d["a"].bfloat16()[:, :4].prod(-1),
    "double": lambda d: d["a"].double() @ d["b"].double(),
    "attention of modules": _attends,
}
PLACES = [
    {
        "a": "x y",
        "b": "x y",
        "x": "x .",
        "w": "y .",
        "c": "y",
        "img": "x ...",
        "k": "...",
        "q": "x y . .",
    },
    {
        "a": "x y",
        "b": "y .",
        "x": "x .",
        "w": ". .",
        "c": ".",
        "img": "x ...",
        "k": "...",
        "q": "x . . .",
    },
    {
        "a": "x .",
        "b": ". y",
        "x": ". .",
        "w": ". .",
        "c": ".",
        "img": "...",
        "k": "...",
        "q": ". x . .",
    },
]


def differences() -> list[str]:
    """Functions whose dtypes, values or gradients are not those
    of plain autocast, on the mesh in scope.
    """
    wrong = []
    for name, f in FUNCTIONS.items():
        dense = {n: v.clone().requires_grad_() for n, v in values().items()}
        with torch.autocast("cpu", HALF):
            want = f(dense)
        (want.float() ** 3).mean().backward()
        for places in PLACES:
            for inside in (False, True):
                ours = {n: sl.shard(v, places[n]).requires_grad_() for n, v in values().items()}
                with torch.autocast("cpu", HALF), sl.implicit():
                    got = f(ours)
                    got = sl.reshard(got, str(got.sharding).split(" + ")[0])
                    loss = (got.float() ** 3).mean()
                    if inside:
                        loss.backward()
                if not inside:
                    loss.backward()
                if got.dtype != want.dtype:
                    wrong.append(f"{name} {places['x']}: {got.dtype}, not {want.dtype}")
                if not far(got, want) < 2e-2:
                    wrong.append(f"{name} {places['x']}: value {far(got, want):.1e}")
                for n, x in dense.items():
                    if x.grad is not None and (
                        ours[n].grad.dtype != x.grad.dtype or not far(ours[n].grad, x.grad) < 5e-2
                    ):
                        wrong.append(f"{name} {places['x']}: gradient of {n}")
    return wrong


def far(a: Any, b: Tensor) -> float:
    return float(
        (sl.unshard(a.detach()).double() - b.detach().double()).abs().max() / b.detach().abs().max()
    )


def test_functions_compute_in_torchs_dtypes() -> None:
    with sl.simulate(x=2, y=2):
        assert differences() == []


def test_functions_compute_in_torchs_dtypes_on_processes(pool: Any) -> None:
    assert pool.run(differences, x=2, y=2) == [[]] * 4


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.ln(h))))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("recipe", ["megatron1d", "optimus2d"])
def test_training_under_autocast_follows_dense(recipe: str, inside: bool) -> None:
    torch.manual_seed(3)
    m = nn.Sequential(MLP(), MLP())
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    dense, losses = copy.deepcopy(m), []
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    for _ in range(4):
        with torch.autocast("cpu", HALF):
            loss = F.mse_loss(dense(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    axes, rows = (
        ({"data": 2, "x": 2}, "data .") if recipe == "megatron1d" else ({"x": 2, "y": 2}, "x y")
    )
    with sl.simulate(**axes):
        apply, params = sl.parallelize(m, getattr(sl.recipes, recipe)(m), inputs={"input": rows})

        def forward(p: Any) -> Tensor:
            out = apply(p, x)
            return F.mse_loss(out, sl.shard(y, sl.layout_of(out)))

        def step(p: Any) -> Tensor:
            with torch.autocast("cpu", HALF):
                return forward(p)

        for want in losses:
            if inside:
                with torch.autocast("cpu", HALF):
                    loss, grads = sl.value_and_grad(forward)(params)
            else:
                loss, grads = sl.value_and_grad(step)(params)
            assert abs(loss.item() - want) < 2e-3 * want
            assert all(g.dtype == torch.float32 for g in grads.values())
            params = {n: (p - 0.1 * grads[n]).detach().requires_grad_() for n, p in params.items()}


def test_autocast_of_another_device_changes_nothing() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.ones(4, 4), "x .")
        with (
            torch.autocast("cuda", HALF)
            if torch.cuda.is_available()
            else torch.autocast("cpu", HALF, enabled=False)
        ):
            assert (a @ sl.shard(torch.ones(4, 4), "...")).dtype == torch.float32
