"""The order in which compile, recompute and offload wrap the decoder layers, and why."""

from __future__ import annotations

from typing import Any

from torch import nn

from whet.compat.torch_private import replace_forward
from whet.execution.compile import compile_forward, set_activation_memory_budget
from whet.execution.offload import with_activation_offload
from whet.execution.recompute import has_dropout, with_recompute, with_recompute_in_eager
from whet.model.attention import supports_fullgraph
from whet.model.layers import decoder_layers
from whet.model.lora.fuse import use_low_memory_backward_
from whet.parallel.config import ParallelConfig


def transform_layers(
    language_model: nn.Module, config: ParallelConfig, compile: bool, backend: Any = "inductor"
) -> None:
    """Change the layers of a model in place, from the inside out. Weights keep their names and places."""
    offload = config.offload in ("activations", "both")
    if not (compile or offload or config.recompute != "none"):
        return
    full = config.recompute == "full"
    by_compiler = full and compile and supports_fullgraph(language_model) and not has_dropout(language_model)
    if compile:
        set_activation_memory_budget(full=by_compiler)
    if full or offload:
        use_low_memory_backward_(language_model)
    for layer in decoder_layers(language_model):
        forward = layer.forward
        if by_compiler:
            forward = with_recompute_in_eager(forward)
        if compile:
            # innermost: the compiler sees the layer alone, which is the same for all, and no hooks around it
            forward = compile_forward(forward, backend)
        if full and not by_compiler:
            # around what is compiled in pieces, so that the same compiled code runs again: each piece by itself would
            # keep what it gets
            forward = with_recompute(forward, "full")
        elif config.recompute == "selective" and not compile:
            forward = with_recompute(forward, "selective")
        if offload:
            # outermost: sees only what is kept after recomputing, with `full` the input of the layer
            forward = with_activation_offload(forward, layer)
        replace_forward(layer, forward)
