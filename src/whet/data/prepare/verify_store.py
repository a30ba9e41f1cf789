"""Does the store hold what was written into it, and what transformers itself would feed the model?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from whet.data.config import DataConfig, Source
from whet.data.conversation import Conversation, MarkedText, PlainText, TokenizedDocument
from whet.data.prepare.store import Store
from whet.data.prepare.tokenize import ItemRenderer
from whet.data.read.sources import SourceReader, expected_records
from whet.data.render.renderer import Rendered, Renderer

_MAX_RERENDERED = 200
_MAX_HASHED = 200_000


@dataclass(slots=True)
class StoreComparison:
    """How many conversations were compared, and where those stand that differ in ids or mask."""

    compared: int = 0
    ids_differ: list[str] = field(default_factory=list)
    loss_differs: list[str] = field(default_factory=list)
    ready: int = 0
    """How many came as tokens, so that there is nothing to compare."""


def find_corrupted(store: Store) -> tuple[int, list[str]]:
    """How many conversations were looked at, spread over all of them, and where those stand whose ids or masks are no
    longer what they were when the store was made."""
    edges = store.conversations()
    count = len(edges) - 1
    some = np.unique(np.linspace(0, count - 1, min(count, _MAX_HASHED)).astype(np.int64))
    wrong = [c for c in some if not store.matches_hash(range(int(edges[c]), int(edges[c + 1])))]
    return len(some), [str(store.origin(int(edges[c]))) for c in wrong]


def compare_with_sources(
    store: Store, sources: Sequence[Source], rendering: ItemRenderer, config: DataConfig
) -> StoreComparison:
    """Compare some conversations of every source, spread over all of it, with what they are when rendered in full."""
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
                found.ready += 1
            elif isinstance(item, Conversation | PlainText | MarkedText) and len(documents) == 1:
                _compare_document(found, store, int(documents[0]), item, rendering, config)
    return found


def _compare_document(
    found: StoreComparison, store: Store, document: int, item: Conversation | PlainText | MarkedText, rendering: ItemRenderer,
    config: DataConfig,
) -> None:  # fmt: skip
    again = rendering.render_items([item])[0]
    limit, place = config.max_length, str(item.origin)
    if isinstance(again, Rendered) and len(again.ids) > limit and config.too_long == "split":
        return  # one piece is left of it, and not always its beginning
    found.compared += 1
    ids = store.ids(document).tolist()
    if (
        not isinstance(again, Rendered)
        or again.ids[:limit].tolist() != ids
        or not _matches_transformers(item, rendering, ids, limit)
    ):
        found.ids_differ.append(place)
    elif again.loss[:limit].astype(bool).tolist() != store.loss(document).tolist():
        found.loss_differs.append(place)


def _matches_transformers(
    item: Conversation | PlainText | MarkedText, rendering: ItemRenderer, ids: list[int], limit: int
) -> bool:
    """Whether transformers gives these ids; it knows conversations in a template, and nothing else."""
    if isinstance(item, Conversation) and isinstance(rendering, Renderer):
        return rendering.reference_ids(item)[:limit] == ids
    return True
