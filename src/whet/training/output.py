"""What a run writes while it trains: metrics, samples, events, status and trackers. Rank 0 alone writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whet.core.console import info
from whet.core.files import JsonLinesWriter
from whet.core.run_folder import RunFolder
from whet.inference.tasks.task import AnsweredExample
from whet.training.trackers import Trackers


@dataclass(frozen=True, slots=True)
class ResumeOffsets:
    """The sizes to which a resumed run truncates its files; None: as they are."""

    metrics: int | None = None
    samples: int | None = None
    has_initial_evaluation: bool = False
    """The model was evaluated before its first step; that line stays."""


class RunOutput:
    """The output of every rank but the first: none."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """Of the files at the end of the last step, for the checkpoint."""

    def write_step(self, line: dict[str, Any]) -> None: ...

    def write_evaluation(self, step: int, results: dict[str, float], samples: Sequence[AnsweredExample]) -> None: ...

    def write_event(self, event: dict[str, Any]) -> None: ...

    def write_startup(self, seconds: dict[str, float], step: int) -> None: ...

    def rewind(self, step: int, offsets: ResumeOffsets) -> None:
        """Undo what was written since the checkpoint of a step."""

    def stop_requested(self) -> bool:
        """Whether the run's folder has a file `stop`."""
        return False

    def close(self) -> None: ...


class FolderOutput(RunOutput):
    """The output of rank 0, into the run's folder and to its trackers."""

    def __init__(self, folder: RunFolder, steps: int, offsets: ResumeOffsets, trackers: Trackers) -> None:
        super().__init__()
        self._folder, self._steps, self._trackers = folder, steps, trackers
        self._metrics = JsonLinesWriter(folder.path / "metrics.jsonl", offsets.metrics)
        self._samples = JsonLinesWriter(folder.path / "samples.jsonl", offsets.samples)
        self._events = JsonLinesWriter(folder.path / "events.jsonl")
        self._mark_step_end()

    def write_step(self, line: dict[str, Any]) -> None:
        self._folder.require_present()
        self._metrics.write(line)
        self._mark_step_end()
        self._trackers.write(line)
        self._folder.heartbeat(line["step"], self._steps)

    def write_evaluation(self, step: int, results: dict[str, float], samples: Sequence[AnsweredExample]) -> None:
        for sample in samples:
            self._samples.write({"step": step, **sample.as_dict()})
        line = {"time": time.time(), "step": step, **results}
        self._metrics.write(line)
        self._trackers.write(line)
        shown = (
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}" for name, value in results.items()
        )
        info(f"step {step}: {', '.join(shown)}")

    def write_event(self, event: dict[str, Any]) -> None:
        self._events.write(event)

    def write_startup(self, seconds: dict[str, float], step: int) -> None:
        self._folder.first_step = {key: round(value, 3) for key, value in seconds.items()}
        self._folder.set_status("running", step, self._steps)

    def rewind(self, step: int, offsets: ResumeOffsets) -> None:
        """Events stay: they have happened."""
        if offsets.metrics is not None and offsets.samples is not None:
            self._metrics.truncate(offsets.metrics)
            self._samples.truncate(offsets.samples)
        self._mark_step_end()
        self._trackers.rewind(step)

    def stop_requested(self) -> bool:
        return self._folder.stop_requested()

    def close(self) -> None:
        self._trackers.close()
        for writer in (self._metrics, self._samples, self._events):
            writer.close()

    def _mark_step_end(self) -> None:
        """A checkpoint has the sizes after its step and before its evaluation, which a resumed run repeats."""
        self.sizes = {"metrics_bytes": self._metrics.size(), "samples_bytes": self._samples.size()}
