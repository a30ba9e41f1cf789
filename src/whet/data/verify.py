"""Does the store hold what transformers itself would feed the model? A sample is rendered again and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whet.data.config import DataConfig, Source
from whet.data.conversation import Conversation, Marked, Text
from whet.data.render import Rendered, Renderer
from whet.data.settle import Rendering
from whet.data.sources import Reader, expected
from whet.data.store import Store

_SAMPLE = 200


@dataclass(frozen=True, slots=True)
class Verified:
    """How many conversations were compared, and where those stand that differ in ids or mask."""

    compared: int
    ids_differ: list[str]
    loss_differs: list[str]


def verify(store: Store, sources: Sequence[Source], rendering: Rendering, config: DataConfig) -> Verified:
    """Compare some conversations of every source, spread over all of it, with what they are when rendered in full."""
    found = Verified(0, [], [])
    for source in sources:
        reader = Reader(source)
        every = max(1, expected(source) * len(sources) // _SAMPLE)
        for number, raw in enumerate(reader.records()):
            if number % every:
                continue
            item = reader.parse(raw)
            documents = store.find(item.origin)
            if not isinstance(item, Conversation | Text | Marked) or len(documents) != 1:
                continue  # dropped, or split into several
            found = _compare(found, store, int(documents[0]), item, rendering, config.max_length)
    return found


def _compare(
    found: Verified, store: Store, document: int, item: Conversation | Text | Marked, rendering: Rendering, limit: int
) -> Verified:
    again = rendering.render_items([item])[0]
    ids, loss = store.ids(document).tolist(), store.loss(document).tolist()
    same = isinstance(again, Rendered)
    if isinstance(item, Conversation) and isinstance(rendering, Renderer):
        same &= rendering.reference_ids(item)[:limit] == ids
    if isinstance(again, Rendered):
        same &= again.ids[:limit].tolist() == ids
        if same and again.loss[:limit].astype(bool).tolist() != loss:
            found.loss_differs.append(str(item.origin))
    if not same:
        found.ids_differ.append(str(item.origin))
    return Verified(found.compared + 1, found.ids_differ, found.loss_differs)
