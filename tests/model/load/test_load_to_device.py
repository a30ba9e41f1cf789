"""Weights are read directly onto the device, with the same bits as through the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.lora.peft_adapters import add_adapter

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoX": {},
    "Gemma3Text": {"head_dim": 8},
    "Phi3": {},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV3": {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
TYPES = [torch.float32, torch.bfloat16, torch.float64]


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights, saved buffers and those that are not saved, as a rotary embedding's frequencies."""
    yield from model.state_dict().items()
    yield from model.named_buffers()


def same(one: nn.Module, two: nn.Module, device: torch.device) -> None:
    for (name, expected), (other, found) in zip(tensors(one), tensors(two), strict=True):
        assert (name, expected.dtype) == (other, found.dtype)
        assert found.device == device, name
        assert torch.equal(expected, found.cpu()), name
    assert (one.get_input_embeddings().weight is one.get_output_embeddings().weight) == (
        two.get_input_embeddings().weight is two.get_output_embeddings().weight
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_loading_to_a_device_gives_the_same_bits_and_draws_no_random_number(
    architecture: str, dtype: torch.dtype, tmp_path: Path, make_model: Callable[..., Any]
) -> None:
    made = make_model(architecture, dtype=torch.float32, **FAMILIES[architecture])
    made.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    drawn, default = torch.get_rng_state(), torch.get_default_dtype()
    found = load_model(config, dtype, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.get_default_dtype() == default
    same(load_model(config, dtype), found, torch.device("cpu"))
    for name, frequencies in found.named_buffers():
        if name.endswith("inv_freq"):
            assert frequencies.dtype == torch.float32
            assert torch.equal(frequencies, made.get_buffer(name).to(torch.float32)), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_loading_to_a_gpu_gives_the_bits_of_loading_on_the_host(
    architecture: str, dtype: torch.dtype, tmp_path: Path, make_model: Callable[..., Any]
) -> None:
    make_model(architecture, dtype=torch.float32, **FAMILIES[architecture]).save_pretrained(tmp_path)
    config, device = ModelConfig(path=str(tmp_path)), torch.device("cuda", 0)
    same(load_model(config, dtype), load_model(config, dtype, device), device)


@pytest.mark.gpu
def test_loading_a_16_bit_checkpoint_needs_no_more_memory_than_its_weights(
    tmp_path: Path, make_model: Callable[..., Any]
) -> None:
    make_model("Llama", dtype=torch.bfloat16, hidden_size=512, vocab_size=32768).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(ModelConfig(path=str(tmp_path)), torch.bfloat16, torch.device("cuda", 0))
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < 1.6 * size  # transformers asks for all of it once, beforehand


@pytest.mark.gpu
def test_adapters_start_with_the_same_numbers_on_a_gpu(make_model: Callable[..., Any]) -> None:
    here, there = make_model("Llama", dtype=torch.bfloat16), make_model("Llama", dtype=torch.bfloat16).to("cuda")
    one, two = (add_adapter(model, AdapterConfig(rank=4), seed=3) for model in (here, there))
    for (name, expected), found in zip(one.named_parameters(), two.parameters(), strict=True):
        assert found.is_cuda, name
        assert torch.equal(expected, found.cpu()), name


class Drawn(TorchDispatchMode):
    """Where random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.devices.append(args[0].device.type)
        return func(*args, **(kwargs or {}))


def test_the_start_of_adapters_is_drawn_on_the_host_wherever_the_model_is(make_model: Callable[..., Any]) -> None:
    """On a device that holds no numbers; on a GPU the numbers themselves are compared."""
    model = make_model("Llama").to("meta")
    with Drawn() as drawn:
        adapted = add_adapter(model, AdapterConfig(rank=4), seed=0)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert {parameter.device.type for parameter in trained} == {"meta"}
    assert set(drawn.devices) == {"cpu"}
    assert len(drawn.devices) >= len(trained) // 2  # one of each pair starts at zero
