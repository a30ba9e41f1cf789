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
from whet.core.distributed import Ranks
from whet.core.seeds import derive_seed
from whet.data.batch import PackedBatch
from whet.data.loader import Loader, ReplayLoader
from whet.model.loss.loss_model import LossModel
from whet.parallel.ddp import trainable_parameters
from whet.parallel.dtensor import local_tensor
from whet.parallel.fsdp import is_sharded, reshard
from whet.training.guard import FaultKind

# Where in a model numbers stop being finite: forward, or else backward.

_MODEL_PREFIX = "language_model."


class NonfiniteWatch:
    """The first modules that failed, in the order of execution."""

    def __init__(self) -> None:
        self.forward: str | None = None
        self._backward: list[str] = []
        self._tensor = 0

    @property
    def backward(self) -> str | None:
        """Several, where modules share their input: which of them it was cannot be told from its gradient."""
        return " or ".join(self._backward) or None

    def before_forward(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.forward is None and not all(map(_is_finite, _inputs(args, kwargs))):
            self.forward = name.rpartition(".")[0] or name  # made between its parent's modules

    def after_forward(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.forward is None and not all(map(_is_finite, _tensors(output))):
            self.forward = name
        if any(tensor.requires_grad for tensor in _tensors(output)):
            for tensor in _inputs(args, kwargs):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._gradient, name, _tensor_id(tensor)))

    def _gradient(self, name: str, tensor: int, gradient: Tensor) -> None:
        """Of what a module took in. Inner modules end first, so they are named and not the layer around them."""
        if self._backward and tensor != self._tensor:
            return
        if not any(inner.startswith(f"{name}.") for inner in self._backward) and not _is_finite(gradient):
            self._tensor = tensor
            self._backward.append(name)


_tensor_ids = itertools.count(1)


def _tensor_id(tensor: Any) -> int:
    """The same for the same tensor, and no other's; `id` is given again when a tensor is gone."""
    if not hasattr(tensor, "_whet_number"):
        tensor._whet_number = next(_tensor_ids)
    number: int = tensor._whet_number
    return number


@contextlib.contextmanager
def watch_nonfinite(model: nn.Module) -> Iterator[NonfiniteWatch]:
    """Look at all that goes in and out of the modules of `model` while the block runs."""
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
    """The names that a watch gives, each with its place in the model."""
    return {name: place for place, (name, _) in enumerate(_named_modules(model))}


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for full, module in model.named_modules():
        if full not in ("", _MODEL_PREFIX.rstrip(".")):
            yield full.removeprefix(_MODEL_PREFIX), module


def nonfinite_weights(model: nn.Module) -> list[str]:
    """The names of weights that are not finite themselves."""
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
    """What a module computes on; masks, which may hold -inf, and caches are something else."""
    return _tensors((args, kwargs.get("hidden_states")))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# Who is to blame for a faulty step: its conversations one by one, on weights that are left alone.

_TOP_LOSSES = 5


@dataclass(frozen=True, slots=True)
class DocumentResult:
    """Documents run by themselves: one conversation, or a micro-batch."""

    documents: tuple[int, ...]
    tokens: int
    supervised: int
    loss: float
    """Mean −log p over its supervised tokens; NaN without any."""
    grad_norm: float
    """Of its part in the step's gradient; NaN where no gradient was taken."""
    layer: str | None
    """Where numbers stopped being finite; None: nowhere."""


@dataclass(frozen=True, slots=True)
class MicroBatchLayout:
    """Documents that were computed together."""

    rank: int
    row: int
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The same on every rank."""

    conversations: list[DocumentResult]
    blamed: list[DocumentResult]
    """The conversations at fault, or micro-batches, if none is alone; of a spike the highest; of an empty step all."""
    nonfinite_weights: list[str]
    """Weights that are not finite themselves."""
    micro_batches: list[MicroBatchLayout]
    losses_only: bool = False
    """Gradients were not looked at, because processes compute together: a fault in them was not found."""


@dataclass(frozen=True, slots=True)
class Diagnoser:
    """Runs parts of a step again as the step ran them."""

    model: LossModel
    ranks: Ranks
    seed: int
    autocast: AbstractContextManager[object]
    loss_scale: float
    max_conversations: int | None = 256
    """Conversations of a rank that are looked at: more would hold up a run that goes on. None: all."""

    def diagnose(self, loader: Loader | ReplayLoader, step: int, kind: FaultKind) -> Diagnosis:
        """See `_diagnose`; afterwards nothing that it gathered is held any more."""
        try:
            return self._diagnose(loader, step, kind)
        finally:
            reshard(self.model)

    def _diagnose(self, loader: Loader | ReplayLoader, step: int, kind: FaultKind) -> Diagnosis:
        """Every conversation of a step alone; where none is at fault alone, every micro-batch.

        Gradients are thrown away, except after a spike: nothing but losses is looked at then, and the step may still
        be taken with the gradients it has. Nor are there gradients of one conversation where processes compute
        together: what they sum is of all of theirs.
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
        """Each process looks at its part of divided weights."""
        reshard(self.model)
        return sorted(set(self.ranks.all_gather(nonfinite_weights(self.model))))

    def _of_all(self, mine: list[DocumentResult]) -> list[DocumentResult]:
        """What all ranks found; slices of the same documents are put together."""
        everyone = self.ranks.all_gather([mine] if self.ranks.is_tensor_main else [])
        order = module_order(self.model)
        return [
            _merge_slices(slices, order)
            for first in range(0, len(everyone), self.ranks.context_size)
            for slices in zip(*everyone[first : first + self.ranks.context_size], strict=True)
        ]

    def _run(self, step: int, row: int, batch: PackedBatch, weight: float, backward: bool) -> DocumentResult:
        parameters = trainable_parameters(self.model)
        torch.manual_seed(derive_seed(self.seed, step, row))
        norm, layer = math.nan, None
        uncompiled = torch.compiler.set_stance("force_eager")  # compiled layers do not call what watches them
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
    """The whole of which these are slices; of the layers at which they broke, the one that comes first."""
    supervised = sum(found.supervised for found in slices)
    total = sum(found.loss * found.supervised for found in slices if found.supervised)
    broken = [found.layer for found in slices if found.layer and not math.isfinite(total)]
    layer = min(broken, key=lambda name: order.get(name, len(order)), default=None)
    mean = total / supervised if supervised else math.nan
    return slices[0] if len(slices) == 1 else replace(slices[0], supervised=supervised, loss=mean, layer=layer)


def _describe_batch(batch: PackedBatch) -> DocumentResult:
    """What is known of documents before they are run."""
    documents = tuple(int(document) for document in batch.documents)
    return DocumentResult(
        documents, batch.cu_seqlens_host[len(documents)], len(batch.supervised_at), math.nan, math.nan, None
    )


def _clear_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
