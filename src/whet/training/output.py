"""What a run writes while it trains: metrics, samples, events, status and trackers. Rank 0 alone writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.console import info, warn
from whet.core.errors import WhetError
from whet.core.json_lines import JsonLinesWriter
from whet.core.run_folder import RunFolder
from whet.evaluation.training_losses import TrainingLossWriter
from whet.evaluation.validation_losses import ConversationLosses, add_validation_losses, truncate_validation_losses
from whet.inference.tasks.task import AnsweredExample
from whet.model.weight_effect import EFFECT_FILE, WeightEffect, effect_summary, effect_warnings
from whet.training.records import RECORDS, Prefix, record_file, restore_records
from whet.training.trackers import Trackers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RunOutput:
    """The output of every rank but the first: none."""

    def __init__(self) -> None:
        self.records_state: dict[str, Any] = {}
        """Size and hash of the records at the end of the last step, for the checkpoint."""

    def write_step(self, line: dict[str, Any]) -> None: ...

    def write_losses(
        self, step: int, documents: NDArray[np.integer], tokens: NDArray[np.integer], nats: NDArray[np.float64]
    ) -> None:
        """Write the loss of each conversation of a step; `nats`: the sums over its supervised tokens."""

    def write_evaluation(
        self,
        step: int,
        results: dict[str, float],
        samples: Sequence[AnsweredExample],
        losses: ConversationLosses | None,
    ) -> None: ...

    def write_event(self, event: dict[str, Any]) -> None: ...

    def update_plan(self, changes: dict[str, Any]) -> None:
        """Change values in plan.json."""

    def write_effect(self, step: int, effects: Sequence[WeightEffect]) -> None:
        """Write what training has changed, and warn of weights that it did not reach."""

    def write_phase(self, step: int) -> None:
        """Write the phase that this process has entered, which may last longer than a step."""

    def write_startup(self, seconds: dict[str, float], step: int) -> None: ...

    def rewind(self, step: int, prefixes: Mapping[str, Prefix]) -> None:
        """Undo what was written since the checkpoint of a step."""

    def stop_requested(self) -> bool:
        """Whether the run's folder has a file `stop`."""
        return False

    def close(self, state: str) -> None:
        """`state`: finished, stopped or failed."""


class FolderOutput(RunOutput):
    """The output of rank 0, into the run's folder and to its trackers."""

    def __init__(
        self, folder: RunFolder, step: int, steps: int, prefixes: Mapping[str, Prefix], trackers: Trackers
    ) -> None:
        """`step`, `prefixes`: of the checkpoint that the run continues from."""
        super().__init__()
        self._folder, self._steps, self._trackers = folder, steps, trackers
        self._open_records(step, prefixes)

    def write_step(self, line: dict[str, Any]) -> None:
        self._folder.require_present()
        self._records["metrics"].write(line)
        self._mark_step_end()
        self._trackers.write(line)
        self._folder.heartbeat(line["step"], self._steps)

    def write_losses(
        self, step: int, documents: NDArray[np.integer], tokens: NDArray[np.integer], nats: NDArray[np.float64]
    ) -> None:
        self._losses.write(step, documents, tokens, nats)

    def write_evaluation(
        self,
        step: int,
        results: dict[str, float],
        samples: Sequence[AnsweredExample],
        losses: ConversationLosses | None,
    ) -> None:
        self._folder.require_present()
        for sample in samples:
            self._records["samples"].write({"step": step, **sample.as_dict()})
        if losses is not None:
            add_validation_losses(self._folder.path, step, losses)
        if not results:
            return
        line = {"time": time.time(), "step": step, **results}
        self._records["metrics"].write(line)
        self._trackers.write(line)
        shown = (
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}" for name, value in results.items()
        )
        info(f"step {step}: {', '.join(shown)}")

    def write_event(self, event: dict[str, Any]) -> None:
        self._folder.require_present()
        self._records["events"].write(event)

    def update_plan(self, changes: dict[str, Any]) -> None:
        file = self._folder.path / "plan.json"
        with contextlib.suppress(WhetError):  # deleted or damaged meanwhile: no step depends on it
            write_hashed_json(file, read_hashed_json(file) | changes)

    def write_effect(self, step: int, effects: Sequence[WeightEffect]) -> None:
        summary = effect_summary(effects)
        modules = [each.as_dict() for each in effects]
        write_hashed_json(self._folder.path / EFFECT_FILE, {"step": step, **summary, "modules": modules})
        for problem in effect_warnings(effects):
            warn(problem)

    def write_phase(self, step: int) -> None:
        self._folder.set_status("running", step, self._steps)

    def write_startup(self, seconds: dict[str, float], step: int) -> None:
        self._folder.first_step = {key: round(value, 3) for key, value in seconds.items()}
        self._folder.set_status("running", step, self._steps)

    def rewind(self, step: int, prefixes: Mapping[str, Prefix]) -> None:
        self._close_records()
        self._open_records(step, prefixes)
        self._trackers.rewind(step)

    def stop_requested(self) -> bool:
        return self._folder.stop_requested()

    def close(self, state: str) -> None:
        self._close_records()
        self._trackers.close(state)

    def _open_records(self, step: int, prefixes: Mapping[str, Prefix]) -> None:
        restore_records(self._folder.path, step, prefixes)
        truncate_validation_losses(self._folder.path, step)
        self._losses = TrainingLossWriter(self._folder.path, step)
        self._records = {name: JsonLinesWriter(record_file(self._folder.path, name)) for name in RECORDS}
        self._mark_step_end()

    def _close_records(self) -> None:
        self._losses.close()
        for writer in self._records.values():
            writer.close()

    def _mark_step_end(self) -> None:
        """A checkpoint has the sizes after its step and before its evaluation, which a resumed run repeats."""
        for name, writer in self._records.items():
            self.records_state |= {f"{name}_bytes": writer.size, f"{name}_hash": writer.hash()}
