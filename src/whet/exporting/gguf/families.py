"""Model families in GGUF: llama.cpp's name and hyperparameters of each, and how it stores their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.compat.transformers_private import rope_frequencies
from whet.core.errors import WhetError

_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "phi3": "phi3",
    "gemma3_text": "gemma3", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""model_type of transformers → architecture of llama.cpp."""
READ_BY_TRANSFORMERS = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose files transformers loads back correctly; the others need llama.cpp."""
_HAS_WINDOW = ("gemma3", "gpt-oss")
"""Architectures for which llama.cpp computes a sliding window."""
_OPTIONAL_BIASES = ("llama", "gpt-oss")
"""Architectures whose biases are optional; qwen2 always has those that it has."""
_ROPE_TYPES = {"phi3": ("default", "linear", "longrope"), "gpt-oss": ("default", "yarn")}
_OTHER_ROPE_TYPES = ("default", "linear", "llama3")
_VISION = ("vision_tower", "multi_modal_projector", "vision_model", "visual")
_CONVERTER = "Use --to merged, and llama.cpp's own converter on that folder"


def text_config(config: Any) -> Any:
    """The config of the language model, also of an image-text model."""
    return config.get_text_config()


def require_family(config: Any, has_llama_cpp: bool) -> str:
    """llama.cpp's architecture for this model; a WhetError that says why there is none."""
    kind = config.model_type
    known = _ARCHITECTURES.get(kind)
    if known is None:
        raise WhetError(
            f"--to gguf: whet cannot write {kind} models as GGUF, only {', '.join(_ARCHITECTURES)}. {_CONVERTER}"
        )
    if kind not in READ_BY_TRANSFORMERS and not has_llama_cpp:
        raise WhetError(
            f"--to gguf: a {kind} file is verified with llama.cpp, and the package cyllama is not installed. pip "
            "install 'whet[export]'"
        )
    biased = next((name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)), None)
    if biased is not None and known != "qwen2" and (known not in _OPTIONAL_BIASES or not has_llama_cpp):
        raise WhetError(
            f"--to gguf: this {kind} model has biases ({biased}), which cannot be verified in a GGUF of the "
            f"architecture {known} here. {_CONVERTER}"
        )
    rope, allowed = rope_parameters(config)["rope_type"], _ROPE_TYPES.get(known, _OTHER_ROPE_TYPES)
    if rope not in allowed:
        raise WhetError(
            f"--to gguf: this model has the RoPE type {rope}, and whet writes {', '.join(allowed)} for {kind}. "
            f"{_CONVERTER}"
        )
    if unfit := _unfit_setting(config, known):
        raise WhetError(
            f"--to gguf: this {kind} model has {unfit}, which llama.cpp does not support for the architecture {known}. "
            "Use --to merged"
        )
    return known


def _unfit_setting(config: Any, architecture: str) -> str | None:
    """A setting that llama.cpp assumes to be another."""
    if architecture == "gemma3":
        scale, head = config.query_pre_attn_scalar, head_dim(config)
        assumed = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == 62 else head
        if scale != assumed:
            return f"query_pre_attn_scalar = {scale} instead of {assumed}"
        if _window_period(config) is None:
            return "layers with a sliding window in no regular pattern"
    if architecture == "gpt-oss" and (_window_period(config) is None or not _has_full_attention(config)):
        return "layers with a sliding window in no regular pattern"
    if architecture == "qwen3moe":
        if not config.norm_topk_prob:
            return "norm_topk_prob = false"
        if config.mlp_only_layers or config.decoder_sparse_step != 1:
            return "layers without experts"
    return None


def context_length(config: Any, architecture: str) -> int:
    """The positions for which llama.cpp computes what the model was trained to: where it knows no sliding window, those
    that see everything before them."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    longest = int(config.max_position_embeddings)
    return longest if window is None or _computes_window(config, architecture) else min(longest, int(window))


def family_notes(config: Any, architecture: str) -> list[str]:
    """Where llama.cpp computes otherwise, in words for the user."""
    notes = []
    if context_length(config, architecture) < config.max_position_embeddings:
        notes.append(
            f"llama.cpp has no sliding window for {config.model_type}: the file's context is the window, "
            f"{context_length(config, architecture):,} tokens, within which both compute the same"
        )
    rope = rope_parameters(config)
    if rope["rope_type"] == "longrope":
        notes.append(
            "llama.cpp uses the RoPE factors for long texts as soon as its context is longer than "
            f"{_original_context(config, rope):,} tokens, the trained model only when the text is"
        )
    return notes


def _computes_window(config: Any, architecture: str) -> bool:
    """llama.cpp cannot run a model in which every layer has a window."""
    return architecture in _HAS_WINDOW and _has_full_attention(config)


def _has_full_attention(config: Any) -> bool:
    return "full_attention" in config.layer_types


def rope_parameters(config: Any) -> dict[str, Any]:
    """Those of layers with full attention, where layers differ and some have it."""
    found = config.rope_parameters or {}
    if "full_attention" in found:
        found = found["full_attention" if _has_full_attention(config) else "sliding_attention"]
    return {"rope_type": "default", **found}


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary_dim(config: Any) -> int:
    return int(head_dim(config) * rope_parameters(config).get("partial_rotary_factor", 1.0))


def _window_period(config: Any) -> int | None:
    """n if every n-th layer has full attention and the others a window; None if there is no such number."""
    full = [kind == "full_attention" for kind in config.layer_types]
    period = full.index(True) + 1 if True in full else len(full) + 1
    regular = [(i + 1) % period == 0 for i in range(len(full))]
    return period if full == regular else None


def add_hyperparameters(writer: Any, config: Any, architecture: str) -> None:
    """Write the keys that llama.cpp reads for this architecture."""
    rope, head = rope_parameters(config), head_dim(config)
    writer.add_context_length(context_length(config, architecture))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)
    if architecture in ("llama", "phi3", "gpt-oss"):
        writer.add_rope_dimension_count(_rotary_dim(config))
    if architecture in ("qwen3moe", "gpt-oss"):
        experts = config.num_experts if architecture == "qwen3moe" else config.num_local_experts
        width = config.moe_intermediate_size if architecture == "qwen3moe" else config.intermediate_size
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(width)
    if _computes_window(config, architecture):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(_window_period(config))
        if architecture == "gemma3":
            writer.add_rope_freq_base_swa(float(config.rope_parameters["sliding_attention"]["rope_theta"]))
    if architecture == "gemma3" and config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "phi3":
        writer.add_sliding_window(0)
    _add_rope_scaling(writer, config, rope)


def _add_rope_scaling(writer: Any, config: Any, rope: dict[str, Any]) -> None:
    from gguf import RopeScalingType

    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(_original_context(config, rope))
    elif rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(_original_context(config, rope))
        writer.add_rope_scaling_attn_factors(_longrope_attention_factor(config, rope))


def _original_context(config: Any, rope: dict[str, Any]) -> int:
    """Before it was extended by RoPE scaling."""
    return int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)


def _longrope_attention_factor(config: Any, rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = _original_context(config, rope)
    factor = rope.get("factor") or config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def rope_tensors(config: Any) -> dict[str, Tensor]:
    """Divisors of each RoPE frequency, which llama.cpp reads as tensors."""
    rope = rope_parameters(config)
    if rope["rope_type"] == "llama3":
        head = head_dim(config)
        plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32) / head))
        return {"rope_freqs.weight": (plain / rope_frequencies(config, "llama3")).to(torch.float32)}
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
            for length in ("long", "short")
        }
    return {}


@dataclass(frozen=True, slots=True)
class _Transformation:
    """How a weight becomes tensors of the file."""

    parts: Sequence[str]
    """Their names, as gguf translates them."""
    split: Callable[[Tensor], Sequence[Tensor]] = lambda weight: [weight]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]


class GGUFLayout:
    """How llama.cpp stores the weights of a model: their names there, and the same numbers in another order."""

    def __init__(self, config: Any, architecture: str) -> None:
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

        arch = next(key for key in MODEL_ARCH if MODEL_ARCH_NAMES[key] == architecture)
        self._names = get_tensor_name_map(arch, config.num_hidden_layers)
        self._architecture = architecture
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def split(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """A weight of the model, by the names of its parts in the file; nothing for the parts of an image encoder.
        Works for meta tensors, too."""
        found = self._transformation(name)
        if found is None:
            return {}
        return dict(zip(map(self._gguf_name, found.parts), found.split(value), strict=True))

    def join(self, name: str, read: Callable[[str], Tensor]) -> Tensor | None:
        """The weight again, from its parts in a file; None for the parts of an image encoder."""
        found = self._transformation(name)
        return None if found is None else found.join([read(self._gguf_name(part)) for part in found.parts])

    def _gguf_name(self, name: str) -> str:
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise WhetError(f"--to gguf: GGUF has no name for this model's weight {name}. Use --to merged")
        return str(found)

    def _transformation(self, name: str) -> _Transformation | None:
        if any(part in name for part in _VISION):
            return None
        name = _language_model_name(name)
        module = name.split(".")[-2]
        if self._architecture == "llama" and module in self._heads:
            heads = self._heads[module]
            return _Transformation(
                [name], lambda w: [permute_rope(w, heads)], lambda tensors: unpermute_rope(tensors[0], heads)
            )
        if self._architecture == "gemma3" and name.endswith("norm.weight"):  # it multiplies by 1 + weight
            return _Transformation([name], lambda w: [w + 1], lambda tensors: tensors[0] - 1)
        if name.endswith("self_attn.sinks"):
            return _Transformation([f"{name}.weight"])
        return self._experts_transformation(name) if ".experts." in name else _Transformation([name])

    def _experts_transformation(self, name: str) -> _Transformation:
        """gpt-oss stacks matrices transposed and alternates gate and up; the others have gate above up."""
        is_bias = name.endswith("_bias")
        stem, key = name.removesuffix("_bias"), "bias" if is_bias else "weight"
        interleaved = self._architecture == "gpt-oss"
        rows = -1 if is_bias else -2

        def turned(w: Tensor) -> Tensor:
            return w.transpose(-1, -2) if interleaved and not is_bias else w

        def split(w: Tensor) -> Sequence[Tensor]:
            w = turned(w)
            return w.unflatten(rows, (-1, 2)).unbind(rows) if interleaved else w.chunk(2, rows)

        def join(halves: Sequence[Tensor]) -> Tensor:
            tensors = list(halves)
            whole = torch.stack(tensors, rows).flatten(rows - 1, rows) if interleaved else torch.cat(tensors, rows)
            return turned(whole)

        if not stem.endswith("gate_up_proj"):
            return _Transformation([f"{stem}.{key}"], lambda w: [turned(w)], lambda tensors: turned(tensors[0]))
        outer = stem.removesuffix("gate_up_proj")
        return _Transformation([f"{outer}gate_proj.{key}", f"{outer}up_proj.{key}"], split, join)


def _language_model_name(name: str) -> str:
    """A weight's name in the language model alone, also of an image-text model."""
    return name.replace("model.language_model.", "model.").replace("language_model.model.", "model.")


def permute_rope(weight: Tensor, heads: int) -> Tensor:
    """For a Llama, llama.cpp rotates adjacent elements of queries and keys, transformers elements half a head apart."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute_rope(weight: Tensor, heads: int) -> Tensor:
    """The inverse of permute_rope."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
