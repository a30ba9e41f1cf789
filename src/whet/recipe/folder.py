"""A run's folder: taken, checked, begun, continued."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whet.checkpoint import place
from whet.checkpoint.load import load
from whet.checkpoint.manifest import DamagedError
from whet.config import Config
from whet.core.console import say, warn
from whet.core.errors import FAILED, INPUT, INTERRUPTED, StoppedError, WhetError, disk_error
from whet.core.files import JsonLines, atomic_dir, atomic_write, read_json, write_json
from whet.core.interrupt import STOPPED_EARLY, AskedToStop
from whet.core.ranks import Ranks
from whet.core.run import RunFolder
from whet.core.yaml import read_yaml
from whet.model.loss import LossModel
from whet.recipe.about import require_base
from whet.recipe.data import Data
from whet.recipe.plan import make_plan
from whet.train.loss_scale import LossScale
from whet.train.metrics import Seen


@contextlib.contextmanager
def run_folder(config: Config, resume: bool, first: bool) -> Iterator[RunFolder | None]:
    """The run's folder, owned by rank 0 alone; how the run ended is written into its status."""
    if not first:
        yield None
        return
    folder = RunFolder(config.folder)
    try:
        _check_folder(folder, config, resume)
        yield folder
    except BaseException as error:
        known = None if isinstance(error, WhetError) else disk_error(error, "writing the run", folder.path)
        if isinstance(error, KeyboardInterrupt) and place.newest(folder.path / "checkpoints"):
            known = StoppedError("interrupted; the last checkpoint is good. Start it again to continue")
        elif isinstance(error, AskedToStop):
            known = StoppedError(STOPPED_EARLY)
        end = known or error
        code = end.exit_code if isinstance(end, WhetError) else FAILED
        code = INTERRUPTED if isinstance(end, KeyboardInterrupt) else code
        stays = isinstance(error, AskedToStop)
        with contextlib.suppress(OSError):
            state = "failed" if code in (INPUT, FAILED) else "stopped"
            folder.end(state, code, str(end) or type(end).__name__, begun=stays and folder.holds_run())
        folder.abandon(stays)
        raise end from None
    folder.close()


def _check_folder(folder: RunFolder, config: Config, resume: bool) -> None:
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


_MAY_CHANGE = (
    "run.name", "run.dir", "run.tags", "eval.", "checkpoint.", "export.", "track.", "profile.", "parallel.",
    "launch.",
    "train.micro_rows", "train.on_nonfinite", "train.on_spike", "model.attention", "model.compile",
)  # fmt: skip
"""What a resumed run may do otherwise without becoming another run."""


def _differences(before: Any, now: Any, above: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [d for key in keys for d in _differences(before.get(key), now.get(key), f"{above}{key}.")]
    same = before == now or f"{above}".startswith(_MAY_CHANGE)
    return [] if same else [(above.rstrip("."), before, now)]


def changed_settings(path: Path, config: Config) -> list[tuple[str, Any, Any]]:
    """(key, value then, value now) of what makes `config` another run than the one in the folder."""
    return _differences(read_yaml(path / "config.yaml").plain(), config.settled())


def begin(folder: RunFolder, config: Config, data: Data) -> None:
    """Write down, before anything is computed, all that is decided. config.yaml first: it makes the folder a run."""
    path = folder.path
    (path / "checkpoints").mkdir(exist_ok=True)
    if (path / "ledger.json").exists():
        _same_data(path, data)
    elif place.newest(path / "checkpoints"):
        raise WhetError(
            f"{path}/ledger.json is gone, so it cannot be known whether the data is still the same. Bring it back, or "
            "start a new run: run.dir=FOLDER"
        )
    atomic_write(path / "config.yaml", config.dump())
    write_json(path / "ledger.json", data.ledger())
    if not (path / "plan").exists():
        with atomic_dir(path / "plan") as temporary:
            make_plan(config, data).save(temporary)


def _same_data(path: Path, data: Data) -> None:
    """The plan names conversations by number: with other data it would mean other conversations."""
    then, now = read_json(path / "ledger.json")["stores"], data.stores()
    if {use: Path(store).name for use, store in then.items()} != {use: Path(store).name for use, store in now.items()}:
        raise WhetError(
            f"{path}: the data is not what it was when this run began (a file, the tokenizer or its template changed), "
            "so it cannot be resumed. Bring the old data back, or start a new run: run.dir=FOLDER"
        )


def frozen_date(path: Path) -> str | None:
    """The date that a run's chat template was rendered with, if the run exists and its template asks for one."""
    ledger = path / "ledger.json"
    return read_json(ledger)["today"] if ledger.exists() else None


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a run's files when it continues: their sizes at the checkpoint."""

    metrics: int | None = None
    samples: int | None = None
    measured: bool = False
    """The untrained model was measured before; that stays true."""


def go_on(
    config: Config, root: LossModel, optimizer: torch.optim.Optimizer, loss_scale: LossScale, ranks: Ranks
) -> tuple[int, Seen, Kept]:  # fmt: skip
    """Load the newest checkpoint that is whole, if there is one, and say where to go on."""
    path = config.folder
    manifest = _newest_whole(path / "checkpoints", root, optimizer, ranks)
    if manifest is None:
        first = config.train.start_step
        metrics, measured = _measured_part(path / "metrics.jsonl", first)
        samples, _ = _measured_part(path / "samples.jsonl", first) if measured else (0, False)
        return first, Seen(), Kept(metrics, samples, measured)
    require_base(config, manifest, ranks)
    step, state = manifest["step"], manifest["state"]
    loss_scale.restore(state["loss_scale"])
    say(f"continuing after step {step}")
    return step, Seen(**state["seen"]), Kept(state["metrics_bytes"], state["samples_bytes"], measured=True)


def _newest_whole(
    folder: Path, root: LossModel, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any] | None:
    """Load the newest checkpoint; where a file of it is damaged, say so and take the one before. Rank 0 looks for
    them, all decide the same."""
    there = ranks.gather(place.steps_in(folder) if ranks.is_first else [])
    steps = ranks.gather(place.resumable(folder) if ranks.is_first else [])
    if there and not steps:
        raise WhetError(
            f"{folder}: none of these checkpoints has the optimizer's state (checkpoint.optimizer: newest), so the run "
            f"cannot go on. Start a new one from its weights: model.path={folder.parent}"
        )
    while steps:
        step = steps.pop()
        try:
            return load(folder / place.name_of(step), root, optimizer, ranks)
        except DamagedError as error:
            if not steps:
                raise WhetError(
                    f"{error}. There is no other complete one to go back to: delete {folder} and --resume begins the "
                    "run anew"
                ) from None
            if ranks.is_first:
                away = place.set_aside(folder, step)
                warn(f"{error}. It is set aside as {away.name}; the run goes on from step {steps[-1]}")
            ranks.wait()
    return None


def _measured_part(path: Path, first: int) -> tuple[int, bool]:
    """The bytes of the lines about the untrained model at the start of a file: a restart need not measure it again."""
    size = 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or json.loads(line)["step"] != first:
                break
            size += len(line)
    return size, size > 0


def kept_metrics(path: Path, kept: Kept, ranks: Ranks) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that stay; rank 0 reads them, every rank knows them."""
    file = path / "metrics.jsonl"
    if not ranks.is_first or not file.exists():
        return ranks.gather([])
    return ranks.gather([json.loads(line) for line in file.read_bytes()[: kept.metrics].splitlines()])


class Files:
    """The growing files of a run."""

    def __init__(self, path: Path, kept: Kept) -> None:
        self.metrics = JsonLines(path / "metrics.jsonl", kept.metrics)
        self.samples = JsonLines(path / "samples.jsonl", kept.samples)
        self.events = JsonLines(path / "events.jsonl")
        self.step_ended()

    def step_ended(self) -> None:
        """Remember how long the files are after a step, before it is measured: a resumed run measures it again."""
        self.sizes = {"metrics_bytes": self.metrics.size(), "samples_bytes": self.samples.size()}

    def cut(self, kept: Kept) -> None:
        """Undo what was written since a checkpoint; events have happened all the same."""
        if kept.metrics is not None and kept.samples is not None:
            self.metrics.cut(kept.metrics)
            self.samples.cut(kept.samples)
        self.step_ended()

    def close(self) -> None:
        self.metrics.close()
        self.samples.close()
        self.events.close()
