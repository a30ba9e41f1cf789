"""Who is to blame for a faulty step: its conversations one by one, on weights that are left alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from whet.core.console import progress
from whet.core.ranks import Ranks
from whet.data.batch import PackedBatch
from whet.data.loader import Loader
from whet.data.saved_step import SavedStep
from whet.model.loss import LossModel
from whet.parallel.replicate import trainable
from whet.parallel.shard import give_back, is_sharded
from whet.train.guard import Kind
from whet.train.passes import seed_of
from whet.train.watching import broken_gradients, broken_weights, order_of, watching

_HIGHEST = 5


@dataclass(frozen=True, slots=True)
class Examined:
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
class MicroBatch:
    """Documents that were computed together."""

    rank: int
    row: int
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """The same on every rank."""

    alone: list[Examined]
    blamed: list[Examined]
    """The conversations at fault, or micro-batches, if none is alone; of a spike the highest; of an empty step all."""
    weights: list[str]
    """Weights that are not finite themselves."""
    layout: list[MicroBatch]
    losses_only: bool = False
    """Gradients were not looked at, because processes compute together: a fault in them was not found."""


@dataclass(frozen=True, slots=True)
class Examiner:
    """Runs parts of a step again as the step ran them."""

    model: LossModel
    ranks: Ranks
    seed: int
    arithmetic: AbstractContextManager[object]
    loss_scale: float
    most: int | None = 256
    """Conversations of a rank that are looked at: more would hold up a run that goes on. None: all."""

    def examine(self, loader: Loader | SavedStep, step: int, kind: Kind) -> Findings:
        """See `_examine`; afterwards nothing that it gathered is held any more."""
        try:
            return self._examine(loader, step, kind)
        finally:
            give_back(self.model)

    def _examine(self, loader: Loader | SavedStep, step: int, kind: Kind) -> Findings:
        """Every conversation of a step alone; where none is at fault alone, every micro-batch.

        Gradients are thrown away, except after a spike: nothing but losses is looked at then, and the step may still
        be taken with the gradients it has. Nor are there gradients of one conversation where processes compute
        together: what they sum is of all of theirs.
        """
        layout = [MicroBatch(self.ranks.rank, row, tuple(members)) for row, members in loader.layout(step)]
        layout = self.ranks.gather(layout if self.ranks.counts and not self.ranks.slice else [])  # the same in each
        supervised = loader.totals(step).supervised
        if not supervised:
            every = self._of_all(
                [_not_run(batch) for _, batch in loader.alone(step, self.most) if len(batch.documents)]
            )
            return Findings(every, every, self._broken_weights(), layout)
        weight = self.loss_scale / supervised
        together = self.ranks.slices > 1 or is_sharded(self.model)
        backward = kind != "spike" and not together
        alone = []
        with progress(f"step {step + 1}: each conversation alone", None) as bar:
            for row, batch in loader.alone(step, self.most):
                alone.append(self._run(step, row, batch, weight, backward))
                bar.advance()
        alone = self._of_all([found for found in alone if found.documents])
        if kind == "spike":
            known = [found for found in alone if found.supervised]
            blamed = sorted(known, key=lambda found: -found.loss)[:_HIGHEST]
        else:
            blamed = [found for found in alone if found.layer]
            if not blamed:
                batches = [self._run(step, row, batch, weight, backward) for row, batch in loader.micro_batches(step)]
                blamed = [found for found in self._of_all(batches) if found.layer]
        return Findings(alone, blamed, self._broken_weights(), layout, kind != "spike" and together)

    def _broken_weights(self) -> list[str]:
        """Each process looks at its part of divided weights."""
        give_back(self.model)
        return sorted(set(self.ranks.gather(broken_weights(self.model))))

    def _of_all(self, mine: list[Examined]) -> list[Examined]:
        """What all ranks found; slices of the same documents are put together."""
        everyone = self.ranks.gather([mine] if self.ranks.counts else [])
        order = order_of(self.model)
        return [
            _joined(slices, order)
            for first in range(0, len(everyone), self.ranks.slices)
            for slices in zip(*everyone[first : first + self.ranks.slices], strict=True)
        ]

    def _run(self, step: int, row: int, batch: PackedBatch, weight: float, backward: bool) -> Examined:
        parameters = trainable(self.model)
        torch.manual_seed(seed_of(self.seed, step, row))
        norm, layer = math.nan, None
        uncompiled = torch.compiler.set_stance("force_eager")  # compiled layers do not call what watches them
        with watching(self.model) as watch, torch.set_grad_enabled(backward), uncompiled:
            if backward:
                _forget(parameters)
            with self.arithmetic:
                result = self.model(batch.to(self.ranks.device), weight)
            loss = float(result.loss)
            sliced = self.ranks.slices > 1  # another slice's loss may have broken by what happened in this one
            if watch.forward is not None and (sliced or not math.isfinite(loss)):
                layer = watch.forward
            elif not math.isfinite(loss):
                layer = "the head and the loss"
            elif backward:
                result.objective.backward()
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                norm = float(nn.utils.get_total_norm(gradients)) / self.loss_scale
                broken = broken_gradients(self.model)
                if watch.backward is not None and broken:
                    layer = watch.forward or f"{watch.backward} (backward)"
                elif broken:
                    layer = watch.forward or f"the gradient of {broken[0]}"
                elif not math.isfinite(norm):
                    layer = "the norm of the gradient"
                _forget(parameters)
        mean = loss / len(batch.supervised_at) if len(batch.supervised_at) else math.nan
        return replace(_not_run(batch), loss=mean, grad_norm=norm, layer=layer)


def _joined(slices: Sequence[Examined], order: Mapping[str, int]) -> Examined:
    """The whole of which these are slices; of the layers at which they broke, the one that comes first."""
    supervised = sum(found.supervised for found in slices)
    total = sum(found.loss * found.supervised for found in slices if found.supervised)
    broken = [found.layer for found in slices if found.layer and not math.isfinite(total)]
    layer = min(broken, key=lambda name: order.get(name, len(order)), default=None)
    mean = total / supervised if supervised else math.nan
    return slices[0] if len(slices) == 1 else replace(slices[0], supervised=supervised, loss=mean, layer=layer)


def _not_run(batch: PackedBatch) -> Examined:
    """What is known of documents before they are run."""
    documents = tuple(int(document) for document in batch.documents)
    return Examined(documents, batch.edges[len(documents)], len(batch.supervised_at), math.nan, math.nan, None)


def _forget(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
