"""Experiment trackers (TensorBoard): views of metrics.jsonl, which is the record."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from whet.core.console import info, warn
from whet.core.errors import WhetError


class TrackerBackend(Protocol):
    """One experiment tracker."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the scalars of a step by name."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoard:
    """Event files in RUN/tensorboard, for `tensorboard --logdir runs`.

    torch's SummaryWriter would write them from a thread, whose traceback nothing could catch if the folder is deleted.
    """

    def __init__(self, folder: Path, done: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        (folder / "tensorboard").mkdir(exist_ok=True)
        self._file = (
            folder / "tensorboard" / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        )
        self._stream: IO[bytes] | None = self._file.open("xb", buffering=0)
        self._records = RecordWriter(self._stream)
        # The session that starts here hides what was logged after the checkpoint, so a resumed run has one curve.
        self._write(file_version="brain.Event:2")
        self._write(step=done + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summary.Value
        self._write(
            step=step, summary=self._summary(value=[value(tag=name, simple_value=n) for name, n in values.items()])
        )

    def _write(self, **fields: Any) -> None:
        """Nothing depends on the file, so an error does not stop the run."""
        if self._stream is None:
            return
        try:
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        except OSError as error:
            self.close()
            if self._file.parent.is_dir():  # else the run folder was deleted, which the run reports
                warn(f"{self._file}: cannot be written ({error.strerror}); metrics are in metrics.jsonl alone")

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


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
