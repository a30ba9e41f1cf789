"""nanochat's model of February 2026, on top of transformers' NanoChat, which has that of its first releases.

What came later (karpathy/nanochat, nanochat/gpt.py):

- a residual stream that is scaled before each layer, and to which the first, normalised embedding is added again:
  x = resid_lambdas[i] · x + x0_lambdas[i] · x0
- value embeddings in every second layer, the last one among them: an embedding of the token is added to the values of
  each head, × 2 · sigmoid(gate), where the gate is a linear function of the layer's first 32 inputs
- layers with sliding windows of half the context, by a pattern such as SSSL; the last layer sees everything

transformers' auto classes load it from folders whose config.json has the model type below, once `register_nanochat` was
called.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, NanoChatConfig, NanoChatForCausalLM, NanoChatModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.nanochat.modeling_nanochat import (
    NanoChatAttention,
    NanoChatDecoderLayer,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from whet.compat.transformers_private import attention_implementation
from whet.core.errors import WhetError
from whet.model.load.weight_files import NANOCHAT_MODEL_TYPE

GATE_CHANNELS = 32
"""Inputs of a layer that its gates of value embeddings see."""


class WindowedNanoChatConfig(NanoChatConfig):
    """`layer_types` and `sliding_window` as transformers has them: a token attends to itself and the window − 1 tokens
    before it, one less than nanochat's number says."""

    model_type = NANOCHAT_MODEL_TYPE
    base_model_tp_plan = None  # value embeddings are not sharded by heads
    layer_types: list[str] | None = None
    sliding_window: int | None = None

    @property
    def value_embedding_layers(self) -> list[int]:
        return list(range((self.num_hidden_layers - 1) % 2, self.num_hidden_layers, 2))


class WindowedNanoChatAttention(NanoChatAttention):
    """With a window, and with value embeddings."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.ve_gate = None
        if layer_idx in config.value_embedding_layers:
            self.ve_gate = nn.Linear(min(GATE_CHANNELS, config.hidden_size), config.num_key_value_heads, bias=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Tensor | None = None,
        past_key_values: Any = None, value_embedding: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key = (proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj))
        value = self.v_proj(hidden_states).view(shape)
        if self.ve_gate is not None:
            assert value_embedding is not None
            gate = 2 * torch.sigmoid(self.ve_gate(hidden_states[..., : self.ve_gate.in_features]))
            value = value + gate.unsqueeze(-1) * value_embedding.view(shape)
        value = value.transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        query, key = self.q_norm(query), self.k_norm(key)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention_implementation(self), eager_attention_forward)
        mixed, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling,
            sliding_window=self.sliding_window, **kwargs,
        )  # fmt: skip
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class WindowedNanoChatLayer(NanoChatDecoderLayer):
    """transformers' layer passes `value_embedding` on."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = WindowedNanoChatAttention(config, layer_idx)


class WindowedNanoChatModel(NanoChatModel):
    """The layers, with the scaled residual stream and one embedding of values for each layer that has them."""

    _no_split_modules = ("WindowedNanoChatLayer",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([WindowedNanoChatLayer(config, i) for i in layers])
        self.resid_lambdas = nn.Parameter(torch.ones(config.num_hidden_layers))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.num_hidden_layers))
        width = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
        self.value_embeds = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, width) for i in config.value_embedding_layers}
        )
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None, inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None, **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("value embeddings need input_ids")
        hidden = self.embed_tokens(input_ids)
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + seen).unsqueeze(0)
        about = {"config": self.config, "inputs_embeds": hidden, "attention_mask": attention_mask,
                 "past_key_values": past_key_values, "position_ids": position_ids}  # fmt: skip
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        masks = {kind: makers[kind](**about) for kind in dict.fromkeys(self.config.layer_types)}
        rotary = self.rotary_emb(hidden, position_ids=position_ids)
        hidden = first = self.norm(hidden)
        for number, layer in enumerate(self.layers):
            hidden = self.resid_lambdas[number] * hidden + self.x0_lambdas[number] * first
            values = self.value_embeds[str(number)](input_ids) if str(number) in self.value_embeds else None
            hidden = layer(
                hidden, attention_mask=masks[self.config.layer_types[number]], position_embeddings=rotary,
                position_ids=position_ids, past_key_values=past_key_values, value_embedding=values, **kwargs,
            )  # fmt: skip
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)


class WindowedNanoChatForCausalLM(NanoChatForCausalLM):
    """The language model: an untied head, logits capped at 15."""

    config_class = WindowedNanoChatConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = WindowedNanoChatModel(config)
        self.post_init()

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        raise WhetError("model.add_tokens: nanochat's models have an embedding of values for each token in half of "
                        "their layers, which cannot grow. Use tokens that its tokenizer has")  # fmt: skip


@functools.cache
def register_nanochat() -> None:
    """Let transformers' auto classes load this model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoConfig.register(NANOCHAT_MODEL_TYPE, WindowedNanoChatConfig)
    AutoModelForCausalLM.register(WindowedNanoChatConfig, WindowedNanoChatForCausalLM)
