"""Two packed documents, before the first step: does this model keep them apart, and are its logits what whet computes?

Some architectures carry state from token to token or have an attention of their own, so that packed conversations would
see each other; some do more with their logits than their configuration says. Training them would look healthy and be
wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.attention import plain
from whet.model.head import Head, head_of
from whet.model.loss import LossModel

_LOUD = 64.0
"""The largest logit of the second comparison: a cap of 30 does nothing that can be seen to the small logits of the
first, and a bias little to those of the second."""


@torch.no_grad()
def probe(root: LossModel, vocabulary: int) -> None:
    """Compare two packed documents with what the model itself makes of each alone; refuse where they differ."""
    model = root.language_model
    tokens = torch.arange(16, device=next(root.parameters()).device) * 7919 % vocabulary
    with _evaluating(root):
        try:
            head = head_of(model)  # refuses what it does not know
            hidden = _hidden_of_two(root, tokens)
            other = _hidden_of_two(root, torch.cat([tokens[:8].flip(0), tokens[8:]]))
            largest = Head(head.weight, scale=head.scale).logits(hidden).abs().max().item()
            own = {volume: _own_logits(model, tokens, volume) for volume in (1.0, _LOUD / largest)}
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise WhetError(
                f"model.path: this architecture cannot be trained on packed documents ({error!r})"
            ) from None
    leak = (head.logits(hidden[8:]) - head.logits(other[8:])).abs().max().item()  # the same shapes: no rounding
    if not leak <= 1e-5 * own[1.0].abs().max().item():
        raise WhetError(
            f"model.path: conversations packed into one row would see each other in this model (logits move by "
            f"{leak:.3g} when another conversation changes): it has layers with state, or an attention of its own. "
            "whet refuses to train it"
        )
    is_coarse = torch.is_autocast_enabled(tokens.device.type) or hidden.dtype.itemsize < 4
    for volume, expected in own.items():
        difference = (expected - head.logits(hidden * volume).float()).abs().max().item()
        size = max(expected.abs().max().item(), volume * largest)  # logits are rounded before they are capped
        if not difference <= (0.05 if is_coarse else 1e-4) * size:
            raise WhetError(
                f"model.path: whet computes other logits for this model than it does itself (they differ by "
                f"{difference:.3g}): it does more with its logits than whet knows of, or has an attention of its own. "
                "whet would train it wrongly, so it refuses"
            )


@contextlib.contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    """Without dropout for a while; every module is left in the mode it was found in."""
    before = [(module, module.training) for module in root.modules()]
    root.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _hidden_of_two(root: LossModel, tokens: Tensor) -> Tensor:
    """Hidden states of a row whose halves are two documents."""
    half = len(tokens) // 2
    edges = (0, half, 2 * half)
    positions = torch.arange(half, device=tokens.device).repeat(2)
    cu_seqlens = torch.tensor(edges, device=tokens.device, dtype=torch.int32)
    return root._hidden(tokens, positions, cu_seqlens, half, edges)[0]


def _own_logits(model: nn.Module, tokens: Tensor, volume: float) -> Tensor:
    """What the model makes of each half alone, its hidden states multiplied by `volume` before its head."""

    def louder(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] * volume, *inputs[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(louder)  # type: ignore[operator]
    try:
        with plain(model):
            halves = [model(input_ids=half[None], use_cache=False).logits[0] for half in tokens.chunk(2)]
    finally:
        hook.remove()
    return torch.cat(halves).float()
