"""The output head of a language model: its weight, bias, scale and soft-cap, read from the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.peft_private import is_lora_linear, modules_to_save_type, trainable_tokens_type
from whet.core.errors import WhetError

_LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere; Falcon H1; Muse Glimmer
_LOGIT_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite; Inkling
_MULTIPLIES = ("hyperclovax",)  # by logits_scaling, by which Granite divides
_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma; RecurrentGemma; xLSTM


@dataclass(frozen=True, slots=True)
class OutputHead:
    """logits = cap · tanh(y / cap), y = (hidden · weightᵀ + bias) · scale; without a cap, logits = y."""

    weight: Tensor
    """[V, E] with adapters added, differentiable."""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    cap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits of a few positions. The loss does not use this: it never materialises all logits."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        logits = nn.functional.linear(hidden, self.weight.to(hidden.dtype), bias) * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


def read_output_head(model: nn.Module) -> OutputHead:
    """The head of a transformers model, with adapters or without. Raises for a head that is not a linear layer."""
    weight, bias = _head_tensors(model.get_output_embeddings())  # type: ignore[operator]
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    scale = 1.0
    for name in _LOGIT_MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    for name in _LOGIT_DIVISORS:
        value = getattr(config, name, None) or 1.0
        scale = scale * value if config.model_type in _MULTIPLIES else scale / value
    caps = (getattr(config, name, None) for name in _LOGIT_CAPS)
    return OutputHead(weight, bias, scale, next((cap for cap in caps if cap is not None), None))


def _head_tensors(module: Any) -> tuple[Tensor, Tensor | None]:
    forward = getattr(type(module), "forward", None)
    if forward is nn.Linear.forward:  # not a subclass such as a quantised layer
        return module.weight, module.bias
    if isinstance(module, modules_to_save_type()):
        is_on = module.active_adapters and not module.disable_adapters
        return _head_tensors(module.modules_to_save[module.active_adapters[0]] if is_on else module.original_module)
    if isinstance(module, trainable_tokens_type()):
        rows = module.token_adapter
        weight, bias = _head_tensors(rows.get_base_layer())
        is_on = module.active_adapters and not (module.disable_adapters or rows.disable_adapters or rows.merged)
        return (rows.get_merged_weights(module.active_adapters), None) if is_on else (weight, bias)
    if is_lora_linear(module):
        return _adapted_head_tensors(module)
    raise WhetError(
        f"model.path: the output head of this model is a {type(module).__name__}, and whet supports linear layers only"
    )


def _adapted_head_tensors(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Base weight + scaling · B · A. With the base weight alone, the adapter would get no gradient."""
    weight, bias = _head_tensors(layer.base_layer)
    if layer.disable_adapters or layer.merged:
        return weight, bias
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        if name in layer.lora_variant or layer.lora_B[name].bias is not None:
            raise WhetError(
                "adapter.targets: on the output head whet supports plain LoRA only, without bias. Remove the head from "
                "adapter.targets, or set adapter.method=lora"
            )
        if isinstance(layer.lora_dropout[name], nn.Dropout):
            raise WhetError(
                f"adapter.dropout: {layer.lora_dropout[name].p} is not supported on the output head. Remove the head "
                "from adapter.targets, or set adapter.dropout=0"
            )
        with torch.autocast(weight.device.type, enabled=False):
            weight = weight + layer.get_delta_weight(name)  # in the adapter's fp32
    return weight, bias
