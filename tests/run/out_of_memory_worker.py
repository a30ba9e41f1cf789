"""`python out_of_memory_worker.py CONFIG KEY=VALUE…`: a run whose rank 1 runs out of memory once, in step 2; with
SIMULATED_ROWS=N in the environment, a run on cards with memory for N rows instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_card import AT_REST, PER_TOKEN, SimulatedCard

from whet.core.errors import WhetError

ROW = 128
OUT_OF_MEMORY_PASS = 1  # of those with several rows, which are one a step


def main() -> None:
    from whet.config import read_config
    from whet.model.loss.loss_model import LossModel
    from whet.run.lifecycle import run_training

    if rows := os.environ.get("SIMULATED_ROWS"):
        SimulatedCard(AT_REST + int(rows) * ROW * PER_TOKEN).install(pytest.MonkeyPatch())
    forward, passes = LossModel.forward, [0]

    def limited(model: LossModel, batch: Any, weight: float = 1.0) -> Any:
        if torch.is_grad_enabled() and model.training and os.environ["RANK"] == "1" and not rows:
            passes[0] += 1
            if passes[0] - 1 == OUT_OF_MEMORY_PASS:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return forward(model, batch, weight)

    LossModel.forward = limited  # type: ignore[method-assign]
    try:
        run_training(read_config(Path(sys.argv[1]), sys.argv[2:]), resume=False)
    except WhetError as error:
        sys.stderr.write(f"rank {os.environ['RANK']}: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
