"""Files and settings of a GPT-NeoX checkpoint: tensors by layer and tensor-parallel rank, YAML to transformers config.

gpt-neox has two layouts (tools/ckpts/convert_neox_to_hf.py): with pipeline parallelism a file for each layer and rank,
`layer_05-model_01-model_states.pt`; without it a file for each rank, `mp_rank_01_model_states.pt`, whose `module` names
tensors `sequential.5.…`. Layer 0 is the embedding, 1 is empty, then come L transformer layers, an empty one, the final
norm (L + 3) and the output (L + 4).
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.convert.foreign_checkpoint import load_pt, malformed_file_errors
from whet.core.errors import WhetError
from whet.core.yaml import read_yaml

MLP_UP_NAMES, MLP_DOWN_NAMES = ("mlp.linear1", "mlp.dense_h_to_4h"), ("mlp.linear2", "mlp.dense_4h_to_h", "mlp.w2")
"""Newer and older names of the MLP's matrices."""
INV_FREQ = "attention.rotary_emb.inv_freq"
"""Saved by some versions; not a weight."""
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SEQUENTIAL_NAME = re.compile(r"(?:.*\.)?sequential\.(\d+)\.(.+)")


class NeoXFiles:
    """The tensors of all ranks, by layer and name."""

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
                    f"{folder}: not a GPT-NeoX checkpoint, it has no layer_XX-model_YY-model_states.pt and no "
                    "mp_rank_XX_model_states.pt. Give the folder global_stepN, or its parent with the file latest"
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
                f"{self.folder}/{name}model_states.pt: missing, but files of rank {self.ranks - 1} exist. Copy the "
                "files of all ranks"
            )
        return [found[layer, rank] for rank in range(self.ranks)]

    def _read(self, path: Path) -> dict[tuple[int, str], Tensor]:
        """(layer, name) → tensor, memory-mapped."""
        content = load_pt(path)
        with malformed_file_errors(path, "the state dict"):
            if self._by_layer:
                layer = int(_LAYER_FILE.fullmatch(path.name)[1])  # type: ignore[index]
                return {(layer, name): value for name, value in content.items() if isinstance(value, Tensor)}
            found = {}
            for name, value in content["module"].items():
                match = _SEQUENTIAL_NAME.fullmatch(name)
                if match is None:
                    raise WhetError(f"{path}: the tensor {name} is not part of GPT-NeoX's `sequential` layers")
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
        """The tensor of each rank."""
        found = []
        for path in self.paths(layer):
            tensor = self._open(path).get((layer, name))
            if tensor is None:
                raise WhetError(
                    f"{path}: {name} of layer {layer} is missing, but other ranks have it. Copy the file again"
                )
            found.append(tensor)
        shapes = {tuple(tensor.shape) for tensor in found}
        if len(shapes) > 1:
            raise WhetError(f"{self.folder}: {name} of layer {layer} has different shapes on ranks: {sorted(shapes)}")
        return found

    def describe(self, layer: int, name: str) -> tuple[str, ...]:
        """FILE:NAME on each rank."""
        return tuple(
            f"{path.name}:{name if self._by_layer else f'sequential.{layer}.{name}'}" for path in self.paths(layer)
        )


def _newest_step_folder(folder: Path) -> Path:
    """The folder itself, or the subfolder that its file `latest` names."""
    if not folder.is_dir():
        raise WhetError(f"{folder}: no such folder")
    latest = folder / "latest"
    if latest.is_file():
        name = latest.read_text(errors="replace").strip()
        if "\0" in name or name in ("", "..") or Path(name).name != name or not (folder / name).is_dir():
            raise WhetError(
                f"{latest}: it names {name[:80]!r}, which is not a folder here. Give the folder of an existing step"
            )
        return folder / name
    return folder


def _numbered_files(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    found = ((pattern.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {tuple(map(int, match.groups())): path for match, path in found if match}


# Settings to transformers config. Sizes are read from the tensors, because the same settings mean different sizes in
# different versions of gpt-neox.

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "use_mup": (None, False),
    "gpt_j_tied": (None, False),
    "pos_emb": ("rotary",),
    "yarn": (None, False),
    "num_experts": (None, 0, 1),
    "sliding_window_width": (None,),
    "use_qk_layernorm": (None, False),
}
"""Settings that Llama and GPT-NeoX of transformers do not implement → values that leave the feature off."""

_NEOX_DEFAULTS = {"pos_emb": "learned", "activation": "gelu"}
"""Defaults of gpt-neox; all other settings are off."""


def read_settings(folder: Path, file: Path | None) -> dict[str, Any]:
    """The settings in the YAML file of --config, or in those beside the weights; dashes in keys become underscores."""
    files = [file] if file else sorted((folder / "configs").glob("*.y*ml"))
    if not files:
        raise WhetError(
            f"{folder}: the folder configs with the settings of the run is missing. Give the YAML file: --config FILE"
        )
    settings: dict[str, Any] = {}
    for each in files:
        content = read_yaml(each).plain()
        settings |= {key.replace("-", "_"): value for key, value in content.items()}
    return settings


def llama_config(settings: dict[str, Any], sizes: dict[str, Any], source: Path) -> Any:
    """The config of a model with RMSNorm and a gated MLP."""
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
    """The config of a model with LayerNorm and a plain MLP."""
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


def _common_fields(settings: dict[str, Any], sizes: dict[str, Any], source: Path) -> dict[str, Any]:
    length = settings.get("max_position_embeddings") or settings.get("seq_length")
    if length is None:
        raise WhetError(
            f"{source}: its settings have neither max_position_embeddings nor seq_length. Add one: --config FILE"
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
        raise WhetError(f"{source}: its settings lack {key}, an integer. Give the complete YAML file: --config FILE")
    return value


def _require_supported(settings: dict[str, Any], source: Path, **more: tuple[Any, ...]) -> None:
    for key, allowed in {**_SUPPORTED_VALUES, **more}.items():
        value = settings.get(key, _NEOX_DEFAULTS.get(key))
        if value not in allowed:
            supported = ", ".join(str(option) for option in allowed if option is not None)
            raise WhetError(
                f"{source}: {key} is {value!r} in its settings, which Llama and GPT-NeoX of transformers do not "
                f"implement (supported: {supported or 'unset'}). If it has no effect, give a config.json: --config FILE"
            )
