"""Every text model of transformers, made small: classes that nobody here chose.

``made`` lists them from transformers' own tables, by type and class.  A configuration is shrunk by
the names of its settings; one that refuses this, or whose model stays large, is left out when it is
made.

    python -m benchmarks.models --classes          under three recipes
    python -m tests.pipeline.grid --classes --tolerance 1e-6    in two stages; many compute in fp32
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.zoo import Made

__all__ = ["LARGE", "made"]

TABLES = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
LARGE = 3_000_000
"""The most parameters that a model may have."""

SIZES: dict[int, str] = {
    0: "bos_token_id pad_token_id pad_token",
    1: "eos_token_id cls_token_id topk_group n_shared_experts num_shared_experts num_hidden_groups "
    "inner_group_num first_k_dense_replace",
    2: "num_hidden_layers num_key_value_heads n_layer num_layers num_experts_per_tok n_group "
    "decoder_start_token_id sep_token_id encoder_layers decoder_layers n_layers num_decoder_layers "
    "type_vocab_size n_groups mamba_n_groups linear_num_key_heads index_n_heads moe_k num_codebooks",
    3: "mask_token_id",
    4: "num_attention_heads n_head num_heads num_experts num_local_experts n_routed_experts n_heads "
    "encoder_attention_heads decoder_attention_heads sliding_window qk_rope_head_dim state_size "
    "time_step_rank ssm_state_size mamba_d_state chunk_size mamba_chunk_size attention_chunk_size "
    "linear_num_value_heads index_topk moe_num_experts rotary_dim",
    8: "head_dim qk_nope_head_dim v_head_dim d_kv mamba_n_heads mamba_d_head mamba_num_heads "
    "mamba_head_dim global_head_dim linear_key_head_dim linear_value_head_dim index_head_dim",
    12: "qk_head_dim",
    16: "moe_intermediate_size kv_lora_rank q_lora_rank embedding_size "
    "shared_expert_intermediate_size",
    32: "hidden_size n_embd d_model dim word_embed_proj_dim lru_width n_positions "
    "max_position_embeddings shared_intermediate_size",
    64: "vocab_size intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim "
    "ffn_hidden_size intermediate_dim d_inner",
}
"""Value -> the settings that take it, in the words of many configurations."""

DROPPED = ("dropout", "pdrop", "drop_rate", "drop_path_rate", "layerdrop")


def made() -> dict[str, Callable[[], Made]]:
    """List the models: type and class -> what makes the module and its inputs."""
    from transformers.models.auto import modeling_auto

    out: dict[str, Callable[[], Made]] = {}
    for table in TABLES:
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
        for kind, found in names.items():
            name = found if isinstance(found, str) else found[0]
            if not any(key.endswith(f" {name}") for key in out):
                out[f"{kind} {name}"] = partial(_make, name, "SEQ" in table)
    return out


def _make(name: str, pairs: bool) -> Made:
    import transformers

    model = getattr(transformers, name)
    config = _small(model.config_class)
    if any("expert" in key for key in vars(config)):
        # torch's grouped kernel takes no fp64
        config._experts_implementation = "eager"
    with torch.device("meta"):
        count = sum(p.numel() for p in model(config).parameters())
    if count > LARGE:
        raise ValueError(f"{name} has {count:,} parameters when it is small")
    drawn = torch.Generator().manual_seed(0)
    ids = ["input_ids", *(["decoder_input_ids"] if pairs else [])]
    return model(config).eval(), {n: torch.randint(4, 60, (8, 8), generator=drawn) for n in ids}


def _small(config: Any) -> Any:
    """Make a configuration of few, narrow layers, without dropout."""
    probe = config()
    known = {*vars(probe), *probe.attribute_map, *inspect.signature(config.__init__).parameters}
    how: dict[str, Any] = {
        name: size for size, names in SIZES.items() for name in names.split() if name in known
    }
    if "kv_lora_rank" in known:
        # latent attention has as many heads of keys, and sizes of its own
        how.pop("head_dim", None)
        how["num_key_value_heads"] = how["num_attention_heads"]
    for name, value in vars(probe).items():
        if isinstance(value, float) and any(part in name for part in DROPPED):
            how[name] = 0.0
        elif name == "layer_types" and isinstance(value, list):
            how[name] = (list(dict.fromkeys(value)) * 2)[:2]
    if "use_cache" in known:
        how["use_cache"] = False
    try:
        return config(**how)
    except Exception:
        return config(**{n: v for n, v in how.items() if n not in ("layer_types", "head_dim")})
