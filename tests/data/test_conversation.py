"""A JSON record becomes a conversation, or a reason why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.conversation import ROLES, BadRecordError, Conversation, Message, Origin
from whet.data.formats.messages import parse_record

HERE = Origin("a.jsonl", 7)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.sampled_from(["messages", "role", "content", "user", "assistant", "type", "text", "tools", "weight"])
NEAR = st.recursive(  # JSON that almost is a record
    WORDS | st.none() | st.integers(0, 2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


def test_messages_keep_their_order_roles_and_text() -> None:
    turns = [{"role": role, "content": f" {role} \n"} for role in ROLES]
    parsed = parse_record({"messages": turns}, HERE)
    assert parsed == Conversation(tuple(Message(role, f" {role} \n") for role in ROLES), HERE)
    assert [message.as_dict() for message in parsed.messages] == turns


def test_text_parts_are_joined_without_a_gap() -> None:
    content = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    parsed = parse_record({"messages": [{"role": "user", "content": content}]}, HERE)
    assert parsed.messages == (Message("user", "a b"),)


def test_keys_that_change_nothing_are_allowed() -> None:
    parsed = parse_record({"id": 3, "messages": [{"role": "user", "content": "a", "name": "Anna"}]}, HERE)
    assert parsed.messages == (Message("user", "a"),)


def test_an_origin_reads_as_file_and_line() -> None:
    assert str(HERE) == "a.jsonl:7"


@pytest.mark.parametrize(
    ("record", "reason", "says"),
    [
        (3, "not an object", "a number"),
        (True, "not an object", "true or false"),
        (None, "not an object", "nothing"),
        ("x", "not an object", "text"),
        ([], "not an object", "an empty list"),
        ([{}], "not an object", "a list"),
        ({}, "no messages", "no keys"),
        ({"prompt": "a", "answer": "b"}, "no messages", "'prompt', 'answer'"),
        ({"messages": None}, "no messages", "'messages'"),
        ({"messages": []}, "no messages", "an empty list"),
        ({"messages": {"role": "user"}}, "no messages", "an object"),
        ({"messages": "Hi"}, "no messages", "text"),
        ({"messages": ["Hi"]}, "bad message", "message 1 must be an object, not text"),
        ({"messages": [{"content": "a"}]}, "no role", "message 1"),
        ({"messages": [{"role": None, "content": "a"}]}, "no role", "system, developer, user, assistant, tool"),
        ({"messages": [{"role": "human", "content": "a"}]}, "unknown role", "'human'"),
        ({"messages": [{"role": "User", "content": "a"}]}, "unknown role", "'User'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role", "['user']"),
        ({"messages": [{"role": "user"}]}, "bad content", "message 1: 'content' must be text, not nothing"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad content", "a number"),
        ({"messages": [{"role": "user", "content": {}}]}, "bad content", "an object"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "bad content", "type 'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "bad content", "type 'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "bad content", "type 'text'"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "bad content", "type 'text'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "bad text", "message 1 holds a lone surrogate"),
        ({"messages": [{"role": "user", "content": "a\udfff"}]}, "bad text", "surrogate"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "bad text", "surrogate"),
    ],
)  # fmt: skip
def test_a_malformed_record_is_refused_with_reason_and_explanation(record: Any, reason: str, says: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        parse_record(record, HERE)
    assert caught.value.reason == reason
    assert says in str(caught.value)


def test_the_fault_is_placed_at_its_message() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    with pytest.raises(BadRecordError, match="message 2"):
        parse_record({"messages": turns}, HERE)


@pytest.mark.parametrize(
    "key", ["tool_calls", "function_call", "reasoning_content", "thinking", "weight", "train", "tools"]
)
def test_keys_that_change_what_is_learned_are_refused_not_ignored(key: str) -> None:
    turn = {"role": "user", "content": "a"}
    for record in ({"messages": [turn], key: 1}, {"messages": [turn, {**turn, key: [1]}]}):
        with pytest.raises(BadRecordError, match=key) as caught:
            parse_record(record, HERE)
        assert caught.value.reason == "unsupported key"


@pytest.mark.parametrize("nothing", [None, [], {}, ""])
def test_keys_that_hold_nothing_change_nothing(nothing: Any) -> None:
    turn = {"role": "user", "content": "a", "tool_calls": nothing}
    assert parse_record({"messages": [turn], "tools": nothing}, HERE).messages == (Message("user", "a"),)


@settings(max_examples=300, deadline=None)
@given(JSON | NEAR | st.builds(lambda turns: {"messages": turns}, NEAR | JSON))
def test_any_json_is_a_conversation_or_a_reason(record: Any) -> None:
    try:
        parsed = parse_record(record, HERE)
    except BadRecordError as refused:
        told = (refused.reason, str(refused))
        assert all(told)
        return
    assert len(parsed.messages) == len(record["messages"]) > 0
    assert all(message.role in ROLES and isinstance(message.content, str) for message in parsed.messages)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ROLES), st.text(st.characters(exclude_categories=["Cs"]))), min_size=1))
def test_every_valid_text_survives_unchanged(turns: list[tuple[str, str]]) -> None:
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert [(m.role, m.content) for m in parse_record(record, HERE).messages] == turns
