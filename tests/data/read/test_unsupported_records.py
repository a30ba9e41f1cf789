"""Shapes of datasets found on the hub: each is read as it is meant, or refused by name with a remedy that works."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import BadRecordError, WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation, FilteredRecord, Origin, PlainText
from whet.data.read.detection import detect_format
from whet.data.read.records.formats import FORMATS
from whet.data.read.records.unsupported_records import reject_unsupported
from whet.data.read.sources import SourceReader, propose_source, read_source

Jsonl = Callable[..., Path]
USER, ANSWER = {"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}
HUMAN, GPT = {"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture
def read(jsonl: Jsonl) -> Callable[..., list[Any]]:
    def records(*records: Any, **options: Any) -> list[Any]:
        return list(read_source(Source(path=str(jsonl(*map(json.dumps, records))), **options)))

    return records


def turns(parsed: Any) -> list[tuple[str, str]]:
    assert isinstance(parsed, Conversation), parsed
    return [(message.role, message.content) for message in parsed.messages]


def refusal(read: Callable[..., list[Any]], *records: Any, **options: Any) -> str:
    with pytest.raises(WhetError) as caught:
        read(*records, **options)
    return str(caught.value)


def assert_never_guessed(jsonl: Jsonl, message: str, *records: Any) -> None:
    """`whet init` guesses columns by their names; what a known shape is takes precedence."""
    with pytest.raises(WhetError) as caught:
        propose_source(str(jsonl(*map(json.dumps, records))))
    assert str(caught.value) == message


def remedy(message: str) -> dict[str, Any]:
    """The options that a message tells the user to set."""
    options = dict(re.findall(r"(format): ([\w-]+)(?= and fields)", message))
    return {**options, "fields": yaml.safe_load(re.findall(r"fields: (\{[^}]*\})", message)[-1])}


# A system prompt, reasoning and tools beside the turns

PLAIN = [
    {"messages": [USER, ANSWER]},
    {"conversations": [HUMAN, GPT]},
    {"conversation": [USER, ANSWER]},
    {"instruction": "Q?", "output": "A."},
    {"prompt": "Q?", "completion": "A."},
    {"prompt": [USER], "completion": [ANSWER]},
    {"question": "Q?", "answer": "A."},
    {"text": "### Human: Q?### Assistant: A."},
]


@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message", "sys"])
@pytest.mark.parametrize("record", PLAIN, ids=lambda record: "-".join(record))
def test_a_system_prompt_beside_the_turns_is_the_system_message(read: Any, record: Any, key: str) -> None:
    several = read(record, {**record, key: "S."}, {**record, key: ""}, {**record, key: None})
    plain = [("user", "Q?"), ("assistant", "A.")]
    assert [turns(each) for each in several] == [plain, [("system", "S."), *plain], plain, plain]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_two_system_prompts_must_be_equal(read: Any, role: str) -> None:
    messages = [{"role": role, "content": "S."}, USER, ANSWER]
    same, other = read({"messages": messages, "system": "S."}, {"messages": messages, "system": "T."})
    assert turns(same)[0] == (role, "S.")
    assert len(same.messages) == 3
    assert (other.reason, other.explanation) == (
        "two system messages", "'system' is 'T.' and message 1 is another system message ('S.'); keep one",
    )  # fmt: skip


def test_a_system_prompt_under_two_names_is_ambiguous_and_fields_choose(read: Any) -> None:
    record = {"messages": [USER, ANSWER], "system": "S.", "system_prompt": "T."}
    assert "system and system_prompt may each be the field system" in refusal(read, record)
    late = read({"messages": [USER, ANSWER]}, *[{"messages": [USER, ANSWER]}] * 20, record)[-1]
    assert late.reason == "ambiguous field"
    for name, expected in (("system", "S."), ("system_prompt", "T.")):
        assert turns(read(record, fields={"system": name})[0])[0] == ("system", expected)
    assert turns(read(record, fields={"system": ""})[0]) == [("user", "Q?"), ("assistant", "A.")]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking", "cot", "rationale"])
@pytest.mark.parametrize("record", PLAIN, ids=lambda record: "-".join(record))
def test_reasoning_beside_the_answer_is_its_reasoning(read: Any, record: Any, key: str) -> None:
    [parsed] = read({**record, key: "Hm."})
    assert [message.reasoning for message in parsed.messages] == ["", "Hm."]
    assert turns(parsed) == [("user", "Q?"), ("assistant", "A.")]


def test_reasoning_that_belongs_to_no_one_answer_is_refused(read: Any) -> None:
    two, none, switch = read(
        {"messages": [USER, ANSWER, USER, ANSWER], "reasoning": "Hm."},
        {"messages": [USER], "reasoning": "Hm."},
        {"messages": [USER, ANSWER], "reasoning": "off"},
    )
    assert "'reasoning' and 2 answers" in two.explanation
    assert "'reasoning' and no answers" in none.explanation
    assert "'off', a switch" in switch.explanation
    [left_out] = read({"messages": [USER, ANSWER], "reasoning": "off"}, **remedy(switch.explanation))
    assert left_out.messages[1].reasoning == ""
    [context] = read({"prompt": [USER, ANSWER, USER], "completion": "A.", "reasoning": "Hm."})
    assert [message.reasoning for message in context.messages] == ["", "", "", "Hm."]


def test_reasoning_and_calls_in_sharegpt_turns(read: Any) -> None:
    [parsed] = read({"conversations": [HUMAN, {**GPT, "reasoning": "Hm.", "tool_calls": [{"name": "f"}]}]})
    assert parsed.messages[1].reasoning == "Hm."
    assert parsed.messages[1].tool_calls[0].name == "f"
    [called] = read(
        {
            "conversations": [
                HUMAN,
                {"from": "tool_call", "value": '{"name": "f"}'},
                {"from": "tool_response", "value": "1"},
            ]
        }
    )
    assert [message.role for message in called.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("key", ["tools", "functions"])
@pytest.mark.parametrize("record", PLAIN, ids=lambda record: "-".join(record))
def test_tools_beside_the_turns(read: Any, record: Any, key: str) -> None:
    assert read({**record, key: [TOOL]})[0].tools == (TOOL,)


def test_alpaca_finds_its_input_in_each_record(read: Any) -> None:
    parsed = read(*[{"instruction": "I.", "output": "A.", **more} for more in ({}, {"input": "X."}, {"context": "Y."})])
    assert [turns(each)[0][1] for each in parsed] == ["I.", "I.\n\nX.", "I.\n\nY."]


def test_the_description_names_what_is_used(jsonl: Jsonl) -> None:
    records = [{"messages": [USER, ANSWER], "system_prompt": "S."}, {"messages": [USER, ANSWER], "tools": [], "id": 1}]
    found = SourceReader(Source(path=str(jsonl(*map(json.dumps, records)))))
    assert str(found.description).endswith(
        ": messages (messages: role, content, system_prompt as system, tools); not used: id"
    )


# Images, audio, video


@pytest.mark.parametrize("key", ["image", "images", "image_url", "video", "audio"])
@pytest.mark.parametrize("record", [*PLAIN, {"text": "A cat."}], ids=lambda record: "-".join(record))
def test_media_beside_the_turns_are_refused(read: Any, record: Any, key: str) -> None:
    bad, good = read({**record, key: ["cat.jpg"]}, {**record, key: []})
    assert (bad.reason, f"'{key}'" in bad.explanation) == ("unsupported key", True)
    assert isinstance(good, Conversation | PlainText)


@pytest.mark.parametrize(
    "question",
    ["<image>\nWhat is it?", "What is it?\n<image>", "<video>What?", "Image 1: <image>\nImage-2: <image>\nWhich?",
     "<image> <image>", "What is it?\n<|image|>", "Picture 1: <img>\nWhat?", "<audio>\n"],
)  # fmt: skip
@pytest.mark.parametrize("make", [lambda q: {"conversations": [{**HUMAN, "value": q}, GPT]},
                                  lambda q: {"messages": [{**USER, "content": q}, ANSWER]},
                                  lambda q: {"instruction": q, "output": "A."}])  # fmt: skip
def test_marks_of_media_are_refused(read: Any, make: Any, question: str) -> None:
    [bad] = read(make(question))
    assert isinstance(bad, BadRecord)
    assert bad.reason == "image mark"


@pytest.mark.parametrize("text", ["What does <image> mean in SVG?", "<image href='a.png'/>", "a <b> c", "Use <audio>."])
def test_words_that_resemble_marks_are_kept(read: Any, text: str) -> None:
    [parsed] = read({"messages": [{**USER, "content": text}, {**ANSWER, "content": "<image>"}]})
    assert turns(parsed)[0] == ("user", text)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video", "image"])
def test_parts_and_messages_with_media_are_refused(read: Any, kind: str) -> None:
    parts = [{"type": kind, kind: {"url": "a"}}, {"type": "text", "text": "Q?"}]
    in_part, in_message, in_turn = read(
        {"messages": [{"role": "user", "content": parts}, ANSWER]},
        {"messages": [{**USER, "images": ["a.png"]}, ANSWER]},
        {"messages": [USER, ANSWER, {**USER, "audio": "a.wav"}]},
    )
    assert f"parts of type 'text', not {kind}" in in_part.explanation
    assert "message 1 has 'images'" in in_message.explanation
    assert "message 3 has 'audio'" in in_turn.explanation


# KTO


@pytest.mark.parametrize("record", PLAIN, ids=lambda record: "-".join(record))
@pytest.mark.parametrize(("good", "bad"), [(True, False), (1, 0), ("True", "False")])
def test_a_negative_label_is_refused_and_the_filter_keeps_the_good(read: Any, record: Any, good: Any, bad: Any) -> None:
    records = [{**record, "label": good}, {**record, "label": bad}]
    kept, refused = read(*records)
    assert isinstance(kept, Conversation)
    assert refused.reason == "negative label"
    where = refused.explanation.partition("where: ")[2].partition(";")[0]
    for filtered in (where, f"turns < 9 and {where}"):
        assert [type(each) for each in read(*records, where=filtered)] == [Conversation, FilteredRecord]
    assert all(isinstance(each, Conversation) for each in read(*records, **remedy(refused.explanation)))


def test_weights_of_whole_records_are_refused_in_every_format(read: Any) -> None:
    for record in PLAIN:
        for more in ({"weight": 0}, {"train": False}):
            assert read({**record, **more})[0].reason == "bad weight"


@pytest.mark.parametrize(("good", "bad"), [("1", "0"), ("True", "False"), ("1.0", "0.0"), ("", "0.5")])
@pytest.mark.parametrize("key", ["weight", "train", "desirable"])
def test_weights_and_labels_in_tables_are_numbers(tmp_path: Path, key: str, good: str, bad: str) -> None:
    """Every row with a weight of 1 was refused, and KTO's bad answers were learned where pandas writes 0.0."""
    path = tmp_path / "a.csv"
    path.write_text(f"question,answer,{key}\nQ?,A.,{good}\nQ?,A.,{bad}\n")
    first, second = read_source(Source(path=str(path)))
    assert turns(first) == [("user", "Q?"), ("assistant", "A.")]
    assert isinstance(second, Conversation if (key, bad) == ("desirable", "0.5") else BadRecord)


@pytest.mark.parametrize("key", ["loss_mask", "masked"])
def test_the_mask_of_another_tool_is_refused(read: Any, key: str) -> None:
    masked, good = read({"messages": [USER, ANSWER, USER, ANSWER], key: [0, 0, 0, 1]}, {"messages": [USER, ANSWER]})
    assert f"the record has {key!r}, a mask of its own" in masked.explanation
    assert isinstance(good, Conversation)
    assert read({"messages": [USER, ANSWER], key: "[0, 1]"})[0].reason == "bad weight"
    detail = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    [bad] = read({"conversations": [HUMAN, {**GPT, "train_detail": detail}]})
    assert "message 2 has train_detail: " in bad.explanation


@pytest.mark.parametrize(
    "more",
    [{"toolCalls": [{"name": "f"}]}, {"toolInvocations": [{"toolName": "f"}]}, {"tool_results": ["1"]},
     {"additional_kwargs": {"tool_calls": [{"name": "f"}]}}],
)  # fmt: skip
def test_calls_under_another_name_are_not_dropped(read: Any, more: Any) -> None:
    """The model would have learned to answer without the tool."""
    called, plain = read(*({"messages": [USER, {**ANSWER, **each}]} for each in (more, dict.fromkeys(more))))
    assert f"message 2 has {next(iter(more))!r}, which whet does not read" in called.explanation
    assert turns(plain) == [("user", "Q?"), ("assistant", "A.")]


@pytest.mark.parametrize("value", [[TOOL], json.dumps([TOOL["function"]])])
def test_tools_under_another_name_are_named(jsonl: Jsonl, read: Any, value: Any) -> None:
    record = {"messages": [USER, ANSWER], "available": value}
    told = str(SourceReader(Source(path=str(jsonl(json.dumps(record))))).description)
    assert "available holds tools; to use them, set fields: {tools: available}" in told
    assert len(read(record, **remedy(told))[0].tools) == 1


@pytest.mark.parametrize("key", ["question", "prompt", "passage"])
def test_the_question_beside_an_instruction_is_not_lost(read: Any, key: str) -> None:
    """Only the instruction was the question."""
    record = {"instruction": "Translate.", key: "Riga is a city.", "output": "a"}
    message = refusal(read, record)
    assert f"an instruction, an answer and {key!r}, which belongs to the question" in message
    for fixed in (remedy(message), {"format": "alpaca"}):
        [parsed] = read(record, **fixed)
        assert turns(parsed)[0] == ("user", "Translate.\n\nRiga is a city." if "fields" in fixed else "Translate.")
    assert "Write it into the input" in refusal(read, {**record, "input": "Into German."})
    assert "Write it into the input" in refusal(read, {"instruction": "Q?", "options": ["a", "b"], "output": "a"})
    for empty in ("", None, "manual.pdf", "Translate.", "Below is a task:\n\nTranslate.\n\nDo it."):
        assert len(turns(read({**record, key: empty})[0])) == 2
    assert isinstance(read(record | {key: ""}, [record])[1], BadRecord)


@pytest.mark.parametrize(
    "ask",
    [
        lambda asked, answer: {"instruction": asked, "output": answer},
        lambda asked, answer: {"question": asked, "answer": answer},
        lambda asked, answer: {"messages": [{**USER, "content": asked}, {**ANSWER, "content": answer}]},
    ],
)
def test_what_all_questions_lack_is_named(read: Any, ask: Any) -> None:
    """The reviews were not read: nothing in the question decided between the answers."""
    reviews = [f"The {n}. film of this series is one that I will not forget so soon." for n in range(4)]
    good = [ask("Good or bad?", "good" if n % 2 else "bad") | {"review": each} for n, each in enumerate(reviews)]
    message = refusal(read, *good)
    assert "all questions are the same, but the answers differ, and so does 'review'" in message
    if "messages" in good[0]:
        assert "Write it into the question" in message
        assert len(read(*good, format="messages")) == 4
    else:
        assert turns(read(*good, **remedy(message))[1])[0] == ("user", f"Good or bad?\n\n{reviews[1]}")
    for fine in (good[:2], [{**each, "review": reviews[0]} for each in good], [ask(r, "A.") for r in reviews]):
        assert len(read(*fine)) == len(fine)


@pytest.mark.system("jq")
def test_choices_that_are_counted_from_one_are_refused(read: Any) -> None:
    """With on_bad: skip, 4 of 4 was dropped, and the others were the choice after theirs."""
    records = [{"question": "Q?", "choices": ["a", "b", "c"], "answer": n} for n in (1, 3, 2)]
    message = refusal(read, *records)
    assert "'answer' counts the choices from 1, as 3 of 3 shows" in message
    [program] = re.findall(r"jq -c '(.*)' FILE > NEW.jsonl", message)
    done = subprocess.run(["jq", "-c", program], input=json.dumps(records), capture_output=True, text=True, check=True)
    assert [turns(each)[1][1] for each in read(*map(json.loads, done.stdout.splitlines()))] == ["A", "C", "B"]
    assert isinstance(read({**records[0], "answer": 0}, records[1])[1], BadRecord)


def test_the_name_of_a_document_is_no_passage(read: Any) -> None:
    """Question, answer and the file or category that they come from were refused."""
    for value in ("manual.pdf", "sales/faq-7.md#2", "billing"):
        assert turns(read({"question": "Q?", "answer": "A.", "document": value, "context": value})[0]) == ANSWERED
    for value in ("Riga is a city.", "里加是拉脱维亚的首都"):
        assert "belongs to the question" in refusal(read, {"question": "Q?", "answer": "A.", "document": value})


# Preference data

PREFERENCES = {
    "dpo": {"prompt": "Q?", "chosen": "A.", "rejected": "B."},
    "question": {"system": "S.", "question": "Q?", "chosen": "A.", "rejected": "B."},
    "alpaca": {"instruction": "Q?", "input": "", "chosen": "A.", "rejected": "B."},
    "conversational": {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "B."}]},
    "ultrafeedback": {"prompt": "Q?", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER], "messages": [USER, ANSWER],
                      "score_chosen": 9.0, "score_rejected": 1.0},
    "explicit prompt": {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
    "sharegpt": {"chosen": [HUMAN, GPT], "rejected": [HUMAN, GPT]},
    "llama-factory": {"conversations": [HUMAN], "chosen": GPT, "rejected": {**GPT, "value": "B."}},
    "messages": {"messages": [USER], "chosen": ANSWER, "rejected": ANSWER},
    "hh-rlhf": {"chosen": "\n\nHuman: Q?\n\nAssistant: A.", "rejected": "\n\nHuman: Q?\n\nAssistant: B."},
    "affixes": {"prompt": "Q?", "chosen_response": "A.", "rejected_response": "B.", "chosen-model": "x"},
    "one rejected": {"prompt": "Q?", "completion": "A.", "rejected": "B."},
    "ms-swift": {"messages": [USER, ANSWER], "rejected_response": "B."},
    "pairs": {"question": "Q?", "response_j": "A.", "response_k": "B.", "qid": 1},
    "several answers": {"question": "Q?", "answer1": "A.", "answer2": "B.", "answer3": "C."},
    "table": {"question": "Q?", "Answer 1": "A.", "Answer 2": "B."},
    "safe-rlhf": {"prompt": "Q?", "response_0": "A.", "response_1": "B.", "better_response_id": 0},
}  # fmt: skip


@pytest.mark.parametrize("shape", PREFERENCES)
def test_preference_data_are_named_and_the_remedy_trains_on_the_chosen_answers(
    read: Any, jsonl: Jsonl, shape: str
) -> None:
    record = PREFERENCES[shape]
    message = refusal(read, record, record)
    assert_never_guessed(jsonl, message, record, record)
    assert ": preference data ('" in message
    parsed = read(record, record, **remedy(message))
    system = [("system", "S.")] if "system" in record else []
    assert [turns(each) for each in parsed] == [[*system, ("user", "Q?"), ("assistant", "A.")]] * 2


@pytest.mark.system("jq")
def test_the_command_for_the_preference_data_of_openai_writes_the_preferred_answers(read: Any) -> None:
    record = {"input": {"messages": [USER], "tools": []}, "preferred_output": [ANSWER],
              "non_preferred_output": [{**ANSWER, "content": "A longer answer."}]}  # fmt: skip
    [program] = re.findall(r"to train on 'preferred_output', .*: jq -c '(.*)' FILE > NEW", refusal(read, record))
    done = subprocess.run(["jq", "-c", program], input=json.dumps(record), capture_output=True, text=True, check=True)
    assert turns(read(json.loads(done.stdout))[0]) == [("user", "Q?"), ("assistant", "A.")]


@pytest.mark.parametrize("shape", ["dpo", "question", "alpaca", "conversational", "sharegpt", "hh-rlhf"])
def test_fields_alone_choose_an_answer_too(read: Any, shape: str) -> None:
    fields = remedy(refusal(read, PREFERENCES[shape]))["fields"]
    assert turns(read(PREFERENCES[shape], fields=fields)[0])[-1] == ("assistant", "A.")


def test_a_completion_that_repeats_the_question_is_refused(read: Any) -> None:
    record = PREFERENCES["ultrafeedback"]
    [bad] = read(record, format="prompt-completion", fields={"prompt": "prompt", "completion": "chosen"})
    assert bad.reason == "bad completion"
    assert turns(read(record, **remedy(bad.explanation))[0]) == [("user", "Q?"), ("assistant", "A.")]


# Texts with turns


@pytest.mark.parametrize(
    "text",
    ["### Human: Q?### Assistant: A.", "### Human: Q?\n### Assistant: A.\n", "\n\nHuman: Q?\n\nAssistant: A.",
     "Human: Q?\n\nAssistant: A.", "###Human: Q? ### Assistant:\nA."],
)  # fmt: skip
def test_a_transcript_becomes_turns(read: Any, text: str) -> None:
    again = text + "### Human: C?" if "###" in text else text + "\n\nHuman: C?"
    first, second = read({"text": text}, {"text": again})
    assert turns(first) == [("user", "Q?"), ("assistant", "A.")]
    assert turns(second) == [*turns(first), ("user", "C?")]


def test_a_transcript_must_alternate(read: Any) -> None:
    good = {"text": "### Human: Q?### Assistant: A."}
    texts = (
        "### Human: a### Human: b### Assistant: c",
        "### Assistant: a### Human: b",
        "Hello",
        "### Human: a### Assistant:",
    )
    items = read(*[good] * 20, *({"text": text} for text in texts))[20:]
    assert [item.reason for item in items] == ["bad transcript", "bad transcript", "bad transcript", "empty turn"]
    assert turns(read({"text": "### System: S.### Human: Q?### Assistant: A."})[0])[0] == ("system", "S.")


@pytest.mark.parametrize(
    "text",
    ["Below is an instruction.\n\n### Instruction:\nQ?\n\n### Response:\nA.", "A chat. USER: Q? ASSISTANT: A.</s>",
     "<human>: Q?\n<bot>: A.", "User: Q?\nAssistant: A.", "<start_of_turn>user\nQ?", "<|prompter|>Q?<|assistant|>A.",
     "Intro\n### Human: Q?### Assistant: A.", "12/03/2024, 09:15 - Anna: Q?\n12/03/2024, 09:16 - Shop: A.",
     "\u200e[12.03.24, 9:15:07\u202fPM] Anna: Q?", "**User:** Q?\n\n**Assistant:** A.", "**User**: Q?\n**AI**: A.",
     "## User\nQ?\n\n## Assistant\nA.", "Q: Q?\nA: A.", "You said:\nQ?\nChatGPT said:\nA.", "Frage: Q?\nAntwort: A.",
     "### Question: Q?\n### Answer: A.", "Instruct: Q?\nOutput: A.", "<｜User｜>Q?<｜Assistant｜>A.",
     "用户：问\n助手：答", "问：Q\n答：A", "[|Human|] Q?\n[|AI|] A.", "<|USER_TOKEN|>Q?", "> Human: Q?\n> Claude: A."],
)  # fmt: skip
def test_other_texts_with_turns_are_refused(read: Any, text: str) -> None:
    assert "the texts are chats with" in refusal(read, {"text": text})
    assert isinstance(read({"text": text}, format="text")[0], PlainText)


@pytest.mark.parametrize(
    "text",
    [
        "### Instructions\n\nMix it.",
        "The user: nobody.",
        "An assistant: me.",
        "Human: it is.",
        "A: one.\nB: two.",
        "Is it?\nAnswer: yes.",
        "# User guide\n\n# AI in use\n",
        "Me: Hi.\nAnn: Hello.",
        "Options:\na: x\nb: y",
    ],
)
def test_texts_with_one_label_are_documents(read: Any, text: str) -> None:
    assert isinstance(read({"text": text})[0], PlainText)


@pytest.mark.parametrize("more", [{"bot": False}, {"answer": ""}])
def test_texts_with_a_flag_or_an_empty_answer_are_documents(read: Any, more: dict[str, Any]) -> None:
    assert isinstance(read({"text": "It is here."} | more)[0], PlainText)


# Shapes that no format reads


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"message_id": "b", "parent_id": "a", "role": "prompter", "text": "Q?", "lang": "en"},
         "each record is one message ('role' and 'text') of a tree of replies, as in OASST"),
        ({"conversation_id": 3, "role": "user", "content": "Q?"}, "each record is one message ('role' and 'content')"),
        ({"from": "human", "value": "Q?"}, "each record is one message ('from' and 'value')"),
        ({"dialog_id": "7", "speaker": "customer", "text": "Q?"}, "each record is one message ('speaker' and 'text')"),
        ({"type": "message", "user": "U7", "text": "Q?"}, "each record is one message ('user' and 'text')"),
        ({"message_tree_id": "a", "tree_state": "ready", "prompt": {"text": "Q?", "role": "prompter", "replies": []}},
         "a tree of replies"),
        ({"conversation": {"messages": [USER, ANSWER]}, "id": 1}, "the messages are inside 'conversation'"),
        ({"custom_id": "1", "body": {"messages": [USER]}}, "the messages are inside 'body', without an answer"),
        ({"segments": [{"label": False, "text": "Q?"}, {"label": True, "text": "A."}]},
         "texts with a mask of their own ('segments'), as in Axolotl's input_output"),
        ({"query": "Q?", "answers": '[{"name": "f", "arguments": {}}]', "tools": "[]"},
         "calls of tools as text ('answers'), as in xLAM"),
        ({"system": "S.", "chat": "USER: Q?\n\n\nASSISTANT: A."}, "'chat' holds whole chats as text"),
        ({"data": ["Q?", "A."]}, "'data' is a list of texts without speakers"),
        ({"conversation": [{"input": "Q?", "output": "A."}]}, "'conversation' is a list of objects with input, output"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "tokenized records ('input_ids')"),
        ({"instruction": "Q?", "completions": [{"response": "A."}]}, "several answers to a question ('completions')"),
        ({"question": "Q?", "answers": [{"text": "A.", "pm_score": 3}]}, "several answers to a question ('answers')"),
        ({"prompt": "Q?", "id": 3}, "a question ('prompt') without a known answer"),
        ({"title": "t", "current_node": "a", "mapping": {"a": {"message": None, "children": []}}},
         "chats as ChatGPT exports them"),
        ({"title": "t", "paragraphs": [{"context": "C.", "qas": []}]}, "questions inside paragraphs, as in SQuAD"),
        ({"systemInstruction": {"parts": [{"text": "S."}]}, "contents": [{"role": "user", "parts": [{"text": "Q?"}]}]},
         "chats in the form of Google's Gemini"),
        ({"contents": [{"role": "user", "parts": [{"text": "Q?"}]}]}, "chats in the form of Google's Gemini"),
    ],
)  # fmt: skip
def test_a_shape_is_refused_by_name(read: Any, jsonl: Jsonl, record: Any, name: str) -> None:
    message = refusal(read, record, record)
    assert name in message
    assert_never_guessed(jsonl, message, record, record)


CHATGPT = [{"current_node": "d", "mapping": {
    "a": {"parent": None, "children": ["s"], "message": None},
    "s": {"parent": "a", "children": ["b"], "message": {"author": {"role": "system"}, "content": {"parts": [""]}}},
    "b": {"parent": "s", "children": ["x", "c"], "message": {"author": {"role": "user"}, "content": {"parts": ["Q?"]}}},
    "x": {"parent": "b", "children": [], "message": {"author": {"role": "assistant"}, "content": {"parts": ["Old."]}}},
    "c": {"parent": "b", "children": ["d"], "message": {"author": {"role": "assistant"}, "content": {"thoughts": []}}},
    "d": {"parent": "c", "children": [], "message": {"author": {"role": "assistant"}, "content": {"parts": ["A."]}}},
}}]  # fmt: skip
GEMINI = {
    "contents": [
        {"role": "user", "parts": [{"text": "Q"}, {"text": "?"}]},
        {"role": "model", "parts": [{"text": "A."}]},
    ]
}
XLAM = [{"query": "Q?", "answers": '[{"name": "f", "arguments": {"n": 1}}]', "tools": '[{"name": "f"}]'}]
GEMINI_WITH_SYSTEM = GEMINI | {"systemInstruction": {"parts": [{"text": "S."}]}}
SQUAD = {
    "data": [{"paragraphs": [{"context": "C.", "qas": [
        {"question": "None?", "answers": []}, {"question": "Q?", "answers": [{"text": "A."}, {"text": "B."}]},
    ]}]}]
}  # fmt: skip
LANGCHAIN = [{"type": "human", "data": {"content": "Q?"}}, {"type": "ai", "data": {"content": "A.", "tool_calls": []}}]
LANGCHAIN_DUMPS = [
    {"lc": 1, "type": "constructor", "id": ["langchain", "HumanMessage"], "kwargs": {"content": "Q?"}},
    {"lc": 1, "type": "constructor", "id": ["langchain", "AIMessageChunk"], "kwargs": {"content": "A.", "type": "ai"}},
]
TELEGRAM = {"name": "Bob", "messages": [
    {"type": "service", "actor": "Ann", "text": ""}, {"from": "Ann", "from_id": "user1", "text": ["Q", {"text": "?"}]},
    {"type": "message", "from": "Bob", "text": "A"}, {"type": "message", "from": "Bob", "text": "."},
]}  # fmt: skip
FACEBOOK = {"participants": [{"name": "Bob"}, {"name": "Zo\u00c3\u00ab"}], "messages": [
    {"sender_name": "Bob", "timestamp_ms": 2, "content": "A."}, {"sender_name": "Zo\u00c3\u00ab", "timestamp_ms": 1,
     "content": "Q\u00c3\u00bc?"},
]}  # fmt: skip
ANSWERED = [("user", "Q?"), ("assistant", "A.")]


@pytest.mark.system("jq")
@pytest.mark.parametrize(
    ("name", "exported", "expected"),
    [
        ("chatgpt.jq", CHATGPT, ANSWERED),
        ("gemini.jq", GEMINI, ANSWERED),
        ("squad.jq", SQUAD, [("user", "Q?\n\nC."), ("assistant", "A.")]),
        ("gemini.jq", GEMINI_WITH_SYSTEM, [("system", "S."), *ANSWERED]),
        ("xlam.jq", XLAM, [("user", "Q?"), ("assistant", "")]),
        ("gemini.jq", GEMINI | {"system_instruction": {"parts": {"text": "S."}}}, [("system", "S."), *ANSWERED]),
        ("langchain.jq", LANGCHAIN, ANSWERED),
        ("langchain.jq", {"messages": LANGCHAIN}, ANSWERED),
        ("langchain.jq", [{"messages": LANGCHAIN_DUMPS}], ANSWERED),
    ],
)
def test_the_lines_of_the_docs_write_messages(read: Any, name: str, exported: Any, expected: list[Any]) -> None:
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    [program] = [block for block in re.findall(r"```jq\n(.*?)```", page, re.DOTALL) if f"-f {name} " in block]
    done = subprocess.run(["jq", "-c", program], input=json.dumps(exported), capture_output=True, text=True, check=True)
    [parsed] = read(json.loads(done.stdout))
    assert turns(parsed) == expected


@pytest.mark.parametrize(
    ("export", "question"), [(TELEGRAM, "Q?"), ({"chats": {"list": [TELEGRAM]}}, "Q?"), (FACEBOOK, "Qü?")]
)
def test_chats_between_people_are_refused_and_the_script_writes_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Any, question: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("result.json").write_text(json.dumps(export))
    with pytest.raises(WhetError, match="a chat between people, as Telegram, Facebook and Instagram export it"):
        propose_source("result.json")
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    [script] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "result.json" in block]
    exec(script)
    [parsed] = read_source(Source(path="chats.jsonl"))
    assert [text.replace("A\n.", "A.") for _, text in turns(parsed)] == [question, "A."]


def test_people_are_no_roles(read: Any) -> None:
    record = {"messages": [{"from": "Ann", "value": "Q?"}, {"from": "Bob", "value": "A."}]}
    assert "the speakers are 'Ann', 'Bob', not roles such as human and gpt" in refusal(read, record)


@pytest.mark.parametrize("messages", [LANGCHAIN, LANGCHAIN_DUMPS])
def test_messages_of_langchain_are_named(read: Any, messages: Any) -> None:
    assert "messages of LangChain. docs/data.md has a line" in refusal(read, {"messages": messages})
    assert "messages of LangChain. docs/data.md has a line" in refusal(read, messages)


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"question": "Q?", "answer": "B.", "corrected_answer": "A."}, ("answer", "corrected_answer")),
        ({"prompt": "Q?", "response": "B.", "Ground Truth": "A."}, ("response", "Ground Truth")),
        ({"query": "Q?", "context": "C.", "response": "B.", "edited response": "A."}, ("response", "edited response")),
    ],
)
def test_an_answer_beside_its_correction_is_ambiguous(read: Any, record: Any, names: tuple[str, str]) -> None:
    message = refusal(read, record)
    assert "{!r} and {!r} may each be the answer".format(*names) in message
    formats = re.findall(r"set format: (\S+) and fields: ({.*?})", message)
    for (form, fields), text in zip(formats, ("B.", "A."), strict=True):
        [chosen] = read(record, format=form, fields=yaml.safe_load(fields))
        assert turns(chosen) == [("user", "Q?\n\nC." if "context" in record else "Q?"), ("assistant", text)]


def test_a_correction_that_repeats_the_answer_is_no_other(read: Any) -> None:
    for other in ({"corrected_answer": "A."}, {"gold_reasoning": "Because."}, {"reference_url": "https://x.org"}):
        [same] = read({"question": "Q?", "answer": "A.", **other})
        assert turns(same) == ANSWERED


def test_the_verdicts_of_prodigy_are_no_answers(read: Any) -> None:
    records = [{"prompt": "Q?", "response": "A.", "_input_hash": 1, "answer": each} for each in ("accept", "reject")]
    assert "annotations of Prodigy, whose 'answer' is a verdict. Set where: answer == 'accept'" in refusal(
        read, *records
    )
    fields = {"prompt": "prompt", "completion": "response"}
    kept, _ = read(*records, where="answer == 'accept'", format="prompt-completion", fields=fields)
    assert turns(kept) == ANSWERED


@pytest.mark.parametrize("record", [{"text": "I like it.", "label": ["a"]}, {"text": "I like it.", "labels": [[0, 6]]}])
def test_texts_with_a_list_of_labels_are_no_documents(read: Any, record: Any) -> None:
    assert "texts with a list ('label" in refusal(read, record)
    assert read(record, format="text")[0].text == "I like it."


def test_an_intent_is_the_answer_and_not_the_question(read: Any, jsonl: Jsonl) -> None:
    record = {"intent": "greet", "text": "Hello there."}
    assert "texts with 'intent'" in refusal(read, record)
    source, _ = propose_source(str(jsonl(json.dumps(record))))
    assert source.fields == {"prompt": "text", "completion": "intent"}


def test_lines_with_their_speakers_are_no_questions(jsonl: Jsonl) -> None:
    with pytest.raises(WhetError, match="not recognised"):
        propose_source(str(jsonl(*[json.dumps({"speaker": who, "line": "Hi."}) for who in "AB"])))


def test_replies_with_the_message_that_they_answer_are_no_documents(read: Any) -> None:
    record = {"author_id": "a", "text": "Please help.", "in_response_to_tweet_id": "5"}
    assert "each record is one message ('author_id' and 'text')" in refusal(read, record)


def test_the_roles_of_langchain(read: Any, jsonl: Jsonl) -> None:
    record = {"messages": [{"type": "human", "content": "Q?"}, {"type": "ai", "content": "A."}]}
    source, _ = propose_source(str(jsonl(json.dumps(record))))
    assert [turns(parsed) for parsed in read_source(source)] == [ANSWERED]


@pytest.mark.system("jq")
@pytest.mark.parametrize("wrap", [str, lambda text: {"text": text}])
def test_records_written_as_strings_are_unwrapped(read: Any, wrap: Callable[[str], Any]) -> None:
    record = wrap(json.dumps({"prompt": "Q?", "completion": "A."}))
    message = refusal(read, record, record)
    assert "the texts are records of JSON, written as strings" in message
    [program] = re.findall(r"jq -c '(.*)' FILE > NEW.jsonl", message)
    done = subprocess.run(["jq", "-c", program], input=json.dumps([record]), capture_output=True, text=True, check=True)
    [parsed] = read(json.loads(done.stdout))
    assert turns(parsed) == ANSWERED


@pytest.mark.parametrize("write", [json.dumps, repr])
def test_messages_written_as_text_are_messages(read: Any, write: Callable[[Any], str]) -> None:
    [listed] = read({"input": write([{"role": "system", "content": "Be kind."}, USER]), "output": write(ANSWER)})
    assert turns(listed) == [("system", "Be kind."), *ANSWERED]
    for text in ('[{"content": "Riga", "page": 3}]', '{"from": "Riga", "value": "2"}', '{"role": "user", "conten'):
        [kept] = read({"input": "Q?", "output": text})
        assert turns(kept) == [("user", "Q?"), ("assistant", text)]


@pytest.mark.parametrize(
    "answers",
    [
        [{**ANSWER, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}], "content": None}],
        [{"id": 7, **ANSWER}],
        [{"role": "assistant", "content": [{"type": "text", "text": "A."}]}],
        [{"thinking": "So.", **ANSWER}],
    ],
)
def test_a_column_of_messages_is_read_like_a_list(read: Any, answers: Any) -> None:
    """Messages with calls, ids, parts or reasoning were learned as JSON, in quotes and brackets."""
    listed, written = read(
        {"prompt": [USER], "completion": answers}, {"prompt": [USER], "completion": json.dumps(answers)}
    )
    assert written.messages == listed.messages
    assert "[" not in written.messages[1].content


def test_a_damaged_column_of_messages_is_no_text(read: Any) -> None:
    """numpy prints lists without commas between their items."""
    [bad] = read({"prompt": "Q?", "completion": "[{'content': 'A.', 'role': 'assistant'}\n {'role': 'user'}]"})
    assert "'completion' must be JSON" in bad.explanation


@pytest.mark.parametrize("write", [list, json.dumps])
@pytest.mark.parametrize("more", [{"toolCalls": [{"name": "f"}]}, {"timestamp": 1}])
def test_turns_in_every_place_are_checked(read: Any, write: Any, more: Any) -> None:
    """Columns of messages as JSON, and lists as prompt and completion, were not."""
    user, answer = {**USER, "timestamp": 2}, {**ANSWER, **more}
    for record in ({"messages": write([user, answer])}, {"prompt": write([user]), "completion": write([answer])}):
        assert isinstance(read(record)[0], BadRecord)


def test_questions_and_roles_in_a_column_of_messages_are_checked(read: Any) -> None:
    """The answer in another column was lost, and swapped roles were learned."""
    assert "'answer' is its answer" in refusal(read, {"messages": json.dumps([USER]), "answer": "A."})
    assert "roles were swapped" in refusal(read, {"messages": json.dumps([ANSWER, USER])})
    [document] = read({"messages": json.dumps([USER, ANSWER])}, format="text", fields={"text": "messages"})
    assert isinstance(document, PlainText)


@pytest.mark.system("jq")
@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize(
    "record",
    [
        {"id": 1, "chat": {"messages": [USER, ANSWER]}},
        {"id": 1, "my data": {"question": "Q?", "answer": "A."}},
        {"id": 1, "messages": {"prompt": "Q?", "completion": "A."}},
        {"id": 1, "system": "Be kind.", "rows": [{"prompt": "Q?", "completion": "A."}] * 2},
        {"id-1": {"prompt": "Q?", "completion": "A."}, "id-2": {"prompt": "Q?", "completion": "A."}},
    ],
)
def test_the_command_for_records_inside_others_works(tmp_path: Path, jsonl: Jsonl, record: Any, is_array: bool) -> None:
    lines = json.dumps(record), json.dumps(record)
    is_array = is_array and "id" in record and "rows" not in record
    file = jsonl(
        *([f"[{', '.join(lines)}]"] if is_array else lines if "id" in record else lines[:1]), name="nested.json"
    )
    with pytest.raises(WhetError) as caught:
        propose_source(str(file))
    [program] = re.findall(r"jq -c '(.*)' FILE > NEW.jsonl", str(caught.value))
    done = subprocess.run(["jq", "-c", program, file], capture_output=True, text=True, check=True)
    for parsed in read_source(Source(path=str(jsonl(done.stdout)))):
        assert turns(parsed)[-2:] == ANSWERED
        assert turns(parsed)[:-2] == ([("system", "Be kind.")] if "system" in record else [])


@pytest.mark.parametrize("more", ["context", "passage", "document"])
def test_a_question_with_a_context_is_read_with_the_fields_named(read: Any, more: str) -> None:
    record = {"question": "Q?", "answer": "A.", more: "C."}
    [parsed] = read(record, **remedy(refusal(read, record)))
    assert turns(parsed) == [("user", "Q?\n\nC."), ("assistant", "A.")]


def test_the_answer_beside_messages_that_end_with_a_question(read: Any) -> None:
    record = {"messages": [USER], "reasoning": "Hm.", "answer": "A."}
    [parsed] = read(record, **remedy(refusal(read, record)))
    assert turns(parsed) == [("user", "Q?"), ("assistant", "A.")]
    assert parsed.messages[1].reasoning == "Hm."


def test_the_script_for_oasst_makes_a_conversation_of_each_last_answer(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("a", None, "prompter"), ("b", "a", "assistant"), ("c", "a", "assistant"), ("d", "b", "prompter"),
            ("e", "d", "assistant"), ("f", "c", "prompter")]  # fmt: skip
    written = [{"message_id": own, "parent_id": parent, "role": role, "text": own} for own, parent, role in rows]
    (tmp_path / "oasst.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    assert "OASST" in refusal(read, *written)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    made = [turns(each) for each in read_source(Source(path="chats.jsonl"))]
    assert made == [
        [("user", "a"), ("assistant", "c")],
        [("user", "a"), ("assistant", "b"), ("user", "d"), ("assistant", "e")],
    ]  # fmt: skip


def test_messages_of_conversations_are_documents_where_the_user_says_so(read: Any) -> None:
    record = {"thread_id": 1, "author": "Anna", "text": "Some words."}
    assert "to train on every word of each, set format: text" in refusal(read, record)
    assert isinstance(read(record, format="text")[0], PlainText)


@pytest.mark.parametrize(
    ("key", "answer"), [("label", "bad"), ("label", "0"), ("summary", "Good."), ("code", "a = 1"), ("answer", "A.")]
)
def test_texts_with_an_answer_are_no_documents(read: Any, key: str, answer: str) -> None:
    """A label that is the answer is no mark of KTO."""
    record = {"text": "A film.", "url": "x.org", key: answer}
    message = refusal(read, record)
    assert turns(read(record, **remedy(message))[0]) == [("user", "A film."), ("assistant", answer)]
    assert isinstance(read(record, format="text")[0], PlainText)
    assert "with words in place of its numbers" in refusal(read, {**record, key: 0})


@pytest.mark.parametrize(("role", "text"), [("sender", "text"), ("speaker", "content"), ("author", "message")])
def test_messages_with_other_names_are_proposed(read: Any, jsonl: Jsonl, role: str, text: str) -> None:
    """As Claude exports them: `whet` named them records, and its command wrote each message into a line of its own."""
    spoken = [
        {"uuid": str(n), role: who, text: words} for n, (who, words) in enumerate([("human", "Q?"), ("gpt", "A.")])
    ]
    record = {"uuid": "7", "name": "A chat", "chat_messages": spoken}
    [parsed] = read(record, **remedy(refusal(read, record)))
    assert turns(parsed) == ANSWERED
    source, is_guessed = propose_source(str(jsonl(json.dumps(record))))
    assert (is_guessed, [turns(each) for each in read_source(source)]) == (True, [ANSWERED])


@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "model"), ("human", "bot")])
def test_the_roles_of_sharegpt_in_messages_get_a_remedy(read: Any, names: tuple[str, str]) -> None:
    record = {"messages": [{"role": names[0], "content": "Q?"}, {"role": names[1], "content": "A."}]}
    [bad] = read(record)
    assert turns(read(record, **remedy(bad.explanation))[0]) == ANSWERED


@pytest.mark.parametrize("key", ["article", "passage", "context"])
def test_the_text_that_choices_are_about_is_in_the_question(read: Any, key: str) -> None:
    """As in RACE: without it the answer is a guess."""
    [parsed] = read({key: "C.", "question": "Q?", "options": ["x", "y"], "answer": "B"})
    assert parsed.messages[0].content.startswith("C.\n\nQ?\n\n- A) x\n- B) y\n")
    [parsed] = read({"question": "Q?", "options": {"A": "x", "B": "y"}, "answer": "B", "answer_idx": "B"})
    assert parsed.messages[1].content == "B"
    [parsed] = read({"question_stem": "Q?", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "B"})
    assert parsed.messages[0].content.startswith("Q?\n\n- A) x")


@pytest.mark.parametrize(
    "record",
    [{"premise": "It rains.", "hypothesis": "It is wet.", "label": 1},
     {"ctx": "He", "endings": ["a", "b"], "label": "1"},
     {"id": "1", "content": "hi", "author": {"id": "9", "name": "Anna"}},
     {"type": "conversation", "id": "1", "parts": {"type": "list"}},
     {"ticket": 7, "subject": "Q?", "comments": [{"author": {"role": "agent"}, "body": "A."}]}],
)  # fmt: skip
def test_two_texts_that_are_no_question_and_answer(read: Any, jsonl: Jsonl, record: Any) -> None:
    message = refusal(read, record)
    assert "the format is not recognised: the records have" in message
    assert_never_guessed(jsonl, message, record)


def test_the_languages_of_a_translation_are_unwrapped(read: Any) -> None:
    message = refusal(read, {"translation": {"de": "Hund", "en": "dog"}})
    assert "jq -c '(arrays[], objects).translation' FILE > NEW.jsonl" in message


def test_the_script_for_messages_with_the_id_of_their_conversation(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["conversation_id,role,text", "1,customer,Q?", "2,customer,Q?", "1,agent,A.", "2,agent,A."]
    Path("rows.csv").write_text("\n".join(lines))
    with pytest.raises(WhetError, match="each record is one message"):
        propose_source("rows.csv")
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    exec(page.split("```python\n")[2].partition("```")[0], {})
    assert [turns(each) for each in read_source(Source(path="chats.jsonl"))] == [ANSWERED] * 2


# Choices, and what is not used


def test_a_column_per_choice(read: Any) -> None:
    record = {
        "question": "1+1?",
        "A": "1",
        "B": "2",
        "C": 3,
        "D": "",
        "answer": "B",
        "subject": "maths",
        "system": "S.",
    }
    [parsed] = read(record)
    assert turns(parsed)[1][1].startswith("1+1?\n\n- A) 1\n- B) 2\n- C) 3\n\n")
    assert [turns(parsed)[0], turns(parsed)[2]] == [("system", "S."), ("assistant", "B")]
    for name in ("option_a", "opa", "choice1", "Distractor 1"):
        assert "multiple choice with a column per choice" in refusal(
            read, {"question": "Q?", "answer": "A.", name: "x"}
        )


LONG = "A text of more than forty characters, which nobody reads."


@pytest.mark.parametrize(
    ("record", "description"),
    [
        ({"question": "Q?", "answer": "A.", "background": LONG},
         "not used: background. background holds text; to add it to the question, set fields: "
         "{instruction: question, input: background, output: answer}"),
        ({"messages": [USER, ANSWER], "persona": LONG},
         "not used: persona. persona holds text; to use it, set it in fields (system, reasoning, tools)"),
        ({"messages": [{**USER, "content": LONG}, ANSWER], "prompt": LONG, "url": "x" * 99}, "not used: prompt, url"),
        ({"instruction": LONG, "output": "A.", "text": f"Do this: {LONG}"}, "not used: text"),
        ({"messages": [USER, {**ANSWER, "emotion": "joy"}]}, "not used: messages.emotion"),
        ([USER, {**ANSWER, "emotion": "joy"}], "not used: emotion"),
        ({"prompt": "Q?", "completion": "A.", "score": 3.5},
         "not used: score. To keep the better answers by score: where: score >= NUMBER"),
        ({"prompt": "Q?", "completion": "A.", "status": "Rejected"},
         "not used: status. status is 'Rejected' in some; to leave these out: where: status != 'Rejected'"),
        ({"prompt": "Q?", "completion": "A.", "is_correct": False},
         "not used: is_correct. is_correct is False in some; to leave these out: where: is_correct != False"),
        ({"prompt": "Q?", "completion": "A.", "split": "train"},
         "not used: split. split names splits; to read one: where: split == 'train'"),
        ({"prompt": "Q?", "completion": "A.", "input_quality": "good"}, "not used: input_quality"),
        ({"question": "1+1?", "A": "1", "B": "2", "answer": "B", "subject": "maths"}, "not used: subject"),
        ({"prompt": "Q?", "completion": "A.", "explanation": LONG}, "not used: explanation. To train on explanation as "
         "reasoning before the answer, set fields: {reasoning: explanation}"),
        ({"prompt": "\n\nHuman: Q?\n\nAssistant:", "completion": " A.", "id": 3},
         "not used: id. prompt holds chats as text, each of which becomes one message of the user"),
    ],
)  # fmt: skip
def test_what_is_not_used_is_named_with_what_to_do(jsonl: Jsonl, record: Any, description: str) -> None:
    found = SourceReader(Source(path=str(jsonl(json.dumps(record)))))
    assert str(found.description).partition("; ")[2] == description


def test_an_unused_text_is_used_as_the_description_says(read: Any) -> None:
    record = {"question": "Q?", "answer": "A.", "background": LONG}
    fields = {"instruction": "question", "input": "background", "output": "answer"}
    assert turns(read(record, fields=fields)[0])[0] == ("user", f"Q?\n\n{LONG}")
    [parsed] = read({"messages": [USER, ANSWER], "persona": LONG}, fields={"system": "persona"})
    assert turns(parsed)[0] == ("system", LONG)


WORDS = [
    "messages", "conversations", "prompt", "completion", "chosen", "rejected", "text", "role", "content", "from",
    "value", "system", "reasoning", "label", "answers", "A", "B", "answer", "question", "replies", "response_0",
    "response_1",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from([*WORDS, "user", "### Human: a### Assistant: b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(VALUES | st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=5), min_size=1, max_size=3))
def test_any_records_are_read_or_refused(records: list[Any]) -> None:
    source = Source(path="a.jsonl")
    try:
        found = detect_format(records, ["a.jsonl:1"] * len(records), source)
    except WhetError:
        return
    for record in records:
        with contextlib.suppress(BadRecordError):
            parsed = FORMATS[found.format].parse(record, found.names, Origin("a.jsonl", 1))
            reject_unsupported(record, parsed, found.names)


# A format that the user sets, and records that do not have it


@pytest.mark.parametrize(
    ("form", "record", "suggested"),
    [
        ("prompt-completion", {"prompt": "Q?", "chosen": "A.", "rejected": "B."}, "prompt-completion"),
        ("messages", {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "messages"),
        ("alpaca", {"instruction": "Q?", "chosen": "A.", "rejected": "B."}, "alpaca"),
        ("sharegpt", {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, "prompt-completion"),
        ("messages", {"messages": [USER], "chosen": ANSWER, "rejected": ANSWER}, "prompt-completion"),
    ],
)
def test_preference_data_are_named_whatever_the_format_is_set_to(
    read: Callable[..., list[Any]], form: str, record: Any, suggested: str
) -> None:
    message = refusal(read, record, record, format=form)
    assert f"the records are not {form}: preference data ('chosen' and 'rejected')" in message
    assert remedy(message)["format"] == suggested
    [first, _] = read(record, record, **remedy(message))
    assert turns(first) == [("user", "Q?"), ("assistant", "A.")]


def test_a_named_shape_is_named_whatever_the_format_is_set_to(read: Callable[..., list[Any]]) -> None:
    oasst = {"message_id": "1", "parent_id": None, "role": "prompter", "text": "Q?"}
    assert "each record is one message" in refusal(read, oasst, format="messages")


# Records inside a record


def test_one_line_with_a_list_of_records_is_read(read: Callable[..., list[Any]]) -> None:
    found = read({"version": 1, "data": [{"question": "Q?", "answer": "A."}] * 3})
    assert [turns(each) for each in found] == [[("user", "Q?"), ("assistant", "A.")]] * 3
    two = {"train": [{"messages": [USER, ANSWER]}] * 2, "test": [{"messages": [USER, ANSWER]}]}
    assert "Set split to one of them" in refusal(read, two)
    assert len(read(two, split="train")) == 2


def test_several_lines_with_lists_of_records_get_a_remedy(read: Callable[..., list[Any]]) -> None:
    line = {"data": [{"question": "Q?", "answer": "A."}] * 2}
    assert "the records are inside 'data'" in (message := refusal(read, line, line))
    assert "jq -c '.data[]' FILE > NEW.jsonl" in message


@pytest.mark.parametrize("name", ["one.jsonl", "one.json"])
def test_one_record_with_tools_is_one_record(tmp_path: Path, name: str) -> None:
    """Its tools are a list of objects, too."""
    (tmp_path / name).write_text(json.dumps({"messages": [USER, ANSWER], "tools": [TOOL]}))
    [found] = read_source(Source(path=str(tmp_path / name)))
    assert isinstance(found, Conversation)
    assert found.tools == (TOOL,)


def test_several_answers_in_the_only_line_are_not_records(read: Callable[..., list[Any]]) -> None:
    assert "several answers" in refusal(read, {"prompt": "Q?", "completions": [{"response": "A."}, {"response": "B."}]})


@pytest.mark.parametrize("keys", [("instruction", "output"), ("prompt", "completion")])
def test_a_list_of_answers_is_named(read: Callable[..., list[Any]], keys: tuple[str, str]) -> None:
    [found] = read({keys[0]: "Q?", keys[1]: ["A.", "B."]})
    assert isinstance(found, BadRecord)
    assert f"{keys[1]!r} is a list of 2 answers, as in preference data" in found.explanation


# Siblings of names


@pytest.mark.parametrize(
    "mark", [{"label": "undesirable"}, {"desirable": False}, {"is_desirable": 0}, {"label": "Rejected"}]
)
def test_other_marks_of_a_bad_answer(read: Callable[..., list[Any]], mark: dict[str, Any]) -> None:
    [found] = read({"prompt": "Q?", "completion": "A.", **mark})
    assert isinstance(found, BadRecord)
    assert found.reason == "negative label"
    [good] = read({"prompt": "Q?", "completion": "A.", **dict.fromkeys(mark, True)})
    assert isinstance(good, Conversation)


@pytest.mark.parametrize("key", ["picture", "image_files", "img_path", "video_url", "audio_file", "image_bytes", "jpg"])
def test_other_names_of_images(read: Callable[..., list[Any]], key: str) -> None:
    [found] = read({"conversations": [HUMAN, GPT], key: "a.png"})
    assert isinstance(found, BadRecord)
    assert f"the record has {key!r}, but whet trains on text only" in found.explanation


@pytest.mark.parametrize(
    "mark",
    ["<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>", "<|image_1|>", "data:image/png;base64,iVBO "],
)
def test_other_marks_of_images(read: Callable[..., list[Any]], mark: str) -> None:
    [found] = read({"conversations": [{"from": "human", "value": f"{mark}What is it?"}, GPT]})
    assert isinstance(found, BadRecord)
    assert found.reason == "image mark"


@pytest.mark.parametrize("key", ["complex_cot", "Complex_CoT", "thinking_trajectory", "deepseek_reasoning"])
def test_reasoning_under_another_name_is_advised(jsonl: Jsonl, key: str) -> None:
    record = {"question": "Q?", key: "First this and then that, so it must be so.", "answer": "A."}
    path = str(jsonl(json.dumps(record)))
    told = SourceReader(Source(path=path)).description
    assert (
        f"not used: {key}. To train on {key} as reasoning before the answer, set fields: {{reasoning: {key}}}" in told
    )
    [found] = read_source(Source(path=path, **remedy(told)))
    assert isinstance(found, Conversation)
    assert found.messages[-1].reasoning == record[key]
