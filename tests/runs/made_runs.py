"""Run folders made by hand: their files as a run writes them, without training."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.core.checksums import write_hashed_json
from whet.core.run_folder import write_config
from whet.data.batch import PackedBatch, pack_batch
from whet.evaluation.validation_losses import ConversationLosses, add_validation_losses


def make_run(
    folder: Path, state: str | None = "finished", project: str | None = None, lr: float = 1e-3, **status: Any
) -> Path:
    """A run of ten steps with two evaluations."""
    folder.mkdir(parents=True)
    group = f"  project: {json.dumps(project)}\n" if project else ""
    write_config(
        folder,
        f"run:\n  name: {folder.name}\n{group}  seed: 0\nmodel:\n  path: builtin:tiny\ndata:\n  sources:\n"
        "  - path: builtin:orders\n  validation:\n    fraction: 0.1\n"
        f"train:\n  optimizer:\n    lr: {lr}\neval:\n  best: val_loss\n",
    )
    now = time.time()
    if state is not None:
        write_hashed_json(
            folder / "status.json",
            {"format": 1, "state": state, "step": 10, "steps": 20, "host": "elsewhere", "pid": 1, "job": None,
             "started": now - 60, "heartbeat": now - 1, "exit_code": None, "reason": None, "first_step": None} | status,
        )  # fmt: skip
    lines = [{"time": now - 60, "step": 0, "val_loss": 5.0}]
    lines += [
        {"time": now - 20 + step, "step": step, "loss": 5 - step / 10, "lr": lr, "tokens": 100 * step,
         "tokens_per_s": 1000.0, "step_s": 0.1}
        for step in range(1, 11)
    ]  # fmt: skip
    lines.append({"time": now - 9, "step": 10, "val_loss": 4.1, "val_accuracy": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def add_losses(folder: Path, step: int, per_token: np.ndarray, seed: int = 0) -> None:
    """Validation losses of as many conversations, with lengths and hashes of a seed."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(5, 50, size=len(per_token))
    hashes = draw.integers(2**63, size=len(per_token)).astype(np.uint64)
    add_validation_losses(folder, step, ConversationLosses.from_documents(hashes, tokens, per_token * tokens))


def write_lock(folder: Path, host: str, pid: int, since: float, **details: Any) -> None:
    record = {"since": since, "machine": "another", "supervisor": None, "job": None} | details
    (folder / "lock").write_text(f"{host} pid {pid} since 2026-01-01T00:00:00+00:00\n{json.dumps(record)}\n")


def leaky_pack_batch(*arguments: Any, **keywords: Any) -> PackedBatch:
    """A planted fault, for loader.pack_batch: conversations of a micro-batch see those before them."""
    batch = pack_batch(*arguments, **keywords)
    ends = (0, *[len(batch.tokens)] * (len(batch.cu_seqlens) - 1))
    return replace(
        batch, cu_seqlens=torch.tensor(ends, dtype=torch.int32), cu_seqlens_host=ends, max_seqlen=ends[-1],
        positions=torch.arange(ends[-1]),
    )  # fmt: skip
