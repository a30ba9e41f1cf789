"""The terms of a comparison, the same for all who take part, and whet's recipe for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.model.shapes import PREFIX, settled

LORA = {"rank": 16, "alpha": 32}
LEARNING_RATE = 1e-5
_TOKENS_OF_AN_ORDER = 64
"""At least: how many conversations to ask the generator for."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is measured."""

    model: str
    """The name of a shape, or the folder or file that has one."""
    mode: str
    """full, lora or qlora."""
    data: str | None
    """A source of conversations; None: the generator of orders."""
    rows: int
    length: int
    steps: int
    warm: int
    """Steps that are not counted: kernels are compiled and memory is found in them."""
    precision: str
    """bf16, fp8 or fp32."""
    recompute: str
    """none or full."""
    tokenizer: str | None
    device: str
    """cpu, or the kind of accelerator."""

    def __post_init__(self) -> None:
        if self.steps <= self.warm:
            raise WhetError(
                f"--steps {self.steps}: the first {self.warm} (--warm) are not counted, so nothing would be measured. "
                f"Give more than {self.warm}"
            )
        if self.mode == "qlora" and self.precision != "bf16":
            raise WhetError(
                f"--mode qlora: 4-bit weights are computed with in bf16, not in --precision {self.precision}"
            )

    @property
    def is_adapter(self) -> bool:
        return self.mode in ("lora", "qlora")

    @property
    def weights(self) -> str:
        """What the model's weights are in, for every tool."""
        return "fp32" if self.precision == "fp32" else "bf16"

    def recipe(self, run: Path) -> dict[str, Any]:
        """whet's own, for a run in this folder."""
        source: dict[str, Any] = {"path": self.data or "builtin:orders"}
        if self.data is None:
            source["max_samples"] = max(1000, self.rows * self.length * self.steps // _TOKENS_OF_AN_ORDER)
        elif Path(self.data).expanduser().exists():
            source["path"] = str(Path(self.data).expanduser().resolve())
        halved = self.mode == "full" and self.weights == "bf16"
        model = {"path": settled(PREFIX + self.model), "tokenizer": self.tokenizer, "dtype": "bf16" if halved else None}
        parts: dict[str, Any] = {
            "run": {"name": "whet", "dir": str(run)},
            "model": {key: value for key, value in model.items() if value is not None},
            "adapter": LORA if self.is_adapter else None,
            "quantize": "nf4" if self.mode == "qlora" else None,
            "data": {"sources": [source], "max_length": self.length},
            "train": {
                "steps": self.steps,
                "batch": {"rows": self.rows},
                "micro_rows": self.rows,
                "precision": self.precision,
                # As the others' fused AdamW has it: the states are in the type of the weights.
                "optimizer": {"name": "adamw16bit" if halved else "adamw", "lr": LEARNING_RATE},
                "schedule": {"name": "constant", "warmup": 0},
            },
            "parallel": {"recompute": self.recompute},
            "eval": {"at_start": False},
            "export": {"at_end": "none"},
            "track": [],
        }
        return {key: value for key, value in parts.items() if value is not None}
