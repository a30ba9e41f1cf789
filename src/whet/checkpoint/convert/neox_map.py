"""Where each tensor of a GPT-NeoX checkpoint goes, and how the parts of the ranks are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whet.checkpoint.convert.neox_files import COMPUTED, DOWN, UP
from whet.checkpoint.convert.target import Target, expected_shapes
from whet.core.errors import WhetError

if TYPE_CHECKING:
    from whet.checkpoint.convert.neox import NeoXCheckpoint

Join = Callable[[list[Tensor]], Tensor]


class NeoXMap:
    """Made once: what it has placed tells what is left over."""

    def __init__(self, checkpoint: NeoXCheckpoint) -> None:
        self._of = checkpoint
        self._used: set[tuple[int, str]] = set()

    def targets(self) -> list[Target]:
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

    def _head(self, shapes: dict[str, tuple[int, ...]]) -> list[Target]:
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

    def _llama_layer(self, layer: int, to: str) -> list[Target]:
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
        down = self._of.name(layer, DOWN) or "mlp.linear2.weight"
        made += self._maybe(f"{to}.mlp.down_proj.weight", layer, down, _columns)
        made += self._maybe(f"{to}.mlp.down_proj.bias", layer, down.replace("weight", "bias"), self._of.bias)
        return made + self._norms(layer, to, {"weight": "scale"})

    def _neox_layer(self, layer: int, to: str) -> list[Target]:
        made = []
        up, down = (self._of.name(layer, names) or f"{names[0]}.weight" for names in (UP, DOWN))
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

    def _norms(self, layer: int, to: str, kinds: dict[str, str]) -> list[Target]:
        names = ("input_layernorm", "post_attention_layernorm")
        return [
            self._target(f"{to}.{n}.{k}", layer, f"{n}.{own}", self._of.same) for n in names for k, own in kinds.items()
        ]

    def _maybe(self, to: str, layer: int, name: str, join: Join) -> list[Target]:
        return [self._target(to, layer, name, join)] if name in self._of.source.keys.get(layer, ()) else []

    def _target(self, to: str, layer: int, name: str, join: Join) -> Target:
        self._of.need(layer, name)
        self._used.add((layer, name))
        return Target(to, self._of.source.describe(layer, name), lambda: join(self._of.source.tensors(layer, name)))

    def _side(self, number: int) -> Join:
        """The queries, keys or values of a fused matrix or bias."""
        heads, keys, ranks = (
            self._of.config.num_attention_heads,
            self._of.config.num_key_value_heads,
            self._of.source.ranks,
        )
        width = getattr(self._of.config, "head_dim", None) or self._of.config.hidden_size // heads

        def join(tensors: list[Tensor]) -> Tensor:
            if heads == keys:
                return torch.cat([_by_head(tensor, 3, width)[:, number].flatten(0, 1) for tensor in tensors])
            sizes = [heads * width // ranks, keys * width // ranks, keys * width // ranks]
            return torch.cat([tensor.split(sizes)[number] for tensor in tensors])

        return join

    def _refuse_unmapped(self) -> None:
        for layer, names in sorted(self._of.source.keys.items()):
            for name in sorted(names):
                place = self._of.source.describe(layer, name)[0]
                if name == COMPUTED:
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


def _by_head(tensor: Tensor, sides: int, width: int) -> Tensor:
    """[heads, sides, width, …]"""
    return tensor.view(-1, sides, width, *tensor.shape[1:])


def _half(number: int) -> Join:
    return lambda tensors: torch.cat([tensor.chunk(2)[number] for tensor in tensors])


def _columns(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, dim=1)
