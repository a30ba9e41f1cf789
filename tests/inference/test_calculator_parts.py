"""nanochat's parts in one assistant turn: text and calls are learned, the calculator's outputs are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tool_template import TOOL_TEMPLATE

from whet.core.errors import BadRecordError
from whet.data.conversation import CALCULATOR_SCHEMA, Conversation, Message, Origin
from whet.data.read.records.messages import parse_messages
from whet.data.render.renderer import Rendered, Renderer
from whet.inference.calculator_tool import InlineCalculator, calculate, make_calculator
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer
from whet.tokenizer.named_templates import INLINE_CALL_TOKENS, NAMED_TEMPLATES, set_named_template

NAMES = {"messages": "messages", "role": "role", "content": "content"}
PARTS = [
    {"type": "text", "text": "Half of it: "},
    {"type": "text", "text": "let me see. "},
    {"type": "python", "text": "48/2"},
    {"type": "python_output", "text": "24"},
    {"type": "text", "text": "24, and twice: "},
    {"type": "python", "text": "'calculator'.count('c')"},
    {"type": "python_output", "text": "2"},
    {"type": "text", "text": "2\n#### 48"},
]


def record(parts: Any = PARTS, **more: Any) -> dict[str, Any]:
    turns = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "What is half of 48?"},
        {"role": "assistant", "content": parts, **more},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "You are welcome."},
    ]
    return {"messages": turns}


def parse(raw: dict[str, Any]) -> Conversation:
    return parse_messages(raw, NAMES, Origin("x", 1))


@pytest.fixture
def nanochat() -> Renderer:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny", add_tokens=list(NAMED_TEMPLATES["nanochat"].tokens)))
    set_named_template(tokenizer, "nanochat")
    return Renderer(tokenizer, "assistant")


def nanochat_reference(tokenizer: Any, raw: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and mask, part by part; neighbouring text parts are one text."""
    pieces: list[tuple[str, int]] = []
    system = ""
    for turn in raw["messages"]:
        content = turn["content"]
        if turn["role"] == "system":
            system = content + "\n\n"
        elif turn["role"] == "user":
            pieces += [("<|user_start|>", 0), (system + content, 0), ("<|user_end|>", 0)]
            system = ""
        else:
            pieces.append(("<|assistant_start|>", 0))
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                kind, text = part["type"], part["text"]
                if kind == "text" and pieces[-1][1] == 1 and not pieces[-1][0].endswith("|>"):
                    pieces[-1] = (pieces[-1][0] + text, 1)
                elif kind == "text":
                    pieces.append((text, 1))
                elif kind == "python":
                    pieces += [("<|python_start|>", 1), (text, 1), ("<|python_end|>", 1)]
                else:
                    pieces += [("<|output_start|>", 0), (text, 0), ("<|output_end|>", 0)]
            pieces.append(("<|assistant_end|>", 1))
    ids, mask = [], []
    for text, learned in pieces:
        found = tokenizer.encode(text, add_special_tokens=False)
        ids += found
        mask += [learned] * len(found)
    return ids, mask


def test_ids_and_mask_are_nanochat_s(nanochat: Renderer) -> None:
    conversation = parse(record())
    (rendered,) = nanochat.render_items([conversation])
    assert isinstance(rendered, Rendered), rendered
    ids, mask = nanochat_reference(nanochat.tokenizer, record())
    assert rendered.ids.tolist() == ids == nanochat.text.reference_ids(conversation)
    assert rendered.loss.tolist() == mask
    assert rendered.supervises_end
    assert rendered.notes == ()  # the calculator's schema has no place in this form


def test_a_template_with_tools_gets_calls_and_results() -> None:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    tokenizer.chat_template = TOOL_TEMPLATE
    conversation = parse(record())
    assert conversation.tools == (CALCULATOR_SCHEMA,)
    (rendered,) = Renderer(tokenizer, "assistant").render_items([conversation])
    assert isinstance(rendered, Rendered), rendered
    learned = tokenizer.decode(rendered.ids[rendered.loss == 1])
    assert learned == (
        'Half of it: let me see. <tool_call>\n{"name": "calculator", "arguments": {"expression": "48/2"}}\n'
        '</tool_call><|im_end|>24, and twice: <tool_call>\n{"name": "calculator", "arguments": {"expression": '
        "\"'calculator'.count('c')\"}}\n</tool_call><|im_end|>2\n#### 48<|im_end|>You are welcome.<|im_end|>"
    )


def test_the_engine_inserts_what_training_has(nanochat: Renderer) -> None:
    """The calculator, fed with the supervised tokens alone, completes the turn of the training data."""
    conversation = parse(record())
    (rendered,) = nanochat.render_items([conversation])
    assert isinstance(rendered, Rendered)
    prompt = nanochat.prompt_ids(conversation.messages[:2])
    end = rendered.ids.tolist().index(nanochat.end_of_turn())
    calculator = make_calculator(nanochat)
    assert isinstance(calculator, InlineCalculator)
    state, completion = calculator.new_state(), []
    for token, learned in zip(rendered.ids[len(prompt) : end], rendered.loss[len(prompt) : end], strict=True):
        if learned:
            completion.append(int(token))
            inserted = list(state.observe(int(token)))
            completion += inserted
            assert not any(state.observe(each) for each in inserted)
    assert prompt == rendered.ids[: len(prompt)].tolist()
    assert completion == rendered.ids[len(prompt) : end].tolist()
    text = nanochat.decode_answer(completion, skip_special_tokens=False)
    assert calculator.split_reply(text) == conversation.messages[2:7]


def test_a_turn_excluded_from_training_is_excluded_with_its_calls(nanochat: Renderer) -> None:
    (rendered,) = nanochat.render_items([parse(record(weight=0))])
    assert isinstance(rendered, Rendered)
    assert nanochat.tokenizer.decode(rendered.ids[rendered.loss == 1]) == "You are welcome.<|assistant_end|>"


def test_reasoning_belongs_to_the_first_part_of_the_turn() -> None:
    messages = parse(record(reasoning="Hm.")).messages
    assert [message.reasoning for message in messages if message.role == "assistant"] == ["Hm.", "", "", ""]


def test_calls_are_numbered_through_the_conversation() -> None:
    raw = record()
    raw["messages"] += [{"role": "user", "content": "Again"}, {"role": "assistant", "content": PARTS}]
    calls = [call.id for message in parse(raw).messages for call in message.tool_calls]
    assert calls == ["call00001", "call00002", "call00003", "call00004"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (PARTS[:3], "ends with a calculation"),
        (PARTS[:4], "ends with a calculation"),
        ([PARTS[2], PARTS[0]], "the part after it must be the python_output"),
        ([PARTS[3], PARTS[0]], "the part after it must be the python_output"),
        ([{"type": "python", "text": " "}, *PARTS[3:]], "needs an expression"),
        ([*PARTS, {"type": "image", "url": "x"}], "not {'type': 'image'"),
        ([*PARTS, {"type": "text"}], "a part must be"),
    ],
)
def test_parts_that_make_no_turn_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(BadRecordError) as raised:
        parse(record(parts))
    assert message in str(raised.value)
    assert "message 3: 'content'" in str(raised.value)


def test_only_the_assistant_calculates() -> None:
    with pytest.raises(BadRecordError, match="only an assistant turn without tool_calls"):
        parse({"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "Hi"}]})


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "a?"), *parse(record()).messages[2:4], ("user", "b?"), ("assistant", "c")],
        [("user", "a?"), parse(record()).messages[2], ("user", "b?"), ("assistant", "c")],
    ],
    ids=["no answer", "no result"],
)
def test_an_open_turn_is_refused(messages: list[Any], nanochat: Renderer) -> None:
    turns = tuple(Message(*each) if isinstance(each, tuple) else each for each in messages)
    (rendered,) = nanochat.render_items([Conversation(turns, Origin("x", 1))])
    assert isinstance(rendered, BadRecordError)
    assert "no result, or no answer follows" in str(rendered)


def test_a_tokenizer_with_the_tokens_and_a_template_with_tools_calls_as_the_template_does(nanochat: Renderer) -> None:
    nanochat.tokenizer.chat_template = TOOL_TEMPLATE
    assert not isinstance(make_calculator(Renderer(nanochat.tokenizer, "assistant")), InlineCalculator)


def test_the_spelling_bee_counts_by_hand_and_verifies_by_a_call(tmp_path: Path, nanochat: Renderer) -> None:
    from whet.data.builtin import generate_spelling_bee

    plain, calling = generate_spelling_bee("train"), generate_spelling_bee("train", "calls")
    items = []
    for _ in range(50):
        (question, answer), (other, called, result, last) = next(plain).messages, next(calling).messages
        assert question == other
        text, _, count = answer.content.rpartition("\n#### ")
        assert called.content == f"{text}\nChecking this with Python: "
        assert calculate(called.tool_calls[0].arguments["expression"]) == result.content == count  # type: ignore[index]
        assert last.content == f"{count}\n#### {count}"
        items.append(Conversation((other, called, result, last), Origin("x", 1), (CALCULATOR_SCHEMA,)))
    for rendered in nanochat.render_items(items):
        assert isinstance(rendered, Rendered), rendered
        opening = nanochat.tokenizer.convert_tokens_to_ids(INLINE_CALL_TOKENS[2])
        closing = nanochat.tokenizer.convert_tokens_to_ids(INLINE_CALL_TOKENS[3])
        (first,), (last_,) = (np.flatnonzero(rendered.ids == each) for each in (opening, closing))
        assert not rendered.loss[first : last_ + 1].any()
        assert rendered.loss[last_ + 1 :].all()


def test_a_file_of_parts_is_detected_and_read(whet: Any, tmp_path: Path) -> None:
    """As nanochat's identity_conversations.jsonl: each line is a list of messages."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record()["messages"]) + "\n" for _ in range(3)))
    recipe = {
        "model": {"path": "builtin:tiny"},
        "data": {"sources": [{"path": str(tmp_path / "a.jsonl")}], "template": "nanochat", "max_length": 512},
        "train": {"steps": 1, "batch": {"conversations": 2}, "optimizer": {"lr": 1e-3}},
    }
    (tmp_path / "a.yaml").write_text(json.dumps(recipe))
    ended = whet("prepare", tmp_path / "a.yaml", "--json")
    assert ended.code == 0, ended.err
    assert '"kept": 3' in ended.out
