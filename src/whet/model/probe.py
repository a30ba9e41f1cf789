"""Two packed documents, before the first step: does this model keep them apart, and are its logits what whet computes?

Some architectures carry state from token to token or have an attention of their own, so that packed conversations would
see each other; some do more with their logits than their configuration says. Training them would look healthy and be
wrong.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.attention import plain, unserved
from whet.model.head import Head, head_of
from whet.model.loss import LossModel
from whet.model.modes import evaluating
from whet.model.rope import changing_rope

_REMEDY = "It can be trained unpacked: data.packing=none train.micro_rows=1"
_FAILURES = (AttributeError, KeyError, TypeError, ValueError)
_LOUD = 64.0
"""The largest logit of the second comparison: a cap of 30 does nothing that can be seen to the small logits of the
first, and a bias little to those of the second."""


class PackingError(WhetError):
    """This model must not be given several documents at once."""


def probe(root: LossModel, vocabulary: int, longest: int) -> None:
    """Compare two packed documents with what the model itself makes of each alone; refuse where they differ.

    `longest`: the most tokens of a document in training.
    """
    root.within(functools.partial(_probe, root, vocabulary, longest))


@torch.no_grad()
def _probe(root: LossModel, vocabulary: int, longest: int) -> None:
    model = root.language_model
    rope = changing_rope(model, longest)
    if rope is not None:  # not to be seen in documents as short as those below
        raise PackingError(
            f"model.path: this model turns positions by the longest document of a row ({rope}), so that packed "
            f"conversations of {longest:,} tokens would change each other. {_REMEDY}; or lower data.max_length to what "
            "the model was first trained on"
        )
    wanted = unserved(model)
    if wanted is not None:  # windows are too wide for the documents below to notice
        raise PackingError(f"model.path: whet cannot attend as this model does: {wanted}. {_REMEDY}")
    tokens = torch.arange(16, device=next(root.parameters()).device) * 7919 % vocabulary
    with evaluating(root):
        try:
            head = head_of(model)  # refuses what it does not know
            hidden = _hidden_of_two(root, tokens)
            other = _hidden_of_two(root, torch.cat([tokens[:8].flip(0), tokens[8:]]))
            largest = _largest(head, hidden)
            own = {volume: _own_logits(model, tokens, volume) for volume in (1.0, _LOUD / largest)}
        except _FAILURES as error:
            raise PackingError(
                f"model.path: this architecture cannot be trained on packed documents ({error!r}). {_REMEDY}"
            ) from None
    leak = (head.logits(hidden[8:]) - head.logits(other[8:])).abs().max().item()  # the same shapes: no rounding
    if not leak <= 1e-5 * own[1.0].abs().max().item():
        raise PackingError(
            f"model.path: conversations packed into one row would see each other in this model (logits move by "
            f"{leak:.3g} when another conversation changes): it has layers with state, or an attention of its own. "
            f"{_REMEDY}"
        )
    _compare(head, hidden, own, largest)


def probe_alone(root: LossModel, vocabulary: int, longest: int) -> None:
    """The same for a model that gets one document at a time and attends as it likes: are its logits whet's?"""
    root.within(functools.partial(_probe_alone, root, vocabulary, longest))


@torch.no_grad()
def _probe_alone(root: LossModel, vocabulary: int, longest: int) -> None:
    model = root.language_model
    if changing_rope(model, longest) == "dynamic":
        raise WhetError(
            "model.path: this model's positions (dynamic) depend on the documents that it saw before, so that a run "
            f"could not be repeated. Lower data.max_length (the longest conversation has {longest:,} tokens)"
        )
    tokens = torch.arange(8, device=next(root.parameters()).device) * 7919 % vocabulary
    with evaluating(root):
        try:
            head = head_of(model)
            hidden = root.hidden_alone(tokens)
            largest = _largest(head, hidden)
            own = {volume: _own_logits(model, tokens, volume, 1) for volume in (1.0, _LOUD / largest)}
        except _FAILURES as error:
            raise WhetError(f"model.path: this architecture cannot be trained ({error!r})") from None
    _compare(head, hidden, own, largest)


@torch.no_grad()
def require_sound(model: nn.Module) -> None:
    """Refuse a model whose answers would mean nothing, before it is asked."""
    tokens = torch.arange(8, device=next(model.parameters()).device)
    with evaluating(model), plain(model):
        _require_sound(model(input_ids=tokens[None], use_cache=False).logits.abs().max().item())


def _largest(head: Head, hidden: Tensor) -> float:
    largest = Head(head.weight, scale=head.scale).logits(hidden).abs().max().item()
    _require_sound(largest)
    return largest


def _require_sound(largest: float) -> None:
    if not 0 < largest < math.inf:
        raise WhetError(
            "model.path: all logits of this model are zero, or some are not finite: its weights are broken, as after a "
            "run that diverged"
        )


def _compare(head: Head, hidden: Tensor, own: dict[float, Tensor], largest: float) -> None:
    is_coarse = torch.is_autocast_enabled(hidden.device.type) or hidden.dtype.itemsize < 4
    for volume, expected in own.items():
        difference = (expected - head.logits(hidden * volume).float()).abs().max().item()
        size = max(expected.abs().max().item(), volume * largest)  # logits are rounded before they are capped
        if not difference <= (0.05 if is_coarse else 1e-4) * size:
            raise WhetError(
                f"model.path: whet computes other logits for this model than it does itself (they differ by "
                f"{difference:.3g}): it does more with its logits than whet knows of, or has an attention of its own. "
                "whet would train it wrongly, so it refuses"
            )


def _hidden_of_two(root: LossModel, tokens: Tensor) -> Tensor:
    """Hidden states of a row whose halves are two documents."""
    half = len(tokens) // 2
    edges = (0, half, 2 * half)
    positions = torch.arange(half, device=tokens.device).repeat(2)
    cu_seqlens = torch.tensor(edges, device=tokens.device, dtype=torch.int32)
    return root.hidden(tokens, positions, cu_seqlens, half, edges)


def _own_logits(model: nn.Module, tokens: Tensor, volume: float, documents: int = 2) -> Tensor:
    """What the model makes of each document alone, its hidden states multiplied by `volume` before its head."""

    def louder(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] * volume, *inputs[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(louder)  # type: ignore[operator]
    try:
        with plain(model):
            parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.chunk(documents)]
    finally:
        hook.remove()
    return torch.cat(parts).float()
