"""Files and settings of a GPT-NeoX checkpoint: tensors by layer and tensor-parallel rank, YAML to transformers config."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.convert.foreign_checkpoint import load_pt, malformed_file_errors
from whet.core.errors import WhetError, first_line
from whet.core.files import read_json
from whet.core.yaml import read_yaml

# The files of a GPT-NeoX checkpoint: every tensor of a layer, from every tensor-parallel rank.
#
# Two layouts, as gpt-neox's tools/ckpts/convert_neox_to_hf.py describes them: with a pipeline, a file for each layer and
# rank (`layer_05-model_01-model_states.pt`); without one, a file for each rank (`mp_rank_01_model_states.pt`) whose
# `module` names tensors `sequential.5.…`. Layer 0 is the embedding, 1 nothing, then L transformer layers, nothing, the
# last norm (L + 3) and the output (L + 4).

MLP_UP_NAMES, MLP_DOWN_NAMES = ("mlp.linear1", "mlp.dense_h_to_4h"), ("mlp.linear2", "mlp.dense_4h_to_h", "mlp.w2")
"""The MLP's matrices by their newer and older names."""
INV_FREQ = "attention.rotary_emb.inv_freq"
"""Kept by some versions, and no weight."""
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SEQUENTIAL_NAME = re.compile(r"(?:.*\.)?sequential\.(\d+)\.(.+)")


class NeoXFiles:
    """By layer and name, the tensors of all ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = _newest_step_folder(folder)
        layers = _numbered_files(self.folder, _LAYER_FILE)
        self._by_layer = bool(layers)
        if layers:
            self.ranks = 1 + max(rank for _, rank in layers)
            self._paths = {layer: self._of_ranks(layers, layer) for layer in sorted({layer for layer, _ in layers})}
            self.files = [path for paths in self._paths.values() for path in paths]
        else:
            ranks = {(0, rank): path for (rank,), path in _numbered_files(self.folder, _RANK_FILE).items()}
            if not ranks:
                raise WhetError(
                    f"{folder}: no files layer_XX-model_YY-model_states.pt or mp_rank_XX_model_states.pt there: it is "
                    "no checkpoint of GPT-NeoX. Give the folder global_stepN, or the one above it with the file latest"
                )
            self.ranks = 1 + max(rank for _, rank in ranks)
            self.files = self._of_ranks(ranks, 0)
        self._open = lru_cache(maxsize=self.ranks if self._by_layer else None)(self._read)
        self.keys = self._all_keys()

    def _of_ranks(self, found: dict[Any, Path], layer: int) -> list[Path]:
        missing = [rank for rank in range(self.ranks) if (layer, rank) not in found]
        if missing:
            name = f"layer_{layer:02d}-model_{missing[0]:02d}-" if self._by_layer else f"mp_rank_{missing[0]:02d}_"
            raise WhetError(
                f"{self.folder}/{name}model_states.pt: missing, though there are files of rank {self.ranks - 1}. Copy "
                "the files of all ranks"
            )
        return [found[layer, rank] for rank in range(self.ranks)]

    def _read(self, path: Path) -> dict[tuple[int, str], Tensor]:
        """(layer, name) → tensor; mapped, so this costs no memory."""
        content = load_pt(path)
        with malformed_file_errors(path, "the dictionary of tensors"):
            if self._by_layer:
                layer = int(_LAYER_FILE.fullmatch(path.name)[1])  # type: ignore[index]
                return {(layer, name): value for name, value in content.items() if isinstance(value, Tensor)}
            found = {}
            for name, value in content["module"].items():
                match = _SEQUENTIAL_NAME.fullmatch(name)
                if match is None:
                    raise WhetError(f"{path}: the tensor {name} has no place in GPT-NeoX's sequence of layers")
                if isinstance(value, Tensor):
                    found[int(match[1]), match[2]] = value
            return found

    def _all_keys(self) -> dict[int, set[str]]:
        keys: dict[int, set[str]] = {}
        for path in self.files:
            for layer, name in self._open(path):
                keys.setdefault(layer, set()).add(name)
        return keys

    def paths(self, layer: int) -> list[Path]:
        return self._paths[layer] if self._by_layer else self.files

    def tensors(self, layer: int, name: str) -> list[Tensor]:
        """Of each rank."""
        found = []
        for path in self.paths(layer):
            tensor = self._open(path).get((layer, name))
            if tensor is None:
                raise WhetError(
                    f"{path}: the tensor {name} of layer {layer} is missing there, though other ranks have it"
                )
            found.append(tensor)
        shapes = {tuple(tensor.shape) for tensor in found}
        if len(shapes) > 1:
            raise WhetError(f"{self.folder}: {name} of layer {layer} has other shapes on other ranks: {sorted(shapes)}")
        return found

    def describe(self, layer: int, name: str) -> tuple[str, ...]:
        return tuple(
            f"{path.name}:{name if self._by_layer else f'sequential.{layer}.{name}'}" for path in self.paths(layer)
        )


def _newest_step_folder(folder: Path) -> Path:
    """A step's folder, or the one that `latest` names."""
    if not folder.is_dir():
        raise WhetError(f"{folder}: no such folder")
    latest = folder / "latest"
    if latest.is_file():
        inner = folder / latest.read_text(errors="replace").strip()
        if not inner.is_dir():
            raise WhetError(f"{latest}: it names {inner.name}, which is not there. Give the folder of a step that is")
        return inner
    return folder


def _numbered_files(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    found = ((pattern.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {tuple(map(int, match.groups())): path for match, path in found if match}


# The settings of a GPT-NeoX run as a transformers configuration. Sizes are read from the tensors: files called alike
# compute them differently from version to version.

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
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

_NEOX_DEFAULTS = {"pos_emb": "learned", "activation": "gelu"}
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

    _require_supported(settings, source, activation=("swiglu", "silu", "swish"))
    heads = _require_int(settings, "num_attention_heads", source)
    return LlamaConfig(
        **_common_fields(settings, sizes, source),
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

    _require_supported(settings, source, activation=("gelu",), num_kv_heads=(None, settings.get("num_attention_heads")))
    part = settings.get("rotary_pct", 1.0)
    rope = {"rope_type": "default", "rope_theta": float(settings.get("rotary_emb_base", 10000))}
    return GPTNeoXConfig(
        **_common_fields(settings, sizes, source),
        hidden_act="gelu_pytorch_tanh" if settings.get("bias_gelu_fusion") else "gelu",
        layer_norm_eps=settings.get("layernorm_epsilon", 1e-5),
        use_parallel_residual=bool(settings.get("gpt_j_residual", False)),
        attention_bias=sizes["attention_bias"],
        rope_parameters={**rope, "partial_rotary_factor": float(part)},
    )


def read_hf_config(file: Path) -> Any:
    """A transformers config.json, as it is."""
    from transformers import AutoConfig

    described = read_json(file)
    kind = described.get("model_type") if isinstance(described, dict) else None
    if kind is None:
        raise WhetError(f"--config {file}: no model_type in it, so it is no config.json of transformers")
    try:
        return AutoConfig.for_model(**described)
    except (ValueError, TypeError, KeyError) as error:
        first = first_line(error)
        raise WhetError(f"--config {file}: transformers does not take it: {first}") from None


def _common_fields(settings: dict[str, Any], sizes: dict[str, Any], source: Path) -> dict[str, Any]:
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
        "num_hidden_layers": _require_int(settings, "num_layers", source),
        "num_attention_heads": _require_int(settings, "num_attention_heads", source),
        "max_position_embeddings": int(length),
        "tie_word_embeddings": sizes["tied"],
    }


def _require_int(settings: dict[str, Any], key: str, source: Path) -> int:
    value = settings.get(key)
    if not isinstance(value, int):
        raise WhetError(f"{source}: its settings do not name {key}, a whole number. Give the YAML file: --config FILE")
    return value


def _require_supported(settings: dict[str, Any], source: Path, **more: tuple[Any, ...]) -> None:
    for key, allowed in {**_SUPPORTED_VALUES, **more}.items():
        value = settings.get(key, _NEOX_DEFAULTS.get(key))
        if value not in allowed:
            served = ", ".join(str(option) for option in allowed if option is not None)
            raise WhetError(
                f"{source}: {key} is {value!r} in its settings, which no model of transformers that whet imports to "
                f"computes ({served or 'none'} is served). If it does not matter, give a config.json: --config FILE"
            )
