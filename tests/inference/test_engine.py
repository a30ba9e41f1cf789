"""Completions equal those of transformers, for every model family and in every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.inference.engine import BatchingPolicy, Engine, GenerationOptions, truncate_at_stop_string
from whet.inference.generate import generate
from whet.inference.kv_cache import probe_kv_cache
from whet.inference.sampling import (
    Sampling,
    counter_based_uniform,
    filtered_probabilities,
    rng_keys,
    sample_next_tokens,
)
from whet.model.attention import native_attention

_HALF = ["sliding_attention", "full_attention"]
SUPPORTED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 6, "layer_types": _HALF},
    "Gemma4Text": {
        "head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "layer_types": _HALF,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    },
    "GPT2": {},
    "GPTNeoX": {},
    "Granite": {"attention_multiplier": 0.3},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GptOss": {
        "head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": _HALF,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "DeepseekV3": {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
        "num_key_value_heads": 4, "first_k_dense_replace": 2,
    },
}  # fmt: skip
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Bloom": {},  # ALiBi inside its own attention
    "Llama4Text": {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8},
}
_SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def model_of(architecture: str) -> Any:
    """Random, with weights large enough that tokens differ."""
    import transformers

    settings = {**_SHAPE, **(SUPPORTED | UNSUPPORTED)[architecture]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            nn.init.normal_(parameter)
        elif parameter.ndim > 1:
            parameter.data.mul_(5)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of("Llama")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """1 to 23 tokens: a window of 6 is exceeded by some prompts, by some completions, and by none."""
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 1, 23, 17, 2, 9, 3)
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def generate_ids(*arguments: Any, **options: Any) -> list[list[int]]:
    return [completion.ids for completion in generate(*arguments, **options)]


def by_transformers(model: Any, prompt: list[int], **options: Any) -> list[int]:
    tokens = torch.tensor([prompt])
    with native_attention(model):
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
            **{"eos_token_id": None, "max_new_tokens": 12, **options},
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_greedy_completions_are_those_of_transformers(architecture: str, prompts: list[list[int]]) -> None:
    model = model_of(architecture)
    assert probe_kv_cache(model, 40) is not None, "the KV cache should support it"
    expected = [by_transformers(model, prompt) for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) > 1
    for batch_size in (1, 3, 32):
        assert generate_ids(model, prompts, Sampling(max_new_tokens=12), batch_size=batch_size) == expected


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_models_without_cache_support_generate_through_transformers(
    architecture: str, prompts: list[list[int]]
) -> None:
    model = model_of(architecture)
    assert probe_kv_cache(model, 40) is None
    expected = [by_transformers(model, prompt) for prompt in prompts]
    streamed: list[tuple[int, int]] = []
    found = generate(
        model, prompts, Sampling(max_new_tokens=12), on_token=lambda index, token: streamed.append((index, token))
    )
    assert [answer.ids for answer in found] == expected
    assert [[token for row, token in streamed if row == number] for number in range(len(prompts))] == expected
    stop = expected[0][4]
    ended = generate(model, prompts[:1], Sampling(max_new_tokens=12), [stop])[0]
    assert (ended.ids, ended.finish_reason) == (expected[0][: expected[0].index(stop)], "end")
    string = as_text(expected[2])[5:12]
    cut = generate(model, prompts[:3], Sampling(max_new_tokens=12, stop=(string,)), decode=as_text)
    assert [answer.finish_reason for answer in cut] == [
        "string" if string in as_text(ids) else "length" for ids in expected[:3]
    ]
    assert cut[2].text == as_text(expected[2])[: as_text(expected[2]).index(string)]
    sampled = Sampling(temperature=2.0, max_new_tokens=5, top_p=0.9)
    assert generate(model, prompts, sampled)[2] == generate(model, prompts[2:3], sampled)[0]


def test_a_prompt_takes_the_slot_of_a_finished_sequence(llama: Any, prompts: list[list[int]]) -> None:
    limits = [3, 14, 1, 7, 2, 9, 5]
    steps: list[int] = []
    hook = llama.register_forward_pre_hook(lambda *_: steps.append(1))
    finished: list[int] = []
    try:
        found = generate_ids(
            llama, prompts, Sampling(max_new_tokens=14), batch_size=2, limits=limits, on_finished=finished.append
        )
    finally:
        hook.remove()
    expected = [by_transformers(llama, prompt, max_new_tokens=n) for prompt, n in zip(prompts, limits, strict=True)]
    assert found == expected
    assert sum(finished) == len(prompts)
    # two slots: 41 tokens, 7 of them from prefill; static batches of two would take 9 + 14 + 3 + 7 steps at best
    assert len(steps) <= 7 + 25


@pytest.mark.parametrize("batch_size", [1, 3, 6])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_batching_policy_of_a_gpu_gives_the_same_completions(
    llama: Any, prompts: list[list[int]], batch_size: int, steps: int
) -> None:
    """Several decode steps between reads, padded batches, and prefill that waits for free slots."""
    sampling = Sampling(temperature=1.5, repetition_penalty=1.2, max_new_tokens=12)
    limits = [3, 12, 1, 7, 2, 9, 5]
    plain = generate(llama, prompts, sampling, [11, 30], limits=limits)
    assert {answer.finish_reason for answer in plain} == {"end", "length"}
    layers = probe_kv_cache(llama, 64)
    assert layers is not None
    policy = BatchingPolicy(steps, max_prefill_tokens=30, free_slot_divisor=2, pad_to_sizes=True)
    engine = Engine(llama, GenerationOptions(sampling, frozenset([11, 30])), layers, policy)
    assert engine.run(prompts, limits, batch_size, lambda count: None) == plain


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_sampled_completion_depends_on_seed_and_prompt_alone(
    llama: Any, prompts: list[list[int]], batch_size: int
) -> None:
    def sample(chosen: list[list[int]], batch_size: int, seed: int = 5) -> list[list[int]]:
        sampling = Sampling(temperature=2.0, top_p=0.95, min_p=0.01, seed=seed, max_new_tokens=9)
        return generate_ids(llama, chosen, sampling, batch_size=batch_size)

    alone = [sample([prompt], 1)[0] for prompt in prompts]
    assert sample(prompts, batch_size) == alone
    assert sample(prompts[::-1], batch_size) == alone[::-1]
    assert sample(prompts, batch_size, seed=6) != alone
    twice = sample([prompts[0], prompts[0]], 2)
    assert twice[0] == alone[0] != twice[1]  # a repeated prompt gets other random numbers


def test_repetition_penalty_and_stop_tokens_are_those_of_transformers(llama: Any, prompts: list[list[int]]) -> None:
    expected = [by_transformers(llama, prompt, repetition_penalty=1.7) for prompt in prompts]
    assert expected != [by_transformers(llama, prompt) for prompt in prompts]
    penalised = Sampling(repetition_penalty=1.7, max_new_tokens=12)
    found = generate_ids(llama, prompts, penalised, batch_size=3)
    assert found == expected
    stops = [expected[0][3], expected[2][5]]
    ended = generate(llama, prompts, penalised, stops, batch_size=3)
    for answer, whole in zip(ended, expected, strict=True):
        first = next((i for i, token in enumerate(whole) if token in stops), None)
        assert (answer.ids, answer.finish_reason) == (whole[:first], "length" if first is None else "end")
    assert {answer.finish_reason for answer in ended} == {"length", "end"}


def as_text(ids: Any) -> str:
    return "".join(f"<{number}>" for number in ids)


def test_a_stop_string_may_start_inside_a_token(llama: Any, prompts: list[list[int]]) -> None:
    whole = by_transformers(llama, prompts[2])
    stop = as_text(whole)[as_text(whole).index(">") + 7 :][:6]  # from the middle of a token into the next ones
    (found,) = generate(llama, prompts[2:3], Sampling(max_new_tokens=12, stop=(stop,)), decode=as_text)
    assert found.finish_reason == "string"
    before = as_text(whole)[: as_text(whole).index(stop)]
    assert found.text == before
    assert as_text(found.ids).startswith(before)
    assert not as_text(found.ids[:-1]).startswith(before)
    with pytest.raises(WhetError, match=r"stop: .*decodes tokens"):
        generate(llama, prompts[:1], Sampling(stop=("x",)))


def test_no_token_before_a_stop_string_is_lost() -> None:
    pieces = {1: "a", 2: "bc", 3: "de"}

    def text(ids: Any) -> str:
        return "".join(pieces[i] for i in ids)

    assert truncate_at_stop_string([1, 2, 3], ["cd"], text) == ([1, 2], "ab")
    assert truncate_at_stop_string([1, 2, 3], ["a"], text) == ([], "")
    assert truncate_at_stop_string([1, 2, 3], ["bc", "e"], text) == ([1], "a")
    assert truncate_at_stop_string([1, 2, 3], ["x"], text) is None


def test_every_token_is_streamed(llama: Any, prompts: list[list[int]]) -> None:
    streamed: list[tuple[int, int]] = []
    found = generate(
        llama, prompts, Sampling(max_new_tokens=6), batch_size=4, on_token=lambda *event: streamed.append(event)
    )
    for number, completion in enumerate(found):
        assert [token for row, token in streamed if row == number] == completion.ids
    assert [row for row, _ in streamed] != sorted(row for row, _ in streamed)


class InsertAfterThree:
    """A tool that inserts the tokens 7, 8, 9 after the first three."""

    def new_state(self) -> InsertAfterThree:
        fresh = InsertAfterThree()
        fresh.seen = []
        return fresh

    def observe(self, token: int) -> list[int]:
        self.seen.append(token)
        return [7, 8, 9] if len(self.seen) == 3 else []


def test_inserted_tokens_are_prompt_for_the_model_and_override_a_stop_token(
    llama: Any, prompts: list[list[int]]
) -> None:
    expected = []
    for prompt in prompts:
        start = by_transformers(llama, prompt, max_new_tokens=3)
        expected.append([*start, 7, 8, 9, *by_transformers(llama, [*prompt, *start, 7, 8, 9], max_new_tokens=4)])
    tool: Any = InsertAfterThree()
    assert generate_ids(llama, prompts, Sampling(max_new_tokens=10), batch_size=3, tool=tool) == expected
    row = next(i for i, answer in enumerate(expected) if answer[2] not in answer[:2])
    stops = [expected[row][2], 9]  # the second is the tool's own
    (found,) = generate(llama, [prompts[row]], Sampling(max_new_tokens=7), stops, tool=tool)
    assert found.ids == expected[row][:7]


def test_a_prompt_that_fills_the_context_is_an_error_and_a_completion_ends_with_it(llama: Any) -> None:
    with pytest.raises(WhetError, match=r"64 tokens, and the model's context is 64 .*Shorten the prompt"):
        generate(llama, [[5] * 64], Sampling())
    (found,) = generate(llama, [[5] * 60], Sampling(max_new_tokens=100))
    assert (len(found.ids), found.finish_reason) == (4, "length")
    with pytest.raises(WhetError, match="a prompt is empty"):
        generate(llama, [[]], Sampling())
    assert generate(llama, [], Sampling()) == []


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 0}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"stop": ("",)}]
)
def test_settings_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(WhetError, match=next(iter(options))):
        Sampling(**options)


def probabilities_of(logits: Tensor, sampling: Sampling) -> Tensor:
    probabilities, tokens = filtered_probabilities(logits, sampling)
    whole = torch.zeros_like(logits)
    whole.scatter_(
        1, torch.arange(logits.shape[1])[None].expand(len(logits), -1) if tokens is None else tokens, probabilities
    )
    return whole / whole.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("top_k", [0, 7, 50, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_filters_keep_the_tokens_that_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn((20, 100), generator=torch.Generator().manual_seed(0)) * 2
    expected = TemperatureLogitsWarper(0.7)(None, logits)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    expected = MinPLogitsWarper(min_p)(None, expected) if min_p else expected
    found = probabilities_of(logits, Sampling(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.allclose(found, expected.softmax(dim=-1), atol=1e-6)


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 5}, {"top_k": 0, "min_p": 0.05}])
def test_sampled_frequencies_match_probabilities(options: dict[str, Any]) -> None:
    logits = torch.randn((1, 30), generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=1.0, **options)
    count = 40_000
    keys = torch.tensor(rng_keys([[1, 2]], 3)).expand(count)
    drawn = sample_next_tokens(logits.expand(count, -1), keys, torch.arange(count), sampling)
    found, expected = torch.bincount(drawn, minlength=30) / count, probabilities_of(logits, sampling)[0]
    assert (found - expected).abs().max() < 0.01
    assert (found[expected == 0] == 0).all()


def test_random_numbers_are_uniform_and_differ_by_key_and_count() -> None:
    keys = torch.tensor(rng_keys([[number] for number in range(200)], 0))
    numbers = counter_based_uniform(keys[:, None].expand(200, 200).flatten(), torch.arange(200).repeat(200))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5
    grid = numbers.view(200, 200)
    assert torch.corrcoef(grid).fill_diagonal_(0).abs().max() < 0.4
    assert len(numbers.unique()) > 39_900
