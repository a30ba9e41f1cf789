"""Sequences that arrive at any time, each in its own way, are completed as each alone."""

from __future__ import annotations

from typing import Any

import pytest

from whet.inference import online_engine
from whet.inference.engine import GenerationOptions
from whet.inference.generate import generate
from whet.inference.kv_cache import probe_kv_cache
from whet.inference.online_engine import OnlineEngine, OnlineSequence, SerialEngine
from whet.inference.sampling import Sampling, rng_keys

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [*range(20, 60)], [16] * 9]
SAMPLINGS = [
    Sampling(max_new_tokens=12),
    Sampling(temperature=1.0, top_k=0, max_new_tokens=20, seed=3),
    Sampling(temperature=1.5, top_p=0.9, min_p=0.01, max_new_tokens=40, seed=4),
    Sampling(temperature=0.7, repetition_penalty=1.3, max_new_tokens=9, seed=5),
    Sampling(repetition_penalty=1.2, max_new_tokens=35),
    Sampling(max_new_tokens=1),
]


def submit_all(engine: OnlineEngine | SerialEngine) -> list[OnlineSequence]:
    """One sequence after each step, while the earlier ones run."""
    rows = []
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        options = GenerationOptions(sampling, frozenset([30]))
        rows.append(
            OnlineSequence(index, prompt, rng_keys([prompt], sampling.seed)[0], sampling.max_new_tokens, options)
        )
        engine.submit(rows[-1])
        engine.step()
    while engine.running or engine.waiting:
        engine.step()
    return rows


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    pairs = zip(PROMPTS, SAMPLINGS, strict=True)
    return [generate(model, [prompt], sampling, [30])[0].ids for prompt, sampling in pairs]


@pytest.mark.parametrize(
    ("max_sequences", "max_tokens"),
    [(64, None), (2, None), (64, 130)],
    ids=["all at once", "two slots", "little memory"],
)
def test_completions_are_those_of_each_alone(
    model: Any, expected: list[list[int]], max_sequences: int, max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little memory, slots grow and the newest sequences lose theirs, to be prefilled again."""
    monkeypatch.setattr(online_engine, "_MIN_SLOT_LENGTH", 16)
    layers = probe_kv_cache(model.eval(), 512)
    assert layers is not None
    engine = OnlineEngine(model, layers, max_sequences, max_tokens=max_tokens)
    assert [row.completion.ids for row in submit_all(engine)] == expected


def test_one_at_a_time_gives_the_same(model: Any, expected: list[list[int]]) -> None:
    assert [row.completion.ids for row in submit_all(SerialEngine(model))] == expected


def test_a_sequence_that_fails_does_not_disturb_others(model: Any) -> None:
    layers = probe_kv_cache(model.eval(), 512)
    assert layers is not None

    def fail(*_: Any) -> None:
        raise ValueError("cannot decode")

    engine = OnlineEngine(model, layers, max_sequences=4)
    good = OnlineSequence(0, [5], 0, 3, GenerationOptions(Sampling(), frozenset()))
    bad = OnlineSequence(1, [6], 0, 3, GenerationOptions(Sampling(), frozenset(), on_token=fail))
    for row in (good, bad):
        engine.submit(row)
    while engine.running or engine.waiting:
        engine.step()
    assert (len(good.completion.ids), good.failure, bad.failure) == (3, None, "cannot decode")


def test_a_cancelled_sequence_frees_its_slot_before_the_next_step(model: Any) -> None:
    layers = probe_kv_cache(model.eval(), 512)
    assert layers is not None
    engine = OnlineEngine(model, layers, max_sequences=1)
    options = GenerationOptions(Sampling(), frozenset())
    first, second, third = (OnlineSequence(i, [5 + i], 0, 100, options) for i in range(3))
    for row in (first, second, third):
        engine.submit(row)
    engine.step()
    assert engine.running == [first]
    first.done = second.done = True
    engine.step()
    assert engine.running == [third]
    assert len(first.completion.ids) == 2
    assert second.completion.ids == []
