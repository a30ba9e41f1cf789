"""What whet's own operators cost: those that do more than read their inputs and write their outputs.

Each function has its operator's signature and says which products it computes and how many bytes it moves beside them.
Whoever changes an operator changes its cost here. Shape letters: T tokens, E input features, F intermediate size,
O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor


class Operation(NamedTuple):
    """One kernel or several: their time is that of their FLOPs or of their bytes, whichever is longer."""

    kind: Literal["matmul", "fp8", "memory"]
    flops: int
    bytes: int
    inner: int = 0
    """The inner dimension of a product: short sums keep tensor cores less busy."""
    kernels: int = 1


def _frozen_product(tokens: int, a: Tensor, b: Tensor, parts: Sequence[Tensor], itemsize: int) -> list[Operation]:
    """[T, E] · [E, O] with a frozen weight; in fp8 the weight is cast each time."""
    inside, outside = a.shape[1], len(b)
    moved = tokens * (inside + outside) * itemsize + inside * outside * itemsize
    product = Operation("fp8" if len(parts) == 2 else "matmul", 2 * tokens * inside * outside, moved, inside)
    return [product, Operation("memory", 0, 5 * inside * outside, kernels=2)] if len(parts) == 2 else [product]


def _fp8_cast(x: Tensor, frozen: Sequence[Tensor], layers: int) -> list[Operation]:
    """An operand is read for its amax, read again and written in 8 bits, once for all layers that share it."""
    return [Operation("memory", 0, 5 * x.numel(), kernels=2)] if len(frozen) == 2 * layers else []


def _lora_linear(
    x: Tensor, frozen: Sequence[Tensor], sizes: Sequence[int], biases: Any, adapters: Sequence[Tensor], scales: Any
) -> list[Operation]:
    size, tokens = x.element_size(), x.shape[:-1].numel()
    pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
    low_rank = x.numel() + sum(2 * tokens * len(b) for _, b in pairs)  # written by the low-rank product, then read
    products = [
        each for (a, b), count in zip(pairs, sizes, strict=True)
        for each in _frozen_product(tokens, a, b, frozen[:count], size)
    ]  # fmt: skip
    return [
        *_fp8_cast(x, frozen, len(pairs)),
        *products,
        Operation("memory", 0, low_rank * size, kernels=2 + len(pairs)),
    ]


def _lora_linear_backward(
    d_outputs: Sequence[Tensor], x: Tensor, xa: Tensor, frozen: Sequence[Tensor], sizes: Sequence[int],
    adapters: Sequence[Tensor], scales: Any, needs_x: bool,
) -> list[Operation]:  # fmt: skip
    size, tokens = x.element_size(), x.shape[:-1].numel()
    pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
    low_rank = (1 + 2 * needs_x) * x.numel() + 2 * sum(d_y.numel() for d_y in d_outputs)
    found = [Operation("memory", 0, low_rank * size, kernels=4 + 3 * len(pairs))]
    if needs_x:
        for (a, b), count in zip(pairs, sizes, strict=True):
            found += _frozen_product(tokens, b.T, a.T, frozen[:count], size)
        for d_y in d_outputs:
            found += _fp8_cast(d_y, frozen, len(pairs))
    return found


def _lora_mlp_gate_up(
    x: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], gate_bias: Any, up_bias: Any, adapters: Sequence[Tensor],
    scales: Any,
) -> list[Operation]:  # fmt: skip
    size, tokens = x.element_size(), x.shape[:-1].numel()
    a_gate, b_gate, a_up, b_up = adapters
    return [
        *_fp8_cast(x, gate, 1), *_frozen_product(tokens, a_gate, b_gate, gate, size),
        *_frozen_product(tokens, a_up, b_up, up, size), Operation("memory", 0, x.numel() * size, kernels=3),
    ]  # fmt: skip


def _lora_mlp_down(
    gate0: Tensor, up0: Tensor, xa: Tensor, down: Sequence[Tensor], bias: Any, adapters: Sequence[Tensor], scale: Any
) -> list[Operation]:
    size, tokens = gate0.element_size(), len(gate0)
    a_down, b_down = adapters[4], adapters[5]
    activations = (3 * gate0.numel() + 2 * tokens * len(b_down)) * size
    return [
        Operation("memory", 0, activations, kernels=4), *_fp8_cast(gate0, down, 1),
        *_frozen_product(tokens, a_down, b_down, down, size),
    ]  # fmt: skip


def _lora_mlp_backward(
    d_y: Tensor, x: Tensor, gate0: Tensor, up0: Tensor, xa: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor],
    down: Sequence[Tensor], adapters: Sequence[Tensor], scales: Any, chunk: int, needs_x: bool,
) -> list[Operation]:  # fmt: skip
    size, tokens = x.element_size(), len(gate0)
    a_gate, b_gate, a_up, b_up, a_down, b_down = adapters
    # the kernel of the activations reads three and writes two; dB reads both gradients again
    moved = (7 * gate0.numel() + (2 + 2 * needs_x) * x.numel() + 2 * d_y.numel()) * size
    found = [
        Operation("memory", 0, moved, kernels=13), *_fp8_cast(d_y, down, 1),
        *_frozen_product(tokens, b_down.T, a_down.T, down, size),
    ]  # fmt: skip
    if needs_x:
        for a, b, parts in ((a_gate, b_gate, gate), (a_up, b_up, up)):
            found += [*_fp8_cast(gate0, parts, 1), *_frozen_product(tokens, b.T, a.T, parts, size)]
    return found


# Experts (model/experts/operators.py): S = T · top-k rows sorted by expert, U the width of up, with gate if it has one


def _grouped(rows: int, inside: int, outside: int, weights: Sequence[Tensor]) -> Operation:
    """A product of rows with their experts' weights."""
    weight = weights[0]
    moved = (rows * (inside + outside) + weight.numel()) * weight.element_size()
    return Operation("matmul", int(GROUPED_SLOWDOWN * 2 * rows * inside * outside), moved, inside)


def _experts_up(
    x: Tensor, index: Tensor, up: Sequence[Tensor], bias: Any, lora: Any, scales: Any, shape: Sequence[int]
) -> list[Operation]:
    _, hidden, width, _, _ = shape
    gathered = 2 * index.numel() * hidden * x.element_size()
    return [Operation("memory", 0, gathered, kernels=8), _grouped(index.numel(), hidden, width, up)]


def _experts_down(
    weights: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, up0: Tensor, xa: Tensor, down: Sequence[Tensor],
    bias: Any, up_lora: Any, down_lora: Sequence[Tensor], scales: Any, shape: Sequence[int], activation: Any,
) -> list[Operation]:  # fmt: skip
    _, hidden, width, intermediate, _ = shape
    passes = 3 if down_lora else 1  # over the outputs: the adapters' part is added, choices are summed
    moved = len(order) * (width + intermediate + passes * hidden) * up0.element_size()
    return [Operation("memory", 0, moved, kernels=6), _grouped(len(order), intermediate, hidden, down)]


def _experts_backward(
    d_out: Tensor, x: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, up0: Tensor, xa: Tensor,
    up: Sequence[Tensor], down: Sequence[Tensor], down_bias: Any, up_lora: Sequence[Tensor],
    down_lora: Sequence[Tensor], scales: Any, shape: Sequence[int], activation: Any, needs_x: bool,
    trained: Sequence[bool],
) -> list[Operation]:  # fmt: skip
    rows, (_, hidden, width, intermediate, _) = len(order), shape
    products = [(intermediate, hidden, down)] * (1 + trained[1]) + [(hidden, width, up)] * (needs_x + trained[0])
    moved = 3 * hidden + 2 * (intermediate + width)  # gathered and summed; the activation reads two and writes two
    moved += 2 * hidden + width + intermediate if up_lora or down_lora else 0
    found = [_grouped(rows, inside, outside, weight) for inside, outside, weight in products]
    return [Operation("memory", 0, rows * moved * x.element_size(), kernels=20), *found]


GROUPED_SLOWDOWN = 1.2
"""Experts get few tokens each: grouped products reach five sixths of the rate (LOG.md, 2026-11-16)."""


def _mlp_down_scratch(gate0: Tensor, *_: Any) -> int:
    return gate0.numel() * gate0.element_size()


def _mlp_backward_scratch(d_y: Tensor, x: Tensor, gate0: Tensor, *others: Any) -> int:
    adapters, chunk = others[5], others[7]
    matrices = 2 if len(adapters[4]) <= _MAX_RANK_IN_PLACE else 3
    return matrices * min(len(gate0), chunk) * gate0.shape[1] * gate0.element_size()


_MAX_RANK_IN_PLACE = 32
"""Up to this rank the backward kernel of the gated MLP does not write the activations again (lora_kernels.py)."""


def _experts_up_scratch(x: Tensor, index: Tensor, *_: Any) -> int:
    return index.numel() * x.shape[1] * x.element_size()


def _experts_down_scratch(
    weights: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, up0: Tensor, *others: Any
) -> int:
    _, hidden, _, intermediate, _ = others[6]
    return len(order) * (hidden + intermediate) * up0.element_size()


def _experts_backward_scratch(d_out: Tensor, x: Tensor, weights: Tensor, order: Tensor, *others: Any) -> int:
    _, hidden, width, intermediate, _ = others[10]
    return len(order) * (hidden + width + 2 * intermediate) * x.element_size()


OWN_OPERATORS: dict[str, Callable[..., list[Operation]]] = {
    "whet::lora_linear": _lora_linear,
    "whet::lora_linear_backward": _lora_linear_backward,
    "whet::lora_mlp_gate_up": _lora_mlp_gate_up,
    "whet::lora_mlp_down": _lora_mlp_down,
    "whet::lora_mlp_backward": _lora_mlp_backward,
    "whet::experts_up": _experts_up,
    "whet::experts_down": _experts_down,
    "whet::experts_backward": _experts_backward,
}
"""Operators that do more than read their inputs and write their outputs."""
OWN_SCRATCH: dict[str, Callable[..., int]] = {
    "whet::lora_mlp_down": _mlp_down_scratch,
    "whet::lora_mlp_backward": _mlp_backward_scratch,
    "whet::experts_up": _experts_up_scratch,
    "whet::experts_down": _experts_down_scratch,
    "whet::experts_backward": _experts_backward_scratch,
}
"""Operators that allocate more than their outputs."""
