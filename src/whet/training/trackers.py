"""Experiment trackers (TensorBoard): views of metrics.jsonl, which is the record."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from whet.core.console import info
from whet.core.errors import WhetError

_FLUSH_S = 10  # until a curve shows a step; a step of 18 numbers costs 1.2 ms, flushed each time or not


class TrackerBackend(Protocol):
    """One of them."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, by the names of their curves."""

    def close(self) -> None:
        """Everything is on disk, or sent."""


class TensorBoard:
    """Event files in the run's folder; `tensorboard --logdir runs` shows them."""

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Only what comes after the checkpoint is taken back, so a continued run has one curve, not two.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1, flush_secs=_FLUSH_S)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


_BACKENDS: dict[str, tuple[str, Callable[[Path, int], TrackerBackend]]] = {"tensorboard": ("tensorboard", TensorBoard)}
"""By the name in `track`: the module that it needs, and how it is opened with the run's folder and the steps done.
Another service is another line here, a name in `Tracker`, and an extra in pyproject.toml."""


class Trackers:
    """All that are on; with none, writing does nothing."""

    def __init__(self, openers: Sequence[Callable[[int], TrackerBackend]] = (), done: int = 0) -> None:
        self._openers = openers
        self._services = [opener(done) for opener in openers]

    def write(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        for service in self._services:
            service.write(line["step"], scalars_of(line))

    def rewind(self, done: int) -> None:
        """Take back what was written after so many steps."""
        self.close()
        self._services = [opener(done) for opener in self._openers]

    def close(self) -> None:
        for service in self._services:
            service.close()


def check_trackers(wanted: Sequence[str] | None) -> list[str]:
    """The trackers that will be used. One that was asked for has to be there; the default may be missing."""
    if wanted is None and importlib.util.find_spec("tensorboard") is None:
        info("curves are in metrics.jsonl alone: TensorBoard is not installed (pip install 'whet[track]')")
        return []
    names = ["tensorboard"] if wanted is None else list(dict.fromkeys(wanted))
    for name in names:
        if importlib.util.find_spec(_BACKENDS[name][0]) is None:
            raise WhetError(f"track: {name} is not installed. Install it with: pip install 'whet[track]'")
    return names


def open_trackers(names: Sequence[str], folder: Path, done: int) -> Trackers:
    """`done`: the steps that the checkpoint holds; what was written beyond them is taken back."""
    return Trackers([partial(_BACKENDS[name][1], folder) for name in names], done)


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a line by the name of its curve: train/loss, val/loss, val/task/orders."""
    found = {}
    for key, value in line.items():
        if key in ("step", "time") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if key.startswith("val_"):
            found[f"val/{key.removeprefix('val_')}"] = value
        else:
            found[f"val/{key}" if key.startswith("task/") else f"train/{key}"] = value
    return found
