"""LoRA through peft: small trainable matrices beside the frozen weights."""

from __future__ import annotations

import torch
from torch import nn

from whet.core.errors import WhetError
from whet.model.config import AdapterConfig
from whet.model.quantize import is_quantized, plain_linear


def add_adapter(model: nn.Module, config: AdapterConfig, seed: int) -> nn.Module:
    """Freeze `model` and put adapters into it. The start values depend on the seed alone."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # peft declares an int and computes with any number
        target_modules=config.targets,
        lora_dropout=config.dropout,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    try:
        adapted = get_peft_model(model, settings)  # beside 16-bit weights, adapters are kept in fp32
    except ValueError as error:
        raise WhetError(
            f"adapter.targets: {config.targets!r} does not fit this model: {error}. "
            "Leave it out to adapt every linear layer"
        ) from None
    _refuse_tied_head(adapted.get_base_model())
    return adapted


def _refuse_tied_head(model: nn.Module) -> None:
    """An adapter of a head that shares its weight with the embedding would be merged into both."""
    head = getattr(model.get_output_embeddings(), "base_layer", None)  # type: ignore[operator]
    if head is not None and head.weight is model.get_input_embeddings().weight:  # type: ignore[operator]
        raise WhetError(
            "adapter.targets: this model's output head is also its embedding, so an adapter of the head could not be "
            "merged. Leave the head out of adapter.targets"
        )


def language_model(model: nn.Module) -> nn.Module:
    """The transformers model inside, with its adapters in place."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def merge(model: nn.Module) -> nn.Module:
    """The plain transformers model with the adapters added into its weights; without adapters, the model itself.

    Weights in 4 bits become plain ones and go to the host one by one, because together they may be too large for the
    device. Added in 4 bits, most of what an adapter learned would be rounded away.
    """
    if not hasattr(model, "merge_and_unload"):
        return model
    packed = [name for name, module in model.named_modules() if is_quantized(module)]
    for name in packed:
        model.set_submodule(name, plain_linear(model.get_submodule(name)).to("cpu"))
    if packed:
        model = model.to("cpu")
    return model.merge_and_unload()  # type: ignore[operator]
