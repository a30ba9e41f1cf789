"""How long a checkpoint takes, and whether the job's limits leave that much time to save."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path

from whet.config import Config
from whet.core.errors import WhetError
from whet.core.files import read_json, user_path
from whet.launch.slurm_script import time_limit_seconds, warning_seconds

_BYTES_PER_S = 1e9
"""That a node writes, where nothing has been measured."""
_TRAINED, _ADAPTER = 7.0, 0.1
"""Size of a checkpoint in units of the model's 16-bit weight files: weights and two optimizer states in 32 bits beside
the 16-bit weights, or those of an adapter."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, slots=True)
class SaveTime:
    """Seconds that a checkpoint takes."""

    seconds: float
    is_measured: bool

    def __str__(self) -> str:
        how = "as the last ones of this run did" if self.is_measured else "estimated from the model's size, at 1 GB/s"
        return f"{max(1, round(self.seconds))} s ({how})"


def find_save_time(config: Config) -> SaveTime | None:
    """As measured by earlier checkpoints of the run, else an estimate; None where the model is not on this machine."""
    measured = []
    for file in config.folder.glob("checkpoints/step-*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, WhetError, AttributeError):  # resuming will say what is wrong
            seconds = read_json(file).get("save_s")
            if isinstance(seconds, int | float) and 0 < seconds < math.inf:
                measured.append(float(seconds))
    if measured:
        return SaveTime(max(measured), is_measured=True)
    size = sum(file.stat().st_size for pattern in _WEIGHT_FILES for file in _model_folder(config).glob(pattern))
    if not size:
        return None
    nodes, _ = config.launch.node_range()
    share = _ADAPTER if config.adapter is not None else _TRAINED
    return SaveTime(size * share / (_BYTES_PER_S * nodes), is_measured=False)


def _model_folder(config: Config) -> Path:
    """Where the weight files are, also in the hub's cache; it need not exist."""
    folder = user_path(config.model.path)
    if folder.is_dir() or config.model.path.count("/") != 1:
        return folder
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{config.model.path.replace('/', '--')}"
    return max(kept.glob("snapshots/*"), key=lambda each: each.stat().st_mtime, default=kept)


def require_time_to_save(config: Config, save: SaveTime | None) -> None:
    """Refuse a job that would end before a checkpoint is written."""
    limit = config.launch.slurm.time
    if limit is not None and save is not None and time_limit_seconds(limit) <= save.seconds:
        raise WhetError(
            f"launch.slurm.time: {limit} is {time_limit_seconds(limit)} s, and a checkpoint takes {save}: the job "
            "would end before it has saved anything. Give more time"
        )


def save_problems(config: Config, save: SaveTime | None, kill_wait_s: float) -> list[str]:
    """Limits that are shorter than a checkpoint."""
    slurm = config.launch.slurm
    if save is None:
        return []
    problems = []
    if slurm.time is not None and save.seconds > 0.75 * warning_seconds(slurm):
        problems.append(
            f"a checkpoint takes {save}, and Slurm warns {warning_seconds(slurm)} s before the time limit: what was "
            f"trained since the checkpoint before may be lost. Set launch.slurm.warning={_round_up(2 * save.seconds)}"
        )
    if save.seconds > kill_wait_s:
        problems.append(
            f"a checkpoint takes {save}, and a job that is cancelled or preempted has {kill_wait_s:g} s to end "
            f"(KillWait): it would continue from an older one. Stop it with `touch {config.folder / 'stop'}`, and set "
            "checkpoint.minutes to what you can lose"
        )
    return problems


def _round_up(seconds: float) -> int:
    return max(60, math.ceil(seconds / 60) * 60)
