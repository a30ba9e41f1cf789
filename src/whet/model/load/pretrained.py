"""Loads a model with transformers, or initialises one at random."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.core.console import loading
from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.random_models import is_random_model, random_model_config
from whet.model.load.resize_embeddings import add_token_rows_
from whet.model.load.weight_files import (
    load_error,
    local_model_folder,
    reach_model,
    register_model_code,
    require_certified_files,
    require_files_inside,
)


def load_model(config: ModelConfig, dtype: torch.dtype | str, device: torch.device | None = None) -> nn.Module:
    """The model in `dtype` (`auto`: as saved), with rows for added tokens. Weights are read directly onto `device`."""
    model = _load_pretrained(config, dtype, device)
    add_token_rows_(model, config)
    train_pad_row_(model)
    return prepare_float64_(model, dtype)


def train_pad_row_(model: nn.Module) -> nn.Module:
    """Let the pad token's row of an embedding get its gradient, which torch drops otherwise (`padding_idx`). Many
    models pad with a token of the conversations, such as the end of a turn; padding itself is not supervised."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def auto_class(config: Any) -> Any:
    """transformers' auto class for a configuration. A checkpoint with a vision tower is loaded with it, although text
    does not reach it: an export would lose it otherwise."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    is_whole = config.get_text_config() is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_whole else AutoModelForCausalLM


def load_with_transformers(place: str | Path, **options: Any) -> Any:
    """`from_pretrained` of the `auto_class` of a folder or hub id."""
    from transformers import AutoConfig

    register_model_code(place)
    own = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
    return auto_class(AutoConfig.from_pretrained(place, **own)).from_pretrained(place, **options)


@contextlib.contextmanager
def show_loading(config: ModelConfig) -> Iterator[None]:
    """Print which model transformers loads inside this block, and count its weights on a terminal."""
    from transformers.utils import logging

    size = sum(file.stat().st_size for file in local_model_folder(config.path, config.revision).glob("*.safetensors"))
    with loading(config.path + (f" ({size / 1e9:.1f} GB)" if size >= 1e8 else "")) as track:

        def count(factory: Any, args: Any, kwargs: Any) -> Any:
            return track(args[0]) if kwargs.get("desc") == "Loading weights" else factory(*args, **kwargs)

        before = logging.set_tqdm_hook(count)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)


def _load_pretrained(config: ModelConfig, dtype: torch.dtype | str, device: torch.device | None) -> nn.Module:
    if is_random_model(config.path):
        return _init_random_model(config, dtype, device or torch.device("cpu"))
    place = reach_model(config.path)
    require_files_inside(place)
    require_certified_files(Path(place))
    try:
        with show_loading(config):
            model, found = load_with_transformers(
                place, revision=config.revision, trust_remote_code=config.trust_remote_code,
                dtype=dtype, output_loading_info=True, device_map=None if device is None else {"": device},
            )  # fmt: skip
    except torch.OutOfMemoryError:
        raise  # nothing is wrong with the files
    except Exception as error:  # a damaged or forged file can raise almost anything
        raise load_error(config.path, "model", error) from None
    missing = sorted(found["missing_keys"])
    if missing:
        raise WhetError(
            f"model.path: {config.path}: {len(missing)} weights are missing ({', '.join(missing[:3])} …) and would be "
            "initialised at random. Check that config.json belongs to the weight files and that all were copied"
        )
    return model


def _init_random_model(config: ModelConfig, dtype: torch.dtype | str, device: torch.device) -> nn.Module:
    """Initialised on `device` in the final dtype, because an 8B model in fp32 exceeds many hosts' memory. Always the
    same weights, and global random states do not change."""
    shape = random_model_config(config.path, config.trust_remote_code)
    target_dtype = (shape.dtype or torch.float32) if dtype == "auto" else dtype
    seeded = [device] if device.type not in ("cpu", "mps") else []
    with torch.random.fork_rng(seeded, device_type=device.type if seeded else "cuda"), device:
        torch.manual_seed(0)
        try:
            model: nn.Module = auto_class(shape).from_config(
                shape, dtype=target_dtype, trust_remote_code=config.trust_remote_code
            )
        except Exception as error:
            raise load_error(config.path, "model", error) from None
    return model.eval()


def prepare_float64_(model: nn.Module, dtype: torch.dtype | str) -> nn.Module:
    """In fp64, make every weight fp64, also those that an architecture keeps in fp32 (routers), and compute experts one
    by one: torch's grouped matmul does not support fp64."""
    if dtype == torch.float64:
        for weight in model.parameters():
            if weight.dtype == torch.float32:
                weight.data = weight.data.double()
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return model
