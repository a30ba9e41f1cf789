"""The `multiple-choice` format: MMLU's {"question", "choices": […], "answer": 2} and ARC's with "answerKey": "C".

It becomes a question with lettered choices and the letter as the answer. How the question is put is whet's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from whet.data.conversation import BadRecordError, Conversation, Message, Origin
from whet.data.formats.pick import readings
from whet.data.formats.values import as_list, filled, kind, need_field, need_object, short

FIELDS = {"question": ("question",), "choices": ("choices", "options"), "answer": ("answer", "answerKey")}
_EXAMPLE = '{"question": "…", "choices": ["…", "…"], "answer": 1}'


def recognise(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The names under which a record holds such fields; none if it is of another format."""
    found = readings(record, FIELDS, ("question", "choices", "answer"), fields)
    return [names for names in found if isinstance(record[names["choices"]], (list, dict, str))]


def parse(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """A conversation, or a BadRecordError with the reason."""
    question, texts, right = read(record, names)
    return Conversation((Message("user", ask(question, texts)), Message("assistant", ascii_uppercase[right])), origin)


def read(record: Any, names: Mapping[str, str]) -> tuple[str, list[str], int]:
    """The question, its choices, and the place of the right one; or a BadRecordError with the reason."""
    record = need_object(record, _EXAMPLE)
    question = filled(need_field(record, names["question"]), f"'{names['question']}'")
    texts, labels = _choices(need_field(record, names["choices"]), names["choices"])
    right = _right(need_field(record, names["answer"]), labels, len(texts), names["answer"])
    return question, texts, right


def ask(question: str, choices: Sequence[str]) -> str:
    """The user's turn."""
    lettered = "\n".join(f"- {letter}) {text}" for letter, text in zip(ascii_uppercase, choices, strict=False))
    return f"{question}\n\n{lettered}\n\nAnswer with the letter of the right choice only."


def _choices(choices: Any, name: str) -> tuple[list[str], list[str] | None]:
    """Texts and, as ARC has them, labels."""
    labels = choices.get("label") if isinstance(choices, dict) else None
    texts = choices.get("text") if isinstance(choices, dict) else as_list(choices, f"'{name}'")
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(ascii_uppercase):
        said = f"{len(texts)} of them" if isinstance(texts, list) else kind(texts)
        raise BadRecordError("bad choices", f"'{name}' must be a list of 2 to 26 texts, not {said}")
    if isinstance(choices, dict) and (not isinstance(labels, list) or len(labels) != len(texts)):
        raise BadRecordError("bad choices", f"'{name}' must have one label for each text")
    return [filled(text, f"choice {number} of '{name}'") for number, text in enumerate(texts, 1)], labels


def _right(answer: Any, labels: list[str] | None, choices: int, name: str) -> int:
    """The place of the right choice. A digit as text is a label of ARC's, or unclear: from 0 or from 1?"""
    if labels is not None:
        if isinstance(answer, str) and labels.count(answer) == 1:
            return labels.index(answer)
    elif isinstance(answer, str) and len(answer) == 1 and answer in ascii_uppercase[:choices]:
        return ascii_uppercase.index(answer)
    elif isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < choices:
        return answer
    known = ", ".join(map(str, labels)) if labels else f"0 to {choices - 1} or A to {ascii_uppercase[choices - 1]}"
    raise BadRecordError("bad answer", f"'{name}' is {short(answer)}; it must be one of {known}")
