"""Record formats by example; `messages` has tests of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import BadRecordError
from whet.data.conversation import CALCULATOR_SCHEMA, Conversation, MarkedText, Message, Origin, PlainText, ToolCall
from whet.data.read.records.formats import FORMATS, parser_of

from .test_messages import JSON

HERE = Origin("a.jsonl", 7)
Turns = list[tuple[str, str]]


def parse(name: str, record: Any, calculator: str = "remove", **names: str) -> Any:
    return parser_of(name, calculator)(record, FORMATS[name].resolve_names(names), HERE)


def turns(name: str, record: Any, **names: str) -> Turns:
    return [(message.role, message.content) for message in parse(name, record, **names).messages]


def rejection(name: str, record: Any, **options: str) -> tuple[str, str]:
    with pytest.raises(BadRecordError) as caught:
        parse(name, record, **options)
    return caught.value.reason, str(caught.value)


# sharegpt


def sharegpt(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns], **more}


@pytest.mark.parametrize(
    ("speaker", "role"),
    [("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"), ("chatgpt", "assistant"),
     ("model", "assistant"), ("bot", "assistant"), ("system", "system")],
)  # fmt: skip
def test_sharegpt_speakers(speaker: str, role: str) -> None:
    assert turns("sharegpt", sharegpt((speaker, " a "))) == [(role, " a ")]


def test_sharegpt_system_and_tools_are_fields_of_the_record() -> None:
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
    ("record", "reason", "message"),
    [
        (3, "not an object", "a number"),
        ({}, "no messages", "'conversations'"),
        ({"conversations": []}, "no messages", "an empty list"),
        ({"conversations": [3]}, "bad message", "message 1"),
        ({"conversations": [{"value": "a"}]}, "no role", "message 1"),
        (sharegpt(("alien", "a")), "unknown role", "'alien'"),
        (sharegpt((3, "a")), "unknown role", "3"),  # type: ignore[arg-type]
        (sharegpt(("human", "a"), ("gpt", " ")), "empty turn", "message 2"),
        (sharegpt(("human", None)), "bad content", "message 1"),
        (sharegpt(("function_call", "f()")), "broken JSON", "message 1"),
        (sharegpt(("function_call", "[]")), "bad tool call", "message 1"),
        (sharegpt(("function_call", {"name": "f"})), "bad content", "message 1"),
        (sharegpt(("observation", "a")), "result without a call", "message 1"),
        (sharegpt(("system", "a"), ("human", "b"), system="c"), "two system messages", "'system' is 'c' and message 1"),
    ],
)
def test_sharegpt_rejects(record: Any, reason: str, message: str) -> None:
    found = rejection("sharegpt", record)
    assert found[0] == reason
    assert message in found[1]


# alpaca


def test_alpaca_joins_instruction_and_input_by_a_blank_line() -> None:
    record = {"instruction": "Sum up.", "input": "A text.", "output": "Short."}
    assert turns("alpaca", record) == [("user", "Sum up.\n\nA text."), ("assistant", "Short.")]
    assert turns("alpaca", {**record, "input": ""})[0] == ("user", "Sum up.")
    assert turns("alpaca", {**record, "input": None})[0] == ("user", "Sum up.")
    assert turns("alpaca", {**record, "instruction": ""})[0] == ("user", "A text.")


def test_alpaca_has_a_history_and_a_system_message() -> None:
    record = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"}
    expected = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert turns("alpaca", record) == expected
    assert turns("alpaca", {**record, "history": '[["a", "b"]]'}) == expected
    assert turns("alpaca", {**record, "history": [], "system": ""}) == expected[3:]


@pytest.mark.parametrize(
    ("record", "reason", "message"),
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
def test_alpaca_rejects(record: Any, reason: str, message: str) -> None:
    found = rejection("alpaca", record)
    assert found[0] == reason
    assert message in found[1]


# prompt-completion


def test_a_prompt_and_a_completion_are_two_turns() -> None:
    assert turns("prompt-completion", {"prompt": "a", "completion": "b"}) == [("user", "a"), ("assistant", "b")]
    named = turns("prompt-completion", {"q": "a", "a": "b", "system": "s"}, prompt="q", completion="a")
    assert named == [("system", "s"), ("user", "a"), ("assistant", "b")]


def test_assistant_turns_of_a_prompt_are_not_supervised() -> None:
    prompt = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    parsed = parse("prompt-completion", {"prompt": prompt, "completion": [{"role": "assistant", "content": "b"}]})
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
def test_prompt_completion_rejects(record: Any, reason: str) -> None:
    assert rejection("prompt-completion", record)[0] == reason


# text, marked


def test_text_keeps_its_white_space() -> None:
    assert parse("text", {"text": " a\n"}) == PlainText(" a\n", HERE)
    assert parse("text", " a\n") == PlainText(" a\n", HERE)
    assert parse("text", {"body": "a"}, text="body") == PlainText("a", HERE)
    assert parse("marked", {"text": "<<<|user|>>>a<<<|user|>>>"}) == MarkedText("<<<|user|>>>a<<<|user|>>>", HERE)
    for record in ({"text": ""}, {"text": " "}, "", {"text": 3}, {}, 3, {"text": "\0"}):
        rejection("text", record)
        rejection("marked", record)


# gsm8k

ANNOTATED = {"question": "How many?", "answer": "He has 48/2 = <<48/2=24>>24.\nAll: <<48+24=72>>72.\n#### 72"}


def test_gsm8k_without_annotations() -> None:
    assert turns("gsm8k", ANNOTATED) == [("user", "How many?"), ("assistant", "He has 48/2 = 24.\nAll: 72.\n#### 72")]


def test_gsm8k_with_calls() -> None:
    parsed = parse("gsm8k", ANNOTATED, "calls")
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
    plain = parse("gsm8k", {**ANNOTATED, "answer": "Five.\n#### 5"}, "calls")
    assert (len(plain.messages), plain.tools) == (2, (CALCULATOR_SCHEMA,))


def test_gsm8k_with_calls_has_the_same_text_as_without() -> None:
    text = "".join(m.content for m in parse("gsm8k", ANNOTATED, "calls").messages if m.role == "assistant")
    assert text == turns("gsm8k", ANNOTATED)[1][1]


@pytest.mark.parametrize(
    ("change", "calculator", "reason"),
    [
        ({"answer": "72"}, "remove", "no result"), ({"answer": "#### "}, "remove", "no result"),
        ({"answer": "#### 72\nSo."}, "remove", "no result"), ({"answer": None}, "remove", "missing field"),
        ({"answer": "<<48/2>>24\n#### 24"}, "calls", "bad sum"), ({"answer": "<<=3>>3\n#### 3"}, "calls", "bad sum"),
        ({"question": ""}, "remove", "empty text"),
    ],
)  # fmt: skip
def test_gsm8k_rejects(change: dict[str, Any], calculator: str, reason: str) -> None:
    assert rejection("gsm8k", {**ANNOTATED, **change}, calculator=calculator)[0] == reason


# multiple-choice

MMLU = {"question": "Which?", "choices": ["one", "two", "three"], "answer": 1, "subject": "counting"}
ARC = {"question": "Which?", "choices": {"text": ["one", "two", "three"], "label": ["1", "2", "3"]}, "answerKey": "2"}


def test_choices_are_lettered_and_the_answer_is_a_letter() -> None:
    prompt = "Which?\n\n- A) one\n- B) two\n- C) three\n\nAnswer with the letter of the right choice only."
    for record, names in ((MMLU, {}), ({**MMLU, "answer": "B"}, {}), (ARC, {"answer": "answerKey"})):
        assert turns("multiple-choice", record, **names) == [("user", prompt), ("assistant", "B")]
    in_text = {**MMLU, "choices": json.dumps(MMLU["choices"])}
    assert turns("multiple-choice", in_text)[0] == ("user", prompt)


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
def test_multiple_choice_rejects(record: Any, reason: str) -> None:
    assert rejection("multiple-choice", record)[0] == reason


# Every format

FIELD_NAMES = sorted({name for known in FORMATS.values() for names in known.fields.values() for name in names})
NEAR = st.dictionaries(
    st.sampled_from(FIELD_NAMES),
    JSON | st.lists(st.dictionaries(st.sampled_from(["from", "value", "role", "content"]), JSON | st.just("human"))),
    max_size=4,
)


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(sorted(FORMATS)), JSON | NEAR, st.sampled_from(["calls", "remove"]))
def test_any_json_is_a_document_or_a_reason(name: str, record: Any, calculator: str) -> None:
    try:
        parsed = parse(name, record, calculator)
    except BadRecordError as error:
        found = (error.reason, str(error))
        assert all(found)
        return
    assert parsed.origin == HERE
    if isinstance(parsed, Conversation):
        assert all(isinstance(message.content, str) for message in parsed.messages)
        json.dumps([message.as_dict() for message in parsed.messages], ensure_ascii=False, allow_nan=False).encode()
