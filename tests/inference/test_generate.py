"""Completions: the same one by one and in a batch, and no longer than their stop token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tiny_architectures import tiny_model
from whet.exporting.spec import ExportFindings, GenerationSettings
from whet.exporting.verification import check_generation_stops
from whet.inference.generate import generate
from whet.inference.sampling import Sampling
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer

TINY = ModelConfig(path="builtin:tiny")
PROMPTS = [[10, 20, 30], [40], [50, 60, 70, 80, 90, 11, 12], [13, 14], [15]]


def generate_ids(*arguments: Any, **options: Any) -> list[list[int]]:
    return [completion.ids for completion in generate(*arguments, **options)]


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """The definition: append the most likely next token, repeatedly."""
    ids = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_a_batch_generates_what_each_prompt_alone_does(model: Any, batch_size: int) -> None:
    answers = generate_ids(model, PROMPTS, Sampling(max_new_tokens=12), batch_size=batch_size)
    assert answers == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) > 1


def test_a_completion_ends_before_its_first_stop_token(model: Any) -> None:
    whole = [greedy(model, prompt, 12) for prompt in PROMPTS]
    stops = [whole[0][5], whole[2][3]]
    expected = [answer[: next((i for i, token in enumerate(answer) if token in stops), 12)] for answer in whole]
    assert generate_ids(model, PROMPTS, Sampling(max_new_tokens=12), stops) == expected
    assert any(len(answer) < 12 for answer in expected)


def test_sampling_is_reproducible_by_its_seed(model: Any) -> None:
    def sample(seed: int) -> list[list[int]]:
        return generate_ids(model, PROMPTS, Sampling(temperature=5.0, seed=seed, max_new_tokens=12))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_every_finished_completion_is_reported(model: Any) -> None:
    finished: list[int] = []
    generate(model, PROMPTS, Sampling(max_new_tokens=1), batch_size=2, on_finished=finished.append)
    assert sum(finished) == len(PROMPTS)
    assert len(finished) > 1


def test_generating_leaves_the_document_attention_in_place() -> None:
    model: Any = load_model(TINY, torch.float32)
    attention.install_backend(model, "sdpa")
    generate(model, PROMPTS[:1], Sampling(max_new_tokens=2))
    assert model.config._attn_implementation == attention.registered_name("sdpa")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3}, {"min_new_tokens": 12}, {"bad_words_ids": [[5]], "suppress_tokens": list(range(40))},
        {"stop_strings": ["a"]}, {"penalty_alpha": 0.6, "top_k": 4}, {"return_dict_in_generate": True},
        {"prompt_lookup_num_tokens": 3}, {"watermarking_config": {"bias": 9.0}}, {"forced_eos_token_id": 7},
    ],
    ids=str,
)  # fmt: skip
def test_generation_config_of_the_model_does_not_change_completions(settings: dict[str, Any]) -> None:
    """transformers generates for Bloom, and completes the settings that it is given with the model's own."""
    model: Any = tiny_model("bloom", torch.float32)
    whole = generate_ids(model, [[10, 20, 30], [40, 50, 60]], Sampling(max_new_tokens=8))
    stops = [whole[0][4]]
    expected = generate_ids(model, [[10, 20, 30], [40, 50, 60]], Sampling(max_new_tokens=8), stops)
    own = model.generation_config = GenerationConfig(eos_token_id=stops, **settings)
    assert generate_ids(model, [[10, 20, 30], [40, 50, 60]], Sampling(max_new_tokens=8), stops) == expected
    findings = ExportFindings()
    tokenizer = load_tokenizer(TINY)
    check_generation_stops(GenerationSettings(tokenizer, tuple(stops), stops[0], {}), model, [10, 20], findings)
    assert findings.reasons == []
    assert model.generation_config is own


def test_a_model_whose_cache_fails_generates_without_one(capfd: pytest.CaptureFixture[str]) -> None:
    """As that of a narrow xLSTM does in transformers 5.22. Its export is verified by generating, too."""
    network: Any = tiny_model("xlstm", torch.float32)
    prompts = [[5, 7, 9, 11], [3, 4, 5, 6, 8]]
    answers = generate_ids(network, prompts, Sampling(max_new_tokens=3))
    assert capfd.readouterr().err.count("xLSTMForCausalLM cannot generate with its cache") == 1
    network.config.use_cache = False
    assert answers == [greedy(network, prompt, 3) for prompt in prompts]
    findings = ExportFindings()
    check_generation_stops(GenerationSettings(load_tokenizer(TINY), [2], 2, {}), network, prompts[0], findings)
    assert findings.reasons == []
