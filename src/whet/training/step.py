"""One optimizer step up to its gradients. It fits on a screen, and there is no other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from whet.compat.torch_private import foreach_norm
from whet.core.distributed import Ranks
from whet.core.heartbeat import PHASE
from whet.parallel.ddp import all_reduce_gradients
from whet.parallel.dtensor import local_tensor, replica_count
from whet.parallel.fsdp import reshard
from whet.parallel.tensor_parallel import sync_replicated_gradients
from whet.training.micro_batches import ForwardPasses

ConditionalUpdate = Callable[[torch.Tensor, torch.Tensor], None]
"""Moves the weights by their gradients times the first number if the second is not 0; both are on the device."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Over the whole step: all micro-batches, all ranks. What could not be computed is NaN, never a number."""

    loss: float
    """Sum of −log p over supervised tokens ÷ their number, divided once."""
    accuracy: float
    """The part of them that the model would have said."""
    grad_norm: float
    """Before clipping."""
    factor: float
    """What the gradients are to be multiplied by: it takes the loss scale out of them and shortens them to the largest
    norm that is allowed. `take_step` does."""
    stop: bool
    """Some rank was asked to stop."""
    data_s: float
    """Seconds this rank waited for its batches."""
    save: bool = False
    """Some rank wants a checkpoint after this step."""
    came: torch.cuda.Event | None = None
    """When the numbers were there, on CUDA."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def compute_gradients(
    passes: ForwardPasses, *, ranks: Ranks, clip_norm: float, stop: bool, save: bool = False, move: ConditionalUpdate | None = None,
    limit: float = math.inf, meanwhile: Callable[[], None] | None = None,
) -> StepResult:  # fmt: skip
    """Backward passes over this rank's forward passes, and one reduction. The device is waited for at the end only.

    The weights are left alone, but for `move`: it is called before the waiting, so that the device can go on, and moves
    nothing if loss or norm are not finite or the loss is above `limit`. Without supervised tokens it is not called.
    After it, and before the waiting too, `meanwhile` is called.
    """
    model, step, supervised, loss_scale = passes.model, passes.step, passes.supervised, passes.loss_scale
    reshard(model)  # what a forward pass without a backward pass has gathered would keep the gradients to itself
    parameters = model.trainable_parameters
    for parameter in parameters:
        parameter.grad = None
    sums = torch.zeros(5, dtype=torch.float64, device=ranks.device)
    sums[2].fill_(stop)  # an assignment would wait for the device
    sums[4].fill_(save)
    for result in passes:
        result.objective.backward()
        sums[0] += result.loss
        sums[1] += result.hits.sum()
    PHASE.enter("summing", step + 1)
    all_reduce_gradients(parameters, ranks)
    sync_replicated_gradients(model)
    if not ranks.is_tensor_main:
        sums[:2].zero_()
    sums[3] = squared_gradient_norm(parameters, ranks)
    ranks.all_reduce_(sums)
    reading = HostCopy(sums)
    if move is not None and supervised:
        move(*_decide_on_device(sums, supervised, loss_scale, clip_norm, limit))
        if meanwhile is not None:
            meanwhile()
            PHASE.enter("waiting for the device", step + 1)
    loss, hits, stops, squares, saves = reading.numbers()
    if not supervised:
        return StepResult(math.nan, math.nan, math.nan, math.nan, stops > 0, passes.data_s, saves > 0, reading.came)
    norm = math.sqrt(squares) / loss_scale
    factor = min(1.0, clip_norm / (norm + 1e-6)) / loss_scale
    return StepResult(
        loss / supervised, hits / supervised, norm, factor, stops > 0, passes.data_s, saves > 0, reading.came
    )


class HostCopy:
    """Numbers on their way from the device. Whoever waits for them does not wait for what was asked for after them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host = numbers.to("cpu", non_blocking=numbers.is_cuda)
        self.came: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self.came = torch.cuda.Event(enable_timing=True)
            self.came.record()

    def numbers(self) -> list[float]:
        if self.came is not None:
            self.came.synchronize()
        found: list[float] = self._host.tolist()
        return found


def _decide_on_device(
    sums: torch.Tensor, supervised: int, loss_scale: float, clip_norm: float, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of the gradients, and 1 if a step with this loss and norm is to be taken, found by the device: in fp64
    and in the order in which the host computes them, so that both find the same."""
    # by tensors: CUDA multiplies by the inverse of a number instead of dividing by it, which rounds otherwise
    loss, norm = sums[0] / torch.full_like(sums[0], supervised), sums[3].sqrt() / torch.full_like(sums[3], loss_scale)
    factor = (torch.full_like(norm, clip_norm) / (norm + 1e-6)).clamp(max=1.0) / torch.full_like(norm, loss_scale)
    return factor, (loss.isfinite() & norm.isfinite() & (loss <= limit)).double()


def squared_gradient_norm(parameters: list[nn.Parameter], ranks: Ranks) -> torch.Tensor:
    """This process's part of the squared norm of the gradients, in fp64: summed over all processes it is the whole."""
    held: dict[int, list[torch.Tensor]] = {}  # by how many hold the same: layers may be divided more than the rest
    for parameter in parameters:
        if parameter.grad is not None:
            held.setdefault(replica_count(parameter.grad, ranks), []).append(local_tensor(parameter.grad))
    return torch.stack([_sum_of_squares(parts) / count for count, parts in held.items()]).sum()


def _sum_of_squares(parts: list[torch.Tensor]) -> torch.Tensor:
    exact = torch.promote_types(parts[0].dtype, torch.float32)  # a norm in bf16 would have 8 bits
    return torch.linalg.vector_norm(torch.stack(foreach_norm(parts, 2, dtype=exact))).double().square()
