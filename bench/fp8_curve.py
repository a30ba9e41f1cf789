"""Loss curves of fp8 and bf16 training: the same real model, data and order.

    python bench/fp8_curve.py DATA [STEPS] [MODEL] [RANK]

Default: 500 steps of full training of builtin:smollm2; with a RANK, of an adapter. Needs a GPU with fp8.

Three runs: bf16 with two seeds, whose difference is seed noise, then fp8 with the first seed. All decoder matrices run
in fp8, also those that whet would leave in bf16 because they are too small for fp8 to be faster. Prints
the mean loss over each fifth of the run and the validation loss at the end; the last line is a JSON object.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from whet.config import read_config
from whet.core.console import set_quiet
from whet.core.yaml import dump_yaml
from whet.model.fp8 import conversion
from whet.run.lifecycle import run_training
from whet.run.models import model_builder

RUNS = [("bf16", 1), ("bf16", 2), ("fp8", 1)]
FIFTHS = 5


def main(data: str, steps: str = "500", model: str = "builtin:smollm2", rank: str = "0") -> None:
    set_quiet()
    model_builder.convert_to_fp8_ = functools.partial(conversion.convert_to_fp8_, convert_if=lambda *shape: True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for precision, seed in RUNS:
            name = f"{precision}, seed {seed}"
            found[name] = curve(Path(scratch), data, int(steps), model, int(rank), precision, seed)
            numbers = " ".join(f"{loss:.4f}" for loss in found[name]["losses"])
            print(f"{name:22} {numbers} | validation {found[name]['validation']:.4f}", flush=True)  # noqa: T201
    print(json.dumps(found))  # noqa: T201


def curve(scratch: Path, data: str, steps: int, model: str, rank: int, precision: str, seed: int) -> dict[str, Any]:
    folder = scratch / f"{precision}-{seed}"
    recipe = {
        "run": {"dir": str(folder), "seed": seed},
        "model": {"path": model},
        **({"adapter": {"rank": rank}} if rank else {}),
        "data": {"sources": [{"path": data}], "validation": {"fraction": 0.05}, "max_length": 1024},
        "train": {
            "steps": steps, "batch": {"conversations": 32}, "micro_rows": 8, "precision": precision,
            "optimizer": {"lr": 2e-3 if rank else 3e-4}, "schedule": {"name": "cosine"},
        },
        "eval": {"at_start": False},
        "export": {"at_end": "none"},
    }  # fmt: skip
    (scratch / "recipe.yaml").write_text(dump_yaml(recipe))
    run_training(read_config(scratch / "recipe.yaml"), resume=False, save=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    size = len(losses) // FIFTHS
    return {
        "losses": [statistics.fmean(losses[part * size : (part + 1) * size]) for part in range(FIFTHS)],
        "validation": next(line["val_loss"] for line in reversed(lines) if "val_loss" in line),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
