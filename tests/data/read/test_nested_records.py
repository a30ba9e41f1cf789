"""Logs and exports in which messages and answers are inside other objects: the command in the error loses nothing."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation
from whet.data.read.sources import propose_source, read_source

USER, ANSWER = {"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}
ANSWERED = [("user", "Q?"), ("assistant", "A.")]
CHOICES = {"choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def refusal(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(WhetError) as caught:
        propose_source(str(path))
    return str(caught.value)


def turns(parsed: Any) -> list[tuple[str, str]]:
    assert isinstance(parsed, Conversation), parsed
    return [(message.role, message.content) for message in parsed.messages]


LOGS: dict[str, Any] = {
    "stored completion": {"messages": [USER], "object": "chat.completion", **CHOICES},
    "Ollama": {"model": "m", "messages": [USER], "message": ANSWER, "done": True},
    "LiteLLM": {"messages": [USER], "response": CHOICES},
    "several turns": {"messages": [USER, ANSWER, USER], "response": CHOICES},
    "Langfuse": {"type": "GENERATION", "input": {"messages": [USER], "tools": [TOOL]}, "output": ANSWER},
    "MLflow": {"request": {"messages": [USER], "tools": [TOOL]}, "response": CHOICES},
    "LangSmith": {"inputs": {"messages": [USER]}, "outputs": {"messages": [ANSWER]}},
    "Anthropic": {
        "request": {"system": "S.", "messages": [USER, ANSWER, USER]},
        "response": {"role": "assistant", "content": [{"type": "text", "text": "A."}]},
    },
    "odd key": {"my input": {"messages": [USER]}, "my output": CHOICES},
    "a question and its answer": {"inputs": {"question": "Q?"}, "outputs": {"answer": "A."}},
}


@pytest.mark.system("jq")
@pytest.mark.parametrize("name", LOGS)
def test_the_command_joins_a_question_and_the_answer_elsewhere(tmp_path: Path, name: str) -> None:
    """Those of several turns were read without the last answer, the others refused without a command."""
    path = tmp_path / "a.jsonl"
    [program] = re.findall(r"jq -c '(.*)' FILE > NEW.jsonl", refusal(path, LOGS[name], LOGS[name]))
    done = subprocess.run(["jq", "-c", program, path], capture_output=True, text=True, check=True)
    path.write_text(done.stdout)
    parsed = list(read_source(Source(path=str(path))))
    assert len(parsed) == 2
    for each in parsed:
        assert isinstance(each, Conversation)
        assert turns(each)[-2:] == ANSWERED
        assert (len(each.tools) > 0) == ('"tools"' in json.dumps(LOGS[name]))
        assert (turns(each)[0] == ("system", "S.")) == (name == "Anthropic")
        assert len(turns(each)) == {"several turns": 4, "Anthropic": 5}.get(name, 2)


@pytest.mark.system("jq")
@pytest.mark.parametrize("value", [{"messages": [USER, ANSWER]}, [USER, ANSWER], {"conversations": [USER, ANSWER]}])
def test_conversations_by_their_ids_are_all_kept(tmp_path: Path, value: Any) -> None:
    """The command wrote the first one only."""
    path = tmp_path / "a.json"
    message = refusal(path, {"id-1": value, "id-2": value})
    [program] = re.findall(r"jq -c '(.*)' FILE > NEW.jsonl", message)
    done = subprocess.run(["jq", "-c", program, path], capture_output=True, text=True, check=True)
    (tmp_path / "b.jsonl").write_text(done.stdout)
    assert [turns(each) for each in read_source(Source(path=str(tmp_path / "b.jsonl")))] == [ANSWERED] * 2


def test_an_answer_without_its_question_is_one_message(tmp_path: Path) -> None:
    """The command took the texts out of it, which would have been documents."""
    answer = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "A."}]}
    assert "each record is one message ('role' and 'content')" in refusal(tmp_path / "a.jsonl", answer)


def test_a_text_inside_one_of_several_objects_is_not_the_record(tmp_path: Path) -> None:
    chunks = {"chunks": [{"role": "user", "text": "Q?"}, {"role": "model", "text": "A."}]}
    assert "jq" not in refusal(tmp_path / "a.jsonl", {"systemInstruction": {"text": "S."}, "chunkedPrompt": chunks})


@pytest.mark.parametrize(
    "more",
    [{"chat_history": [{"role": "USER", "message": "Q?"}], "message": "R?"},
     {"qas": [{"question": "Q?", "answer": "A."}]}],
)  # fmt: skip
def test_a_text_beside_turns_is_no_document(tmp_path: Path, more: Any) -> None:
    """As Cohere logs its chats, whose answers were read as documents."""
    record = {"text": "A.", **more}
    message = refusal(tmp_path / "a.jsonl", record, record)
    assert "a list of turns or records. Write what is to be learned as" in message
    assert len(list(read_source(Source(path=str(tmp_path / "a.jsonl"), format="text")))) == 2


def test_an_object_as_the_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "Q?", "answer": {"value": "A.", "aliases": ["B."]}}\n')
    [bad] = read_source(Source(path=str(tmp_path / "a.jsonl")))
    assert isinstance(bad, BadRecord)
    assert "'answer' must be text or messages, not an object with 'value', 'aliases'" in bad.explanation
    record = {"question": {"en": "Q?", "de": "F?"}, "answer": "A."}
    assert "'question' is an object with 'en', 'de'" in refusal(tmp_path / "a.jsonl", record)


@pytest.mark.system("jq")
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_what_all_records_of_an_object_share_is_not_lost(tmp_path: Path, name: str) -> None:
    """The records were read, without the system prompt above them."""
    shared = {"system": "S.", "rows": [{"prompt": "Q?", "completion": "A."}] * 2}
    message = refusal(tmp_path / name, shared)
    assert "'system' is beside the records under 'rows', which need it" in message
    [program] = re.findall(r"jq -c '(.*)' FILE > NEW.jsonl", message)
    done = subprocess.run(["jq", "-c", program, tmp_path / name], capture_output=True, text=True, check=True)
    (tmp_path / "b.jsonl").write_text(done.stdout)
    assert [turns(each) for each in read_source(Source(path=str(tmp_path / "b.jsonl")))] == [
        [("system", "S."), *ANSWERED]
    ] * 2


@pytest.mark.parametrize("names", [("question", "answer"), ("Frage", "Antwort")])
def test_an_object_of_lists_is_a_table_of_columns(tmp_path: Path, names: tuple[str, str]) -> None:
    """As to_dict of `datasets` writes it: it was one bad record."""
    (tmp_path / "a.json").write_text(json.dumps({names[0]: ["Q?", "Q?"], names[1]: ["A.", "A."], "id": [1, 2]}))
    source, _ = propose_source(str(tmp_path / "a.json"))
    assert [turns(each) for each in read_source(source)] == [ANSWERED] * 2


@pytest.mark.system("jq")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", [["Q?", "A."], ["Q?", "A."]]),
        ("a.json", [[{"question": "Q?", "answer": "A."}] * 2]),
        ("a.jsonl", '["Q?", "A."]\n["Q?", "A."]\n'),
        (
            "a.jsonl",
            '[{"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}]}]\n' * 2,
        ),
    ],
)
def test_records_that_are_lists_get_a_command(tmp_path: Path, name: str, content: Any) -> None:
    """`the records have no fields`, it said."""
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(WhetError) as caught:
        propose_source(str(path))
    [program] = re.findall(r"jq -c '(.*)' FILE > NEW.jsonl", str(caught.value))
    done = subprocess.run(["jq", "-c", program, path], capture_output=True, text=True, check=True)
    (tmp_path / "b.jsonl").write_text(done.stdout)
    assert [turns(each) for each in read_source(Source(path=str(tmp_path / "b.jsonl")))] == [ANSWERED] * 2


@pytest.mark.parametrize(("own", "parent"), [("id", "parentId"), ("uuid", "parent_message_uuid")])
@pytest.mark.parametrize(("role", "text"), [("role", "content"), ("from", "value")])
def test_branches_are_not_joined(tmp_path: Path, own: str, parent: str, role: str, text: str) -> None:
    """Open WebUI, LibreChat and Claude export all versions of an answer: both were turns of one conversation."""
    chat = [{own: n, parent: n - 1 or None, role: who, text: n * "x"} for n, who in enumerate(["user", "assistant"], 1)]
    branch = {own: 3, parent: 1, role: "assistant", text: "A."}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"conversations": turns}) + "\n" for turns in (chat, [*chat, branch])))
    good, bad = read_source(Source(path=str(path)))
    assert isinstance(good, Conversation)
    assert isinstance(bad, BadRecord)
    assert f"message 3 is no reply to message 2 ('{parent}' is 1): the messages are a tree" in bad.explanation


@pytest.mark.parametrize(
    ("key", "values"),
    [("timestamp", (2.5, 1)), ("createdAt", ("2024-01-02T10:00", "2024-01-01T10:00")), ("turn", (1, 0))],
)
def test_an_export_with_the_newest_first_is_not_read_backwards(tmp_path: Path, key: str, values: Any) -> None:
    path = tmp_path / "a.jsonl"
    turns = [{**turn, key: value} for turn, value in zip((ANSWER, USER), values, strict=True)]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (turns, turns[::-1])))
    bad, good = read_source(Source(path=str(path)))
    assert isinstance(good, Conversation)
    assert isinstance(bad, BadRecord)
    assert f"message 2 comes before message 1 by '{key}'" in bad.explanation


@pytest.mark.parametrize(
    "more",
    [
        [{"id": 1, "parent_id": "chat-7"}, {"id": 2, "parent_id": "chat-7"}],
        [{"timestamp": "2024-01-01T10:00:00Z"}, {"timestamp": "2024-01-01T10:00:00.512Z"}],
        [{"date": "2024-03-31T01:59:00+01:00"}, {"date": "2024-03-31T01:01:00+00:00"}],
        [{"date": "2024-01-02T10:00"}, {"date": "2024-01-01T10:00Z"}],
        [{"tool_use": False, "function_calls": 0}, {"tool_use": True, "function_calls": 2}],
    ],
)
def test_ordinary_keys_of_messages_are_no_branches_dates_or_calls(tmp_path: Path, more: Any) -> None:
    """The conversation's id, milliseconds, another time zone, flags and counts: each record was refused."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [turn | each for turn, each in zip([USER, ANSWER], more, strict=True)]}))
    assert [turns(each) for each in read_source(Source(path=str(path)))] == [ANSWERED]


def test_an_edited_first_message_is_a_branch(tmp_path: Path) -> None:
    """Claude's exports give every first message the same parent, which is none of them."""
    parents = ["root", 1, "root", 3]
    chat = [{**turn, "uuid": n, "parent_uuid": parents[n - 1]} for n, turn in enumerate([USER, ANSWER] * 2, 1)]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": chat}))
    [bad] = read_source(Source(path=str(path)))
    assert isinstance(bad, BadRecord)
    assert "message 3 is no reply to message 2" in bad.explanation


def test_records_may_be_under_the_name_of_what_they_could_share(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 4, "history": [{"id": 1, "messages": [USER, ANSWER]}]}))
    assert [turns(each) for each in read_source(Source(path=str(path)))] == [ANSWERED]
