"""Answers: the same one by one and together, and no further than their end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whet.inference.generate import Sampling, generate
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model

TINY = ModelConfig(path="builtin:tiny")
PROMPTS = [[10, 20, 30], [40], [50, 60, 70, 80, 90, 11, 12], [13, 14], [15]]


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """The definition: the likeliest token after everything so far, again and again."""
    ids = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_answers_in_a_batch_are_those_of_each_prompt_alone(model: Any, batch: int) -> None:
    answers = generate(model, PROMPTS, [], 0, Sampling(max_new_tokens=12), batch=batch)
    assert answers == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) > 1


def test_an_answer_ends_before_its_first_stop(model: Any) -> None:
    whole = [greedy(model, prompt, 12) for prompt in PROMPTS]
    stops = [whole[0][5], whole[2][3]]
    expected = [answer[: next((i for i, token in enumerate(answer) if token in stops), 12)] for answer in whole]
    assert generate(model, PROMPTS, stops, 0, Sampling(max_new_tokens=12)) == expected
    assert any(len(answer) < 12 for answer in expected)


def test_sampling_is_repeated_by_its_seed(model: Any) -> None:
    def sample(seed: int) -> list[list[int]]:
        return generate(model, PROMPTS, [], 0, Sampling(temperature=5.0, seed=seed, max_new_tokens=12))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_every_answer_is_reported_as_done(model: Any) -> None:
    done: list[int] = []
    generate(model, PROMPTS, [], 0, Sampling(max_new_tokens=1), batch=2, done=done.append)
    assert sum(done) == len(PROMPTS)
    assert len(done) > 1


def test_generating_leaves_the_document_attention_in_place() -> None:
    model: Any = load_model(TINY, torch.float32)
    attention.install_backend(model, "sdpa")
    generate(model, PROMPTS[:1], [], 0, Sampling(max_new_tokens=2))
    assert model.config._attn_implementation == attention.registered_name("sdpa")
