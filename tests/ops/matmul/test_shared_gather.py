"""A value is moved once for all products that read it: separate
q, k and v move what a fused weight moves.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl

H, HEADS, B, S = 32, 8, 8, 16


class Separate(nn.Module):
    """One attention and one gated MLP, three and two weights on one value."""

    fused = False

    def __init__(self) -> None:
        super().__init__()
        sizes = (
            {"c_attn": (H, 3 * H)}
            if self.fused
            else {n: (H, H) for n in ("q_proj", "k_proj", "v_proj")}
        )
        sizes |= {"o_proj": (H, H)}
        sizes |= (
            {"gate_up_proj": (H, 4 * H)}
            if self.fused
            else {"gate_proj": (H, 2 * H), "up_proj": (H, 2 * H)}
        )
        sizes |= {"down_proj": (2 * H, H)}
        for name, (k, n) in sizes.items():
            setattr(self, name, nn.Linear(k, n, bias=False))
        self.norm = nn.RMSNorm(H)

    def qkv(self, x: Tensor) -> Any:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def wide(self, x: Tensor) -> Any:
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.wide(self.norm(x))
        return x + self.down_proj(F.silu(gate) * up)


class Fused(Separate):
    """The same with one weight for each."""

    fused = True

    def qkv(self, x: Tensor) -> Any:
        return self.c_attn(x).unflatten(-1, (3, -1)).unbind(-2)

    def wide(self, x: Tensor) -> Any:
        return self.gate_up_proj(x).unflatten(-1, (2, -1)).unbind(-2)


class Again(Separate):
    """Each half is recomputed in backward."""

    def qkv(self, x: Tensor) -> Any:
        return checkpoint(super().qkv, x, use_reentrant=False)

    def wide(self, x: Tensor) -> Any:
        return checkpoint(super().wide, x, use_reentrant=False)


class Changed(Separate):
    """The value is another one for the last of its readers."""

    def qkv(self, x: Tensor) -> Any:
        x = x * 1.0
        q, k = self.q_proj(x), self.k_proj(x)
        x.mul_(1.5)
        return q, k, self.v_proj(x)


Rules = list[tuple[str, ...]]


def one_d(sequence: bool) -> Callable[[bool], Rules]:
    def rules(fused: bool) -> Rules:
        many = [("c_attn.weight", "(3 x) ."), ("gate_up_proj.weight", "(2 x) .")] if fused else []
        some = many or [
            ("[qkv]_proj.weight", "x ."),
            ("gate_proj.weight", "x ."),
            ("up_proj.weight", "x ."),
        ]
        back = (". x", ". x .") if sequence else (". x",)
        return [*some, ("o_proj.weight", *back), ("down_proj.weight", *back), ("norm.weight", ".")]

    return rules


def blocks(first: str, then: str) -> Callable[[bool], Rules]:
    """Weights' layouts, y outermost in the rows of the first of
    each half, a fused one's in groups.
    """

    def rules(fused: bool) -> Rules:
        one = [("c_attn.weight", f"(3 y) {first}"), ("gate_up_proj.weight", f"(2 y) {first}")]
        many = [(f"{n}_proj.weight", f"y {first}") for n in ("[qkv]", "gate", "up")]
        back = [
            ("o_proj.weight", then),
            ("down_proj.weight", then),
            ("norm.weight", then.split()[0]),
        ]
        return [*(one if fused else many), *back]

    return rules


# mesh, where x lies, rules
RECIPES: dict[str, tuple[dict[str, int], str, Callable[[bool], Rules]]] = {
    "1D": ({"x": 4}, ". . .", one_d(False)),
    "1D, sequence": ({"x": 4}, ". x .", one_d(True)),
    "1D, data": ({"data": 2, "x": 2}, "data . .", one_d(False)),
    "2D": ({"x": 2, "y": 2}, "x . y", blocks("x", "y x")),
    "2D, 4 x 2": ({"x": 4, "y": 2}, "x . y", blocks("x", "y x")),
    "2D, data": ({"d": 2, "x": 2, "y": 2}, "(d x) . y", blocks("x", "y x")),
    "3D": ({"x": 2, "y": 2, "z": 2}, "(x y) . z", blocks("(z x)", "z (y x)")),
}


def built(kind: type[Separate], recipe: str) -> tuple[Any, dict[str, Any], str]:
    """The block under a recipe on the mesh in scope, and where its input lies."""
    torch.manual_seed(0)
    separate = Separate().double()
    module = kind().double()
    with torch.no_grad():
        if module.fused:
            module.c_attn.weight.copy_(
                torch.cat([getattr(separate, f"{n}_proj").weight for n in "qkv"])
            )
            module.gate_up_proj.weight.copy_(
                torch.cat([separate.gate_proj.weight, separate.up_proj.weight])
            )
            module.o_proj.weight.copy_(separate.o_proj.weight)
            module.down_proj.weight.copy_(separate.down_proj.weight)
        else:
            module.load_state_dict(separate.state_dict())
    _, where, rules = RECIPES[recipe]
    apply, params = sl.parallelize(module, rules(module.fused))
    return apply, params, where


def drawn() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(B, S, H, dtype=torch.float64, generator=draw) for _ in range(2))  # type: ignore[return-value]


def step(
    apply: Any, params: dict[str, Any], where: str, saving: bool
) -> tuple[Tensor, dict[str, Tensor], int, int]:
    """Value, gradients by name, and the bytes moved forward and backward."""
    x, g = drawn()
    a = sl.shard(x, where).requires_grad_()
    with sl.saving() if saving else nullcontext():
        with sl.trace() as forward:
            y = apply(params, a)
        with sl.trace() as backward:
            found = torch.autograd.grad(y, [a, *params.values()], sl.shard(g, y.sharding))
    names = ["x", *params]
    return (
        sl.unshard(y).detach(),
        {n: sl.unshard(v) for n, v in zip(names, found, strict=True)},
        int(forward.bytes),
        int(backward.bytes),
    )


def dense(kind: type[Separate]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = kind().double()
    x, g = drawn()
    x.requires_grad_()
    y = module(x)
    names = dict(module.named_parameters())
    found = torch.autograd.grad(y, [x, *names.values()], g)
    return y.detach(), dict(zip(["x", *names], found, strict=True))


def gap(mine: tuple[Any, ...], theirs: tuple[Tensor, dict[str, Tensor]]) -> float:
    pairs = [(mine[0], theirs[0]), *((mine[1][n], g) for n, g in theirs[1].items())]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("saving", [False, True], ids=["", "saving"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_separate_weights_move_what_a_fused_one_moves(recipe: str, saving: bool) -> None:
    """From the first call on, and every call gives dense's value and gradients."""
    want = dense(Separate)
    with sl.simulate(**RECIPES[recipe][0]):
        one, fused, where = built(Fused, recipe)
        apply, params, _ = built(Separate, recipe)
        step(one, fused, where, saving)
        bound = step(one, fused, where, saving)[2:]
        for _ in range(3):
            found = step(apply, params, where, saving)
            assert gap(found, want) < 1e-12
            assert sum(found[2:]) == sum(bound), (found[2:], bound)


def on_a_rank(recipe: str, saving: bool) -> tuple[float, list[int]]:
    apply, params, where = built(Separate, recipe)
    found = [step(apply, params, where, saving) for _ in range(2)]
    return max(gap(f, dense(Separate)) for f in found), [sum(f[2:]) for f in found]


@pytest.mark.parametrize(
    "recipe", [r for r, (mesh, *_) in RECIPES.items() if torch.Size(mesh.values()).numel() == 4]
)
def test_real_ranks_move_what_simulated_ones_do(pool: Any, recipe: str) -> None:
    mesh = RECIPES[recipe][0]
    for saving in (False, True):
        with sl.simulate(**mesh):
            moved = on_a_rank(recipe, saving)[1]
        for theirs, sent in pool.run(on_a_rank, recipe, saving, **mesh):
            assert theirs < 1e-12
            assert sent == moved


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_recomputed_in_backward_equals_dense(recipe: str) -> None:
    want = dense(Again)
    with sl.simulate(**RECIPES[recipe][0]):
        apply, params, where = built(Again, recipe)
        for saving in (False, True, False):
            assert gap(step(apply, params, where, saving), want) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_value_changed_in_place_is_moved_anew(recipe: str) -> None:
    want = torch.manual_seed(0) and Changed().double()(drawn()[0])
    with sl.simulate(**RECIPES[recipe][0]):
        apply, params, where = built(Changed, recipe)
        for saving in (False, True, False):
            with sl.saving() if saving else nullcontext():
                y = sl.unshard(apply(params, sl.shard(drawn()[0], where)))
            assert (y - want).abs().max() < 1e-12


@pytest.mark.parametrize("saving", [False, True], ids=["", "saving"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_part_of_the_gradients_and_a_graph_run_twice(recipe: str, saving: bool) -> None:
    want = dense(Separate)[1]
    with sl.simulate(**RECIPES[recipe][0]), sl.saving() if saving else nullcontext():
        apply, params, where = built(Separate, recipe)
        x, g = drawn()
        for names in (
            ("k_proj.weight",),
            ("x",),
            ("q_proj.weight", "v_proj.weight", "x"),
            ("up_proj.weight",),
        ):
            leaf = sl.shard(x, where).requires_grad_()
            y = apply(params, leaf)
            need = [leaf if n == "x" else params[n] for n in names]
            ones = sl.shard(g, y.sharding)
            for keep in (True, True, False):
                found = torch.autograd.grad(y, need, ones, retain_graph=keep)
                for n, mine in zip(names, found, strict=True):
                    assert (sl.unshard(mine) - want[n]).abs().max() < 1e-12 * want[n].abs().max(), n


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_shared_values_are_rounded_once(recipe: str) -> None:
    """Three products of one X in bfloat16: no more than 1.4 of dense's own error."""
    draw = torch.Generator().manual_seed(2)
    x, g, *weights = (torch.randn(128, 128, generator=draw).bfloat16() for _ in range(5))

    def errors(give: Callable[..., Tensor]) -> float:
        exact = sum(g.double() @ w.double().mT for w in weights)
        return float((give().double() - exact).norm() / exact.norm())

    def alone() -> Tensor:
        a = x.clone().requires_grad_()
        return torch.autograd.grad([a @ w for w in weights], a, [g] * 3)[0]

    mesh, where, rules = RECIPES[recipe]
    rows, _, columns = (
        sl.Layout.parse(where).dims if "sequence" not in recipe else sl.Layout.parse("x . .").dims
    )
    weight = sl.Layout.parse(rules(False)[0][1]).T
    with sl.simulate(**mesh):
        places = [sl.shard(w, weight) for w in weights]

        def ours() -> Tensor:
            a = sl.shard(x, f"{rows} {columns}").requires_grad_()
            ys = [sl.matmul(a, w) for w in places]
            return sl.unshard(
                torch.autograd.grad(ys, [a], [sl.shard(g, y.sharding) for y in ys])[0]
            )

        for saving in (False, True):
            with sl.saving() if saving else nullcontext():
                assert errors(ours) < 1.4 * errors(alone)
