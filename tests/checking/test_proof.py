"""``sl.check_model``: a right model passes on every mesh, and a wrong one says where it is wrong."""

import dataclasses
from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.errors import ModelDiffers
from shardlib.tensor.tensor import TABLE

pytest_plugins = ["shardlib.testing.plugin"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc_in = nn.Linear(width, 2 * width)
        self.fc_out = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc_out(F.gelu(self.fc_in(self.norm(x)))))


class Small(nn.Module):
    """Embedding, two blocks, a tied head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


RULES = [
    ("*.fc_in.weight", "x ."),
    ("*.fc_in.bias", "x"),
    ("*.fc_out.weight", ". x"),
    ("embed.weight", "x ."),
    ("*", "..."),
]
BATCH = {"ids": torch.randint(12, (4, 6)), "labels": torch.randint(12, (4, 6))}
INPUTS: Any = {"ids": "data .", "labels": "data ."}


def test_a_right_model_is_proved_on_every_mesh(sharded: Any) -> None:
    model = Small()
    before = {n: p.clone() for n, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    proof = sharded(model, RULES, BATCH, inputs=INPUTS)
    assert list(proof.errors) == ["data=1 x=2 y=1", "data=2 x=1 y=1", "data=2 x=2 y=2"]
    wanted = {"output", "loss", "gradient", "norm", "step"}
    for row in proof.errors.values():
        assert set(row) == wanted | {f"train {q}" for q in wanted}
        assert max(row.values()) < 1e-10
    assert "in training" in str(proof) and "data=2 x=2 y=2" in str(proof)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(state, torch.random.get_rng_state()) and model.training


def test_recipes_and_every_form_of_a_batch_are_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(4, 4)
    for batch in (x, [x], {"input": x}):
        proof = sl.check_model(model, sl.recipes.megatron1d, {"x": 2}, batch, steps=0)
        assert set(proof.errors["x=2"]) == {"output", "loss", "gradient", "norm"}
    with pytest.raises(sl.ShardError, match="no floating point"):  # numbers have no mean
        sl.check_model(nn.Identity(), [], {"x": 2}, torch.arange(4))


class _Wrong(torch.autograd.Function):
    """Its value is torch's, its gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 0.7


@pytest.mark.parametrize("wrong", ["value", "gradient"])
def test_the_first_tensor_that_differs_is_named_with_its_line(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TABLE[F.gelu]

    def off(func: Any, args: Any, kwargs: Any) -> Any:
        if wrong == "value":
            out = right(func, args, kwargs)
            return out.becomes(out.raw * 1.01)
        return args[0].becomes(_Wrong.apply(args[0].raw))

    monkeypatch.setitem(TABLE, F.gelu, off)
    with pytest.raises(ModelDiffers) as caught:
        sl.check_model(Small().eval(), RULES, [{"data": 1, "x": 2}], BATCH, inputs=INPUTS)
    made = caught.value.operands["made by"]
    assert "gelu(f64[4@data, 6, 16@x])" in made and "test_proof.py:" in made
    assert made.startswith("the gradient of") == (wrong == "gradient")
    first = "output differs" if wrong == "value" else "gradient of embed.weight differs"
    assert first in str(caught.value)
    assert isinstance(caught.value, AssertionError)


def test_a_loss_of_the_wrong_scale_is_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(y: Tensor) -> Tensor:
        return y.square().mean() * (1.0 if type(y) is Tensor else 2.0)

    with pytest.raises(ModelDiffers, match="no single operator"):
        sl.check_model(nn.Linear(4, 4), [("*", "...")], {"x": 2}, torch.randn(2, 4), loss=loss)


def case() -> dict[str, Any]:
    """What ``python -m shardlib check tests.checking.test_proof:case`` proves."""
    return {
        "module": Small(),
        "rules": RULES,
        "meshes": {"data": 2, "x": 2},
        "batch": BATCH,
        "inputs": INPUTS,
    }


def test_what_has_nothing_to_learn_is_compared_by_its_values() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    for model in (nn.ReLU(), frozen, nn.Sequential(nn.Dropout(), frozen)):
        rules = [("*", "...")] if list(model.parameters()) else []
        proof = sl.check_model(model, rules, {"x": 2}, torch.randn(4, 4))
        assert {k.removeprefix("train ") for k in proof.errors["x=2"]} == {"output", "loss"}


@dataclasses.dataclass
class Held:
    hidden: Tensor
    ids: Tensor
    more: Any = None


class Cache:
    """An object that no library of trees knows."""

    def __init__(self, *keys: Tensor) -> None:
        self.layers = [SimpleNamespace(keys=k) for k in keys]
        self.owner = self


class Returning(nn.Module):
    def __init__(self, form: str, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.form, self.scale = nn.Linear(4, 6), form, scale

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        z = y * (self.scale if isinstance(y, sl.ShardedTensor) else 1.0)
        out = {
            "dataclass": lambda: Held(y, y.argmax(-1), [z]),
            "mapping": lambda: UserDict(y=y, more=UserDict(z=z)),
            "namedtuple": lambda: namedtuple("Two", "y z")(y, z),
            "object": lambda: (y, Cache(y, z)),
            "function": lambda: (y, lambda: z),
        }
        return out[self.form]()


@pytest.mark.parametrize("form", ["dataclass", "mapping", "namedtuple", "object", "function"])
def test_every_tensor_of_any_output_object_is_compared(form: str) -> None:
    rules, x = [("*.weight", "x ."), ("*.bias", "x")], torch.randn(4, 4)
    assert sl.check_model(Returning(form).eval(), rules, {"x": 2}, x).left == {
        "function": ["output 1 (function)"],
        "object": ["output 1.owner (Cache)"],
    }.get(form, [])
    wrong = Returning(form, 1.0 + 1e-6).eval()
    path = {
        "dataclass": "more.0", "mapping": "more.z", "namedtuple": "z", "object": "1.layers.1.keys"
    }  # fmt: skip
    loss: Any = lambda out: torch.zeros((), dtype=torch.float64)  # noqa: E731
    if form == "function":  # it cannot be called here, which the table says
        proof = sl.check_model(wrong, rules, {"x": 2}, x, loss=loss)
        assert "not compared: output 1 (function)" in str(proof)
        return
    with pytest.raises(ModelDiffers, match=f"output {path[form]} differs by 1.0e-06"):
        sl.check_model(wrong, rules, {"x": 2}, x, loss=loss)


class Opaque(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        y = super().forward(input)
        return lambda: y


def test_a_proof_that_compares_nothing_fails() -> None:
    with pytest.raises(sl.ShardError, match="no tensor that can be compared"):
        sl.check_model(
            Opaque(4, 4), [("*", "...")], {"x": 2}, torch.randn(4, 4), loss=lambda f: f()
        )


class Half(nn.Linear):
    """Its loss is computed in less than its parameters, as those of transformers are."""

    def forward(self, input: Tensor) -> Any:
        y = super().forward(input).to(torch.bfloat16).float()
        return {"loss": F.mse_loss(y, torch.ones_like(y, dtype=torch.float32))}


def test_lower_precision_inside_is_computed_in_fp64() -> None:
    rules = [("weight", "x ."), ("bias", "x")]
    proof = sl.check_model(Half(8, 8), rules, {"x": 2}, torch.randn(4, 8))
    assert proof.raised == ["to to bfloat16", "float to float32", "ones_like to float32"]
    assert max(proof.errors["x=2"].values()) < 1e-12
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("recipe", ["megatron1d", "cube3d"])
def test_a_model_of_transformers_is_proved_with_its_cache_and_its_loss(recipe: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.randint(32, (8, 6))
    batch = {"input_ids": ids, "labels": ids}
    model = transformers.LlamaForCausalLM(config).eval()
    rules: Any = getattr(sl.recipes, recipe)
    proof = sl.check_model(model, rules, {"x": 2, "y": 2, "z": 2}, batch, steps=2)
    assert set(proof.errors["x=2 y=2 z=2"]) == {"output", "loss", "gradient", "norm", "step"}
    assert max(proof.errors["x=2 y=2 z=2"].values()) < 1e-10
    assert not proof.left and proof.raised

    def bent(model: Any, mesh: Any) -> Any:  # the logits alone are wrong
        model.lm_head.register_forward_hook(lambda m, given, out: out * (1 + 1e-6 * sharded(out)))
        return rules(model, mesh)

    def sharded(x: Any) -> bool:
        return isinstance(x, sl.ShardedTensor)

    with pytest.raises(ModelDiffers, match="output logits differs by 1\\.0e-06"):
        sl.check_model(model, bent, {"x": 2, "y": 2, "z": 2}, {"input_ids": ids})


@pytest.mark.parametrize("order", [{}, {"per_rank": 2, "schedule": "zbv"}], ids=["1f1b", "zbv"])
def test_a_module_in_stages_is_compared_with_one_device(order: dict[str, Any]) -> None:
    model, ids = Small(), torch.arange(24).reshape(4, 6) % 12
    blocks = ["embed", "blocks.0", "blocks.1", "head"]
    stages = sl.Stages("pipe", blocks=blocks, **order)
    batch = {"ids": ids, "labels": ids}
    meshes = [{"pipe": 2}, {"pipe": 2, "data": 2}]
    proof = sl.check_model(model, [("*", "...")], meshes, batch, stages=stages)
    for row in proof.errors.values():
        assert len(row) >= 10 and max(row.values()) < 1e-12


class Doubled(nn.Linear):
    """Another value where it is sharded."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (2 if isinstance(x, sl.ShardedTensor) else 1)


def test_a_module_that_differs_in_stages_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4))
    stages = sl.Stages("pipe")
    with pytest.raises(ModelDiffers, match="differs"):
        sl.check_model(model, [("*", "...")], {"pipe": 2}, torch.ones(4, 4), stages=stages)
