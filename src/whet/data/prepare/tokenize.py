"""Records → tokenized documents: render, apply the length policy, count each outcome in the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from whet.core.errors import BadRecordError, WhetError
from whet.data.config import DataConfig
from whet.data.conversation import (
    BadRecord,
    Conversation,
    FilteredRecord,
    MarkedText,
    Message,
    Origin,
    ParsedRecord,
    PlainText,
    TokenizedDocument,
)
from whet.data.prepare.chunk import Chunk
from whet.data.prepare.store import count_targets
from whet.data.render.marked_text import marked_to_conversation
from whet.data.render.renderer import NO_SUPERVISED_TOKENS, Rendered
from whet.data.render.sentinels import TOO_LONG_TO_MASK

# Splitting what is too long: conversations between exchanges, plain text into windows.

Exchange = tuple[Message, ...]
"""A question and all that answers it: user turns, then assistant turns with their tools' results."""


def system_messages(conversation: Conversation) -> Exchange:
    """The system messages at the start, which every piece repeats."""
    return tuple(itertools.takewhile(lambda m: m.role in ("system", "developer"), conversation.messages))


def split_exchanges(conversation: Conversation) -> list[Exchange]:
    """The messages after the system's, cut before each user turn that follows an answer."""
    found: list[list[Message]] = []
    for before, message in itertools.pairwise((None, *conversation.messages[len(system_messages(conversation)) :])):
        assert message is not None
        if before is None or (message.role == "user" and before.role != "user"):
            found.append([])
        found[-1].append(message)
    return [tuple(part) for part in found]


def join_exchanges(conversation: Conversation, parts: Sequence[Exchange]) -> Conversation:
    """A conversation of its own from some exchanges."""
    return replace(conversation, messages=(*system_messages(conversation), *itertools.chain(*parts)))


def split_windows(document: Rendered, limit: int) -> list[Rendered]:
    """Contiguous pieces of at most `limit` tokens; together they are the document, token by token."""
    total = len(document.ids)
    edges = [*range(0, total, limit), total]
    if edges[-1] - edges[-2] == 1 and limit > 2:  # a window of one token has nothing to learn it from
        edges[-2] -= 1
    return [
        replace(
            document,
            ids=document.ids[a:b],
            loss=document.loss[a:b],
            supervises_end=document.supervises_end and b == total,
        )
        for a, b in itertools.pairwise(edges)
    ]


# Records → documents: parsed, rendered, cut to length by the user's policy, and accounted for.

_BATCH_CONVERSATIONS = 64  # conversations encoded at a time
_BATCH_CHARACTERS = 2_000_000  # and no more text than this, which bounds memory


class ItemRenderer(Protocol):
    """Turns items into tokens with masks, a batch at a time; what cannot be rendered comes back as the reason."""

    def render_items(
        self, items: Sequence[Conversation | PlainText | MarkedText]
    ) -> list[Rendered | BadRecordError]: ...


class BadLineError(WhetError):
    """A record cannot be used, and data.on_bad says that this stops the work."""


def tokenize_records(items: Iterable[ParsedRecord], chunk: Chunk, rendering: ItemRenderer, config: DataConfig) -> None:
    """Put the documents of `items` into a chunk; the ledger knows what became of each."""
    for batch in _batches(items):
        chunk.account.read += len(batch)
        texts = [item for item in batch if isinstance(item, Conversation | PlainText | MarkedText)]
        rendered = iter(rendering.render_items(texts))
        for item in batch:
            if isinstance(item, FilteredRecord):
                chunk.account.drop(item.reason, item.origin)
            elif isinstance(item, BadRecord):
                _drop_or_raise(item.reason, item.explanation, item.origin, chunk, config)
            elif isinstance(item, TokenizedDocument) and int(item.ids.max(initial=0)) >= chunk.vocabulary:
                told = f"it holds the id {int(item.ids.max())}, and the tokenizer has {chunk.vocabulary} tokens"
                _drop_or_raise("unknown id", told, item.origin, chunk, config)
            elif isinstance(item, TokenizedDocument):
                whole = Rendered(item.ids, item.loss, supervises_end=bool(item.loss[-1:].any()))
                _add_within_max_length(item, whole, chunk, rendering, config)
            else:
                result = next(rendered)
                if isinstance(result, BadRecordError):
                    _drop_or_raise(result.reason, str(result), item.origin, chunk, config)
                else:
                    _add_within_max_length(item, result, chunk, rendering, config)


def _batches(items: Iterable[ParsedRecord]) -> Iterator[list[ParsedRecord]]:
    batch: list[ParsedRecord] = []
    size = 0
    for item in items:
        size += _text_length(item)
        batch.append(item)
        if len(batch) == _BATCH_CONVERSATIONS or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _text_length(item: ParsedRecord) -> int:
    if isinstance(item, Conversation):
        return sum(len(message.content) for message in item.messages)
    return len(item.text) if isinstance(item, PlainText | MarkedText) else 0


def _drop_or_raise(reason: str, explanation: str, origin: Origin, chunk: Chunk, config: DataConfig) -> None:
    by_policy = reason == NO_SUPERVISED_TOKENS or (reason == TOO_LONG_TO_MASK and config.too_long != "error")
    if config.on_bad == "error" and not by_policy:
        raise BadLineError(
            f"{origin}: {explanation}. Mend the line, or leave such lines out and count them: data.on_bad=skip"
        )
    chunk.account.drop(reason, origin)


def _add_within_max_length(
    item: Conversation | PlainText | MarkedText | TokenizedDocument,
    whole: Rendered,
    chunk: Chunk,
    rendering: ItemRenderer,
    config: DataConfig,
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
            documents = [replace(whole, ids=whole.ids[:n], loss=whole.loss[:n], supervises_end=False)]
        elif config.too_long == "split":
            is_split = True
            documents = _split_to_max_length(_marked_to_conversation(item, config), whole, rendering, n)
        if config.too_long == "drop" or not documents:
            account.drop("too long", origin)
            return
    counted = [(document, count_targets(document)) for document in documents]
    kept = [(document, targets) for document, targets in counted if targets]
    if not kept:
        account.drop(NO_SUPERVISED_TOKENS, origin)
        return
    for document, targets in kept:
        account.keep(len(document.ids), targets, document.supervises_end)
    notes = [note for document, _ in kept for note in document.notes]
    if len(kept) < len(documents):
        notes.append(_PIECE_DROPPED + NO_SUPERVISED_TOKENS)
    for what in dict.fromkeys(notes):
        account.note(what, origin)
    account.kept += 1
    account.split += is_split
    chunk.add(kept, origin)


EXCHANGE_TOO_LONG = "an exchange of it too long"
"""What the ledger notes of a conversation that was split with a loss."""
_PIECE_DROPPED = "a piece of it left out: "


def _marked_to_conversation(
    item: Conversation | PlainText | MarkedText | TokenizedDocument, config: DataConfig
) -> Conversation | PlainText | MarkedText | TokenizedDocument:
    """Marked text can be split between turns, if all of it stands in turns."""
    if isinstance(item, MarkedText) and config.markers is not None:
        return marked_to_conversation(item, config.markers) or item
    return item


def _split_to_max_length(
    item: Conversation | PlainText | MarkedText | TokenizedDocument,
    whole: Rendered,
    rendering: ItemRenderer,
    limit: int,
) -> list[Rendered]:
    """Pieces that fit: of a conversation runs of exchanges, each rendered as a conversation of its own.

    An exchange that is too long by itself is lost, and so is a piece in which nothing is to be learned; the others note
    it. Lengths are those of exchanges that are learned: whether they are changes nothing but the mask.
    """
    if not isinstance(item, Conversation):
        return split_windows(whole, limit)
    parts = split_exchanges(item)
    learned = [tuple(replace(message, train=None) for message in part) for part in parts]
    singles = rendering.render_items([join_exchanges(item, [part]) for part in learned])
    lengths = [len(single.ids) if isinstance(single, Rendered) else limit + 1 for single in singles]
    notes = [_PIECE_DROPPED + single.reason for single in singles if not isinstance(single, Rendered)]
    notes += [EXCHANGE_TOO_LONG for single in singles if isinstance(single, Rendered) and len(single.ids) > limit]
    overhead = _repeated_tokens(item, learned, singles, rendering)
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
        piece: Rendered | BadRecordError = rendering.render_items([join_exchanges(item, parts[start:end])])[0]
        while end > start + 1 and (not isinstance(piece, Rendered) or len(piece.ids) > limit):
            end -= 1  # the estimate was too hopeful
            piece = rendering.render_items([join_exchanges(item, parts[start:end])])[0]
        if isinstance(piece, Rendered):
            pieces.append(piece)
        else:
            notes.append(_PIECE_DROPPED + piece.reason)
        start = end
    return [replace(piece, notes=(*piece.notes, *notes)) for piece in pieces]


def _repeated_tokens(
    item: Conversation, parts: Sequence[Exchange], singles: Sequence[Rendered | BadRecordError], rendering: ItemRenderer
) -> int:
    """The tokens that every piece repeats, such as the system prompt: what two exchanges need less together."""
    if len(parts) < 2:
        return 0
    one, other, pair = singles[0], singles[1], rendering.render_items([join_exchanges(item, parts[:2])])[0]
    if not (isinstance(one, Rendered) and isinstance(other, Rendered) and isinstance(pair, Rendered)):
        return 0
    return max(0, len(one.ids) + len(other.ids) - len(pair.ids))
