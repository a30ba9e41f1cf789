"""All formats by name: the fields each knows, how a record is recognised, how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from whet.data.conversation import Conversation, Marked, Origin, Text
from whet.data.formats import alpaca, gsm8k, messages, multiple_choice, prompt_completion, sharegpt, text

Parse = Callable[[Any, Mapping[str, str], Origin], Conversation | Text | Marked]


class Known(NamedTuple):
    """A format."""

    fields: Mapping[str, Sequence[str]]
    """Its fields, each with the names under which it is looked for; the first is its own."""
    recognise: Callable[[Any, Mapping[str, str]], list[dict[str, str]]]
    parse: Parse
    inner: Sequence[str] = ()
    """Fields of each turn, not of the record."""

    def names(self, found: Mapping[str, str]) -> dict[str, str]:
        """A name for every field: those found, else the format's own."""
        return {field: found.get(field, names[0]) for field, names in self.fields.items()}


FORMATS: dict[str, Known] = {
    "messages": Known(messages.FIELDS, messages.recognise, messages.parse, ("role", "content")),
    "sharegpt": Known(sharegpt.FIELDS, sharegpt.recognise, sharegpt.parse, ("from", "value")),
    "multiple-choice": Known(multiple_choice.FIELDS, multiple_choice.recognise, multiple_choice.parse),
    "gsm8k": Known(gsm8k.FIELDS, gsm8k.recognise, gsm8k.parse),
    "alpaca": Known(alpaca.FIELDS, alpaca.recognise, alpaca.parse),
    "prompt-completion": Known(prompt_completion.FIELDS, prompt_completion.recognise, prompt_completion.parse),
    "text": Known(text.FIELDS, text.recognise, text.parse),
    "marked": Known(text.FIELDS, text.recognise, text.parse_marked),
}


def parser(name: str, calculator: str) -> Parse:
    """How records of a format are read."""
    return gsm8k.parse_calls if name == "gsm8k" and calculator == "calls" else FORMATS[name].parse
