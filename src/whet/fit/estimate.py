"""Memory of one device at the peak of a training step, from the model's code on fake tensors: nothing is measured.

A step has moments at which its memory can be highest. At the end of the forward pass all activations are saved, and the
loss computes its logits; during the backward pass gradients appear while activations go; then the optimizer runs. The
estimate is the highest of these moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whet.config import Config
from whet.execution.compile import should_compile
from whet.fit.fake_model import FakeModel, build_fake_model, local_gpu
from whet.fit.model_trace import ModelTrace, saved_in_eager, trace_model
from whet.model.attention import CUDNN_MIN_LENGTH
from whet.model.flops import attention_costs
from whet.model.loss.linear_cross_entropy import rows_per_chunk
from whet.training.optimizers.factory import build_optimizer, optimizer_state_bytes
from whet.training.precision import resolve_precision

_LIBRARY_WORKSPACE = 2**26
"""cuBLAS' workspaces, batches, sums of a step."""
_OVERLAPPING_GRADIENTS = 2**30
"""Up to this size, gradients stay allocated while the next forward pass begins (training/overlap.py)."""
_OFFLOAD_CHUNK = 2**29
"""The part of an offloaded optimizer state that is on the device at a time (execution/offload.py)."""
_UPDATE_CHUNK = 2**24
"""Elements that the optimizers without a kernel update at a time, in fp32 (training/optimizers/state_precision.py)."""
_REDUCE_ITEMSIZE = 4
"""FSDP2 reduces gradients in fp32."""


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest micro-batch of a run on one device."""

    tokens: int
    """With padding."""
    supervised: int
    micro_batches: int = 1
    """Of a step on one device: with more than one, gradients stay allocated during the forward passes."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How many devices share a model."""

    shard: int = 1
    """Devices over which weights, gradients and optimizer state are sharded (FSDP2), context included."""
    tensor: int = 1
    world: int = 1


@dataclass(frozen=True, slots=True)
class TrainingSize:
    """What a model needs on one device whatever the batch, unsharded."""

    weights: int
    gradients: int
    optimizer: int
    trained: int
    """The number of trained weights."""


def training_size(config: Config, fake: FakeModel, micro_batches: int = 1) -> TrainingSize:
    """Bytes of weights, of gradients after a backward pass, and of the optimizer state after a step."""
    sums_in_fp32 = fake.precision.weights == torch.bfloat16 and micro_batches > 1

    def compute() -> TrainingSize:
        trained = [weight for weight in fake.root.parameters() if weight.requires_grad]
        sizes = (4 if sums_in_fp32 and weight.element_size() == 2 else weight.element_size() for weight in trained)
        gradients = sum(size * weight.numel() for size, weight in zip(sizes, trained, strict=True))
        with fake.mode:
            states = optimizer_state_bytes(build_optimizer(fake.root, config.train.optimizer, config.run.seed))
        return TrainingSize(fake.weights, gradients, states, sum(weight.numel() for weight in trained))

    return fake.once(("size", sums_in_fp32), compute)


def trains_all(fake: FakeModel) -> bool:
    """Whether every weight is trained."""
    return fake.once("trains_all", lambda: all(weight.requires_grad for weight in fake.root.parameters()))


@dataclass(frozen=True, slots=True)
class LossBytes:
    """What `linear_cross_entropy` allocates."""

    peak: int
    hidden_gradient: int
    """Kept until the backward pass begins."""
    head_gradient: int


def loss_bytes(fake: FakeModel, batch: LargestBatch) -> LossBytes:
    """The loss of one micro-batch. Only NVIDIA's GPUs multiply the head's 16-bit matrices into fp32 sums."""
    head: Tensor = fake.root.language_model.get_output_embeddings().weight  # type: ignore[operator]
    vocabulary, width = head.shape
    hidden = max(head.element_size(), fake.precision.compute.itemsize)
    in_fp32 = fake.gpu != "nvidia"
    compute = max(4, fake.precision.compute.itemsize) if in_fp32 else fake.precision.compute.itemsize
    exact = max(4, compute)
    rows = min(batch.supervised, rows_per_chunk(fake.gpu is not None, vocabulary * exact, head.requires_grad))
    logits = rows * vocabulary * exact * (1 if fake.gpu is not None and vocabulary % 4 == 0 else 2)
    chunk = logits + rows * width * (compute + exact)
    states = (batch.tokens + 2 * batch.supervised) * width * hidden
    matrix = 0 if compute == head.element_size() else head.numel() * compute
    if not head.requires_grad:
        return LossBytes(states + matrix + chunk, batch.supervised * width * hidden, 0)
    rounded = 0 if exact == head.element_size() else head.numel() * head.element_size()
    peak = states + matrix + head.numel() * exact + max(chunk, rounded)
    return LossBytes(peak, batch.supervised * width * hidden, head.numel() * head.element_size())


def estimate_memory(
    config: Config, fake: FakeModel, trace: ModelTrace, batch: LargestBatch, sharding: Sharding | None = None,
    captured: bool = False,
) -> MemoryParts:  # fmt: skip
    """The memory of one device at the highest moment of a step. `captured`: layers run as CUDA graphs, which hold their
    gradients from step to step."""
    moments = _Moments(config, fake, trace, batch, sharding or Sharding(), captured)
    return max(moments.all(), key=lambda parts: parts.total)


class _Moments:
    def __init__(
        self,
        config: Config,
        fake: FakeModel,
        trace: ModelTrace,
        batch: LargestBatch,
        sharding: Sharding,
        captured: bool,
    ) -> None:
        self.captured = captured
        self.config, self.fake, self.trace, self.batch, self.sharding = config, fake, trace, batch, sharding
        self.is_sharded = sharding.shard > 1 or config.parallel.offload == "weights"
        self.size = training_size(config, fake, batch.micro_batches)
        self.loss = loss_bytes(fake, batch)
        self.last = trace.layers[-1]
        offload = config.parallel.offload
        self.offloads_states = offload in ("optimizer", "both", "weights")
        self.on_host = offload == "weights"
        self.offloads_activations = offload in ("activations", "both")

    def all(self) -> Iterator[MemoryParts]:
        trace, last, size = self.trace, self.last, self.size
        activations, held = trace.saved, self._gradients_while_computing()
        if self.offloads_activations:  # a layer's are on their way to the host while the next one computes
            activations = trace.ends + trace.shared + 2 * last.saved
        base = MemoryParts(
            self._share(size.weights), held, 0 if self.offloads_states else self._share(size.optimizer), activations, 0,
            _LIBRARY_WORKSPACE + self._gathered() + self.fake.once("dequantized", lambda: self.fake.dequantized),
        )  # fmt: skip
        yield replace(base, activations=activations - trace.ends, workspace=base.workspace + last.forward_scratch)
        yield replace(base, loss=self.loss.peak)
        head = self.loss.head_gradient
        yield replace(base, loss=2 * (head + self.loss.hidden_gradient), workspace=base.workspace + 2 * last.hidden)
        # Backward: from here on there are gradients; those of the layer itself are part of its scratch
        reducing = self._reducing()
        yield replace(
            base, activations=activations - trace.ends, gradients=held + self._share(head),
            workspace=base.workspace + last.backward_scratch + reducing,
        )  # fmt: skip
        first = trace.layers[0]
        gradients = max(held, self._share(size.gradients))
        yield replace(
            base, activations=min(activations, trace.shared + first.saved), gradients=gradients,
            workspace=base.workspace + first.backward_scratch + reducing,
        )  # fmt: skip
        embedding: Tensor = self.fake.root.language_model.get_input_embeddings().weight  # type: ignore[operator]
        table = embedding.numel() * embedding.element_size() if embedding.requires_grad else 0
        yield replace(base, activations=0, gradients=gradients, workspace=base.workspace + table)
        sharded = 0 if self.on_host else self._share(size.gradients)
        yield replace(base, activations=0, gradients=sharded, workspace=_LIBRARY_WORKSPACE + self._update_scratch())

    def _share(self, size: int) -> int:
        """This device's part of weights, gradients or states."""
        return 0 if self.on_host else math.ceil(size / (self.sharding.shard * self.sharding.tensor))

    def _gradients_while_computing(self) -> int:
        """Gradients that are allocated while activations are."""
        size = self.size
        if self.batch.micro_batches > 1:
            # FSDP2 reduces after the last micro-batch alone: before it, each device sums all gradients itself
            return size.trained * _REDUCE_ITEMSIZE // self.sharding.tensor if self.is_sharded else size.gradients
        if self.captured:
            return size.gradients
        overlaps = size.gradients <= _OVERLAPPING_GRADIENTS and not self.is_sharded and self.fake.gpu is not None
        return size.gradients if overlaps and self.sharding.tensor == 1 else 0

    def _gathered(self) -> int:
        """Weights that FSDP2 has gathered: embedding, head and norm for the whole step, two layers (one computes, the
        next arrives) and the buffer that the next one arrives in."""
        if not self.is_sharded:
            return 0
        largest = max(self._gathered_layer(kind.weights, kind.parameters) for kind in self.trace.layers)
        root = self.size.weights - sum(kind.count * kind.weights for kind in self.trace.layers)
        return (root + 3 * largest) // self.sharding.tensor

    def _gathered_layer(self, size: int, parameters: int) -> int:
        """Where every weight is trained, layers are gathered in the compute dtype."""
        if trains_all(self.fake):
            return min(size, parameters * self.fake.precision.compute.itemsize)
        return size

    def _reducing(self) -> int:
        """Buffers of a layer's gradients on their way: FSDP2's in fp32, or a bucket of data parallelism."""
        if self.is_sharded:
            return 2 * max(kind.trained for kind in self.trace.layers) * _REDUCE_ITEMSIZE // self.sharding.tensor
        return 0

    def _update_scratch(self) -> int:
        if self.on_host:
            return 0
        name = self.config.train.optimizer.name
        weights = self.fake.root.parameters()
        largest = self.fake.once("largest", lambda: max((w.numel() for w in weights if w.requires_grad), default=0))
        scratch = 0
        if name == "muon":  # momentum, direction and the products of the iteration, of one matrix at a time
            scratch = 12 * largest
        elif name == "adamw8bit" or self.fake.gpu is None:
            scratch = 6 * 4 * min(_UPDATE_CHUNK, largest // self.sharding.shard)
        return scratch + (_OFFLOAD_CHUNK if self.offloads_states else 0)


def predict_memory(config: Config, device: torch.device, batch: LargestBatch, typical_length: float) -> MemoryParts:
    """The memory of one step on a device of this machine, not sharded, for `whet fit` to compare with what it measures.
    `typical_length`: of the document that an average token is in; long ones get another attention."""
    precision = resolve_precision(config, device)
    compiles = should_compile(config.model.compile, device, precision.compute)
    fake = build_fake_model(config, precision, gpu=local_gpu(device), compiles=compiles)
    return estimate_memory(config, fake, trace_batch(config, fake, batch.tokens, typical_length), batch)


def trace_batch(config: Config, fake: FakeModel, tokens: int, typical_length: float) -> ModelTrace:
    """A micro-batch as the configuration would run it: compiled, or eagerly."""
    trace = trace_model(fake, tokens, config.parallel.recompute, layers_in_one_graph(config, fake, typical_length))
    if fake.compiles:
        return trace
    layers = sum(kind.count * kind.saved for kind in trace.layers)
    return replace(trace, ends=0, shared=saved_in_eager(fake, tokens, config.parallel) - layers)


def layers_in_one_graph(config: Config, fake: FakeModel, typical_length: float) -> bool:
    """Whether a compiled layer is one graph, with attention in it: see `choose_backend` and `supports_fullgraph`."""
    if config.model.attention != "auto":
        return config.model.attention in ("short", "varlen", "fa4", "eager")
    model: Any = fake.root.language_model
    settings = model.config.get_text_config()
    if fake.gpu != "nvidia" or getattr(settings, "attn_logit_softcapping", None):
        return False
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return False
    spans = {cost.window for cost in attention_costs(model)}
    return typical_length < CUDNN_MIN_LENGTH or spans != {None}


# The result.

GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one device at the peak of a step. They add up to the peak: a part that is not allocated at that moment,
    such as gradients during the first forward pass, counts 0."""

    weights: int
    """Parameters, trained and frozen, and buffers."""
    gradients: int
    optimizer: int
    """The optimizer's state; 0 if it is offloaded."""
    activations: int
    """What the layers save for the backward pass."""
    loss: int
    """The head's logits and gradients, at supervised positions."""
    workspace: int
    """Everything else: temporary results inside a layer or the optimizer, batches, CUDA graphs."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def gib(self) -> dict[str, float]:
        """Each part and the total in GiB, as commands print them."""
        return {name: value / GIB for name, value in {**asdict(self), "total": self.total}.items()}
