"""Shared by the scripts of TRL and Unsloth: a run of trl's SFTTrainer that records step times. Does not import whet.

Libraries are imported inside functions, because Unsloth must be imported before them.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_script(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the settings file from the command line, run, and write the result or the error to its `result` file."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    result = Path(settings["result"])
    try:
        result_json = run(settings)
    except BaseException as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        result.write_text(json.dumps({"error": f"{type(error).__name__}: {first}"}))
        raise
    result.write_text(json.dumps(result_json))


def conversations(settings: dict[str, Any], column: str) -> Any:
    """The dataset of tokenized conversations (`input_ids`), or of their `text`."""
    from datasets import Dataset

    with Path(settings["conversations"]).open() as lines:
        return Dataset.from_dict({column: [json.loads(line)[column] for line in lines]})


def train_timed(settings: dict[str, Any], arguments: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Train with SFTConfig(**arguments) and SFTTrainer(**parts); returns the end time and token counts of each step."""
    import torch
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    counts: list[tuple[Any, Any]] = []
    ended: list[tuple[float, int]] = []

    class CountingTrainer(SFTTrainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
            counts.append(_token_counts(inputs))  # tensors: reading them now would synchronise with the device
            return super().training_step(model, inputs, *rest, **more)

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if settings["device"] != "cpu":
                torch.accelerator.synchronize()
            ended.append((time.time(), len(counts)))
            sys.stderr.write(f"step {len(ended)} ended at {ended[-1][0]:.3f}\n")  # for whoever waits, or stops it
            sys.stderr.flush()

    trainer = CountingTrainer(args=SFTConfig(**arguments), callbacks=[Clock()], **parts)
    trainer.train()
    starts = [0, *(batches for _, batches in ended)]
    steps = list(itertools.pairwise(starts))
    return {
        "ended": [moment for moment, _ in ended],
        "tokens": [sum(int(tokens) for tokens, _ in counts[a:b]) for a, b in steps],
        "supervised": [sum(int(supervised) for _, supervised in counts[a:b]) for a, b in steps],
        "peak_gib": _peak_gib(settings["device"]),
        "accumulation": trainer.args.gradient_accumulation_steps,
    }


def _token_counts(inputs: dict[str, Any]) -> tuple[Any, Any]:
    """(tokens without padding, supervised tokens) of a batch."""
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    tokens = inputs["input_ids"].numel() if mask is None else mask.sum()
    return tokens, tokens if labels is None else (labels != -100).sum()


def _peak_gib(device: str) -> float:
    import torch

    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.accelerator.max_memory_allocated() / 2**30
