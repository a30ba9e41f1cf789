"""The checkpoints of a run: when and what to save, restoring the newest complete one, and rolling back to it."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from whet.checkpoint import directory
from whet.checkpoint.directory import DamagedCheckpointError
from whet.checkpoint.load import load_checkpoint
from whet.config import Config
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.console import info, warn
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.core.json_lines import parse_json_line
from whet.model.load.weight_files import weights_hash
from whet.model.loss.loss_model import LossModel
from whet.training.guard import Guard
from whet.training.metrics import RunTotals
from whet.training.precision import LossScaler
from whet.training.records import RECORDS, Prefix, initial_evaluation, record_file
from whet.training.run_state import Run

_PACKAGES = ("whet", "torch", "transformers", "peft", "safetensors", "numpy")


def save_is_due(run: Run) -> bool:
    """By rank 0's clock (checkpoint.minutes). A save that failed, or a damaged store, triggers the next one, which
    raises the error on every rank."""
    if run.saver is None or not run.ranks.is_main:
        return False
    minutes = run.config.checkpoint.minutes
    is_late = minutes is not None and time.monotonic() - run.saver.last_saved >= 60 * minutes
    return is_late or run.saver.has_failed or run.store_check.has_failed


def save_checkpoint(run: Run) -> None:
    """Save the state after `run.step` steps, unless it was trained on damaged data; a thread writes it in the
    background."""
    if run.saver is not None:
        _require_intact_stores(run)
        state = {
            "seen": asdict(run.totals),
            "loss_scale": asdict(run.loss_scaler),
            "guard": run.guard.state(),
            "evaluations": {str(step): results for step, results in run.evaluations.items()},
            **run.output.records_state,
        }
        run.saver.save(run.step, state)


def _require_intact_stores(run: Run) -> None:
    """Machines may have stores of their own: all ranks raise the same error."""
    damage = run.store_check.result()
    found = run.ranks.all_gather([] if damage is None else [str(damage)])
    if found:
        raise WhetError(found[0])


def wait_for_save(run: Run) -> None:
    if run.saver is not None:
        run.saver.wait()


def saved_steps(run: Run) -> list[int]:
    """The steps that have a complete checkpoint, the same on every rank."""
    wait_for_save(run)
    return run.ranks.all_gather(directory.list_steps(run.config.folder / "checkpoints") if run.ranks.is_main else [])


def resumable_steps(run: Run) -> list[int]:
    """The steps whose checkpoint has the optimizer state too, the same on every rank."""
    wait_for_save(run)
    return run.ranks.all_gather(
        directory.resumable_steps(run.config.folder / "checkpoints") if run.ranks.is_main else []
    )


def roll_back(run: Run) -> None:
    """Return to the newest checkpoint and exclude every step since, the current one included."""
    run.guard.excluded.append((resumable_steps(run)[-1] + 1, run.step + 1))
    if run.ranks.is_main:  # before anything is undone: a run that dies here excludes them, too
        write_excluded_steps(run.config.folder, run.guard.excluded)
    restored = restore_newest_checkpoint(run.config, run.model, run.optimizer, run.loss_scaler, run.ranks)
    run.step, run.totals, run.evaluations = restored.step, restored.totals, restored.evaluations
    run.output.rewind(run.step, restored.prefixes)
    run.guard.restore(restored.guard)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a run continues with, apart from weights and optimizer state."""

    step: int
    totals: RunTotals
    guard: dict[str, Any]
    evaluations: dict[int, dict[str, float]]
    """The results by step."""
    prefixes: dict[str, Prefix]
    """Of the records, by name."""
    has_initial_evaluation: bool
    """The model was evaluated before its first step."""


def restore_newest_checkpoint(
    config: Config, model: LossModel, optimizer: torch.optim.Optimizer, loss_scaler: LossScaler, ranks: Ranks
) -> Restored:
    """Load the newest complete checkpoint, if there is one."""
    manifest = _load_newest_complete(config.folder / "checkpoints", model, optimizer, ranks)
    if manifest is None:
        first = config.train.first_step
        found = dict(ranks.all_gather([*initial_evaluation(config.folder, first).items()] if ranks.is_main else []))
        return Restored(first, RunTotals(), Guard().state(), {}, found, has_initial_evaluation=bool(found))
    require_same_base(config, manifest, ranks)
    step, state = manifest["step"], manifest["state"]
    loss_scaler.restore(state["loss_scale"])
    info(f"continuing after step {step}")
    if "guard" not in state:
        state |= _state_from_metrics(config.folder, state["metrics_bytes"], ranks)
    return Restored(
        step,
        RunTotals(**state["seen"]),
        state["guard"],
        {int(at): results for at, results in state["evaluations"].items()},
        {name: Prefix.from_state(state, name) for name in RECORDS},
        has_initial_evaluation=True,
    )


def _state_from_metrics(folder: Path, size: int, ranks: Ranks) -> dict[str, Any]:
    """The guard's state and the evaluations for a checkpoint from before it had them, the same on every rank."""
    guard, evaluations = Guard(excluded=read_excluded_steps(folder)), dict[str, dict[str, float]]()
    file = record_file(folder, "metrics")
    content = file.read_bytes()[:size] if ranks.is_main and file.is_file() else b""
    for line in ranks.all_gather(content.splitlines(keepends=True)):
        record = parse_json_line(line)
        if record is None or type(record.get("step")) is not int:
            continue
        numbers = {key: value for key, value in record.items() if type(value) in (int, float)}
        if "loss" not in record:
            evaluations[str(record["step"])] = numbers
        elif record["loss"] is None or "loss" in numbers:
            guard.record(record)
    return {"guard": guard.state(), "evaluations": evaluations}


def _load_newest_complete(
    folder: Path, model: LossModel, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any] | None:
    """Load the newest checkpoint with an optimizer state; one with a damaged file is set aside for the one before."""
    saved = ranks.all_gather(directory.list_steps(folder) if ranks.is_main else [])
    steps = ranks.all_gather(directory.resumable_steps(folder) if ranks.is_main else [])
    if saved and not steps:
        raise WhetError(
            f"{folder}: none of these checkpoints has the optimizer's state (checkpoint.optimizer), so the run "
            f"cannot be resumed. Start a new one from its weights: model.path={folder.parent}"
        )
    while steps:
        step = steps.pop()
        try:
            return load_checkpoint(folder / directory.checkpoint_name(step), model, optimizer, ranks)
        except DamagedCheckpointError as error:
            if not steps:
                raise WhetError(
                    f"{error}. There is no other complete checkpoint: delete {folder}, and --resume starts the run over"
                ) from None
            if ranks.is_main:
                away = directory.quarantine(folder, step)
                warn(f"{error}. It is set aside as {away.name}; the run continues from step {steps[-1]}")
            ranks.barrier()
    return None


# The part of the manifest that describes the run.


def checkpoint_metadata(config: Config) -> dict[str, Any]:
    """The configuration, package versions and, for an adapter, the hash of the weights that it was trained on."""
    base = weights_hash(config.model) if config.adapter is not None else None
    return {"config": config.unexpanded(), "versions": package_versions(), "base": base}


def require_same_base(config: Config, manifest: dict[str, Any], ranks: Ranks) -> None:
    """Refuse an adapter whose base weights have changed since: it would load and be wrong."""
    then = manifest.get("base")
    now = weights_hash(config.model) if then is not None and ranks.is_main else None
    if any(ranks.all_gather([now is not None and now != then])):
        raise WhetError(
            f"model.path: {config.model.path}: its weights are not those that this run's adapter was trained on (the "
            "files were changed since). Bring the old files back, or start a new run: run.dir=FOLDER"
        )


def package_versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run's numbers and memory depend on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


# Steps that rollbacks excluded.


_EXCLUDED_REMEDY = "The run continues with the steps that its checkpoint excludes"


def read_excluded_steps(run: Path, saved: Sequence[Sequence[int]] = ()) -> list[tuple[int, int]]:
    """The first and the last step that each rollback of a run excluded. `saved`: those in the checkpoint, which are
    enough if the file is gone or damaged: a rollback since then happens again."""
    file = run / "faults" / "passed_over.json"
    found: Sequence[Any] = saved
    if file.exists():
        try:
            found = read_hashed_json(file, _EXCLUDED_REMEDY, steps=list)["steps"]
            if not all(isinstance(each, list) and [*map(type, each)] == [int, int] for each in found):
                raise WhetError(f"{file}: damaged: `steps` does not hold pairs of numbers. {_EXCLUDED_REMEDY}")
        except WhetError as error:
            warn(str(error))
            found = saved
    return [(first, last) for first, last in found]


def write_excluded_steps(run: Path, excluded: list[tuple[int, int]]) -> None:
    (run / "faults").mkdir(exist_ok=True)
    write_hashed_json(run / "faults" / "passed_over.json", {"steps": excluded})
