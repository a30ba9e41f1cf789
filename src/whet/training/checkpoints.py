"""The checkpoints of a run: when and what to save, restoring the newest complete one, and rolling back to it."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from whet.checkpoint import directory
from whet.checkpoint.load import load_checkpoint
from whet.checkpoint.manifest import DamagedCheckpointError
from whet.config import Config
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.console import info, warn
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.model.load.weight_files import weights_hash
from whet.model.loss.loss_model import LossModel
from whet.training.loss_scale import LossScaler
from whet.training.metrics import RunTotals
from whet.training.output import ResumeOffsets
from whet.training.run_state import Run

_PACKAGES = ("whet", "torch", "transformers", "peft", "safetensors", "numpy")


def save_is_due(run: Run) -> bool:
    """By rank 0's clock (checkpoint.minutes). A save that failed, or a damaged store, asks for the next one, which
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
        state = {"seen": asdict(run.totals), "loss_scale": asdict(run.loss_scaler), **run.output.sizes}
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
    run.step, run.totals, offsets = restore_newest_checkpoint(
        run.config, run.model, run.optimizer, run.loss_scaler, run.ranks
    )
    run.output.rewind(run.step, offsets)
    run.guard.restore(read_kept_metrics(run.config.folder, offsets, run.ranks))


def restore_newest_checkpoint(
    config: Config, model: LossModel, optimizer: torch.optim.Optimizer, loss_scaler: LossScaler, ranks: Ranks
) -> tuple[int, RunTotals, ResumeOffsets]:
    """Load the newest complete checkpoint, if there is one; returns its step, its totals and its file offsets."""
    manifest = _load_newest_complete(config.folder / "checkpoints", model, optimizer, ranks)
    if manifest is None:
        first = config.train.start_step
        metrics = _initial_evaluation_bytes(config.folder / "metrics.jsonl", first)
        samples = _initial_evaluation_bytes(config.folder / "samples.jsonl", first) if metrics else 0
        return first, RunTotals(), ResumeOffsets(metrics, samples, has_initial_evaluation=metrics > 0)
    require_same_base(config, manifest, ranks)
    step, state = manifest["step"], manifest["state"]
    loss_scaler.restore(state["loss_scale"])
    info(f"continuing after step {step}")
    offsets = ResumeOffsets(state["metrics_bytes"], state["samples_bytes"], has_initial_evaluation=True)
    return step, RunTotals(**state["seen"]), offsets


def _load_newest_complete(
    folder: Path, model: LossModel, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any] | None:
    """Load the newest checkpoint with an optimizer state; one with a damaged file is set aside for the one before."""
    saved = ranks.all_gather(directory.list_steps(folder) if ranks.is_main else [])
    steps = ranks.all_gather(directory.resumable_steps(folder) if ranks.is_main else [])
    if saved and not steps:
        raise WhetError(
            f"{folder}: none of these checkpoints has the optimizer's state (checkpoint.optimizer: newest), so the run "
            f"cannot go on. Start a new one from its weights: model.path={folder.parent}"
        )
    while steps:
        step = steps.pop()
        try:
            return load_checkpoint(folder / directory.checkpoint_name(step), model, optimizer, ranks)
        except DamagedCheckpointError as error:
            if not steps:
                raise WhetError(
                    f"{error}. There is no other complete one to go back to: delete {folder} and --resume begins the "
                    "run anew"
                ) from None
            if ranks.is_main:
                away = directory.quarantine(folder, step)
                warn(f"{error}. It is set aside as {away.name}; the run continues from step {steps[-1]}")
            ranks.barrier()
    return None


def _initial_evaluation_bytes(path: Path, first: int) -> int:
    """The size of the lines about the model before its first step: a restart need not evaluate it again."""
    size = 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or json.loads(line)["step"] != first:
                break
            size += len(line)
    return size


def read_kept_metrics(folder: Path, offsets: ResumeOffsets, ranks: Ranks) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to the checkpoint, the same on every rank."""
    file = folder / "metrics.jsonl"
    if not ranks.is_main or not file.exists():
        return ranks.all_gather([])
    return ranks.all_gather([json.loads(line) for line in file.read_bytes()[: offsets.metrics].splitlines()])


# The part of the manifest that describes the run.


def checkpoint_metadata(config: Config) -> dict[str, Any]:
    """The configuration, package versions and, for an adapter, the hash of the weights that it was trained on."""
    base = weights_hash(config.model) if config.adapter is not None else None
    return {"config": config.unexpanded(), "versions": _package_versions(), "base": base}


def require_same_base(config: Config, manifest: dict[str, Any], ranks: Ranks) -> None:
    """Refuse an adapter whose base weights have changed since: it would load and be wrong."""
    then = manifest.get("base")
    now = weights_hash(config.model) if then is not None and ranks.is_main else None
    if any(ranks.all_gather([now is not None and now != then])):
        raise WhetError(
            f"model.path: {config.model.path}: its weights are not those that this run's adapter was trained on (the "
            "files were changed since). Bring the old files back, or start a new run: run.dir=FOLDER"
        )


def _package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


# Steps that rollbacks excluded.


def read_excluded_steps(run: Path) -> list[tuple[int, int]]:
    """The first and the last step that each rollback of a run excluded."""
    file = run / "faults" / "passed_over.json"
    if not file.exists():
        return []
    steps = read_hashed_json(file, "Bring it back: the run would repeat steps that a rollback excluded")["steps"]
    return [(first, last) for first, last in steps]


def write_excluded_steps(run: Path, excluded: list[tuple[int, int]]) -> None:
    (run / "faults").mkdir(exist_ok=True)
    write_hashed_json(run / "faults" / "passed_over.json", {"steps": excluded})
