"""Finds the conversations and the module that made a step non-finite, by running its conversations one by one."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.console import progress
from whet.core.distributed import Ranks, derive_seed, seed_generators
from whet.data.batch import PackedBatch
from whet.data.loader import Loader, ReplayLoader
from whet.model.loss.loss_model import LossModel
from whet.parallel.ddp import trainable_parameters
from whet.parallel.dtensor import local_tensor
from whet.parallel.fsdp import is_sharded, reshard
from whet.training.guard import FaultKind

# The first module whose output, or else whose gradient, is not finite.

_MODEL_PREFIX = "language_model."


class NonfiniteWatch:
    """The first non-finite modules, in the order of execution."""

    def __init__(self) -> None:
        self.forward: str | None = None
        self._backward: list[str] = []
        self._tensor = 0

    @property
    def backward(self) -> str | None:
        """Several where modules share an input, whose gradient does not tell them apart."""
        return " or ".join(self._backward) or None

    def before_forward(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.forward is None and not all(map(_is_finite, _inputs(args, kwargs))):
            self.forward = name.rpartition(".")[0] or name  # it became non-finite between the parent's modules

    def after_forward(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.forward is None and not all(map(_is_finite, _tensors(output))):
            self.forward = name
        if any(tensor.requires_grad for tensor in _tensors(output)):
            for tensor in _inputs(args, kwargs):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._gradient, name, _tensor_id(tensor)))

    def _gradient(self, name: str, tensor: int, gradient: Tensor) -> None:
        """The gradient of a module's input. Inner modules come first, so they are named, not the layer around them."""
        if self._backward and tensor != self._tensor:
            return
        if not any(inner.startswith(f"{name}.") for inner in self._backward) and not _is_finite(gradient):
            self._tensor = tensor
            self._backward.append(name)


_tensor_ids = itertools.count(1)


def _tensor_id(tensor: Any) -> int:
    """Unique for each tensor; Python reuses `id` after a tensor is freed."""
    if not hasattr(tensor, "_whet_number"):
        tensor._whet_number = next(_tensor_ids)
    number: int = tensor._whet_number
    return number


@contextlib.contextmanager
def watch_nonfinite(model: nn.Module) -> Iterator[NonfiniteWatch]:
    """Check the inputs, outputs and gradients of all modules of `model` inside the block."""
    watch = NonfiniteWatch()
    hooks = []
    for name, module in _named_modules(model):
        hooks.append(module.register_forward_pre_hook(partial(watch.before_forward, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(watch.after_forward, name), with_kwargs=True))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def module_order(model: nn.Module) -> dict[str, int]:
    """The names that a watch reports, with their position in the model."""
    return {name: place for place, (name, _) in enumerate(_named_modules(model))}


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for full, module in model.named_modules():
        if full not in ("", _MODEL_PREFIX.rstrip(".")):
            yield full.removeprefix(_MODEL_PREFIX), module


def nonfinite_weights(model: nn.Module) -> list[str]:
    """The names of weights that are not finite."""
    return [
        name.removeprefix(_MODEL_PREFIX) for name, weight in model.named_parameters() if not _is_finite(weight.detach())
    ]


def nonfinite_gradients(model: nn.Module) -> list[str]:
    """The names of weights whose gradient is not finite."""
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    return [name.removeprefix(_MODEL_PREFIX) for name, grad in named if grad is not None and not _is_finite(grad)]


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(local_tensor(tensor)).all())


def _inputs(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The hidden states that a module takes; not masks, which may hold -inf, nor caches."""
    return _tensors((args, kwargs.get("hidden_states")))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# The conversations of a faulty step one by one, without changing the weights.

_TOP_LOSSES = 5


@dataclass(frozen=True, slots=True)
class DocumentResult:
    """One conversation, or one micro-batch, run by itself."""

    documents: tuple[int, ...]
    tokens: int
    supervised: int
    loss: float
    """Mean −log p over its supervised tokens; NaN if it has none."""
    grad_norm: float
    """Of its contribution to the step's gradient; NaN if no gradient was computed."""
    layer: str | None
    """The first module that was not finite, if any."""


@dataclass(frozen=True, slots=True)
class MicroBatchLayout:
    """The documents of a micro-batch. The names are keys of faults/step-NNNNNN.json."""

    rank: int
    row: int
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, equal on every rank."""

    conversations: list[DocumentResult]
    blamed: list[DocumentResult]
    """The faulty conversations, or micro-batches if no conversation is faulty alone; for a spike the conversations with
    the highest losses; for an empty step all."""
    nonfinite_weights: list[str]
    """Names of weights that are not finite."""
    micro_batches: list[MicroBatchLayout]
    losses_only: bool = False
    """Gradients were not checked, because processes share them: a fault in the backward pass was not found."""


@dataclass(frozen=True, slots=True)
class Diagnoser:
    """Runs the conversations of a step again, with the seeds and the precision of the step."""

    model: LossModel
    ranks: Ranks
    seed: int
    autocast: AbstractContextManager[object]
    loss_scale: float
    max_conversations: int | None = 256
    """Of each rank, so that a run that continues is not held up for long. None: all."""

    def diagnose(self, loader: Loader | ReplayLoader, step: int, kind: FaultKind) -> Diagnosis:
        """See `_diagnose`; sharded weights are freed afterwards."""
        try:
            return self._diagnose(loader, step, kind)
        finally:
            reshard(self.model)

    def _diagnose(self, loader: Loader | ReplayLoader, step: int, kind: FaultKind) -> Diagnosis:
        """Run every conversation of a step alone and, if none is faulty alone, every micro-batch.

        After a spike only losses are computed, because the step may still be taken with the gradients it has. With
        sharding or context parallelism, too: processes sum the gradients of all their conversations.
        """
        layout = [MicroBatchLayout(self.ranks.rank, row, tuple(members)) for row, members in loader.layout(step)]
        layout = self.ranks.all_gather(
            layout if self.ranks.is_tensor_main and not self.ranks.context_rank else []
        )  # the same in each
        supervised = loader.totals(step).supervised
        if not supervised:
            every = self._of_all(
                [
                    _describe_batch(batch)
                    for _, batch in loader.single_document_batches(step, self.max_conversations)
                    if len(batch.documents)
                ]
            )
            return Diagnosis(every, every, self._broken_weights(), layout)
        weight = self.loss_scale / supervised
        together = self.ranks.context_size > 1 or is_sharded(self.model)
        backward = kind != "spike" and not together
        alone = []
        with progress(f"step {step + 1}: each conversation alone", None) as bar:
            for row, batch in loader.single_document_batches(step, self.max_conversations):
                alone.append(self._run(step, row, batch, weight, backward))
                bar.advance()
        alone = self._of_all([found for found in alone if found.documents])
        if kind == "spike":
            known = [found for found in alone if found.supervised]
            blamed = sorted(known, key=lambda found: -found.loss)[:_TOP_LOSSES]
        else:
            blamed = [found for found in alone if found.layer]
            if not blamed:
                batches = [self._run(step, row, batch, weight, backward) for row, batch in loader.micro_batches(step)]
                blamed = [found for found in self._of_all(batches) if found.layer]
        return Diagnosis(alone, blamed, self._broken_weights(), layout, kind != "spike" and together)

    def _broken_weights(self) -> list[str]:
        """Each process checks its shards."""
        reshard(self.model)
        return sorted(set(self.ranks.all_gather(nonfinite_weights(self.model))))

    def _of_all(self, mine: list[DocumentResult]) -> list[DocumentResult]:
        """The results of all ranks, with slices of one sequence (context parallelism) merged."""
        everyone = self.ranks.all_gather([mine] if self.ranks.is_tensor_main else [])
        order = module_order(self.model)
        return [
            _merge_slices(slices, order)
            for first in range(0, len(everyone), self.ranks.context_size)
            for slices in zip(*everyone[first : first + self.ranks.context_size], strict=True)
        ]

    def _run(self, step: int, row: int, batch: PackedBatch, weight: float, backward: bool) -> DocumentResult:
        parameters = trainable_parameters(self.model)
        seed_generators(derive_seed(self.seed, step, row), self.ranks.device)
        norm, layer = math.nan, None
        uncompiled = torch.compiler.set_stance("force_eager")  # compiled layers do not call hooks
        with watch_nonfinite(self.model) as watch, torch.set_grad_enabled(backward), uncompiled:
            if backward:
                _clear_gradients(parameters)
            with self.autocast:
                result = self.model(batch.to(self.ranks.device), weight)
            loss = float(result.loss)
            sliced = self.ranks.context_size > 1  # another slice's loss may have broken by what happened in this one
            if watch.forward is not None and (sliced or not math.isfinite(loss)):
                layer = watch.forward
            elif not math.isfinite(loss):
                layer = "the head and the loss"
            elif backward:
                result.objective.backward()
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                norm = float(nn.utils.get_total_norm(gradients)) / self.loss_scale
                broken = nonfinite_gradients(self.model)
                if watch.backward is not None and broken:
                    layer = watch.forward or f"{watch.backward} (backward)"
                elif broken:
                    layer = watch.forward or f"the gradient of {broken[0]}"
                elif not math.isfinite(norm):
                    layer = "the norm of the gradient"
                _clear_gradients(parameters)
        mean = loss / len(batch.supervised_at) if len(batch.supervised_at) else math.nan
        return replace(_describe_batch(batch), loss=mean, grad_norm=norm, layer=layer)


def _merge_slices(slices: Sequence[DocumentResult], order: Mapping[str, int]) -> DocumentResult:
    """The result of the whole sequence; its layer is the first of the slices' layers."""
    supervised = sum(found.supervised for found in slices)
    total = sum(found.loss * found.supervised for found in slices if found.supervised)
    broken = [found.layer for found in slices if found.layer and not math.isfinite(total)]
    layer = min(broken, key=lambda name: order.get(name, len(order)), default=None)
    mean = total / supervised if supervised else math.nan
    return slices[0] if len(slices) == 1 else replace(slices[0], supervised=supervised, loss=mean, layer=layer)


def _describe_batch(batch: PackedBatch) -> DocumentResult:
    """The sizes of a batch, before it is run."""
    documents = tuple(int(document) for document in batch.documents)
    return DocumentResult(
        documents, batch.cu_seqlens_host[len(documents)], len(batch.supervised_at), math.nan, math.nan, None
    )


def _clear_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
