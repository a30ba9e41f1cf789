"""The model of a run on fake tensors: every weight with its shape and dtype, no memory, and no file of weights read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from whet.compat.bitsandbytes_private import NF4_BLOCK, NF4_SCALE_BLOCK
from whet.compat.torch_private import fake_tensor_mode
from whet.config import Config
from whet.model import attention
from whet.model.attention import AttentionSpec, Documents, short_attention_forward
from whet.model.experts.install import install_experts
from whet.model.fp8.conversion import convert_to_fp8_
from whet.model.load.placeholder import build_meta_model
from whet.model.load.pretrained import trainable_token_ids
from whet.model.lora.fuse import fuse_lora_
from whet.model.lora.low_rank import autocast_dtype
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.quantize import quantized_layers, quantized_stacks
from whet.training.precision import PrecisionPolicy

Gpu = Literal["nvidia", "amd"]
_STAND_IN = "whet_on_paper"
_T = TypeVar("_T")


@dataclass(slots=True)
class AttentionStandIn:
    """Attention on a GPU, on paper. All back-ends save the same: queries, keys, values, output and the softmax's sums;
    `short` is one operator in the graph. Those that break the graph of a layer are left out of it: the layer's first
    part ends with `inputs`, its second part begins with `output`."""

    inputs: list[Tensor] | None = None
    """Given a list, attention appends queries, keys and values to it, and returns a tensor of no importance."""
    output: Tensor | None = None
    """What attention returns, if given."""

    def install(self, model: nn.Module) -> None:
        """Make a transformers model attend by it."""
        AttentionInterface.register(_STAND_IN, self._attend)
        model.set_attn_implementation(_STAND_IN)  # type: ignore[operator]

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        scaling: float | None = None, *, documents: Documents | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        dtype = autocast_dtype(query) or value.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if self.output is not None:
            return self.output, None
        if self.inputs is not None:
            self.inputs += [query, key, value]
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
        if documents is None:  # a model that does not pass them on is trained unpacked
            bounds = torch.zeros(2, dtype=torch.int32)
            documents = Documents(bounds, query.shape[2], (0, query.shape[2]), bounds.expand(query.shape[2], 2).T)
        spec = AttentionSpec(1.0)  # windows, soft-caps and sinks change nothing that is saved
        return short_attention_forward(query, key, value, spec, documents), None


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model whose tensors are fake. Compute with it inside `computing`."""

    root: LossModel
    precision: PrecisionPolicy
    gpu: Gpu | None
    compiles: bool
    """Whether the layers will be compiled."""
    four_bit: frozenset[int]
    """ids of the weights that will be quantized to 4 bits."""
    mode: Any
    attention: AttentionStandIn | None
    """On a GPU."""
    _known: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, compute: Callable[[], _T]) -> _T:
        """What `compute` returned when it was first called for this key."""
        if key not in self._known:
            self._known[key] = compute()
        found: _T = self._known[key]
        return found

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Tensors made here are fake, and mixed precision is on. A fake tensor says that it is on the CPU."""
        with self.mode, self.precision.autocast(torch.device("cpu")):
            yield

    def weight_bytes(self, weight: Tensor) -> int:
        """Bytes of a parameter or buffer on the device, with the scales of a 4-bit weight."""
        if id(weight) not in self.four_bit:
            return weight.numel() * weight.element_size()
        blocks = -(-weight.numel() // NF4_BLOCK)
        return -(-weight.numel() // 2) + blocks + 4 * -(-blocks // NF4_SCALE_BLOCK)

    @property
    def dequantized(self) -> int:
        """Bytes of the largest 4-bit weight in 16 bits: products dequantize one at a time."""
        sizes = (weight.numel() for weight in self.root.parameters() if id(weight) in self.four_bit)
        return max(sizes, default=0) * self.precision.compute.itemsize

    @property
    def weights(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(map(self.weight_bytes, (*self.root.parameters(), *self.root.buffers())))


def local_gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    return "nvidia" if torch.version.hip is None else "amd"


def build_fake_model(config: Config, precision: PrecisionPolicy, *, gpu: Gpu | None, compiles: bool) -> FakeModel:
    """The model as `run/model_builder` builds it for a device: adapter, fused LoRA, attention, fp8."""
    model = build_meta_model(config.model, precision.weights)
    four_bit: set[Tensor] = set()
    if config.quantize is not None:
        model.requires_grad_(False)
        names = [*(f"{name}.weight" for name in quantized_layers(model)), *quantized_stacks(model)]
        four_bit = set(map(model.get_parameter, names))
    if config.adapter is not None:
        with torch.device("meta"):  # peft would initialise the adapters on the host
            adapted = add_adapter(
                model, config.adapter, config.run.seed, trainable_token_ids(config.model, config.adapter.tokens)
            )
        model = unwrap_peft(adapted)
        if gpu is not None:
            fuse_lora_(model)
    install_experts(model)
    stand_in = AttentionStandIn() if gpu is not None else None
    if stand_in is not None:
        stand_in.install(model)
    else:
        attention.install_backend(model, "sdpa")
    if precision.name == "fp8":
        convert_to_fp8_(model)
    mode = fake_tensor_mode()
    with mode:
        made = _to_fake_(model)
    root = LossModel(model.train(), config.train.label_smoothing, config.train.z_loss)
    ids = frozenset(id(made[weight]) for weight in four_bit)
    return FakeModel(root, precision, gpu, compiles, ids, mode, stand_in)


def _to_fake_(model: nn.Module) -> dict[Tensor, nn.Parameter]:
    """Replace all parameters and buffers by new ones of the same shape and dtype; tied ones stay tied."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in made:
                made[weight] = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), weight.requires_grad)
            module.register_parameter(name, made[weight])
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return made
