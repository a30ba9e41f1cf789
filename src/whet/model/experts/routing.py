"""The routers' choices: those of one pass, for another pass over the same tokens; and how many tokens each expert got.

Where two experts are almost equally good for a token, rounding decides which one it gets, and its hidden state changes
by far more than rounding does. So whoever compares two passes in low precision gives them the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whet.compat.transformers_private import is_experts_module
from whet.model.experts.install import TOKEN_COUNTS, experts_modules
from whet.model.quantize import weight_shape

_Choice = tuple[Tensor, Tensor]
"""The experts of each token, and their weights, both [T, K]."""


class Routing:
    """Records what the experts of a model are called with, and replays it."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        """Experts, in peft's wrappers where they have adapters."""
        self._captured: dict[nn.Module, list[_Choice]] = {}
        inside = "\0"
        for name, module in model.named_modules():
            if not f"{name}.".startswith(inside) and is_experts_module(_unwrapped(module)):
                self.modules.append(module)
                inside = f"{name}."

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Record the passes inside, one after the other."""
        self._captured = {module: [] for module in self.modules}

        def record(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
            choices = index.shape[-1]
            self._captured[module].append((index.reshape(-1, choices), weights.detach().reshape(-1, choices)))

        with self._called(record):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """The passes inside take the captured choices, if they have as many tokens; gradients flow to the weights that
        the routers computed."""

        def replay(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...] | None:
            then_index, then_weights = (torch.cat(parts) for parts in zip(*self._captured[module], strict=True))
            if then_index.shape != (index.numel() // index.shape[-1], index.shape[-1]):
                return None
            own_index, own = index.reshape(then_index.shape).long(), weights.reshape(then_index.shape)
            experts = 1 + int(torch.maximum(own_index, then_index.long()).max())
            own = own.new_zeros(len(own), experts).scatter(1, own_index, own).gather(1, then_index.long())
            found = then_weights + own - own.detach()
            return hidden, then_index.view_as(index), found.view_as(weights)

        with self._called(replay):
            yield

    @contextmanager
    def _called(self, function: Callable[..., Any]) -> Iterator[None]:
        """Call `function` before each of the modules."""

        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            return function(module, *inputs) if len(inputs) == 3 else None

        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_pre_hook(hook).remove)
            yield


def _unwrapped(module: Any) -> nn.Module:
    """A module without peft's wrappers of its parameters."""
    while hasattr(module, "parameter_name") and hasattr(module, "base_layer"):
        module = module.base_layer
    found: nn.Module = module
    return found


# The load of experts: how many tokens each got in a step, and which have got none so far.


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
