"""4-bit weights on CUDA: the same values as on a CPU, low memory, no synchronisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from whet.model.config import AdapterConfig
from whet.model.lora.peft_adapters import add_adapter, merge_adapter
from whet.model.quantize import dequantize_weight, is_quantized, quantize_, weight_bytes

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def make(hidden: int = 64, layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)


def packed(device: torch.device, **sizes: int) -> Any:
    model = make(**sizes)
    quantize_(model, device)
    return model.to(device)


def test_a_gpu_quantizes_as_a_cpu_does() -> None:
    """But for numbers half-way between two values, and the last bit of a scale."""
    here, there = packed(torch.device("cpu")), packed(CUDA)
    for name, layer in here.named_modules():
        if is_quantized(layer):
            ours, theirs = dequantize_weight(layer), dequantize_weight(there.get_submodule(name)).cpu()
            assert torch.isclose(ours, theirs, rtol=0.01).double().mean() > 0.999


def test_dequantizing_does_not_synchronise() -> None:
    layers = [layer for layer in packed(CUDA).modules() if is_quantized(layer)]
    assert len(layers) == 14
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [dequantize_weight(layer) for layer in layers]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for layer, weight in zip(layers, found, strict=True):
        x = torch.randn(2000, layer.in_features, device=CUDA, dtype=torch.bfloat16)
        assert (weight.dtype, weight.shape) == (torch.bfloat16, (layer.out_features, layer.in_features))
        torch.testing.assert_close(layer(x), nn.functional.linear(x, weight), rtol=0.02, atol=0.02)


def test_the_device_holds_one_16_bit_weight_at_a_time() -> None:
    model = make(hidden=2048, layers=4)
    largest = 2 * 2048 * 4096
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quantize_(model, CUDA)
    model = model.to(CUDA)
    taken = torch.cuda.memory_allocated() - before
    assert taken < 1.1 * weight_bytes(model)
    assert torch.cuda.max_memory_allocated() - before < taken + 3 * largest


def test_a_merge_goes_to_the_host() -> None:
    model = add_adapter(packed(CUDA, hidden=1024), AdapterConfig(rank=4), seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    ids = torch.arange(9, device=CUDA)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits.float()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        merged = merge_adapter(model)
        assert torch.cuda.max_memory_allocated() - before < 3 * 2 * 1024 * 2048
        assert {parameter.device.type for parameter in merged.parameters()} == {"cpu"}
        found = merged.to(CUDA)(input_ids=ids).logits.float()
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_a_compiled_run_learns_what_one_in_fp32_learns_and_exports_it(whet: Any, recipe: str, tmp_path: Path) -> None:
    losses = []
    for name, options in {"fast": [], "exact": ["train.precision=fp32", "model.compile=false"]}.items():
        folder = tmp_path / name
        ended = whet(
            "train", recipe, f"run.dir={folder}", "quantize=nf4", "adapter.rank=8", "export.at_end=merged", *options
        )
        assert ended.code == 0, ended.err
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert json.loads((folder / "exports/merged/certificate.json").read_text())["verified"] is True
    assert json.loads((tmp_path / "fast" / "plan.json").read_text())["compiled"] is True
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
