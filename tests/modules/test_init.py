"""Values drawn on shards: one set for every layout and mesh,
spread as the modules' own code spreads them.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModel,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    ViTConfig,
)

import shardlib as sl
from shardlib.errors import ShardError, UnknownParameter

SMALL = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)


class Parts(nn.Module):
    """Every kind: own parameter and buffer, ties, a zeroed row, statistics, packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.embed = nn.Embedding(12, 8, padding_idx=3)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.norm, self.attend, self.conv = (
            nn.BatchNorm1d(8),
            nn.MultiheadAttention(8, 2),
            nn.Conv1d(8, 8, 3),
        )
        self.rnn = nn.LSTM(8, 8)
        self.register_buffer("steps", torch.arange(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x) * self.scale) + self.steps


MODELS: dict[str, Any] = {
    "parts": Parts,
    "llama": lambda: AutoModel.from_config(
        LlamaConfig(vocab_size=64, num_key_value_heads=2, pad_token_id=0, **SMALL)
    ),
    "gpt2": lambda: AutoModel.from_config(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
    ),
    "bert": lambda: AutoModel.from_config(BertConfig(vocab_size=64, **SMALL)),
    "vit": lambda: AutoModel.from_config(ViTConfig(image_size=32, patch_size=8, **SMALL)),
}
FILL = {"parts": {"scale": nn.init.ones_, "steps": torch.arange(8)}}


def rules(model: nn.Module, split: str) -> list[tuple[str, str]]:
    """``split`` where every split dimension divides by 4, whole elsewhere."""
    lay = sl.Layout.parse(split)
    fits = [
        (n, p.ndim >= len(lay.dims) and all(p.shape[i] % 4 == 0 for i in (0, -1)))
        for n, p in model.named_parameters()
    ]
    return [(n, split if fit else "...") for n, fit in fits]


def initialised(name: str, split: str, seed: int | None = 5) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = MODELS[name]()
    apply, params = sl.init(model, rules(model, split), seed, fill=FILL.get(name))
    assert all(p.is_meta for p in model.parameters())
    return {n: sl.unshard(t).detach() for n, t in {**params, **apply.buffers}.items()}


@pytest.mark.parametrize("name", MODELS)
def test_values_are_the_same_on_every_mesh_and_as_the_constructor_spreads_them(name: str) -> None:
    with sl.simulate(x=1):
        want = initialised(name, "...")
    for axes, split in (({"x": 2}, "x ..."), ({"x": 2, "y": 2}, "x ... y"), ({"x": 4}, "... x")):
        with sl.simulate(**axes):
            got = initialised(name, split)
        assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    torch.manual_seed(0)
    dense = MODELS[name]()
    for n, b in dense.named_buffers():
        assert torch.equal(b, want[n]), n
    for n, p in dense.named_parameters():
        if p.std() == 0 or p.numel() < 64:
            assert (p.std() == 0) == (want[n].std() == 0) and (
                p.std() != 0 or torch.equal(p, want[n])
            ), n
        else:
            assert abs(want[n].mean() - p.mean()) < 6 * p.std() / math.sqrt(p.numel()), n
            assert 0.75 < want[n].std() / p.std() < 1.33, n


def everything() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(sl.current_mesh().device_mesh.get_rank())  # type: ignore[union-attr]
    return [initialised(n, "x ... y") for n in ("parts", "llama")]


def test_real_ranks_draw_what_simulated_ranks_draw(pool: Any) -> None:
    with sl.simulate(x=2, y=2):
        want = [initialised(n, "x ... y") for n in ("parts", "llama")]
    for got in pool.run(everything, x=2, y=2):
        for a, b in zip(got, want, strict=True):
            assert all(torch.equal(a[n], b[n]) for n in b)


class Ends(nn.Module):
    """Own parameters that the first and the last stage read, filled by one function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def reset_parameters(self) -> None:
        for p in self.first, self.blocks[2].weight, self.last:
            nn.init.normal_(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first
        for block in self.blocks:
            x = block(x)
        return x * self.last


STAGED: dict[str, Any] = {
    "ends": Ends,
    "llama": lambda: AutoModel.from_config(
        LlamaConfig(vocab_size=64, pad_token_id=0, **(SMALL | {"num_hidden_layers": 4}))
    ),
    # a block fills the weights of its submodules
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    ),
}
FILLS: dict[str, Any] = {"ends": {"blocks.*.bias": nn.init.normal_}}


def in_stages(name: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """Values here, the bytes of all blocks made meanwhile, and a draw afterwards."""
    with torch.device("meta"):
        model = STAGED[name]()
    stages = sl.Stages("pipe") if "pipe" in sl.current_mesh() else None
    rules = [("*", "... x")]
    apply, params = sl.init(model, rules, None, fill=FILLS.get(name), stages=stages)
    values = {n: sl.unshard(t).detach() for n, t in {**params, **apply.buffers}.items()}
    after = torch.rand_like(sl.shard(torch.zeros(4), "...", apply.mesh)).raw.flatten()[0].item()
    held = sum(p.raw.nbytes for p in params.values())
    return values, held, after


@pytest.mark.parametrize("name", STAGED)
def test_a_rank_draws_the_values_of_its_stages_alone(name: str, pool: Any) -> None:
    torch.manual_seed(0)
    with sl.simulate(x=1):
        want, every, after = in_stages(name)
    torch.manual_seed(0)
    with sl.simulate(pipe=2, x=2):
        simulated, _, drawn = in_stages(name)
    assert drawn == after and simulated.keys() == want.keys()
    assert all(torch.equal(simulated[n], x) for n, x in want.items())
    found = pool.run(in_stages, name, pipe=2, x=2)
    for values, held, drawn in found:
        assert drawn == after and held < every / 2
        assert all(torch.equal(x, want[n]) for n, x in values.items())
    assert {n for values, *_ in found for n in values} == want.keys()
    tied = want["transformer.wte.weight"].nbytes if name == "gpt2" else 0
    assert sum(held for _, held, _ in found) == every + tied


class _Largest(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def largest() -> tuple[int, int]:
    """(largest allocation, a block of the largest
    parameter) while layers of 16 MiB are initialised.
    """
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 2048), nn.Embedding(2048, 2048, padding_idx=0))
    with _Largest() as seen:
        _, params = sl.init(model, [("*.weight", "x y"), ("*.bias", "x")], 0)
    return seen.bytes, max(p.raw.nbytes for p in params.values())


def test_no_tensor_is_whole_anywhere(pool: Any) -> None:
    for most, block in pool.run(largest, x=2, y=2):
        assert block == 2048 * 2048 * 4 // 4 and most < 1.01 * block


def test_a_seed_of_its_own_leaves_the_stream_alone() -> None:
    with sl.simulate(x=2):
        torch.manual_seed(0)
        before = sl.random.get_state(), torch.get_rng_state()
        initialised("parts", "x ...")
        assert sl.random.get_state() == before[0] and torch.equal(torch.get_rng_state(), before[1])
        a, b = initialised("parts", "x ...", None), initialised("parts", "x ...", None)
        torch.manual_seed(0)
        c = initialised("parts", "x ...", None)
        assert not torch.equal(a["a.weight"], b["a.weight"]) and torch.equal(
            a["a.weight"], c["a.weight"]
        )


def test_a_padded_parameter_draws_its_true_elements() -> None:
    with torch.device("meta"):
        model = nn.Embedding(10, 6, padding_idx=2)
    with sl.simulate(x=1):
        want = sl.unshard(sl.init(model, [("*", "...")], 1)[1]["weight"])
    for axes, split in (
        ({"x": 4}, "x ."),
        ({"x": 3, "y": 2}, "y x"),
        ({"x": 4}, ". x"),
        ({"x": 7}, "x ."),
    ):
        with sl.simulate(**axes):
            assert torch.equal(
                sl.unshard(sl.init(model, [("*", split)], 1, pad=True)[1]["weight"]), want
            )
    assert (want[2] == 0).all() and (want[[0, 1, 3]] != 0).all()


class Hooked(nn.Module):
    """As minGPT: one function for all submodules, through ``.data``, that leaves the norms out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            m.weight.data.normal_(0.0, 100.0)
            m.bias.data.zero_()


def test_a_models_own_function_has_the_last_word() -> None:
    with torch.device("meta"):
        model = Hooked()
    with sl.simulate(x=2):
        _, params = sl.init(model, [("up.weight", "x ."), ("*", "...")], 0)
        assert (
            sl.unshard(params["up.weight"]).std() > 50
            and (sl.unshard(params["up.bias"]) == 0).all()
        )
        assert (sl.unshard(params["norm.weight"]) == 1).all()


def test_what_has_no_value_is_named_and_the_fix_runs() -> None:
    with torch.device("meta"):
        model = Parts()
    with sl.simulate(x=2):
        apply, params = sl.parallelize(model, [("*", "...")])
        with pytest.raises(ShardError, match="nothing gave a value to its buffer"):
            apply(params, torch.ones(4, 8))
        with pytest.raises(UnknownParameter, match="scale, steps") as caught:
            sl.init(model, [("*", "...")])
        fix = caught.value.fix.replace("fill={", "fill={'steps': torch.arange(8), ")
        apply, params = eval(
            fix, {"sl": sl, "torch": torch, "module": model, "rules": [("*", "...")]}
        )
        assert apply(params, torch.ones(4, 8)).shape == (4, 8)
        with pytest.raises(UnknownParameter, match="matches no parameter or buffer"):
            sl.init(model, [("*", "...")], fill={"nothing": nn.init.zeros_})


def test_a_real_module_keeps_what_only_its_constructor_gives() -> None:
    model = Parts()
    with sl.simulate(x=2):
        apply, params = sl.init(model, [("*", "...")], 0)
        assert (sl.unshard(params["scale"]) == 1).all()
        assert torch.equal(sl.unshard(apply.buffers["steps"]), torch.arange(8))
        assert not torch.equal(sl.unshard(params["a.weight"]), model.a.weight)
