"""nanochat's checkpoints (karpathy/nanochat, nanochat/gpt.py and checkpoint_manager.py): names, sizes, the forward
pass, and the export to them.

`model_000650.pt` holds the tensors and `meta_000650.json` the sizes under `model_config`. Rows of embeddings and head
are padded to a multiple of 64; nanochat cuts the logits of padding rows off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.core.errors import WhetError, first_line
from whet.core.files import write_json
from whet.exporting.hf_folder import verify_tokenizer_and_stops, write_configs
from whet.exporting.spec import ExportFindings, ExportSpec
from whet.exporting.trained_model import MAX_POSITIONS
from whet.exporting.weight_comparison import compare_weights
from whet.model.load.weight_files import NANOCHAT_MODEL_TYPE

ROPE_THETA, LOGIT_SOFTCAP, EPS = 10_000.0, 15.0, 1e-6
_ROWS_MULTIPLE = 64
_TOP_LEVEL_NAMES = {
    "transformer.wte.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight",
    "resid_lambdas": "model.resid_lambdas", "x0_lambdas": "model.x0_lambdas",
}  # fmt: skip
_BLOCK_NAMES = {
    "attn.c_q": "self_attn.q_proj", "attn.c_k": "self_attn.k_proj", "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj", "attn.ve_gate": "self_attn.ve_gate", "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}  # fmt: skip
_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(\w+\.\w+)\.weight")
_VALUE_EMBEDDING = re.compile(r"value_embeds\.(\d+)\.weight")


def to_hf_name(name: str) -> str | None:
    """A tensor's name in transformers; None if whet's models have no such tensor."""
    block = _BLOCK.fullmatch(name)
    if _VALUE_EMBEDDING.fullmatch(name):
        return f"model.{name}"
    if block is None or block[2] not in _BLOCK_NAMES:
        return _TOP_LEVEL_NAMES.get(name)
    return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.weight"


def to_nanochat_name(name: str) -> str:
    """The inverse of `to_hf_name`."""
    for theirs, own in _TOP_LEVEL_NAMES.items():
        if name == own:
            return theirs
    to = name.replace("model.layers", "transformer.h").replace("model.value_embeds", "value_embeds")
    for theirs, own in _BLOCK_NAMES.items():
        to = to.replace(own, theirs)
    return to


def has_vocabulary_rows(name: str) -> bool:
    """Whether a tensor of nanochat has one row per token."""
    return name in ("transformer.wte.weight", "lm_head.weight") or _VALUE_EMBEDDING.fullmatch(name) is not None


def window_sizes(sizes: Mapping[str, Any]) -> list[int | None]:
    """For each layer how many tokens before a token it attends to; None: all. The pattern is repeated, and the last
    layer sees everything."""
    pattern = str(sizes.get("window_pattern", "L")).upper()
    if not pattern or set(pattern) - {"S", "L"}:
        raise KeyError(f"window_pattern is {pattern!r}, but whet knows S and L only")
    short, layers = sizes["sequence_len"] // 2, sizes["n_layer"]
    kinds = [pattern[number % len(pattern)] for number in range(layers - 1)] + ["L"]
    return [short if kind == "S" else None for kind in kinds]


@torch.inference_mode()
def nanochat_logits(tensors: Mapping[str, Tensor], sizes: Mapping[str, Any], ids: Sequence[int]) -> Tensor:
    """nanochat's forward pass in fp32, [T, V], from the tensors of a checkpoint, without transformers."""

    def product(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].float().T

    tokens, heads, width = torch.tensor(list(ids)), sizes["n_head"], sizes["n_embd"] // sizes["n_head"]
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    x = first = _rms_norm(tensors["transformer.wte.weight"][tokens].float())
    for number, window in enumerate(window_sizes(sizes)):
        block = f"transformer.h.{number}"
        if "resid_lambdas" in tensors:
            x = tensors["resid_lambdas"][number].float() * x + tensors["x0_lambdas"][number].float() * first
        normed = _rms_norm(x)
        q, k, v = (product(normed, f"{block}.attn.c_{side}").view(len(ids), -1, width) for side in ("q", "k", "v"))
        if f"value_embeds.{number}.weight" in tensors:
            gate_weight = tensors[f"{block}.attn.ve_gate.weight"].float()
            gate = 2 * torch.sigmoid(normed[:, : gate_weight.shape[1]] @ gate_weight.T)
            v = v + gate[..., None] * tensors[f"value_embeds.{number}.weight"][tokens].float().view_as(v)
        q, k = (_rms_norm(_apply_rotary(side.transpose(0, 1))) for side in (q, k))
        k, v = (side.repeat_interleave(heads // sizes["n_kv_head"], dim=0) for side in (k, v.transpose(0, 1)))
        hidden = (distance < 0) | (distance > (len(ids) if window is None else window))
        mixed = (q @ k.transpose(1, 2) / width**0.5).masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
        x = x + product(mixed.transpose(0, 1).reshape(len(ids), -1), f"{block}.attn.c_proj")
        inner = F.relu(product(_rms_norm(x), f"{block}.mlp.c_fc")).square()
        x = x + product(inner, f"{block}.mlp.c_proj")
    logits = product(_rms_norm(x), "lm_head")[:, : sizes["vocab_size"]]
    return LOGIT_SOFTCAP * torch.tanh(logits / LOGIT_SOFTCAP)


def _rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


def _apply_rotary(x: Tensor) -> Tensor:
    """Rotary positions with negative angles, on [heads, T, D]."""
    half = x.shape[-1] // 2
    inv_freq = ROPE_THETA ** (-torch.arange(half).float() / half)
    angle = torch.arange(x.shape[1]).float()[:, None] * inv_freq
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * angle.cos() + x2 * angle.sin(), x2 * angle.cos() - x1 * angle.sin()], dim=-1)


# The export.


class NanochatFormat:
    """`model_NNNNNN.pt` and `meta_NNNNNN.json`, and config and tokenizer of transformers in `huggingface`: nanochat has
    its own tokenizer, which training does not change."""

    loaded_by = "whet's forward pass of nanochat's layout"

    def require_supported(self, spec: ExportSpec) -> None:
        config: Any = spec.model.language_model.config
        if config.model_type not in ("nanochat", NANOCHAT_MODEL_TYPE):
            raise WhetError(
                f"--to nanochat: this is a {config.model_type} model, which nanochat cannot load. Use --to merged"
            )
        sizes = _model_config(config)
        windows = [None if size is None else size + 1 for size in window_sizes(sizes)]
        if windows != _windows_of(config) or config.final_logit_softcapping != LOGIT_SOFTCAP:
            raise WhetError("--to nanochat: its windows or soft-cap were changed after the import, and nanochat has no "
                            "setting for them. Use --to merged")  # fmt: skip

    def estimate_bytes(self, spec: ExportSpec) -> int:
        return int(spec.model.num_parameters * spec.dtype.bytes_per_weight) + 2**24

    def write(self, spec: ExportSpec, folder: Path) -> None:
        """Holds the whole model in memory, as nanochat's one file does."""
        state: dict[str, Tensor] = {}
        for weight in spec.model.weights():
            name, tensor = to_nanochat_name(weight.name), weight.read().to(spec.dtype.torch_dtype)
            missing = -len(tensor) % _ROWS_MULTIPLE if has_vocabulary_rows(name) else 0
            state[name] = F.pad(tensor, (0, 0, 0, missing)) if missing else tensor.clone()
        torch.save(state, folder / f"model_{spec.step:06d}.pt")
        meta = {"step": spec.step, "model_config": _model_config(spec.model.language_model.config), "user_config": {}}
        write_json(folder / f"meta_{spec.step:06d}.json", meta)
        (folder / "huggingface").mkdir()
        write_configs(spec, folder / "huggingface")

    def load_and_verify(
        self, spec: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        sizes = _model_config(spec.model.language_model.config)
        try:
            file = folder / f"model_{spec.step:06d}.pt"
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            positions = max(1, MAX_POSITIONS // max(1, len(probes)))
            logits = torch.cat([nanochat_logits(tensors, sizes, ids)[-positions:] for ids in probes])
        except Exception as error:  # a damaged or forged file can raise almost anything
            findings.reasons.append(f"it cannot be read back: {first_line(error)}")
            return None
        others = sorted({str(tensor.dtype) for tensor in tensors.values() if tensor.dtype != spec.dtype.torch_dtype})
        if others:
            findings.reasons.append(f"it has weights in {', '.join(others)} instead of {spec.dtype.torch_dtype}")
        compare_weights(spec.model, _NanochatWeights(tensors, sizes["vocab_size"]), spec.dtype, findings)
        verify_tokenizer_and_stops(spec.generation, folder / "huggingface", None, probes, findings)
        return logits


class _NanochatWeights:
    """The tensors of a checkpoint, without padding rows."""

    def __init__(self, tensors: Mapping[str, Tensor], vocabulary: int) -> None:
        self._tensors, self._vocabulary = tensors, vocabulary

    def tensors(self, name: str, value: Tensor) -> dict[str, Tensor]:
        return {to_nanochat_name(name): value}

    def read(self, name: str) -> Tensor | None:
        found = self._tensors.get(name)
        return found[: self._vocabulary] if found is not None and has_vocabulary_rows(name) else found


def _model_config(config: Any) -> dict[str, Any]:
    """nanochat's sizes of a model of transformers."""
    windows = "".join("L" if window is None else "S" for window in _windows_of(config))
    return {
        "sequence_len": config.max_position_embeddings, "vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers, "n_head": config.num_attention_heads,
        "n_kv_head": config.num_key_value_heads, "n_embd": config.hidden_size, "window_pattern": windows,
    }  # fmt: skip


def _windows_of(config: Any) -> list[int | None]:
    """The windows of the layers as transformers counts them: with the token itself."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
