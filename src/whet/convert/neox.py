"""GPT-NeoX checkpoints (tensor-parallel too) as Llama or GPT-NeoX of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.convert.foreign_checkpoint import ConversionNotes, TargetTensor, expected_shapes
from whet.convert.neox_files import (
    INV_FREQ,
    MLP_DOWN_NAMES,
    MLP_UP_NAMES,
    NeoXFiles,
    llama_config,
    neox_config,
    read_hf_config,
    read_settings,
)
from whet.core.errors import WhetError

# GPT-NeoX checkpoints, also tensor-parallel ones, as Llama (RMSNorm, gated MLP) or GPT-NeoX of transformers.
#
# Sources: megatron/model/transformer.py and tools/ckpts/convert_neox_to_hf.py of EleutherAI/gpt-neox, and those of
# tilde-nlp/llm-gpt-neox. On each rank, of T:
#
# - column-parallel matrices hold rows: the heads of the rank, its part of the MLP; the vocabulary's rows of the rank;
# - row-parallel ones hold columns, and their outputs are summed. Their bias is summed too where attention and MLP are
# added before the ranks are (gpt_j_residual), and held by each rank elsewhere;
# - q, k, v: [head, 3, width of a head] if there are as many keys as queries, else all queries, all keys, all values;
# - a gated `linear1` holds up above gate, for the rank's part of the MLP;
# - norms are held by every rank. Nothing keeps them equal, and they drift apart.


class NeoXCheckpoint:
    """Opened: its files are there, its norms agree or are averaged, its settings are served."""

    def __init__(self, folder: Path, config: Path | None, average_norms: bool) -> None:
        self.source = NeoXFiles(folder)
        self.files, self.notes = self.source.files, ConversionNotes()
        self.is_llama = "input_layernorm.scale" in self.source.keys.get(2, ())
        sizes = self._sizes()
        if config is not None and config.suffix == ".json":
            self.config = read_hf_config(config)
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
        down = self.name(2, MLP_DOWN_NAMES)
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
            "mlp_bias": self.name(2, MLP_DOWN_NAMES, "bias") is not None,
            "tied": "final_linear.weight" not in self.source.keys[last],
        }

    def need(self, layer: int, name: str) -> list[Tensor]:
        if name not in self.source.keys.get(layer, ()):
            raise WhetError(f"{self.source.folder}: no tensor {name} in layer {layer}. Is the checkpoint complete?")
        return self.source.tensors(layer, name)

    def _widest(self) -> torch.dtype:
        found = torch.float16 if self.need(2, "attention.dense.weight")[0].dtype == torch.float16 else torch.bfloat16
        for layer, names in self.source.keys.items():
            for name in names - {INV_FREQ}:
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

    def targets(self) -> list[TargetTensor]:

        return NeoXMapping(self).targets()

    def logits(self, ids: Sequence[int]) -> Tensor | None:
        from whet.convert.neox_reference import reference_logits

        rope = self.config.rope_parameters
        return reference_logits(self, ids) if rope.get("rope_type", "default") == "default" else None


# Where each tensor of a GPT-NeoX checkpoint goes, and how the parts of the ranks are put together.

if TYPE_CHECKING:
    pass

JoinRanks = Callable[[list[Tensor]], Tensor]


class NeoXMapping:
    """Made once: what it has placed tells what is left over."""

    def __init__(self, checkpoint: NeoXCheckpoint) -> None:
        self._of = checkpoint
        self._used: set[tuple[int, str]] = set()

    def targets(self) -> list[TargetTensor]:
        shapes = expected_shapes(self._of.config)
        body = "model" if self._of.is_llama else "gpt_neox"
        made = [
            self._target(
                f"{body}.{'embed_tokens' if self._of.is_llama else 'embed_in'}.weight",
                0,
                "word_embeddings.weight",
                torch.cat,
            )
        ]
        for number in range(self._of.layers):
            put = self._llama_layer if self._of.is_llama else self._neox_layer
            made += put(number + 2, f"{body}.layers.{number}")
        end, final = f"{body}.{'norm' if self._of.is_llama else 'final_layer_norm'}", self._of.layers + 3
        kinds = {"weight": "norm.scale"} if self._of.is_llama else {"weight": "norm.weight", "bias": "norm.bias"}
        made += [self._target(f"{end}.{kind}", final, name, self._of.same) for kind, name in kinds.items()]
        made += self._head(shapes)
        self._refuse_unmapped()
        return made

    def _head(self, shapes: dict[str, tuple[int, ...]]) -> list[TargetTensor]:
        last = self._of.layers + 4
        tied = [layer for layer in (last,) if "word_embeddings.weight" in self._of.source.keys.get(layer, ())]
        for layer in tied:
            pairs = zip(
                self._of.need(layer, "word_embeddings.weight"), self._of.need(0, "word_embeddings.weight"), strict=True
            )
            if not all(torch.equal(one, other) for one, other in pairs):
                raise WhetError(f"{self._of.source.folder}: the output is called the embedding and holds other numbers")
            self._used.add((layer, "word_embeddings.weight"))
            self._of.notes.left_out[self._of.source.describe(layer, "word_embeddings.weight")[0]] = (
                "the embedding once more"
            )
        if "final_linear.weight" not in self._of.source.keys.get(last, ()):
            return []
        name = next(
            name for name in ("lm_head.weight", "embed_out.weight") if name in shapes or name == "embed_out.weight"
        )
        return [self._target(name, last, "final_linear.weight", torch.cat)]

    def _llama_layer(self, layer: int, to: str) -> list[TargetTensor]:
        made = []
        for kind in ("weight", "bias"):
            for number, side in enumerate("qkv"):
                made += self._maybe(
                    f"{to}.self_attn.{side}_proj.{kind}", layer, f"attention.query_key_value.{kind}", self._side(number)
                )
            if not self._of.is_old:
                for half, name in enumerate(("up", "gate")):
                    made += self._maybe(f"{to}.mlp.{name}_proj.{kind}", layer, f"mlp.linear1.{kind}", _half(half))
        for name, old in (("gate", "w1"), ("up", "w3")):
            made += self._maybe(f"{to}.mlp.{name}_proj.weight", layer, f"mlp.{old}.weight", torch.cat)
        made += self._maybe(f"{to}.self_attn.o_proj.weight", layer, "attention.dense.weight", _columns)
        made += self._maybe(f"{to}.self_attn.o_proj.bias", layer, "attention.dense.bias", self._of.bias)
        down = self._of.name(layer, MLP_DOWN_NAMES) or "mlp.linear2.weight"
        made += self._maybe(f"{to}.mlp.down_proj.weight", layer, down, _columns)
        made += self._maybe(f"{to}.mlp.down_proj.bias", layer, down.replace("weight", "bias"), self._of.bias)
        return made + self._norms(layer, to, {"weight": "scale"})

    def _neox_layer(self, layer: int, to: str) -> list[TargetTensor]:
        made = []
        up, down = (self._of.name(layer, names) or f"{names[0]}.weight" for names in (MLP_UP_NAMES, MLP_DOWN_NAMES))
        for kind in ("weight", "bias"):
            made += self._maybe(
                f"{to}.attention.query_key_value.{kind}", layer, f"attention.query_key_value.{kind}", torch.cat
            )
            made += self._maybe(f"{to}.mlp.dense_h_to_4h.{kind}", layer, up.replace("weight", kind), torch.cat)
        made += self._maybe(f"{to}.attention.dense.weight", layer, "attention.dense.weight", _columns)
        made += self._maybe(f"{to}.attention.dense.bias", layer, "attention.dense.bias", self._of.bias)
        made += self._maybe(f"{to}.mlp.dense_4h_to_h.weight", layer, down, _columns)
        made += self._maybe(f"{to}.mlp.dense_4h_to_h.bias", layer, down.replace("weight", "bias"), self._of.bias)
        return made + self._norms(layer, to, {"weight": "weight", "bias": "bias"})

    def _norms(self, layer: int, to: str, kinds: dict[str, str]) -> list[TargetTensor]:
        names = ("input_layernorm", "post_attention_layernorm")
        return [
            self._target(f"{to}.{n}.{k}", layer, f"{n}.{own}", self._of.same) for n in names for k, own in kinds.items()
        ]

    def _maybe(self, to: str, layer: int, name: str, join: JoinRanks) -> list[TargetTensor]:
        return [self._target(to, layer, name, join)] if name in self._of.source.keys.get(layer, ()) else []

    def _target(self, to: str, layer: int, name: str, join: JoinRanks) -> TargetTensor:
        self._of.need(layer, name)
        self._used.add((layer, name))
        return TargetTensor(
            to, self._of.source.describe(layer, name), lambda: join(self._of.source.tensors(layer, name))
        )

    def _side(self, number: int) -> JoinRanks:
        """The queries, keys or values of a fused matrix or bias."""
        heads, keys, ranks = (
            self._of.config.num_attention_heads,
            self._of.config.num_key_value_heads,
            self._of.source.ranks,
        )
        width = getattr(self._of.config, "head_dim", None) or self._of.config.hidden_size // heads

        def join(tensors: list[Tensor]) -> Tensor:
            if heads == keys:
                return torch.cat([_view_by_head(tensor, 3, width)[:, number].flatten(0, 1) for tensor in tensors])
            sizes = [heads * width // ranks, keys * width // ranks, keys * width // ranks]
            return torch.cat([tensor.split(sizes)[number] for tensor in tensors])

        return join

    def _refuse_unmapped(self) -> None:
        for layer, names in sorted(self._of.source.keys.items()):
            for name in sorted(names):
                place = self._of.source.describe(layer, name)[0]
                if name == INV_FREQ:
                    self._require_rates(self._of.source.tensors(layer, name)[0], place)
                    self._of.notes.left_out[place] = "computed from the configuration"
                elif (layer, name) not in self._used:
                    raise WhetError(
                        f"{self._of.source.folder}: {place} is a tensor that whet cannot place in a model of "
                        "transformers. Nothing may be lost on the way, so the checkpoint is refused"
                    )

    def _require_rates(self, held: Tensor, place: str) -> None:
        """Where the checkpoint keeps the rates of its rotary positions, the configuration must give the same."""
        rope = self._of.config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            return
        turned = 2 * len(held)
        wanted = rope["rope_theta"] ** (-torch.arange(0, turned, 2).float() / turned)
        if not torch.allclose(held.float(), wanted, rtol=1e-2, atol=1e-7):
            raise WhetError(
                f"{self._of.source.folder}: {place} was not made with a base of {rope['rope_theta']:g} for rotary "
                "positions, as its settings say (rotary_emb_base; rope_theta in a config.json). Correct that: --config"
            )


def _view_by_head(tensor: Tensor, sides: int, width: int) -> Tensor:
    """[heads, sides, width, …]"""
    return tensor.view(-1, sides, width, *tensor.shape[1:])


def _half(number: int) -> JoinRanks:
    return lambda tensors: torch.cat([tensor.chunk(2)[number] for tensor in tensors])


def _columns(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, dim=1)
