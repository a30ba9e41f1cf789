"""Verify a store: against its hashes, and against a fresh rendering of its sources by whet and by transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from whet.core.errors import BadRecordError
from whet.data.config import DataConfig, Source
from whet.data.conversation import Conversation, MarkedText, PlainText, TokenizedDocument
from whet.data.prepare.store import Store
from whet.data.read.sources import SourceReader, expected_records
from whet.data.render.chat_tokenizer import ItemRenderer
from whet.data.render.renderer import Rendered, Renderer

_MAX_RERENDERED = 200
_MAX_HASHED = 200_000
_SHOWN_CHARACTERS = 24  # of a prompt


class StraddlingTokens(NamedTuple):
    """The end of a prompt that has other tokens before its answer than by itself."""

    prompt: str
    """The last characters of the prompt."""
    alone: list[str]
    """The tokens of its end by itself, as text."""
    with_answer: list[str]
    """Those in the conversation; the last one may hold text of both."""
    is_in_prompts: bool
    """whet prompts with the ids before the answer's first supervised token."""


@dataclass(slots=True)
class StoreComparison:
    """How many conversations were compared, and the origins of those that differ."""

    compared: int = 0
    ids_differ: list[str] = field(default_factory=list)
    mask_differs: list[str] = field(default_factory=list)
    pretokenized: int = 0
    """How many were tokens already, so that there is nothing to compare."""
    answers: int = 0
    straddling: list[tuple[str, StraddlingTokens]] = field(default_factory=list)
    """Those of the answers that share a token with their prompt, with their origins."""
    blank: list[str] = field(default_factory=list)
    """Sources with empty lines or rows, and how many."""


def find_corrupted(store: Store) -> tuple[int, list[str]]:
    """(number of conversations hashed, origins of those that no longer match); a sample spread over the store."""
    offsets = store.conversation_offsets()
    count = len(offsets) - 1
    sample = np.unique(np.linspace(0, count - 1, min(count, _MAX_HASHED)).astype(np.int64))
    wrong = [c for c in sample if not store.matches_hash(range(int(offsets[c]), int(offsets[c + 1])))]
    return len(sample), [str(store.origin(int(offsets[c]))) for c in wrong]


def compare_with_sources(
    store: Store, sources: Sequence[Source], renderer: ItemRenderer, config: DataConfig
) -> StoreComparison:
    """Render a sample of every source in full and compare it with the store."""
    found = StoreComparison()
    for source in sources:
        reader = SourceReader(source)
        every = max(1, expected_records(source) * len(sources) // _MAX_RERENDERED)
        for number, raw in enumerate(reader.records()):
            if number % every:
                continue
            item = reader.parse(raw)
            documents = store.find(item.origin)
            if isinstance(item, TokenizedDocument):
                found.pretokenized += 1
            elif isinstance(item, Conversation | PlainText | MarkedText) and len(documents) == 1:
                _compare_document(found, store, int(documents[0]), item, renderer, config)
        if blank := reader.describe_blank():
            found.blank.append(f"{source.path}: {blank}")
    return found


def _compare_document(
    found: StoreComparison,
    store: Store,
    document: int,
    item: Conversation | PlainText | MarkedText,
    renderer: ItemRenderer,
    config: DataConfig,
) -> None:
    again = renderer.render_items([item])[0]
    limit, origin = config.max_length, str(item.origin)
    if isinstance(again, Rendered) and len(again.ids) > limit and config.too_long == "split":
        return  # one document is left of it, not always the first
    found.compared += 1
    ids = store.ids(document).tolist()
    if (
        not isinstance(again, Rendered)
        or again.ids[:limit].tolist() != ids
        or not _matches_transformers(item, renderer, ids, limit)
    ):
        found.ids_differ.append(origin)
    elif again.loss[:limit].astype(bool).tolist() != store.loss(document).tolist():
        found.mask_differs.append(origin)
    elif isinstance(item, Conversation) and isinstance(renderer, Renderer):
        found.answers += sum(message.role == "assistant" for message in item.messages)
        found.straddling += [(origin, tokens) for tokens in find_straddling_tokens(renderer, item)]


def _matches_transformers(
    item: Conversation | PlainText | MarkedText, renderer: ItemRenderer, ids: list[int], limit: int
) -> bool:
    """Whether transformers gives the same ids. It renders conversations with a template only: others pass."""
    if isinstance(item, Conversation) and isinstance(renderer, Renderer):
        return renderer.text.reference_ids(item)[:limit] == ids
    return True


# Answers that share a token with their prompt, so that engines which encode the prompt by itself give other ids.


def find_straddling_tokens(renderer: Renderer, conversation: Conversation) -> Iterator[StraddlingTokens]:
    """One for each answer whose prompt is encoded by itself to other ids than in the conversation."""
    encode = renderer.tokenizer.backend_tokenizer.encode
    conversation, text = renderer.text.apply_with_arguments(conversation)
    whole = encode(text, add_special_tokens=False)
    for turn, message in enumerate(conversation.messages):
        if turn == 0 or message.role != "assistant":
            continue
        try:
            prompt = renderer.text.apply(conversation.messages[:turn], conversation.tools, prompt=True)
        except BadRecordError:  # no prompt ends here
            continue
        alone = encode(prompt, add_special_tokens=False)
        if whole.ids[: len(alone)] == alone.ids or not text.startswith(prompt):
            continue
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone.ids, whole.ids, strict=False)))
        own = renderer.encode_prompt(prompt)
        with_answer = _token_texts(text, whole.offsets, same, len(prompt))
        shared = text[len(prompt) : whole.offsets[same + len(with_answer) - 1][1]]
        yield StraddlingTokens(
            prompt.rpartition("\n")[2][-_SHOWN_CHARACTERS:] or prompt[-_SHOWN_CHARACTERS:],
            _token_texts(prompt, alone.offsets, same, len(prompt)),
            with_answer,
            whole.ids[: len(own)] == own and (not shared or bool(shared.strip())),
        )


def _token_texts(text: str, offsets: Sequence[tuple[int, int]], first: int, position: int) -> list[str]:
    """The tokens from number `first` to the one that reaches `position`, as text."""
    start = max((end for _, end in offsets[:first]), default=0)
    texts = []
    for _, end in offsets[first:]:
        if start >= position:
            break
        texts.append(text[start:end])
        start = end
    return texts
