"""The estimates for one H200 beside what was measured on one (LOG.md): memory within 5 %, tokens/s within 15 %."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from whet.config import Config
from whet.fit.estimate import GIB, LargestBatch, Sharding, estimate_memory, trace_batch
from whet.fit.fake_model import build_fake_model
from whet.fit.hardware import find_card
from whet.fit.throughput import StepWork, estimate_step_time
from whet.training.precision import precision_policy


class Cell(NamedTuple):
    """A line of LOG.md's table: GSM8K's conversations of about 215 tokens, of which 58 % are supervised."""

    model: str
    mode: str
    rows: int
    gib: float
    tokens_per_s: float
    length: int = 4096
    document: int = 215
    precision: str = "bf16"
    recompute: str = "none"

    def recipe(self) -> Config:
        is_full = self.mode == "full"
        parts: dict[str, Any] = {
            "run": {"name": "x", "dir": "unused"},
            "model": {"path": f"random:{self.model}", **({"dtype": "bf16"} if is_full else {})},
            "data": {"sources": [{"path": "builtin:orders"}]},
            "train": {"precision": self.precision, "optimizer": {"name": "adamw16bit" if is_full else "adamw"}},
            "parallel": {"recompute": self.recompute},
        }
        if not is_full:
            parts["adapter"] = {"rank": 16, "alpha": 32}
        if self.mode == "qlora":
            parts["quantize"] = "nf4"
        return Config.model_validate(parts)


QUICK = Cell("llama-1b", "full", 8, 34.3, 81_955)
CELLS = [
    QUICK,
    Cell("llama-1b", "full", 1, 39.0, 30_367, length=32_768, document=31_147),
    Cell("llama-8b", "lora", 4, 62.8, 19_320),
    Cell("llama-8b", "lora", 1, 27.6, 18_647),
    Cell("llama-8b", "lora", 4, 62.8, 26_564, precision="fp8"),
    Cell("llama-8b", "lora", 1, 27.7, 23_457, precision="fp8"),
    Cell("llama-8b", "lora", 4, 21.5, 14_514, recompute="full"),
    Cell("llama-8b", "lora", 1, 28.0, 6_201, length=32_768, document=31_147, recompute="full"),
    Cell("llama-8b", "qlora", 4, 53.2, 18_869),
    Cell("llama-8b", "full", 4, 94.3, 13_694),
    Cell("llama-8b", "full", 2, 71.2, 13_360),
    Cell("llama-8b", "full", 2, 71.2, 18_812, precision="fp8"),
    Cell("smollm-135m", "lora", 8, 11.6, 405_873),
    Cell("smollm-135m", "full", 8, 12.6, 423_371),
]


def case(cell: Cell) -> Any:
    return pytest.param(cell, marks=() if cell is QUICK else pytest.mark.slow, id="-".join(map(str, cell)))


@pytest.mark.parametrize("cell", [case(cell) for cell in CELLS])
def test_estimates_are_near_the_measurement(cell: Cell) -> None:
    config, tokens = cell.recipe(), cell.rows * cell.length
    lengths = np.full(max(1, tokens // cell.document), cell.document)
    supervised = round(0.58 * lengths.sum())
    fake = build_fake_model(config, precision_policy(config, cell.precision), gpu="nvidia", compiles=True)
    trace = trace_batch(config, fake, tokens, typical_length=cell.document)

    memory = estimate_memory(config, fake, trace, LargestBatch(tokens, supervised))
    work = StepWork(micro_batches=1, supervised=supervised, lengths=lengths)
    step = estimate_step_time(config, fake, trace, find_card("H200"), work, Sharding())

    assert memory.total / GIB == pytest.approx(cell.gib, rel=0.05)
    assert lengths.sum() / step.total == pytest.approx(cell.tokens_per_s, rel=0.15)
