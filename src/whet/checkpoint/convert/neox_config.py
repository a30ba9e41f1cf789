"""The settings of a GPT-NeoX run as a transformers configuration. Sizes are read from the tensors: files called alike
compute them differently from version to version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.core.files import read_json
from whet.core.yaml import read_yaml

_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_mup": (None, False),
    "gpt_j_tied": (None, False),
    "pos_emb": ("rotary",),
    "yarn": (None, False),
    "num_experts": (None, 0, 1),
    "sliding_window_width": (None,),
    "use_qk_layernorm": (None, False),
}
"""Settings that change what is computed in a way that neither Llama nor GPT-NeoX of transformers has, with what they
may be."""

_DEFAULTS = {"pos_emb": "learned", "activation": "gelu"}
"""What NeoX takes where these are not set; the others are off."""


def read_settings(folder: Path, file: Path | None) -> dict[str, Any]:
    """Of the YAML that --config names, or of those that NeoX keeps beside the weights; keys with underscores."""
    files = [file] if file else sorted((folder / "configs").glob("*.y*ml"))
    if not files:
        raise WhetError(
            f"{folder}: there is no folder configs with the settings of the run. Give the YAML file: --config FILE"
        )
    settings: dict[str, Any] = {}
    for each in files:
        content = read_yaml(each).plain()
        settings |= {key.replace("-", "_"): value for key, value in content.items()}
    return settings


def llama_config(settings: dict[str, Any], sizes: dict[str, Any], source: Path) -> Any:
    """For RMSNorm and a gated MLP."""
    from transformers import LlamaConfig

    _refuse(settings, source, activation=("swiglu", "silu", "swish"))
    heads = _number(settings, "num_attention_heads", source)
    return LlamaConfig(
        **_shared(settings, sizes, source),
        num_key_value_heads=settings.get("num_kv_heads") or heads,
        hidden_act="silu",
        rms_norm_eps=settings.get("rms_norm_epsilon", 1e-8),
        rope_parameters={"rope_type": "default", "rope_theta": float(settings.get("rotary_emb_base", 10000))},
        attention_bias=sizes["attention_bias"],
        mlp_bias=sizes["mlp_bias"],
    )


def neox_config(settings: dict[str, Any], sizes: dict[str, Any], source: Path) -> Any:
    """For LayerNorm and a plain MLP."""
    from transformers import GPTNeoXConfig

    _refuse(settings, source, activation=("gelu",), num_kv_heads=(None, settings.get("num_attention_heads")))
    part = settings.get("rotary_pct", 1.0)
    rope = {"rope_type": "default", "rope_theta": float(settings.get("rotary_emb_base", 10000))}
    return GPTNeoXConfig(
        **_shared(settings, sizes, source),
        hidden_act="gelu_pytorch_tanh" if settings.get("bias_gelu_fusion") else "gelu",
        layer_norm_eps=settings.get("layernorm_epsilon", 1e-5),
        use_parallel_residual=bool(settings.get("gpt_j_residual", False)),
        attention_bias=sizes["attention_bias"],
        rope_parameters={**rope, "partial_rotary_factor": float(part)},
    )


def given_config(file: Path) -> Any:
    """A transformers config.json, as it is."""
    from transformers import AutoConfig

    described = read_json(file)
    kind = described.get("model_type") if isinstance(described, dict) else None
    if kind is None:
        raise WhetError(f"--config {file}: no model_type in it, so it is no config.json of transformers")
    try:
        return AutoConfig.for_model(**described)
    except (ValueError, TypeError, KeyError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise WhetError(f"--config {file}: transformers does not take it: {first}") from None


def _shared(settings: dict[str, Any], sizes: dict[str, Any], source: Path) -> dict[str, Any]:
    length = settings.get("max_position_embeddings") or settings.get("seq_length")
    if length is None:
        raise WhetError(
            f"{source}: its settings name neither max_position_embeddings nor seq_length. Add one: --config"
        )
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # the tokenizer's, or unknown
    return {
        **ids,
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["width"],
        "intermediate_size": sizes["intermediate"],
        "num_hidden_layers": _number(settings, "num_layers", source),
        "num_attention_heads": _number(settings, "num_attention_heads", source),
        "max_position_embeddings": int(length),
        "tie_word_embeddings": sizes["tied"],
    }


def _number(settings: dict[str, Any], key: str, source: Path) -> int:
    value = settings.get(key)
    if not isinstance(value, int):
        raise WhetError(f"{source}: its settings do not name {key}, a whole number. Give the YAML file: --config FILE")
    return value


def _refuse(settings: dict[str, Any], source: Path, **more: tuple[Any, ...]) -> None:
    for key, allowed in {**_REFUSED, **more}.items():
        value = settings.get(key, _DEFAULTS.get(key))
        if value not in allowed:
            served = ", ".join(str(option) for option in allowed if option is not None)
            raise WhetError(
                f"{source}: {key} is {value!r} in its settings, which no model of transformers that whet imports to "
                f"computes ({served or 'none'} is served). If it does not matter, give a config.json: --config FILE"
            )
