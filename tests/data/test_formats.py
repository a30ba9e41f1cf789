"""Formats by example; `messages` has its own tests (test_conversation)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.core.errors import BadRecordError
from whet.data.calculator import CALCULATOR_SCHEMA
from whet.data.conversation import Conversation, MarkedText, Message, Origin, PlainText, ToolCall
from whet.data.read.formats import FORMATS, parser_of

from .test_conversation import JSON

HERE = Origin("a.jsonl", 7)
Turns = list[tuple[str, str]]


def parse(name: str, record: Any, calculator: str = "remove", **names: str) -> Any:
    return parser_of(name, calculator)(record, FORMATS[name].resolve_names(names), HERE)


def turns(name: str, record: Any, **names: str) -> Turns:
    return [(message.role, message.content) for message in parse(name, record, **names).messages]


def refused(name: str, record: Any, **options: str) -> tuple[str, str]:
    with pytest.raises(BadRecordError) as caught:
        parse(name, record, **options)
    return caught.value.reason, str(caught.value)


# sharegpt


def sharegpt(*said: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in said], **more}


@pytest.mark.parametrize(
    ("speaker", "role"),
    [("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"), ("chatgpt", "assistant"),
     ("model", "assistant"), ("bot", "assistant"), ("system", "system")],
)  # fmt: skip
def test_sharegpt_speakers(speaker: str, role: str) -> None:
    assert turns("sharegpt", sharegpt((speaker, " a "))) == [(role, " a ")]


def test_sharegpt_systems_and_tools_stand_in_the_record() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    parsed = parse("sharegpt", sharegpt(("human", "a"), ("gpt", "b"), system="s", tools=json.dumps([tool])))
    assert [m.role for m in parsed.messages] == ["system", "user", "assistant"]
    assert parsed.tools == (tool,)
    assert turns("sharegpt", sharegpt(("human", "a"), system="", tools="")) == [("user", "a")]


@pytest.mark.parametrize("speaker", ["observation", "tool", "function_response"])
def test_sharegpt_calls_and_results(speaker: str) -> None:
    call = '{"name": "f", "arguments": {"n": 1}}'
    record = sharegpt(("human", "a"), ("function_call", call), (speaker, "2"), ("gpt", "b"))
    messages = parse("sharegpt", record).messages
    assert messages[1] == Message("assistant", "", tool_calls=(ToolCall("f", {"n": 1}),))
    assert messages[2] == Message("tool", "2")
    both = parse("sharegpt", sharegpt(("human", "a"), ("function_call", f"[{call}, {call}]"))).messages[1]
    assert len(both.tool_calls) == 2


def test_sharegpt_weights() -> None:
    record = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]}
    assert parse("sharegpt", record).messages[1].train is False


def test_sharegpt_fields_can_have_other_names() -> None:
    record = {"log": [{"who": "human", "text": "a"}], "sys": "s"}
    names = {"conversations": "log", "from": "who", "value": "text", "system": "sys"}
    assert turns("sharegpt", record, **names) == [("system", "s"), ("user", "a")]


@pytest.mark.parametrize(
    ("record", "reason", "says"),
    [
        (3, "not an object", "a number"),
        ({}, "no messages", "'conversations'"),
        ({"conversations": []}, "no messages", "an empty list"),
        ({"conversations": [3]}, "bad message", "message 1"),
        ({"conversations": [{"value": "a"}]}, "no role", "message 1"),
        (sharegpt(("alien", "a")), "unknown role", "'alien'"),
        (sharegpt((3, "a")), "unknown role", "3"),  # type: ignore[arg-type]
        (sharegpt(("human", "a"), ("gpt", " ")), "empty text", "message 2"),
        (sharegpt(("human", None)), "bad content", "message 1"),
        (sharegpt(("function_call", "f()")), "broken JSON", "message 1"),
        (sharegpt(("function_call", "[]")), "bad tool call", "message 1"),
        (sharegpt(("function_call", {"name": "f"})), "bad content", "message 1"),
        (sharegpt(("observation", "a")), "result without a call", "message 1"),
        (sharegpt(("system", "a"), ("human", "b"), system="c"), "two system messages", "message 2"),
    ],
)
def test_sharegpt_refuses(record: Any, reason: str, says: str) -> None:
    told = refused("sharegpt", record)
    assert told[0] == reason
    assert says in told[1]


# alpaca


def test_alpaca_joins_instruction_and_input_by_a_blank_line() -> None:
    record = {"instruction": "Sum up.", "input": "A text.", "output": "Short."}
    assert turns("alpaca", record) == [("user", "Sum up.\n\nA text."), ("assistant", "Short.")]
    assert turns("alpaca", {**record, "input": ""})[0] == ("user", "Sum up.")
    assert turns("alpaca", {**record, "input": None})[0] == ("user", "Sum up.")
    assert turns("alpaca", {**record, "instruction": ""})[0] == ("user", "A text.")


def test_alpaca_has_a_history_and_a_system_message() -> None:
    record = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"}
    told = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert turns("alpaca", record) == told
    assert turns("alpaca", {**record, "history": '[["a", "b"]]'}) == told
    assert turns("alpaca", {**record, "history": [], "system": ""}) == told[3:]


@pytest.mark.parametrize(
    ("record", "reason", "says"),
    [
        ([], "not an object", "instruction"),
        ({"output": "b"}, "missing field", "'instruction' (it has 'output')"),
        ({"instruction": "a"}, "missing field", "'output'"),
        ({"instruction": "a", "output": ""}, "empty text", "'output' is empty"),
        ({"instruction": " ", "input": "", "output": "a"}, "empty text", "'instruction'"),
        ({"instruction": "a", "output": 3}, "bad content", "'output' must be text, not a number"),
        ({"instruction": "a", "input": [1], "output": "b"}, "bad content", "'input'"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "bad history", "pairs"),
        ({"instruction": "a", "output": "b", "history": [["c", ""]]}, "empty text", "answer 1 of 'history'"),
        ({"instruction": "a", "output": "\ud800"}, "bad text", "surrogate"),
    ],
)
def test_alpaca_refuses(record: Any, reason: str, says: str) -> None:
    told = refused("alpaca", record)
    assert told[0] == reason
    assert says in told[1]


# prompt-completion


def test_a_prompt_and_a_completion_are_two_turns() -> None:
    assert turns("prompt-completion", {"prompt": "a", "completion": "b"}) == [("user", "a"), ("assistant", "b")]
    named = turns("prompt-completion", {"q": "a", "a": "b", "system": "s"}, prompt="q", completion="a")
    assert named == [("system", "s"), ("user", "a"), ("assistant", "b")]


def test_prompts_that_are_messages_are_not_learned() -> None:
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    parsed = parse("prompt-completion", {"prompt": said, "completion": [{"role": "assistant", "content": "b"}]})
    assert [(m.role, m.train) for m in parsed.messages] == [
        ("user", None), ("assistant", False), ("user", None), ("assistant", None),
    ]  # fmt: skip


def test_a_completion_may_answer_a_call_of_the_prompt() -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    completion = [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "b"}]
    assert len(parse("prompt-completion", {"prompt": prompt, "completion": completion}).messages) == 4


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a"}, "missing field"),
        ({"prompt": "", "completion": "b"}, "empty text"),
        ({"prompt": "a", "completion": 3}, "bad content"),
        ({"prompt": [], "completion": "b"}, "bad content"),
        ({"prompt": [3], "completion": "b"}, "bad message"),
        ({"prompt": "a", "completion": [{"role": "system", "content": "b"}]}, "system message not first"),
    ],
)
def test_prompt_completion_refuses(record: Any, reason: str) -> None:
    assert refused("prompt-completion", record)[0] == reason


# text, marked


def test_text_is_kept_to_the_last_space() -> None:
    assert parse("text", {"text": " a\n"}) == PlainText(" a\n", HERE)
    assert parse("text", " a\n") == PlainText(" a\n", HERE)
    assert parse("text", {"body": "a"}, text="body") == PlainText("a", HERE)
    assert parse("marked", {"text": "<<<|user|>>>a<<<|user|>>>"}) == MarkedText("<<<|user|>>>a<<<|user|>>>", HERE)
    for record in ({"text": ""}, {"text": " "}, "", {"text": 3}, {}, 3, {"text": "\0"}):
        refused("text", record)
        refused("marked", record)


# gsm8k

SUMS = {"question": "How many?", "answer": "He has 48/2 = <<48/2=24>>24.\nAll: <<48+24=72>>72.\n#### 72"}


def test_gsm8k_without_its_marks() -> None:
    assert turns("gsm8k", SUMS) == [("user", "How many?"), ("assistant", "He has 48/2 = 24.\nAll: 72.\n#### 72")]


def test_gsm8k_with_calls() -> None:
    parsed = parse("gsm8k", SUMS, "calls")
    first, second = (
        ToolCall("calculator", {"expression": e}, i) for e, i in (("48/2", "call00001"), ("48+24", "call00002"))
    )
    assert parsed.messages == (
        Message("user", "How many?"),
        Message("assistant", "He has 48/2 = ", tool_calls=(first,)),
        Message("tool", "24", tool_call_id="call00001", name="calculator"),
        Message("assistant", "24.\nAll: ", tool_calls=(second,)),
        Message("tool", "72", tool_call_id="call00002", name="calculator"),
        Message("assistant", "72.\n#### 72"),
    )
    assert parsed.tools == (CALCULATOR_SCHEMA,)
    plain = parse("gsm8k", {**SUMS, "answer": "Five.\n#### 5"}, "calls")
    assert (len(plain.messages), plain.tools) == (2, (CALCULATOR_SCHEMA,))


def test_gsm8k_with_calls_says_the_same_as_without() -> None:
    said = "".join(m.content for m in parse("gsm8k", SUMS, "calls").messages if m.role == "assistant")
    assert said == turns("gsm8k", SUMS)[1][1]


@pytest.mark.parametrize(
    ("change", "calculator", "reason"),
    [
        ({"answer": "72"}, "remove", "no result"), ({"answer": "#### "}, "remove", "no result"),
        ({"answer": "#### 72\nSo."}, "remove", "no result"), ({"answer": None}, "remove", "missing field"),
        ({"answer": "<<48/2>>24\n#### 24"}, "calls", "bad sum"), ({"answer": "<<=3>>3\n#### 3"}, "calls", "bad sum"),
        ({"question": ""}, "remove", "empty text"),
    ],
)  # fmt: skip
def test_gsm8k_refuses(change: dict[str, Any], calculator: str, reason: str) -> None:
    assert refused("gsm8k", {**SUMS, **change}, calculator=calculator)[0] == reason


# multiple-choice

MMLU = {"question": "Which?", "choices": ["one", "two", "three"], "answer": 1, "subject": "counting"}
ARC = {"question": "Which?", "choices": {"text": ["one", "two", "three"], "label": ["1", "2", "3"]}, "answerKey": "2"}


def test_choices_are_lettered_and_the_answer_is_a_letter() -> None:
    asked = "Which?\n\n- A) one\n- B) two\n- C) three\n\nAnswer with the letter of the right choice only."
    for record, names in ((MMLU, {}), ({**MMLU, "answer": "B"}, {}), (ARC, {"answer": "answerKey"})):
        assert turns("multiple-choice", record, **names) == [("user", asked), ("assistant", "B")]
    in_text = {**MMLU, "choices": json.dumps(MMLU["choices"])}
    assert turns("multiple-choice", in_text)[0] == ("user", asked)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({**MMLU, "answer": 3}, "bad answer"), ({**MMLU, "answer": -1}, "bad answer"),
        ({**MMLU, "answer": "D"}, "bad answer"), ({**MMLU, "answer": "1"}, "bad answer"),
        ({**MMLU, "answer": True}, "bad answer"), ({**MMLU, "answer": ""}, "bad answer"),
        ({**MMLU, "answer": "AB"}, "bad answer"), ({**MMLU, "choices": ["one"]}, "bad choices"),
        ({**MMLU, "choices": ["a"] * 27}, "bad choices"), ({**MMLU, "choices": "one"}, "bad choices"),
        ({**MMLU, "choices": [1, 2]}, "bad content"), ({**MMLU, "choices": ["a", ""]}, "empty text"),
        ({**MMLU, "choices": {"text": ["a", "b"]}}, "bad choices"),
        ({**MMLU, "choices": {"text": ["a", "b"], "label": ["A", "A"]}, "answer": "A"}, "bad answer"),
        ({**MMLU, "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answer": 1}, "bad answer"),
        ({"question": "a"}, "missing field"),
    ],
)  # fmt: skip
def test_multiple_choice_refuses(record: Any, reason: str) -> None:
    assert refused("multiple-choice", record)[0] == reason


# Any format

FIELD_NAMES = sorted({name for known in FORMATS.values() for names in known.fields.values() for name in names})
NEAR = st.dictionaries(
    st.sampled_from(FIELD_NAMES),
    JSON | st.lists(st.dictionaries(st.sampled_from(["from", "value", "role", "content"]), JSON | st.just("human"))),
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), JSON | NEAR, st.sampled_from(["calls", "remove"]))
def test_any_json_is_a_document_or_a_reason(name: str, record: Any, calculator: str) -> None:
    try:
        parsed = parse(name, record, calculator)
    except BadRecordError as refusal:
        told = (refusal.reason, str(refusal))
        assert all(told)
        return
    assert parsed.origin == HERE
    if isinstance(parsed, Conversation):
        assert all(isinstance(message.content, str) for message in parsed.messages)
        json.dumps([message.as_dict() for message in parsed.messages], ensure_ascii=False, allow_nan=False).encode()
