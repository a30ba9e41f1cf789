"""How much arithmetic a training step takes, from the model itself.

Counted are matrix products: linear layers by token, the head by supervised position, attention by the pairs of tokens
that see each other. Not counted are norms, activations, softmax, rotary positions, the optimizer, padding, and what is
computed a second time to save memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from whet.model.matrices import first_trained, matrices_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Span:
    """Attention layers that look equally far back, together."""

    window: int | None
    """Tokens that one sees, itself included; None: all before it."""
    forward: int
    """FLOPs of a pair of tokens: QKᵀ and PV."""
    backward: int

    def pairs(self, lengths: NDArray[np.integer]) -> int:
        """How many pairs of tokens of the same document see each other."""
        long = lengths.astype(np.int64)
        near = long if self.window is None else np.minimum(long, self.window)
        return int((near * (near + 1) // 2 + (long - near) * near).sum())


@dataclass(frozen=True, slots=True)
class Work:
    """What a step costs in FLOPs, forward and backward."""

    per_token: int
    per_target: int
    spans: tuple[Span, ...] = ()

    def of(self, lengths: NDArray[np.integer], supervised: int) -> int:
        """FLOPs of a step with documents of these lengths and so many supervised positions."""
        attention = sum((span.forward + span.backward) * span.pairs(lengths) for span in self.spans)
        return self.per_token * int(lengths.sum(dtype=np.int64)) + self.per_target * supervised + attention


def work_of(model: nn.Module) -> Work:
    """`model` is a transformers model, with adapters or without; what is trained decides the backward pass."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    whole = getattr(head, "original_module", head)  # peft wraps one that is trained beside adapters
    learns = whole.weight.requires_grad or (whole is not head and any(part.requires_grad for part in head.parameters()))
    return Work(
        per_token=sum(matrix.forward * matrix.passes for matrix in matrices_of(model)),
        per_target=2 * whole.weight.numel() * (1 + learns + (first_trained(model) is not None)),
        spans=spans_of(model),
    )


def spans_of(model: nn.Module) -> tuple[Span, ...]:
    """The attention layers by how far they look."""
    forward: Counter[int | None] = Counter()
    backward: Counter[int | None] = Counter()
    first = first_trained(model)
    begun = first == ""
    for name, module in _attentions(model):
        begun = begun or (first is not None and not _is_before(model, name, first))
        window, cost = _window(module), _pair_cost(module)
        forward[window] += cost
        backward[window] += 2 * cost if begun else 0  # four products against two
    return tuple(Span(window, cost, backward[window]) for window, cost in forward.items())


def _attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """transformers tells each attention the number of its layer."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]


def _is_before(model: nn.Module, attention: str, trained: str) -> bool:
    """Whether nothing that goes into the attention's product is trained: all is later, or its last projection is."""
    order = [name for name, _ in model.named_modules()]
    if not trained.startswith(f"{attention}."):
        return order.index(attention) < order.index(trained)
    *_, last = (name for name, _ in model.get_submodule(attention).named_children())
    return trained == f"{attention}.{last}"


def _window(module: nn.Module) -> int | None:
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        return None
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return int(window) if window else None


def _pair_cost(module: nn.Module) -> int:
    """2 FLOPs for each number of a query and of a value, in every head."""
    config: Any = module.config
    heads = config.num_attention_heads
    width: Any = getattr(module, "head_dim", None) or config.hidden_size // heads
    query, value = getattr(module, "qk_head_dim", width), getattr(module, "v_head_dim", width)
    return 2 * heads * (query + value)
