"""The interface of a foreign checkpoint, and safe loading of `.pt` files (weights_only, memory-mapped)."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whet.core.errors import WhetError, first_line

# torch's `.pt` files, read without trusting them: tensors, numbers and texts; whatever else one names is refused.
#
# Tensors are mapped from the file, not read: a file of any size costs memory only for what is looked at.


def load_pt(path: Path) -> Any:
    """What was saved there. States of numpy's random numbers, which trainers keep beside weights, are let through."""
    try:
        with torch.serialization.safe_globals(_NUMPY_GLOBALS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise WhetError(f"{path}: no such file. Copy the whole checkpoint folder") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|Unsupported global:?|class)\s+([\w.]+\.[\w.]+)", str(error))
        what = f"it names {named[1]}" if named else first_line(error)
        raise WhetError(
            f"{path}: not only weights: {what}, and reading that could run code of whoever wrote the file. Save the "
            "state dictionaries alone where you trust it, and import those"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, OSError) as error:
        first = first_line(error)
        raise WhetError(
            f"{path}: not a whole file of torch's ({first}). It was cut off or damaged: copy it again"
        ) from None


def _numpy_globals() -> list[Any]:
    core: Any = np._core if hasattr(np, "_core") else np.core
    kinds = [type(np.dtype(kind)) for kind in ("uint32", "int64", "float64")]
    return [(core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"), core.multiarray._reconstruct,
            np.ndarray, np.dtype, *kinds]  # fmt: skip


_NUMPY_GLOBALS = _numpy_globals()


@contextmanager
def malformed_file_errors(path: Path, what: str) -> Iterator[None]:
    """Errors of looking into what was read, as errors of the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise WhetError(f"{path}: {what} is not there as it should be ({type(error).__name__}: {error})") from None


# What every kind of checkpoint gives: a transformers configuration, and for each of its tensors how it is made.


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """One tensor of the folder to be written."""

    name: str
    sources: tuple[str, ...]
    """The tensors that it is made of, as FILE:NAME."""
    make: Callable[[], Tensor]
    """Called once, when it is its turn; nothing is kept."""


@dataclass(slots=True)
class ConversionNotes:
    """What a reader of the certificate has to know."""

    left_out: dict[str, str] = field(default_factory=dict)
    """What is not in the folder, and why."""
    averaged: dict[str, float] = field(default_factory=dict)
    """Norms that differed between ranks and were averaged on request, with the largest difference."""
    assumed: list[str] = field(default_factory=list)
    """What neither the checkpoint nor its configuration says."""


class ForeignCheckpoint(Protocol):
    """A checkpoint of some other program, opened."""

    config: Any
    """The transformers configuration."""
    files: list[Path]
    """Every file that weights are read from."""
    notes: ConversionNotes
    dtype: torch.dtype
    """The widest type of its tensors, in which all are written: no number is rounded."""

    def targets(self) -> list[TargetTensor]:
        """In the order in which it is cheap to make them."""

    def logits(self, ids: Sequence[int]) -> Tensor | None:
        """[T, V] in fp32, computed from the tensors as they lie in the checkpoint, without transformers; None where
        they lie as transformers keeps them, and there is nothing to be computed differently."""


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor that a folder with this configuration must have; of tied ones the first."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # type: ignore[operator]
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    saved = model.state_dict(keep_vars=True)
    buffers = {name: tuple(b.shape) for name, b in saved.items() if not isinstance(b, nn.Parameter)}
    return shapes | buffers
