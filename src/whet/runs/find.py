"""Run folders: which there are, and which one a user means."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import user_path
from whet.core.run_folder import read_owner

RUNS_FOLDER = Path("runs")
"""Where runs are by default, in the current folder."""
_MAX_DEPTH = 4
_FILES_OF_RUNS = {"config.yaml", "status.json"}
_SLURM_JOBS = Path("slurm") / "jobs.jsonl"


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, or the beginning of one: a Slurm job that waits, a process that prepares data."""
    try:
        names = set(os.listdir(folder))  # noqa: PTH208 - for each of a thousand folders
    except OSError:
        return False
    if not names.isdisjoint(_FILES_OF_RUNS):
        return True
    return read_owner(folder) is not None or ("slurm" in names and (folder / _SLURM_JOBS).exists())


def find_runs(root: Path) -> list[Path]:
    """The run folders in `root`, also in folders that group them; `root` itself, if it is one. Hidden ones are being
    written or deleted."""
    if not root.is_dir():
        raise WhetError(
            f"{root}: no such folder (in {Path.cwd()}). Give the folder that holds your runs, such as `whet runs list "
            "/shared/runs`; `whet train CONFIG` creates runs/NAME"
        )
    if (root / "config.yaml").exists():
        return [root]
    return list(_runs_below(root, _MAX_DEPTH))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
    except OSError:
        return
    for name in found:
        if is_run(folder / name):
            yield folder / name
        elif depth > 1 and not (folder / name).is_symlink():  # a link may lead back
            yield from _runs_below(folder / name, depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link that leads to itself
        return False


def resolve_run(reference: str) -> Path:
    """The folder of a run, given by its path, its name in runs/, or the beginning of its name."""
    path = user_path(reference)
    if path.is_dir():
        if is_run(path):
            return path
        if path.parent != Path() or not (RUNS_FOLDER / reference).is_dir():
            raise WhetError(
                f"{reference}: not a run: it has neither config.yaml nor status.json. Give the folder of a run, such "
                f"as runs/NAME{_suggest_inside(path)}"
            )
    names = _known_names()
    exact = [folder for name, folder in names if reference in (name, folder.name)]
    found = exact or [folder for name, folder in names if name.startswith(reference) and reference]
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        shown = ", ".join(str(folder) for folder in found[:5]) + (" …" if len(found) > 5 else "")
        raise WhetError(
            f"{reference}: {len(found)} runs have a name that begins with this ({shown}). Give more of the name, or a "
            "path"
        )
    close = difflib.get_close_matches(path.name, [name for name, _ in names], n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else "`whet runs` lists those in runs/; others by their path"
    raise WhetError(f"{reference}: no such run (in {Path.cwd()}). {hint}")


def _known_names() -> list[tuple[str, Path]]:
    """(name, folder) of the runs in runs/; one in a folder that groups some has that in its name, too."""
    if not RUNS_FOLDER.is_dir():
        return []
    found = find_runs(RUNS_FOLDER)
    return [(str(folder.relative_to(RUNS_FOLDER)), folder) for folder in found if folder != RUNS_FOLDER]


def _suggest_inside(folder: Path) -> str:
    inside = [str(run) for run in _runs_below(folder, 1)]
    return f". It holds {', '.join(inside[:3])}{' …' if len(inside) > 3 else ''}" if inside else ""
