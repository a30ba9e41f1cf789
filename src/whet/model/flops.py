"""FLOPs of a training step, counted from the model's matrices and attention layers; and the peak FLOP/s of GPUs.

Counted are matrix products: linear layers per token, the head per supervised position, attention per visible pair of
tokens. Not counted are norms, activations, softmax, rotary embeddings, the optimizer, padding and recomputation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from whet.compat.peft_private import adapted_parameter
from whet.model.quantize import weight_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ADAPTER_SUFFIX = re.compile(r"\.(base_layer|lora_[AB])(?=\.|$).*")
_ADAPTER_MATRIX = re.compile(r"(.*)\.lora_[AB]\.")
_EXPERT_NAME = re.compile(r"(.*\bexperts)\.\d+\.")
_EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True, slots=True)
class MatrixCost:
    """The cost of one weight matrix for a token."""

    name: str
    """The name of its module."""
    size: int
    """Number of elements."""
    active_share: float
    """The share of it that a token is multiplied with: 1, or the active experts' share of fused experts."""
    trained: bool
    needs_input_grad: bool = True
    """Whether its input depends on trained weights, so that the backward pass computes the input's gradient."""

    @property
    def layer(self) -> str:
        """The layer, without the suffixes of an adapter."""
        return _ADAPTER_SUFFIX.sub("", self.name)

    @property
    def block(self) -> str:
        """The parent module: an attention or an MLP."""
        return self.layer.rpartition(".")[0]

    @property
    def forward_flops(self) -> int:
        """FLOPs for one token: a multiplication and an addition for each element."""
        return round(2 * self.size * self.active_share)

    @property
    def matmuls_per_step(self) -> int:
        """Products of this size in a step: forward, weight gradient and input gradient, as far as needed."""
        return 1 + self.trained + self.needs_input_grad


def matrix_costs(model: nn.Module) -> list[MatrixCost]:
    """All weight matrices but embedding and head, in the model's order.

    `needs_input_grad` is exact for blocks in which all layers but the last share the input, as in the usual attention
    (q, k, v, then o) and MLP; otherwise it may be wrong inside the one block where training begins.
    """
    ends = {
        id(inside)
        for end in (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        if end is not None
        for inside in end.modules()  # peft may have wrapped them
    }
    found = [
        matrix
        for name, module in model.named_modules()
        if id(module) not in ends
        and "original_module" not in name.split(".")  # a frozen original beside its trained copy
        for matrix in _module_matrices(model, name)
    ]
    return _mark_input_gradients(model, found)


def _module_matrices(model: nn.Module, name: str) -> Iterator[MatrixCost]:
    """The matrices of a module without its children: linear layers of any kind, routers, fused experts."""
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding):
        return
    parameters = [
        parameter
        for kind, parameter in module.named_parameters(recurse=False)
        if len(weight_shape(parameter)) in (2, 3) and not kind.endswith("bias")  # biases of fused experts are 2-D
    ]
    if isinstance(module, nn.Linear):  # by its features: a quantized weight is packed
        trained = module.weight.requires_grad
        yield MatrixCost(name, module.in_features * module.out_features, _expert_share(model, name), trained)
        return
    for parameter in parameters:
        shape = weight_shape(parameter)
        used = _active_expert_share(model, shape[0]) if len(shape) == 3 else 1.0
        yield MatrixCost(name, shape.numel(), used, parameter.requires_grad)


def _expert_share(model: nn.Module, name: str) -> float:
    """1, or for an expert in a ModuleList the average share of tokens it gets; the adapters of fused experts are one
    matrix, of which a token uses those of its experts."""
    adapter = _ADAPTER_MATRIX.match(name)
    adapted = adapted_parameter(model.get_submodule(adapter[1])) if adapter else None
    if adapted is not None and len(weight_shape(adapted)) == 3:
        return _active_expert_share(model, weight_shape(adapted)[0])
    expert = _EXPERT_NAME.match(name)
    return _active_expert_share(model, len(list(model.get_submodule(expert[1]).children()))) if expert else 1.0


def _active_expert_share(model: nn.Module, experts: int) -> float:
    """The share of experts that a token is routed to; 1 if the configuration does not tell."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return next((getattr(config, key) / experts for key in _EXPERTS_PER_TOKEN_KEYS if getattr(config, key, None)), 1.0)


def first_trained_module(model: nn.Module) -> str | None:
    """The first module with trained weights: a linear layer, or the decoder layer if its norms are trained too; "" for
    the embedding, None if nothing is trained."""
    if any(parameter.requires_grad for parameter in model.get_input_embeddings().parameters()):  # type: ignore[operator]
        return ""
    first = next((name for name, parameter in model.named_parameters() if parameter.requires_grad), None)
    if first is None:
        return None
    module = _ADAPTER_SUFFIX.sub("", first.rpartition(".")[0])
    layer = module.rpartition(".")[0].rpartition(".")[0]
    vectors = (p for child in model.get_submodule(layer).children() for p in child.parameters(recurse=False))
    return layer if layer and any(vector.requires_grad for vector in vectors) else module


def _mark_input_gradients(model: nn.Module, matrices: list[MatrixCost]) -> list[MatrixCost]:
    """No input gradients are needed before the first trained weight, nor for the input of its block."""
    first = first_trained_module(model)
    if first == "":
        return matrices
    block = "" if first is None else first.rpartition(".")[0]
    last = max((at for at, matrix in enumerate(matrices) if matrix.block == block), default=-1)
    begins = next(
        (at for at, matrix in enumerate(matrices) if f"{matrix.name}.".startswith(f"{first}.")), len(matrices)
    )
    found = []
    for at, matrix in enumerate(matrices):
        if at < begins:
            needed = False
        elif matrix.block == block and (matrix.layer == first or matrix.layer != matrices[last].layer):
            needed = ".lora_B" in matrix.name
        else:
            needed = True
        found.append(replace(matrix, needs_input_grad=needed))
    return found


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """The cost of all attention layers with the same window."""

    window: int | None
    """Tokens that a token attends to, itself included; None: all before it."""
    forward_flops_per_pair: int
    """QKᵀ and PV."""
    backward_flops_per_pair: int

    def pairs(self, lengths: NDArray[np.integer]) -> int:
        """Number of (query, key) pairs within documents of these lengths."""
        long = lengths.astype(np.int64)
        near = long if self.window is None else np.minimum(long, self.window)
        return int((near * (near + 1) // 2 + (long - near) * near).sum())


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of a step, forward and backward."""

    per_token: int
    per_target: int
    attention: tuple[AttentionCost, ...] = ()

    def for_documents(self, lengths: NDArray[np.integer], supervised: int) -> int:
        """FLOPs for documents of these lengths with this many supervised positions in all."""
        attention = sum(
            (span.forward_flops_per_pair + span.backward_flops_per_pair) * span.pairs(lengths)
            for span in self.attention
        )
        return self.per_token * int(lengths.sum(dtype=np.int64)) + self.per_target * supervised + attention


def count_step_flops(model: nn.Module) -> StepFlops:
    """Count a transformers model, with adapters or without. What requires a gradient decides the backward pass."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    whole = getattr(head, "original_module", head)  # peft wraps a head in adapter.also_train
    is_trained = whole.weight.requires_grad or (
        whole is not head and any(part.requires_grad for part in head.parameters())
    )
    return StepFlops(
        per_token=sum(matrix.forward_flops * matrix.matmuls_per_step for matrix in matrix_costs(model)),
        per_target=2 * whole.weight.numel() * (1 + is_trained + (first_trained_module(model) is not None)),
        attention=attention_costs(model),
    )


def attention_costs(model: nn.Module) -> tuple[AttentionCost, ...]:
    """The attention layers, grouped by window."""
    forward: Counter[int | None] = Counter()
    backward: Counter[int | None] = Counter()
    first = first_trained_module(model)
    begun = first == ""
    for name, module in _attention_modules(model):
        begun = begun or (first is not None and not _is_before_training(model, name, first))
        config = getattr(module, "config", None) or model.config.get_text_config()  # type: ignore[operator, union-attr]
        kind = _layer_type(module, config)
        if kind == "linear_attention":  # has a state instead of pairs of tokens
            continue
        window, cost = _attention_window(module, config, kind), _flops_per_pair(module, config)
        forward[window] += cost
        backward[window] += 2 * cost if begun else 0  # four products instead of two
    return tuple(AttentionCost(window, cost, backward[window]) for window, cost in forward.items())


def _attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules named *Attention with a layer_idx, as all of transformers' have."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]


def _is_before_training(model: nn.Module, attention: str, trained: str) -> bool:
    """Whether q, k and v do not depend on trained weights: training begins later, or at the output projection."""
    order = [name for name, _ in model.named_modules()]
    if not trained.startswith(f"{attention}."):
        return order.index(attention) < order.index(trained)
    *_, last = (name for name, _ in model.get_submodule(attention).named_children())
    return trained == f"{attention}.{last}"


def _layer_type(module: Any, config: Any) -> str | None:
    """Such as full_attention or sliding_attention; None if the configuration does not tell."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else str(kinds[module.layer_idx])


def _attention_window(module: nn.Module, config: Any, kind: str | None) -> int | None:
    if kind not in (None, "sliding_attention"):
        return None
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return int(window) if window else None


def _flops_per_pair(module: nn.Module, config: Any) -> int:
    """2 FLOPs for each element of a query and of a value, in every head."""
    heads = config.num_attention_heads
    width: Any = getattr(module, "head_dim", None) or config.hidden_size // heads
    query, value = getattr(module, "qk_head_dim", width), getattr(module, "v_head_dim", width)
    return 2 * heads * (query + value)


def flops_table(model: nn.Module, length: int, supervised: float) -> str:
    """A table of forward FLOPs for a token by module, in documents of `length` tokens; equal layers share a line."""
    rows: dict[str, tuple[int, int, float]] = {}
    for matrix in matrix_costs(model):
        _add_row(rows, re.sub(r"\.\d+(?=\.)", ".*", matrix.name), matrix.size, matrix.forward_flops)
    for span in attention_costs(model):
        name = "attention, full" if span.window is None else f"attention, window of {span.window}"
        _add_row(rows, name, 0, span.forward_flops_per_pair * span.pairs(np.array([length])) / length)
    head = model.get_output_embeddings().weight.numel()  # type: ignore[operator]
    _add_row(rows, f"head, at {supervised:.0%} of the positions", head, 2 * head * supervised)
    total = sum(flops for _, _, flops in rows.values())
    wide = max(map(len, rows))
    lines = [f"{'module':<{wide}}  {'times':>5}  {'parameters':>14}  {'FLOPs/token':>14}  share"]
    for name, (count, size, flops) in sorted(rows.items(), key=lambda row: -row[1][2]):
        lines.append(f"{name:<{wide}}  {count:>5}  {size:>14,}  {flops:>14,.0f}  {flops / total:6.1%}")
    lines.append(f"{'all':<{wide}}  {'':>5}  {sum(size for _, size, _ in rows.values()):>14,}  {total:>14,.0f}")
    return "\n".join([*lines, f"Forward pass, in a document of {length} tokens.", ""])


def _add_row(rows: dict[str, tuple[int, int, float]], name: str, size: int, flops: float) -> None:
    count, sizes, sums = rows.get(name, (0, 0, 0.0))
    rows[name] = (count + 1, sizes + size, sums + flops)


# Peak FLOP/s of known GPUs: vendors' dense figures, with fp32 accumulation.

_TERA = 1e12
_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    # A regular expression for the device name (the first match counts), and TFLOP/s without sparsity
    (r"GB200", {"bf16": 2500, "fp16": 2500, "tf32": 1250, "fp8": 5000, "fp32": 80}),
    (r"\bB200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp8": 4500, "fp32": 75}),
    (r"\bH[12]00 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp8": 1670.5, "fp32": 60}),
    (r"\bH100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp8": 1513, "fp32": 51}),
    (r"\bG?H[12]00\b", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp8": 1978.9, "fp32": 66.9}),
    (r"\bA100\b", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    (r"\bA10\b", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    (r"\bA40\b", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"\bL4\b", {"bf16": 121, "fp16": 121, "tf32": 60, "fp8": 242.5, "fp32": 30.3}),
    (r"\bL40S\b", {"bf16": 362, "fp16": 362, "tf32": 183, "fp8": 733, "fp32": 91.6}),
    (r"\bL40\b", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp8": 362, "fp32": 90.5}),
    (r"RTX A6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    (r"RTX 6000 Ada", {"bf16": 364.2, "fp16": 364.2, "tf32": 182.1, "fp8": 728.5, "fp32": 91.1}),
    (r"RTX 3090$", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    (r"RTX 4090$", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp8": 330.3, "fp32": 82.6}),
    (r"RTX 5090$", {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp8": 419, "fp32": 104.8}),
    (r"V100-SXM", {"fp16": 125, "fp32": 15.7}),
    (r"V100-PCIE", {"fp16": 112, "fp32": 14}),
    (r"Tesla T4\b", {"fp16": 65, "fp32": 8.1}),
    (r"MI210\b", {"bf16": 181, "fp16": 181, "fp32": 45.3}),
    (r"MI250X\b", {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9}),  # one of its two devices
    (r"MI3(00|25)X\b", {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp8": 2614.9, "fp32": 163.4}),
)


def peak_flops_of(name: str, precision: str) -> float | None:
    """Peak FLOP/s of the GPU with this name; None if unknown. `fp32` is without TF32, which has its own key."""
    found = next((peaks for pattern, peaks in _PEAK_TFLOPS if re.search(pattern, name)), {})
    return found[precision] * _TERA if precision in found else None


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of this device in a precision of train.precision; None for a CPU and if unknown.

    For fp8 it is the peak of fp8 products, although attention, head and small matrices are computed in bf16.
    """
    if device.type != "cuda":
        return None
    if precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        precision = "tf32"
    return peak_flops_of(device_name(device), precision)


def device_name(device: torch.device) -> str:
    """The name that the driver reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
