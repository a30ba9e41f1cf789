"""Columns and keys as strangers name them: what belongs to a question stays in it, and no words change their role."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation
from whet.data.read.sources import SourceReader, propose_source, read_source


def read(path: Path, *records: Any) -> tuple[list[tuple[str, str]], bool]:
    """The turns of the first record as `whet init` proposes to read the file, and whether it guesses."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records or [{}]))
    source, is_guessed = propose_source(str(path))
    reader = SourceReader(source)
    first = reader.parse(next(iter(reader.records())))
    assert isinstance(first, Conversation), first
    return [(turn.role, turn.content) for turn in first.messages], is_guessed


ANSWERED = [("user", "Q?"), ("assistant", "A.")]


@pytest.mark.parametrize(
    "record",
    [{"User": "bob", "Question": "Q?", "Answer": "A."}, {"Question": "Q?", "Answer": "A.", "Bot": "v2"},
     {"GPT": "gpt-4", "PROMPT": "Q?", "Response": "A."}, {"Human": "bob", "Frage": "Q?", "Antwort": "A."}],
)  # fmt: skip
def test_a_plain_name_in_any_case_comes_before_a_word_that_may_mean_it(tmp_path: Path, record: Any) -> None:
    """`User` was the question, and its `bob` was answered."""
    assert read(tmp_path / "a.jsonl", record) == (ANSWERED, True)


TASK = [("user", "Translate.\n\ndog"), ("assistant", "Hund")]


@pytest.mark.parametrize(
    "names",
    ["instructions input output", "Instruction input output", "Anweisung Eingabe Ausgabe", "instrucción entrada salida",
     "指令 输入 输出", "instruction entrée sortie", "Anweisung Kontext Antwort", "Instruction Context Response"],
)  # fmt: skip
def test_an_instruction_beside_its_input_is_kept_under_every_name(tmp_path: Path, names: str) -> None:
    """The input alone was the question, and nothing said what to do with it."""
    record = dict(zip(names.split(), ("Translate.", "dog", "Hund"), strict=True))
    assert read(tmp_path / "a.jsonl", record) == (TASK, True)
    with pytest.raises(WhetError):
        SourceReader(Source(path=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("name", ["context", "Context", "contexts", "passage", "paragraph"])
def test_a_context_that_some_questions_have_is_kept(tmp_path: Path, name: str) -> None:
    """As in Dolly, where most are empty: those of the others were lost without a word."""
    records = [{"question": "Q?", "answer": "A.", name: text} for text in ("", "C.")]
    assert read(tmp_path / "a.jsonl", *records) == (ANSWERED, True)
    source, _ = propose_source(str(tmp_path / "a.jsonl"))
    [_, second] = read_source(source)
    assert isinstance(second, Conversation)
    assert second.messages[0].content == "Q?\n\nC."
    with pytest.raises(WhetError, match=f"{name!r}, which belongs to the question. Set fields: "):
        SourceReader(Source(path=str(tmp_path / "a.jsonl")))


def test_a_context_that_only_late_questions_have_is_a_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"question": "Q?", "answer": "A."}] * 25 + [{"question": "R?", "answer": "B.", "context": "C."}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    *_, last = read_source(Source(path=str(path)))
    assert isinstance(last, BadRecord)
    assert "'context', which the first records do not have" in last.explanation
    fields = yaml.safe_load(re.findall(r"fields: (\{.*?\})", last.explanation)[0])
    *_, last = read_source(Source(path=str(path), fields=fields))
    assert isinstance(last, Conversation)
    assert last.messages[0].content == "R?\n\nC."
    *_, last = read_source(Source(path=str(path), format="prompt-completion"))
    assert isinstance(last, Conversation)


def test_documents_in_a_list_belong_to_the_question(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "Q?", "contexts": ["C.", "D."], "answer": "A."}\n')
    with pytest.raises(WhetError, match=r"'contexts', which belongs to the question\. Write it into the question; to"):
        propose_source(str(tmp_path / "a.jsonl"))


def test_earlier_turns_beside_a_query_are_kept(tmp_path: Path) -> None:
    """As in ms-swift."""
    record = {"query": "Q?", "response": "A.", "history": [["P?", "O."]], "system": "S."}
    expected = [("system", "S."), ("user", "P?"), ("assistant", "O."), *ANSWERED]
    assert read(tmp_path / "a.jsonl", record) == (expected, True)
    assert read(tmp_path / "a.jsonl", {**record, "history": []}, record) == ([expected[0], *ANSWERED], True)


def test_a_system_prompt_is_kept_beside_a_context_and_in_other_languages(tmp_path: Path) -> None:
    record = {"System": "S.", "Kontext": "C.", "Frage": "Q?", "Antwort": "A."}
    assert read(tmp_path / "a.jsonl", record)[0] == [("system", "S."), ("user", "Q?\n\nC."), ("assistant", "A.")]
    for name in ("Systemprompt", "系统提示词"):
        record = {name: "S.", "Frage": "Q?", "Antwort": "A."}
        assert read(tmp_path / "a.jsonl", record)[0] == [("system", "S."), *ANSWERED]


@pytest.mark.parametrize("names", ["reply message", "solution exercise", "target source"])
def test_the_answer_may_be_the_first_of_two_columns(tmp_path: Path, names: str) -> None:
    """The first was the question by its place, whatever its name."""
    answer, question = names.split()
    assert read(tmp_path / "a.jsonl", {answer: "A.", question: "Q?"}) == (ANSWERED, True)


def test_what_is_no_answer_by_its_name_is_no_question_either(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"topic": "Dogs", "input": "Tell me of dogs."}\n')
    with pytest.raises(WhetError, match=r"a question \('input'\) without a known answer"):
        propose_source(str(tmp_path / "a.jsonl"))


def test_an_answer_beside_the_expected_one_is_ambiguous(tmp_path: Path) -> None:
    """As tables of an evaluation have them: the answer may be the wrong one."""
    (tmp_path / "a.jsonl").write_text('{"question": "Q?", "expected": "A.", "answer": "B."}\n')
    with pytest.raises(WhetError, match="'answer' and 'expected' may each be the answer"):
        propose_source(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("names", [("from", "text"), ("from", "content"), ("role", "value"), ("role", "message")])
def test_the_text_of_a_turn_under_the_name_of_another_format(tmp_path: Path, names: tuple[str, str]) -> None:
    """Every record was bad, and nothing said what to set."""
    turns = [dict(zip(names, turn, strict=True)) for turn in (("human", "Q?"), ("gpt", "A."))]
    assert read(tmp_path / "a.jsonl", {"conversations": turns}) == (ANSWERED, True)
    with pytest.raises(WhetError, match=f"from: {names[0]}, value: {names[1]}}}, or let `whet init` write it"):
        SourceReader(Source(path=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("names", ["question a b answer", "Question A B Answer", "Frage A B Antwort"])
def test_columns_of_choices_are_not_lost(tmp_path: Path, names: str) -> None:
    """The question was read without its choices, and its answer was a letter."""
    (tmp_path / "a.csv").write_text(names.replace(" ", ",") + "\nQ?,x,y,b\n")
    with pytest.raises(WhetError, match=r"multiple choice with a column per choice \([aA], [bB]\). Name the columns"):
        propose_source(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("turns", [(("from", "value"), "gpt", "human"), (("role", "content"), "assistant", "user")])
def test_swapped_roles_are_noticed(tmp_path: Path, turns: Any) -> None:
    """All conversations began with an answer and ended with a question, and what users write would be learned."""
    names, first, last = turns
    chat = [dict(zip(names, turn, strict=True)) for turn in ((first, "Q?"), (last, "A."))]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"conversations": chat}) + "\n")
    with pytest.raises(WhetError, match=f"begin with '{first}' and end with '{last}', as if the roles were swapped"):
        propose_source(str(path))
    form = {"gpt": "sharegpt", "assistant": "messages"}[first]
    [parsed] = read_source(Source.model_validate({"path": str(path), "format": form}))
    assert isinstance(parsed, Conversation)
    both = {"conversations": chat}, {"conversations": [*chat, chat[0]]}
    assert read(path, *both)[0] == [("assistant", "Q?"), ("user", "A.")]
