"""Format detection: recognised and described, never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation, PlainText
from whet.data.read.sources import SourceReader, read_source

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CHOICES = {"question": "a", "choices": ["x", "y"], "answer": 0}
Jsonl = Callable[..., Path]


def reader(jsonl: Jsonl, *records: Any, **options: Any) -> SourceReader:
    return SourceReader(Source(path=str(jsonl(*map(json.dumps, records))), **options))


@pytest.mark.parametrize(
    ("record", "description"),
    [
        ({"messages": TURNS}, "messages (messages: role, content)"),
        (TURNS, "messages (role, content)"),
        ({"conversations": TURNS, "id": 1}, "messages (conversations: role, content); not used: id"),
        ({"messages": TURNS, "tools": [], "text": "x"}, "messages (messages: role, content, tools); not used: text"),
        ({"prompt": "x", "completion": "x", "messages": TURNS},
         "messages (messages: role, content); not used: prompt, completion"),
        ({"conversations": SHAREGPT}, "sharegpt (conversations: from, value)"),
        ({"messages": SHAREGPT, "system": "s"}, "sharegpt (messages: from, value, system)"),
        ({"instruction": "a", "input": "b", "output": "c"}, "alpaca (instruction, input, output)"),
        ({"instruction": "a", "output": "c", "text": "x"}, "alpaca (instruction, output); not used: text"),
        ({"instruction": "a", "context": "b", "response": "c", "category": "x"},
         "alpaca (instruction, context as input, response as output); not used: category"),
        ({"prompt": "a", "completion": "b"}, "prompt-completion (prompt, completion)"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "prompt-completion (prompt, completion)"),
        ({"question": "a", "answer": "b"}, "prompt-completion (question as prompt, answer as completion)"),
        ({"query": "a", "response": "b"}, "prompt-completion (query as prompt, response as completion)"),
        ({"input": "a", "output": "b"}, "prompt-completion (input as prompt, output as completion)"),
        ({"question": "a", "answer": "b\n#### 3"}, "gsm8k (question, answer)"),
        (CHOICES, "multiple-choice (question, choices, answer)"),
        ({"question": "a", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"},
         "multiple-choice (question, choices, answerKey as answer)"),
        ({"text": "a", "url": "x"}, "text (text); not used: url"),
        ("a", "text"),
    ],
)  # fmt: skip
def test_a_format_is_recognised_and_described(jsonl: Jsonl, record: Any, description: str) -> None:
    found = reader(jsonl, record)
    assert found.description == f"{jsonl(json.dumps(record))}: {description}"
    assert [type(found.parse(raw)) for raw in found.records()] in ([Conversation], [PlainText])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "not recognised: the records have no fields"),
        ([[]], "not recognised"),
        (3, "not recognised"),
        ({"title": "a", "body": "b"}, r"not recognised: the records have 'title', 'body'.*format: .*fields: "),
        ({"question": "a", "answer": "b", "history": [["c", "d"]]}, "not recognised.*'history'"),
        ({"messages": TURNS, "conversations": SHAREGPT}, "ambiguous.*messages with.*; or sharegpt with"),
        ({"messages": TURNS, "chat": TURNS}, "ambiguous.*messages: chat.*messages: messages"),
        ({"text": "a", "prompt": "b", "completion": "c"}, "ambiguous.*prompt-completion.*; or text"),
        (
            {"problem": "a", "solution": "b", "answer": "c"},
            "ambiguous.*completion: answer.*completion: solution",
        ),
        (
            {"instruction": "a", "input": "b", "context": "c", "output": "d"},
            "context and input may each be the field input",
        ),
        ({"text": "<<<|user|>>>a<<<|user|>>>"}, "format: marked"),
        ({"text": "<|im_start|>user"}, "format: marked"),
        ({"text": "[INST] a [/INST] b"}, "format: marked"),
    ],
)
def test_an_ambiguous_or_unknown_format_is_rejected_with_a_remedy(jsonl: Jsonl, record: Any, message: str) -> None:
    with pytest.raises(WhetError, match=message):
        reader(jsonl, record)


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"title": "a", "body": "b"}, {"fields": {"prompt": "title", "completion": "body"}}),
        ({"question": "a", "body": "b"}, {"fields": {"completion": "body"}}),
        ({"problem": "a", "solution": "b", "answer": "c"}, {"fields": {"completion": "solution"}}),
        ({"question": "a", "answer": "b", "context": "c"}, {"format": "prompt-completion"}),
        ({"log": TURNS}, {"fields": {"messages": "log"}}),
        ({"log": [{"who": "user", "said": "a"}]}, {"fields": {"messages": "log", "role": "who", "content": "said"}}),
        (
            {"log": [{"who": "human", "said": "a"}]},
            {"fields": {"conversations": "log", "from": "who", "value": "said"}},
        ),
        ({"messages": TURNS, "conversations": SHAREGPT}, {"format": "sharegpt"}),
        ({"question": "a", "answer": "b\n#### 3"}, {"format": "prompt-completion"}),
        ({"text": "a", "prompt": "b", "completion": "c"}, {"format": "prompt-completion"}),
        ({"prompt": "a", "question": "b", "completion": "c"}, {"format": "prompt-completion"}),
        (
            {"instruction": "a", "input": "b", "context": "c", "output": "d"},
            {"fields": {"input": "context", "output": "output"}},
        ),
        (
            {"frage": "a", "choices": ["x", "y"], "answer": 0},
            {"format": "multiple-choice", "fields": {"question": "frage"}},
        ),
    ],
)
def test_format_and_fields_resolve_the_ambiguity(jsonl: Jsonl, record: Any, options: dict[str, Any]) -> None:
    found = reader(jsonl, record, **options)
    assert [type(found.parse(raw)) for raw in found.records()] == [Conversation]


def test_fields_of_the_source_are_used(jsonl: Jsonl) -> None:
    record = {"instruction": "a", "input": "b", "context": "c", "output": "d"}
    path = str(jsonl(json.dumps(record)))
    [item] = read_source(Source(path=path, format="alpaca", fields={"input": "context"}))
    assert item.messages[0].content == "a\n\nc"  # type: ignore[union-attr]


def test_an_optional_field_may_be_missing_in_some_records(jsonl: Jsonl) -> None:
    records = [{"instruction": "a", "response": "d"}, {"instruction": "a", "context": "c", "response": "d"}]
    found = reader(jsonl, *records)
    texts = [found.parse(raw).messages[0].content for raw in found.records()]  # type: ignore[union-attr]
    assert texts == ["a", "a\n\nc"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": {"promt": "a"}}, "no format has a field 'promt'; known: .*prompt"),
        ({"fields": {"text": "a"}, "format": "alpaca"}, "alpaca has no field 'text'; known: history, input"),
    ],
)
def test_an_unknown_field_is_rejected(jsonl: Jsonl, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WhetError, match=message):
        reader(jsonl, {"messages": TURNS}, **options)


def test_records_of_two_formats_are_rejected_and_bad_ones_ignored(jsonl: Jsonl) -> None:
    with pytest.raises(WhetError, match=r"train.jsonl:2: .*\(text\) differ .*\(messages\)"):
        reader(jsonl, {"messages": TURNS}, {"text": "a"})
    found = reader(jsonl, {"mesages": TURNS}, {"messages": TURNS}, 3)
    assert [type(found.parse(raw)) for raw in found.records()] == [BadRecord, Conversation, BadRecord]


def test_gsm8k_must_match_every_sampled_record(jsonl: Jsonl) -> None:
    heading = {"question": "a", "answer": "b\n#### Notes"}
    found = reader(jsonl, heading, {"question": "a", "answer": "b"})
    assert "prompt-completion" in str(found.description)


def test_twenty_readable_records_are_sampled(jsonl: Jsonl) -> None:
    late = [{"messages": TURNS}] * 20 + [{"text": "a"}]
    assert "messages" in str(reader(jsonl, *late).description)
    with pytest.raises(WhetError, match=r"train\.jsonl:20: .*differ"):
        reader(jsonl, *late[1:])


def test_a_file_without_readable_records_reports_each_of_them(jsonl: Jsonl) -> None:
    found = SourceReader(Source(path=str(jsonl("nope", "{"))))
    assert "no record is readable" in str(found.description)
    assert [type(found.parse(raw)) for raw in found.records()] == [BadRecord, BadRecord]


def test_a_builtin_dataset_has_no_description() -> None:
    assert SourceReader(Source(path="builtin:orders")).description is None
