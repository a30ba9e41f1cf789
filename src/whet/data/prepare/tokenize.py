"""Records → tokenized documents: render, apply the length policy (data.too_long), count each outcome in the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

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
from whet.data.prepare.chunks import Chunk
from whet.data.prepare.store import count_targets
from whet.data.render.chat_tokenizer import ItemRenderer
from whet.data.render.layout_finder import NO_SUPERVISED_TOKENS
from whet.data.render.marked_text import marked_to_conversation
from whet.data.render.renderer import Rendered
from whet.data.render.sentinels import TOO_LONG_TO_MASK

_BATCH_CONVERSATIONS = 64  # rendered and encoded together
_BATCH_CHARACTERS = 2_000_000  # bounds the memory of a batch

EXCHANGE_TOO_LONG = "an exchange of it too long"
_PIECE_DROPPED = "a piece of it left out: "
"""The ledger's notes on a conversation that was split with a loss."""
DROPPED_BY_POLICY = frozenset(("filter", "duplicate", "too long", NO_SUPERVISED_TOKENS, TOO_LONG_TO_MASK))
"""Reasons in the ledger other than a record that cannot be used, at which `data.on_bad: error` stops."""


class BadLineError(WhetError):
    """A record cannot be used, and data.on_bad is `error`."""


def tokenize_records(items: Iterable[ParsedRecord], chunk: Chunk, renderer: ItemRenderer, config: DataConfig) -> None:
    """Add the documents of `items` to a chunk, and what became of each item to its account."""
    for batch in _batches(items):
        chunk.account.read += len(batch)
        texts = [item for item in batch if isinstance(item, Conversation | PlainText | MarkedText)]
        rendered = iter(renderer.render_items(texts))
        for item in batch:
            if isinstance(item, FilteredRecord):
                chunk.drop(item.reason, item.origin, "the filter `where` excludes it")
            elif isinstance(item, BadRecord):
                _drop_or_raise(item.reason, item.explanation, item.origin, chunk, config)
            elif isinstance(item, TokenizedDocument) and int(item.ids.max(initial=0)) >= chunk.vocabulary_size:
                explanation = f"id {int(item.ids.max())} is not below the tokenizer's size of {chunk.vocabulary_size}"
                _drop_or_raise("unknown id", explanation, item.origin, chunk, config)
            elif isinstance(item, TokenizedDocument):
                whole = Rendered(item.ids, item.loss, supervises_end=bool(item.loss[-1:].any()))
                _add_within_max_length(item, whole, chunk, renderer, config)
            else:
                result = next(rendered)
                if isinstance(result, BadRecordError):
                    _drop_or_raise(result.reason, str(result), item.origin, chunk, config)
                else:
                    _add_within_max_length(item, result, chunk, renderer, config)


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
        has_remedy = "data.template" in explanation or "model.add_tokens" in explanation
        fix = "Or skip" if has_remedy else "Fix the line, or skip"
        raise BadLineError(f"{origin}: {explanation}. {fix} and count such lines: data.on_bad=skip")
    chunk.drop(reason, origin, explanation)


def _add_within_max_length(
    item: Conversation | PlainText | MarkedText | TokenizedDocument,
    whole: Rendered,
    chunk: Chunk,
    renderer: ItemRenderer,
    config: DataConfig,
) -> None:
    """Apply data.too_long, then add the documents that have targets."""
    account, origin, limit = chunk.account, item.origin, config.max_length
    documents = [whole]
    too_long, is_split = "", False
    if len(whole.ids) > limit:
        too_long = f"{len(whole.ids)} tokens, over data.max_length = {limit}"
        if config.too_long == "error":
            raise WhetError(f"{origin}: {too_long}. Raise it, or choose data.too_long=drop, truncate or split")
        if config.too_long == "truncate":
            chunk.truncate(origin, f"{too_long}; the last {len(whole.ids) - limit} are cut off")
            # a prefix as it is: no end of turn is added
            documents = [replace(whole, ids=whole.ids[:limit], loss=whole.loss[:limit], supervises_end=False)]
        elif config.too_long == "split":
            is_split = True
            if isinstance(item, MarkedText) and config.markers is not None:
                item = marked_to_conversation(item, config.markers) or item
            if isinstance(item, Conversation) and config.train_on == "last":
                documents = _last_answer(item, renderer, limit)
            elif isinstance(item, Conversation):
                documents = _split_conversation(item, renderer, limit)
            else:
                documents = split_windows(whole, limit)
        if config.too_long == "drop" or not documents:
            chunk.drop("too long", origin, too_long)
            return
    counted = [(document, count_targets(document)) for document in documents]
    kept = [(document, targets) for document, targets in counted if targets]
    if not kept:
        chunk.drop(NO_SUPERVISED_TOKENS, origin, "none of its tokens is supervised")
        return
    for document, targets in kept:
        account.keep(len(document.ids), targets, document.supervises_end)
    notes = [note for document, _ in kept for note in document.notes]
    if len(kept) < len(documents):
        notes.append(_PIECE_DROPPED + NO_SUPERVISED_TOKENS)
    for note in dict.fromkeys(notes):
        chunk.note(note, origin)
    account.kept += 1
    if is_split:
        pieces = ", ".join(str(len(document.ids)) for document, _ in kept)
        chunk.split(origin, f"{too_long}; kept as pieces of {pieces} tokens")
    chunk.add(kept, origin)


def split_windows(document: Rendered, limit: int) -> list[Rendered]:
    """Cut a document into contiguous windows of at most `limit` tokens."""
    total = len(document.ids)
    edges = [*range(0, total, limit), total]
    if edges[-1] - edges[-2] == 1 and limit > 2:  # a window of one token has no context to predict it from
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


Exchange = tuple[Message, ...]
"""One or more user turns and all that answers them: assistant turns, tool calls and results."""


def system_messages(conversation: Conversation) -> Exchange:
    """The system messages at the start, which every piece repeats."""
    return tuple(itertools.takewhile(lambda m: m.role in ("system", "developer"), conversation.messages))


def split_exchanges(conversation: Conversation) -> list[Exchange]:
    """The messages after the system messages, cut before each user turn that follows an answer."""
    found: list[list[Message]] = []
    for before, message in itertools.pairwise((None, *conversation.messages[len(system_messages(conversation)) :])):
        assert message is not None
        if before is None or (message.role == "user" and before.role != "user"):
            found.append([])
        found[-1].append(message)
    return [tuple(exchange) for exchange in found]


def join_exchanges(conversation: Conversation, exchanges: Sequence[Exchange]) -> Conversation:
    """Some exchanges as a conversation, with the system messages."""
    return replace(conversation, messages=(*system_messages(conversation), *itertools.chain(*exchanges)))


def _split_conversation(conversation: Conversation, renderer: ItemRenderer, limit: int) -> list[Rendered]:
    """Pieces of at most `limit` tokens: runs of exchanges, each rendered as a conversation.

    An exchange that is too long by itself is dropped, and so is a piece without supervised tokens; the other pieces
    carry a note. Lengths are those of supervised exchanges, since supervision changes the mask only.
    """
    exchanges = split_exchanges(conversation)
    supervised = [tuple(replace(message, train=None) for message in exchange) for exchange in exchanges]
    singles = renderer.render_items([join_exchanges(conversation, [exchange]) for exchange in supervised])
    lengths = [len(single.ids) if isinstance(single, Rendered) else limit + 1 for single in singles]
    notes = [_PIECE_DROPPED + single.reason for single in singles if not isinstance(single, Rendered)]
    notes += [EXCHANGE_TOO_LONG for single in singles if isinstance(single, Rendered) and len(single.ids) > limit]
    overhead = _repeated_tokens(conversation, supervised, singles, renderer)
    pieces: list[Rendered] = []
    start = 0
    while start < len(exchanges):
        if lengths[start] > limit:
            start += 1
            continue
        end, size = start + 1, lengths[start]
        while end < len(exchanges) and size + lengths[end] - overhead <= limit:
            size += lengths[end] - overhead
            end += 1
        piece: Rendered | BadRecordError = renderer.render_items([join_exchanges(conversation, exchanges[start:end])])[
            0
        ]
        while end > start + 1 and (not isinstance(piece, Rendered) or len(piece.ids) > limit):
            end -= 1  # the estimate was too low
            piece = renderer.render_items([join_exchanges(conversation, exchanges[start:end])])[0]
        if isinstance(piece, Rendered):
            pieces.append(piece)
        else:
            notes.append(_PIECE_DROPPED + piece.reason)
        start = end
    return [replace(piece, notes=(*piece.notes, *notes)) for piece in pieces]


def _last_answer(conversation: Conversation, renderer: ItemRenderer, limit: int) -> list[Rendered]:
    """The last answer of the conversation with as many exchanges before it as fit, for data.train_on=last: nothing is
    supervised in the rest. Empty if its own exchange is too long."""
    exchanges = split_exchanges(conversation)
    while not any(message.role == "assistant" for message in exchanges[-1]):
        exchanges.pop()
    longest: list[Rendered] = []
    low, high = 0, len(exchanges)
    while low < high:
        start = (low + high) // 2
        [piece] = renderer.render_items([join_exchanges(conversation, exchanges[start:])])
        if isinstance(piece, Rendered) and len(piece.ids) <= limit:
            longest, high = [piece], start
        else:
            low = start + 1
    return longest


def _repeated_tokens(
    conversation: Conversation,
    exchanges: Sequence[Exchange],
    singles: Sequence[Rendered | BadRecordError],
    renderer: ItemRenderer,
) -> int:
    """The tokens that every piece repeats, such as the system prompt: what two exchanges save together."""
    if len(exchanges) < 2:
        return 0
    one, other, pair = singles[0], singles[1], renderer.render_items([join_exchanges(conversation, exchanges[:2])])[0]
    if not (isinstance(one, Rendered) and isinstance(other, Rendered) and isinstance(pair, Rendered)):
        return 0
    return max(0, len(one.ids) + len(other.ids) - len(pair.ids))
