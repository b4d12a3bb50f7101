"""Unmodified modules, tiny: what people bring to a recipe.

``ZOO`` maps a name to a function that makes (module, inputs).  An
        input's name tells how it lies: a name in
``HIDDEN`` is [B, S, D], one in ``TOKENS`` [B, S], every
           other tensor is split along its batch alone.
Every module is in fp64; dropout is off.  transformers and peft are imported by those who need them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["HIDDEN", "PACKAGES", "TOKENS", "WHOLE", "ZOO", "Made"]

Made = tuple[nn.Module, dict[str, Tensor]]

ZOO: dict[str, Callable[[], Made]] = {}
"""name -> () -> (module, inputs by the names of forward's arguments)."""

PACKAGES: dict[str, str] = {}
"""name -> the package it needs beyond torch."""

TOKENS = {"input_ids", "decoder_input_ids", "attention_mask", "token_type_ids", "position_ids"}
HIDDEN = {"hidden", "src", "tgt"}
WHOLE = {"angles", "freqs"}

B, S, V, D, H = 8, 8, 64, 32, 4


def _seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _ids(rows: int = B, columns: int = S, seed: int = 0) -> Tensor:
    return torch.randint(3, V, (rows, columns), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- transformers

SMALL = {
    "hidden_size": D,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
}
TEXT = {
    "vocab_size": V,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SMALL, **OFF, "vocab_size": V, "max_position_embeddings": 32}
GPT2 = {
    "n_layer": 2, "n_embd": D, "n_head": H, "vocab_size": V, "n_positions": 32, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MOE = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "n_routed_experts": 4,
}
T5 = {
    "vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": H,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": V, "d_model": D, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
VIT = {**SMALL, **OFF, "image_size": 16, "patch_size": 4, "num_labels": 8}


def _text() -> dict[str, Tensor]:
    return {"input_ids": _ids()}


def _pair() -> dict[str, Tensor]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(seed=1)}


def _pixels(side: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": _seeded(B, 3, side, side)}


def _sound() -> dict[str, Tensor]:
    return {"input_values": _seeded(B, 320)}


def _hf(
    name: str, model: str, config: str, settings: dict[str, Any], inputs: Callable[[], dict[str, Tensor]] = _text,
    attention: str | None = None, experts: str | None = None,
) -> None:  # fmt: skip
    def make() -> Made:
        import transformers

        made = getattr(transformers, config)(**settings)
        if attention:
            made._attn_implementation = attention
        if experts:
            made._experts_implementation = experts
        return getattr(transformers, model)(made).eval(), inputs()

    ZOO[name], PACKAGES[name] = make, "transformers"


_hf("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2)
_hf("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", {
    **TEXT, "hidden_size": D, "num_layers": 2, "num_heads": H, "intermediate_size": 64,
    "window_size": 4,
    "attention_types": [[["global", "local"], 1]], "embed_dropout": 0.0, "attention_dropout": 0.0,
    "resid_dropout": 0.0,
})  # fmt: skip
_hf("gptj", "GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4})
_hf("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {**SMALL, **TEXT, "attention_dropout": 0.0})
_hf("opt", "OPTForCausalLM", "OPTConfig", {
    **SMALL, **TEXT, "ffn_dim": 64, "word_embed_proj_dim": D, "dropout": 0.0, "pad_token_id": 1,
})  # fmt: skip
_hf("bloom", "BloomForCausalLM", "BloomConfig", {
    "vocab_size": V, "hidden_size": D, "n_layer": 2, "n_head": H, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
})  # fmt: skip
FALCON = {**SMALL, **TEXT, "ffn_hidden_size": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
_hf("falcon 7b (one head of keys)", "FalconForCausalLM", "FalconConfig", {
    **FALCON, "multi_query": True, "parallel_attn": True, "bias": False,
})  # fmt: skip
_hf("falcon 40b (grouped)", "FalconForCausalLM", "FalconConfig", {
    **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": False,
})  # fmt: skip
_hf("falcon rw (alibi)", "FalconForCausalLM", "FalconConfig", {
    **FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
})  # fmt: skip
_hf(
    "phi",
    "PhiForCausalLM",
    "PhiConfig",
    {**SMALL, **TEXT, "partial_rotary_factor": 0.5, "resid_pdrop": 0.0},
)
_hf("phi3", "Phi3ForCausalLM", "Phi3Config", {**SMALL, **TEXT, "num_key_value_heads": 2})
_hf("llama", "LlamaForCausalLM", "LlamaConfig", {**SMALL, **TEXT, "num_key_value_heads": 4})
_hf(
    "llama (two heads of keys)",
    "LlamaForCausalLM",
    "LlamaConfig",
    {**SMALL, **TEXT, "num_key_value_heads": 2},
)
_hf(
    "llama (one head of keys)",
    "LlamaForCausalLM",
    "LlamaConfig",
    {**SMALL, **TEXT, "num_key_value_heads": 1},
)
_hf("llama (eager attention)", "LlamaForCausalLM", "LlamaConfig", {
    **SMALL, **TEXT, "num_key_value_heads": 2,
}, attention="eager")  # fmt: skip
_hf("mistral", "MistralForCausalLM", "MistralConfig", {
    **SMALL, **TEXT, "num_key_value_heads": 2, "sliding_window": 4,
})  # fmt: skip
_hf("qwen2", "Qwen2ForCausalLM", "Qwen2Config", {**SMALL, **TEXT, "num_key_value_heads": 2})
_hf(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3Config",
    {**SMALL, **TEXT, "num_key_value_heads": 2, "head_dim": 8},
)
_hf(
    "gemma",
    "GemmaForCausalLM",
    "GemmaConfig",
    {**SMALL, **TEXT, "num_key_value_heads": 2, "head_dim": 8},
)
_hf("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {
    **SMALL, **TEXT, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
    "query_pre_attn_scalar": 8,
})  # fmt: skip
_hf("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {
    **SMALL, **TEXT, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
    "query_pre_attn_scalar": 8,
})  # fmt: skip
_hf("olmo", "OlmoForCausalLM", "OlmoConfig", {**SMALL, **TEXT})
_hf("olmo2", "Olmo2ForCausalLM", "Olmo2Config", {**SMALL, **TEXT, "num_key_value_heads": 2})
_hf(
    "stablelm", "StableLmForCausalLM", "StableLmConfig", {**SMALL, **TEXT, "num_key_value_heads": 2}
)
_hf("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", {
    **SMALL, **TEXT, "num_key_value_heads": 2, "residual_dropout": 0.0, "embedding_dropout": 0.0,
})  # fmt: skip
_hf("cohere", "CohereForCausalLM", "CohereConfig", {**SMALL, **TEXT, "num_key_value_heads": 2})
_hf("glm4", "Glm4ForCausalLM", "Glm4Config", {
    **SMALL, **TEXT, "num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.5,
})  # fmt: skip
for _experts in ("eager", "batched_mm", "grouped_mm"):
    _hf(f"mixtral ({_experts})", "MixtralForCausalLM", "MixtralConfig", {
        **SMALL, **TEXT, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    }, experts=_experts)  # fmt: skip
    _hf(f"qwen3_moe ({_experts})", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        **SMALL, **TEXT, **MOE, "num_key_value_heads": 2, "head_dim": 8,
    }, experts=_experts)  # fmt: skip
    _hf(f"gpt_oss ({_experts})", "GptOssForCausalLM", "GptOssConfig", {
        **SMALL, **TEXT, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }, experts=_experts)  # fmt: skip
    _hf(f"deepseek_v3 ({_experts})", "DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **SMALL, **TEXT, **MOE, "num_key_value_heads": H, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    }, experts=_experts)  # fmt: skip
_hf("mamba", "MambaForCausalLM", "MambaConfig", {
    **TEXT, "hidden_size": D, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4,
    "use_cache": False,
})  # fmt: skip
_hf("mamba2", "Mamba2ForCausalLM", "Mamba2Config", {
    **TEXT, "hidden_size": D, "state_size": 4, "num_hidden_layers": 2, "head_dim": 8,
    "num_heads": 8, "n_groups": 2,
    "chunk_size": 4, "use_cache": False,
})  # fmt: skip
_hf("bert", "BertForMaskedLM", "BertConfig", BERT)
_hf("bert (classes)", "BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 4})
_hf("roberta", "RobertaForMaskedLM", "RobertaConfig", {**BERT, "pad_token_id": 1})
_hf("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", {
    "vocab_size": V, "dim": D, "hidden_dim": 64, "n_layers": 2, "n_heads": H,
    "max_position_embeddings": 32,
    "dropout": 0.0, "attention_dropout": 0.0,
})  # fmt: skip
_hf("albert", "AlbertForMaskedLM", "AlbertConfig", {**BERT, "embedding_size": 16})
_hf("electra", "ElectraForMaskedLM", "ElectraConfig", {**BERT, "embedding_size": 16})
_hf("deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config", {
    **BERT, "relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
})  # fmt: skip
_hf("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", {
    **SMALL, **TEXT, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4,
})  # fmt: skip
_hf("t5", "T5ForConditionalGeneration", "T5Config", T5, _pair)
_hf("bart", "BartForConditionalGeneration", "BartConfig", BART, _pair)
_hf("mbart", "MBartForConditionalGeneration", "MBartConfig", BART, _pair)
_hf("marian", "MarianMTModel", "MarianConfig", BART, _pair)
_hf("vit", "ViTForImageClassification", "ViTConfig", VIT, _pixels)
_hf("deit", "DeiTForImageClassification", "DeiTConfig", VIT, _pixels)
_hf("dinov2", "Dinov2ForImageClassification", "Dinov2Config", VIT, _pixels)
_hf("swin", "SwinForImageClassification", "SwinConfig", {
    **OFF, "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4, "num_labels": 8, "drop_path_rate": 0.0,
}, _pixels)  # fmt: skip
_hf("convnext", "ConvNextForImageClassification", "ConvNextConfig", {
    "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": 8, "image_size": 16,
}, _pixels)  # fmt: skip
_hf("segformer", "SegformerForImageClassification", "SegformerConfig", {
    **OFF, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
    "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
    "num_labels": 8,
    "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0,
}, _pixels)  # fmt: skip
_hf("resnet", "ResNetForImageClassification", "ResNetConfig", {
    "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 8,
    "layer_type": "basic",
}, _pixels)  # fmt: skip


def _towers() -> dict[str, Tensor]:
    ids = _ids()
    ids[:, -1] = 1
    return {"input_ids": ids, "pixel_values": _seeded(B, 3, 16, 16)}


def _clip(name: str, model: str, config: str, **more: Any) -> None:
    text = {**SMALL, **TEXT, "projection_dim": 16, "pad_token_id": 1}
    _hf(name, model, config, {
        "text_config": text,
        "vision_config": {**SMALL, "image_size": 16, "patch_size": 4, "projection_dim": 16},
        **more,
    }, _towers)  # fmt: skip


_clip("clip", "CLIPModel", "CLIPConfig", projection_dim=16)
_clip("siglip", "SiglipModel", "SiglipConfig")
_hf("wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {
    **SMALL, "vocab_size": V, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0, "layerdrop": 0.0, "conv_dim": (16, 16), "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16, "num_labels": 4, "final_dropout": 0.0,
}, _sound)  # fmt: skip
_hf("whisper", "WhisperForConditionalGeneration", "WhisperConfig", {
    **BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32,
    "attention_dropout": 0.0,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}, lambda: {"input_features": _seeded(B, 8, 16), "decoder_input_ids": _ids()})  # fmt: skip


# ---------------------------------------------------------------- peft


def _adapted(name: str, base: str, kind: str, dora: bool) -> None:
    def make() -> Made:
        import peft

        module, inputs = ZOO[base]()
        task = {"gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}.get(base)
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            use_dora=dora,
            target_modules=kind.split(),
            task_type=task,
            init_lora_weights=False,
        )
        return peft.get_peft_model(module, config).eval(), inputs  # type: ignore[arg-type, return-value]

    ZOO[name], PACKAGES[name] = make, "peft"


for _base, _targets in {
    "llama": "q_proj v_proj o_proj down_proj",
    "gpt2": "c_attn c_proj",
    "bert": "query value dense",
    "t5": "q v wo",
    "vit": "q_proj v_proj fc1 fc2",
}.items():
    _adapted(f"{_base} + LoRA", _base, _targets, False)
    _adapted(f"{_base} + DoRA", _base, _targets, True)


# ---------------------------------------------------------------- written in torch


def _own(make: Callable[[], Made]) -> Callable[[], Made]:
    ZOO[make.__name__.removeprefix("_").replace("_", " ")] = make
    return make


def _hidden() -> dict[str, Tensor]:
    return {"hidden": _seeded(B, S, D)}


class _MHA(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, H, batch_first=True)
        self.weights = weights

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        out, weights = self.attention(x, x, x, need_weights=self.weights)
        return hidden + out + (weights.sum(-1, keepdim=True) if self.weights else 0)


ZOO["nn.MultiheadAttention"] = lambda: (_MHA(False), _hidden())
ZOO["nn.MultiheadAttention (weights)"] = lambda: (_MHA(True), _hidden())


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(D, H, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, V)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids)))


ZOO["nn.TransformerEncoder"] = lambda: (_Encoder(), _text())


class _Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(D, H, 1, 1, 64, dropout=0.0, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=tgt.dtype)
        return self.transformer(src, tgt, tgt_mask=mask, tgt_is_causal=True)


ZOO["nn.Transformer"] = lambda: (
    _Seq2Seq(),
    {"src": _seeded(B, S, D), "tgt": _seeded(B, S, D, seed=1)},
)


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.cells = kind(D, D, num_layers=2, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(input_ids))[0])


ZOO["nn.LSTM"] = lambda: (_Recurrent(nn.LSTM), _text())
ZOO["nn.GRU"] = lambda: (_Recurrent(nn.GRU), _text())


@_own
def _conv1d_net() -> Made:
    return nn.Sequential(
        nn.Conv1d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.Conv1d(16, 16, 3, padding=1, groups=2),
        nn.BatchNorm1d(16), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 8),
    ).eval(), {"input": _seeded(B, 8, 16)}  # fmt: skip


class _Residual(nn.Module):
    """As in torchvision's ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(_Residual(16, 16, 1), _Residual(16, 32, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(32, 8)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(pixel_values))))
        return self.fc(torch.flatten(self.avgpool(self.layer1(x)), 1))


ZOO["ResNet (evaluating)"] = lambda: (_ResNet().eval(), _pixels())
ZOO["ResNet (training)"] = lambda: (_ResNet().train(), _pixels())


class _UNet(nn.Module):
    """Residual convolutions with a time embedding, attention
    over pixels, down and up, as diffusion uses.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.norm3 = nn.GroupNorm(4, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.ConvTranspose2d(width, width, 4, 2, 1)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)
        self.width = width

    def forward(self, pixel_values: Tensor, steps: Tensor) -> Tensor:
        half = self.width // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=pixel_values.dtype) / half)
        angles = steps[:, None] * freqs
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.enter(pixel_values)
        h = self.conv1(F.silu(self.norm1(x))) + time[:, :, None, None]
        skip = x + self.conv2(F.silu(self.norm2(h)))
        x = self.down(skip)
        b, c, height, width = x.shape
        q, k, v = self.qkv(self.norm3(x).flatten(2).transpose(1, 2)).chunk(3, -1)
        split = [t.reshape(b, height * width, 2, c // 2).transpose(1, 2) for t in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*split).transpose(1, 2).reshape(b, height * width, c)
        x = x + self.out(mixed).transpose(1, 2).reshape(b, c, height, width)
        return self.leave(torch.cat([self.up(x), skip], 1))


ZOO["diffusion UNet block"] = lambda: (
    _UNet(),
    {"pixel_values": _seeded(B, 3, 8, 8), "steps": _seeded(B).abs() * 9},
)


class _DiT(nn.Module):
    """A diffusion transformer's block with adaptive norms (six modulations of one Linear)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(D, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 64), nn.GELU(approximate="tanh"), nn.Linear(64, D))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        b, s, _ = hidden.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x = self.norm1(hidden) * (1 + scale1[:, None]) + shift1[:, None]
        q, k, v = self.qkv(x).reshape(b, s, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, D)
        hidden = hidden + gate1[:, None] * self.proj(x)
        x = self.norm2(hidden) * (1 + scale2[:, None]) + shift2[:, None]
        return hidden + gate2[:, None] * self.mlp(x)


ZOO["DiT block"] = lambda: (_DiT(), {**_hidden(), "condition": _seeded(B, D, seed=1)})


class _Lucid(nn.Module):
    """In the manner of vit-pytorch and its kin: einops, fused to_qkv, normalised q and k, GEGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ff_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.to_qkv = nn.Linear(D, 3 * D, bias=False)
        self.to_out = nn.Linear(D, D, bias=False)
        self.scale = nn.Parameter(torch.ones(D // H) * 2)
        self.ff_in, self.ff_out = nn.Linear(D, 128), nn.Linear(64, D)

    def forward(self, hidden: Tensor) -> Tensor:
        from einops import rearrange

        q, k, v = self.to_qkv(self.norm(hidden)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=H) for t in (q, k, v))
        q, k = F.normalize(q, dim=-1) * self.scale, F.normalize(k, dim=-1) * self.scale
        weights = torch.einsum("b h i d, b h j d -> b h i j", q, k).softmax(-1)
        mixed = torch.einsum("b h i j, b h j d -> b h i d", weights, v)
        x = hidden + self.to_out(rearrange(mixed, "b h n d -> b n (h d)"))
        value, gate = self.ff_in(self.ff_norm(x)).chunk(2, dim=-1)
        return x + self.ff_out(value * F.gelu(gate))


ZOO["lucidrains-style block"] = lambda: (_Lucid(), _hidden())


class _Einops(nn.Module):
    """A vision model of einops layers and functions alone."""

    def __init__(self) -> None:
        super().__init__()
        from einops.layers.torch import Rearrange, Reduce

        self.patches = Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=4, q=4)
        self.embed, self.norm = nn.Linear(48, D), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 64), nn.Linear(64, D)
        self.pool, self.head = Reduce("b n d -> b d", "mean"), nn.Linear(D, 8)

    def forward(self, pixel_values: Tensor) -> Tensor:
        from einops import repeat

        x = self.embed(self.patches(pixel_values))
        x = x + repeat(x.mean(1), "b d -> b n d", n=x.shape[1])
        return self.head(self.pool(x + self.down(F.gelu(self.up(self.norm(x))))))


ZOO["einops model"] = lambda: (_Einops(), _pixels())


class _Rotary(nn.Module):
    """Attention with Llama 1's rotary embedding: pairs viewed as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        b, s, _ = hidden.shape
        step = D // H
        freqs = 1.0 / 10000 ** (torch.arange(0, step, 2, dtype=hidden.dtype) / step)
        angles = torch.outer(torch.arange(s, dtype=hidden.dtype), freqs)
        turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        q, k, v = (w(hidden).view(b, s, H, step) for w in (self.wq, self.wk, self.wv))

        def rotated(t: Tensor) -> Tensor:
            pairs = torch.view_as_complex(t.reshape(b, s, H, step // 2, 2))
            return torch.view_as_real(pairs * turn).flatten(3)

        q, k, v = (t.transpose(1, 2) for t in (rotated(q), rotated(k), v))
        return hidden + self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


ZOO["complex RoPE attention"] = lambda: (_Rotary(), _hidden())


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(V, D, mode="mean")
        self.fc1, self.fc2 = nn.Linear(D, 64), nn.Linear(64, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(self.embed(input_ids))))


ZOO["EmbeddingBag classifier"] = lambda: (_Bag(), _text())


class _Mixer(nn.Module):
    def __init__(self, patches: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, D, 4, 4)
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(D) for _ in range(3))
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.head = nn.Linear(D, 8)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(self.norm(x).mean(1))


ZOO["MLP-Mixer"] = lambda: (_Mixer(), _pixels())


class _Blocks(nn.Module):
    """Pre-norm blocks whose MLP is an nn.Sequential, as most people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.LayerNorm(D),
                "mlp": nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, D)),
            })
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(D, V)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            parts: Any = block
            x = x + parts["mlp"](parts["norm"](x))
        return self.head(x)


ZOO["blocks of nn.Sequential"] = lambda: (_Blocks(), _text())


class _Experts(nn.Module):
    """Every expert runs on every token; a mask of the two best weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 64), nn.SiLU(), nn.Linear(64, D)) for _ in range(4)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.router(hidden).softmax(-1)
        best = scores.topk(2, dim=-1).indices
        weights = scores * torch.zeros_like(scores).scatter(-1, best, 1.0)
        weights = weights / weights.sum(-1, keepdim=True)
        return hidden + torch.stack(
            [e(hidden) * weights[..., i, None] for i, e in enumerate(self.experts)]
        ).sum(0)


ZOO["experts (masked)"] = lambda: (_Experts(), _hidden())


class _Windows(nn.Module):
    """Relative position bias by a table and a buffer of
    indices; a causal buffer; masked_fill in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.table = nn.Parameter(torch.randn(2 * S - 1, H) * 0.02)
        place = torch.arange(S)
        self.register_buffer("index", place[:, None] - place[None] + S - 1)
        self.register_buffer("past", torch.tril(torch.ones(S, S, dtype=torch.bool)))

    def forward(self, hidden: Tensor) -> Tensor:
        b, s, _ = hidden.shape
        index: Any = self.index
        past: Any = self.past
        q, k, v = (
            t.view(b, s, H, D // H).transpose(1, 2) for t in self.qkv(hidden).split(D, dim=2)
        )
        bias = self.table[index.view(-1)].view(s, s, H).permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // H) + bias[None]
        scores = scores.masked_fill(past[None, None, :s, :s] == 0, float("-inf"))
        mixed = scores.softmax(-1) @ v
        return hidden + self.proj(mixed.transpose(1, 2).contiguous().view(b, s, D))


ZOO["relative position bias"] = lambda: (_Windows(), _hidden())
