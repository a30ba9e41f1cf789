"""`builtin:spelling` and `builtin:spelling-bee`: what tokens hide from a model, the letters of words."""

from __future__ import annotations

import random
from collections.abc import Iterator

from whet.data.conversation import Message
from whet.data.sample import Sample
from whet.data.words import word

_SPELL = (
    "Spell the word: {word}",
    "How do you spell {word}?",
    "Spell {word} letter by letter.",
    "Which letters does {word} have, in order?",
    "Please write {word} one letter at a time.",
)
_COUNT = (
    "How many times does the letter {letter} occur in {word}?",
    "How many {letter} are in {word}?",
    "Count the letter {letter} in the word {word}.",
    "In {word}, how often do you see the letter {letter}?",
    "What is the number of {letter} in {word}?",
)
_ABSENT_IN_TEN = 2


def spelling(split: str, _calculator: str = "remove") -> Iterator[Sample]:
    """A word and its letters. A word of one split never occurs in the other."""
    generator = random.Random(f"spelling/{split}")
    while True:
        text = word(generator, split)
        yield _sample(generator.choice(_SPELL).format(word=text), ", ".join(text))


def spelling_bee(split: str, _calculator: str = "remove") -> Iterator[Sample]:
    """How often a letter occurs in a word: the letters are gone through, counting, and the last line has the answer."""
    generator = random.Random(f"spelling-bee/{split}")
    while True:
        text = word(generator, split)
        absent = generator.randrange(10) < _ABSENT_IN_TEN
        letter = generator.choice("abcdefghijklmnopqrstuvwxyz" if absent else text)
        yield _sample(generator.choice(_COUNT).format(letter=letter, word=text), _worked(text, letter))


def _worked(text: str, letter: str) -> str:
    lines, seen = [f"Going through {text} letter by letter:"], 0
    for number, each in enumerate(text, 1):
        seen += each == letter
        lines.append(f"{number}. {each}" + (f" ({seen})" if each == letter else ""))
    return "\n".join((*lines, f"The letter {letter} occurs {seen} {'time' if seen == 1 else 'times'}.", f"#### {seen}"))


def _sample(prompt: str, answer: str) -> Sample:
    return Sample((Message("user", prompt), Message("assistant", answer)))
