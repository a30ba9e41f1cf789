"""GPT-NeoX checkpoints (tensor-parallel too) as Llama or GPT-NeoX of transformers.

Models with RMSNorm and a gated MLP become Llama, those with LayerNorm and a plain MLP become GPT-NeoX. Sources:
megatron/model/transformer.py and tools/ckpts/convert_neox_to_hf.py of EleutherAI/gpt-neox, and of
tilde-nlp/llm-gpt-neox. On each tensor-parallel rank

- column-parallel matrices hold rows: the rank's heads, its part of the MLP, its part of the vocabulary;
- row-parallel matrices hold columns, and their outputs are summed. So are their biases if attention and MLP are added
  before the all-reduce (gpt_j_residual); otherwise each rank holds the whole bias;
- query_key_value is [heads, 3, head_dim] with as many key heads as query heads, else all queries, all keys, all values;
- a gated `linear1` holds up above gate;
- norms are replicated. Nothing keeps them equal, and they drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.convert.foreign_checkpoint import ConversionNotes, TargetTensor, expected_shapes, read_hf_config
from whet.convert.neox_files import (
    INV_FREQ,
    MLP_DOWN_NAMES,
    MLP_UP_NAMES,
    NeoXFiles,
    llama_config,
    neox_config,
    read_settings,
)
from whet.convert.neox_reference import reference_logits
from whet.core.errors import WhetError

JoinRanks = Callable[[list[Tensor]], Tensor]
"""The tensors of all ranks → one tensor of transformers."""


class NeoXCheckpoint:
    """An opened checkpoint: complete, with supported settings, and with norms that agree or are averaged."""

    def __init__(self, folder: Path, config: Path | None, average_norms: bool) -> None:
        self.source = NeoXFiles(folder)
        self.files, self.notes = self.source.files, ConversionNotes()
        self.is_llama = "input_layernorm.scale" in self.source.keys.get(2, ())
        sizes = self._sizes()
        if config is not None and config.suffix == ".json":
            self.config = read_hf_config(config)
            expected = "llama" if self.is_llama else "gpt_neox"
            if self.config.model_type != expected:
                raise WhetError(
                    f"--config {config}: model_type {self.config.model_type}, but the tensors are those of {expected}"
                )
        else:
            settings = read_settings(self.source.folder, config)
            ranks = settings.get("model_parallel_size")
            if ranks is not None and ranks != self.source.ranks:
                raise WhetError(
                    f"{self.source.folder}: files of {self.source.ranks} ranks, but its settings have "
                    f"model_parallel_size: {ranks}. Copy the files of all ranks"
                )
            make_config = llama_config if self.is_llama else neox_config
            self.config = make_config(settings, sizes, self.source.folder)
        self.layers, self.dtype = self.config.num_hidden_layers, self._widest_dtype()
        self._require_number_of_layers()
        self._compare_norms_across_ranks(average_norms)
        if self.is_llama:
            self.notes.assumed.append(
                "norms add epsilon inside the square root, as Llama does; some NeoX add it outside"
            )

    def targets(self) -> list[TargetTensor]:
        return _NeoXMapping(self).targets()

    def logits(self, ids: Sequence[int]) -> Tensor | None:
        rope = self.config.rope_parameters
        return reference_logits(self, ids) if rope.get("rope_type", "default") == "default" else None

    def find_name(self, layer: int, options: Sequence[str], kind: str = "weight") -> str | None:
        """The first of several names of a tensor that the layer has."""
        known = self.source.keys.get(layer, set())
        return next((f"{name}.{kind}" for name in options if f"{name}.{kind}" in known), None)

    @property
    def has_split_mlp(self) -> bool:
        """Older versions have Llama's MLP as three matrices w1, w2, w3."""
        return "mlp.w1.weight" in self.source.keys.get(2, ())

    def require_tensors(self, layer: int, name: str) -> list[Tensor]:
        """The tensor of each rank."""
        if name not in self.source.keys.get(layer, ()):
            raise WhetError(f"{self.source.folder}: no tensor {name} in layer {layer}. Copy the whole checkpoint")
        return self.source.tensors(layer, name)

    def join_replicated(self, tensors: list[Tensor]) -> Tensor:
        """A tensor that every rank holds: equal on all, or averaged on request."""
        if all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            return tensors[0]
        return (sum(tensor.double() for tensor in tensors) / len(tensors)).to(self.dtype)  # type: ignore[union-attr]

    def join_row_parallel_bias(self, tensors: list[Tensor]) -> Tensor:
        if not self.is_llama and self.config.use_parallel_residual:
            return sum(tensor.float() for tensor in tensors).to(self.dtype)  # type: ignore[union-attr]
        if not all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            raise WhetError(
                f"{self.source.folder}: the biases of a row-parallel matrix differ between ranks, and each rank adds "
                "its own. No single model computes that"
            )
        return tensors[0]

    def _sizes(self) -> dict[str, Any]:
        """Sizes and features, as the tensors have them."""
        embedding = self.require_tensors(0, "word_embeddings.weight")
        down = self.find_name(2, MLP_DOWN_NAMES)
        if down is None or "attention.query_key_value.weight" not in self.source.keys.get(2, ()):
            known = ", ".join(sorted(self.source.keys.get(2, set()))[:4]) or "no tensors"
            raise WhetError(f"{self.source.folder}: the first layer is not a known layer of GPT-NeoX: it has {known}")
        return {
            "vocabulary": embedding[0].shape[0] * self.source.ranks,
            "width": embedding[0].shape[1],
            "intermediate": self.require_tensors(2, down)[0].shape[1] * self.source.ranks,
            "attention_bias": "attention.query_key_value.bias" in self.source.keys[2],
            "mlp_bias": self.find_name(2, MLP_DOWN_NAMES, "bias") is not None,
            "tied": "final_linear.weight" not in self.source.keys[max(self.source.keys)],
        }

    def _widest_dtype(self) -> torch.dtype:
        first = self.require_tensors(2, "attention.dense.weight")[0].dtype
        widest = torch.float16 if first == torch.float16 else torch.bfloat16
        for layer, names in self.source.keys.items():
            for name in names - {INV_FREQ}:
                widest = torch.promote_types(widest, self.source.tensors(layer, name)[0].dtype)
        return widest

    def _require_number_of_layers(self) -> None:
        allowed = {0, *range(2, self.layers + 2), self.layers + 3, self.layers + 4}
        for layer in sorted(layer for layer, names in self.source.keys.items() if names):
            if layer not in allowed:
                raise WhetError(
                    f"{self.source.folder}: it has tensors of layer {layer}, but a model of {self.layers} transformer "
                    f"layers ends at {self.layers + 4}. Give the configuration of this checkpoint: --config FILE"
                )

    def _compare_norms_across_ranks(self, average: bool) -> None:
        kinds = ("scale",) if self.is_llama else ("weight", "bias")
        norms = [
            (layer, f"{norm}.{kind}")
            for layer in range(2, self.layers + 2)
            for norm in ("input_layernorm", "post_attention_layernorm")
            for kind in kinds
        ]
        norms += [(self.layers + 3, f"norm.{kind}") for kind in kinds]
        differences = {}
        for layer, name in norms:
            tensors = self.require_tensors(layer, name)
            difference = max((tensor.float() - tensors[0].float()).abs().max().item() for tensor in tensors)
            if difference > 0:
                differences[f"layer {layer} {name}"] = difference
        if differences and not average:
            worst = max(differences, key=lambda name: differences[name])
            raise WhetError(
                f"{self.source.folder}: {len(differences)} of {len(norms)} norms differ between tensor-parallel ranks, "
                f"most {worst}, by {differences[worst]:.3g}. No single model computes what the ranks did together. To "
                "average them, as GPT-NeoX's own converter does silently: --average-norms"
            )
        self.notes.averaged = differences


class _NeoXMapping:
    """Maps each tensor of a checkpoint to tensors of transformers, and raises if one is left over."""

    def __init__(self, checkpoint: NeoXCheckpoint) -> None:
        self._checkpoint, self._source = checkpoint, checkpoint.source
        self._used: set[tuple[int, str]] = set()

    def targets(self) -> list[TargetTensor]:
        checkpoint = self._checkpoint
        body, embedding, final_norm, map_layer, norm_kinds = (
            ("model", "embed_tokens", "norm", self._llama_layer, {"weight": "norm.scale"})
            if checkpoint.is_llama
            else (
                "gpt_neox", "embed_in", "final_layer_norm", self._neox_layer,
                {"weight": "norm.weight", "bias": "norm.bias"},
            )
        )  # fmt: skip
        targets = [self._target(f"{body}.{embedding}.weight", 0, "word_embeddings.weight", torch.cat)]
        for number in range(checkpoint.layers):
            targets += map_layer(number + 2, f"{body}.layers.{number}")
        for kind, name in norm_kinds.items():
            to = f"{body}.{final_norm}.{kind}"
            targets.append(self._target(to, checkpoint.layers + 3, name, checkpoint.join_replicated))
        targets += self._head()
        self._refuse_unmapped()
        return targets

    def _head(self) -> list[TargetTensor]:
        last = self._checkpoint.layers + 4
        if "word_embeddings.weight" in self._source.keys.get(last, ()):  # tied: a copy of the embedding
            pairs = zip(
                self._source.tensors(last, "word_embeddings.weight"),
                self._checkpoint.require_tensors(0, "word_embeddings.weight"),
                strict=True,
            )
            if not all(torch.equal(output, embedding) for output, embedding in pairs):
                raise WhetError(
                    f"{self._source.folder}: the output layer is named as tied to the embedding but has other values"
                )
            self._used.add((last, "word_embeddings.weight"))
            self._checkpoint.notes.left_out[self._source.describe(last, "word_embeddings.weight")[0]] = (
                "tied to the embedding"
            )
        if "final_linear.weight" not in self._source.keys.get(last, ()):
            return []
        shapes = expected_shapes(self._checkpoint.config)
        name = "lm_head.weight" if "lm_head.weight" in shapes else "embed_out.weight"
        return [self._target(name, last, "final_linear.weight", torch.cat)]

    def _llama_layer(self, layer: int, to: str) -> list[TargetTensor]:
        targets = []
        bias = self._checkpoint.join_row_parallel_bias
        for kind in ("weight", "bias"):
            for number, side in enumerate("qkv"):
                name = f"attention.query_key_value.{kind}"
                targets += self._target_if_present(
                    f"{to}.self_attn.{side}_proj.{kind}", layer, name, self._join_qkv(number)
                )
            if not self._checkpoint.has_split_mlp:
                for half, side in enumerate(("up", "gate")):
                    targets += self._target_if_present(
                        f"{to}.mlp.{side}_proj.{kind}", layer, f"mlp.linear1.{kind}", _join_halves(half)
                    )
        for side, old in (("gate", "w1"), ("up", "w3")):
            targets += self._target_if_present(f"{to}.mlp.{side}_proj.weight", layer, f"mlp.{old}.weight", torch.cat)
        targets += self._target_if_present(
            f"{to}.self_attn.o_proj.weight", layer, "attention.dense.weight", _join_columns
        )
        targets += self._target_if_present(f"{to}.self_attn.o_proj.bias", layer, "attention.dense.bias", bias)
        down = self._checkpoint.find_name(layer, MLP_DOWN_NAMES) or "mlp.linear2.weight"
        targets += self._target_if_present(f"{to}.mlp.down_proj.weight", layer, down, _join_columns)
        targets += self._target_if_present(f"{to}.mlp.down_proj.bias", layer, down.replace("weight", "bias"), bias)
        return targets + self._norms(layer, to, {"weight": "scale"})

    def _neox_layer(self, layer: int, to: str) -> list[TargetTensor]:
        targets = []
        bias = self._checkpoint.join_row_parallel_bias
        up, down = (
            self._checkpoint.find_name(layer, names) or f"{names[0]}.weight" for names in (MLP_UP_NAMES, MLP_DOWN_NAMES)
        )
        for kind in ("weight", "bias"):
            name = f"attention.query_key_value.{kind}"
            targets += self._target_if_present(f"{to}.{name}", layer, name, torch.cat)
            targets += self._target_if_present(
                f"{to}.mlp.dense_h_to_4h.{kind}", layer, up.replace("weight", kind), torch.cat
            )
        targets += self._target_if_present(
            f"{to}.attention.dense.weight", layer, "attention.dense.weight", _join_columns
        )
        targets += self._target_if_present(f"{to}.attention.dense.bias", layer, "attention.dense.bias", bias)
        targets += self._target_if_present(f"{to}.mlp.dense_4h_to_h.weight", layer, down, _join_columns)
        targets += self._target_if_present(f"{to}.mlp.dense_4h_to_h.bias", layer, down.replace("weight", "bias"), bias)
        return targets + self._norms(layer, to, {"weight": "weight", "bias": "bias"})

    def _norms(self, layer: int, to: str, kinds: dict[str, str]) -> list[TargetTensor]:
        return [
            self._target(f"{to}.{norm}.{kind}", layer, f"{norm}.{own}", self._checkpoint.join_replicated)
            for norm in ("input_layernorm", "post_attention_layernorm")
            for kind, own in kinds.items()
        ]

    def _target_if_present(self, to: str, layer: int, name: str, join: JoinRanks) -> list[TargetTensor]:
        return [self._target(to, layer, name, join)] if name in self._source.keys.get(layer, ()) else []

    def _target(self, to: str, layer: int, name: str, join: JoinRanks) -> TargetTensor:
        self._checkpoint.require_tensors(layer, name)
        self._used.add((layer, name))
        return TargetTensor(to, self._source.describe(layer, name), lambda: join(self._source.tensors(layer, name)))

    def _join_qkv(self, number: int) -> JoinRanks:
        """Takes the queries (0), keys (1) or values (2) out of a fused matrix or bias."""
        config, ranks = self._checkpoint.config, self._source.ranks
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads

        def join(tensors: list[Tensor]) -> Tensor:
            if heads == keys:
                by_head = [tensor.view(-1, 3, head_dim, *tensor.shape[1:]) for tensor in tensors]
                return torch.cat([tensor[:, number].flatten(0, 1) for tensor in by_head])
            sizes = [heads * head_dim // ranks, keys * head_dim // ranks, keys * head_dim // ranks]
            return torch.cat([tensor.split(sizes)[number] for tensor in tensors])

        return join

    def _refuse_unmapped(self) -> None:
        for layer, names in sorted(self._source.keys.items()):
            for name in sorted(names):
                place = self._source.describe(layer, name)[0]
                if name == INV_FREQ:
                    self._require_same_inv_freq(self._source.tensors(layer, name)[0], place)
                    self._checkpoint.notes.left_out[place] = "computed from the configuration"
                elif (layer, name) not in self._used:
                    raise WhetError(
                        f"{self._source.folder}: {place} maps to no tensor of {self._checkpoint.config.model_type}, "
                        "and no tensor may be dropped. This model cannot be imported"
                    )

    def _require_same_inv_freq(self, inv_freq: Tensor, place: str) -> None:
        """Saved RoPE frequencies must be those of the configuration."""
        rope = self._checkpoint.config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            return
        rotary_dim = 2 * len(inv_freq)
        expected = rope["rope_theta"] ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
        if not torch.allclose(inv_freq.float(), expected, rtol=1e-2, atol=1e-7):
            raise WhetError(
                f"{self._source.folder}: {place} does not match the rotary base {rope['rope_theta']:g} of the settings "
                "(rotary_emb_base; rope_theta in a config.json). Correct it: --config FILE"
            )


def _join_halves(number: int) -> JoinRanks:
    return lambda tensors: torch.cat([tensor.chunk(2)[number] for tensor in tensors])


def _join_columns(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, dim=1)
