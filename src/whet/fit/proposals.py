"""What `whet fit` proposes and does not choose: settings that save memory and change the numbers or the machines."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config import Config
from whet.fit.memory_parts import GIB, MemoryParts
from whet.run.memory_choice import MemoryChoice

_STATE_BITS = {"adamw": 32, "adamw16bit": 16, "adamw8bit": 8}
_WORTHWHILE = 0.05
"""Of the peak: what saves less is not proposed."""
_MIN_SAVED = 2**28


def propose(config: Config, choice: MemoryChoice, memory: MemoryParts, most_rows: int, world: int) -> list[str]:
    """Sentences with a setting each. None if the run already has micro-batches of `most_rows`, without recomputation
    and offload: more memory would not make it faster."""
    if choice == MemoryChoice(most_rows, "none", "none"):
        return []
    return [*_optimizer_proposals(config, memory), *_sharding_proposals(config, memory, world)]


def _optimizer_proposals(config: Config, memory: MemoryParts) -> Iterator[str]:
    bits = _STATE_BITS.get(config.train.optimizer.name, 8)
    for name, smaller in _STATE_BITS.items():
        saved = memory.optimizer * (bits - smaller) // bits
        if smaller < bits and saved > max(_MIN_SAVED, _WORTHWHILE * memory.total):
            yield (
                f"train.optimizer.name={name}: the optimizer's state in {smaller} bits takes {saved / GIB:.1f} GiB "
                "less; the loss changes slightly"
            )


def _sharding_proposals(config: Config, memory: MemoryParts, world: int) -> Iterator[str]:
    if config.parallel.uses_fsdp:
        return
    devices = max(2, world)
    sharded = memory.gradients + memory.optimizer + (memory.weights if config.quantize is None else 0)
    saved = sharded * (devices - 1) // devices
    if saved > max(_MIN_SAVED, _WORTHWHILE * memory.total):
        machines = "over the devices of this run" if world > 1 else f"on {devices} devices instead of 1"
        yield (
            f"parallel.shard={devices}: {machines}, each holds 1/{devices} of weights, gradients and optimizer state, "
            f"{saved / GIB:.1f} GiB less"
        )
