"""Checks before the first step: packed documents must not influence each other, and whet's logits must equal the model's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.attention import native_attention, unsupported_attention
from whet.model.loss.loss_model import LossModel
from whet.model.loss.output_head import OutputHead, read_output_head
from whet.model.modules import eval_mode

# Rotary positions whose frequencies depend on how long the text is.
#
# transformers looks at the largest position of a whole row for that, so that one long document would change how the
# short ones beside it are turned. Documents that are no longer than what the model was first trained on are all turned
# the same way.


def length_dependent_rope(model: nn.Module, longest: int) -> str | None:
    """The kind of rotary position that would mix up documents of up to `longest` tokens; None if there is none."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    for settings in _rope_settings(getattr(config, "rope_parameters", None) or {}):
        kind = settings.get("rope_type")
        first = settings.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind in ("dynamic", "longrope") and longest > (first or config.max_position_embeddings):
            return str(kind)
    return None


def _rope_settings(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for the model, or one for each kind of layer."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, dict))


# Two packed documents, before the first step: does this model keep them apart, and are its logits what whet computes?
#
# Some architectures carry state from token to token or have an attention of their own, so that packed conversations would
# see each other; some do more with their logits than their configuration says. Training them would look healthy and be
# wrong.

_REMEDY = "It can be trained unpacked: data.packing=none train.micro_rows=1"
_PROBE_FAILURES = (AttributeError, KeyError, TypeError, ValueError)
_LARGE_LOGIT = 64.0
"""The largest logit of the second comparison: a cap of 30 does nothing that can be seen to the small logits of the
first, and a bias little to those of the second."""


class PackingError(WhetError):
    """This model must not be given several documents at once."""


def check_packing(root: LossModel, vocabulary: int, longest: int) -> None:
    """Compare two packed documents with what the model itself makes of each alone; refuse where they differ.

    `longest`: the most tokens of a document in training.
    """
    root.with_full_weights(functools.partial(_check_packing, root, vocabulary, longest))


@torch.no_grad()
def _check_packing(root: LossModel, vocabulary: int, longest: int) -> None:
    model = root.language_model
    rope = length_dependent_rope(model, longest)
    if rope is not None:  # not to be seen in documents as short as those below
        raise PackingError(
            f"model.path: this model turns positions by the longest document of a row ({rope}), so that packed "
            f"conversations of {longest:,} tokens would change each other. {_REMEDY}; or lower data.max_length to what "
            "the model was first trained on"
        )
    wanted = unsupported_attention(model)
    if wanted is not None:  # windows are too wide for the documents below to notice
        raise PackingError(f"model.path: whet cannot attend as this model does: {wanted}. {_REMEDY}")
    tokens = torch.arange(16, device=next(root.parameters()).device) * 7919 % vocabulary
    with eval_mode(root):
        try:
            head = read_output_head(model)  # refuses what it does not know
            hidden = _hidden_of_two_documents(root, tokens)
            other = _hidden_of_two_documents(root, torch.cat([tokens[:8].flip(0), tokens[8:]]))
            largest = _largest_logit(head, hidden)
            own = {volume: _reference_logits(model, tokens, volume) for volume in (1.0, _LARGE_LOGIT / largest)}
        except _PROBE_FAILURES as error:
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
    _compare_logits(head, hidden, own, largest)


def check_unpacked(root: LossModel, vocabulary: int, longest: int) -> None:
    """The same for a model that gets one document at a time and attends as it likes: are its logits whet's?"""
    root.with_full_weights(functools.partial(_check_unpacked, root, vocabulary, longest))


@torch.no_grad()
def _check_unpacked(root: LossModel, vocabulary: int, longest: int) -> None:
    model = root.language_model
    if length_dependent_rope(model, longest) == "dynamic":
        raise WhetError(
            "model.path: this model's positions (dynamic) depend on the documents that it saw before, so that a run "
            f"could not be repeated. Lower data.max_length (the longest conversation has {longest:,} tokens)"
        )
    tokens = torch.arange(8, device=next(root.parameters()).device) * 7919 % vocabulary
    with eval_mode(root):
        try:
            head = read_output_head(model)
            hidden = root.hidden_unpacked(tokens)
            largest = _largest_logit(head, hidden)
            own = {volume: _reference_logits(model, tokens, volume, 1) for volume in (1.0, _LARGE_LOGIT / largest)}
        except _PROBE_FAILURES as error:
            raise WhetError(f"model.path: this architecture cannot be trained ({error!r})") from None
    _compare_logits(head, hidden, own, largest)


@torch.no_grad()
def require_finite_logits(model: nn.Module) -> None:
    """Refuse a model whose answers would mean nothing, before it is asked."""
    tokens = torch.arange(8, device=next(model.parameters()).device)
    with eval_mode(model), native_attention(model):
        _require_finite(model(input_ids=tokens[None], use_cache=False).logits.abs().max().item())


def _largest_logit(head: OutputHead, hidden: Tensor) -> float:
    largest = OutputHead(head.weight, scale=head.scale).logits(hidden).abs().max().item()
    _require_finite(largest)
    return largest


def _require_finite(largest: float) -> None:
    if not 0 < largest < math.inf:
        raise WhetError(
            "model.path: all logits of this model are zero, or some are not finite: its weights are broken, as after a "
            "run that diverged"
        )


def _compare_logits(head: OutputHead, hidden: Tensor, own: dict[float, Tensor], largest: float) -> None:
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


def _hidden_of_two_documents(root: LossModel, tokens: Tensor) -> Tensor:
    """Hidden states of a row whose halves are two documents."""
    half = len(tokens) // 2
    edges = (0, half, 2 * half)
    positions = torch.arange(half, device=tokens.device).repeat(2)
    cu_seqlens = torch.tensor(edges, device=tokens.device, dtype=torch.int32)
    return root.hidden(tokens, positions, cu_seqlens, half, edges)


def _reference_logits(model: nn.Module, tokens: Tensor, volume: float, documents: int = 2) -> Tensor:
    """What the model makes of each document alone, its hidden states multiplied by `volume` before its head."""

    def louder(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] * volume, *inputs[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(louder)  # type: ignore[operator]
    try:
        with native_attention(model):
            parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.chunk(documents)]
    finally:
        hook.remove()
    return torch.cat(parts).float()
