"""The training step: forward, backward, reduce gradients, clip, optimizer. There is no other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from whet.compat.torch_private import foreach_norm
from whet.core.distributed import Ranks, derive_seed, seed_generators
from whet.core.heartbeat import PHASE
from whet.data.loader import Loader, ReplayLoader
from whet.execution.cuda_graphs import release_cuda_graphs
from whet.execution.device_memory import free_cached
from whet.model.experts.routing import StepLoad
from whet.model.loss.linear_cross_entropy import LossSum
from whet.model.loss.loss_model import LossModel
from whet.parallel.ddp import accumulate_in_fp32, all_reduce_gradients
from whet.parallel.dtensor import local_tensor, replica_count
from whet.parallel.expert_parallel import sum_gradients_over_expert_group
from whet.parallel.fsdp import has_collectives_in_passes, reshard, set_gradient_sync
from whet.parallel.tensor_parallel import sync_replicated_gradients
from whet.training.optimizers.factory import apply_gradients, retract_step

if TYPE_CHECKING:
    from numpy.typing import NDArray


def train_step(
    forward: ForwardPasses, optimizer: torch.optim.Optimizer | None, *, ranks: Ranks, clip_norm: float,
    spike_limit: float = math.inf, stop_requested: Callable[[], bool] = lambda: False, save: bool = False,
) -> PendingStep:  # fmt: skip
    """Launch one optimizer step over this rank's micro-batches; `PendingStep.wait` returns its loss and gradient norm.

    The optimizer changes no weight if the loss or the gradient norm is not finite or the loss is above `spike_limit`.
    `stop_requested` and `save` are requests of this rank; the result has those of any rank. Whether to stop is decided
    after the passes, so that a signal during them ends the run with this step. Without an optimizer, as in
    `whet train --replay`, only gradients are computed. A rank that runs out of memory repeats its passes with smaller
    micro-batches, while the others wait for its gradients.
    """
    model, ran_out_of_memory = forward.model, False
    reshard(model)  # an evaluation may have left the weights gathered: their gradients would be those of other tensors
    parameters = model.trainable_parameters
    sums = torch.empty(_SUMS + forward.conversations, dtype=torch.float64, device=ranks.device)
    router_aux_loss = forward.count_router_choices(ranks)
    while not _compute_gradients(forward, parameters, sums, ranks):
        forward, ran_out_of_memory = forward.in_smaller_micro_batches(ranks), True
    # loss, hits, then what fill_ sets without waiting for the device, unlike an assignment; the squared gradient norm;
    # then the loss of each conversation
    for index, flag in enumerate((stop_requested(), save, ran_out_of_memory), 2):
        sums[index].fill_(flag)

    # Reduce gradients and sums over the ranks. Ranks of one tensor-parallel group have the same loss: one counts.
    PHASE.enter("reducing gradients", forward.step + 1)
    all_reduce_gradients(parameters, ranks)
    sync_replicated_gradients(model)
    sum_gradients_over_expert_group(model)
    sums[_SUMS:] = forward.conversation_losses
    if not ranks.is_tensor_main:
        sums[:2].zero_()
        sums[_SUMS:].zero_()
    sums[5] = squared_gradient_norm(parameters, ranks)
    ranks.all_reduce_(sums)

    # Clip: one factor removes the loss scale and limits the norm. All of it stays on the device, in fp64. Divisors are
    # tensors: CUDA would multiply by the inverse of a Python number, which rounds differently from the host.
    supervised, loss_scale, clip = (sums.new_full((), n) for n in (forward.supervised, forward.loss_scale, clip_norm))
    mean_loss, accuracy, norm = sums[0] / supervised, sums[1] / supervised, sums[5].sqrt() / loss_scale
    gradient_scale = (clip / (norm + 1e-6)).clamp(max=1.0) / loss_scale
    is_sound = (mean_loss.isfinite() & norm.isfinite() & (mean_loss <= spike_limit)).double()
    numbers = torch.stack([mean_loss, accuracy, norm, gradient_scale, *sums[2:5], is_sound, router_aux_loss])
    if model.expert_load is not None:
        numbers = torch.cat([numbers, model.expert_load.finish_step(ranks.all_reduce_)])
    # the copy to the host starts before the optimizer
    pending = PendingStep(torch.cat([sums[_SUMS:], numbers]), forward, optimizer)

    # Optimizer
    PHASE.enter("updating weights", forward.step + 1)
    if optimizer is not None:
        apply_gradients(optimizer, gradient_scale, is_sound)
    return pending


_SUMS = 6
"""Numbers of a step before the losses of its conversations."""


def _compute_gradients(forward: ForwardPasses, parameters: list[nn.Parameter], sums: Tensor, ranks: Ranks) -> bool:
    """Forward and backward, one micro-batch at a time, into the parameters' gradients and the first two sums: loss and
    hits. The loss is divided once, by the number of supervised tokens in the whole step, so the gradients of
    micro-batches and ranks only have to be summed. False: the device has too little memory for these micro-batches."""
    for parameter in parameters:
        parameter.grad = None
    sums.zero_()
    try:
        for loss in forward:
            loss.objective.backward()
            sums[0] += loss.loss
            sums[1] += loss.hits.sum()
    except torch.OutOfMemoryError:
        if not forward.can_be_smaller(ranks):
            raise
        return False
    return True


class ForwardPasses(Iterator[LossSum]):
    """This rank's forward passes of one step, one micro-batch at a time, each launched when the iterator advances."""

    def __init__(
        self, model: LossModel, loader: Loader | ReplayLoader, step: int, *, device: torch.device, seed: int,
        autocast: AbstractContextManager[object], loss_scale: float,
    ) -> None:  # fmt: skip
        self.model, self.step, self.loss_scale = model, step, loss_scale
        totals = loader.totals(step)
        self.supervised, self.conversations = totals.supervised, totals.conversations
        """Supervised tokens and conversations of the step, over all micro-batches and ranks."""
        self.conversation_losses = torch.zeros(self.conversations, dtype=torch.float64, device=device)
        """The sum of −log p of each conversation, in the order of the plan, as far as this rank has computed it."""
        self.data_s = 0.0
        """Seconds this rank has waited for its batches."""
        self._batches, self._count = loader.micro_batches(step), loader.micro_batch_count(step)
        self._loader, self._device, self._seed, self._autocast, self._launched = loader, device, seed, autocast, 0

    def count_router_choices(self, ranks: Ranks) -> Tensor:
        """Count what routers choose in all micro-batches of the step, on all ranks, before its first backward pass.
        Returns their auxiliary loss; NaN without one."""
        loss = self.model.router_aux_loss
        if loss is None:
            return torch.full((), math.nan, dtype=torch.float64, device=ranks.device)
        batches = list(self._batches)
        self._batches = iter(batches)

        def forward_passes() -> None:
            for number, (row, batch) in enumerate(batches, 1):
                PHASE.enter(f"counting the experts' tokens in micro-batch {number}", self.step + 1)
                self._seed_dropout(row)
                with self._autocast:
                    self.model.with_full_weights(partial(self.model.hidden_of_batch, batch.to(self._device)))

        counted = loss.count(forward_passes, ranks.all_reduce_, self.loss_scale)
        reshard(self.model)
        return counted

    def __next__(self) -> LossSum:
        began = time.perf_counter()
        row, batch = next(self._batches)
        self.data_s += time.perf_counter() - began
        self._launched += 1
        PHASE.enter(f"micro-batch {self._launched}", self.step + 1)
        set_gradient_sync(self.model, self._launched == self._count)
        self._seed_dropout(row)
        weight = self.loss_scale / self.supervised if self.supervised else math.nan
        batch = batch.to(self._device)
        with self._autocast:
            loss: LossSum = self.model(batch, weight)
        self.conversation_losses.index_add_(0, batch.place_at, loss.nll.double())
        return loss

    def _seed_dropout(self, row: int) -> None:
        """So that it depends on seed, step and row alone."""
        seed_generators(derive_seed(self._seed, self.step, row), self._device)

    @property
    def micro_rows(self) -> int:
        return self._loader.micro_rows if isinstance(self._loader, Loader) else 1

    def can_be_smaller(self, ranks: Ranks) -> bool:
        """Not where every micro-batch has collectives: the other ranks wait in one."""
        return self.micro_rows > 1 and not has_collectives_in_passes(self.model, ranks)

    def in_smaller_micro_batches(self, ranks: Ranks) -> ForwardPasses:
        """All forward passes of the step again, with half the rows in a micro-batch."""
        assert isinstance(self._loader, Loader)
        release_cuda_graphs(self.model)
        for parameter in self.model.trainable_parameters:
            parameter.grad = None
        free_cached(self._device, after_failure=True)
        if ranks.world_size == 1:  # ranks reduce gradients of one dtype
            accumulate_in_fp32(self.model)
        return ForwardPasses(
            self.model, self._loader.with_micro_rows(-(-self.micro_rows // 2)), self.step, device=self._device,
            seed=self._seed, autocast=self._autocast, loss_scale=self.loss_scale,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step over all micro-batches and ranks. What could not be computed is NaN."""

    loss: float
    """Sum of −log p over the supervised tokens ÷ their number."""
    accuracy: float
    """The share of them to which the model gives the highest probability."""
    grad_norm: float
    """Before clipping."""
    gradient_scale: float
    """The factor that removes the loss scale from the gradients and clips their norm."""
    stop_requested: bool
    """By any rank."""
    data_s: float
    """Seconds this rank waited for its batches."""
    save_requested: bool = False
    """By any rank."""
    updated: bool = False
    """Whether the optimizer changed the weights."""
    router_aux_loss: float = math.nan
    """Of the whole step, without its coefficient; NaN without train.router_aux_loss."""
    expert_load: StepLoad | None = None
    """None for models without experts."""
    conversation_losses: NDArray[np.float64] | None = None
    """The sum of −log p over the supervised tokens of each conversation of the step, in the order of the plan."""
    ran_out_of_memory: bool = False
    """Whether any rank had to repeat the step in smaller micro-batches."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class PendingStep:
    """A launched step, whose numbers are on their way to the host. Waiting for them does not wait for kernels launched
    later: neither for the optimizer nor for the next step."""

    def __init__(self, numbers: Tensor, forward: ForwardPasses, optimizer: torch.optim.Optimizer | None) -> None:
        self._numbers, self._forward, self._optimizer = numbers.to("cpu", non_blocking=True), forward, optimizer
        self.copied: torch.cuda.Event | None = None
        """When the numbers were copied, on CUDA."""
        if numbers.is_cuda:
            self.copied = torch.cuda.Event(enable_timing=True)
            self.copied.record()

    def wait(self) -> StepResult:
        """The numbers of the step, as soon as the device has computed them."""
        PHASE.enter("waiting for the device", self._forward.step + 1)
        if self.copied is not None:
            self.copied.synchronize()
        conversation_losses, numbers = np.split(self._numbers.numpy(), [self._forward.conversations])
        loss, accuracy, norm, scale, stop, save, out_of_memory, is_sound, router_aux_loss, *load = numbers.tolist()
        if self._optimizer is not None and not is_sound:
            retract_step(self._optimizer)
        if not self._forward.supervised:  # an empty step has no loss, and its gradient means nothing
            loss = accuracy = norm = scale = math.nan
        updated = self._optimizer is not None and bool(is_sound)
        return StepResult(
            loss,
            accuracy,
            norm,
            scale,
            stop > 0,
            self._forward.data_s,
            save > 0,
            updated,
            router_aux_loss,
            StepLoad(*load) if load else None,
            conversation_losses,
            out_of_memory > 0,
        )

    @property
    def micro_rows(self) -> int:
        """The rows of a micro-batch with which this rank computed the step."""
        return self._forward.micro_rows


def squared_gradient_norm(parameters: list[nn.Parameter], ranks: Ranks) -> Tensor:
    """This process's part of the squared gradient norm, in fp64: the sum over all processes is the whole."""
    by_replicas: dict[int, list[Tensor]] = {}  # a gradient that n processes hold counts 1/n on each
    for parameter in parameters:
        if parameter.grad is not None:
            replicas = 1 if ranks.world_size == 1 else replica_count(parameter.grad, ranks)
            by_replicas.setdefault(replicas, []).append(local_tensor(parameter.grad))
    squares = []
    for replicas, gradients in by_replicas.items():
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)  # a norm in bf16 would have 8 bits
        norm = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients, 2, dtype=dtype)))
        squares.append(norm.double().square() / replicas)
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=ranks.device)
