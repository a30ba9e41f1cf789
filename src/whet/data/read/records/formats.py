"""Every record format by name: its fields, how a record is recognised and how it is parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, MarkedText, Origin, PlainText
from whet.data.read.records.messages import (
    MESSAGES_FIELDS,
    RECORD_FIELDS,
    make_conversation,
    parse_message_list,
    parse_messages,
    recognise_messages,
)
from whet.data.read.records.question_formats import (
    ALPACA_FIELDS,
    ALPACA_OPTIONAL,
    ANSWER_WORDS,
    GSM8K_FIELDS,
    MULTIPLE_CHOICE_FIELDS,
    MULTIPLE_CHOICE_OPTIONAL,
    PROMPT_COMPLETION_FIELDS,
    QUESTION_WORDS,
    parse_alpaca,
    parse_gsm8k,
    parse_gsm8k_calls,
    parse_multiple_choice,
    parse_prompt_completion,
    recognise_alpaca,
    recognise_gsm8k,
    recognise_multiple_choice,
    recognise_prompt_completion,
)
from whet.data.read.records.record_fields import match_fields, require_field, require_nonempty, require_object
from whet.data.read.records.sharegpt import SHAREGPT_FIELDS, parse_sharegpt, recognise_sharegpt

# Formats of one text: plain documents, text with turn markers, and transcripts.

# text and marked: {"text": "…"}, or a whole .txt file.

TEXT_FIELDS = {"text": ("text",)}
_CHAT_MARKERS = re.compile(
    r"[<\[][|｜](?i:user|human|prompter|assistant|bot|model|system|im_start|start_header_id|start|user_token|ai)[|｜][>\]]"
    r"|\[INST\]|<start_of_turn>"
)


def _label(names: str, loud: str = "(?!)") -> re.Pattern[str]:
    """A name that begins a turn, as in `User: `, `**User:**`, `### User:`, or alone in a heading."""
    return re.compile(
        rf"(?:^[<\[|>*\- ]{{0,4}}|#{{2,3}} ?)(?:{names})[>\]|*]{{0,2}} ?[:：]|^#{{1,4}} \**(?:{names})\**:?[ \t]*$"
        rf"|(?-i:\b{loud}:)",
        re.IGNORECASE | re.MULTILINE,
    )


_LABELS = (
    (
        _label("human|user|prompter|instruct(?:ion)?|me|you|you said", "USER"),
        _label("assistant|response|output|bot|ai|gpt|chatgpt|chatgpt said|claude|gemini|copilot", "ASSISTANT"),
    ),
    (
        _label("|".join(("q|question|问|用户|ユーザー|nutzer|kunde|usuario", *QUESTION_WORDS.split()))),
        _label("|".join(("a|answer|答|助手|アシスタント|assistent|berater", *ANSWER_WORDS.split()))),
    ),
)
"""Of the one who asks, and of the one who answers."""


_MESSENGER_LINE = re.compile(
    r"^\u200e?\[?\d[\d./-]{5,9}, \d?\d[:.]\d\d(?:[:.]\d\d)?(?:\s?[ap]\.?m\.?)?(?:\]| -) [^:\n]{1,40}:",
    re.IGNORECASE | re.MULTILINE,
)
"""A message of a chat that WhatsApp exports."""


def recognise_text(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Every set of field names under which the record matches."""
    if isinstance(record, str):
        return [{"text": fields.get("text", "text")}]
    return [
        names
        for names in match_fields(record, TEXT_FIELDS, ("text",), fields)
        if isinstance(record[names["text"]], str)
    ]


def find_chat_marker(record: Any, name: str) -> str | None:
    """A marker or label of a turn, if the text has turns, so that training on every token may not be intended."""
    text = record.get(name) if isinstance(record, dict) else record
    if not isinstance(text, str):
        return None
    labels = (answers.search(text) and asks.search(text) for asks, answers in _LABELS)
    found = _CHAT_MARKERS.search(text) or next(filter(None, labels), None) or _MESSENGER_LINE.search(text)
    return found.group().strip() if found else None


def begins_chat(text: Any) -> bool:
    """Whether a text is a chat from its first word on."""
    if not isinstance(text, str) or not find_chat_marker(text, ""):
        return False
    return any(each.match(text.lstrip()) for each in (_CHAT_MARKERS, *(asks for asks, _ in _LABELS)))


def parse_text(record: Any, names: Mapping[str, str], origin: Origin) -> PlainText:
    """A plain document: every token is supervised."""
    return PlainText(_require_document(record, names["text"]), origin)


def parse_marked_text(record: Any, names: Mapping[str, str], origin: Origin) -> MarkedText:
    """Text with turn markers, which the renderer resolves (data.markers)."""
    return MarkedText(_require_document(record, names["text"]), origin)


def _require_document(record: Any, name: str) -> str:
    if isinstance(record, str):
        return require_nonempty(record, "the text")
    return require_nonempty(require_field(require_object(record, '{"text": "…"}'), name), f"'{name}'")


# transcript: {"text": "### Human: …### Assistant: …"}, or with `Human:` and `Assistant:` after blank lines (HH-RLHF).

_TRANSCRIPT_ROLES = {"Human": "user", "User": "user", "Assistant": "assistant", "System": "system"}
_TRANSCRIPT_LABELS = (
    re.compile(r"###\s*(Human|User|Assistant|System)\s*:"),
    re.compile(r"(?:\A\s*|\n[ \t]*\n)(Human|User|Assistant|System):"),
)


def recognise_transcript(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Every set of field names under which the record matches."""
    found = recognise_text(record, fields)
    texts = [record[names["text"]] if isinstance(record, dict) else record for names in found]
    roles = [{role for role, _ in _split_transcript(text)} for text in texts]
    return [names for names, spoken in zip(found, roles, strict=True) if {"user", "assistant"} <= spoken]


def parse_transcript(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Parse a record; raises BadRecordError."""
    turns = _split_transcript(_require_document(record, names["text"]))
    if not turns:
        raise BadRecordError(
            "bad transcript", f"'{names['text']}' does not begin with a label of a turn such as ### Human: or Human:"
        )
    spoken = turns[1:] if turns[0][0] == "system" else turns
    for number, (role, _) in enumerate(spoken):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            raise BadRecordError(
                "bad transcript",
                f"'{names['text']}': turn {number + 1} is the {role}'s, not the {expected}'s. Turns must alternate; a "
                "label inside a text begins a turn",
            )
    messages = parse_message_list([{"role": role, "content": content} for role, content in turns])
    return make_conversation(messages, record, names, origin)


def _split_transcript(text: str) -> list[tuple[str, str]]:
    """(role, text) of every turn; none if the text does not begin with a label."""
    for labels in _TRANSCRIPT_LABELS:
        found = [*labels.finditer(text)]
        if found and not text[: found[0].start()].strip():
            ends = [each.start() for each in found[1:]] + [len(text)]
            return [
                (_TRANSCRIPT_ROLES[each[1]], text[each.end() : end].strip())
                for each, end in zip(found, ends, strict=True)
            ]
    return []


RecordParser = Callable[[Any, Mapping[str, str], Origin], Conversation | PlainText | MarkedText]


class RecordFormat(NamedTuple):
    """How records of a format are recognised and parsed."""

    required: Mapping[str, Sequence[str]]
    """The fields it needs, each with its known names; the first is the canonical one."""
    recognise: Callable[[Any, Mapping[str, str]], list[dict[str, str]]]
    parse: RecordParser
    optional: Mapping[str, Sequence[str]] = RECORD_FIELDS
    """The fields a record may have, under any of their known names unless the user gives one."""
    turn_fields: Sequence[str] = ()
    """Fields of a turn, not of the record."""

    @property
    def fields(self) -> dict[str, Sequence[str]]:
        """Every field, with its known names."""
        return {**self.required, **self.optional}

    def resolve_names(self, found: Mapping[str, str]) -> dict[str, str]:
        """The name of every required field, the one found or else the canonical one, and of optional ones if found."""
        needed = {field: names[0] for field, names in self.required.items()}
        return needed | {field: name for field, name in found.items() if field in self.fields}


TURN_LIST_FIELDS = ("messages", "conversations")
"""The fields of formats that hold the turns of a conversation."""

FORMATS: dict[str, RecordFormat] = {
    "messages": RecordFormat(MESSAGES_FIELDS, recognise_messages, parse_messages, turn_fields=("role", "content")),
    "sharegpt": RecordFormat(SHAREGPT_FIELDS, recognise_sharegpt, parse_sharegpt, turn_fields=("from", "value")),
    "multiple-choice": RecordFormat(
        MULTIPLE_CHOICE_FIELDS,
        recognise_multiple_choice,
        parse_multiple_choice,
        {**MULTIPLE_CHOICE_OPTIONAL, **RECORD_FIELDS},
    ),
    "gsm8k": RecordFormat(GSM8K_FIELDS, recognise_gsm8k, parse_gsm8k),
    "alpaca": RecordFormat(ALPACA_FIELDS, recognise_alpaca, parse_alpaca, {**ALPACA_OPTIONAL, **RECORD_FIELDS}),
    "prompt-completion": RecordFormat(PROMPT_COMPLETION_FIELDS, recognise_prompt_completion, parse_prompt_completion),
    "transcript": RecordFormat(TEXT_FIELDS, recognise_transcript, parse_transcript),
    "text": RecordFormat(TEXT_FIELDS, recognise_text, parse_text, {}),
    "marked": RecordFormat(TEXT_FIELDS, recognise_text, parse_marked_text, {}),
}


def parser_of(name: str, calculator: str) -> RecordParser:
    """The parser of a format."""
    return parse_gsm8k_calls if name == "gsm8k" and calculator == "calls" else FORMATS[name].parse


MESSAGE_KEYS = {"role", "from"}
"""Keys that a message has and a record has not."""


def is_record(whole: dict[str, Any]) -> bool:
    """Whether an object is a conversation: its tools are a list of objects, too."""
    return any(form.recognise(whole, {}) for name, form in FORMATS.items() if name not in ("text", "marked"))


def is_list_of_records(value: Any) -> bool:
    """False for the messages of one conversation, which are a list of objects, too."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) for item in value)
        and MESSAGE_KEYS.isdisjoint(value[0])
    )
