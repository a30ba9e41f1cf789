"""A tiny random model of every causal architecture that transformers knows, from its default configuration.

Sizes are set by the names that configurations use for them; `_OWN_SETTINGS` has what an architecture needs beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import auto_class, prepare_float64_

VOCABULARY = 96
_VOCABULARY_SIZES = "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size"
_POSITIONS = (
    "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length max_target_positions"
)
_SIZES: dict[int, str] = {
    0: "pad_token_id num_nextn_predict_layers num_mtp_layers",
    1: "bos_token_id num_experts_per_tok_group n_shared_experts num_shared_experts moe_num_shared_experts topk_group "
    "n_group num_expert_group mamba_n_groups n_groups moe_layer_start_index mamba_ngroups n_langs",
    2: "eos_token_id num_hidden_layers n_layer n_layers num_layers num_key_value_heads num_experts_per_tok moe_topk "
    "moe_k num_experts_per_token decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_kv_heads "
    "linear_num_key_heads mamba_n_heads mamba_num_heads num_query_groups index_n_heads",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads state_size "
    "num_decoder_attention_heads num_encoder_attention_heads attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads mamba_d_state ssm_state_size "
    "mamba_dt_rank time_step_rank prompt_length",
    6: "sliding_window window_size sliding_window_size local_attention attention_window_size",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "d_head dim_head kv_channels index_head_dim index_topk mamba_head_dim mamba_headdim rotary_dim chunk_size "
    "mamba_chunk_size block_size prompt_mid_dim",
    10: "v_head_dim",
    16: "moe_intermediate_size q_lora_rank kv_lora_rank shared_expert_intermediate_size shared_intermediate_size "
    "hidden_size_per_layer_input qk_head_dim expert_ffn_hidden_size moe_shared_expert_intermediate_size "
    "router_hidden_size laurel_rank pronunciation_embed_dim shape_embed_dim mamba_d_head adapter_rank",
    32: "hidden_size n_embd d_model emb_dim embedding_size dim word_embed_proj_dim lru_width input_embedding_size "
    "output_embedding_size attention_hidden_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff dff d_inner feed_forward_size "
    "intermediate_size_mlp ffn_hidden_size dense_intermediate_size n_inner ffn_hidden_size",
    64: _POSITIONS,
    VOCABULARY: _VOCABULARY_SIZES,
}  # fmt: skip
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_MAX_LAYERS = 4
_SET_IF_NONE = (
    "head_dim", "n_routed_experts", "linear_num_key_heads", "linear_num_value_heads", "moe_intermediate_size",
    "num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group", "n_shared_experts",
)  # fmt: skip
_IS_DECODER = {"is_decoder": True}
_TWO_WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4 = {**_TWO_WINDOWS, "per_layer_config": {"1": {"head_dim": 16}}}
_OWN_SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
         "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"],
        _IS_DECODER,
    ),
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1},
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_hidden_layers": 2},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "gemma3n_text": {
        **_TWO_WINDOWS, "num_kv_shared_layers": 0, "intermediate_size": [48, 48],
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"attention_hidden_size": 64, "num_key_value_heads": 4},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_model(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A random model of a `model_type`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(".temp"):  # Zaya multiplies its keys by it; at its initial zero, q and k have no effect
            nn.init.ones_(parameter)
    return prepare_float64_(model, dtype).eval()


def save_tiny_model(
    kind: str, folder: Path, dtype: torch.dtype = torch.float32, tokenizer: Any = None, layers: int | None = None
) -> str:
    """A folder with a random model of a `model_type` and a tokenizer, that of builtin:tiny by default; returns
    `model.path=FOLDER`."""
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(builtin_folder("builtin:tiny"))
    config = tiny_config(kind) if layers is None else tiny_config_of_layers(kind, layers)
    text = config.get_text_config()
    for names, size in ((_VOCABULARY_SIZES, len(tokenizer)), (_POSITIONS, 1024)):
        for name in names.split():
            if isinstance(getattr(text, name, None), int):
                setattr(text, name, size)
    torch.manual_seed(0)
    auto_class(config).from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"model.path={folder}"


def tiny_config(kind: str) -> Any:
    """The default configuration of a `model_type`, with small sizes."""
    own = _OWN_SETTINGS.get(kind, {})
    try:
        default = AutoConfig.for_model(kind)
    except Exception:
        default = AutoConfig.for_model(kind, **own)
    return AutoConfig.for_model(kind, **{**_small_settings(default), **own})


def tiny_config_of_layers(kind: str, layers: int) -> Any:
    """`tiny_config` with so many layers, their kinds (with or without a window) as the architecture has them."""
    small = tiny_config(kind).to_dict()
    text = small.get("text_config") or small
    text["num_hidden_layers"] = layers
    for name in ("layer_types", "no_rope_layers"):
        text.pop(name, None)
    return AutoConfig.for_model(kind, **{key: value for key, value in small.items() if key != "model_type"})


def _small_settings(config: Any) -> dict[str, Any]:
    settings = config.to_dict()
    nested = [
        name
        for name, value in settings.items()
        if isinstance(value, dict) and hasattr(getattr(config, name), "to_dict")
    ]
    small = {
        name: _SIZE_OF[name]
        for name, value in settings.items()
        if name in _SIZE_OF and (isinstance(value, int) or name in _SET_IF_NONE) and not isinstance(value, bool)
    }
    if "kv_lora_rank" in small:  # multi-head latent attention has one key head for each query head
        small["num_key_value_heads"] = small["num_attention_heads"]
    small |= {name: _small_settings(getattr(config, name)) for name in nested}
    return small | _small_layers(settings)


def _small_layers(settings: dict[str, Any]) -> dict[str, Any]:
    """Layer by layer settings for one layer of each kind."""
    layers = next(
        (settings[n] for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if settings.get(n)), 0
    )
    lists = {n: v for n, v in settings.items() if isinstance(v, list) and len(v) == layers and layers > 1}
    if not lists:
        return {}
    first: dict[Any, int] = {}
    for index in range(layers):
        first.setdefault(tuple(str(values[index]) for values in lists.values()), index)
    chosen = sorted(first.values())[:_MAX_LAYERS]
    chosen = chosen if len(chosen) > 1 else [0, 1]
    return {n: [v[index] for index in chosen] for n, v in lists.items()} | {"num_hidden_layers": len(chosen)}
