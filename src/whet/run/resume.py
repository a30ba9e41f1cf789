"""A run's folder: opened, checked, written, restored from its newest checkpoint."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from whet.checkpoint import directory
from whet.checkpoint.load import load_checkpoint
from whet.checkpoint.manifest import DamagedCheckpointError
from whet.config import Config
from whet.core.console import info, warn
from whet.core.distributed import Ranks
from whet.core.errors import ExitCode, StoppedError, WhetError, disk_error
from whet.core.files import JsonLinesWriter, atomic_dir, atomic_write, read_json, write_json
from whet.core.run_folder import RunFolder
from whet.core.signals import STOPPED_BEFORE_CHECKPOINT, StopRequested
from whet.core.yaml import read_yaml
from whet.model.load.weight_files import weights_hash
from whet.model.loss.loss_model import LossModel
from whet.run.data import RunData, make_plan
from whet.training.loss_scale import LossScaler
from whet.training.metrics import RunTotals

# What a checkpoint says of the run that it belongs to.

_PACKAGES = ("whet", "torch", "transformers", "peft", "safetensors", "numpy")


def checkpoint_metadata(config: Config) -> dict[str, Any]:
    """The configuration, the versions at work and, of an adapter, the hash of the weights that it was trained on."""
    base = weights_hash(config.model) if config.adapter is not None else None
    return {"config": config.resolved(), "versions": _package_versions(), "base": base}


def require_same_base(config: Config, manifest: dict[str, Any], ranks: Ranks) -> None:
    """Refuse an adapter whose base has changed since: it would load and be wrong. Rank 0 looks, all know."""
    then = manifest.get("base")
    now = weights_hash(config.model) if then is not None and ranks.is_main else None
    if any(ranks.all_gather([now is not None and now != then])):
        raise WhetError(
            f"model.path: {config.model.path}: its weights are not those that this run's adapter was trained on (the "
            "files were changed since). Bring the old files back, or start a new run: run.dir=FOLDER"
        )


def _package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# A run's folder: taken, checked, begun, continued.


@contextlib.contextmanager
def open_run_folder(config: Config, resume: bool, first: bool) -> Iterator[RunFolder | None]:
    """The run's folder, owned by rank 0 alone; how the run ended is written into its status."""
    if not first:
        yield None
        return
    folder = RunFolder(config.folder)
    try:
        _require_usable_folder(folder, config, resume)
        yield folder
    except BaseException as error:
        known = None if isinstance(error, WhetError) else disk_error(error, "writing the run", folder.path)
        if isinstance(error, KeyboardInterrupt) and directory.newest_checkpoint(folder.path / "checkpoints"):
            known = StoppedError("interrupted; the last checkpoint is good. Start it again to continue")
        elif isinstance(error, StopRequested):
            known = StoppedError(STOPPED_BEFORE_CHECKPOINT)
        end = known or error
        code = end.exit_code if isinstance(end, WhetError) else ExitCode.FAILED
        code = ExitCode.INTERRUPTED if isinstance(end, KeyboardInterrupt) else code
        stays = isinstance(error, StopRequested)
        with contextlib.suppress(OSError):
            state = "failed" if code in (ExitCode.INPUT, ExitCode.FAILED) else "stopped"
            folder.set_ended(state, code, str(end) or type(end).__name__, begun=stays and folder.holds_run())
        folder.abandon(stays)
        raise end from None
    folder.close()


def _require_usable_folder(folder: RunFolder, config: Config, resume: bool) -> None:
    if not folder.holds_run():
        folder.require_empty()
        return
    if not resume:
        raise WhetError(
            f"{folder.path}: this folder holds a run already. Continue it with --resume, or give the new run another "
            "folder: run.dir=FOLDER"
        )
    changed = changed_settings(folder.path, config)
    if changed:
        shown = "; ".join(f"{key}: {old!r} then, {new!r} now" for key, old, new in changed[:5])
        raise WhetError(
            f"{folder.path}: this folder holds another run, which cannot be resumed with this configuration ({shown}). "
            "Set these back, or give the new run another folder: run.dir=FOLDER"
        )


_CHANGEABLE_ON_RESUME = (
    "run.name", "run.dir", "run.tags", "eval.", "checkpoint.", "export.", "track.", "profile.", "parallel.",
    "launch.",
    "train.micro_rows", "train.on_nonfinite", "train.on_spike", "model.attention", "model.compile",
)  # fmt: skip
"""What a resumed run may do otherwise without becoming another run."""


def _differences(before: Any, now: Any, above: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [d for key in keys for d in _differences(before.get(key), now.get(key), f"{above}{key}.")]
    same = before == now or f"{above}".startswith(_CHANGEABLE_ON_RESUME)
    return [] if same else [(above.rstrip("."), before, now)]


def changed_settings(path: Path, config: Config) -> list[tuple[str, Any, Any]]:
    """(key, value then, value now) of what makes `config` another run than the one in the folder."""
    return _differences(read_yaml(path / "config.yaml").plain(), config.resolved())


def write_run_inputs(folder: RunFolder, config: Config, data: RunData) -> None:
    """Write down, before anything is computed, all that is decided. config.yaml first: it makes the folder a run."""
    path = folder.path
    (path / "checkpoints").mkdir(exist_ok=True)
    if (path / "ledger.json").exists():
        _require_same_data(path, data)
    elif directory.newest_checkpoint(path / "checkpoints"):
        raise WhetError(
            f"{path}/ledger.json is gone, so it cannot be known whether the data is still the same. Bring it back, or "
            "start a new run: run.dir=FOLDER"
        )
    atomic_write(path / "config.yaml", config.dump())
    write_json(path / "ledger.json", data.ledger())
    if not (path / "plan").exists():
        with atomic_dir(path / "plan") as temporary:
            make_plan(config, data).save(temporary)


def _require_same_data(path: Path, data: RunData) -> None:
    """The plan names conversations by number: with other data it would mean other conversations."""
    then, now = read_json(path / "ledger.json")["stores"], data.stores()
    if {use: Path(store).name for use, store in then.items()} != {use: Path(store).name for use, store in now.items()}:
        raise WhetError(
            f"{path}: the data is not what it was when this run began (a file, the tokenizer or its template changed), "
            "so it cannot be resumed. Bring the old data back, or start a new run: run.dir=FOLDER"
        )


def recorded_template_date(path: Path) -> str | None:
    """The date that a run's chat template was rendered with, if the run exists and its template asks for one."""
    ledger = path / "ledger.json"
    return read_json(ledger)["today"] if ledger.exists() else None


@dataclass(frozen=True, slots=True)
class ResumeOffsets:
    """What is kept of a run's files when it continues: their sizes at the checkpoint."""

    metrics: int | None = None
    samples: int | None = None
    measured: bool = False
    """The untrained model was measured before; that stays true."""


def restore_newest_checkpoint(
    config: Config, root: LossModel, optimizer: torch.optim.Optimizer, loss_scale: LossScaler, ranks: Ranks
) -> tuple[int, RunTotals, ResumeOffsets]:  # fmt: skip
    """Load the newest checkpoint that is whole, if there is one, and say where to go on."""
    path = config.folder
    manifest = _load_newest_complete(path / "checkpoints", root, optimizer, ranks)
    if manifest is None:
        first = config.train.start_step
        metrics, measured = _initial_evaluation_bytes(path / "metrics.jsonl", first)
        samples, _ = _initial_evaluation_bytes(path / "samples.jsonl", first) if measured else (0, False)
        return first, RunTotals(), ResumeOffsets(metrics, samples, measured)
    require_same_base(config, manifest, ranks)
    step, state = manifest["step"], manifest["state"]
    loss_scale.restore(state["loss_scale"])
    info(f"continuing after step {step}")
    return (
        step,
        RunTotals(**state["seen"]),
        ResumeOffsets(state["metrics_bytes"], state["samples_bytes"], measured=True),
    )


def _load_newest_complete(
    folder: Path, root: LossModel, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any] | None:
    """Load the newest checkpoint; where a file of it is damaged, say so and take the one before. Rank 0 looks for
    them, all decide the same."""
    there = ranks.all_gather(directory.list_steps(folder) if ranks.is_main else [])
    steps = ranks.all_gather(directory.resumable_steps(folder) if ranks.is_main else [])
    if there and not steps:
        raise WhetError(
            f"{folder}: none of these checkpoints has the optimizer's state (checkpoint.optimizer: newest), so the run "
            f"cannot go on. Start a new one from its weights: model.path={folder.parent}"
        )
    while steps:
        step = steps.pop()
        try:
            return load_checkpoint(folder / directory.checkpoint_name(step), root, optimizer, ranks)
        except DamagedCheckpointError as error:
            if not steps:
                raise WhetError(
                    f"{error}. There is no other complete one to go back to: delete {folder} and --resume begins the "
                    "run anew"
                ) from None
            if ranks.is_main:
                away = directory.quarantine(folder, step)
                warn(f"{error}. It is set aside as {away.name}; the run goes on from step {steps[-1]}")
            ranks.barrier()
    return None


def _initial_evaluation_bytes(path: Path, first: int) -> tuple[int, bool]:
    """The bytes of the lines about the untrained model at the start of a file: a restart need not measure it again."""
    size = 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or json.loads(line)["step"] != first:
                break
            size += len(line)
    return size, size > 0


def read_kept_metrics(path: Path, kept: ResumeOffsets, ranks: Ranks) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that stay; rank 0 reads them, every rank knows them."""
    file = path / "metrics.jsonl"
    if not ranks.is_main or not file.exists():
        return ranks.all_gather([])
    return ranks.all_gather([json.loads(line) for line in file.read_bytes()[: kept.metrics].splitlines()])


class RunFiles:
    """The growing files of a run."""

    def __init__(self, path: Path, kept: ResumeOffsets) -> None:
        self.metrics = JsonLinesWriter(path / "metrics.jsonl", kept.metrics)
        self.samples = JsonLinesWriter(path / "samples.jsonl", kept.samples)
        self.events = JsonLinesWriter(path / "events.jsonl")
        self.mark_step_end()

    def mark_step_end(self) -> None:
        """Remember how long the files are after a step, before it is measured: a resumed run measures it again."""
        self.sizes = {"metrics_bytes": self.metrics.size(), "samples_bytes": self.samples.size()}

    def truncate(self, kept: ResumeOffsets) -> None:
        """Undo what was written since a checkpoint; events have happened all the same."""
        if kept.metrics is not None and kept.samples is not None:
            self.metrics.truncate(kept.metrics)
            self.samples.truncate(kept.samples)
        self.mark_step_end()

    def close(self) -> None:
        self.metrics.close()
        self.samples.close()
        self.events.close()
