"""Time of a training step on paper: each kernel by its FLOPs or its bytes, whichever takes longer on the card."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from whet.config import Config
from whet.data.plan.planner import typical_length
from whet.execution.cuda_graphs import max_gradient_bytes
from whet.fit.estimate import Sharding, training_size, trains_all
from whet.fit.fake_model import FakeModel
from whet.fit.hardware import Card
from whet.fit.model_trace import ModelTrace
from whet.fit.operator_cost import Operation
from whet.model.attention import CUDNN_MIN_LENGTH
from whet.model.flops import AttentionCost, attention_costs, first_trained_module

_BANDWIDTH_SHARE = 0.80
"""The part of a memory's bandwidth that kernels reach. H200: a copy reaches 0.885."""
_FP8_SHARE = 0.95
"""How much of its peak an fp8 product reaches, compared with a bf16 product."""
_HALF_RATE_INNER = 96
"""The inner dimension with which a product reaches half of its rate."""
_ATTENTION_SHARE, _LONG_ATTENTION_SHARE = 0.31, 0.44
"""The part of peak FLOP/s that attention kernels reach: whet's own, and cuDNN's for long documents (LOG.md)."""
_ATTENTION_TILE, _LONG_ATTENTION_TILE = 256, 1024
"""Documents are computed in tiles, which they do not fill."""
_KERNEL_S = 4e-6
"""What starting and ending a kernel costs beside its work."""
_LAUNCH_S = 1.1e-4
"""What the host needs to launch a kernel without a CUDA graph: 4 ms for both passes of a compiled layer, 9 ms for one
with adapters, 13 ms in fp8 (LOG.md, 2026-11-16). If the device needs less, it waits for the host."""
_LAUNCH_BOUND_S = 0.005
"""Layers whose two passes take less than this at the peak FLOP/s run as CUDA graphs (execution/cuda_graphs.py)."""
_IDLE_SHARE = 0.01
"""Of a step: between steps, and kernels that are not counted."""
_LINK_SHARE = 0.75
"""The part of a link's bandwidth that collectives reach."""
_HOP_S = 4e-6
"""What a message needs from one device of a ring to the next, beside its bytes."""
_UNHIDDEN_SHARE = 0.05
"""Of what computation could hide: the first layer's weights, and kernels that slow each other down."""


@dataclass(frozen=True, slots=True)
class StepTimeParts:
    """Seconds of one optimizer step on one device, by what takes them."""

    products: float
    """Matrix products of the layers, with what is computed again."""
    attention: float
    memory: float
    """Norms, activations, rotary embeddings, casts, low-rank products: as long as their memory traffic."""
    head: float
    optimizer: float
    communication: float
    """Between devices, and with the host for offloaded activations: what is not hidden behind computation."""
    idle: float

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one device computes in an average step."""

    micro_batches: int
    supervised: float
    """Supervised positions of a micro-batch."""
    lengths: NDArray[np.integer]
    """Lengths of documents: those of a micro-batch, or of a larger sample."""
    share: float = 1.0
    """A micro-batch's part of the sample."""

    @property
    def is_long(self) -> bool:
        """Whether attention is cuDNN's: by the length of the document that a random token is in."""
        return typical_length(self.lengths) >= CUDNN_MIN_LENGTH


def estimate_step_time(
    config: Config, fake: FakeModel, trace: ModelTrace, card: Card, work: StepWork, sharding: Sharding,
    nodes: int = 1,
) -> StepTimeParts:  # fmt: skip
    """Seconds of a step whose micro-batches are all like `trace`."""
    rates = _Rates(card, fake.precision.name)
    layers = [
        operation
        for kind in trace.layers
        for operation in (kind.forward.operations + kind.backward.operations) * kind.count
    ]
    count = work.micro_batches / sharding.tensor
    products = rates.seconds(each for each in layers if each.kind != "memory")
    memory = rates.seconds(each for each in layers if each.kind == "memory")
    spans = fake.once("attention", lambda: attention_costs(fake.root.language_model))
    attention = rates.attention(spans, work, config.parallel.recompute)
    head = rates.head(fake, work)
    computing = (products + memory + attention + head) * count
    waiting = 0.0
    if not runs_as_cuda_graphs(config, fake, trace, card, sharding):
        waiting = max(0.0, _LAUNCH_S * sum(each.kernels for each in layers) * work.micro_batches - computing)
    optimizer = rates.optimizer(config, fake, sharding)
    communication = _exposed_communication(config, fake, trace, card, work, sharding, nodes, computing)
    if config.parallel.offload in ("activations", "both"):
        saved = sum(kind.count * kind.saved for kind in trace.layers)
        communication += 2 * saved * work.micro_batches / _HOST_LINK
    idle = waiting + _IDLE_SHARE * (computing + optimizer)
    return StepTimeParts(
        products * count, attention * count, memory * count, head * count, optimizer, communication, idle
    )


class _Rates:
    def __init__(self, card: Card, precision: str) -> None:
        self.card = card
        self.bytes_per_s = card.bandwidth * _BANDWIDTH_SHARE
        bf16 = card.peak("bf16" if precision == "fp8" else precision)
        assert bf16 is not None, "the plan has checked the precision"
        self.peak = bf16
        fp8 = _FP8_SHARE * (card.peak("fp8") or 0.0)
        self.flops_per_s = {"matmul": bf16 * card.product_share, "fp8": fp8 * card.product_share}
        fp32 = card.peak("fp32")
        assert fp32 is not None
        self.head_flops_per_s = fp32 * card.product_share if card.is_amd else self.flops_per_s["matmul"]

    def seconds(self, operations: Iterable[Operation]) -> float:
        total = 0.0
        for each in operations:
            total += _KERNEL_S * each.kernels
            moving = each.bytes / self.bytes_per_s
            if each.kind == "memory":
                total += moving
            else:
                rate = self.flops_per_s[each.kind] * each.inner / (each.inner + _HALF_RATE_INNER)
                total += max(moving, each.flops / rate)
        return total

    def attention(self, costs: Iterable[AttentionCost], work: StepWork, recompute: str) -> float:
        """QKᵀ and PV; the backward pass computes QKᵀ once more."""
        is_long = work.is_long and not self.card.is_amd
        share = _LONG_ATTENTION_SHARE if is_long else _ATTENTION_SHARE
        padding = work.lengths.sum() * (_LONG_ATTENTION_TILE if is_long else _ATTENTION_TILE) / 2
        again = 2 if recompute == "full" else 1
        flops = sum(
            (again * each.forward_flops_per_pair + 1.25 * each.backward_flops_per_pair)
            * (each.pairs(work.lengths) + padding)
            for each in costs
        )
        return float(flops) * work.share / (self.peak * share)

    def head(self, fake: FakeModel, work: StepWork) -> float:
        """Products at supervised positions, and the logits, which are written once and read three times."""
        weight = fake.root.language_model.get_output_embeddings().weight  # type: ignore[operator]
        trains = fake.once("trains", lambda: first_trained_module(fake.root.language_model) is not None)
        products = 1 + weight.requires_grad + trains
        flops = 2 * weight.numel() * work.supervised * products
        logits = work.supervised * weight.shape[0] * (4 + 2 * 4 + 3 * 2)
        return flops / self.head_flops_per_s + logits / self.bytes_per_s

    def optimizer(self, config: Config, fake: FakeModel, sharding: Sharding) -> float:
        """Reads weights, gradients and states, writes weights and states; gradients are read for their norm first."""
        size = training_size(config, fake)
        weights = size.trained * (size.gradients // max(1, size.trained))  # gradients have the weights' dtype
        moved = 2 * weights + 2 * size.gradients + 2 * size.optimizer
        seconds = moved / sharding.shard / sharding.tensor / self.bytes_per_s
        if config.parallel.offload in ("optimizer", "both", "weights"):
            seconds += 2 * size.optimizer / sharding.shard / _HOST_LINK
        return seconds


_HOST_LINK = 45e9
"""Bytes per second between device and host: 1B with both kinds of offload takes 1.75 s more for 77 GB (LOG.md,
2026-11-15)."""


def runs_as_cuda_graphs(config: Config, fake: FakeModel, trace: ModelTrace, card: Card, sharding: Sharding) -> bool:
    """As `enable_cuda_graphs` decides: one device, small gradients, and layers that the host cannot launch in time."""
    if sharding.world > 1 or not fake.compiles or config.parallel.offload != "none":
        return False
    if training_size(config, fake).gradients > max_gradient_bytes(card.memory, config.parallel.recompute != "none"):
        return False
    flops = sum(
        kind.count * operation.flops
        for kind in trace.layers for operation in kind.forward.operations + kind.backward.operations
    ) / sum(kind.count for kind in trace.layers)  # fmt: skip
    return flops / (card.peak(fake.precision.name) or card.peak("bf16") or 1.0) <= _LAUNCH_BOUND_S


class _Links:
    """What a ring of devices reaches: inside a node its links; across nodes the network cards of a node together, as
    long as its rings do not use more than the links carry."""

    def __init__(self, card: Card, per_node: int) -> None:
        self._per_node = per_node
        self.inside = card.link * _LINK_SHARE
        self._outside = card.network * _LINK_SHARE

    def rate(self, span: int, groups: int) -> float:
        """Bytes per second of each device in a ring over `span` devices, of which every `groups`-th is in the ring:
        those between are in rings of their own, and share the network."""
        if span <= self._per_node:
            return self.inside
        return min(self.inside, self._outside * self._per_node / min(groups, self._per_node))


def _exposed_communication(
    config: Config, fake: FakeModel, trace: ModelTrace, card: Card, work: StepWork, sharding: Sharding, nodes: int,
    computing: float,
) -> float:  # fmt: skip
    """Seconds that collectives take beyond the computation that hides them.

    FSDP2 gathers each layer before both of its passes and reduces gradients in the last micro-batch, over shards and
    replicas, while other layers compute. Without shards, replicas add their gradients at the end of a step.
    """
    if sharding.world == 1:
        return 0.0
    size, shard = training_size(config, fake), sharding.shard
    links = _Links(card, max(1, sharding.world // nodes))
    replicas = sharding.world // (shard * sharding.tensor)
    seconds = 0.0
    if shard > 1:
        weights = sum(
            kind.count * (min(kind.weights, 2 * kind.parameters) if trains_all(fake) else kind.weights)
            for kind in trace.layers
        )
        root = size.weights - sum(kind.count * kind.weights for kind in trace.layers)
        received = (2 * weights + root) * work.micro_batches + 4 * size.trained
        moving = received * (shard - 1) / shard / sharding.tensor / links.rate(shard * sharding.tensor, 1)
        collectives = 3 * sum(kind.count for kind in trace.layers) * work.micro_batches
        moving += _HOP_S * (shard - 1) * collectives
        reduced = 2 * 4 * size.trained / shard / sharding.tensor * (replicas - 1) / replicas
        moving += reduced / links.rate(sharding.world, shard * sharding.tensor)
        seconds += max(0.0, moving - computing) + _UNHIDDEN_SHARE * min(moving, computing)
    elif replicas > 1:
        reduced = 2 * size.gradients / sharding.tensor * (replicas - 1) / replicas
        seconds += reduced / links.rate(sharding.world, sharding.tensor)
    if sharding.tensor > 1:  # four all-reduces of the hidden states in each layer
        layers = sum(kind.count * kind.hidden for kind in trace.layers)
        seconds += 4 * 2 * layers * work.micro_batches * (sharding.tensor - 1) / sharding.tensor / links.inside
    return seconds
