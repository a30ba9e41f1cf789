"""GPT-NeoX checkpoints, also tensor-parallel ones, as Llama (RMSNorm, gated MLP) or GPT-NeoX of transformers.

Sources: megatron/model/transformer.py and tools/ckpts/convert_neox_to_hf.py of EleutherAI/gpt-neox, and those of
tilde-nlp/llm-gpt-neox. On each rank, of T:

- column-parallel matrices hold rows: the heads of the rank, its part of the MLP; the vocabulary's rows of the rank;
- row-parallel ones hold columns, and their outputs are summed. Their bias is summed too where attention and MLP are
  added before the ranks are (gpt_j_residual), and held by each rank elsewhere;
- q, k, v: [head, 3, width of a head] if there are as many keys as queries, else all queries, all keys, all values;
- a gated `linear1` holds up above gate, for the rank's part of the MLP;
- norms are held by every rank. Nothing keeps them equal, and they drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.checkpoint.convert.neox_config import given_config, llama_config, neox_config, read_settings
from whet.checkpoint.convert.neox_files import COMPUTED, DOWN, NeoXFiles
from whet.checkpoint.convert.target import Notes, Target
from whet.core.errors import WhetError


class NeoXCheckpoint:
    """Opened: its files are there, its norms agree or are averaged, its settings are served."""

    def __init__(self, folder: Path, config: Path | None, average_norms: bool) -> None:
        self.source = NeoXFiles(folder)
        self.files, self.notes = self.source.files, Notes()
        self.is_llama = "input_layernorm.scale" in self.source.keys.get(2, ())
        sizes = self._sizes()
        if config is not None and config.suffix == ".json":
            self.config = given_config(config)
            wanted = "llama" if self.is_llama else "gpt_neox"
            if self.config.model_type != wanted:
                raise WhetError(
                    f"--config {config}: model_type {self.config.model_type}, but the tensors are those of {wanted}"
                )
        else:
            settings = read_settings(self.source.folder, config)
            said = settings.get("model_parallel_size")
            if said is not None and said != self.source.ranks:
                raise WhetError(
                    f"{self.source.folder}: files of {self.source.ranks} ranks, and its settings say "
                    f"model_parallel_size: {said}. Copy the files of all ranks"
                )
            make = llama_config if self.is_llama else neox_config
            self.config = make(settings, sizes, self.source.folder)
        self.layers, self.dtype = self.config.num_hidden_layers, self._widest()
        self._refuse_other_layers()
        self.average_norms = average_norms
        self._look_at_norms()
        if self.is_llama:
            self.notes.assumed.append("norms add their epsilon below the root, as Llama's do; some NeoX add it above")

    # what is there

    def name(self, layer: int, options: Sequence[str], kind: str = "weight") -> str | None:
        """Which of several names a tensor goes by."""
        known = self.source.keys.get(layer, set())
        return next((f"{name}.{kind}" for name in options if f"{name}.{kind}" in known), None)

    @property
    def is_old(self) -> bool:
        """Llama's MLP as three matrices."""
        return "mlp.w1.weight" in self.source.keys.get(2, ())

    def _sizes(self) -> dict[str, Any]:
        first = self.need(0, "word_embeddings.weight")
        down = self.name(2, DOWN)
        if down is None or "attention.query_key_value.weight" not in self.source.keys.get(2, ()):
            known = ", ".join(sorted(self.source.keys.get(2, set()))[:4]) or "nothing"
            raise WhetError(
                f"{self.source.folder}: the first layer is none of GPT-NeoX's that whet knows: it has {known}"
            )
        last = max(self.source.keys)
        return {
            "vocabulary": first[0].shape[0] * self.source.ranks,
            "width": first[0].shape[1],
            "intermediate": self.need(2, down)[0].shape[1] * self.source.ranks,
            "attention_bias": "attention.query_key_value.bias" in self.source.keys[2],
            "mlp_bias": self.name(2, DOWN, "bias") is not None,
            "tied": "final_linear.weight" not in self.source.keys[last],
        }

    def need(self, layer: int, name: str) -> list[Tensor]:
        if name not in self.source.keys.get(layer, ()):
            raise WhetError(f"{self.source.folder}: no tensor {name} in layer {layer}. Is the checkpoint complete?")
        return self.source.tensors(layer, name)

    def _widest(self) -> torch.dtype:
        found = torch.float16 if self.need(2, "attention.dense.weight")[0].dtype == torch.float16 else torch.bfloat16
        for layer, names in self.source.keys.items():
            for name in names - {COMPUTED}:
                found = torch.promote_types(found, self.source.tensors(layer, name)[0].dtype)
        return found

    def _refuse_other_layers(self) -> None:
        allowed = {0, *range(2, self.layers + 2), self.layers + 3, self.layers + 4}
        for layer in sorted(layer for layer, names in self.source.keys.items() if names):
            if layer not in allowed:
                raise WhetError(
                    f"{self.source.folder}: it has tensors of layer {layer}, and {self.layers} transformer layers end "
                    f"with number {self.layers + 4}. Does the configuration belong to it (--config FILE)?"
                )

    # norms

    def _norm_names(self) -> list[tuple[int, str]]:
        kinds = ("scale",) if self.is_llama else ("weight", "bias")
        layers = [
            (layer, f"{norm}.{kind}")
            for layer in range(2, self.layers + 2)
            for norm in ("input_layernorm", "post_attention_layernorm")
            for kind in kinds
        ]
        return [*layers, *((self.layers + 3, f"norm.{kind}") for kind in kinds)]

    def _look_at_norms(self) -> None:
        apart = {}
        for layer, name in self._norm_names():
            tensors = self.need(layer, name)
            widest = max((tensor.float() - tensors[0].float()).abs().max().item() for tensor in tensors)
            if widest > 0:
                apart[f"layer {layer} {name}"] = widest
        if apart and not self.average_norms:
            worst = max(apart, key=lambda name: apart[name])
            raise WhetError(
                f"{self.source.folder}: {len(apart)} of {len(self._norm_names())} norms differ between tensor-parallel "
                f"ranks, most {worst}: by {apart[worst]:.3g}. No single model computes what the ranks did together. To "
                "average them, as GPT-NeoX's own converter does without asking: --average-norms"
            )
        self.notes.averaged = apart

    def same(self, tensors: list[Tensor]) -> Tensor:
        """What every rank holds: equal, or averaged on request."""
        if all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            return tensors[0]
        return (sum(tensor.double() for tensor in tensors) / len(tensors)).to(self.dtype)  # type: ignore[union-attr]

    def bias(self, tensors: list[Tensor]) -> Tensor:
        """Of a row-parallel matrix."""
        if not self.is_llama and self.config.use_parallel_residual:
            return sum(tensor.float() for tensor in tensors).to(self.dtype)  # type: ignore[union-attr]
        if not all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            raise WhetError(
                f"{self.source.folder}: the biases of a row-parallel matrix differ between ranks, and each adds its "
                "own. No single model computes that"
            )
        return tensors[0]

    def targets(self) -> list[Target]:
        from whet.checkpoint.convert.neox_map import NeoXMap

        return NeoXMap(self).targets()

    def logits(self, ids: Sequence[int]) -> Tensor | None:
        from whet.checkpoint.convert.neox_reference import logits

        rope = self.config.rope_parameters
        return logits(self, ids) if rope.get("rope_type", "default") == "default" else None
