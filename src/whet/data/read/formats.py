"""Every record format by name: its fields, how a record is recognised and how it is parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from whet.data.conversation import Conversation, MarkedText, Origin, PlainText
from whet.data.read.messages import MESSAGES_FIELDS, RECORD_FIELDS, parse_messages, recognise_messages
from whet.data.read.question_formats import (
    ALPACA_FIELDS,
    ALPACA_OPTIONAL,
    GSM8K_FIELDS,
    MULTIPLE_CHOICE_FIELDS,
    PROMPT_COMPLETION_FIELDS,
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
from whet.data.read.sharegpt import SHAREGPT_FIELDS, parse_sharegpt, recognise_sharegpt
from whet.data.read.text_formats import (
    TEXT_FIELDS,
    parse_marked_text,
    parse_text,
    parse_transcript,
    recognise_text,
    recognise_transcript,
)

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


FORMATS: dict[str, RecordFormat] = {
    "messages": RecordFormat(MESSAGES_FIELDS, recognise_messages, parse_messages, turn_fields=("role", "content")),
    "sharegpt": RecordFormat(SHAREGPT_FIELDS, recognise_sharegpt, parse_sharegpt, turn_fields=("from", "value")),
    "multiple-choice": RecordFormat(MULTIPLE_CHOICE_FIELDS, recognise_multiple_choice, parse_multiple_choice),
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
