"""Words to spell: common English ones, and made-up ones, so that there is no end of them."""

from __future__ import annotations

import random

from whet.data.sample import split_of

COMMON = tuple(
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


def word(generator: random.Random, split: str) -> str:
    """A word of one side: half of them common, half made of syllables."""
    while True:
        text = generator.choice(COMMON) if generator.random() < 0.5 else _made(generator)
        if split_of(text) == split:
            return text


def _made(generator: random.Random) -> str:
    syllables = "".join(generator.choice(_ONSETS) + generator.choice(_NUCLEI) for _ in range(generator.randint(1, 3)))
    return syllables + generator.choice(_CODAS)
