"""Built-in datasets: endless, reproducible generated tasks with disjoint train and held-out splits."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from whet.data.conversation import CALCULATOR_SCHEMA, CalculatorStep, Message, calculator_messages

SPLITS = ("train", "held-out")
_HELD_OUT_TENTHS = 2


class GeneratedSample(NamedTuple):
    """A generated conversation; it has no file and no line."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


def _question_and_answer(prompt: str, answer: str) -> GeneratedSample:
    return GeneratedSample((Message("user", prompt), Message("assistant", answer)))


def assign_split(facts: str) -> str:
    """The split of a task, from a hash of its facts without their wording: paraphrases share a split."""
    digest = hashlib.blake2b(facts.encode(), digest_size=4).digest()
    return "held-out" if int.from_bytes(digest) % 10 < _HELD_OUT_TENTHS else "train"


# builtin:orders — a skill that a small chat model lacks and acquires in minutes.
#
# A customer orders something in one of several phrasings. The answer is one line of JSON in a fixed schema: the amount
# as a number, the item in the singular, the weekday in full. The prompt does not show the schema, so an untuned model
# cannot score by chance and exact match is a fair metric.

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
_ORDER_PROMPTS = (
    "Please send {amount} {colour} {items} to {name} in {city} by {day}.",
    "{name} from {city} wants {amount} {items} in {colour}, delivery on {day}.",
    "Hi, this is {name}. I need {amount} {colour} {items} here in {city} before {day}. Thanks!",
    "Order for {city}: {amount} {items}, {colour}, for {name}, arriving {day}.",
    "By {day}, could you get {amount} {colour} {items} over to {name}? The address is in {city}.",
)


def generate_orders(split: str, _calculator: str = "remove") -> Iterator[GeneratedSample]:
    """An order in free text, and its JSON."""
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
        text = generator.choice(_ORDER_PROMPTS).format(
            amount=written, items=plural, colour=facts["colour"], name=facts["name"], city=facts["city"],
            day=written_day,
        )  # fmt: skip
        if text not in seen and assign_split(answer) == split:
            seen.add(text)
            yield _question_and_answer(text, answer)


# builtin:spelling and builtin:spelling-bee — the letters of words, which tokenization hides from a model.

COMMON_WORDS = tuple(
    """
    about above accident across address afternoon again agreement airplane almost alphabet although always amount
    animal another answer apple apartment argue arrive artist attention autumn avenue balance balloon banana basket
    beautiful because bedroom before begin behave believe beneath between bicycle biscuit blanket blossom borrow
    bottle bottom boulder branch bread breakfast breathe bridge bright brother bubble bucket build butter butterfly
    button cabbage cabin calendar camera candle captain careful carpet carrot castle catch ceiling celebrate center
    certain chair challenge champion chapter cheese cherry chicken children chimney chocolate choose circle citizen
    clever climate climb clothes coffee collect color comfort committee common compare complete computer concert
    continue copper corner cottage cotton country courage cousin cradle create creature cricket crystal cupboard
    curious curtain customer dangerous daughter decide deliver dentist describe desert design different difficult
    dinner direction discover distance doctor dollar dragon drawer dream during early earth easily eagle eight
    elephant eleven embarrass employ empty engine enjoy enough entrance envelope environment evening every example
    excellent exercise expect explain factory family famous farmer father favorite feather february fiction field
    finger finish flower follow forest forget fortune forward fountain freedom friend furniture future garden
    gather general gentle giraffe glass goodbye government grammar grandmother grass great grocery guard guess
    guitar hammer happen happiness harbor harvest health heavy height helicopter history holiday honest hospital
    however hundred hungry husband imagine immediate important include increase independent insect instead
    interest island jacket january jealous jewelry journey juice jungle kangaroo keyboard kitchen kitten knife
    knowledge ladder language laughter lawyer leather lemon letter library lightning listen little lizard machine
    magazine manner marble market measure medicine melody member memory message middle minute mirror missing
    moment monkey morning mother mountain muscle museum music mystery narrow nation nature necessary needle
    neighbor nervous nothing notice number object occasion ocean office onion opinion orange orchestra ordinary
    oven oyster packet paint palace paper parallel parent parliament passenger pattern peace peanut pencil people
    pepper perfect perhaps person piano picture pillow planet plastic pleasure pocket poem police possess potato
    power practice prepare president pretty prison private probably problem promise pumpkin purple puzzle quality
    quarter question quickly quiet rabbit railway rainbow reason receive recipe recommend refrigerator remember
    repeat restaurant rhythm ribbon river rocket sailor salad sandwich scarf schedule school science scissors
    season secret sentence separate shadow shoulder silver simple sister skeleton sleeve smooth soldier special
    spoon spring square squirrel station stomach strawberry street student sugar summer sunset surprise sweater
    table teacher television temperature theater thirsty thousand through thunder ticket together tomato tomorrow
    tongue tooth tractor travel treasure triangle trouble trumpet turtle twelve umbrella uncle university until
    useful vacation valley vegetable village violin visitor volcano wagon water weather wednesday whisper whistle
    window winter without woman wonder wooden world writer yellow yesterday zebra
    """.split()  # noqa: SIM905
)
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr r s sh sl sn sp st t th tr v w".split()  # noqa: SIM905
_NUCLEI = "a e i o u ai ea ee ie oa oo ou".split()  # noqa: SIM905
_CODAS = "n r l s t m ck nd nt rt st ll ss ng x".split()  # noqa: SIM905


def random_word(generator: random.Random, split: str) -> str:
    """A word of one split: half of them common English, half invented from syllables."""
    while True:
        text = generator.choice(COMMON_WORDS) if generator.random() < 0.5 else _invent_word(generator)
        if assign_split(text) == split:
            return text


def _invent_word(generator: random.Random) -> str:
    syllables = "".join(generator.choice(_ONSETS) + generator.choice(_NUCLEI) for _ in range(generator.randint(1, 3)))
    return syllables + generator.choice(_CODAS)


_SPELLING_PROMPTS = (
    "Spell the word: {word}",
    "How do you spell {word}?",
    "Spell {word} letter by letter.",
    "Which letters does {word} have, in order?",
    "Please write {word} one letter at a time.",
)
_COUNTING_PROMPTS = (
    "How many times does the letter {letter} occur in {word}?",
    "How many {letter} are in {word}?",
    "Count the letter {letter} in the word {word}.",
    "In {word}, how often do you see the letter {letter}?",
    "What is the number of {letter} in {word}?",
)
_ABSENT_IN_TEN = 2


def generate_spelling(split: str, _calculator: str = "remove") -> Iterator[GeneratedSample]:
    """A word, and its letters."""
    generator = random.Random(f"spelling/{split}")
    while True:
        text = random_word(generator, split)
        yield _question_and_answer(generator.choice(_SPELLING_PROMPTS).format(word=text), ", ".join(text))


def generate_spelling_bee(split: str, calculator: str = "remove") -> Iterator[GeneratedSample]:
    """How often a letter occurs in a word: the answer counts letter by letter and ends with `#### COUNT`. With calls,
    it verifies its count by a call such as `'apple'.count('p')`."""
    generator = random.Random(f"spelling-bee/{split}")
    while True:
        text = random_word(generator, split)
        absent = generator.randrange(10) < _ABSENT_IN_TEN
        letter = generator.choice("abcdefghijklmnopqrstuvwxyz" if absent else text)
        prompt = generator.choice(_COUNTING_PROMPTS).format(letter=letter, word=text)
        counted, count = _count_step_by_step(text, letter), text.count(letter)
        if calculator == "calls":
            check = CalculatorStep(f"{counted}\nChecking this with Python: ", f"'{text}'.count('{letter}')", str(count))
            answer = calculator_messages([check], f"{count}\n#### {count}")
            yield GeneratedSample((Message("user", prompt), *answer), (CALCULATOR_SCHEMA,))
        else:
            yield _question_and_answer(prompt, f"{counted}\n#### {count}")


def _count_step_by_step(text: str, letter: str) -> str:
    lines, seen = [f"Going through {text} letter by letter:"], 0
    for number, each in enumerate(text, 1):
        seen += each == letter
        lines.append(f"{number}. {each}" + (f" ({seen})" if each == letter else ""))
    return "\n".join((*lines, f"The letter {letter} occurs {seen} {'time' if seen == 1 else 'times'}."))


# builtin:arithmetic — calculations of several steps, in text or with the calculator tool.

_ARITHMETIC_PROMPTS = (
    "What is {task}?",
    "Calculate {task}.",
    "Please work out {task}.",
    "{task} = ?",
    "Can you tell me what {task} is?",
)
_SIGNS = {"+": "+", "-": "−", "*": "×", "/": "÷"}


def generate_arithmetic(split: str, calculator: str = "remove") -> Iterator[GeneratedSample]:
    """One to four operations on integers, evaluated left to right; no set of operands occurs in both splits."""
    generator = random.Random(f"arithmetic/{split}")
    while True:
        start = generator.randint(2, 999)
        steps = _random_steps(generator, start, generator.randint(1, 4))
        if assign_split(" ".join(map(str, sorted([start, *(number for _, number, _ in steps)])))) != split:
            continue
        task = generator.choice(_ARITHMETIC_PROMPTS).format(task=_write_expression(start, steps))
        if calculator == "calls":
            yield GeneratedSample((Message("user", task), *_answer_with_calls(start, steps)), (CALCULATOR_SCHEMA,))
        else:
            yield _question_and_answer(task, _answer_in_text(start, steps))


def _random_steps(generator: random.Random, value: int, count: int) -> list[tuple[str, int, int]]:
    """(operation, operand, result) for each step; divisions have no remainder."""
    steps = []
    for _ in range(count):
        divisors = [number for number in range(2, 13) if value and value % number == 0]
        operation = generator.choice("+-*/" if divisors else "+-*")
        number = (
            generator.choice(divisors) if operation == "/" else generator.randint(2, 12 if operation == "*" else 999)
        )
        value = {"+": value + number, "-": value - number, "*": value * number}.get(operation, value // number)
        steps.append((operation, number, value))
    return steps


def _write_expression(start: int, steps: list[tuple[str, int, int]]) -> str:
    """The expression with the parentheses that left-to-right evaluation needs."""
    text, loose = str(start), False  # loose: the last operation was + or −, so × and ÷ need parentheses
    for operation, number, _ in steps:
        text = f"({text})" if loose and operation in "*/" else text
        text, loose = f"{text} {_SIGNS[operation]} {number}", operation in "+-"
    return text


def _answer_in_text(value: int, steps: list[tuple[str, int, int]]) -> str:
    lines = []
    for operation, number, result in steps:
        lines.append(f"{value} {_SIGNS[operation]} {number} = {result}")
        value = result
    return "\n".join((*lines, f"#### {value}"))


def _answer_with_calls(value: int, steps: list[tuple[str, int, int]]) -> tuple[Message, ...]:
    calls, before = [], ""
    for operation, number, result in steps:
        text = f"{before}{value} {_SIGNS[operation]} {number} = "
        calls.append(CalculatorStep(text, f"{value}{operation}{number}", str(result)))
        value, before = result, f"{result}\n"
    return calculator_messages(calls, f"{value}\n#### {value}")


BUILTIN_GENERATORS: dict[str, Callable[[str, str], Iterator[GeneratedSample]]] = {
    "builtin:orders": generate_orders,
    "builtin:spelling": generate_spelling,
    "builtin:spelling-bee": generate_spelling_bee,
    "builtin:arithmetic": generate_arithmetic,
}
"""By name; called with the split and Source.calculator."""
