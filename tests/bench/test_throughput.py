"""Throughput from step times and token counts, against values computed by hand."""

from __future__ import annotations

import pytest

from whet.bench.results import (
    StepTimings,
    StepVariation,
    TokenFlops,
    attention_flops_per_token,
    compute_throughput,
    step_variation,
    variation_warnings,
)
from whet.bench.workload import BenchSettings, token_flops

STEPS = StepTimings(ended=[110.0, 114.0, 115.0, 117.0], tokens=[1, 100, 200, 400], supervised=[1, 10, 20, 40])


def test_only_steps_after_the_warm_up_count() -> None:
    found = compute_throughput(
        STEPS,
        warm=2,
        began=100.0,
        flops=TokenFlops(weights=10**10, active_weights=10**9, attention=0.0, is_adapter=False),
    )
    assert found.tokens_per_s == 600 / 3
    assert found.supervised_per_s == 60 / 3
    assert found.step_ms == 1500
    assert found.first_step_s == 10
    assert found.tflops == pytest.approx(200 * 6e9 / 1e12)


def test_frozen_weights_cost_4_instead_of_6_flops() -> None:
    assert TokenFlops(weights=99, active_weights=10, attention=3.0, is_adapter=True).per_token == 43
    assert TokenFlops(weights=99, active_weights=10, attention=3.0, is_adapter=False).per_token == 63


def test_experts_count_by_the_share_that_a_token_uses() -> None:
    from transformers import Qwen3MoeConfig

    shape = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1,
    )  # fmt: skip
    settings = BenchSettings("m", "lora", None, 1, 8, 3, 1, "bf16", "none", None, "cpu")
    found = token_flops(shape, settings, [8])
    assert found.weights - found.active_weights == 2 * 6 * 3 * 32 * 16
    assert found.per_token == 4 * found.active_weights + found.attention


def test_attention_flops_follow_the_published_formula() -> None:
    # Two conversations of 1 and 3 tokens: a token is in one of mean length (1 + 9) / 4.
    assert attention_flops_per_token(layers=2, heads=4, head_width=8, lengths=[1, 3]) == 6 * 2 * 4 * 8 * 2.5


def test_variation_is_measured_in_tokens_per_second() -> None:
    constant_rate = StepTimings(ended=[0.0, 1.0, 3.0], tokens=[5, 100, 200], supervised=[1, 1, 1])
    assert step_variation(constant_rate, warm=1) == StepVariation(
        spread=1.0, median=100.0, first_half=100.0, second_half=100.0
    )
    assert variation_warnings(step_variation(constant_rate, warm=1)) == []
    assert step_variation(STEPS, warm=1) == StepVariation(spread=8.0, median=200.0, first_half=112.5, second_half=200.0)
    assert step_variation(STEPS, warm=3) == StepVariation(spread=1.0, median=200.0, first_half=200.0, second_half=200.0)


def test_warnings_for_a_slow_step_and_for_a_speed_up() -> None:
    def warnings(*rates: int) -> list[str]:
        steps = StepTimings(
            ended=[float(second) for second in range(len(rates) + 1)], tokens=[1, *rates], supervised=[]
        )
        return variation_warnings(step_variation(steps, warm=1))

    (slow,) = warnings(1000, 1000, 700, 1000, 1000, 1000)
    assert "1.4 times as long" in slow
    assert "the median step does 1,000 tokens/s" in slow
    (settling,) = warnings(1000, 1020, 1040, 1060, 1080, 1100)
    assert "still getting faster: the median is 1,020 tokens/s" in settling
    assert "1,080 in the second" in settling
    assert warnings(1000, 1010, 1000, 1005, 1010, 1000) == []
    assert warnings(1050, 1040, 1030, 1020, 1010, 1000) == []
