"""Experiment trackers (TensorBoard): views of metrics.jsonl, which is the record."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from whet.core.console import info
from whet.core.errors import WhetError

_FLUSH_S = 10  # a step of 18 numbers costs 1.2 ms, flushed each time or not


class TrackerBackend(Protocol):
    """One experiment tracker."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the scalars of a step by name."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoard:
    """Event files in RUN/tensorboard, for `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what was logged after the checkpoint, so a resumed run has one curve.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1, flush_secs=_FLUSH_S)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


_BACKENDS: dict[str, tuple[str, Callable[[Path, int], TrackerBackend]]] = {"tensorboard": ("tensorboard", TensorBoard)}
"""By the name in `track`: the module it needs, and its constructor, which takes the run's folder and finished steps.
Another tracker takes a line here, a name in `Tracker`, and an extra in pyproject.toml."""


class Trackers:
    """The trackers of a run, which may be none."""

    def __init__(self, openers: Sequence[Callable[[int], TrackerBackend]] = (), done: int = 0) -> None:
        self._openers = openers
        self._services = [opener(done) for opener in openers]

    def write(self, line: Mapping[str, Any]) -> None:
        """Log a line of metrics.jsonl."""
        for service in self._services:
            service.write(line["step"], scalars_of(line))

    def rewind(self, done: int) -> None:
        """Discard what was logged after `done` steps."""
        self.close()
        self._services = [opener(done) for opener in self._openers]

    def close(self) -> None:
        for service in self._services:
            service.close()


def check_trackers(wanted: Sequence[str] | None) -> list[str]:
    """The names of the trackers to use. A configured one must be installed; TensorBoard by default need not be."""
    if wanted is None and importlib.util.find_spec("tensorboard") is None:
        info("TensorBoard is not installed; metrics are in metrics.jsonl alone (pip install 'whet[track]')")
        return []
    names = ["tensorboard"] if wanted is None else list(dict.fromkeys(wanted))
    for name in names:
        if importlib.util.find_spec(_BACKENDS[name][0]) is None:
            raise WhetError(f"track: {name} is not installed. Install it with: pip install 'whet[track]'")
    return names


def open_trackers(names: Sequence[str], folder: Path, done: int) -> Trackers:
    """`done`: the steps of the checkpoint; what was logged after them is discarded."""
    return Trackers([partial(_BACKENDS[name][1], folder) for name in names], done)


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by tag: train/loss, val/loss, val/task/orders."""
    found = {}
    for key, value in line.items():
        if key in ("step", "time") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if key.startswith("val_"):
            found[f"val/{key.removeprefix('val_')}"] = value
        else:
            found[f"val/{key}" if key.startswith("task/") else f"train/{key}"] = value
    return found
