"""Built-in datasets: correct answers, disjoint splits, reproducible."""

from __future__ import annotations

import hashlib
import itertools
import json
import re

import pytest

from whet.data.builtin import BUILTIN_GENERATORS, COMMON_WORDS, generate_orders
from whet.data.config import Source
from whet.data.conversation import CALCULATOR_SCHEMA, Conversation, Message
from whet.data.read.sources import SourceReader

SIGNS = str.maketrans("−×÷", "-*/")


def first(name: str, count: int = 300, **options: str) -> list[Conversation]:
    reader = SourceReader(Source(path=f"builtin:{name}", max_samples=count, **options))  # type: ignore[arg-type]
    items = [reader.parse(raw) for raw in reader.records()]
    assert all(isinstance(item, Conversation) for item in items)
    return items  # type: ignore[return-value]


@pytest.mark.parametrize("name", sorted(BUILTIN_GENERATORS))
def test_a_builtin_dataset_is_reproducible_and_varied(name: str) -> None:
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


def test_spelling_is_correct() -> None:
    for item in first("spelling"):
        prompt, answer = (message.content for message in item.messages)
        assert answer.replace(", ", "") in re.findall("[a-z]+", prompt)
        assert set(answer.split(", ")) <= set("abcdefghijklmnopqrstuvwxyz")


def test_letters_are_counted_correctly() -> None:
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


def test_arithmetic_is_correct() -> None:
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


def test_arithmetic_with_calls_has_the_same_text() -> None:
    for plain, called in zip(first("arithmetic"), first("arithmetic", calculator="calls"), strict=True):
        assert plain.messages[0] == called.messages[0]
        assert plain.tools == ()
        assert called.tools == (CALCULATOR_SCHEMA,)
        text = "".join(message.content for message in called.messages if message.role == "assistant")
        assert text == plain.messages[1].content
        for message, result in itertools.pairwise(called.messages[1:]):
            if message.tool_calls:
                [call] = message.tool_calls
                assert eval(call.arguments["expression"]) == int(result.content)
                assert result == Message("tool", result.content, tool_call_id=call.id, name="calculator")
        assert called.messages[-1].tool_calls == ()


def test_no_operands_are_in_both_splits() -> None:
    def numbers(split: str) -> set[tuple[str, ...]]:
        return {tuple(sorted(re.findall(r"\d+", _task(item)))) for item in first("arithmetic", 2000, split=split)}

    assert numbers("train").isdisjoint(numbers("held-out"))


def test_the_common_words_are_words() -> None:
    assert len(set(COMMON_WORDS)) == len(COMMON_WORDS) > 400
    assert all(re.fullmatch("[a-z]{4,}", word) for word in COMMON_WORDS)


# builtin:orders

MANY = 4000
AMOUNT_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
PINNED = (
    "Victor from Vienna wants eight pillows in yellow, delivery on Monday.",
    '{"item": "pillow", "amount": 8, "colour": "yellow", "name": "Victor", "city": "Vienna", "day": "Monday"}',
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def take_orders(split: str, count: int = MANY) -> list[tuple[str, str]]:
    samples = itertools.islice(generate_orders(split), count)
    return [(sample.messages[0].content, sample.messages[1].content) for sample in samples]


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_orders_are_reproducible(split: str) -> None:
    assert take_orders(split, 500) == take_orders(split, 500)


@pytest.mark.parametrize(("split", "digest"), [("train", "ca67c8ee401ad202"), ("held-out", "47593e7785f724f2")])
def test_the_first_orders_are_pinned(split: str, digest: str) -> None:
    """Other orders under the same name would make old results incomparable."""
    assert hashlib.sha256(json.dumps(take_orders(split, 300)).encode()).hexdigest()[:16] == digest


def test_the_first_order_is_as_documented() -> None:
    assert take_orders("train", 1) == [PINNED]


def test_the_splits_of_orders_share_neither_prompts_nor_answers() -> None:
    train, held = take_orders("train"), take_orders("held-out")
    assert {text for text, _ in train}.isdisjoint(text for text, _ in held)
    assert {answer for _, answer in train}.isdisjoint(answer for _, answer in held)


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_orders_do_not_repeat(split: str) -> None:
    texts = [text for text, _ in take_orders(split)]
    assert len(set(texts)) == len(texts)


def test_orders_are_answered_by_json_that_agrees_with_the_prompt() -> None:
    for text, answer in take_orders("train", 1500) + take_orders("held-out", 1500):
        facts = json.loads(answer)
        assert list(facts) == ["item", "amount", "colour", "name", "city", "day"]
        assert "\n" not in answer
        words = re.findall(r"\w+", text)
        amounts = [int(word) for word in words if word.isdigit()] + [
            AMOUNT_WORDS.index(w) + 2 for w in words if w in AMOUNT_WORDS
        ]
        assert amounts == [facts["amount"]]
        assert f"{facts['item']}s" in words
        assert {facts["colour"], facts["name"], facts["city"]} <= set(words)
        assert [day for day in DAYS if {day, day[:3]} & set(words)] == [facts["day"]]


def test_the_prompt_never_shows_the_schema() -> None:
    assert not any("{" in text or "amount" in text.lower() or '"' in text for text, _ in take_orders("train"))


def test_orders_are_varied() -> None:
    answers = [json.loads(answer) for _, answer in take_orders("train", 1000)]
    counts = {key: len({answer[key] for answer in answers}) for key in answers[0]}
    assert counts == {"item": 12, "amount": 10, "colour": 10, "name": 16, "city": 12, "day": 6}
