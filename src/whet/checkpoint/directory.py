"""The checkpoints/ directory of a run: naming, listing, `latest` and `best`, deletion."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from whet.checkpoint.manifest import MANIFEST_NAME, DamagedCheckpointError, read_manifest, write_manifest
from whet.checkpoint.retention import Retention
from whet.core.errors import WhetError
from whet.core.files import atomic_write, fsync_folder, require_disk_space
from whet.core.retry import UnreadableError

# The folder of a run's checkpoints: which are complete, which go.
#
# checkpoints/step-000100/   model/, optimizer/ (*.distcp, .metadata), manifest.json (last: present means complete)
# checkpoints/latest, best   text files with the name of one
# Names that begin with a dot are on their way in or out; a start clears them away.


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def list_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    names = (manifest.parent.name.removeprefix("step-") for manifest in folder.glob(f"step-*/{MANIFEST_NAME}"))
    return sorted(int(name) for name in names if name.isdecimal())


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    steps = list_steps(folder)
    return folder / checkpoint_name(steps[-1]) if steps else None


def resumable_steps(folder: Path) -> list[int]:
    """Those of them that still have the optimizer's state, oldest first. What a manifest that cannot be read, or is
    damaged, comes to is found out later."""
    return [step for step in list_steps(folder) if _has_optimizer(folder / checkpoint_name(step))]


def _has_optimizer(path: Path) -> bool:
    try:
        return "optimizer" in read_manifest(path)["parts"]
    except (DamagedCheckpointError, UnreadableError):
        return True


def resolve_step(folder: Path, which: str) -> int:
    """The step that `which` (a number, latest, best) means, or an error that lists what there is."""
    run, known = folder.parent, list_steps(folder)
    if not known:
        raise WhetError(f"{run}: this run has no checkpoint yet")
    if which == "latest":
        return known[-1]
    if which == "best":
        return _best_step(folder, known)
    if not which.isdecimal() or int(which) not in known:
        has_best = ", best" if (folder / "best").exists() else ""
        raise WhetError(f"{run}@{which}: no such checkpoint; there are: {', '.join(map(str, known))}, latest{has_best}")
    return int(which)


def _best_step(folder: Path, known: list[int]) -> int:
    file = folder / "best"
    name = file.read_text().strip() if file.exists() else ""
    step = name.removeprefix("step-")
    if not step.isdecimal() or int(step) not in known:
        raise WhetError(
            f"{folder.parent}@best: none of its checkpoints was measured (eval.every, checkpoint.keep_best). There "
            f"are: {', '.join(map(str, known))}, latest"
        )
    return int(step)


def mark_best(folder: Path, step: int) -> None:
    """Let `best` say this step."""
    file, name = folder / "best", f"{checkpoint_name(step)}\n"
    if not file.exists() or file.read_text() != name:
        atomic_write(file, name)


def delete_checkpoints(folder: Path, steps: Iterable[int]) -> None:
    """At once for whoever looks: a checkpoint is complete or gone."""
    for step in steps:
        going = folder / f".{checkpoint_name(step)}.deleting"
        shutil.rmtree(going, ignore_errors=True)
        (folder / checkpoint_name(step)).rename(going)
        shutil.rmtree(going, ignore_errors=True)


def drop_optimizer_state(folder: Path, steps: Iterable[int]) -> None:
    """Make these checkpoints weights alone: good to start from and to export, not to resume."""
    for step in steps:
        path = folder / checkpoint_name(step)
        try:
            manifest = read_manifest(path)
        except (DamagedCheckpointError, UnreadableError):
            continue
        if "optimizer" in manifest["parts"]:
            manifest["parts"].remove("optimizer")
            files = {name: file for name, file in manifest["files"].items() if not name.startswith("optimizer/")}
            content = {**manifest, "files": files}
            del content["hash"]
            write_manifest(path, content)
        shutil.rmtree(path / "optimizer", ignore_errors=True)  # after the manifest: it never names what is gone


def quarantine(folder: Path, step: int) -> Path:
    """Take a damaged checkpoint out of the way, where a person can still look at it."""
    away = folder / f"damaged-{checkpoint_name(step)}"
    shutil.rmtree(away, ignore_errors=True)
    (folder / checkpoint_name(step)).rename(away)
    kept = newest_checkpoint(folder)
    if kept is not None:
        atomic_write(folder / "latest", kept.name + "\n")
    fsync_folder(folder)
    return away


def remove_incomplete(folder: Path) -> None:
    """What a killed process was writing or deleting."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def require_checkpoint_space(
    folder: Path, weights: int, optimizer: int, retention: Retention, steps: int, all_optimizers: bool, export: int
) -> None:
    """Refuse before the first step when the disk cannot hold a run's checkpoints and its export.

    `weights`, `optimizer`: the bytes of the trained weights and of the optimizer's state. While a new checkpoint is
    written, the oldest is still there.
    """
    kept = retention.max_kept(steps) + 1
    states = kept if all_optimizers else min(kept, 3)
    require_disk_space(
        folder, weights * kept + optimizer * states + export + 2**20, "this run's checkpoints and export"
    )
