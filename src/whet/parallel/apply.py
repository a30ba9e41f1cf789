"""The order in which a model's layers are changed for memory and speed, and why."""

from __future__ import annotations

from typing import Any

from torch import nn

from whet.model.attention import compiles_through
from whet.model.fused_lora import spare_memory_
from whet.parallel.compile import choose_kept, compiled
from whet.parallel.config import ParallelConfig
from whet.parallel.layers import decoder_layers
from whet.parallel.offload import offloaded
from whet.parallel.recompute import draws, recomputed, recomputed_uncompiled


def apply(language_model: nn.Module, config: ParallelConfig, compile: bool, backend: Any = "inductor") -> None:
    """Change the layers of a model in place, from the inside out. Weights keep their names and places."""
    offload = config.offload in ("activations", "both")
    if not (compile or offload or config.recompute != "none"):
        return
    full = config.recompute == "full"
    by_compiler = full and compile and compiles_through(language_model) and not draws(language_model)
    if compile:
        choose_kept(full=by_compiler)
    if full or offload:
        spare_memory_(language_model)
    for layer in decoder_layers(language_model):
        forward = layer.forward
        if by_compiler:
            forward = recomputed_uncompiled(forward)
        if compile:
            # innermost: the compiler sees the layer alone, which is the same for all, and no hooks around it
            forward = compiled(forward, backend)
        if full and not by_compiler:
            # around what is compiled in pieces, so that the same compiled code runs again: each piece by itself would
            # keep what it gets
            forward = recomputed(forward, "full")
        elif config.recompute == "selective" and not compile:
            forward = recomputed(forward, "selective")
        if offload:
            # outermost: sees only what is kept after recomputing, with `full` the input of the layer
            forward = offloaded(forward, layer)
        layer.forward = forward
