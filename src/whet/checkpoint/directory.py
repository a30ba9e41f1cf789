"""The checkpoints/ directory of a run: naming, listing, `latest` and `best`, retention, deletion, the manifest.

step-000100/    model/ and optimizer/ (*.distcp, .metadata) and manifest.json; the manifest is written last
latest, best    text files with the name of a checkpoint; `best` also has a checksum of it
.step-*         being written or deleted; the next start removes them
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.core.files import (
    UnreadableError,
    atomic_write,
    delete_path,
    fsync_folder,
    hash_bytes,
    hash_json,
    put_back,
    read_json,
    read_with_retries,
    require_disk_space,
    write_json,
)

# Which checkpoints to keep: the newest, the best, every n-th. Pure functions of step numbers.


@dataclass(frozen=True, slots=True)
class Retention:
    """A checkpoint is kept if any of these rules keeps it."""

    last: int = 1
    """Number of newest to keep; at least one, so that the run can be resumed."""
    best: int = 0
    """Number of those with the best score to keep."""
    every: int | None = None
    """Keep steps that are a multiple of this, counted from `offset`."""
    offset: int = 0
    """train.step_offset."""

    def steps_to_keep(
        self, steps: Iterable[int], scores: Mapping[int, float], lower_is_better: bool = True
    ) -> set[int]:
        """The subset of `steps` to keep. Of equal scores, the earlier step is the better one."""
        known = sorted(set(steps))
        newest = known[-max(1, self.last) :]
        ranked = rank_by_score(known, scores, lower_is_better)
        periodic = [step for step in known if self.every and (step - self.offset) % self.every == 0]
        return {*newest, *ranked[: self.best], *periodic}

    def max_kept(self, steps: int) -> int:
        """The most checkpoints that a run of this many steps keeps at a time."""
        return min(steps, self.last + self.best + (steps // self.every if self.every else 0))


def rank_by_score(steps: Iterable[int], scores: Mapping[int, float], lower_is_better: bool = True) -> list[int]:
    """The steps that have a score, best first."""
    scored = sorted(step for step in steps if step in scores)
    return sorted(scored, key=lambda step: scores[step] if lower_is_better else -scores[step])


def lower_is_better(metric: str) -> bool:
    """True for losses and bits per byte, False for accuracies, task scores and metrics of the user's own."""
    return not (metric.startswith(("task/", "metric/")) or "accuracy" in metric)


# The files.


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def list_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    names = (manifest.parent.name.removeprefix("step-") for manifest in folder.glob(f"step-*/{MANIFEST_NAME}"))
    return sorted(int(name) for name in names if name.isdecimal())


def newest_checkpoint(folder: Path) -> Path | None:
    """The path of the newest complete checkpoint."""
    steps = list_steps(folder)
    return folder / checkpoint_name(steps[-1]) if steps else None


def resumable_steps(folder: Path) -> list[int]:
    """The steps of complete checkpoints with optimizer state, oldest first. Those with a damaged or unreadable manifest
    are included: loading them raises the error."""
    return [step for step in list_steps(folder) if _has_optimizer(folder / checkpoint_name(step))]


def _has_optimizer(path: Path) -> bool:
    try:
        return "optimizer" in read_manifest(path)["parts"]
    except (DamagedCheckpointError, UnreadableError):
        return True


def resolve_step(folder: Path, which: str) -> int:
    """The step of `which` (a number, `latest` or `best`), or an error that lists the existing checkpoints."""
    run, known = folder.parent, list_steps(folder)
    if not known:
        raise WhetError(f"{run}: no checkpoint has been saved yet")
    if which == "latest":
        return known[-1]
    if which == "best":
        return _best_step(folder, known)
    if not which.isdecimal() or int(which) not in known:
        has_best = ", best" if (folder / "best").exists() else ""
        raise WhetError(f"{run}@{which}: no such checkpoint. Use one of {', '.join(map(str, known))}, latest{has_best}")
    return int(which)


def _best_step(folder: Path, known: list[int]) -> int:
    file, others = folder / "best", f"Use one of {', '.join(map(str, known))}, latest"
    if not file.exists():
        raise WhetError(
            f"{folder.parent}@best: none of its checkpoints was evaluated (eval.every, checkpoint.keep_best). {others}"
        )
    content = file.read_bytes() if file.is_file() else b""
    for step in known:  # earlier versions wrote no checksum
        if content in (_best_content(step), f"{checkpoint_name(step)}\n".encode()):
            return step
    raise WhetError(f"{file}: damaged: it does not name a checkpoint of this run. {others}; --resume writes it again")


def mark_latest(folder: Path) -> None:
    """Point `latest` to the newest complete checkpoint, if there is one."""
    newest = newest_checkpoint(folder)
    if newest is not None:
        _write_pointer(folder / "latest", f"{newest.name}\n".encode())


def mark_best(folder: Path, step: int) -> None:
    """Point `best` to this step."""
    _write_pointer(folder / "best", _best_content(step))


def _best_content(step: int) -> bytes:
    """The name, and a checksum: one flipped bit can make the name of another checkpoint out of it."""
    name = checkpoint_name(step)
    return f"{name}\n{hash_bytes(name.encode())[:8]}\n".encode()


def _write_pointer(file: Path, content: bytes) -> None:
    if not file.is_file() or file.read_bytes() != content:
        atomic_write(file, content)


def delete_checkpoints(folder: Path, steps: Iterable[int]) -> None:
    """Delete checkpoints atomically: renamed first, so that a reader sees a complete one or none."""
    for step in steps:
        doomed = folder / f".{checkpoint_name(step)}.deleting"
        shutil.rmtree(doomed, ignore_errors=True)
        (folder / checkpoint_name(step)).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def drop_optimizer_state(folder: Path, steps: Iterable[int]) -> None:
    """Delete the optimizer state of these checkpoints: they can still be exported and loaded, but not resumed."""
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
        shutil.rmtree(path / "optimizer", ignore_errors=True)  # after the manifest, which never lists missing files


def quarantine(folder: Path, step: int) -> Path:
    """Rename a damaged checkpoint to damaged-step-…, out of the way but still there to be examined."""
    away = folder / f"damaged-{checkpoint_name(step)}"
    shutil.rmtree(away, ignore_errors=True)
    (folder / checkpoint_name(step)).rename(away)
    mark_latest(folder)
    fsync_folder(folder)
    return away


def repair(folder: Path) -> None:
    """After a kill: delete what was being written or deleted, and point `latest` to the newest checkpoint."""
    for old in folder.glob(".step-*.old-*"):
        put_back(folder / old.name.split(".")[1])
    for leftover in folder.glob(".step-*"):
        delete_path(leftover)
    mark_latest(folder)


def require_checkpoint_space(
    folder: Path, weights: int, optimizer: int, retention: Retention, steps: int, optimizers: str, export: int
) -> None:
    """Raise before the first step if the disk cannot hold the run's checkpoints and its export.

    `weights`, `optimizer` and `export` are bytes; `optimizers`: checkpoint.optimizer. One checkpoint more than
    retention keeps exists while it is written.
    """
    kept = retention.max_kept(steps) + 1
    states = {"all": kept, "newest": min(kept, 3), "none": 0}[optimizers]
    require_disk_space(
        folder, weights * kept + optimizer * states + export + 2**20, "this run's checkpoints and export"
    )


# manifest.json: what a checkpoint contains, and the SHA-256 of every file. It is written last: a checkpoint with a
# manifest is complete.

MANIFEST_NAME = "manifest.json"
_FORMAT_VERSION = 1


class DamagedCheckpointError(WhetError):
    """A file of a checkpoint is missing or was altered."""


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write `content`, which has `step` and `files`, with a hash of itself: its values steer a resumed run."""
    body = {"format": _FORMAT_VERSION, **content}
    write_json(folder / MANIFEST_NAME, {**body, "hash": hash_json(body)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises DamagedCheckpointError if it was altered, and UnreadableError if the disk fails."""
    file = folder / MANIFEST_NAME
    try:
        found = read_with_retries(lambda: read_json(file), file)
        if not isinstance(found, dict) or hash_json({k: v for k, v in found.items() if k != "hash"}) != found["hash"]:
            raise WhetError(f"{file}: altered after it was written (hash mismatch)")
    except UnreadableError:
        raise
    except (WhetError, KeyError) as error:
        reason = str(error) if isinstance(error, WhetError) else f"{file}: the key `hash` is missing"
        raise DamagedCheckpointError(f"{reason}. {_REMEDY}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{file}: cannot be read: {error.strerror}. {_REMEDY}") from None
    if found["format"] != _FORMAT_VERSION:
        raise WhetError(
            f"{file}: checkpoint format {found['format']}, but this version of whet reads format {_FORMAT_VERSION}. "
            "Use the version that wrote it (`versions` in the manifest)"
        )
    if not _is_wellformed(found):
        raise DamagedCheckpointError(f"{file}: not the manifest of a checkpoint. {_REMEDY}")
    return found


def _is_wellformed(manifest: dict[str, Any]) -> bool:
    """Whether the keys that locate and verify files have the right types, and the files are in the checkpoint."""
    parts, files = manifest.get("parts"), manifest.get("files")
    return (
        isinstance(manifest.get("step"), int)
        and isinstance(parts, list)
        and isinstance(files, dict)
        and all(isinstance(record, dict) and isinstance(record.get("bytes"), int) for record in files.values())
        and all(isinstance(record.get("hash"), str) and "block" not in record for record in files.values())
        and not any(Path(name).is_absolute() or ".." in Path(name).parts for name in files)
    )


def damaged_error(message: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{message}. {_REMEDY}")


_REMEDY = "The checkpoint is damaged; use another one (RUN@STEP)"
