"""How much arithmetic a training step takes, from the model's own shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """What one token, one supervised position and one pair of tokens cost in a forward pass, in FLOPs."""

    per_token: int
    per_target: int
    per_square: int
    backward: int
    """Backward over forward: 2 when every weight gets a gradient, 1 when only adapters do."""

    def of(self, tokens: int, supervised: int, squares: int) -> int:
        """FLOPs of a step, forward and backward. `squares` is the sum of squared document lengths."""
        linear = self.per_token * tokens + self.per_target * supervised
        attention = self.per_square * squares
        return linear * (1 + self.backward) + attention * 3  # attention has two inputs to differentiate, always


def work_of(config: Any, matrix_parameters: int, adapters: bool) -> Work:
    """`matrix_parameters`: weights in matrices that every token passes, embedding and head left out."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Work(
        per_token=2 * matrix_parameters,
        per_target=2 * config.hidden_size * config.vocab_size,
        per_square=2 * heads * width * config.num_hidden_layers,  # QKᵀ and PV, 2 FLOPs each, half of it masked
        backward=1 if adapters else 2,
    )
