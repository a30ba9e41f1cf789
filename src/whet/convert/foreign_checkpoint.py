"""The interface of a foreign checkpoint, and safe loading of `.pt` and `config.json` files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whet.core.errors import WhetError, first_line, refused_pickle
from whet.core.files import read_json


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """One tensor of the model folder to write."""

    name: str
    sources: tuple[str, ...]
    """The tensors it is built from, as FILE:NAME."""
    build: Callable[[], Tensor]


@dataclass(slots=True)
class ConversionNotes:
    """Keys of the certificate."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Tensors that are not in the folder → the reason."""
    averaged: dict[str, float] = field(default_factory=dict)
    """Norms that differed between ranks and were averaged on request → the largest difference."""
    assumed: list[str] = field(default_factory=list)
    """Assumptions that neither the checkpoint nor its configuration confirms."""


class ForeignCheckpoint(Protocol):
    """An opened checkpoint of another trainer."""

    config: Any
    """The transformers config."""
    files: list[Path]
    """Every file that weights are read from."""
    notes: ConversionNotes
    dtype: torch.dtype
    """The widest dtype of its tensors, in which all are written, so that nothing is rounded."""

    def targets(self) -> list[TargetTensor]:
        """All tensors of the model, in an order in which they are cheap to read."""

    def logits(self, ids: Sequence[int]) -> Tensor | None:
        """[T, V] in fp32, computed from the tensors of the checkpoint without transformers. None if the checkpoint
        stores tensors as transformers does; they are compared directly then."""


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of a model with this config; of tied tensors the first one."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # type: ignore[operator]
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    saved = model.state_dict(keep_vars=True)
    buffers = {name: tuple(b.shape) for name, b in saved.items() if not isinstance(b, nn.Parameter)}
    return shapes | buffers


def read_hf_config(file: Path) -> Any:
    """The transformers config in a config.json."""
    from transformers import AutoConfig

    content = read_json(file)
    if not isinstance(content, dict) or content.get("model_type") is None:
        raise WhetError(f"--config {file}: not a config.json of transformers, model_type is missing")
    try:
        return AutoConfig.for_model(**content)
    except Exception as error:  # transformers raises errors of many kinds
        raise WhetError(f"--config {file}: transformers rejects it: {first_line(error)}") from None


def load_pt(path: Path) -> Any:
    """Load a `.pt` file with weights_only: tensors, numbers, strings, and the states of numpy's random generators that
    trainers save beside weights. Tensors are memory-mapped, so that only those in use take memory."""
    try:
        with torch.serialization.safe_globals(_NUMPY_GLOBALS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise WhetError(f"{path}: no such file. Copy the whole checkpoint folder") from None
    except Exception as error:  # a damaged or forged file can raise almost anything
        refused = refused_pickle(error)
        if refused is None:
            raise WhetError(f"{path}: truncated or damaged ({first_line(error)}). Copy it again") from None
        raise WhetError(
            f"{path}: {refused}. On a machine where you trust the file, save its state dict alone, and import that"
        ) from None


def _numpy_globals() -> list[Any]:
    core: Any = np._core if hasattr(np, "_core") else np.core
    dtypes = [type(np.dtype(name)) for name in ("uint32", "int64", "float64")]
    return [(core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"), core.multiarray._reconstruct,
            np.ndarray, np.dtype, *dtypes]  # fmt: skip


_NUMPY_GLOBALS = _numpy_globals()


@contextmanager
def malformed_file_errors(path: Path, what: str) -> Iterator[None]:
    """Turn lookup errors in the content of a file into errors that name the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise WhetError(f"{path}: {what} is missing or malformed ({type(error).__name__}: {error})") from None
