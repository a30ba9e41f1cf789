"""nanochat checkpoints as models of transformers.

transformers' NanoChat has the architecture of the first releases: embedding, norm, blocks of attention (rotary
positions with negative angles, then normalised queries and keys) and relu², norm, head with logits capped at 15.
Checkpoints of February 2026 have value embeddings, lambdas and windows, too: `whet.model.nanochat` has them. Tensors
that came later (smear, backout) are refused by their names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.convert.foreign_checkpoint import ConversionNotes, TargetTensor, load_pt, malformed_file_errors
from whet.core.errors import WhetError
from whet.core.files import read_json
from whet.exporting.nanochat import (
    EPS,
    LOGIT_SOFTCAP,
    ROPE_THETA,
    has_vocabulary_rows,
    nanochat_logits,
    to_hf_name,
    window_sizes,
)


class NanochatCheckpoint:
    """The checkpoint of a step in a folder, by default of the newest."""

    def __init__(self, folder: Path, config: Path | None = None, step: int | None = None) -> None:
        path = _model_file(folder, step)
        self.files, self.notes = [path], ConversionNotes()
        meta = config or path.with_name(path.name.replace("model_", "meta_")).with_suffix(".json")
        content = load_pt(path)
        with malformed_file_errors(path, "the state dict"):
            self._tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in content.items()}
            others = [name for name, tensor in self._tensors.items() if not isinstance(tensor, Tensor)]
        if others:
            raise WhetError(f"{path}: {others[0]} is not a tensor. Give a checkpoint that nanochat wrote")
        unknown = [name for name in self._tensors if to_hf_name(name) is None]
        if unknown:
            raise WhetError(
                f"{path}: whet has no model with the tensor {unknown[0]}: it supports nanochat up to February 2026, "
                "with value embeddings, lambdas and windows, without smear and backout"
            )
        with malformed_file_errors(meta, "model_config"):
            self._sizes = read_json(meta)["model_config"]
            self.config = self._build_config(window_sizes(self._sizes))
            padding = len(self._tensors["transformer.wte.weight"]) - self.config.vocab_size
        if padding < 0:
            raise WhetError(
                f"{meta}: vocab_size is {self.config.vocab_size:,}, {-padding:,} more than the tensors have"
            )
        if padding:
            self.notes.left_out["rows of padding"] = f"{padding} in each table of tokens; nanochat ignores them"
        self.notes.assumed += [
            f"rope_theta {ROPE_THETA:g}, as in the releases with these tensors",
            f"norm epsilon {EPS:g}",
        ]
        self.dtype = torch.bfloat16
        for tensor in self._tensors.values():
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)

    def _build_config(self, windows: Sequence[int | None]) -> Any:
        sizes, tensors = self._sizes, self._tensors
        common: dict[str, Any] = {
            "vocab_size": sizes["vocab_size"],
            "hidden_size": tensors["transformer.wte.weight"].shape[1],
            "intermediate_size": tensors["transformer.h.0.mlp.c_fc.weight"].shape[0],
            "num_hidden_layers": sizes["n_layer"],
            "num_attention_heads": sizes["n_head"],
            "num_key_value_heads": sizes["n_kv_head"],
            "max_position_embeddings": sizes["sequence_len"],
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
            "final_logit_softcapping": LOGIT_SOFTCAP,
            "rms_norm_eps": EPS,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if "resid_lambdas" not in tensors and not any(windows):
            from transformers import NanoChatConfig

            return NanoChatConfig(**common)
        from whet.model.nanochat import WindowedNanoChatConfig, register_nanochat

        register_nanochat()
        return WindowedNanoChatConfig(
            **common,
            layer_types=["sliding_attention" if window else "full_attention" for window in windows],
            sliding_window=next((window + 1 for window in windows if window), None),
        )

    def targets(self) -> list[TargetTensor]:
        rows = self.config.vocab_size

        def build(name: str) -> Tensor:
            tensor = self._tensors[name]
            return tensor[:rows] if has_vocabulary_rows(name) else tensor

        return [
            TargetTensor(str(to_hf_name(name)), (f"{self.files[0].name}:{name}",), lambda name=name: build(name))  # type: ignore[misc]
            for name in self._tensors
        ]

    def logits(self, ids: Sequence[int]) -> Tensor:
        return nanochat_logits(self._tensors, self._sizes, ids)


def _model_file(folder: Path, step: int | None) -> Path:
    if not folder.is_dir():
        raise WhetError(f"{folder}: no such folder")
    found = {int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(r"model_(\d+)\.pt", path.name))}
    if not found:
        raise WhetError(
            f"{folder}: no file model_NNNNNN.pt. Give the folder of one model, such as chatsft_checkpoints/d20"
        )
    if step is not None and step not in found:
        raise WhetError(f"--step {step}: {folder} has the steps {', '.join(map(str, sorted(found)))}. Give one of them")
    return found[max(found) if step is None else step]
