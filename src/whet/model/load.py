"""Loading a model, with errors that say what is missing."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from torch import nn

from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.tokenizer import cannot_load, locate


def load_model(config: ModelConfig, dtype: torch.dtype | str, device: torch.device | None = None) -> nn.Module:
    """The model in `dtype`; `auto` is the type it was saved in. Each weight goes from its file straight to `device`."""
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            locate(config.path), revision=config.revision, trust_remote_code=config.trust_remote_code, dtype=dtype,
            output_loading_info=True, device_map=None if device is None else {"": device},
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise  # the device is too small, and nothing is wrong with the files
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise cannot_load(config.path, "model", error) from None
    missing = sorted(found["missing_keys"])
    if missing:
        raise WhetError(
            f"model.path: {config.path}: {len(missing)} weights are missing ({', '.join(missing[:3])} …) and would be "
            "random numbers. The files do not belong to this config.json, or some were not copied"
        )
    return with_experts_in(model, dtype)


def with_experts_in(model: nn.Module, dtype: torch.dtype | str) -> nn.Module:
    """Experts one by one in fp64, which torch's grouped products do not know; other models stay as they are."""
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return model
