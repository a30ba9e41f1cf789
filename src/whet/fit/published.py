"""Speeds that were measured or published elsewhere, to be printed beside an estimate."""

from __future__ import annotations

from dataclasses import dataclass

from whet.config import Config

_BILLION = 10**9
_SAME_SIZE = 0.2


@dataclass(frozen=True, slots=True)
class PublishedSpeed:
    """Tokens per second of one device."""

    tool: str
    billions: float
    """Parameters of the model, all experts included."""
    model: str
    mode: str
    """full, lora or qlora."""
    hardware: str
    tokens_per_s: int
    gib: float | None = None
    checked: bool = True
    """Measured by whet's benchmark on one H200 (LOG.md); else by others, on their hardware."""

    def __str__(self) -> str:
        memory = "" if self.gib is None else f", {self.gib:.1f} GiB"
        return f"{self.tool}: {self.model}, {self.hardware}: {self.tokens_per_s:,} tokens/s a device{memory}"


_SPEEDS = (
    PublishedSpeed("whet", 8.03, "Llama 8B, LoRA, 4 rows of 4096", "lora", "1 H200", 19_320, 62.8),
    PublishedSpeed("TRL 1.16 + Liger", 8.03, "Llama 8B, LoRA, 4 rows of 4096", "lora", "1 H200", 13_398, 101.5),
    PublishedSpeed("Unsloth 2026.10", 8.03, "Llama 8B, LoRA, 4 rows of 4096", "lora", "1 H200", 13_434, 79.2),
    PublishedSpeed("whet", 8.03, "Llama 8B, QLoRA, 4 rows of 4096", "qlora", "1 H200", 18_869, 53.2),
    PublishedSpeed("Unsloth 2026.10", 8.03, "Llama 8B, QLoRA, 4 rows of 4096", "qlora", "1 H200", 12_876, 69.6),
    PublishedSpeed("whet", 8.03, "Llama 8B, all weights, 4 rows of 4096", "full", "1 H200", 13_694, 94.3),
    PublishedSpeed("TRL 1.16 + Liger", 8.03, "Llama 8B, all weights, 4 rows of 4096", "full", "1 H200", 12_521, 116.8),
    PublishedSpeed("whet", 1.24, "Llama 1B, all weights, 8 rows of 4096", "full", "1 H200", 81_955, 34.3),
    PublishedSpeed("TRL 1.16 + Liger", 1.24, "Llama 1B, all weights, 8 rows of 4096", "full", "1 H200", 66_663, 46.4),
    PublishedSpeed("whet", 0.135, "SmolLM2 135M, LoRA, 8 rows of 4096", "lora", "1 H200", 405_873, 11.6),
    PublishedSpeed("TRL 1.16 + Liger", 0.135, "SmolLM2 135M, LoRA, 8 rows of 4096", "lora", "1 H200", 113_416, 20.7),
    PublishedSpeed("NeMo Automodel", 8.03, "Llama 8B, LoRA", "lora", "1 H100", 12_473, checked=False),
    PublishedSpeed("torchtitan, fp8", 8.03, "Llama 8B, all weights", "full", "32 H200", 10_938, checked=False),
    PublishedSpeed("NeMo Automodel", 30.5, "Qwen3-30B-A3B, all weights", "full", "8 H100", 11_340, checked=False),
    PublishedSpeed(
        "prime-rl", 30.5, "Qwen3-30B-A3B, all weights, rows of 16 k", "full", "8 H200", 4_380, checked=False
    ),
    PublishedSpeed("NeMo Automodel", 20.9, "gpt-oss-20b, all weights", "full", "8 H100", 13_058, checked=False),
)


def published_speeds(config: Config, parameters: int) -> list[PublishedSpeed]:
    """Those of models of about this size, trained in the same way."""
    mode = "full" if config.adapter is None else "qlora" if config.quantize else "lora"
    size = parameters / _BILLION
    return [each for each in _SPEEDS if each.mode == mode and abs(each.billions - size) <= _SAME_SIZE * size]
