"""Experiment trackers: TensorBoard, W&B, MLflow and trackio.

Each reads its own environment variables (WANDB_*, MLFLOW_*, TRACKIO_*): where the server is and who you are is none of
whet's settings. All methods are called from one thread of the tracker's own (trackers.py), and may fail or hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from whet.core.console import info
from whet.core.files import atomic_write


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What trackers show of a run besides its metrics."""

    folder: Path
    name: str
    project: str
    tags: Sequence[str]
    config: Mapping[str, Any]
    """Without secrets."""
    done: int
    """The steps of the checkpoint that the run continues from; 0 in a new run."""

    def saved_id(self, tracker: str) -> str | None:
        """The tracker's name for this run, from an earlier start of it."""
        file = self._id_file(tracker)
        return file.read_text().strip() or None if file.exists() else None

    def save_id(self, tracker: str, run_id: str) -> None:
        """Keep the tracker's name for this run, so that a resumed one continues the same curves."""
        atomic_write(self._id_file(tracker), f"{run_id}\n")

    def _id_file(self, tracker: str) -> Path:
        return self.folder / f"{tracker}.id"


class TrackerBackend(Protocol):
    """One experiment tracker. Its constructor takes the run, and opens or continues it there."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the scalars of a step by name."""

    def rewind(self, done: int) -> None:
        """The run goes back to its checkpoint of `done` steps and repeats what came later."""

    def close(self, state: str) -> None:
        """Flush and close; `state`: finished, stopped or failed."""


class TensorBoard:
    """Event files in RUN/tensorboard, for `tensorboard --logdir runs`.

    torch's SummaryWriter would write them from a thread, whose traceback nothing could catch if the folder is deleted.
    """

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary, self._writer = Event, SessionLog, Summary, RecordWriter
        self._folder = run.folder / "tensorboard"
        self._stream: IO[bytes] | None = None
        self.rewind(run.done)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summary.Value
        self._write(
            step=step, summary=self._summary(value=[value(tag=name, simple_value=n) for name, n in values.items()])
        )

    def rewind(self, done: int) -> None:
        """A session that starts in a new file hides what was logged after `done`, so a resumed run has one curve."""
        self.close()
        self._folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._stream = (self._folder / name).open("xb", buffering=0)
        self._records = self._writer(self._stream)
        self._write(file_version="brain.Event:2")
        self._write(step=done + 1, session_log=self._session(status=self._session.START))

    def _write(self, **fields: Any) -> None:
        if self._stream is None:
            return
        try:
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        except OSError:
            self.close()  # nothing after a record that is half written could be read
            raise

    def close(self, state: str = "") -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class WandB:
    """A W&B run; without an account on this machine an offline one in RUN/wandb, for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run_id = run.saved_id("wandb") or secrets.token_hex(4)
        run.save_id("wandb", run_id)
        settings = wandb.Settings(silent=True, console="off")
        mode = None
        if not os.environ.get("WANDB_MODE") and not wandb.login(prompt=False):
            mode = "offline"
            info(
                "track: wandb: this machine is not logged in, so the run is tracked offline. To upload it: "
                f"wandb login; wandb sync {run.folder / 'wandb' / 'offline-run-*'}"
            )
        with _wandb_process():
            self._run = wandb.init(
                id=run_id,
                resume="allow",
                mode=mode,
                dir=os.environ.get("WANDB_DIR") or run.folder,
                project=os.environ.get("WANDB_PROJECT") or run.project,
                name=os.environ.get("WANDB_NAME") or run.name,
                tags=[*run.tags, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))] or None,
                config=dict(run.config),
                allow_val_change=True,
                settings=settings,
            )
            # W&B's own step only grows, and drops what a rewound run repeats
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, done: int) -> None:
        """W&B keeps what was logged, and adds the repeated steps."""

    def close(self, state: str) -> None:
        with _wandb_process():
            self._run.summary["state"] = state
            self._run.finish(exit_code=1 if state == "failed" else 0)


@contextlib.contextmanager
def _wandb_process() -> Iterator[None]:
    """After an error W&B's own process may be gone; its hook at exit, removed here, would print a traceback."""
    import wandb

    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            wandb.teardown()
        raise


class MLflow:
    """A run in an MLflow experiment, by the client that has no global state."""

    _STATUS: Mapping[str, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    _BATCH, _LONGEST = 100, 500
    """What servers accept: parameters in a request, characters of a value."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self._client, self._metric = mlflow.MlflowClient(), Metric
        run_id = run.saved_id("mlflow")
        if run_id is not None:
            try:
                self._client.update_run(run_id, status="RUNNING")
                self._id = run_id
                return
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        tags = {_mlflow_name(tag): "" for tag in run.tags} | {"whet.folder": str(run.folder)}
        self._id = self._client.create_run(self._experiment(run.project), run_name=run.name, tags=tags).info.run_id
        run.save_id("mlflow", self._id)
        settings = [Param(_mlflow_name(key), value[: self._LONGEST]) for key, value in _flatten(run.config)]
        for start in range(0, len(settings), self._BATCH):
            self._client.log_batch(self._id, params=settings[start : start + self._BATCH])

    def _experiment(self, project: str) -> str:
        from mlflow.exceptions import MlflowException

        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has just created it
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        metrics = [self._metric(_mlflow_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def rewind(self, done: int) -> None:
        """MLflow keeps what was logged, and adds the repeated steps."""

    def close(self, state: str) -> None:
        self._client.set_terminated(self._id, self._STATUS[state])


class Trackio:
    """A trackio run, in its local database or on the server or Space of TRACKIO_SERVER_URL and TRACKIO_SPACE_ID."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = run.saved_id("trackio")
        self._run = trackio.init(
            run.project, name=name or run.name, resume="allow" if name else "never", embed=False,
            config={**run.config, "tags": list(run.tags), "folder": str(run.folder)},
        )  # fmt: skip
        run.save_id("trackio", self._run.name)
        self._step = run.done

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(values), step=step)

    def rewind(self, done: int) -> None:
        """trackio keeps what was logged, and adds the repeated steps."""

    def close(self, state: str) -> None:
        self._run.log({"state": state}, step=self._step)
        self._run.finish()


def _mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and _-. :/ only, and no part of a path that leads elsewhere."""
    parts = re.sub(r"[^\w\-./ :]", "_", name, flags=re.ASCII).split("/")
    return "/".join(part for part in parts if part.strip(". ")) or "_"


def _flatten(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(train.lr, 0.001): settings by their keys as on the command line."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, str) else json.dumps(value)
