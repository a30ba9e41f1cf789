"""Records → documents: parsed, rendered, cut to length by the user's policy, and accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from whet.core.errors import WhetError
from whet.data.chunk import Chunk
from whet.data.config import DataConfig
from whet.data.conversation import BadLine, BadRecordError, Conversation, Item, LeftOut, Marked, Origin, Text, Tokens
from whet.data.dye import TOO_LONG_TO_MASK
from whet.data.render import NOTHING_TO_LEARN, Rendered
from whet.data.store import count_targets
from whet.data.too_long import Exchange, exchanges, join, windows
from whet.data.turns import conversation_of

_BATCH = 64  # conversations encoded at a time
_BATCH_CHARACTERS = 2_000_000  # and no more text than this, which bounds memory


class Rendering(Protocol):
    """Turns items into tokens with masks, a batch at a time; what cannot be rendered comes back as the reason."""

    def render_items(self, items: Sequence[Conversation | Text | Marked]) -> list[Rendered | BadRecordError]: ...


class BadLineError(WhetError):
    """A record cannot be used, and data.on_bad says that this stops the work."""


def settle(items: Iterable[Item], chunk: Chunk, rendering: Rendering, config: DataConfig) -> None:
    """Put the documents of `items` into a chunk; the ledger knows what became of each."""
    for batch in _batches(items):
        chunk.account.read += len(batch)
        texts = [item for item in batch if isinstance(item, Conversation | Text | Marked)]
        rendered = iter(rendering.render_items(texts))
        for item in batch:
            if isinstance(item, LeftOut):
                chunk.account.drop(item.reason, item.origin)
            elif isinstance(item, BadLine):
                _bad(item.reason, item.explanation, item.origin, chunk, config)
            elif isinstance(item, Tokens) and int(item.ids.max(initial=0)) >= chunk.vocabulary:
                told = f"it holds the id {int(item.ids.max())}, and the tokenizer has {chunk.vocabulary} tokens"
                _bad("unknown id", told, item.origin, chunk, config)
            elif isinstance(item, Tokens):
                whole = Rendered(item.ids, item.loss, ends=bool(item.loss[-1:].any()))
                _good(item, whole, chunk, rendering, config)
            else:
                result = next(rendered)
                if isinstance(result, BadRecordError):
                    _bad(result.reason, str(result), item.origin, chunk, config)
                else:
                    _good(item, result, chunk, rendering, config)


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        size += _characters(item)
        batch.append(item)
        if len(batch) == _BATCH or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _characters(item: Item) -> int:
    if isinstance(item, Conversation):
        return sum(len(message.content) for message in item.messages)
    return len(item.text) if isinstance(item, Text | Marked) else 0


def _bad(reason: str, explanation: str, origin: Origin, chunk: Chunk, config: DataConfig) -> None:
    by_policy = reason == NOTHING_TO_LEARN or (reason == TOO_LONG_TO_MASK and config.too_long != "error")
    if config.on_bad == "error" and not by_policy:
        raise BadLineError(
            f"{origin}: {explanation}. Mend the line, or leave such lines out and count them: data.on_bad=skip"
        )
    chunk.account.drop(reason, origin)


def _good(
    item: Conversation | Text | Marked | Tokens, whole: Rendered, chunk: Chunk, rendering: Rendering, config: DataConfig
) -> None:
    account, origin, n = chunk.account, item.origin, config.max_length
    documents = [whole]
    is_split = False
    if len(whole.ids) > n:
        if config.too_long == "error":
            raise WhetError(
                f"{origin}: {len(whole.ids)} tokens, over data.max_length = {n}. Raise it, or choose "
                "data.too_long=drop, truncate or split"
            )
        if config.too_long == "truncate":
            account.truncate(origin)  # a prefix as it is: no invented end of turn
            documents = [replace(whole, ids=whole.ids[:n], loss=whole.loss[:n], ends=False)]
        elif config.too_long == "split":
            is_split = True
            documents = _split(_in_turns(item, config), whole, rendering, n)
        if config.too_long == "drop" or not documents:
            account.drop("too long", origin)
            return
    counted = [(document, count_targets(document)) for document in documents]
    kept = [(document, targets) for document, targets in counted if targets]
    if not kept:
        account.drop(NOTHING_TO_LEARN, origin)
        return
    for document, targets in kept:
        account.keep(len(document.ids), targets, document.ends)
    notes = [note for document, _ in kept for note in document.notes]
    if len(kept) < len(documents):
        notes.append(_LEFT_OUT + NOTHING_TO_LEARN)
    for what in dict.fromkeys(notes):
        account.note(what, origin)
    account.kept += 1
    account.split += is_split
    chunk.add(kept, origin)


LOST_EXCHANGE = "an exchange of it too long"
"""What the ledger notes of a conversation that was split with a loss."""
_LEFT_OUT = "a piece of it left out: "


def _in_turns(item: Conversation | Text | Marked | Tokens, config: DataConfig) -> Conversation | Text | Marked | Tokens:
    """Marked text can be split between turns, if all of it stands in turns."""
    if isinstance(item, Marked) and config.markers is not None:
        return conversation_of(item, config.markers) or item
    return item


def _split(
    item: Conversation | Text | Marked | Tokens, whole: Rendered, rendering: Rendering, limit: int
) -> list[Rendered]:
    """Pieces that fit: of a conversation runs of exchanges, each rendered as a conversation of its own.

    An exchange that is too long by itself is lost, and so is a piece in which nothing is to be learned; the others note
    it. Lengths are those of exchanges that are learned: whether they are changes nothing but the mask.
    """
    if not isinstance(item, Conversation):
        return windows(whole, limit)
    parts = exchanges(item)
    learned = [tuple(replace(message, learn=None) for message in part) for part in parts]
    singles = rendering.render_items([join(item, [part]) for part in learned])
    lengths = [len(single.ids) if isinstance(single, Rendered) else limit + 1 for single in singles]
    notes = [_LEFT_OUT + single.reason for single in singles if not isinstance(single, Rendered)]
    notes += [LOST_EXCHANGE for single in singles if isinstance(single, Rendered) and len(single.ids) > limit]
    overhead = _overhead(item, learned, singles, rendering)
    pieces: list[Rendered] = []
    start = 0
    while start < len(parts):
        if lengths[start] > limit:
            start += 1
            continue
        end, size = start + 1, lengths[start]
        while end < len(parts) and size + lengths[end] - overhead <= limit:
            size += lengths[end] - overhead
            end += 1
        piece: Rendered | BadRecordError = rendering.render_items([join(item, parts[start:end])])[0]
        while end > start + 1 and (not isinstance(piece, Rendered) or len(piece.ids) > limit):
            end -= 1  # the estimate was too hopeful
            piece = rendering.render_items([join(item, parts[start:end])])[0]
        if isinstance(piece, Rendered):
            pieces.append(piece)
        else:
            notes.append(_LEFT_OUT + piece.reason)
        start = end
    return [replace(piece, notes=(*piece.notes, *notes)) for piece in pieces]


def _overhead(
    item: Conversation, parts: Sequence[Exchange], singles: Sequence[Rendered | BadRecordError], rendering: Rendering
) -> int:
    """The tokens that every piece repeats, such as the system prompt: what two exchanges need less together."""
    if len(parts) < 2:
        return 0
    one, other, pair = singles[0], singles[1], rendering.render_items([join(item, parts[:2])])[0]
    if not (isinstance(one, Rendered) and isinstance(other, Rendered) and isinstance(pair, Rendered)):
        return 0
    return max(0, len(one.ids) + len(other.ids) - len(pair.ids))
