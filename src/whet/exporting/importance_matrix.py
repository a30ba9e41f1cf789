"""An importance matrix for llama.cpp's quantizer: how large the inputs of each weight are in the run's conversations.

Rounding errors of a column count as much as the numbers that it multiplies. The quantizer minimizes them weighted by
the mean square of each input, which the trained model shows on its own training data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.console import info
from whet.exporting.gguf_families import GGUFLayout
from whet.exporting.trained_model import TrainedModel


def write_importance_matrix(
    model: TrainedModel, layout: GGUFLayout, conversations: Sequence[Sequence[int]], file: Path
) -> dict[str, int]:
    """Write what `llama-imatrix` would for these conversations. Returns how much went into it, for the certificate.
    Stacked experts get none: the quantizer then weighs their columns equally."""
    from gguf import GGUFWriter

    tokens = sum(map(len, conversations))
    info(f"importance matrix from {len(conversations)} training conversations, {tokens:,} tokens")
    with _collect(model.language_model) as squares:
        model.logits(conversations)
    writer = GGUFWriter(file, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["training data of the run"])
    writer.add_uint32("imatrix.chunk_count", len(conversations))
    writer.add_uint32("imatrix.chunk_size", max(map(len, conversations)))
    entries = 0
    for weight in model.weights():
        if len(weight.shape) != 2 or weight.name not in squares:
            continue
        total, count = squares[weight.name]
        for name in layout.split(weight.name, torch.empty(weight.shape, device="meta")):
            writer.add_tensor(f"{name}.in_sum2", total.numpy()[None])
            writer.add_tensor(f"{name}.counts", torch.tensor([[float(count)]]).numpy())
            entries += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"conversations": len(conversations), "tokens": tokens, "tensors": entries}


@contextlib.contextmanager
def _collect(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, int]]]:
    """Inside this context, sums of squares of the inputs of every linear layer, by the name of its weight, and their
    number."""
    found: dict[str, tuple[Tensor, int]] = {}

    def hook(name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            total = rows.float().square().sum(0).cpu()
            before, count = found.get(name, (torch.zeros_like(total), 0))
            found[name] = (before + total, count + len(rows))

        return add

    # An adapter wraps its layer and gets the same input; its parts are inside, under other names.
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or hasattr(module, "get_base_layer")
    }
    hooks = [module.register_forward_pre_hook(hook(f"{name}.weight")) for name, module in layers.items()]
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()
