"""The folder of runs that the page shows. A request names a run; no name and no link leads out of the folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import resolve_path
from whet.runs.find import find_runs, is_run
from whet.runs.summary import RunSummary, summarize_run_folder, summarize_run_folders

_MAX_NAME = 1000
_FOLDERS_SHOWN = ("", "logs", "evals", "exports", "exports/*", "slurm", "plan", "faults", "checkpoints")
"""Where the page reads files of a run."""


class NotFoundError(WhetError):
    """The page requests something that does not exist, or that it may not see."""


class RunsFolder:
    """The runs below a folder, by their path in it."""

    def __init__(self, root: Path) -> None:
        self.root = resolve_path(root)

    def names(self) -> list[str]:
        """All runs; without those behind a link that leads out."""
        return [str(folder.relative_to(self.root)) for folder in self._folders()]

    def summaries(self, seconds: float | None = None) -> list[RunSummary]:
        """A summary of each run, in about so many seconds: `best` may be missing then."""
        return summarize_run_folders(self._folders(), self.root, seconds)

    def _folders(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return [folder for folder in find_runs(self.root) if self.contains(folder)]

    def contains(self, path: Path) -> bool:
        """Whether a path, with its links followed, is in the folder."""
        return resolve_path(path).is_relative_to(self.root)

    def find(self, name: str) -> Path:
        """The folder of a run. What the page reads in it is inside the folder of runs, too: a link that leads out is
        refused, wherever it comes from."""
        folder = self.root / name
        parts = Path(name).parts
        is_plain = bool(parts) and not any(part == ".." or part.startswith((".", "/")) for part in parts)
        if name == "." and is_run(self.root):
            folder, is_plain = self.root, True
        if not is_plain or len(name) > _MAX_NAME or "\0" in name or not self.contains(folder) or not is_run(folder):
            raise NotFoundError(f"{name[:200]!r}: no such run in {self.root}")
        self._require_links_inside(folder)
        return folder

    def _require_links_inside(self, folder: Path) -> None:
        for pattern in _FOLDERS_SHOWN:
            for place in folder.glob(pattern) if pattern else (folder,):
                with contextlib.suppress(NotADirectoryError, FileNotFoundError), os.scandir(place) as entries:
                    for link in (entry for entry in entries if entry.is_symlink()):
                        self.require_inside(Path(link.path))

    def require_inside(self, path: Path) -> Path:
        """Refuse a file or folder that is a link to somewhere else."""
        if os.path.lexists(path) and not self.contains(path):
            raise NotFoundError(
                f"{path}: leads out of {self.root}, which `whet dash` does not show. Put the file itself there"
            )
        return path

    def summary(self, name: str) -> RunSummary:
        """The summary of one run."""
        return summarize_run_folder(self.find(name))
