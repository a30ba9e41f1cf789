"""Models with placeholder weights, for sharded training: each process reads its own rows from the files, and none ever
holds the whole model. A placeholder has the shape and dtype of a weight and stride 0, so it takes no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from whet.compat.transformers_private import forget_attention_, unexpected_weights
from whet.core.errors import WhetError
from whet.core.files import read_json
from whet.model.config import ModelConfig
from whet.model.load.pretrained import (
    auto_class,
    load_model,
    prepare_float64_,
    report_left_out_weights,
    require_language_model,
    train_pad_row_,
)
from whet.model.load.random_models import is_random_model, random_model_config
from whet.model.load.weight_files import (
    load_error,
    reach_model,
    register_model_code,
    require_certified_files,
    require_files_inside,
    snapshot_folder,
)

_UNSCALED_TYPES = ("F64", "F32", "F16", "BF16")
"""safetensors' names of dtypes whose values need no scale."""
_ALL_COLUMNS = slice(None)


class WeightSource(Protocol):
    """Where the weights of a placeholder model come from."""

    def read_rows(self, name: str, start: int, stop: int, columns: slice = _ALL_COLUMNS) -> Tensor:
        """Rows of a weight, and columns of a matrix, in the stored dtype."""


class SafetensorsSource:
    """safetensors files, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        require_files_inside(str(folder))
        require_certified_files(folder)
        index = folder / "model.safetensors.index.json"
        names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
        try:
            self._files = [safe_open(folder / name, framework="pt") for name in names if (folder / name).exists()]
        except SafetensorError as error:
            raise load_error(str(folder), "model", error) from None
        self._of: dict[str, Any] = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118

    def has_matching(self, name: str, like: Tensor) -> bool:
        """Whether the files have this weight in the same shape and in an unscaled dtype."""
        if name not in self._of:
            return False
        kept = self._of[name].get_slice(name)
        return tuple(kept.get_shape()) == tuple(like.shape) and kept.get_dtype() in _UNSCALED_TYPES

    def has_two(self, one: str, other: str) -> bool:
        """Whether the files have different weights of these names."""
        return {one, other} <= self.names() and not torch.equal(self.read(one), self.read(other))

    def names(self) -> set[str]:
        return set(self._of)

    def read(self, name: str) -> Tensor:
        return self._of[name].get_tensor(name)

    def read_rows(self, name: str, start: int, stop: int, columns: slice = _ALL_COLUMNS) -> Tensor:
        kept = self._of[name].get_slice(name)
        if columns != _ALL_COLUMNS:
            return kept[start:stop, columns]
        is_whole = start == 0 and stop >= kept.get_shape()[0]
        return self.read(name) if is_whole else kept[start:stop]  # a slice is copied, four times as slowly


class InMemorySource:
    """A model in the host's memory."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {name: weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)}

    def read_rows(self, name: str, start: int, stop: int, columns: slice = _ALL_COLUMNS) -> Tensor:
        kept = self._weights[name][start:stop]
        return kept if columns == _ALL_COLUMNS else kept[:, columns]


def load_placeholder_model(config: ModelConfig, dtype: torch.dtype) -> tuple[nn.Module, WeightSource]:
    """A model with placeholder weights, and their source.

    Weights that the files do not store as the model has them (fused experts, GGUF, random weights, added tokens, a head
    of its own where config.json ties it) are loaded into host memory.
    """
    files = None if is_random_model(config.path) else SafetensorsSource(snapshot_folder(config))
    if files is not None and not config.trust_remote_code and not config.add_tokens:
        model = prepare_float64_(build_meta_model(config, dtype), dtype)
        saved = model.state_dict(keep_vars=True)
        buffers = {name: tensor for name, tensor in saved.items() if not isinstance(tensor, nn.Parameter)}
        named = {**dict(model.named_parameters()), **buffers}
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
        is_plain = getattr(model.config, "quantization_config", None) is None
        is_tied = not any(files.has_two(one, other) for one, other in ties.items())
        if is_plain and is_tied and all(files.has_matching(name, tensor) for name, tensor in named.items()):
            report_left_out_weights(model, unexpected_weights(model, files.names() - saved.keys()), config.path)
            for name, buffer in buffers.items():
                buffer.copy_(files.read(name))
            scalars = [(name, weight) for name, weight in model.named_parameters() if weight.numel() == 1]
            _replace_parameters(model, {weight: files.read(name).to(dtype) for name, weight in scalars})
            return replace_with_placeholders_(model), files
    model = load_model(config, dtype, torch.device("cpu"))
    held = InMemorySource(model)
    return replace_with_placeholders_(model), held


def replace_with_placeholders_(model: nn.Module) -> nn.Module:
    """Replace all weights but scalars by placeholders. Tied weights stay tied."""
    weights = [weight for weight in model.parameters() if weight.numel() > 1]
    _replace_parameters(model, {weight: torch.zeros((), dtype=weight.dtype).expand(weight.shape) for weight in weights})
    return model


def _replace_parameters(model: nn.Module, replaced: dict[nn.Parameter, Tensor]) -> None:
    """Replace parameters in every module that uses them."""
    new = {weight: nn.Parameter(by, requires_grad=weight.requires_grad) for weight, by in replaced.items()}
    for module in model.modules():
        for name, held in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if held in new:
                module.register_parameter(name, new[held])


def is_placeholder(weight: Tensor) -> bool:
    return weight.numel() > 1 and not any(weight.stride())


def move_real_tensors_(model: nn.Module, device: torch.device) -> None:
    """Move what is not a placeholder: buffers and adapters."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if not is_placeholder(weight):
                module.register_parameter(name, nn.Parameter(weight.detach().to(device), weight.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def build_meta_model(config: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device; buffers that are computed from the configuration are real."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    try:
        if is_random_model(config.path):
            shape = random_model_config(config.path)
        else:
            place = reach_model(config.path)
            register_model_code(place)
            shape = AutoConfig.from_pretrained(place, revision=config.revision, trust_remote_code=False)
            require_language_model(shape)
            forget_attention_(shape)
        with init_empty_weights(include_buffers=False):
            model: Any = auto_class(shape).from_config(shape, dtype=dtype, trust_remote_code=False)
    except WhetError:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        raise load_error(config.path, "model", error) from None
    model.tie_weights()
    return train_pad_row_(model.eval())
