"""`builtin:spelling` and `builtin:spelling-bee`: spelling words and counting letters, which tokens hide from a model."""

from __future__ import annotations

import random
from collections.abc import Iterator

from whet.data.builtin.splits import GeneratedSample, assign_split
from whet.data.conversation import Message

# Words to spell: common English ones, and made-up ones, so that there is no end of them.

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
    """A word of one side: half of them common, half made of syllables."""
    while True:
        text = generator.choice(COMMON_WORDS) if generator.random() < 0.5 else _invent_word(generator)
        if assign_split(text) == split:
            return text


def _invent_word(generator: random.Random) -> str:
    syllables = "".join(generator.choice(_ONSETS) + generator.choice(_NUCLEI) for _ in range(generator.randint(1, 3)))
    return syllables + generator.choice(_CODAS)


# `builtin:spelling` and `builtin:spelling-bee`: what tokens hide from a model, the letters of words.

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
    """A word and its letters. A word of one split never occurs in the other."""
    generator = random.Random(f"spelling/{split}")
    while True:
        text = random_word(generator, split)
        yield _sample(generator.choice(_SPELLING_PROMPTS).format(word=text), ", ".join(text))


def generate_spelling_bee(split: str, _calculator: str = "remove") -> Iterator[GeneratedSample]:
    """How often a letter occurs in a word: the letters are gone through, counting, and the last line has the answer."""
    generator = random.Random(f"spelling-bee/{split}")
    while True:
        text = random_word(generator, split)
        absent = generator.randrange(10) < _ABSENT_IN_TEN
        letter = generator.choice("abcdefghijklmnopqrstuvwxyz" if absent else text)
        yield _sample(
            generator.choice(_COUNTING_PROMPTS).format(letter=letter, word=text), _count_step_by_step(text, letter)
        )


def _count_step_by_step(text: str, letter: str) -> str:
    lines, seen = [f"Going through {text} letter by letter:"], 0
    for number, each in enumerate(text, 1):
        seen += each == letter
        lines.append(f"{number}. {each}" + (f" ({seen})" if each == letter else ""))
    return "\n".join((*lines, f"The letter {letter} occurs {seen} {'time' if seen == 1 else 'times'}.", f"#### {seen}"))


def _sample(prompt: str, answer: str) -> GeneratedSample:
    return GeneratedSample((Message("user", prompt), Message("assistant", answer)))
