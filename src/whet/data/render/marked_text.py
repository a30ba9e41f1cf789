"""Text and conversations as turns between markers (data.markers), rendered to token ids and loss mask.

    text    <<<|user|>>>  Hi  <<<|user|>>>  <<<|assistant|>>>  Yes  <<<|assistant|>>>
    ids          7        …        7               8            …          8            EOD
    loss         0        0        0               0            1          1             1

The same marker opens and closes a turn. The one that opens an answer is part of the prompt and not supervised; the one
that closes it and the end of the document are, because the model must learn to stop. Text outside of turns is kept,
unsupervised. The text between two markers is encoded by itself; if it is only whitespace, it has no tokens. This is the
format of the GPT-NeoX fork used on LUMI.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from whet.core.errors import BadRecordError, WhetError
from whet.data.config import Marker, Markers
from whet.data.conversation import Conversation, MarkedText, Message, PlainText
from whet.data.render.renderer import Rendered
from whet.tokenizer.encoders import Encoder

MARKER_LOOK_ALIKE = "marker look-alike"
"""The ledger's note on text that resembles a marker: kept and counted."""
_MATCH_NOTHING = re.compile("(?!)")


class MarkedRenderer:
    """Renders with one tokenizer and one set of markers."""

    def __init__(self, tokenizer: Encoder, markers: Markers, train_on: str) -> None:
        self._encoder, self._markers, self._train_on = tokenizer, markers, train_on
        self.ids = resolve_marker_ids(tokenizer, markers)
        tokenizer.check_markers(list(self.ids.values()))
        self._reserved_ids = frozenset([*self.ids.values(), tokenizer.eod_id])
        known = {*markers_by_role(markers).values(), *(tokenizer.id_to_token(number) for number in self._reserved_ids)}
        self._look_alike = look_alike_pattern(sorted(known))

    def render_items(self, items: Sequence[Conversation | PlainText | MarkedText]) -> list[Rendered | BadRecordError]:
        """Ids and loss mask of each item, in order, or the error that refuses it. All texts are encoded together."""
        documents = iter(self._encoder.encode_batch([item.text for item in items if isinstance(item, PlainText)]))
        parsed = [item if isinstance(item, PlainText) else self._parse(item) for item in items]
        turns = itertools.chain.from_iterable(found for found in parsed if isinstance(found, list))
        spans = iter(self._encoder.encode_batch([turn.text for turn in turns if turn.text.strip()]))
        return [
            self._plain_document(next(documents))
            if isinstance(found, PlainText)
            else self._join(found, spans)
            if isinstance(found, list)
            else found
            for found in parsed
        ]

    def _plain_document(self, ids: list[int]) -> Rendered:
        ids = [*ids, self._encoder.eod_id]
        return Rendered(
            np.array(ids, dtype=np.int32), np.array([0] + [1] * (len(ids) - 1), dtype=np.uint8), supervises_end=True
        )

    def _parse(self, item: MarkedText | Conversation) -> list[MarkedTurn] | BadRecordError:
        try:
            turns = parse_marked_turns(item, self._markers)
        except BadRecordError as error:
            return error
        if self._train_on != "all" and not any(turn.role == "assistant" for turn in turns):
            return BadRecordError("no assistant turn", "no turn has the role 'assistant', so nothing is supervised")
        return turns

    def _join(self, turns: list[MarkedTurn], spans: Iterator[list[int]]) -> Rendered:
        """Join turns and their markers. `spans` yields the ids of each turn that is not only whitespace."""
        supervise_all = self._train_on == "all"
        last = max((i for i, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
        ids: list[int] = []
        loss: list[int] = []
        supervised, notes = False, []
        for i, turn in enumerate(turns):
            span = next(spans) if turn.text.strip() else []
            marker = [] if turn.role is None else [self.ids[turn.role]]
            answer = turn.role == "assistant" and (self._train_on != "last" or i == last)
            supervised = turn.train and (supervise_all or answer)
            ids += [*marker, *span, *marker]
            loss += [int(supervised and supervise_all) for _ in marker] + [int(supervised)] * (len(span) + len(marker))
            if self._look_alike.search(turn.text) or not self._reserved_ids.isdisjoint(span):
                notes.append(MARKER_LOOK_ALIKE)
        if self._markers.append_eod:
            ids.append(self._encoder.eod_id)
            loss.append(int(supervised))  # it ends a supervised turn
        loss[:1] = [0]  # the first token has no context to be predicted from
        supervises_end = not supervise_all or self._markers.append_eod or turns[-1].role is not None
        return Rendered(
            np.array(ids, dtype=np.int32), np.array(loss, dtype=np.uint8), supervises_end, tuple(dict.fromkeys(notes))
        )


def resolve_marker_ids(encoder: Encoder, markers: Markers) -> dict[str, int]:
    """The id of each marker, by role. Each must be unique and must not occur in encoded text."""
    ids = {
        "user": _resolve_marker_id(encoder, markers.user, "user"),
        "assistant": _resolve_marker_id(encoder, markers.assistant, "assistant"),
    }
    if markers.system is not None:
        ids["system"] = _resolve_marker_id(encoder, markers.system, "system")
    roles = {encoder.eod_id: "the end of document"}
    texts: dict[str, str] = {}
    for role, number in ids.items():
        text = markers_by_role(markers)[role]
        if number in roles or text in texts:
            both = roles.get(number) or texts[text]
            raise WhetError(f"data.markers.{role}: {text} (id {number}) is also {both}; each marker needs its own id")
        roles[number] = texts[text] = f"the marker of {role}"
    return ids


def _resolve_marker_id(encoder: Encoder, marker: Marker, role: str) -> int:
    if marker.id is None:
        found = encoder.token_to_id(marker.text)
        if found is None:
            raise WhetError(
                f"data.markers.{role}.text: {marker.text} is not a token of the tokenizer; give the id of a reserved "
                f"one: data.markers.{role}.id"
            )
        key, number = "text", found
    else:
        key, number = "id", marker.id
        if number >= encoder.vocab_size:
            raise WhetError(
                f"data.markers.{role}.id: {number} is beyond the tokenizer's {encoder.vocab_size} pieces (from 0)"
            )
    kind = encoder.token_kind(number)
    if kind is not None:
        raise WhetError(
            f"data.markers.{role}.{key}: id {number} is the {kind} piece {encoder.id_to_token(number)!r}, which "
            "encoded text may contain, so turns would be ambiguous. Choose the id of a control or unused piece"
        )
    return number


@dataclass(frozen=True, slots=True)
class MarkedTurn:
    """The text between two markers; without a role, text outside of turns."""

    role: str | None
    text: str
    train: bool = True
    """False: not supervised, whatever train_on is."""


def markers_by_role(markers: Markers) -> dict[str, str]:
    """The text of each marker, by role."""
    named = {"user": markers.user, "assistant": markers.assistant, "system": markers.system}
    return {role: marker.text for role, marker in named.items() if marker is not None}


def parse_marked_turns(item: MarkedText | Conversation, markers: Markers) -> list[MarkedTurn]:
    """The turns of a record."""
    turns = (
        _turns_from_text(item.text, markers) if isinstance(item, MarkedText) else _turns_from_messages(item, markers)
    )
    for turn in turns:
        try:
            turn.text.encode()
        except UnicodeEncodeError:
            raise BadRecordError("bad text", "the text contains a lone surrogate, which is not valid Unicode") from None
    return turns


def marked_to_conversation(item: MarkedText, markers: Markers) -> Conversation | None:
    """Marked text as the messages that render to it; None if there is text outside of its turns."""
    turns = _turns_from_text(item.text, markers)
    if any(turn.role is None for turn in turns):
        return None
    return Conversation(tuple(Message(str(turn.role), turn.text) for turn in turns), item.origin)


def _turns_from_text(text: str, markers: Markers) -> list[MarkedTurn]:
    texts = markers_by_role(markers)
    roles = {text: role for role, text in texts.items()}
    pattern = "|".join(re.escape(text) for text in sorted(roles, key=len, reverse=True))
    before, *rest = re.split(f"({pattern})", text)
    if not rest:
        raise BadRecordError(
            "no marker", f"no marker in the text; a turn is enclosed by two of {' or '.join(texts.values())}"
        )
    turns, opened = [MarkedTurn(None, before)], None
    for marker, span in zip(rest[::2], rest[1::2], strict=True):
        role = roles[marker]
        if opened is None:
            opened = role
            turns.append(MarkedTurn(role, span))
        elif opened == role:
            opened = None
            turns.append(MarkedTurn(None, span))
        else:
            raise BadRecordError("unclosed turn", f"{marker} before the turn of {texts[opened]} is closed")
    if opened is not None:
        raise BadRecordError("unclosed turn", f"the last turn of {texts[opened]} is not closed")
    return [turn for turn in turns if turn.role is not None or turn.text.strip()]


def _turns_from_messages(conversation: Conversation, markers: Markers) -> list[MarkedTurn]:
    if conversation.tools:
        raise BadRecordError("tools", "the record has tools, which markers cannot express; remove them")
    texts = markers_by_role(markers)
    turns: list[MarkedTurn] = []
    system: list[str] = []  # prepended to the next user turn
    for number, message in enumerate(conversation.messages, 1):
        role = _checked_role(message, number, texts)
        if role == "system" and "system" not in texts:
            system.append(message.content)
            continue
        if system and role != "user":
            raise BadRecordError(
                "system without user",
                f"message {number}: without its own marker, a system message is prepended to the next user turn, but "
                f"a turn of {role} follows. Give it a marker: data.markers.system",
            )
        turns.append(MarkedTurn(role, "\n\n".join([*system, message.content]), message.train is not False))
        system = []
    if system:
        raise BadRecordError(
            "system without user", "a system message at the end has no user turn after it to be prepended to"
        )
    return turns


def _checked_role(message: Message, number: int, texts: dict[str, str]) -> str:
    role = "system" if message.role == "developer" else message.role
    if role not in ("system", "user", "assistant") or message.tool_calls:
        raise BadRecordError("tools", f"message {number}: markers cannot express tool calls and results")
    if message.reasoning:
        raise BadRecordError("reasoning", f"message {number}: markers cannot express reasoning; remove it")
    if role == "assistant" and not message.content.strip():
        raise BadRecordError("empty turn", f"message {number} (role 'assistant') has no text to train on")
    for text in texts.values():
        if text in message.content:
            raise BadRecordError(
                "marker in a message", f"message {number} contains {text}, which would open or close a turn; reword it"
            )
    return role


def look_alike_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches what resembles one of `texts`: other case, spaces within, more or fewer punctuation characters.

    For <<<|user|>>>, it matches <|user|>, <<|User |>> and <user>, but not the word alone.
    """
    patterns = [_loose_pattern(text) for text in texts if any(char.isalnum() for char in text)]
    return re.compile("|".join(patterns), re.IGNORECASE) if patterns else _MATCH_NOTHING


def _loose_pattern(text: str) -> str:
    runs = [run for run in re.split(r"(\w+)|\s+", text) if run]
    words = [
        re.escape(run) if re.fullmatch(r"\w+", run) else rf"(?:[{re.escape(''.join(sorted(set(run))))}]\s*)+"
        for run in runs
    ]
    return r"\s*".join(words)
