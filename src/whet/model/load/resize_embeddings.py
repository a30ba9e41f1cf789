"""Embedding and head rows for added tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer

# Tokens that a model did not know: in the tokenizer, in the embedding and in the head.
#
# A new row is the mean of the rows of the pieces that the text was before, so that the model begins with a token that
# means about what it read until now. Random rows are far from all others, and a model falls silent over them at first.

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def add_token_rows_(model: nn.Module, config: ModelConfig) -> None:
    """Give the model rows for `config.add_tokens`. Rows that are there already, as padding, are used first."""
    if not config.add_tokens:
        return
    before = load_tokenizer(config.model_copy(update={"add_tokens": []}))
    after = load_tokenizer(config)
    numbers = lookup_token_ids(after, config.add_tokens)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if len(after) > embedding.num_embeddings:
        model.resize_token_embeddings(len(after), mean_resizing=False)  # type: ignore[operator]
    pieces = [_split_before(before, token) for token in config.add_tokens]
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
    """Rows for so many tokens, of which an adapter brings its own. Without it they are the mean of all others, which is
    never the likeliest: the model says what it said before."""
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
    """The ids of tokens, each of which must be one."""
    known = tokenizer.get_vocab()
    unknown = [token for token in tokens if token not in known]
    if unknown:
        raise WhetError(f"{key}: {unknown[0]!r} is no token of this tokenizer. Add it with model.add_tokens")
    return [known[token] for token in tokens]


def trainable_token_ids(config: ModelConfig, known: Sequence[str]) -> list[int]:
    """The ids of the rows that an adapter trains: of new tokens, and of `known` ones that it names."""
    if not config.add_tokens and not known:
        return []
    tokenizer = load_tokenizer(config)
    numbers = lookup_token_ids(tokenizer, config.add_tokens) + lookup_token_ids(tokenizer, known, "adapter.tokens")
    return sorted(set(numbers))


def _split_before(tokenizer: PreTrainedTokenizerFast, token: str) -> list[int]:
    """What the text was before; none if that was the unknown token."""
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False)
    return [number for number in ids if number != tokenizer.unk_token_id]


@torch.no_grad()
def _fill_rows(weight: Tensor, numbers: Sequence[int], pieces: Sequence[Sequence[int]], known: int) -> None:
    """Rows of a matrix, or single numbers of a bias. Means are taken in fp32 at least."""
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
