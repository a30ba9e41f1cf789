"""A small run folder with every file that a run may have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG = """\
run: {name: orders, seed: 7}
model: {path: "builtin:tiny"}
adapter: {method: lora, rank: 8}
train: {steps: 3}
"""


def step_line(step: int, loss: float | None) -> dict[str, Any]:
    """The metrics of one step; counts are cumulative."""
    return {
        "time": 1000.0 + step,
        "step": step,
        "loss": loss,
        "grad_norm": 1.0 / step,
        "lr": 1e-3,
        "conversations": 8 * step,
        "tokens": 1000 * step,
        "supervised_tokens": 300 * step,
        "flops": 1e9 * step,
        "tokens_per_s": 500.0,
        "mfu": None,
        "peak_gib": 1.5,
        "step_s": 2.0,
        "data_s": 0.01,
    }


def sample(step: int, prompt: str, right: bool, **other: str) -> dict[str, Any]:
    """One line of samples.jsonl."""
    texts = {"task": "orders", "expected": "{}", "answer": f"answer {step}"} | other
    return {"step": step, "prompt": prompt, "right": right, **texts}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a finished run of three steps; a keyword replaces the content of a file, None leaves the file out."""

    def make(**replaced: Any) -> Path:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        content: dict[str, Any] = {
            "config": CONFIG,
            "status": {
                "state": "finished", "step": 3, "steps": 3, "host": "h", "pid": 1,
                "heartbeat": 1100.0, "exit_code": 0, "started": 1000.0,
            },
            "ledger": {
                "sources": [
                    {
                        "source": "builtin:orders", "use": "train",
                        "conversations": {"in": 260, "kept": 258, "dropped": 2, "truncated": 0},
                        "reasons": {"too long": 2}, "first": {"too long": ["data.jsonl:17"]},
                        "tokens": 31000, "supervised_tokens": 9000, "eos_supervised": 1.0,
                    }
                ]
            },
            "plan": {"steps": 3, "efficiency": 0.97, "batch": {"conversations": 8}, "device": "cpu"},
            "metrics": [
                {"step": 0, "val_loss": 3.1, "task/orders": 0.0},
                step_line(1, 3.0), step_line(2, 2.0), step_line(3, 1.0),
                {"step": 3, "val_loss": 1.1, "task/orders": 0.75},
            ],
            "samples": [sample(0, "p1", False), sample(0, "p2", False), sample(3, "p1", True), sample(3, "p2", False)],
            "certificate": {"kind": "merged", "verified": True, "max_logit_difference": 1e-5, "same_next_token": 1.0},
            "effect": {
                "step": 3, "modules": [
                    {"module": f"model.layers.{layer}.mlp.experts.down_proj", "shape": [4, 8, 8],
                     "change": 0.01 * (layer + 1), "moved": True, "gradient": True,
                     "experts": 4, "untouched_experts": [3] * layer}
                    for layer in (0, 1)
                ],
            },
        } | replaced  # fmt: skip
        (folder / "exports/merged").mkdir(parents=True)
        for name, value in content.items():
            if value is None:
                continue
            if name == "config":
                (folder / "config.yaml").write_text(value)
            elif name in ("metrics", "samples"):
                (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in value))
            elif name == "certificate":
                (folder / "exports/merged/certificate.json").write_text(json.dumps(value))
            else:
                (folder / f"{name}.json").write_text(json.dumps(value))
        return folder

    return make
