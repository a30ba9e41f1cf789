"""Text and conversations as turns between markers (data.markers), rendered to token ids and loss mask."""

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

# Turns between markers → token ids and loss mask, together.
#
# text    <<<|user|>>>  Hi  <<<|user|>>>  <<<|assistant|>>>  Yes  <<<|assistant|>>>
# ids          7        …        7               8            …          8            EOD
# loss         0        0        0               0            1          1             1
#
# The opening marker of an answer is given, so it is not learned; the closing one and the end of the document are: the
# model must learn to stop. Spans are encoded one by one, and those of whitespace alone have no tokens, as on LUMI.


class MarkedRenderer:
    """Renders with one tokenizer and its markers."""

    def __init__(self, tokenizer: Encoder, markers: Markers, train_on: str) -> None:
        self._encoder, self._markers, self._train_on = tokenizer, markers, train_on
        self.ids = resolve_marker_ids(tokenizer, markers)
        tokenizer.check_markers(list(self.ids.values()))
        self._controls = frozenset([*self.ids.values(), tokenizer.eod_id])
        known = {*markers_by_role(markers).values(), *(tokenizer.id_to_token(number) for number in self._controls)}
        self._look_alike = look_alike_pattern(sorted(known))

    def render_items(self, items: Sequence[Conversation | PlainText | MarkedText]) -> list[Rendered | BadRecordError]:
        """Each item with its tokens or its reason, in order; the spans of all are encoded together."""
        texts = [item.text for item in items if isinstance(item, PlainText)]
        documents = (self._plain(ids) for ids in self._encoder.encode_batch(texts))
        turns = iter(self.render([item for item in items if not isinstance(item, PlainText)]))
        return [next(documents) if isinstance(item, PlainText) else next(turns) for item in items]

    def _plain(self, ids: list[int]) -> Rendered:
        ids = [*ids, self._encoder.eod_id]
        return Rendered(
            np.array(ids, dtype=np.int32), np.array([0] + [1] * (len(ids) - 1), dtype=np.uint8), supervises_end=True
        )

    def render(self, batch: Sequence[MarkedText | Conversation]) -> list[Rendered | BadRecordError]:
        """Each record with its tokens or its reason, in order; the spans of all are encoded together."""
        parsed = [self._parse(item) for item in batch]
        turns = itertools.chain.from_iterable(found for found in parsed if isinstance(found, list))
        spans = iter(self._encoder.encode_batch([turn.text for turn in turns if turn.text.strip()]))
        return [self._join(found, spans) if isinstance(found, list) else found for found in parsed]

    def _parse(self, item: MarkedText | Conversation) -> list[MarkedTurn] | BadRecordError:
        try:
            turns = parse_marked_turns(item, self._markers)
        except BadRecordError as error:
            return error
        if self._train_on != "all" and not any(turn.role == "assistant" for turn in turns):
            return BadRecordError("no assistant turn", "no turn is the assistant's, so nothing can be learned")
        return turns

    def _join(self, turns: list[MarkedTurn], spans: Iterator[list[int]]) -> Rendered:
        """The spans with their markers around them. `spans` gives the ids of each that is not whitespace."""
        everything = self._train_on == "all"
        last = max((i for i, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
        ids: list[int] = []
        loss: list[int] = []
        learned, notes = False, []
        for i, turn in enumerate(turns):
            span = next(spans) if turn.text.strip() else []
            marker = [] if turn.role is None else [self.ids[turn.role]]
            answer = turn.role == "assistant" and (self._train_on != "last" or i == last)
            learned = turn.learn and (everything or answer)
            ids += [*marker, *span, *marker]
            loss += [int(learned and everything) for _ in marker] + [int(learned)] * (len(span) + len(marker))
            if self._look_alike.search(turn.text) or not self._controls.isdisjoint(span):
                notes.append(MARKER_LOOK_ALIKE)
        if self._markers.append_eod:
            ids.append(self._encoder.eod_id)
            loss.append(int(learned))  # after a turn that is learned: an answer ends here, and nothing follows it
        loss[:1] = [0]  # nothing comes before it, so it is no target
        ends = not everything or self._markers.append_eod or turns[-1].role is not None
        return Rendered(
            np.array(ids, dtype=np.int32), np.array(loss, dtype=np.uint8), ends, tuple(dict.fromkeys(notes))
        )


def resolve_marker_ids(encoder: Encoder, markers: Markers) -> dict[str, int]:
    """The id of each marker, by role; refused where it could be anything else."""
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
            raise WhetError(f"data.markers.{role}: {text} (id {number}) is {both} already; they must differ")
        roles[number] = texts[text] = f"the marker of {role}"
    return ids


def _resolve_marker_id(encoder: Encoder, marker: Marker, role: str) -> int:
    if marker.id is None:
        found = encoder.token_to_id(marker.text)
        if found is None:
            raise WhetError(
                f"data.markers.{role}.text: the tokenizer does not know {marker.text} as one piece; give the id of a "
                f"reserved piece: data.markers.{role}.id"
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
            f"data.markers.{role}.{key}: id {number} is the {kind} piece {encoder.id_to_token(number)!r}, which text "
            "becomes too, so a turn could not be told from text. Choose a control or unused piece"
        )
    return number


# Marked text and conversations as turns between markers.
#
# <<<|user|>>>Hi<<<|user|>>><<<|assistant|>>>Yes<<<|assistant|>>>
# ╰ opens    ╯  ╰ closes   ╯
#
# The same marker opens and closes a turn, as in the SFT data on LUMI. Text outside of turns is kept, never learned.

MARKER_LOOK_ALIKE = "marker look-alike"
"""The ledger's reason for text that could be taken for a marker: kept, counted."""
_MATCH_NOTHING = re.compile("(?!)")


@dataclass(frozen=True, slots=True)
class MarkedTurn:
    """What stands between two markers; without a role, what stands outside of turns."""

    role: str | None
    text: str
    learn: bool = True
    """False: not learned whatever train_on says."""


def markers_by_role(markers: Markers) -> dict[str, str]:
    """The text of each marker."""
    named = {"user": markers.user, "assistant": markers.assistant, "system": markers.system}
    return {role: marker.text for role, marker in named.items() if marker is not None}


def parse_marked_turns(item: MarkedText | Conversation, markers: Markers) -> list[MarkedTurn]:
    """The turns of a record; a BadRecordError says why it has none."""
    turns = (
        _turns_from_text(item.text, markers) if isinstance(item, MarkedText) else _turns_from_messages(item, markers)
    )
    for turn in turns:
        try:
            turn.text.encode()
        except UnicodeEncodeError:
            raise BadRecordError("bad text", "the text holds a lone surrogate, which is not valid Unicode") from None
    return turns


def marked_to_conversation(item: MarkedText, markers: Markers) -> Conversation | None:
    """Marked text as messages, which are written the same way; None if text stands outside of its turns."""
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
            "no marker", f"no marker in the text; a turn stands between two of {' or '.join(texts.values())}"
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
            raise BadRecordError("unclosed turn", f"{marker} comes before {texts[opened]} has closed its turn")
    if opened is not None:
        raise BadRecordError("unclosed turn", f"the last {texts[opened]} opens a turn that nothing closes")
    return [turn for turn in turns if turn.role is not None or turn.text.strip()]


def _turns_from_messages(conversation: Conversation, markers: Markers) -> list[MarkedTurn]:
    if conversation.tools:
        raise BadRecordError("tools", "the record offers tools, which have no form between markers; remove them")
    texts = markers_by_role(markers)
    turns: list[MarkedTurn] = []
    system: list[str] = []  # waits for the user's turn that it goes before
    for number, message in enumerate(conversation.messages, 1):
        role = _checked_role(message, number, texts)
        if role == "system" and "system" not in texts:
            system.append(message.content)
            continue
        if system and role != "user":
            raise BadRecordError(
                "system without user",
                f"message {number}: a system message is written into the user's turn after it, and this is another. "
                "Give it a marker of its own: data.markers.system",
            )
        turns.append(MarkedTurn(role, "\n\n".join([*system, message.content]), message.train is not False))
        system = []
    if system:
        raise BadRecordError("system without user", "a system message at the end has no user's turn to go into")
    return turns


def _checked_role(message: Message, number: int, texts: dict[str, str]) -> str:
    role = "system" if message.role == "developer" else message.role
    if role not in ("system", "user", "assistant") or message.tool_calls:
        raise BadRecordError("tools", f"message {number}: tool calls and results have no form between markers")
    if message.reasoning:
        raise BadRecordError("reasoning", f"message {number}: reasoning has no form between markers; remove it")
    if role == "assistant" and not message.content.strip():
        raise BadRecordError("empty turn", f"message {number} (role 'assistant') has no text to learn")
    for text in texts.values():
        if text in message.content:
            raise BadRecordError(
                "marker in a message", f"message {number} holds {text}, which would open or close a turn; reword it"
            )
    return role


def look_alike_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds what a reader could take for one of `texts`: other case, spaces within, more or fewer signs around.

    From <<<|user|>>> it makes a pattern that finds <|user|>, <<|User |>> and <user>, and not the word alone.
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
