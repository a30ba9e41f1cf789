"""The decoder layers of a language model, independent of the architecture."""

from __future__ import annotations

from torch import nn

from whet.core.errors import WhetError


def decoder_layers(language_model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order: the ModuleList with the most weights.

    Lists of experts are inside a layer and so hold less; vision and audio towers are smaller than the text decoder.
    """
    lists = [module for module in language_model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise WhetError(
            "model.path: this model's decoder layers cannot be found, so they cannot be compiled, recomputed or "
            "offloaded. Set model.compile=false, parallel.recompute=none and remove activations from parallel.offload"
        )
    sizes = [sum(parameter.numel() for parameter in modules.parameters()) for modules in lists]
    return list(lists[sizes.index(max(sizes))])
