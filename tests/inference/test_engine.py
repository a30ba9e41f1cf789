"""Answers are transformers' own, in every family, whoever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.inference.engine import BatchingPolicy, Engine, GenerationOptions, truncate_at_stop_string
from whet.inference.generate import Sampling, generate, generate_completions
from whet.inference.kv_cache import probe_kv_cache
from whet.inference.sampling import counter_based_uniform, filtered_probabilities, rng_keys, sample_next_tokens
from whet.model.attention import native_attention

_HALF = ["sliding_attention", "full_attention"]
SERVED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 6, "layer_types": _HALF},
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
UNSERVED: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Bloom": {},  # positions as a bias of its own attention
    "Llama4Text": {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8},
}
_SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def model_of(architecture: str) -> Any:
    """Random, with weights loud enough that tokens differ."""
    import transformers

    settings = {**_SHAPE, **(SERVED | UNSERVED)[architecture]}
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
    """Of 1 to 23 tokens, so that windows of 6 are outgrown by some prompts, by some answers, and by none."""
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 1, 23, 17, 2, 9, 3)
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def by_transformers(model: Any, prompt: list[int], **options: Any) -> list[int]:
    tokens = torch.tensor([prompt])
    with native_attention(model):
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
            **{"eos_token_id": None, "max_new_tokens": 12, **options},
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", SERVED)
def test_greedy_answers_are_those_of_transformers(architecture: str, prompts: list[list[int]]) -> None:
    model = model_of(architecture)
    assert probe_kv_cache(model, 40) is not None, "it should be served through slots"
    expected = [by_transformers(model, prompt) for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) > 1
    for batch in (1, 3, 32):
        assert generate(model, prompts, [], 0, Sampling(max_new_tokens=12), batch) == expected


@pytest.mark.parametrize("architecture", UNSERVED)
def test_models_that_slots_do_not_hold_answer_through_transformers(architecture: str, prompts: list[list[int]]) -> None:
    model = model_of(architecture)
    assert probe_kv_cache(model, 40) is None
    expected = [by_transformers(model, prompt) for prompt in prompts]
    heard: list[tuple[int, int]] = []
    found = generate_completions(
        model, prompts, [], 0, Sampling(max_new_tokens=12), heard=lambda number, token: heard.append((number, token))
    )
    assert [answer.ids for answer in found] == expected
    assert [[token for row, token in heard if row == number] for number in range(len(prompts))] == expected
    stop = expected[0][4]
    ended = generate_completions(model, prompts[:1], [stop], 0, Sampling(max_new_tokens=12))[0]
    assert (ended.ids, ended.stopped) == (expected[0][: expected[0].index(stop)], "end")
    string = as_text(expected[2])[5:12]
    cut = generate_completions(model, prompts[:3], [], 0, Sampling(max_new_tokens=12, stop=(string,)), text=as_text)
    assert [answer.stopped for answer in cut] == [
        "string" if string in as_text(ids) else "length" for ids in expected[:3]
    ]
    assert cut[2].text == as_text(expected[2])[: as_text(expected[2]).index(string)]
    sampled = Sampling(temperature=2.0, max_new_tokens=5, top_p=0.9)
    assert generate(model, prompts, [], 0, sampled)[2] == generate(model, prompts[2:3], [], 0, sampled)[0]


def test_a_prompt_takes_the_slot_of_an_answer_that_is_finished(llama: Any, prompts: list[list[int]]) -> None:
    limits = [3, 14, 1, 7, 2, 9, 5]
    steps: list[int] = []
    hook = llama.register_forward_pre_hook(lambda *_: steps.append(1))
    finished: list[int] = []
    try:
        found = generate(llama, prompts, [], 0, Sampling(max_new_tokens=14), 2, finished.append, limits=limits)
    finally:
        hook.remove()
    expected = [by_transformers(llama, prompt, max_new_tokens=n) for prompt, n in zip(prompts, limits, strict=True)]
    assert found == expected
    assert sum(finished) == len(prompts)
    # two slots: 41 tokens, 7 of them out of prompts; batches of two would take their longest, 9 + 14 + 3 + 7 at best
    assert len(steps) <= 7 + 25


@pytest.mark.parametrize("batch", [1, 3, 6])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_pace_of_a_gpu_gives_the_same_answers(llama: Any, prompts: list[list[int]], batch: int, steps: int) -> None:
    """Several steps without a look, rows filled up, prompts that wait until some slots are free."""
    sampling = Sampling(temperature=1.5, repetition_penalty=1.2, max_new_tokens=12)
    limits = [3, 12, 1, 7, 2, 9, 5]
    plain = generate_completions(llama, prompts, [11, 30], 0, sampling, limits=limits)
    assert {answer.stopped for answer in plain} == {"end", "length"}
    seen = probe_kv_cache(llama, 64)
    assert seen is not None
    engine = Engine(
        llama, GenerationOptions(sampling, frozenset([11, 30])), seen, BatchingPolicy(steps, 30, 2, few_sizes=True)
    )
    assert engine.run(prompts, limits, batch, lambda count: None) == plain


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_sampled_answer_depends_on_seed_and_prompt_alone(llama: Any, prompts: list[list[int]], batch: int) -> None:
    def sample(chosen: list[list[int]], batch: int, seed: int = 5) -> list[list[int]]:
        sampling = Sampling(temperature=2.0, top_p=0.95, min_p=0.01, seed=seed, max_new_tokens=9)
        return generate(llama, chosen, [], 0, sampling, batch)

    alone = [sample([prompt], 1)[0] for prompt in prompts]
    assert sample(prompts, batch) == alone
    assert sample(prompts[::-1], batch) == alone[::-1]
    assert sample(prompts, batch, seed=6) != alone
    twice = sample([prompts[0], prompts[0]], 2)
    assert twice[0] == alone[0] != twice[1]  # asked again, it may say something else


def test_repetition_penalty_and_stops_are_those_of_transformers(llama: Any, prompts: list[list[int]]) -> None:
    expected = [by_transformers(llama, prompt, repetition_penalty=1.7) for prompt in prompts]
    assert expected != [by_transformers(llama, prompt) for prompt in prompts]
    found = generate(llama, prompts, [], 0, Sampling(repetition_penalty=1.7, max_new_tokens=12), batch=3)
    assert found == expected
    stops = [expected[0][3], expected[2][5]]
    ended = generate_completions(llama, prompts, stops, 0, Sampling(repetition_penalty=1.7, max_new_tokens=12), batch=3)
    for answer, whole in zip(ended, expected, strict=True):
        first = next((i for i, token in enumerate(whole) if token in stops), None)
        assert (answer.ids, answer.stopped) == (whole[:first], "length" if first is None else "end")
    assert {answer.stopped for answer in ended} == {"length", "end"}


def as_text(ids: Any) -> str:
    return "".join(f"<{number}>" for number in ids)


def test_a_text_ends_an_answer_wherever_tokens_are_cut(llama: Any, prompts: list[list[int]]) -> None:
    whole = by_transformers(llama, prompts[2])
    stop = as_text(whole)[as_text(whole).index(">") + 7 :][:6]  # from the middle of a token into the next ones
    (found,) = generate_completions(llama, prompts[2:3], [], 0, Sampling(max_new_tokens=12, stop=(stop,)), text=as_text)
    assert found.stopped == "string"
    before = as_text(whole)[: as_text(whole).index(stop)]
    assert found.text == before
    assert as_text(found.ids).startswith(before)
    assert not as_text(found.ids[:-1]).startswith(before)
    with pytest.raises(WhetError, match="decodes tokens"):
        generate_completions(llama, prompts[:1], [], 0, Sampling(stop=("x",)))


def test_no_token_is_lost_before_a_text_that_ends_an_answer() -> None:
    pieces = {1: "a", 2: "bc", 3: "de"}

    def text(ids: Any) -> str:
        return "".join(pieces[i] for i in ids)

    assert truncate_at_stop_string([1, 2, 3], ["cd"], text) == ([1, 2], "ab")
    assert truncate_at_stop_string([1, 2, 3], ["a"], text) == ([], "")
    assert truncate_at_stop_string([1, 2, 3], ["bc", "e"], text) == ([1], "a")
    assert truncate_at_stop_string([1, 2, 3], ["x"], text) is None


def test_every_token_is_heard_as_it_comes(llama: Any, prompts: list[list[int]]) -> None:
    heard: list[tuple[int, int]] = []
    found = generate_completions(
        llama, prompts, [], 0, Sampling(max_new_tokens=6), 4, heard=lambda *what: heard.append(what)
    )
    for number, answer in enumerate(found):
        assert [token for row, token in heard if row == number] == answer.ids
    assert [row for row, _ in heard] != sorted(row for row, _ in heard)


class Parrot:
    """After each 3rd token of its own, three further ones are forced."""

    def watch(self) -> Parrot:
        fresh = Parrot()
        fresh.seen = []
        return fresh

    def see(self, token: int) -> list[int]:
        self.seen.append(token)
        return [7, 8, 9] if len(self.seen) == 3 else []


def test_what_a_tool_says_is_read_by_the_model_and_a_stop_before_it_ends_nothing(
    llama: Any, prompts: list[list[int]]
) -> None:
    expected = []
    for prompt in prompts:
        start = by_transformers(llama, prompt, max_new_tokens=3)
        expected.append([*start, 7, 8, 9, *by_transformers(llama, [*prompt, *start, 7, 8, 9], max_new_tokens=4)])
    tools: Any = Parrot()
    assert generate(llama, prompts, [], 0, Sampling(max_new_tokens=10), 3, tools=tools) == expected
    row = next(i for i, answer in enumerate(expected) if answer[2] not in answer[:2])
    stops = [expected[row][2], 9]  # the second is the tool's own
    (found,) = generate_completions(llama, [prompts[row]], stops, 0, Sampling(max_new_tokens=7), tools=tools)
    assert found.ids == expected[row][:7]


def test_a_prompt_that_fills_the_context_is_refused_and_an_answer_ends_with_it(llama: Any) -> None:
    with pytest.raises(WhetError, match=r"64 tokens and the model reads 64 .*Shorten it"):
        generate(llama, [[5] * 64], [], 0, Sampling())
    (found,) = generate_completions(llama, [[5] * 60], [], 0, Sampling(max_new_tokens=100))
    assert (len(found.ids), found.stopped) == (4, "length")
    with pytest.raises(WhetError, match="no tokens"):
        generate(llama, [[]], [], 0, Sampling())
    assert generate(llama, [], [], 0, Sampling()) == []


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 0}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"stop": ("",)}]
)
def test_numbers_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(WhetError, match=next(iter(options))):
        Sampling(**options)


def shares_of(logits: Tensor, sampling: Sampling) -> Tensor:
    shares, tokens = filtered_probabilities(logits, sampling)
    whole = torch.zeros_like(logits)
    whole.scatter_(1, torch.arange(logits.shape[1])[None].expand(len(logits), -1) if tokens is None else tokens, shares)
    return whole / whole.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("top_k", [0, 7, 50, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_what_is_left_to_choose_from_is_what_transformers_leaves(top_k: int, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn((20, 100), generator=torch.Generator().manual_seed(0)) * 2
    expected = TemperatureLogitsWarper(0.7)(None, logits)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    expected = MinPLogitsWarper(min_p)(None, expected) if min_p else expected
    found = shares_of(logits, Sampling(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.allclose(found, expected.softmax(dim=-1), atol=1e-6)


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 5}, {"top_k": 0, "min_p": 0.05}])
def test_tokens_are_drawn_as_often_as_they_are_likely(options: dict[str, Any]) -> None:
    logits = torch.randn((1, 30), generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=1.0, **options)
    count = 40_000
    keys = torch.tensor(rng_keys([[1, 2]], 3)).expand(count)
    drawn = sample_next_tokens(logits.expand(count, -1), keys, torch.arange(count), sampling)
    found, expected = torch.bincount(drawn, minlength=30) / count, shares_of(logits, sampling)[0]
    assert (found - expected).abs().max() < 0.01
    assert (found[expected == 0] == 0).all()


def test_random_numbers_are_even_and_differ_by_row_and_by_count() -> None:
    keys = torch.tensor(rng_keys([[number] for number in range(200)], 0))
    numbers = counter_based_uniform(keys[:, None].expand(200, 200).flatten(), torch.arange(200).repeat(200))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5
    grid = numbers.view(200, 200)
    assert torch.corrcoef(grid).fill_diagonal_(0).abs().max() < 0.4
    assert len(numbers.unique()) > 39_900
