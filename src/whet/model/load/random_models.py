"""Models with random weights: `random:NAME` for a known shape, `random:FOLDER` or `random:FILE.json` for any other.

They serve to measure speed and memory without a download. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.core.errors import WhetError, first_line
from whet.core.files import resolve_path, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RANDOM_PREFIX = "random:"

_LLAMA_3_CONFIG: dict[str, Any] = {
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
MODEL_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": ("llama", _LLAMA_3_CONFIG | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    }),
    "llama-8b": ("llama", _LLAMA_3_CONFIG | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    }),
    "llama-70b": ("llama", _LLAMA_3_CONFIG | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    }),
    "qwen3-8b": ("qwen3", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "qwen3-30b-a3b": ("qwen3_moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "gpt-oss-20b": ("gpt_oss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "attention_bias": True, "tie_word_embeddings": False, "vocab_size": 201088,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": False,
        },
    }),
    "smollm-135m": ("llama", {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }),
}  # fmt: skip
"""By name: transformers' model type and its configuration."""


def is_random_model(path: str) -> bool:
    """Whether model.path is `random:…`."""
    return path.startswith(RANDOM_PREFIX)


def random_model_config(path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """transformers' configuration for a `random:` path."""
    from transformers import AutoConfig

    from whet.model.load.weight_files import register_model_code  # imports this module

    name = path.removeprefix(RANDOM_PREFIX)
    if name in MODEL_SHAPES:
        kind, settings = MODEL_SHAPES[name]
        return AutoConfig.for_model(kind, **settings)
    file = _config_file(path)
    register_model_code(file.parent)
    try:
        config = AutoConfig.from_pretrained(file, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises errors of many kinds
        first = first_line(error)
        raise WhetError(f"model.path: {path}: transformers rejects this configuration: {first}") from None
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # random weights are not quantized
    return config


def config_folder(path: str) -> Path | None:
    """The folder of a `random:` path, which may hold a tokenizer; None for a known shape."""
    name = path.removeprefix(RANDOM_PREFIX)
    return None if name in MODEL_SHAPES else _config_file(path).parent


def resolve_random_path(path: str) -> str:
    """A `random:` path with its folder or file made absolute, so that it works from any directory."""
    place = user_path(path.removeprefix(RANDOM_PREFIX))
    known = not is_random_model(path) or path.removeprefix(RANDOM_PREFIX) in MODEL_SHAPES or not place.exists()
    return path if known else f"{RANDOM_PREFIX}{resolve_path(place)}"


def _config_file(path: str) -> Path:
    name = path.removeprefix(RANDOM_PREFIX)
    place = user_path(name)
    file = place / "config.json" if place.is_dir() else place
    if name and file.is_file():
        return file
    nearest = sorted(MODEL_SHAPES, key=lambda known: difflib.SequenceMatcher(None, name, known).ratio(), reverse=True)
    raise WhetError(
        f"model.path: {path}: there is no such shape, no folder with a config.json and no such file in {Path.cwd()}. "
        f"Known shapes: {', '.join(RANDOM_PREFIX + known for known in nearest)}"
    )
