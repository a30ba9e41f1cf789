"""An importance matrix for llama.cpp's quantizer: how large the inputs of each weight are in the run's conversations.

Rounding errors of a column count as much as the numbers that it multiplies. The quantizer minimizes them weighted by
the mean square of each input, which the trained model shows on its own training data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.console import progress
from whet.exporting.gguf_families import GGUFLayout, text_config
from whet.exporting.trained_model import TrainedModel

_CHUNK_TOKENS = 512
"""As llama-imatrix has them: conversations one after another, cut."""


def write_importance_matrix(
    model: TrainedModel, layout: GGUFLayout, conversations: Sequence[Sequence[int]], file: Path
) -> dict[str, int]:
    """Write what `llama-imatrix` would for these conversations. Returns how much went into it, for the certificate.
    Stacked experts get none: the quantizer then weighs their columns equally."""
    from gguf import GGUFWriter

    ids = [number for conversation in conversations for number in conversation]
    length = min(_CHUNK_TOKENS, text_config(model.language_model.config).max_position_embeddings)
    chunks = [ids[start : start + length] for start in range(0, len(ids), length)]
    title = "importance matrix from training conversations"
    with progress(title, len(chunks)) as bar, _collect(model.language_model, bar.advance) as squares:
        model.logits(chunks)
    writer = GGUFWriter(file, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["training data of the run"])
    writer.add_uint32("imatrix.chunk_count", len(chunks))
    writer.add_uint32("imatrix.chunk_size", length)
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
    return {"conversations": len(conversations), "tokens": len(ids), "tensors": entries}


@contextlib.contextmanager
def _collect(model: Any, on_chunk: Callable[[], None]) -> Iterator[dict[str, tuple[Tensor, int]]]:
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
    hooks.append(model.get_input_embeddings().register_forward_pre_hook(lambda *_: on_chunk()))
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()
