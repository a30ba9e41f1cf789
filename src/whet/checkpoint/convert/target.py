"""What every kind of checkpoint gives: a transformers configuration, and for each of its tensors how it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of the folder to be written."""

    name: str
    sources: tuple[str, ...]
    """The tensors that it is made of, as FILE:NAME."""
    make: Callable[[], Tensor]
    """Called once, when it is its turn; nothing is kept."""


@dataclass(slots=True)
class Notes:
    """What a reader of the certificate has to know."""

    left_out: dict[str, str] = field(default_factory=dict)
    """What is not in the folder, and why."""
    averaged: dict[str, float] = field(default_factory=dict)
    """Norms that differed between ranks and were averaged on request, with the largest difference."""
    assumed: list[str] = field(default_factory=list)
    """What neither the checkpoint nor its configuration says."""


class Checkpoint(Protocol):
    """A checkpoint of some other program, opened."""

    config: Any
    """The transformers configuration."""
    files: list[Path]
    """Every file that weights are read from."""
    notes: Notes
    dtype: torch.dtype
    """The widest type of its tensors, in which all are written: no number is rounded."""

    def targets(self) -> list[Target]:
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
