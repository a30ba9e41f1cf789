"""Generators: right answers, two splits that never meet, the same each time."""

from __future__ import annotations

import itertools
import re

import pytest

from whet.data.builtin.spelling import COMMON_WORDS
from whet.data.calculator import CALCULATOR_SCHEMA
from whet.data.config import Source
from whet.data.conversation import Conversation, Message
from whet.data.read.sources import BUILTIN_GENERATORS, SourceReader

SIGNS = str.maketrans("−×÷", "-*/")


def first(name: str, count: int = 300, **options: str) -> list[Conversation]:
    reader = SourceReader(Source(path=f"builtin:{name}", max_samples=count, **options))  # type: ignore[arg-type]
    items = [reader.parse(raw) for raw in reader.records()]
    assert all(isinstance(item, Conversation) for item in items)
    return items  # type: ignore[return-value]


@pytest.mark.parametrize("name", sorted(BUILTIN_GENERATORS))
def test_a_generator_gives_the_same_each_time_and_little_twice(name: str) -> None:
    name = name.removeprefix("builtin:")
    one = first(name)
    assert one == first(name)
    assert len({item.messages for item in one}) > 0.9 * len(one)


@pytest.mark.parametrize("name", ["spelling", "spelling-bee"])
def test_no_word_is_in_both_splits(name: str) -> None:
    def words(split: str) -> set[str]:
        answers = (item.messages[1].content for item in first(name, 2000, split=split))
        return {a.split()[2] if a.startswith("Going") else a.replace(", ", "") for a in answers}

    train, held = words("train"), words("held-out")
    assert min(len(train), len(held)) > 500
    assert train.isdisjoint(held)


def test_spelling_is_right() -> None:
    for item in first("spelling"):
        prompt, answer = (message.content for message in item.messages)
        assert answer.replace(", ", "") in re.findall("[a-z]+", prompt)
        assert set(answer.split(", ")) <= set("abcdefghijklmnopqrstuvwxyz")


def test_letters_are_counted_right() -> None:
    counts = set()
    for item in first("spelling-bee"):
        answer = item.messages[1].content
        found = re.match("Going through ([a-z]+) letter by letter:\n", answer)
        letter = re.search("The letter ([a-z]) occurs", answer)
        assert found
        assert letter
        word, result = found.group(1), int(answer.rpartition("#### ")[2])
        assert result == word.count(letter.group(1))
        assert re.findall(r"^\d+\. ([a-z])", answer, re.M) == list(word)
        assert answer.count("(") == result
        assert f" {letter.group(1)} " in f" {item.messages[0].content} ".replace("?", " ")
        assert word in item.messages[0].content
        counts.add(result)
    assert {0, 1, 2} <= counts


def _task(item: Conversation) -> str:
    found = re.search(r"[\d(][\d()+−×÷ ]*[\d)]", item.messages[0].content)
    assert found
    return found.group().translate(SIGNS)


def test_sums_are_right() -> None:
    steps = set()
    for item in first("arithmetic"):
        lines = item.messages[1].content.split("\n")
        value = eval(_task(item))
        assert lines[-1] == f"#### {value:.0f}"
        assert value == int(value)
        for line in lines[:-1]:
            left, _, right = line.translate(SIGNS).partition(" = ")
            assert eval(left) == int(right)
        steps.add(len(lines) - 1)
    assert steps == {1, 2, 3, 4}


def test_sums_with_calls_say_the_same() -> None:
    for plain, called in zip(first("arithmetic"), first("arithmetic", calculator="calls"), strict=True):
        assert plain.messages[0] == called.messages[0]
        assert plain.tools == ()
        assert called.tools == (CALCULATOR_SCHEMA,)
        said = "".join(message.content for message in called.messages if message.role == "assistant")
        assert said == plain.messages[1].content
        for call, result in itertools.pairwise(called.messages[1:]):
            if call.tool_calls:
                [asked] = call.tool_calls
                assert eval(asked.arguments["expression"]) == int(result.content)
                assert result == Message("tool", result.content, tool_call_id=asked.id, name="calculator")
        assert called.messages[-1].tool_calls == ()


def test_the_same_numbers_are_never_in_both_splits() -> None:
    def numbers(split: str) -> set[tuple[str, ...]]:
        return {tuple(sorted(re.findall(r"\d+", _task(item)))) for item in first("arithmetic", 2000, split=split)}

    assert numbers("train").isdisjoint(numbers("held-out"))


def test_the_common_words_are_words() -> None:
    assert len(set(COMMON_WORDS)) == len(COMMON_WORDS) > 400
    assert all(re.fullmatch("[a-z]{4,}", word) for word in COMMON_WORDS)
