"""Models of transformers come from their files shard by shard, and go back; adapters too."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardlib as sl
from shardlib.errors import CheckpointError

transformers = pytest.importorskip("transformers")


def llama(tied: bool = True, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **changes
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=96)
    return transformers.GPT2LMHeadModel(config).eval()


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
    )
    return transformers.MixtralForCausalLM(config).eval()


def meta(model: Any) -> Any:
    with torch.device("meta"):
        return type(model)(model.config).eval()


IDS = torch.arange(12).reshape(2, 6)


def logits(apply: Any, params: Any) -> torch.Tensor:
    with torch.no_grad():
        return sl.unshard(apply(params, input_ids=IDS, use_cache=False).logits)


@pytest.mark.parametrize("make", [llama, lambda: llama(False), gpt2], ids=["tied", "apart", "gpt2"])
@pytest.mark.parametrize("recipe", ["megatron1d", "optimus2d"])
def test_a_model_comes_from_its_files_and_goes_back(make: Any, recipe: str, tmp_path: Path) -> None:
    dense = make()
    dense.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    mesh = {"x": 4} if recipe == "megatron1d" else {"x": 2, "y": 2}
    with sl.simulate(**mesh):
        model = meta(dense)
        rules = getattr(sl.recipes, recipe)(model)
        apply, params = sl.load_hf(tmp_path / "in", model, rules)
        held = dict(dense.named_parameters())
        assert params.keys() == held.keys()
        for n, p in held.items():
            assert torch.equal(sl.unshard(params[n]), p) and params[n].requires_grad
        assert sl.load_hf.bytes_read <= 1.1 * sum(p.raw.nbytes for p in params.values())  # type: ignore[attr-defined]
        with torch.no_grad():
            want = dense(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(logits(apply, params), want, rtol=1e-4, atol=1e-5)
        sl.save_hf(tmp_path / "out", params, dense, max_bytes=20_000)
    again = type(dense).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not again[1]["missing_keys"] and not again[1]["unexpected_keys"]
    for n, p in again[0].named_parameters():
        assert torch.equal(p, held[n])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        p.name for p in (tmp_path / "out").glob("*.safetensors")
    }


def test_experts_in_files_of_their_own_are_one_stack(tmp_path: Path) -> None:
    dense = mixtral()
    dense.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    names = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".experts.3.w1.weight" in n for n in names), "the files have one tensor per expert"
    with sl.simulate(x=2, y=2):
        rules = [("*.experts.*", "x ..."), ("*_proj.weight", "y x"), ("*", "...")]
        _, params = sl.load_hf(tmp_path / "in", meta(dense), rules)
        for n, p in dense.named_parameters():
            assert torch.equal(sl.unshard(params[n]), p), n
        sl.save_hf(tmp_path / "out", params, dense)
    again = type(dense).from_pretrained(tmp_path / "out")
    for n, p in again.named_parameters():
        assert torch.equal(p, dict(dense.named_parameters())[n])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_come_and_go(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = llama(False)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    dense = peft.get_peft_model(base, config)
    dense.save_pretrained(tmp_path / "adapter")
    held = dict(dense.named_parameters())
    with sl.simulate(x=2, y=2):
        with torch.device("meta"):
            blank = peft.get_peft_model(meta(llama(False)), config)
        rules = [
            ("*embed_tokens.weight", "x y"),
            ("*layers.0.*base_layer.weight", "y x"),
            ("*", "..."),
        ]
        _, params = sl.load_hf([tmp_path / "base", tmp_path / "adapter"], blank, rules)
        assert params.keys() == held.keys()
        assert all(torch.equal(sl.unshard(params[n]), p) for n, p in held.items())
        sl.save_hf(tmp_path / "out", params, dense)
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {
        "adapter_model.safetensors", "adapter_config.json",
    }  # fmt: skip
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("adapter", "out"))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    again = peft.PeftModel.from_pretrained(llama(False), tmp_path / "out")
    assert all(torch.equal(p, held[n]) for n, p in again.named_parameters())


def test_a_permutation_of_dimensions_is_asked_for(tmp_path: Path) -> None:
    """A Conv1D of GPT-2 has the matrix of a Linear transposed."""
    w = torch.arange(24.0).reshape(4, 6)
    save_file({"c.weight": w}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 6, bias=False))
    for mesh, layout in (({"x": 2}, "x ."), ({"x": 2}, ". x"), ({"x": 2, "y": 2}, "y x")):
        with sl.simulate(**mesh):
            rules = [("*", layout)]
            with pytest.raises(CheckpointError, match=r"\(1, 0\)\)\} reads it transposed"):
                sl.load_hf(tmp_path, module, rules, names={"0.weight": "c.weight"})
            names: Any = {"0.weight": ("c.weight", (1, 0))}
            _, params = sl.load_hf(tmp_path, module, rules, names=names)
            assert torch.equal(sl.unshard(params["0.weight"]), w.T)
            with pytest.raises(CheckpointError, match="no order"):
                sl.load_hf(tmp_path, module, rules, names={"0.weight": ("c.weight", (1, 1))})


def test_conversions_of_transformers_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut and transposed where a box can say it; the rest by transformers' own code."""
    loading = pytest.importorskip("transformers.core_model_loading")
    mapping = pytest.importorskip("transformers.conversion_mapping")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    dense = transformers.LlamaForCausalLM(config).eval()
    held = {n: t.detach().clone() for n, t in dense.state_dict().items()}
    interleave = loading.Interleave(0)
    converters = [
        loading.WeightConverter(
            "self_attn.qkv_proj.weight",
            [f"self_attn.{n}_proj.weight" for n in "qkv"],
            [loading.Chunk(0)],
        ),
        loading.WeightConverter(
            "mlp.down_t.weight", "mlp.down_proj.weight", [loading.Transpose(0, 1)]
        ),
        loading.WeightConverter(
            "mlp.both.weight",
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            [interleave, loading.Chunk(0)],
        ),
    ]
    files = {n: t for n, t in held.items() if "self_attn" not in n and "mlp" not in n}
    for i in range(2):
        layer = f"model.layers.{i}"
        files[f"{layer}.self_attn.o_proj.weight"] = held[f"{layer}.self_attn.o_proj.weight"]
        qkv = [held[f"{layer}.self_attn.{n}_proj.weight"] for n in "qkv"]
        files[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(qkv)
        files[f"{layer}.mlp.down_t.weight"] = held[f"{layer}.mlp.down_proj.weight"].T.contiguous()
        both = torch.cat([held[f"{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up")])
        mixed = interleave.reverse_op.convert({"x": [both]}, ["x"], ["x"])["x"]
        files[f"{layer}.mlp.both.weight"] = mixed
    save_file(files, tmp_path / "model.safetensors")
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda module: converters)
    for mesh in ({"x": 2}, {"x": 2, "y": 2}):
        with sl.simulate(**mesh):
            rules = [("*_proj.weight", "y x" if "y" in mesh else ". x"), ("*", "...")]
            _, params = sl.load_hf(tmp_path, meta(dense), rules)
            assert params.keys() == held.keys()
            assert all(torch.equal(sl.unshard(params[n]), x) for n, x in held.items())
    with sl.simulate(x=2), monkeypatch.context() as patch:
        patch.setattr(loading.Interleave, "convert", lambda *a, **k: 1 / 0)
        with pytest.raises(CheckpointError, match=r"gate_proj.*made by Interleave and Chunk"):
            sl.load_hf(tmp_path, meta(dense), [("*", "...")])


class Block(nn.Module):
    """A fused projection, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if hasattr(self, "table"):
            self.table.copy_(torch.arange(5.0))


def block_files(path: Path) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    files = {n: torch.randn(8, 8, generator=g) for n in ("q", "k", "v")}
    files |= {"bias": torch.randn(30, generator=g)}
    files |= {f"norm.{n}": t + 1 for n, t in nn.BatchNorm1d(4).state_dict().items()}
    path.mkdir()
    save_file(files, path / "model.safetensors")
    return files


def test_names_fuse_and_cut_and_buffers_are_restored(tmp_path: Path) -> None:
    files = block_files(tmp_path / "in")
    names = {"qkv.weight": ["q", "k", "v"], "qkv.bias": ("bias", slice(3, 27))}
    for device in ("meta", "cpu"):
        with torch.device(device):
            block = Block()
        before = {n: t.clone() for n, t in block.state_dict().items()}
        with sl.simulate(x=2, y=2):
            rules = [("qkv.weight", "(3 x) y"), ("qkv.bias", "(3 x)"), ("*", "...")]
            apply, params = sl.load_hf(tmp_path / "in", block, rules, names=names)
            fused = torch.cat([files[n] for n in "qkv"])
            assert torch.equal(sl.unshard(params["qkv.weight"]), fused)
            assert torch.equal(sl.unshard(params["qkv.bias"]), files["bias"][3:27])
            assert torch.equal(sl.unshard(apply.buffers["table"]), torch.arange(5.0))
            mean = sl.unshard(apply.buffers["norm.running_mean"])
            assert torch.equal(mean, files["norm.running_mean"])
        for n, t in block.state_dict().items():
            assert t.is_meta or torch.equal(t, before[n]), "the module is read, never changed"


def test_what_is_missing_is_named_or_drawn(tmp_path: Path) -> None:
    dense = llama(False)
    dense.save_pretrained(tmp_path / "in")
    held = load_file(tmp_path / "in" / "model.safetensors")
    del held["lm_head.weight"]
    save_file({**held, "spare": torch.ones(3)}, tmp_path / "in" / "model.safetensors")
    with sl.simulate(x=2):
        rules = [("*", "...")]
        with pytest.raises(CheckpointError, match=r"no file has 'lm_head.weight'"):
            sl.load_hf(tmp_path / "in", meta(dense), rules)
        with pytest.raises(CheckpointError, match=r"no place for 'spare'"):
            sl.load_hf(tmp_path / "in", meta(dense), rules, missing="init")
        apply, params = sl.load_hf(
            tmp_path / "in", meta(dense), rules, missing="init", extra="skip"
        )
        head = sl.unshard(params["lm_head.weight"])
        assert 0.01 < head.std() < 0.03 and logits(apply, params).isfinite().all()
        embed = sl.unshard(params["model.embed_tokens.weight"])
        assert torch.equal(embed, dense.get_parameter("model.embed_tokens.weight"))


def _in_stages(folder: str) -> tuple[dict[str, torch.Tensor], int, torch.Tensor]:
    """Values here, the bytes that were read for them, and the model's output."""
    stages = sl.Stages("pipe") if "pipe" in sl.current_mesh() else None
    torch.manual_seed(1)
    apply, params = sl.load_hf(
        folder, meta(llama()), [("*", "... x")], missing="init", stages=stages
    )
    values = {n: sl.unshard(t).detach() for n, t in {**params, **apply.buffers}.items()}
    return values, sl.load_hf.bytes_read, logits(apply, params)  # type: ignore[attr-defined]


def test_a_rank_reads_and_draws_the_values_of_its_stages_alone(pool: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    for lacking in "layers.0.self_attn.q_proj", "layers.1.mlp.up_proj":
        del held[f"model.{lacking}.weight"]
    save_file(held, tmp_path / "model.safetensors")
    with sl.simulate(x=2):
        want, whole, out = _in_stages(str(tmp_path))
    found = pool.run(_in_stages, str(tmp_path), pipe=2, x=2)
    for values, read, there in found:
        assert values and all(torch.equal(x, want[n]) for n, x in values.items())
        # half of the ranks' half, and tables that every rank reads
        assert read < 0.4 * whole
        torch.testing.assert_close(there, out, rtol=1e-5, atol=1e-5)
    assert {n for values, *_ in found for n in values} == want.keys()
    with sl.simulate(pipe=2, x=2):
        values, _, _ = _in_stages(str(tmp_path))
        assert all(torch.equal(x, want[n]) for n, x in values.items())


def test_a_cast_is_asked_for_and_padding_is_zero(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(21.0).reshape(7, 3).bfloat16()}, tmp_path / "one.safetensors")
    with torch.device("meta"):
        module = nn.Linear(3, 7, bias=False)
    with sl.simulate(x=4):
        rules = [("weight", "x .")]
        with pytest.raises(CheckpointError, match="BF16"):
            sl.load_hf(tmp_path / "one.safetensors", module, rules, pad=True)
        _, params = sl.load_hf(tmp_path / "one.safetensors", module, rules, pad=True, cast=True)
        weight = params["weight"]
        assert weight.dtype == torch.float32
        assert torch.equal(sl.unshard(weight).detach(), torch.arange(21.0).reshape(7, 3))
        assert weight.raw[-1, -1].count_nonzero() == 0


def test_directories_that_do_not_hold_together_are_refused(tmp_path: Path) -> None:
    dense = llama(False)
    dense.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    index = tmp_path / "in" / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    name, file = next(iter(said["weight_map"].items()))

    def refused(weight_map: Any, why: str) -> None:
        index.write_text(json.dumps({**said, "weight_map": weight_map}))
        with sl.simulate(x=2), pytest.raises(CheckpointError, match=why):
            sl.load_hf(tmp_path / "in", meta(dense), [("*", "...")])

    other = next(f for f in said["weight_map"].values() if f != file)
    refused({**said["weight_map"], name: other}, "which the index puts")
    refused({**said["weight_map"], "ghost": file}, "lacks 'ghost'")
    refused({**said["weight_map"], name: "../secret.safetensors"}, "no file of this directory")
    refused({**said["weight_map"], name: "/etc/passwd"}, "no file of this directory")
    refused([1], "no weight_map")
    with sl.simulate(x=2), pytest.raises(CheckpointError, match=r"holds no model\.safetensors"):
        sl.load_hf(tmp_path, meta(dense), [("*", "...")])


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4, 4), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with sl.simulate(x=2), pytest.raises(CheckpointError, match=r"'bias' has shape \[3\]"):
        sl.load_hf(tmp_path, nn.Linear(4, 4), [("*", "...")])


def both(path: str) -> list[Any]:
    dense = llama()
    model = meta(dense)
    apply, params = sl.load_hf(path + "/in", model, sl.recipes.optimus2d(model))
    same = all(torch.equal(sl.unshard(params[n]), p) for n, p in dense.named_parameters())
    sl.save_hf(path + "/out", params, dense, max_bytes=20_000)
    try:
        sl.load_hf(path + ("/in" if sl.axis_index("x") else "/none"), model, [("*", "...")])
        told = "ok"
    except CheckpointError as e:
        told = e.message
    return [same, logits(apply, params).sum().item(), told]


def test_four_processes_read_and_write_a_model(pool: Any, tmp_path: Path) -> None:
    dense = llama()
    dense.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    said = pool.run(both, str(tmp_path), x=2, y=2)
    assert said == [said[0]] * 4 and said[0][0]
    assert said[0][2].startswith("rank 0")
    again = type(dense).from_pretrained(tmp_path / "out")
    held = dict(dense.named_parameters())
    assert all(torch.equal(p, held[n]) for n, p in again.named_parameters())
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def _halves(path: str) -> list[Any]:
    """Save a model in bf16 with a tokenizer, and load what was written by its own configuration."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    dense = llama(tied=False)
    _, params = sl.parallelize(dense, [("*", "...")])
    halves = {n: p.detach().to(torch.bfloat16) for n, p in params.items()}
    sl.save_hf(path, halves, dense, tokenizer=tokenizer)
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    _, again = sl.load_hf(path, model, [("*", "...")])
    return [
        all(torch.equal(sl.unshard(again[n]), sl.unshard(p)) for n, p in halves.items()),
        str(config.dtype),
        transformers.AutoTokenizer.from_pretrained(path).get_vocab() == tokenizer.get_vocab(),
        str(dense.config.dtype) != "torch.bfloat16",
    ]


def test_the_configuration_says_the_dtype_that_was_saved(pool: Any, tmp_path: Path) -> None:
    with sl.simulate(x=2):
        assert _halves(str(tmp_path / "one")) == [True, "torch.bfloat16", True, True]
    for said in pool.run(_halves, str(tmp_path / "four"), x=2, y=2):
        assert said == [True, "torch.bfloat16", True, True]
