"""Verify a store: against its hashes, and against a fresh rendering of its sources by whet and by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from whet.data.config import DataConfig, Source
from whet.data.conversation import Conversation, MarkedText, PlainText, TokenizedDocument
from whet.data.prepare.store import Store
from whet.data.read.sources import SourceReader, expected_records
from whet.data.render.chat_tokenizer import ItemRenderer
from whet.data.render.renderer import Rendered, Renderer

_MAX_RERENDERED = 200
_MAX_HASHED = 200_000


@dataclass(slots=True)
class StoreComparison:
    """How many conversations were compared, and the origins of those that differ."""

    compared: int = 0
    ids_differ: list[str] = field(default_factory=list)
    mask_differs: list[str] = field(default_factory=list)
    pretokenized: int = 0
    """How many were tokens already, so that there is nothing to compare."""


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


def _matches_transformers(
    item: Conversation | PlainText | MarkedText, renderer: ItemRenderer, ids: list[int], limit: int
) -> bool:
    """Whether transformers gives the same ids. It renders conversations with a template only: others pass."""
    if isinstance(item, Conversation) and isinstance(renderer, Renderer):
        return renderer.reference_ids(item)[:limit] == ids
    return True
