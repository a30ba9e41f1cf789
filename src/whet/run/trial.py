"""--smoke, --dry-run and `whet fit`: short or unsaved runs in a sibling folder."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

from whet.config import Config, read_config
from whet.core import launch_env
from whet.core.run_folder import RunFolder
from whet.data.config import Source, Validation
from whet.run.step_rows import step_layout
from whet.training.config import BatchConfig, TrainConfig

# Each trial has a folder beside the run's, which the next trial replaces, so that it never touches the run itself.

SMOKE_STEPS = 5
_TRIAL_TAG = "whet:trial"
"""Marks a folder as a trial, which may be deleted."""
_MAX_CONVERSATIONS, _MAX_VALIDATION, _MAX_EXAMPLES = 64, 8, 4
_MAX_CONVERSATIONS_PER_STEP, _MAX_ROWS_PER_STEP = 4, 2


def smoke_config(config: Config) -> Config:
    """The same run with five steps, a few conversations of each source, and a small batch."""
    data = config.data.model_copy(
        update={
            "sources": _limit_samples(config.data.sources, _MAX_CONVERSATIONS),
            "validation": _limit_validation(config.data.validation),
            "store": None,
        }
    )
    tasks = [task.model_copy(update={"examples": None}) for task in config.eval.tasks]
    few = {"examples": min(config.eval.examples, _MAX_EXAMPLES), "every": None, "tasks": tasks}
    measured = config.eval.model_copy(update=few)
    saved = config.checkpoint.model_copy(update={"every": SMOKE_STEPS, "minutes": None, "epochs": None, "keep_best": 0})
    train = _shorten(config)
    changed = {"data": data, "train": train, "eval": measured, "checkpoint": saved, "profile": None}
    return sibling_config(config.model_copy(update=changed), "smoke")


def dry_run_config(config: Config) -> Config:
    """The same run in a folder of its own; `run_training(save=False)` writes no checkpoints."""
    return sibling_config(config, "dry")


def delete_previous_trial(folder: Path) -> None:
    """Delete the previous trial. A folder with anything else stays, and is refused later."""
    if not (folder / "config.yaml").exists():
        return
    owned = RunFolder(folder)  # raises if a process is using it
    try:
        if _TRIAL_TAG in read_config(folder / "config.yaml", expand="set").run.tags:
            owned.clear()
    finally:
        owned.close()


def delete_trial(folder: Path) -> None:
    """Delete a trial of which nothing is to be kept, with its folder."""
    delete_previous_trial(folder)
    with contextlib.suppress(OSError):  # gone, or something else is in it
        (folder / "lock").unlink()
        folder.rmdir()


def delete_weights(folder: Path) -> None:
    """After a smoke test, whose weights are useless and may be large."""
    for name in ("checkpoints", "exports"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / name)


def sibling_config(config: Config, kind: str) -> Config:
    """The same run in the folder RUN-KIND, marked as one that may be deleted."""
    run = config.run.model_copy(update={"tags": [*config.run.tags, _TRIAL_TAG], "notify": []})
    return config.model_copy(update={"run": run}).with_folder(config.folder.with_name(f"{config.folder.name}-{kind}"))


def _limit_samples(sources: list[Source], most: int) -> list[Source]:
    return [source.model_copy(update={"max_samples": min(source.max_samples or most, most)}) for source in sources]


def _limit_validation(validation: Validation | None) -> Validation | None:
    if validation is None or not validation.sources:
        return validation
    return validation.model_copy(update={"sources": _limit_samples(validation.sources, _MAX_VALIDATION)})


def _shorten(config: Config) -> TrainConfig:
    """Few steps of few rows, yet enough for every process: how many rows conversations take only the data tells."""
    train, needed = config.train, step_layout(config, 0, *launch_env.process_layout()).needed
    limits = {
        "conversations": _MAX_CONVERSATIONS_PER_STEP if launch_env.world_size() == 1 else sys.maxsize,
        "rows": max(_MAX_ROWS_PER_STEP, needed), "tokens": config.row_length * max(1, needed),
    }  # fmt: skip
    batch = {unit: min(n, limits[unit]) for unit, n in train.batch.model_dump(exclude_none=True).items()}
    length = {"steps": SMOKE_STEPS, "epochs": None, "tokens": None}
    return train.model_copy(update={**length, "batch": BatchConfig(**batch)})
