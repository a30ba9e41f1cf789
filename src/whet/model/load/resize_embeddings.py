"""Embedding and head rows for added tokens.

A new row is the mean of the rows of the tokens that the text was split into before, so that the model starts with a
token that means about the same. Random rows are far from all others and disturb the model at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def add_token_rows_(model: nn.Module, config: ModelConfig) -> None:
    """Add rows for `config.add_tokens` to embedding and head. Existing padding rows are used first."""
    if not config.add_tokens:
        return
    before = load_tokenizer(config.model_copy(update={"add_tokens": []}))
    after, known = load_tokenizer(config), before.get_vocab()
    new = [token for token in config.add_tokens if token not in known]
    if not new:
        return
    numbers = lookup_token_ids(after, new)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if len(after) > embedding.num_embeddings:
        model.resize_token_embeddings(len(after), mean_resizing=False)  # type: ignore[operator]
    pieces = [_split_before(before, token) for token in new]
    seen: list[Tensor] = []
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        weight = None if module is None else module.weight
        if weight is None or any(weight is other for other in seen):  # tied: the same rows
            continue
        seen.append(weight)
        _fill_rows(weight, numbers, pieces, len(before))
        if getattr(module, "bias", None) is not None and len(module.bias) == len(weight):
            _fill_rows(module.bias, numbers, pieces, len(before))


@torch.no_grad()
def resize_embeddings_(model: nn.Module, tokens: int) -> None:
    """Resize embedding and head to `tokens` rows for an adapter that brings the new ones. Without the adapter they are
    the mean of all rows, which is never the argmax, so generation does not change."""
    before = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if tokens <= before:
        return
    model.resize_token_embeddings(tokens, mean_resizing=False)  # type: ignore[operator]
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        for weight in () if module is None else module.parameters(recurse=False):
            exact = torch.promote_types(weight.dtype, torch.float32)
            weight[before:] = weight[:before].to(exact).mean(dim=0).to(weight.dtype)


def lookup_token_ids(
    tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str], key: str = "model.add_tokens"
) -> list[int]:
    """The ids of tokens, each of which must be in the vocabulary."""
    known = tokenizer.get_vocab()
    unknown = [token for token in tokens if token not in known]
    if unknown:
        raise WhetError(f"{key}: {unknown[0]!r} is not a token of this tokenizer. Add it with model.add_tokens")
    return [known[token] for token in tokens]


def trainable_token_ids(config: ModelConfig, known: Sequence[str]) -> list[int]:
    """The ids whose rows an adapter trains: added tokens, and the `known` ones of adapter.tokens."""
    if not config.add_tokens and not known:
        return []
    tokenizer = load_tokenizer(config)
    numbers = lookup_token_ids(tokenizer, config.add_tokens) + lookup_token_ids(tokenizer, known, "adapter.tokens")
    return sorted(set(numbers))


def _split_before(tokenizer: PreTrainedTokenizerFast, token: str) -> list[int]:
    """The ids that the text was split into before, without the unknown token."""
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False)
    return [number for number in ids if number != tokenizer.unk_token_id]


@torch.no_grad()
def _fill_rows(weight: Tensor, numbers: Sequence[int], pieces: Sequence[Sequence[int]], known: int) -> None:
    """Set rows of a matrix or elements of a bias to means, computed in at least fp32."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    overall = None
    rows = []
    for ids in pieces:
        if ids:
            rows.append(weight[list(ids)].to(exact).mean(dim=0))
        else:
            overall = weight[:known].to(exact).mean(dim=0) if overall is None else overall
            rows.append(overall)
    weight[list(numbers)] = torch.stack(rows).to(weight.dtype)
