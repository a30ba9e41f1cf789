"""The records of a file of questions: what kind they are, and the example that each becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from string import ascii_uppercase
from typing import Any, NamedTuple

from whet.data.conversation import BadRecordError, Origin
from whet.data.formats import gsm8k, multiple_choice
from whet.data.formats.messages import parse_turns
from whet.data.formats.values import as_list, filled, kind, need_field
from whet.infer.tasks.human_eval import FIELDS as PROGRAM
from whet.infer.tasks.human_eval import question as program_question
from whet.infer.tasks.task import Example

_PROMPTS, _MESSAGES, _ANSWERS = ("prompt", "question", "input"), ("messages",), ("answer", "answers")

Parse = Callable[[Any, Origin, tuple[dict[str, Any], ...]], Example]


class Kind(NamedTuple):
    """What records of a file are, how one is read, and what is usual for them."""

    name: str
    parse: Parse
    scorer: str
    max_new_tokens: int


def kind_of(record: Any, fields: Mapping[str, str]) -> Kind | None:
    """By the first record of a file; None if it is no question with an answer, but perhaps a conversation."""
    record = with_choices(record)
    if not isinstance(record, dict):
        return None
    if record.keys() >= PROGRAM:
        return Kind("HumanEval", _program, "tests", 512)
    if multiple_choice.recognise(record, {}):
        return Kind("multiple choice", _choice, "letters", 1)
    if gsm8k.recognise(record, {}):
        return Kind("GSM8K", _sums, "number", 400)
    prompt = _named(record, "prompt", _PROMPTS, fields) or _named(record, "messages", _MESSAGES, fields)
    answer = _named(record, "answer", _ANSWERS, fields)
    if prompt and answer and "choices" not in record:
        return Kind("questions", _reader(fields), "exact", 256)
    return None


def with_choices(record: Any) -> Any:
    """Other ways to write choices as the usual one, a list: a column for each (question, A, B, C, D, answer), and ARC's
    own file, in which they stand inside of the question."""
    if not isinstance(record, dict):
        return record
    inner = record.get("question")
    if isinstance(inner, dict) and "stem" in inner and isinstance(inner.get("choices"), list):
        given = [each if isinstance(each, dict) else {} for each in inner["choices"]]
        choices = {name: [each.get(name) for each in given] for name in ("text", "label")}
        return {"question": inner["stem"], "choices": choices, "answerKey": record.get("answerKey")}
    if not {"A", "B", "answer"} <= record.keys() or "choices" in record:
        return record
    question = record.get("question", record.get("prompt"))
    letters = [letter for letter in ascii_uppercase if record.get(letter) not in (None, "")]
    if letters != list(ascii_uppercase[: len(letters)]):  # without the empty one, later letters would mean others
        return {"question": question, "choices": {"label": letters, "text": [str(record[each]) for each in letters]},
                "answer": record["answer"]}  # fmt: skip
    return {"question": question, "choices": [str(record[letter]) for letter in letters], "answer": record["answer"]}


def _choice(record: Any, origin: Origin, opening: tuple[dict[str, Any], ...]) -> Example:
    record = with_choices(record)
    names = multiple_choice.recognise(record, {})
    question, choices, right = multiple_choice.read(
        record, names[0] if names else {"question": "question", "choices": "choices", "answer": "answer"}
    )
    asked = {"role": "user", "content": multiple_choice.ask(question, choices)}
    return Example((*opening, asked), (ascii_uppercase[right],), str(origin), len(choices))


def _sums(record: Any, origin: Origin, opening: tuple[dict[str, Any], ...]) -> Example:
    asked, answer = gsm8k.parse(record, {"question": "question", "answer": "answer"}, origin).messages
    return Example((*opening, asked.as_dict()), (answer.content,), str(origin))


def _program(record: Any, origin: Origin, opening: tuple[dict[str, Any], ...]) -> Example:
    more = {name: filled(need_field(record, name), f"'{name}'") for name in PROGRAM}
    asked = {"role": "user", "content": program_question(more["prompt"])}
    solution = record.get("canonical_solution")
    return Example((*opening, asked), (str(solution or ""),), str(origin), more=more)


def _reader(fields: Mapping[str, str]) -> Parse:
    def parse(record: Any, origin: Origin, opening: tuple[dict[str, Any], ...]) -> Example:
        if not isinstance(record, dict):
            raise BadRecordError(
                "not an object", f"a record is an object with a prompt and an answer, this is {kind(record)}"
            )
        turns = _named(record, "messages", _MESSAGES, fields)
        if turns:
            asked = tuple(turn.as_dict() for turn in parse_turns(as_list(record[turns], f"'{turns}'")))
            if asked[-1]["role"] == "assistant":
                raise BadRecordError("bad messages", f"the last of '{turns}' is the assistant's; end with a question")
        else:
            name = _named(record, "prompt", _PROMPTS, fields) or fields.get("prompt", "prompt")
            asked = ({"role": "user", "content": filled(need_field(record, name), f"'{name}'")},)
        more = {"schema": record["schema"]} if isinstance(record.get("schema"), (dict, bool)) else {}
        before = () if asked[0]["role"] == "system" else opening
        return Example((*before, *asked), _answers(record, fields), str(origin), more=more)

    return parse


def _answers(record: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[str, ...]:
    """One, or a list of which any will do; numbers and objects as JSON writes them."""
    name = _named(record, "answer", _ANSWERS, fields)
    value = None if name is None else record[name]
    given = value if isinstance(value, list) else [value]
    texts = [
        each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in given if each is not None
    ]
    if not texts or not all(text.strip() for text in texts):
        keys = ", ".join(map(repr, list(record)[:20]))
        what = f"'{name}' is empty" if name else f"it has {keys}"
        raise BadRecordError(
            "no answer",
            f"there is no right answer to compare with ({what}). Add 'answer', or name it: fields: {{answer: NAME}}",
        )
    return tuple(texts)


def _named(record: Mapping[str, Any], field: str, usual: tuple[str, ...], fields: Mapping[str, str]) -> str | None:
    """The name under which a record has a field."""
    names = (fields[field],) if field in fields else usual
    return next((name for name in names if record.get(name) is not None), None)
