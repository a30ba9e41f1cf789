"""Runs that only try: the whole way in five tiny steps, or every step without anything kept.

Each has a folder of its own beside the run's, which the next trial replaces, so that the run itself is not in the way.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from whet.config import Config, read_config
from whet.core.run import RunFolder
from whet.data.config import Source, Validation
from whet.train.config import BatchConfig, TrainConfig

STEPS = 5
_TAG = "whet:trial"
"""By this a trial is known, and may be deleted."""
_CONVERSATIONS, _HELD_OUT, _EXAMPLES = 64, 8, 4
_BATCH = {"conversations": 4, "rows": 2}


def smoke(config: Config) -> Config:
    """The same run, five steps long, on a few conversations of each source and with a small batch."""
    data = config.data.model_copy(
        update={
            "sources": _few(config.data.sources, _CONVERSATIONS),
            "validation": _few_held_out(config.data.validation),
            "store": None,
        }
    )
    tasks = [task.model_copy(update={"examples": None}) for task in config.eval.tasks]
    few = {"examples": min(config.eval.examples, _EXAMPLES), "every": None, "tasks": tasks}
    measured = config.eval.model_copy(update=few)
    saved = config.checkpoint.model_copy(update={"every": STEPS, "minutes": None, "epochs": None, "keep_best": 0})
    train = _short(config.train, config.row_length)
    changed = {"data": data, "train": train, "eval": measured, "checkpoint": saved, "profile": None}
    return _beside(config.model_copy(update=changed), "smoke")


def dry(config: Config) -> Config:
    """The same run in a folder of its own; that nothing is kept is up to `train`."""
    return _beside(config, "dry")


def make_way(folder: Path) -> None:
    """Delete the trial that was here before. A folder with anything else in it stays as it is, and is refused later."""
    if not (folder / "config.yaml").exists():
        return
    owned = RunFolder(folder)  # an error if a process is at work in it
    try:
        if _TAG in read_config(folder / "config.yaml").run.tags:
            for entry in folder.iterdir():
                if entry.name != "lock":
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    finally:
        owned.close()


def drop_weights(folder: Path) -> None:
    """Of a smoke test that went well, what it learned is of no use and can be large."""
    for name in ("checkpoints", "exports"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / name)


def _beside(config: Config, kind: str) -> Config:
    run = config.run.model_copy(update={"tags": [*config.run.tags, _TAG]})
    return config.model_copy(update={"run": run}).at(config.folder.with_name(f"{config.folder.name}-{kind}"))


def _few(sources: list[Source], most: int) -> list[Source]:
    return [source.model_copy(update={"max_samples": min(source.max_samples or most, most)}) for source in sources]


def _few_held_out(validation: Validation | None) -> Validation | None:
    if validation is None or not validation.sources:
        return validation
    return validation.model_copy(update={"sources": _few(validation.sources, _HELD_OUT)})


def _short(train: TrainConfig, row_length: int) -> TrainConfig:
    batch = {
        unit: min(n, _BATCH.get(unit, row_length)) for unit, n in train.batch.model_dump(exclude_none=True).items()
    }
    length = {"steps": STEPS, "epochs": None, "tokens": None}
    return train.model_copy(update={**length, "batch": BatchConfig(**batch)})
