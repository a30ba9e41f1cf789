"""The order in which compile, recompute and offload wrap the decoder layers, and why."""

from __future__ import annotations

from typing import Any

from torch import nn

from whet.compat.torch_private import replace_forward, unwrapped_forward
from whet.execution.compile import compile_forward, set_activation_memory_budget
from whet.execution.merge_linears import compile_with_merged_linears
from whet.execution.offload import with_activation_offload
from whet.execution.recompute import has_dropout, with_recompute, with_recompute_in_eager
from whet.model.attention import supports_fullgraph
from whet.model.experts.install import experts_modules
from whet.model.lora.fuse import use_low_memory_backward_
from whet.model.modules import decoder_layers
from whet.parallel.config import ParallelConfig


def transform_layers(
    language_model: nn.Module, config: ParallelConfig, compile: bool, backend: Any = compile_with_merged_linears
) -> None:
    """Wrap the forward pass of every decoder layer in place, from the inside out. Parameter names do not change.

    Called again, for settings that save more memory, it starts from the bare layers.
    """
    offload = config.offload in ("activations", "both")
    if not (compile or offload or config.recompute != "none"):
        return
    full = config.recompute == "full"
    # The compiler recomputes less than a whole layer, but only if the layer is one graph; with dropout it would draw
    # other random numbers, and with experts it may round routers in another way, which can choose other experts.
    by_compiler = full and compile and supports_fullgraph(language_model) and not has_dropout(language_model)
    by_compiler = by_compiler and not experts_modules(language_model)
    if compile:
        set_activation_memory_budget(full=by_compiler)
    if full or offload:
        use_low_memory_backward_(language_model)
    for layer in decoder_layers(language_model):
        forward = unwrapped_forward(layer)
        if by_compiler:
            forward = with_recompute_in_eager(forward)
        if compile:
            # innermost: the compiler sees the bare layer, the same code for all of them
            forward = compile_forward(forward, backend)
        if full and not by_compiler:
            # around the compiled parts, so that the same compiled code runs again: each part would save its inputs
            forward = with_recompute(forward, "full")
        elif config.recompute == "selective" and not compile:
            forward = with_recompute(forward, "selective")
        if offload:
            # outermost: it sees what is saved after recomputation, with `full` the layer's input
            forward = with_activation_offload(forward, layer)
        replace_forward(layer, forward)
