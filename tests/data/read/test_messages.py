"""The messages format: a JSON record becomes a conversation, or a BadRecordError with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import BadRecordError
from whet.data.conversation import ROLES, Conversation, Message, Origin, ToolCall
from whet.data.read.records.formats import FORMATS
from whet.data.read.records.messages import parse_messages
from whet.data.read.records.unsupported_records import reject_unsupported

HERE = Origin("a.jsonl", 7)
NAMES = FORMATS["messages"].resolve_names({})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")).filter(str.strip)
WORDS = st.sampled_from(
    [
        "messages",
        "role",
        "content",
        "user",
        "assistant",
        "type",
        "text",
        "tools",
        "weight",
        "train",
        "tool",
        "name",
        "tool_calls",
        "function",
        "arguments",
        "{}",
        "[]",
        "thinking",
        "tool_call_id",
    ]
)
NEAR = st.recursive(  # JSON that resembles a record
    WORDS | st.none() | st.booleans() | st.integers(0, 2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


def parse_record(record: Any, _origin: Origin = HERE) -> Conversation:
    parsed = parse_messages(record, NAMES, HERE)
    reject_unsupported(record, parsed, NAMES)
    return parsed


def talk(*turns: dict[str, Any], **more: Any) -> Conversation:
    return parse_record({"messages": list(turns), **more})


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CALL = {"id": "x1", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}


@pytest.mark.parametrize("first", ["system", "developer"])
def test_messages_keep_their_order_roles_and_text(first: str) -> None:
    turns = [{"role": role, "content": f" {role} \n"} for role in (first, "user", "assistant", "user")]
    parsed = talk(*turns)
    assert parsed == Conversation(tuple(Message(t["role"], t["content"]) for t in turns), HERE)
    assert [message.as_dict() for message in parsed.messages] == turns
    assert parse_record(turns) == parsed  # the list alone is a record, too


def test_text_parts_are_joined_without_a_gap() -> None:
    content = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    parsed = parse_record({"messages": [{"role": "user", "content": content}]}, HERE)
    assert parsed.messages == (Message("user", "a b"),)


def test_text_parts_have_other_types_in_the_responses_api_and_may_be_the_system_prompt() -> None:
    turns = [{"role": role, "content": [{"type": f"{kind}_text", "text": kind}]}
             for role, kind in (("user", "input"), ("assistant", "output"))]  # fmt: skip
    system = {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]}
    expected = (Message("system", "Be kind."), Message("user", "input"), Message("assistant", "output"))
    assert parse_record({"messages": turns} | system, HERE).messages == expected


def test_unused_keys_are_allowed() -> None:
    parsed = parse_record({"id": 3, "messages": [{"role": "user", "content": "a", "name": "Anna"}]}, HERE)
    assert parsed.messages == (Message("user", "a"),)


def test_an_origin_reads_as_file_and_line() -> None:
    assert str(HERE) == "a.jsonl:7"


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        (3, "not an object", "a number"),
        (True, "not an object", "true or false"),
        (None, "not an object", "null"),
        ("x", "not an object", "text"),
        ([], "no messages", "an empty list"),
        ([{}], "no role", "message 1"),
        ([3], "bad message", "a number"),
        ({}, "no messages", "no keys"),
        ({"prompt": "a", "answer": "b"}, "no messages", "'prompt', 'answer'"),
        ({"messages": None}, "no messages", "'messages' must be a list of at least one message, not null"),
        ({"messages": []}, "no messages", "an empty list"),
        ({"messages": {"role": "user"}}, "no messages", "an object"),
        ({"messages": "Hi"}, "no messages", "text"),
        ({"messages": ["Hi"]}, "bad message", "message 1 must be an object, not text"),
        ({"messages": [{"content": "a"}]}, "no role", "message 1"),
        ({"messages": [{"role": None, "content": "a"}]}, "no role", "system, developer, user, assistant, tool"),
        ({"messages": [{"role": "human", "content": "a"}]}, "unknown role", "'human'"),
        ({"messages": [{"role": "User", "content": "a"}]}, "unknown role", "'User'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role", "['user']"),
        ({"messages": [{"role": "ipython", "content": "a"}]}, "unknown role", "Write 'tool'"),
        ({"messages": [{"role": "assistant", "content": None, "refusal": "No."}]}, "bad content",
         "'refusal' in place of 'content'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "bad content",
         "not tool_use; write thinking as reasoning, tool_use as tool_calls"),
        ({"messages": [{"role": "user"}]}, "bad content", "message 1 has no 'content' (it has 'role')"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad content", "a number"),
        ({"messages": [{"role": "user", "content": {}}]}, "bad content", "an object"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "bad content", "type 'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "bad content", "type 'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "bad content", "type 'text'"),
        ({"messages": [{"role": "user", "content": [{"txt": "a"}]}]}, "bad content", "type 'text', not txt"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "bad text", "'content' contains a lone surrogate"),
        ({"messages": [{"role": "user", "content": "a\udfff"}]}, "bad text", "surrogate"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "bad text", "the character NUL"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty turn", "message 1 (role 'user') is empty"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty turn", "message 1"),
        ({"messages": [{"role": "assistant", "content": "\u2003"}]}, "empty turn", "role 'assistant'"),
        ({"messages": [USER, {"role": "system", "content": "a"}]}, "system message not first", "message 2"),
        ({"messages": [{"role": "system", "content": "a"}, {"role": "developer", "content": "a"}]},
         "two system messages", "message 2"),
        ({"messages": "[1"}, "broken JSON", "'messages' must be JSON"),
        ({"messages": [USER], "images": ["a.png"]}, "unsupported key", "'images'"),
        ({"messages": [USER], "chat_template_kwargs": {"a": 1}}, "unsupported key", "'chat_template_kwargs'"),
        ({"messages": [{**USER, "tools": [1]}]}, "unsupported key", "next to the messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "bad text", "surrogate"),
    ],
)  # fmt: skip
def test_a_malformed_record_is_rejected_with_reason_and_explanation(record: Any, reason: str, message: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        parse_record(record, HERE)
    assert caught.value.reason == reason
    assert message in str(caught.value)


def test_errors_name_the_message() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    with pytest.raises(BadRecordError, match="message 2"):
        parse_record({"messages": turns}, HERE)


@pytest.mark.parametrize("empty", [None, [], {}, ""])
def test_keys_with_empty_values_are_ignored(empty: Any) -> None:
    turn = {"role": "user", "content": "a", "tool_calls": empty}
    assert parse_record({"messages": [turn], "tools": empty}, HERE).messages == (Message("user", "a"),)


@settings(max_examples=examples(300), deadline=None)
@given(JSON | NEAR | st.builds(lambda turns: {"messages": turns}, NEAR | JSON))
def test_any_json_is_a_conversation_or_a_reason(record: Any) -> None:
    try:
        parsed = parse_record(record, HERE)
    except BadRecordError as error:
        found = (error.reason, str(error))
        assert all(found)
        return
    assert len(parsed.messages) == len(record["messages"] if isinstance(record, dict) else record) > 0
    assert all(message.role in ROLES and isinstance(message.content, str) for message in parsed.messages)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXT), min_size=1))
def test_every_valid_text_is_kept_unchanged(turns: list[tuple[str, str]]) -> None:
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert [(m.role, m.content) for m in parse_record(record, HERE).messages] == turns


# Tools


def test_calls_and_results_are_parsed() -> None:
    result = {"role": "tool", "content": "", "tool_call_id": "x1", "name": "f"}
    parsed = talk(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result, ANSWER)
    call = ToolCall("f", {"n": 1}, "x1")
    assert parsed.messages[1:3] == (
        Message("assistant", "", tool_calls=(call,)), Message("tool", "", tool_call_id="x1", name="f"),
    )  # fmt: skip
    assert parsed.messages[1].as_dict()["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ({"name": "f", "arguments": {"n": 1}}, ToolCall("f", {"n": 1})),
        ({"name": "f", "arguments": '{"n": [1, null]}'}, ToolCall("f", {"n": [1, None]})),
        ({"function": {"name": "f", "arguments": "{}"}, "id": "i"}, ToolCall("f", {}, "i")),
        ({"name": "f"}, ToolCall("f", {})),
        ({"name": "f", "args": {"n": 1}}, ToolCall("f", {"n": 1})),
        ({"name": "f", "parameters": {"n": 1}}, ToolCall("f", {"n": 1})),
        ({"name": "f", "input": {"n": 1}}, ToolCall("f", {"n": 1})),
        ({"name": "f", "arguments": " "}, ToolCall("f", {})),
        ({"name": "f", "arguments": {"n": "\\u0000"}}, ToolCall("f", {"n": "\\u0000"})),
    ],
)
def test_a_call_is_flat_or_nested_and_its_arguments_an_object_or_a_json_string(call: Any, wanted: ToolCall) -> None:
    assert talk(USER, {**ANSWER, "tool_calls": [call]}).messages[1].tool_calls == (wanted,)
    if "function" not in call:
        assert talk(USER, {**ANSWER, "function_call": call}).messages[1].tool_calls == (wanted,)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"name": "f", "arguments": "x"}, "broken JSON"),
        ({"name": "f", "arguments": "[1]"}, "bad tool call"),
        ({"name": "f", "arguments": 3}, "bad tool call"),
        ({"name": "f", "arguments": '{"n": NaN}'}, "broken JSON"),
        ({"name": "f", "arguments": {"n": float("inf")}}, "bad value"),
        ({"name": "f", "arguments": {"n": ["\ud800"]}}, "bad text"),
        ({"name": "f", "arguments": {"n": {"\0": 1}}}, "bad text"),
        ({"name": "f", "arguments": {"n": "\\\0"}}, "bad text"),
        ({"arguments": {}}, "bad tool call"),
        ({"name": "", "arguments": {}}, "bad tool call"),
        ({"name": 3, "arguments": {}}, "bad content"),
        ({"name": "f", "id": 3}, "bad content"),
        ({"type": "code", "name": "f"}, "bad tool call"),
        ({"name": "f", "kwargs": {"x": 1}}, "bad tool call"),
        ({"function": "f"}, "bad tool call"),
        ("f", "bad tool call"),
    ],
)
def test_a_malformed_call_is_rejected(call: Any, reason: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        talk(USER, {"role": "assistant", "content": "b", "tool_calls": [call]})
    assert caught.value.reason == reason
    assert "message 2" in str(caught.value)


def test_only_the_assistant_calls_and_reasons() -> None:
    for key, value in (("tool_calls", [CALL]), ("function_call", CALL["function"]), ("thinking", "t")):
        with pytest.raises(BadRecordError, match="only the assistant"):
            talk({**USER, key: value})


def _calls(*calls: str | None) -> dict[str, Any]:
    return {**ANSWER, "tool_calls": [{"name": "f", **({"id": call} if call else {})} for call in calls]}


@pytest.mark.parametrize(
    ("calls", "results", "good"),
    [
        ([], [None], False), ([], ["a"], False), (["a"], ["a"], True), (["a"], [None], True), (["a"], ["b"], False),
        ([None], [None], True), ([None], ["a"], False), ([None], [None, None], False), (["a"], ["a", "a"], False),
        (["a", "b"], ["b", "a"], True), (["a", "b"], ["b", "b"], False), ([None, None], [None, None], True),
        (["a", "b"], ["b"], True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_result_answers_an_unanswered_call(calls: list[Any], results: list[Any], good: bool, role: str) -> None:
    turns = [USER, _calls(*calls) if calls else ANSWER]
    turns += [{"role": role, "content": "r", **({"tool_call_id": i} if i else {})} for i in results]
    if good:
        assert [m.role for m in talk(*turns).messages[2:]] == ["tool"] * len(results)
        return
    with pytest.raises(BadRecordError) as caught:
        talk(*turns)
    assert caught.value.reason == "result without a call"
    assert "Write the call as tool_calls" in str(caught.value)


SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "given",
    [
        [SCHEMA],
        json.dumps([SCHEMA]),
        [json.dumps(SCHEMA)],
        [SCHEMA["function"]],
        [{"name": "f", "input_schema": {}}],
        [{"type": "function", "name": "f", "parameters": {}}],
    ],
    ids=["list", "json", "list of json", "bare", "anthropic", "responses"],
)
@pytest.mark.parametrize("key", ["tools", "functions"])
def test_tools_are_a_list_or_a_json_string_of_one(given: Any, key: str) -> None:
    assert talk(USER, ANSWER, **{key: given}).tools == (SCHEMA,)


@pytest.mark.parametrize("given", [3, {"name": "f"}, ["f"], [{}], [{"function": {}}], "f", "[1]"])
def test_malformed_tools_are_rejected(given: Any) -> None:
    with pytest.raises(BadRecordError) as caught:
        talk(USER, ANSWER, tools=given)
    assert caught.value.reason == "bad tools"


# Reasoning, weights


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_three_names_and_may_replace_the_content(key: str) -> None:
    assert talk(USER, {**ANSWER, key: "t"}).messages[1] == Message("assistant", "b", "t")
    assert talk(USER, {"role": "assistant", "content": None, key: "t"}).messages[1] == Message("assistant", "", "t")
    with pytest.raises(BadRecordError, match=key):
        talk(USER, {**ANSWER, key: 3})


def test_reasoning_under_two_names_must_be_equal() -> None:
    assert talk({**ANSWER, "reasoning": "t", "thinking": "t"}).messages[0].reasoning == "t"
    with pytest.raises(BadRecordError, match="reasoning and thinking, which differ"):
        talk({**ANSWER, "reasoning": "t", "thinking": "u"})


@pytest.mark.parametrize(
    ("turn", "train"),
    [
        ({**ANSWER, "weight": 0}, False), ({**ANSWER, "weight": 1}, None), ({**ANSWER, "weight": 1.0}, None),
        ({**ANSWER, "train": False}, False), ({**ANSWER, "train": True}, None), ({**USER, "weight": 0}, False),
        ({**USER, "train": False}, False), ({**ANSWER, "weight": 0, "train": False}, False),
        ({**ANSWER, "weight": None, "train": None}, None),
    ],
)  # fmt: skip
def test_weight_and_train_set_the_train_flag(turn: dict[str, Any], train: bool | None) -> None:
    assert talk(turn).messages[0].train is train


@pytest.mark.parametrize(
    "turn",
    [
        {**ANSWER, "weight": 0.5}, {**ANSWER, "weight": 2}, {**ANSWER, "weight": "1"}, {**ANSWER, "weight": True},
        {**ANSWER, "train": 1}, {**ANSWER, "train": "no"}, {**ANSWER, "weight": 1, "train": False},
        {**USER, "weight": 1}, {**USER, "train": True}, {**ANSWER, "loss": False}, {**ANSWER, "training": True},
        {**ANSWER, "masked": True}, {**USER, "loss_weight": 0.0},
    ],
)  # fmt: skip
def test_an_unsupported_weight_is_rejected(turn: dict[str, Any]) -> None:
    with pytest.raises(BadRecordError) as caught:
        talk(turn)
    assert caught.value.reason == "bad weight"


def test_a_record_has_no_weight() -> None:
    assert talk(ANSWER, weight=1, train=True).messages
    for more in ({"weight": 2}, {"weight": 0}, {"train": False}):
        with pytest.raises(BadRecordError, match="do not apply to a whole record"):
            talk(ANSWER, **more)


def test_text_parts_of_bedrock_have_no_type() -> None:
    """As in Converse: {"text": "…"} is a text, and a call is named."""
    turns = [{"role": "user", "content": [{"text": "Q"}, {"text": "?", "image": None}]},
             {"role": "assistant", "content": [{"text": "A."}]}]  # fmt: skip
    names = {"messages": "messages", "role": "role", "content": "content"}
    parsed = parse_messages({"system": [{"text": "S."}], "messages": turns}, names, Origin("a.jsonl", 1))
    assert [message.content for message in parsed.messages] == ["S.", "Q?", "A."]
    turns[1]["content"] = [{"text": "A."}, {"toolUse": {"name": "f", "input": {}}}]
    with pytest.raises(BadRecordError, match=r"not toolUse; write thinking as reasoning, tool_use as"):
        parse_messages({"messages": turns}, names, Origin("a.jsonl", 1))
