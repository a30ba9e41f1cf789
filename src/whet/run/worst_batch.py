"""The plan's worst micro-batch, computed before step 1 to see whether it fits. Nothing of the run changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from whet.core.heartbeat import PHASE
from whet.execution import device_memory
from whet.execution.cuda_graphs import uses_cuda_graphs
from whet.parallel.dtensor import local_tensor
from whet.parallel.fsdp import has_collectives_in_passes, reshard, set_gradient_sync
from whet.training.micro_batches import set_micro_rows
from whet.training.optimizers.factory import apply_gradients, decides_on_device, retract_step
from whet.training.overlap import starts_early
from whet.training.run_state import Run

_SMALL_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class WorstBatchMemory:
    """What the worst micro-batch needed on this rank's device, in bytes."""

    at_rest: int
    """Before it: weights, and optimizer state where it exists already."""
    peak: int
    is_tight: bool
    """Whether the device was so full that cached memory had to be freed for it."""


def run_worst_batch(run: Run) -> WorstBatchMemory | None:
    """Forward and backward passes over the worst micro-batch, and an optimizer step that changes no weight.

    None: the device has too little memory. Weights, optimizer state, random numbers and CUDA graphs are then as before;
    the optimizer's state, which the first step would allocate, may exist now, filled with zeros.
    """
    PHASE.enter("running the worst batch")
    device = run.ranks.device
    device_memory.free_cached(device)
    device_memory.reset_peak(device)
    at_rest, failed = device_memory.allocated(device), device_memory.failed_allocations(device)
    fits = _fits(run)
    peak, is_tight = device_memory.peak_allocated(device), device_memory.failed_allocations(device) > failed
    device_memory.free_cached(device, after_failure=not fits)
    device_memory.reset_peak(device)
    return WorstBatchMemory(at_rest, peak, is_tight) if fits else None


def _fits(run: Run) -> bool:
    """In a function of its own: when it returns, no frame of a failed pass holds tensors any more. Where other ranks
    wait in a collective of the pass, the error is raised and ends the run for all."""
    try:
        with _unchanged(run):
            _compute_worst_batch(run)
    except torch.OutOfMemoryError:
        if has_collectives_in_passes(run.model, run.ranks):
            raise
        return False
    return True


def _compute_worst_batch(run: Run) -> None:
    """Twice if gradients are allocated in the forward pass, those of an earlier micro-batch or, where steps overlap, of
    an earlier step; or if it is captured in CUDA graphs, which happens when its shape comes again."""
    model, device = run.model, run.ranks.device
    reshard(model)
    model.train()
    reserved = _allocate_optimizer_state(run)
    batch = run.loader.worst_batch().to(device)
    keeps_gradients = run.loader.max_rank_rows > run.loader.micro_rows or starts_early(run)
    passes = 2 if keeps_gradients or uses_cuda_graphs(model) else 1
    for number in range(passes):
        set_gradient_sync(model, number == passes - 1)
        if not keeps_gradients:
            _drop_gradients(run)
        with run.autocast:
            loss = model(batch, run.loss_scaler.value / max(1, len(batch.supervised_at)))
        loss.objective.backward()
        del loss
    run_skipped_update(run)
    del reserved


def _allocate_optimizer_state(run: Run) -> torch.Tensor | None:
    """torch's AdamW would allocate its state in the first step, and every later forward pass runs beside it. Where the
    update can be skipped it is allocated now, filled with zeros; elsewhere the result has as many bytes."""
    optimizer, device = run.optimizer, run.ranks.device
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    without = [weight for weight in weights if not optimizer.state.get(weight)]
    if not without or getattr(optimizer, "steps_in_chunks", False) or run.config.parallel.offload == "weights":
        return None
    if not decides_on_device(optimizer):
        needed = sum(2 * local_tensor(weight).nbytes for weight in without)
        return torch.empty(needed, dtype=torch.uint8, device=device)
    for weight in without:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    run_skipped_update(run)
    _drop_gradients(run)
    return None


def run_skipped_update(run: Run) -> None:
    """An optimizer step that changes no weight, where its kernel can skip it."""
    if decides_on_device(run.optimizer):
        one, zero = (torch.full((), value, dtype=torch.float64, device=run.ranks.device) for value in (1.0, 0.0))
        apply_gradients(run.optimizer, one, is_sound=zero)
        retract_step(run.optimizer)


def _drop_gradients(run: Run) -> None:
    for parameter in run.model.trainable_parameters:
        parameter.grad = None


@contextlib.contextmanager
def _unchanged(run: Run) -> Iterator[None]:
    """Restores generators, small buffers (a model may count in them), gradients and CUDA graphs."""
    device = run.ranks.device
    buffers = [buffer for buffer in run.model.buffers() if 0 < buffer.nbytes <= _SMALL_BUFFER_BYTES]
    before = [buffer.clone() for buffer in buffers]
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        try:
            yield
        finally:
            _drop_gradients(run)
            reshard(run.model)
            set_micro_rows(run, run.loader.micro_rows)  # forgets the CUDA graphs and the shapes seen for them
            for buffer, old in zip(buffers, before, strict=True):
                if not torch.equal(buffer, old):
                    buffer.copy_(old)
