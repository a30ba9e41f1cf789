"""The load of experts: how many tokens each got in a step, and which have got none so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whet.model.experts.install import TOKEN_COUNTS, experts_modules
from whet.model.quantize import weight_shape


class StepLoad(NamedTuple):
    """The load in one step, over all micro-batches and ranks."""

    max_load: float
    """Tokens of the busiest expert ÷ the mean, in the layer where that is largest."""
    idle: float
    """Experts of all layers without a token in this step."""
    idle_so_far: float
    """Experts without a token since the process started."""


class ExpertLoad:
    """Counts on the device; nothing waits for it. Padding is counted, and recomputed layers twice."""

    def __init__(self, language_model: nn.Module, device: torch.device) -> None:
        modules: dict[str, Any] = experts_modules(language_model)
        sizes = [next(weight_shape(weight)[0] for weight in module.parameters()) for module in modules.values()]
        self.names = list(modules)
        self.experts = sum(sizes)
        self.steps = 0
        """Steps of this process that were counted."""
        self._sizes = torch.tensor(sizes, device=device)
        self._exists = torch.arange(max(sizes, default=0), device=device) < self._sizes[:, None]
        self._counts, self._totals = (
            torch.zeros(self._exists.shape, dtype=torch.int64, device=device) for _ in range(2)
        )
        for module, counts in zip(modules.values(), self._counts, strict=True):
            setattr(module, TOKEN_COUNTS, counts)

    def finish_step(self, all_reduce_: Callable[[Tensor], Tensor]) -> Tensor:
        """StepLoad of the step, as a tensor; counting starts again."""
        counts = all_reduce_(self._counts.clone())
        self._counts.zero_()
        self._totals += counts
        means = counts.sum(dim=1).clamp(min=1) / self._sizes
        max_load = (counts.amax(dim=1) / means).max()
        idle = ((each == 0) & self._exists for each in (counts, self._totals))
        return torch.stack([max_load, *(each.sum() for each in idle)]).double()

    def idle_experts(self) -> dict[str, list[int]]:
        """The experts of each module that have got no token so far. Waits for the device."""
        idle = ((self._totals == 0) & self._exists).cpu()
        found = {name: row.nonzero().flatten().tolist() for name, row in zip(self.names, idle, strict=True)}
        return {name: experts for name, experts in found.items() if experts}
