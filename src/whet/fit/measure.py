"""Memory by part and time of a step, measured on the run's own model, with the plan's worst batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.core.heartbeat import PHASE
from whet.data.batch import PackedBatch
from whet.execution import device_memory
from whet.execution.cuda_graphs import disable_cuda_graphs
from whet.fit.estimate import MemoryParts
from whet.parallel.dtensor import local_tensor
from whet.parallel.fsdp import reshard, set_gradient_sync
from whet.run.memory_choice import MemoryChoice, run_skipped_update
from whet.training.optimizers.factory import set_learning_rates
from whet.training.overlap import starts_early
from whet.training.run_state import Run, set_micro_rows
from whet.training.step import ForwardPasses, train_step

_WARM_STEPS, _TIMED_STEPS = 3, 4
"""The first steps compile, capture CUDA graphs and select kernels."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a step takes on one device with one choice of settings; the slowest and fullest rank counts."""

    choice: MemoryChoice
    memory: MemoryParts
    evaluation: int
    """Peak bytes of an evaluation's forward pass over the same batch; 0 without validation data."""
    step_s: float
    tokens_per_s: float
    """Of all devices together, without padding."""

    @property
    def peak(self) -> int:
        return max(self.memory.total, self.evaluation)


def measure_run(run: Run) -> Measurement:
    """Measure with the run's current settings, whose worst batch is known to fit. No weight changes."""
    evaluates = run.config.data.validation is not None
    memory, evaluation = measure_memory(run), measure_evaluation(run) if evaluates else 0
    everywhere = run.ranks.all_gather([(memory, evaluation)])
    memory, evaluation = max(everywhere, key=lambda each: max(each[0].total, each[1]))
    seconds, tokens = time_steps(run)
    return Measurement(MemoryChoice.of(run), memory, evaluation, seconds, tokens / seconds)


def measure_memory(run: Run) -> MemoryParts:
    """The parts of the peak of a step over the worst micro-batch, on this rank.

    Without CUDA graphs, which hold the same tensors: a shape is computed without them first.
    """
    PHASE.enter("measuring memory")
    device, model = run.ranks.device, run.model
    disable_cuda_graphs(model)
    device_memory.free_cached(device)
    model.train()
    batch = run.loader.worst_batch().to(device)
    weights = _device_bytes(device, [*model.parameters(), *model.buffers()])
    moments: list[MemoryParts] = []
    reshard(model)
    keeps_gradients = run.loader.max_rank_rows > run.loader.micro_rows or starts_early(run)
    for number in range(2 if keeps_gradients else 1):
        set_gradient_sync(model, number == int(keeps_gradients))
        optimizer, gradients = _optimizer_bytes(run), _gradient_bytes(run)
        held = MemoryParts(weights, gradients, optimizer, 0, 0, 0)
        moments += _moments_of_passes(run, batch, held)
        device_memory.reset_peak(device)
        run_skipped_update(run)
        held = MemoryParts(weights, _gradient_bytes(run), _optimizer_bytes(run), 0, 0, 0)
        moments.append(_with_workspace(held, device_memory.peak_allocated(device)))
    for parameter in model.trainable_parameters:
        parameter.grad = None
    set_micro_rows(run, run.loader.micro_rows)  # CUDA graphs again
    return max(moments, key=lambda parts: parts.total)


def _moments_of_passes(run: Run, batch: PackedBatch, held: MemoryParts) -> Iterator[MemoryParts]:
    """The highest moments of layers, loss and backward pass of a micro-batch; `held`: what is allocated throughout."""
    device, model = run.ranks.device, run.model
    after_layers = peak_of_layers = 0

    def observe(hidden: Tensor) -> Tensor:
        nonlocal after_layers, peak_of_layers
        after_layers, peak_of_layers = device_memory.allocated(device), device_memory.peak_allocated(device)
        device_memory.reset_peak(device)
        return hidden

    device_memory.reset_peak(device)
    before = device_memory.allocated(device)
    with _observed_hidden_states(model, observe), run.autocast:
        loss = model(batch, 1 / max(1, len(batch.supervised_at)))
    peak_of_loss, after_loss = device_memory.peak_allocated(device), device_memory.allocated(device)
    device_memory.reset_peak(device)
    loss.objective.backward()
    peak_of_backward = device_memory.peak_allocated(device)
    activations, kept = max(0, after_layers - before), max(0, after_loss - after_layers)

    def moment(peak: int, loss_bytes: int) -> MemoryParts:
        parts = MemoryParts(held.weights, held.gradients, held.optimizer, activations, loss_bytes, 0)
        return _with_workspace(parts, peak)

    yield moment(peak_of_layers, 0)
    yield moment(peak_of_loss, max(0, peak_of_loss - after_layers))
    yield moment(peak_of_backward, kept)


def _with_workspace(parts: MemoryParts, peak: int) -> MemoryParts:
    """The rest of the peak is workspace."""
    rest = max(0, peak - parts.total)
    return MemoryParts(
        parts.weights, parts.gradients, parts.optimizer, parts.activations, parts.loss, parts.workspace + rest
    )


@contextlib.contextmanager
def _observed_hidden_states(model: Any, observe: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Call `observe` between the layers and the loss."""
    name = "hidden_unpacked" if model.unpacked else "hidden"
    compute = getattr(model, name)
    setattr(model, name, lambda *given: observe(compute(*given)))
    try:
        yield
    finally:
        delattr(model, name)


def measure_evaluation(run: Run) -> int:
    """Peak bytes of a forward pass without gradients. A checkpoint is copied to the host and needs none."""
    device = run.ranks.device
    run.model.eval()
    device_memory.reset_peak(device)
    with torch.no_grad(), run.autocast:
        run.model(run.loader.worst_batch().to(device))
    reshard(run.model)
    run.model.train()
    return device_memory.peak_allocated(device)


def time_steps(run: Run) -> tuple[float, float]:
    """(seconds, tokens) of a step, on average over some of the plan's. The learning rate is 0: no weight changes."""
    set_learning_rates(run.optimizer, 0.0)
    run.model.train()
    seconds, tokens = 0.0, 0
    for number in range(_WARM_STEPS + _TIMED_STEPS):
        step = run.plan.step_offset + number % len(run.plan)
        _synchronize(run)
        began = time.perf_counter()
        passes = ForwardPasses(
            run.model, run.loader, step, device=run.ranks.device, seed=run.config.run.seed, autocast=run.autocast,
            loss_scale=run.loss_scaler.value,
        )  # fmt: skip
        train_step(passes, run.optimizer, ranks=run.ranks, clip_norm=run.config.train.clip_norm).wait()
        _synchronize(run)
        if number >= _WARM_STEPS:
            seconds += time.perf_counter() - began
            tokens += run.loader.totals(step).tokens
    return max(run.ranks.all_gather([seconds])) / _TIMED_STEPS, tokens / _TIMED_STEPS


def _synchronize(run: Run) -> None:
    if run.ranks.device.type != "cpu":
        torch.accelerator.synchronize(run.ranks.device)


def _gradient_bytes(run: Run) -> int:
    gradients = [weight.grad for weight in run.model.trainable_parameters if weight.grad is not None]
    return _device_bytes(run.ranks.device, gradients)


def _optimizer_bytes(run: Run) -> int:
    values = [value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return _device_bytes(run.ranks.device, values)


def _device_bytes(device: torch.device, tensors: list[Tensor]) -> int:
    """Bytes of these tensors on the device, shared storage counted once."""
    here = [local_tensor(tensor) for tensor in tensors]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in here if each.device == device
    }
    return sum(storages.values())
