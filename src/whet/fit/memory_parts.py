"""Memory of one device at the peak of a training step, by what holds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
