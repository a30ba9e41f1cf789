"""Common models by a short name, for `whet init --model NAME`: where they are, how large, and what suits them."""

from __future__ import annotations

from typing import NamedTuple


class KnownModel(NamedTuple):
    """A model that people fine-tune often."""

    name: str
    path: str
    """model.path: a hub id, or a built-in model."""
    billions: float
    """Of parameters."""
    architecture: str
    """model_type in config.json."""
    experts: bool = False
    lora_lr: float = 2e-4
    full_lr: float = 2e-5


KNOWN_MODELS = (
    KnownModel("smollm2-135m", "builtin:smollm2", 0.135, "llama", lora_lr=1e-3, full_lr=1e-4),
    KnownModel("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.7, "llama"),
    KnownModel("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3.1, "smollm3"),
    KnownModel("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", 1.2, "llama"),
    KnownModel("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", 3.2, "llama"),
    KnownModel("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", 8.0, "llama", full_lr=1e-5),
    KnownModel("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 70.6, "llama", lora_lr=1e-4, full_lr=5e-6),
    KnownModel("qwen3-0.6b", "Qwen/Qwen3-0.6B", 0.6, "qwen3"),
    KnownModel("qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", 4.0, "qwen3"),
    KnownModel("qwen3-8b", "Qwen/Qwen3-8B", 8.2, "qwen3", full_lr=1e-5),
    KnownModel("qwen3-32b", "Qwen/Qwen3-32B", 32.8, "qwen3", lora_lr=1e-4, full_lr=5e-6),
    KnownModel("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5, "qwen3_moe", experts=True, lora_lr=1e-4),
    KnownModel("gemma-3-1b", "google/gemma-3-1b-it", 1.0, "gemma3_text"),
    KnownModel("gemma-3-4b", "google/gemma-3-4b-it", 4.3, "gemma3"),
    KnownModel("gemma-3-12b", "google/gemma-3-12b-it", 12.2, "gemma3", lora_lr=1e-4, full_lr=1e-5),
    KnownModel("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", 7.2, "mistral", lora_lr=1e-4, full_lr=5e-6),
    KnownModel("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", 23.6, "mistral", lora_lr=1e-4),
    KnownModel("phi-4", "microsoft/phi-4", 14.7, "phi3", lora_lr=1e-4, full_lr=1e-5),
    KnownModel("phi-4-mini", "microsoft/Phi-4-mini-instruct", 3.8, "phi3"),
    KnownModel("gpt-oss-20b", "openai/gpt-oss-20b", 20.9, "gpt_oss", experts=True, lora_lr=1e-4),
)


def find_known(model: str) -> KnownModel | None:
    """The model by its short name or path."""
    return next((each for each in KNOWN_MODELS if model.lower() == each.name or model == each.path), None)
