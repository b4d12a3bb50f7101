"""Recipes know roles from structure: names play no part, and what
cannot be split is left whole and named.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from tests.modules.test_dim_trace import Fused

MESHES = {
    "megatron1d": {"x": 2},
    "optimus2d": {"x": 2, "y": 2},
    "tesseract": {"d": 2, "x": 2, "y": 2},
    "cube3d": {"x": 2, "y": 2, "z": 2},
}
IDS = torch.randint(16, (8, 6), generator=torch.Generator().manual_seed(0))


def gap(module: nn.Module, recipe: str, *, rules: Any = None, **options: Any) -> float:
    """Largest relative difference of the output and of any
    gradient, on the mesh in scope, as written.
    """
    module = module.double()
    want = module(IDS)
    cotangent = torch.randn(
        want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1)
    )
    module.zero_grad()
    (want * cotangent).sum().backward()
    found = getattr(sl.recipes, recipe)(module, **options)
    apply, params = sl.parallelize(
        module, found if rules is None else rules(found), inputs={"ids": found.tokens}
    )

    def loss(p: Any) -> tuple[Tensor, Tensor]:
        out = apply(p, IDS)
        return (out * sl.shard(cotangent, out.sharding)).sum(), out

    (_, out), grads = sl.value_and_grad(loss, has_aux=True)(params)
    errors = [
        float((sl.unshard(out).detach() - want.detach()).abs().max() / want.detach().abs().max())
    ]
    for n, p in module.named_parameters():
        wanted = torch.zeros_like(p) if p.grad is None else p.grad
        errors.append(
            float(
                (sl.unshard(grads[n]) - wanted).abs().max() / max(float(wanted.abs().max()), 1e-3)
            )
        )
    return max(errors)


class Block(nn.Module):
    """Attention and an MLP whose six layers have the names that they are given."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        for name in names[:4]:
            setattr(self, name, nn.Linear(64, 64))
        setattr(self, names[4], nn.Linear(64, 256))
        setattr(self, names[5], nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        *qkv, out, up, down = (getattr(self, n) for n in self.names)
        q, k, v = (f(x).unflatten(-1, (4, 16)).transpose(1, 2) for f in qkv)
        x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + down(F.gelu(up(x)))


@pytest.mark.parametrize(
    "names", ["q_proj k_proj v_proj o_proj fc1 fc2", "ask find give mix grow shrink", "a b c d e f"]
)
def test_roles_are_those_of_the_run_whatever_modules_are_called(names: str) -> None:
    block = Block(names.split())
    want = ["expand", "expand", "expand", "contract", "expand", "contract"]
    assert sl.recipes.roles(block) == dict(zip(names.split(), want, strict=True))
    assert sl.recipes.widening(block) == {*names.split()[4:]}


@pytest.mark.parametrize("recipe", MESHES)
@pytest.mark.parametrize(
    ("cut", "keys"),
    [("3 heads", 4), ("heads 3", 4), ("grouped", 2), ("slices", 2), ("slices", 4), ("split", 2)],
)
def test_fused_weights_in_every_order_equal_dense(cut: str, keys: int, recipe: str) -> None:
    with sl.simulate(**MESHES[recipe]):
        assert gap(Fused(cut, keys=keys), recipe) < 1e-11


@pytest.mark.parametrize(
    ("cut", "keys", "token"),
    [
        ("3 heads", 4, "(3 x)"),
        ("heads 3", 4, "x"),
        ("grouped", 2, "x"),
        ("slices", 4, "(3 x)"),
        ("split", 2, "runs(x; 0:16 32:40 48:56 | 16:32 40:48 56:64)"),
    ],
)
def test_the_order_of_a_fused_weight_is_in_its_layout(cut: str, keys: int, token: str) -> None:
    with sl.simulate(x=2):
        rules = dict(r[:2] for r in sl.recipes.megatron1d(Fused(cut, keys=keys)))
    assert (
        rules["qkv.weight"] == f"{token} ."
        and rules["qkv.bias"] == token
        and rules["out.weight"] == ". x"
    )


def test_heads_that_do_not_divide_are_whole_and_named() -> None:
    module = Fused("3 heads", heads=3, keys=3)
    with sl.simulate(x=2):
        rules = sl.recipes.megatron1d(module)
        assert "qkv.weight" in rules.left and "no even split over 2" in rules.left["qkv.weight"]
        assert dict(r[:2] for r in rules)["qkv.weight"] == "..."
        assert gap(module, "megatron1d") < 1e-11


class Wild(nn.Module):
    """Blocks whose names say nothing, or the wrong thing."""

    def __init__(self, width: int = 64, vocabulary: int = 16) -> None:
        super().__init__()
        self.o_proj = nn.Embedding(vocabulary, 32)
        self.q_norm = nn.LayerNorm(32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"mlp": nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))}
            )
            for _ in range(2)
        )
        self.fc1 = nn.Linear(32, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.idle = nn.Parameter(torch.ones(3, 5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.o_proj(ids)
        for block in self.blocks:
            x = x + block["mlp"](self.q_norm(x))  # type: ignore[index]
        return self.fc1(x) * self.scale


def test_numbers_stay_apart_where_roles_differ() -> None:
    with sl.simulate(x=2):
        rules = dict(r[:2] for r in sl.recipes.megatron1d(Wild()))
    assert rules["blocks.*.mlp.0.weight"] == "x ." and rules["blocks.*.mlp.2.weight"] == ". x"
    assert (
        rules["o_proj.weight"] == "x ." and rules["q_norm.weight"] == "." and rules["scale"] == "."
    )
    assert rules["idle"] == "..."


@pytest.mark.parametrize("recipe", MESHES)
def test_names_play_no_part(recipe: str) -> None:
    with sl.simulate(**MESHES[recipe]):
        assert gap(Wild(), recipe) < 1e-11


@pytest.mark.parametrize("recipe", MESHES)
def test_sizes_that_do_not_divide_are_left_whole(recipe: str) -> None:
    with sl.simulate(**MESHES[recipe]):
        assert gap(Wild(width=33, vocabulary=17), recipe) < 1e-11


def test_rules_before_a_recipes_own_go_first() -> None:
    module = Wild()
    with sl.simulate(x=2):
        mine = [("blocks.*.mlp.*", "...")]
        for put in (lambda r: mine + r, lambda r: [*mine, *r]):
            assert gap(module, "megatron1d", rules=put) < 1e-11
            _, params = sl.parallelize(module, put(sl.recipes.megatron1d(module)))
            assert not params["blocks.0.mlp.0.weight"].sharding.axes
        with pytest.raises(sl.errors.RuleLint, match="is never reached"):
            sl.parallelize(module, [("*", "..."), ("fc1.weight", "x .")])
        with pytest.raises(sl.errors.RuleLint, match="matches no parameter"):
            sl.parallelize(Fused("split"), [*sl.recipes.megatron1d(module), ("*", "...")])


class Adapted(nn.Module):
    """A projection with a low-rank adapter beside it, q and
    k normalised per head, one head of keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(16, 32)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.norm = nn.LayerNorm(8)
        self.o = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        rows, length = ids.shape
        q = (self.q(x) + 2 * self.b(self.a(x))).view(rows, length, 4, 8).transpose(1, 2)
        k, v = (
            f(x).view(rows, length, 1, 8).transpose(1, 2).expand(rows, 4, length, 8)
            for f in (self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return x + self.o(seen.transpose(1, 2).reshape(rows, length, 32))


@pytest.mark.parametrize("recipe", MESHES)
def test_adapters_head_norms_and_one_head_of_keys_equal_dense(recipe: str) -> None:
    with sl.simulate(**MESHES[recipe]):
        assert gap(Adapted(), recipe) < 1e-11


def test_roles_hold_on_real_processes(pool: Any) -> None:
    for recipe, axes in (("megatron1d", {"x": 4}), ("optimus2d", {"x": 2, "y": 2})):
        for module in (Fused("split", keys=4), Wild()):
            assert max(pool.run(gap, module, recipe, **axes)) < 1e-11


def test_an_error_inside_a_module_names_its_parameters_and_a_rule_that_helps() -> None:
    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 32)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 32), Sorted()) for _ in range(2)
            )

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            for block in self.blocks:
                x = x + block(x)
            return x

    module = Sorting()
    rules = [("*.0.weight", "x ."), ("*.0.bias", "x"), ("*", "...")]
    with sl.simulate(x=2):
        apply, params = sl.parallelize(module, rules)
        with pytest.raises(sl.ShardError, match=r"blocks\.0\.0\.weight: x \.") as caught:
            apply(params, IDS)
        space = {"rules": rules}
        exec(caught.value.operands["or"], space)
        apply, params = sl.parallelize(
            module, [r for r in space["rules"] if not r[0].startswith("*.0")]
        )
        assert torch.equal(sl.unshard(apply(params, IDS)), module(IDS))


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values


class Untied(nn.Module):
    """A table and a classifier of their own, the classifier with a bias."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table, self.up, self.down = (
            nn.Embedding(vocabulary, 16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )
        self.head = nn.Linear(16, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.down(F.gelu(self.up(x))))


@pytest.mark.parametrize("recipe", MESHES)
def test_a_vocabulary_that_does_not_divide_is_whole_and_named_or_padded(recipe: str) -> None:
    module = Untied(17).double()
    want = F.cross_entropy(module(IDS).view(-1, 17), IDS.view(-1))
    want.backward()
    with sl.simulate(**MESHES[recipe]):
        rules = getattr(sl.recipes, recipe)(module)
        assert all(
            "pad=True" in rules.left[n] for n in ("table.weight", "head.weight", "head.bias")
        )
        for pad in (False, True):
            apply, params = sl.parallelize(
                module, [("down.bias", "."), *rules], inputs={"ids": rules.tokens}, pad=pad
            )
            for n in ("table.weight", "head.weight", "head.bias"):
                assert ("padded" in sl.typeof(params[n])) == pad and params[
                    n
                ].shape == module.get_parameter(n).shape
            if recipe == "cube3d" and not pad:
                continue  # whole logits lie as tokens do
            ids = sl.shard(IDS, rules.labels)
            loss, grads = sl.value_and_grad(
                lambda p, apply=apply, ids=ids: F.cross_entropy(
                    apply(p, IDS).view(-1, 17), ids.view(-1)
                )
            )(params)
            assert abs(float(loss.item() - want.item())) < 1e-12
            for n, p in module.named_parameters():
                assert p.grad is not None and (sl.unshard(grads[n]) - p.grad).abs().max() < 1e-12
