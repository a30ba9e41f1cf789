"""`builtin:orders`: reproducible, its halves disjoint, its answers true."""

from __future__ import annotations

import hashlib
import itertools
import json
import re

import pytest

from whet.data.builtin.orders import generate_orders

MANY = 4000
WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
PINNED = (
    "Victor from Vienna wants eight pillows in yellow, delivery on Monday.",
    '{"item": "pillow", "amount": 8, "colour": "yellow", "name": "Victor", "city": "Vienna", "day": "Monday"}',
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def take(split: str, count: int = MANY) -> list[tuple[str, str]]:
    return list(itertools.islice(generate_orders(split), count))


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_a_split_is_the_same_every_time(split: str) -> None:
    assert take(split, 500) == take(split, 500)


@pytest.mark.parametrize(("split", "digest"), [("train", "ca67c8ee401ad202"), ("held-out", "47593e7785f724f2")])
def test_the_first_orders_are_pinned(split: str, digest: str) -> None:
    """Other orders under the same name would make old results incomparable."""
    assert hashlib.sha256(json.dumps(take(split, 300)).encode()).hexdigest()[:16] == digest


def test_the_first_order_of_all_is_as_documented() -> None:
    assert take("train", 1) == [PINNED]


def test_train_and_held_out_share_neither_words_nor_facts() -> None:
    train, held = take("train"), take("held-out")
    assert {text for text, _ in train}.isdisjoint(text for text, _ in held)
    assert {answer for _, answer in train}.isdisjoint(answer for _, answer in held)


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_no_order_comes_twice(split: str) -> None:
    texts = [text for text, _ in take(split)]
    assert len(set(texts)) == len(texts)


def test_answers_are_json_in_one_schema_and_agree_with_the_text() -> None:
    for text, answer in take("train", 1500) + take("held-out", 1500):
        facts = json.loads(answer)
        assert list(facts) == ["item", "amount", "colour", "name", "city", "day"]
        assert "\n" not in answer
        words = re.findall(r"\w+", text)
        amounts = [int(word) for word in words if word.isdigit()] + [WORDS.index(w) + 2 for w in words if w in WORDS]
        assert amounts == [facts["amount"]]
        assert f"{facts['item']}s" in words
        assert {facts["colour"], facts["name"], facts["city"]} <= set(words)
        assert [day for day in DAYS if {day, day[:3]} & set(words)] == [facts["day"]]


def test_the_text_never_shows_the_schema() -> None:
    assert not any("{" in text or "amount" in text.lower() or '"' in text for text, _ in take("train"))


def test_orders_are_varied() -> None:
    answers = [json.loads(answer) for _, answer in take("train", 1000)]
    counts = {key: len({answer[key] for answer in answers}) for key in answers[0]}
    assert counts == {"item": 12, "amount": 10, "colour": 10, "name": 16, "city": 12, "day": 6}
