"""Finds the decoder layers of a language model, whatever its architecture calls them."""

from __future__ import annotations

from torch import nn

from whet.core.errors import WhetError


def decoder_layers(language_model: nn.Module) -> list[nn.Module]:
    """The repeated layers in their order: the list of modules that holds the most weights.

    Lists of experts stand inside a layer, so they hold less; towers for images and sound are smaller than the text's.
    """
    lists = [module for module in language_model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise WhetError(
            "model.path: whet does not find this model's layers, so it cannot compile them, compute them again or move "
            "what they keep: set model.compile=false, parallel.recompute=none and leave out activations in "
            "parallel.offload"
        )
    sizes = [sum(parameter.numel() for parameter in modules.parameters()) for modules in lists]
    return list(lists[sizes.index(max(sizes))])
