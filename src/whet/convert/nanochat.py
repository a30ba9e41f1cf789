"""nanochat checkpoints as NanoChat of transformers.

Source: nanochat/gpt.py and checkpoint_manager.py of karpathy/nanochat. `model_000650.pt` holds the tensors and
`meta_000650.json` the sizes under `model_config`. transformers implements the architecture of the first releases:
embedding, norm, blocks of attention (rotary positions with negative angles, then normalised queries and keys) and
relu², norm, head with logits capped at 15. It lacks what later releases added (value embeddings, gates, lambdas, smear,
windows); these are refused by the name of the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.convert.foreign_checkpoint import ConversionNotes, TargetTensor, load_pt, malformed_file_errors
from whet.core.errors import WhetError
from whet.core.files import read_json

_ROPE_THETA, _LOGIT_SOFTCAP, _EPS = 10_000.0, 15.0, 1e-6
_TOP_LEVEL_NAMES = {"transformer.wte.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
_BLOCK_NAMES = {
    "attn.c_q": "self_attn.q_proj", "attn.c_k": "self_attn.k_proj", "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
}  # fmt: skip
_BLOCK_PATTERN = re.compile(r"transformer\.h\.(\d+)\.(\w+\.\w+)\.weight")


class NanochatCheckpoint:
    """The newest checkpoint in a folder."""

    def __init__(self, folder: Path, config: Path | None = None) -> None:
        from transformers import NanoChatConfig

        path = _newest_model_file(folder)
        self.files, self.notes = [path], ConversionNotes()
        meta = config or path.with_name(path.name.replace("model_", "meta_")).with_suffix(".json")
        content = load_pt(path)
        with malformed_file_errors(path, "the state dict"):
            self._tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in content.items()}
            others = [name for name, tensor in self._tensors.items() if not isinstance(tensor, Tensor)]
        if others:
            raise WhetError(f"{path}: {others[0]} is not a tensor. Give a checkpoint that nanochat wrote")
        self._names = {name: self._hf_name(path, name) for name in self._tensors}
        with malformed_file_errors(meta, "model_config"):
            sizes = read_json(meta)["model_config"]
            windows = str(sizes.get("window_pattern", "L")).upper()
            if set(windows) != {"L"}:
                raise WhetError(
                    f"{meta}: window_pattern {windows}, but NanoChat of transformers has no sliding windows. Only "
                    "models with full attention (L) can be imported"
                )
            rows, width = self._tensors["transformer.wte.weight"].shape
            self.config: Any = NanoChatConfig(
                vocab_size=rows,
                hidden_size=width,
                intermediate_size=self._tensors["transformer.h.0.mlp.c_fc.weight"].shape[0],
                num_hidden_layers=sizes["n_layer"],
                num_attention_heads=sizes["n_head"],
                num_key_value_heads=sizes["n_kv_head"],
                max_position_embeddings=sizes["sequence_len"],
                rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
                final_logit_softcapping=_LOGIT_SOFTCAP,
                rms_norm_eps=_EPS,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        self.notes.assumed += [
            f"rope_theta {_ROPE_THETA:g}, as in the releases with these tensors",
            f"norm epsilon {_EPS:g}",
        ]
        self.dtype = torch.bfloat16
        for tensor in self._tensors.values():
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)

    @staticmethod
    def _hf_name(path: Path, name: str) -> str:
        block = _BLOCK_PATTERN.fullmatch(name)
        if name in _TOP_LEVEL_NAMES:
            return _TOP_LEVEL_NAMES[name]
        if block is None or block[2] not in _BLOCK_NAMES:
            raise WhetError(
                f"{path}: transformers has no model with the tensor {name}: it supports the first releases of "
                "nanochat, without value embeddings, lambdas, gates and smear"
            )
        return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.weight"

    def targets(self) -> list[TargetTensor]:
        return [
            TargetTensor(self._names[name], (f"{self.files[0].name}:{name}",), lambda tensor=tensor: tensor)  # type: ignore[misc]
            for name, tensor in self._tensors.items()
        ]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """nanochat's forward pass in fp32."""
        x = _rms_norm(self._weight("transformer.wte")[torch.tensor(list(ids))])
        for number in range(self.config.num_hidden_layers):
            block = f"transformer.h.{number}"
            x = x + self._attention(f"{block}.attn", _rms_norm(x))
            inner = F.relu(_rms_norm(x) @ self._weight(f"{block}.mlp.c_fc").T).square()
            x = x + inner @ self._weight(f"{block}.mlp.c_proj").T
        return _LOGIT_SOFTCAP * torch.tanh(_rms_norm(x) @ self._weight("lm_head").T / _LOGIT_SOFTCAP)

    def _weight(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight"].float()

    def _attention(self, name: str, x: Tensor) -> Tensor:
        heads, keys = self.config.num_attention_heads, self.config.num_key_value_heads
        length, width = len(x), self.config.hidden_size // heads
        q, k, v = (
            (x @ self._weight(f"{name}.c_{side}").T).view(length, -1, width).transpose(0, 1) for side in ("q", "k", "v")
        )
        q, k = _rms_norm(_apply_rotary(q)), _rms_norm(_apply_rotary(k))
        k, v = (side.repeat_interleave(heads // keys, dim=0) for side in (k, v))
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = (q @ k.transpose(1, 2) / width**0.5).masked_fill(future, -torch.inf).softmax(dim=-1) @ v
        return mixed.transpose(0, 1).reshape(length, -1) @ self._weight(f"{name}.c_proj").T


def _rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + _EPS).sqrt()


def _apply_rotary(x: Tensor) -> Tensor:
    """Rotary positions with negative angles, on [heads, T, D]."""
    half = x.shape[-1] // 2
    inv_freq = _ROPE_THETA ** (-torch.arange(half).float() / half)
    angle = torch.arange(x.shape[1]).float()[:, None] * inv_freq
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * angle.cos() + x2 * angle.sin(), x2 * angle.cos() - x1 * angle.sin()], dim=-1)


def _newest_model_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise WhetError(f"{folder}: no such folder")
    found = sorted(path for path in folder.iterdir() if re.fullmatch(r"model_\d+\.pt", path.name))
    if not found:
        raise WhetError(
            f"{folder}: no file model_NNNNNN.pt. Give the folder of one model, such as chatsft_checkpoints/d20"
        )
    return found[-1]
