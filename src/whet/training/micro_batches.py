"""Changing the micro-batches of a run: how many rows each has, and what depends on it. The numbers of a step do not."""

from __future__ import annotations

import time

import numpy as np
import torch

from whet.core.console import warn
from whet.execution.compile import should_compile
from whet.execution.cuda_graphs import disable_cuda_graphs, enable_cuda_graphs, max_gradient_bytes
from whet.model.peak_flops import device_peak_flops
from whet.parallel.ddp import accumulate_in_fp32
from whet.parallel.fsdp import is_sharded
from whet.training.run_state import Run


def set_micro_rows(run: Run, rows: int) -> None:
    """Give every micro-batch of this rank so many rows. Weights must not have gradients that are still needed."""
    if rows != run.loader.micro_rows:
        before, run.loader = run.loader, run.loader.with_micro_rows(rows)
        before.close()
    run.config = run.config.model_copy(update={"train": run.config.train.model_copy(update={"micro_rows": rows})})
    if run.precision.weights == torch.bfloat16 and not is_sharded(run.model):
        accumulate_in_fp32(run.model, run.loader.max_rank_rows > rows)
    _set_cuda_graphs(run, rows * run.config.row_length)


def _set_cuda_graphs(run: Run, tokens: int) -> None:
    """Use CUDA graphs where layers are launch-bound for this many tokens; graphs of other shapes are released."""
    disable_cuda_graphs(run.model)
    device, precision = run.ranks.device, run.precision
    compiles = should_compile(run.config.model.compile, device, precision.compute)
    if compiles and device.type == "cuda" and run.ranks.world_size == 1 and run.config.parallel.offload == "none":
        memory = torch.cuda.get_device_properties(device).total_memory
        room = max_gradient_bytes(memory, run.config.parallel.recompute != "none")
        enable_cuda_graphs(run.model, tokens, device_peak_flops(device, precision.name), room)


def use_smaller_micro_batches(run: Run, rows: int, step: int) -> None:
    """After a step in which a rank ran out of memory: all ranks continue with its micro-batches. `rows`: those with
    which this rank computed the step."""
    before, rows = run.loader.micro_rows, min(run.ranks.all_gather([rows]))
    set_micro_rows(run, rows)
    warn(
        f"step {step}: the device ran out of memory with {before} rows in a micro-batch, so the step was computed with "
        f"{rows}, and the run continues so: slower, with the same loss. Is another program using the device?"
    )
    run.output.write_event(
        {
            "time": time.time(), "step": step, "kind": "out-of-memory", "action": "repeat",
            "reason": f"out of memory with {before} rows in a micro-batch, computed with {rows}",
            "micro_rows_before": before, "micro_rows": rows,
        }
    )  # fmt: skip
    run.output.update_plan({"micro_rows": rows})


def micro_row_sizes(rows: int, most: int) -> list[int]:
    """The sizes of a micro-batch worth trying for a rank with `rows` rows in a step, ascending, up to `most`.

    For every number of micro-batches the smallest size that needs no more of them: a larger one would add padding only.
    """
    counts = np.arange(1, rows + 1)
    sizes = np.unique(-(-rows // counts))
    return [int(size) for size in sizes if size <= max(1, most)]
