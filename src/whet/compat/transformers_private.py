"""Private APIs of transformers, seen in 5.17 and 5.22."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # preparing data imports this module, and needs no torch
    from torch import Tensor, nn


def attention_implementation(model: Any) -> str:
    """`config._attn_implementation`: the name that set_attn_implementation was called with, to restore it."""
    return str(model.config._attn_implementation)


def supports_sdpa(model: Any) -> bool:
    """`PreTrainedModel._supports_sdpa`: whether the model can use torch's attention, or only the eager one."""
    return bool(model._supports_sdpa)


def tensor_parallel_plan(model: nn.Module) -> dict[str, str]:
    """`PreTrainedModel._tp_plan`: module name pattern → style (colwise, rowwise, …). Empty: the model has none."""
    return getattr(model, "_tp_plan", None) or {}


def router_logit_outputs(language_model: nn.Module) -> list[tuple[nn.Module, int]]:
    """`PreTrainedModel._can_record_outputs`: the modules whose output has the logits of a router, and at which index of
    it; in the order of the layers. Empty: the model has no router, or does not say."""
    recorders = (getattr(language_model, "_can_record_outputs", None) or {}).get("router_logits", [])
    found: list[tuple[nn.Module, int]] = []
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        kind, part = recorder.target_class, f".{(recorder.layer_name or '').strip('.')}."
        for name, module in language_model.named_modules():
            if isinstance(module, kind) and (recorder.layer_name is None or part in f".{name}."):
                found.append((module, recorder.index))
    return found


def set_special_token(tokenizer: Any, name: str, text: str) -> None:
    """`_set_model_specific_special_tokens`: give a tokenizer a named token beyond bos, eos, …, such as `eot_token`."""
    tokenizer._set_model_specific_special_tokens({name: text})


def save_custom_code(model: nn.Module, folder: Path, config: Any) -> None:
    """`PreTrainedModel._auto_class` and `dynamic_module_utils.custom_object_save`: copy the Python files of a model
    with code of its own (trust_remote_code) into an export, as save_pretrained does."""
    from transformers.dynamic_module_utils import custom_object_save

    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, folder, config=config)


def to_checkpoint_tensors(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter under the name or names it has in checkpoint files: transformers fuses the experts of a layer in
    memory only."""
    return join_checkpoint_tensors(model, {name: tensor})


def join_checkpoint_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`core_model_loading.revert_weight_conversion`: parameters as checkpoint files hold them."""
    from transformers.core_model_loading import revert_weight_conversion

    if model not in _has_conversions:  # finding out takes longer than reading most tensors
        nothing: dict[str, Tensor] = {}
        _has_conversions[model] = revert_weight_conversion(model, nothing) is not nothing
    return dict(revert_weight_conversion(model, dict(tensors))) if _has_conversions[model] else dict(tensors)


def joined_in_files(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """The parameters that checkpoint files hold as parts of one tensor, such as HRM-Text's q, k and v: all parts of
    that tensor, by the name of each."""
    import torch

    holds: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for held in to_checkpoint_tensors(model, name, torch.empty(shape, device="meta")):
            holds.setdefault(held, []).append(name)
    return {name: names for names in holds.values() if len(names) > 1 for name in names}


def forget_attention_(config: Any) -> None:
    """`PreTrainedConfig._attn_implementation`: config.json can name an attention that needs a package. whet has its
    own, and elsewhere transformers' default serves."""
    config._attn_implementation = None  # also of the configurations inside


def forget_dequantization_(model: nn.Module) -> None:
    """`PreTrainedModel._weight_conversions`: after dequantization at loading, they would write scales beside weights.
    Without them, the model's files are those of any model of its class."""
    vars(model).pop("_weight_conversions", None)


def unexpected_weights(model: Any, names: Iterable[str]) -> list[str]:
    """`PreTrainedModel._keys_to_ignore_on_load_unexpected`: of the weights in files for which a model has no place,
    those that from_pretrained reports. It ignores buffers of old checkpoints, too."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in ignored))


_has_conversions: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether the files of a model hold its weights otherwise than its memory: then `revert_weight_conversion` returns
another dict than it was given."""


def rope_frequencies(config: Any, kind: str) -> Tensor:
    """`modeling_rope_utils.ROPE_INIT_FUNCTIONS`: the inverse frequencies of rotary positions, scaled as `kind` does."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies


def is_experts_module(module: Any) -> bool:
    """`integrations.moe.use_experts_implementation`: whether the module computes its experts with the implementation
    that its configuration names. The decorator sets these attributes."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def register_experts_implementation(name: str, forward: Any) -> None:
    """`integrations.moe.ALL_EXPERTS_FUNCTIONS`: make `set_experts_implementation(name)` select `forward`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, forward)


@contextlib.contextmanager
def share_gguf_reads() -> Iterator[None]:
    """`modeling_gguf_pytorch_utils`: parses the file for the configuration, the weights and the tokenizer, and builds
    gguf's map of names for each module of the model. Until the context ends, each is done once: SmolLM2 is converted in
    a quarter of the time."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    readers: dict[str, Any] = {}

    def read(path: Any, *mode: Any) -> Any:
        if (key := f"{path} {mode}") not in readers:
            readers[key] = originals["GGUFReader"](path, *mode)
        return readers[key]

    gguf.GGUFReader = read
    gguf.get_tensor_name_map = functools.cache(originals["get_tensor_name_map"])
    try:
        yield
    finally:
        for name in names:
            setattr(gguf, name, originals[name])
