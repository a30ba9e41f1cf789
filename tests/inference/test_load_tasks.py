"""Tasks from files: public formats, custom fields, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import WhetError
from whet.data.conversation import Message
from whet.inference.config import EvalConfig, TaskConfig, parse_task_text
from whet.inference.tasks.load_tasks import load_file_task, load_tasks
from whet.inference.tasks.task import Task

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(*records: Any, name: str = "my.jsonl") -> str:
        file = tmp_path / name
        file.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
        return str(file)

    return make


def read(path: str, **options: Any) -> Task:
    return load_file_task(TaskConfig(path=path, **options), 100, "strict")


def test_prompt_and_answer(write: Write) -> None:
    task = read(write({"prompt": "2+2?", "answer": 4}, {"prompt": "Capital?", "answer": ["Paris", "paris"]}))
    first, second = task.examples(9)
    assert task.name == "my"
    assert (first.messages, first.answers) == ((Message("user", "2+2?"),), ("4",))
    assert second.answers == ("Paris", "paris")
    assert (task.scorer.name, task.max_new_tokens, len(task.examples(1))) == ("exact", 256, 1)


def test_messages_and_answer_and_a_system_message(write: Write) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2+2?"},
    ]
    own = [{"role": "system", "content": "Own."}, turns[0]]
    path = write({"messages": turns, "answer": "4"}, {"messages": own, "answer": "x"})
    first, second = read(path, system="Be brief.").examples(9)
    assert [turn.role for turn in first.messages] == ["system", "user", "assistant", "user"]
    assert second.messages[0].content == "Own."
    assert first.prompt.startswith("system: Be brief.\nuser: Hi")


def test_fields_by_other_names(write: Write) -> None:
    path = write({"text": "2+2?", "gold": "4"})
    (found,) = read(path, fields={"prompt": "text", "answer": "gold"}).examples(9)
    assert (found.prompt, found.expected) == ("2+2?", "4")


def test_the_last_message_of_a_conversation_is_the_answer(write: Write) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (found,) = read(write({"messages": turns})).examples(9)
    assert (found.messages, found.expected) == ((Message("user", "Hi"),), "Hello")


CHOICES = ["1", "2", "3", "4"]
ARC = {"id": "x", "question": "1+1?", "choices": {"text": CHOICES, "label": list("ABCD")}, "answerKey": "B"}
_LABELLED = [{"text": text, "label": text} for text in CHOICES]
ARC_OWN = {"id": "x", "question": {"stem": "1+1?", "choices": _LABELLED}, "answerKey": "2"}


@pytest.mark.parametrize(
    ("records", "name"),
    [
        ([{"question": "1+1?", "subject": "maths", "choices": CHOICES, "answer": 1}], "mmlu.jsonl"),
        ([ARC], "arc.jsonl"),
        ([ARC_OWN], "arc.jsonl"),
        (["1+1?,1,2,3,4,B"], "mmlu_test.csv"),
        (["question,A,B,C,D,answer", "1+1?,1,2,3,4,B"], "table.csv"),
    ],
    ids=["MMLU", "ARC", "ARC's own", "MMLU's own", "columns"],
)  # fmt: skip
def test_multiple_choice(write: Write, records: list[Any], name: str) -> None:
    task = read(write(*records, name=name))
    (found,) = task.examples(9)
    assert found.prompt.startswith("1+1?\n\n- A) 1\n- B) 2\n- C) 3\n- D) 4")
    assert (found.choices, found.expected, task.scorer.name) == (4, "B", "letters")


def test_multiple_choice_in_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"question": "1+1?", "subject": "m", "choices": CHOICES, "answer": 1}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "mmlu.parquet")
    (found,) = read(str(tmp_path / "mmlu.parquet")).examples(9)
    assert (found.choices, found.expected) == (4, "B")


@pytest.mark.parametrize(
    "record",
    [{"prompt": "1+1?", "answer": "2"}, {"messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}, ARC,
     {"question": "1+1?", "answer": "2\n#### 2"}],
)  # fmt: skip
def test_the_system_prompt_of_a_record_replaces_that_of_the_task(write: Write, record: Any) -> None:
    path = write({**record, "system_prompt": "Be brief."}, record)
    found = read(path, system="Be kind.").examples(9)
    assert [each.messages[0] for each in found] == [
        Message("system", "Be brief."), Message("system", "Be kind."),
    ]  # fmt: skip
    assert [len(each.messages) for each in found] == [2, 2]


def test_gsm8k_is_scored_by_number(write: Write) -> None:
    task = read(write({"question": "Half of 48?", "answer": "It is 48/2=<<48/2=24>>24.\n#### 24"}))
    (found,) = task.examples(9)
    assert "<<" not in found.expected
    assert task.scorer.score("I think #### 24.00", found) == 1
    assert task.scorer.score("48", found) == 0


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c"}], "my.jsonl:2: no correct answer (the record has"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": ""}], "my.jsonl:2: no correct answer"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": []}], "my.jsonl:2: no correct answer"),
        ([{"prompt": "a", "answer": "b"}, {"answer": "c"}], "my.jsonl:2: the record has no 'prompt'"),
        ([{"prompt": "a", "answer": "b"}, "{"], "my.jsonl:2: not valid JSON"),
        ([{"prompt": "a", "answer": "b"}, [1]], "my.jsonl:2: a record must be an object"),
        ([{"prompt": "a", "answer": "b\ud800"}], "my.jsonl:1: 'answer' contains a lone surrogate"),
        ([{"prompt": "a"}, {"prompt": "b"}], "my.jsonl, fields: {prompt: NAME, answer: NAME}}]'"),
        ([{"Frage": "a", "Antwort": "b"}], "my.jsonl, fields: {prompt: Frage, answer: Antwort}}]'"),
        ([{"prompt": "a"}, {"prompt": "b"}], "my.jsonl:1: a record needs a question and a correct answer"),
        (
            [{"question": "a", "choices": ["x", "y"], "answer": 7}],
            "my.jsonl:1: 'answer' is 7; it must be one of 0 to 1",
        ),
        (
            [{"messages": [{"role": "assistant", "content": "x"}], "answer": "b"}],
            "my.jsonl:1: the last message of 'messages'",
        ),
        ([], 'the file is empty. Write one JSON object per line, such as {"prompt": '),
    ],
)
def test_an_invalid_file_is_an_error(write: Write, records: list[Any], message: str) -> None:
    with pytest.raises(WhetError) as caught:
        read(write(*records))
    assert message in str(caught.value)
    assert str(caught.value).startswith("eval.tasks: ")
    assert "data.sources" not in str(caught.value)


@pytest.mark.parametrize(
    ("scorer", "message"),
    [("number", "has no number"), ("json", "is not valid JSON"), ("regex", "is not a regular expression")],
)
def test_a_correct_answer_that_the_scorer_cannot_use_is_an_error(write: Write, scorer: str, message: str) -> None:
    file = write({"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "(b"})
    with pytest.raises(WhetError, match=rf"my\.jsonl:2: .*{message}"):
        read(file, scorer=scorer)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(WhetError, match=r"eval\.tasks: no/such\.jsonl: no such file"):
        read("no/such.jsonl")


def test_multiple_choice_takes_no_scorer(write: Write) -> None:
    with pytest.raises(WhetError, match=r"a multiple choice file is scored by letters\. Remove the scorer"):
        read(write({"question": "a", "choices": ["x", "y"], "answer": 0}), scorer="exact")


def test_an_unknown_task_is_an_error_that_lists_the_built_in_ones() -> None:
    with pytest.raises(WhetError, match=r"eval\.tasks: unknown task 'order'; built in are: orders, spelling"):
        load_tasks(EvalConfig(tasks=[TaskConfig(path="order")]))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("orders", {"path": "orders"}),
        ("builtin:orders", {"path": "builtin:orders"}),
        ("builtin:orders:json", {"path": "builtin:orders", "scorer": "json"}),
        ("a/my.jsonl:number", {"path": "a/my.jsonl", "scorer": "number"}),
        ("hub:OWNER/NAME", {"path": "hub:OWNER/NAME"}),
    ],
)
def test_a_string_is_a_path_with_an_optional_scorer(text: str, meant: dict[str, str]) -> None:
    assert parse_task_text(text) == meant


def test_a_file_whose_name_has_a_colon(tmp_path: Path) -> None:
    (tmp_path / "a:number").touch()
    assert parse_task_text(str(tmp_path / "a:number")) == {"path": str(tmp_path / "a:number")}


@pytest.mark.parametrize(
    ("path", "title"),
    [("builtin:orders", "orders"), ("data/my.test.jsonl", "my"), ("./orders", "orders"), ("hub:OWNER/chat", "chat")],
)
def test_titles(path: str, title: str) -> None:
    assert TaskConfig(path=path).title == title


def test_an_empty_choice_does_not_shift_the_letters(write: Write) -> None:
    """As columns: without B, the answer C is the second of what is left."""
    record = {"question": "?", "A": "one", "B": "", "C": "two", "D": "three", "answer": "C"}
    (example,) = read(write(record)).examples(1)
    assert "- B) two" in example.messages[0].content
    assert (example.answers, example.choices) == (("B",), 3)
    with pytest.raises(WhetError, match=r"my\.jsonl:1"):
        read(write({**record, "answer": "B"}))
