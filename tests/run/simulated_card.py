"""A card with little memory, simulated on the CPU: bytes grow with the tokens of a micro-batch, and too many raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from whet.execution import device_memory
from whet.model.loss.loss_model import LossModel
from whet.run import memory_choice

AT_REST = 1000
PER_TOKEN = 10


@dataclass
class SimulatedCard:
    """With `recompute=full` a token needs half, with offloaded activations a quarter of it."""

    capacity: int
    passes: list[int] = field(default_factory=list)
    """Tokens of each training pass."""
    fails: Callable[[int], bool] = lambda number: False
    """Whether a training pass, counted from 0, runs out of memory whatever its size."""
    peak: int = 0
    per_token: float = PER_TOKEN

    def allocate(self, tokens: int) -> None:
        self.passes.append(tokens)
        needed = int(AT_REST + self.per_token * tokens)
        if needed > self.capacity or self.fails(len(self.passes) - 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        self.peak = max(self.peak, needed)

    def install(self, patch: pytest.MonkeyPatch) -> SimulatedCard:
        forward, transform = LossModel.forward, memory_choice.transform_layers

        def limited(model: LossModel, batch: Any, weight: float = 1.0) -> Any:
            if torch.is_grad_enabled() and model.training:
                self.allocate(len(batch.tokens))
            return forward(model, batch, weight)

        def transformed(model: Any, parallel: Any, compile: bool) -> None:
            self.per_token = PER_TOKEN / {"none": 1, "full": 2}[parallel.recompute]
            self.per_token /= 2 if parallel.offload in ("activations", "both") else 1
            transform(model, parallel, compile)

        patch.setattr("gc.collect", lambda: 0)  # 0.3 s a call, for nothing here
        patch.setattr(LossModel, "forward", limited)
        patch.setattr(memory_choice, "transform_layers", transformed)
        for name, value in {
            "has_own_memory": lambda device: True, "capacity": lambda device: self.capacity,
            "allocated": lambda device: AT_REST, "peak_allocated": lambda device: self.peak,
            "reset_peak": lambda device: setattr(self, "peak", AT_REST), "failed_allocations": lambda device: 0,
        }.items():  # fmt: skip
            patch.setattr(device_memory, name, value)
        return self
