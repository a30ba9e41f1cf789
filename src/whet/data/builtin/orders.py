"""`builtin:orders`: a skill that a small chat model lacks and learns in minutes.

A person orders something in one of several phrasings; the answer is one line of JSON in a fixed schema, with the
amount as a number, the item in the singular and the weekday written out. Nothing in the prompt shows the schema, so
a model that was not tuned cannot score by luck, and exact match is the honest measure.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from whet.data.builtin.splits import assign_split

_AMOUNTS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12,
}  # fmt: skip
_ITEMS = {
    "mugs": "mug", "lamps": "lamp", "chairs": "chair", "towels": "towel", "candles": "candle", "bowls": "bowl",
    "baskets": "basket", "pillows": "pillow", "blankets": "blanket", "kettles": "kettle", "plates": "plate",
    "vases": "vase",
}  # fmt: skip
_COLOURS = ("red", "blue", "green", "black", "white", "yellow", "orange", "purple", "grey", "brown")
_NAMES = (
    "Anna", "Jonas", "Maria", "Peter", "Laura", "David", "Sofia", "Martin", "Elena", "Thomas", "Nina", "Oscar",
    "Julia", "Simon", "Clara", "Victor",
)  # fmt: skip
_CITIES = (
    "Riga", "Paris", "Berlin", "Madrid", "Vienna", "Lisbon", "Dublin", "Oslo", "Prague", "Warsaw", "Helsinki", "Rome",
)  # fmt: skip
_DAYS = {
    "Mon": "Monday", "Tue": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Fri": "Friday", "Sat": "Saturday",
}  # fmt: skip
_PATTERNS = (
    "Please send {amount} {colour} {items} to {name} in {city} by {day}.",
    "{name} from {city} wants {amount} {items} in {colour}, delivery on {day}.",
    "Hi, this is {name}. I need {amount} {colour} {items} here in {city} before {day}. Thanks!",
    "Order for {city}: {amount} {items}, {colour}, for {name}, arriving {day}.",
    "By {day}, could you get {amount} {colour} {items} over to {name}? The address is in {city}.",
)


def generate_orders(split: str) -> Iterator[tuple[str, str]]:
    """An endless, reproducible stream of (order, its JSON); no order of one split ever occurs in the other.

    The split is decided by a hash of the facts without the phrasing, so the same order in other words stays on the
    same side.
    """
    generator = random.Random(f"orders/{split}")
    seen: set[str] = set()
    while True:
        amount_word, plural = generator.choice(list(_AMOUNTS)), generator.choice(list(_ITEMS))
        day = generator.choice(list(_DAYS))
        facts: dict[str, str | int] = {
            "item": _ITEMS[plural],
            "amount": _AMOUNTS[amount_word],
            "colour": generator.choice(_COLOURS),
            "name": generator.choice(_NAMES),
            "city": generator.choice(_CITIES),
            "day": _DAYS[day],
        }
        written = amount_word if generator.random() < 0.5 else str(facts["amount"])
        written_day = day if generator.random() < 0.5 else str(facts["day"])
        answer = json.dumps(facts)
        text = generator.choice(_PATTERNS).format(
            amount=written, items=plural, colour=facts["colour"], name=facts["name"], city=facts["city"],
            day=written_day,
        )  # fmt: skip
        if text not in seen and assign_split(answer) == split:
            seen.add(text)
            yield text, answer
