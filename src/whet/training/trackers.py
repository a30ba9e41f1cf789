"""The trackers of a run: views of metrics.jsonl, which is the record.

No tracker can stop or slow a run. Each has a thread of its own, which opens it, writes to it and closes it. Lines wait
for the thread in a queue with a limit; an error, or a queue that is full, is one warning.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.core.console import info, warn
from whet.core.errors import WhetError, first_line
from whet.core.signals import abandon_thread
from whet.training.tracker_backends import MLflow, TensorBoard, TrackedRun, TrackerBackend, Trackio, WandB

_MAX_WAITING = 10_000
"""Lines that wait for a slow tracker, about 20 MB."""
_CLOSE_S = {"finished": 30.0}
_CLOSE_EARLY_S = 5.0
"""How long closing may take: whoever stops a run, or waits for a failed one, does not wait for its trackers."""

_BACKENDS: dict[str, tuple[str, str, Callable[[TrackedRun], TrackerBackend]]] = {
    "tensorboard": ("tensorboard", "track", TensorBoard),
    "wandb": ("wandb", "wandb", WandB),
    "mlflow": ("mlflow", "mlflow", MLflow),
    "trackio": ("trackio", "trackio", Trackio),
}
"""By the name in `track`: the module it needs, the extra that installs it, and what opens it."""

_Action = Callable[[TrackerBackend], None]


class _TrackerThread:
    """One tracker and the thread that writes to it."""

    def __init__(self, name: str, run: TrackedRun, backend: Callable[[TrackedRun], TrackerBackend]) -> None:
        self._name, self._run, self._backend = name, run, backend
        self._waiting: queue.SimpleQueue[_Action | None] = queue.SimpleQueue()
        self._lost, self._is_off, self._has_warned = 0, False, False
        self._thread = threading.Thread(target=self._work, name=f"whet-track-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log a line, now or when the tracker gets to it."""
        if self._is_off:
            return
        if self._waiting.qsize() < _MAX_WAITING:
            self._waiting.put(lambda backend: backend.write(step, values))
            return
        self._lost += 1
        self._warn(f"it is too slow: {_MAX_WAITING:,} lines wait for it, and more are left out")

    def rewind(self, done: int) -> None:
        self._waiting.put(lambda backend: backend.rewind(done))

    def begin_close(self, state: str) -> None:
        """Close it once every line is written; `end_close` waits for that."""
        self._waiting.put(lambda backend: backend.close(state))
        self._waiting.put(None)

    def end_close(self, timeout_s: float) -> None:
        abandon_thread(self._thread, timeout_s)
        if self._thread.is_alive():
            self._warn(f"it was not done {timeout_s:.0f} s after the run, with {self._waiting.qsize():,} lines waiting")
        elif self._lost and not self._is_off:
            info(f"track: {self._name}: {self._lost:,} lines are missing there; metrics.jsonl has them")

    def _work(self) -> None:
        try:
            backend = self._backend(self._run)
        except BaseException as error:  # also a SystemExit of the tracker's package: the run goes on
            self._is_off = True
            self._warn(f"{_describe(error)}. The run is not tracked there")
            return
        while (action := self._waiting.get()) is not None:
            try:
                action(backend)
            except BaseException as error:
                self._lost += 1
                self._warn(_describe(error))

    def _warn(self, problem: str) -> None:
        """Once; and not if the run folder was deleted, which the run reports."""
        if not self._has_warned and self._run.folder.is_dir():
            self._has_warned = True
            warn(f"track: {self._name}: {problem}. The run goes on; metrics.jsonl has every line")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}".rstrip(". :")


class Trackers:
    """The trackers of a run, which may be none."""

    def __init__(self, threads: Sequence[_TrackerThread] = ()) -> None:
        self._threads = threads

    def write(self, line: Mapping[str, Any]) -> None:
        """Log a line of metrics.jsonl."""
        values = scalars_of(line)
        for thread in self._threads:
            thread.write(line["step"], values)

    def rewind(self, done: int) -> None:
        """The run goes back to its checkpoint of `done` steps."""
        for thread in self._threads:
            thread.rewind(done)

    def close(self, state: str) -> None:
        """Write what waits, and close; for a limited time. `state`: finished, stopped or failed."""
        for thread in self._threads:
            thread.begin_close(state)
        until = time.monotonic() + _CLOSE_S.get(state, _CLOSE_EARLY_S)
        for thread in self._threads:
            thread.end_close(max(0.0, until - time.monotonic()))


def check_trackers(wanted: Sequence[str] | None) -> list[str]:
    """The names of the trackers to use. A configured one must be installed; TensorBoard by default need not be."""
    if wanted is None and importlib.util.find_spec("tensorboard") is None:
        return []
    names = ["tensorboard"] if wanted is None else list(dict.fromkeys(wanted))
    for name in names:
        module, extra, _ = _BACKENDS[name]
        if importlib.util.find_spec(module) is None:
            raise WhetError(f"track: {name} is not installed. Install it with: pip install 'whet[{extra}]'")
    return names


def open_trackers(names: Sequence[str], run: TrackedRun) -> Trackers:
    """Returns at once: each tracker opens in its thread."""
    return Trackers([_TrackerThread(name, run, _BACKENDS[name][2]) for name in names])


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
