"""The Search tab: the trials of `whet search`, of finished ones from search.json, of others from their journal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whet.checkpoint.directory import lower_is_better
from whet.core.display import mask_secrets
from whet.core.errors import WhetError, describe_error
from whet.core.files import read_json
from whet.core.yaml import read_yaml
from whet.dash.runs_folder import NotFoundError, RunsFolder
from whet.report.run_view import as_dict, as_list

_RECIPE, _RESULT, _JOURNAL = "search.yaml", "search.json", "journal.log"
_MAX_DEPTH = 3


def find_searches(folders: RunsFolder) -> list[str]:
    """The searches below the folder of runs, by their path in it."""
    return [str(folder.relative_to(folders.root)) for folder in _below(folders.root, _MAX_DEPTH)]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in names:
        if name.startswith("."):
            continue
        if (folder / name / _RECIPE).is_file():
            yield folder / name
        elif depth > 1 and not (folder / name / "config.yaml").exists():
            yield from _below(folder / name, depth - 1)


def describe_search(folders: RunsFolder, name: str) -> dict[str, Any]:
    """Trials with their values and what they reached at each rung, the best one, and which parameters matter."""
    if name not in find_searches(folders):
        raise NotFoundError(f"{name[:200]!r}: no such search in {folders.root}")
    folder = folders.root / name
    for file in (_RECIPE, _RESULT, _JOURNAL, "best.yaml"):
        folders.require_inside(folder / file)
    recipe = as_dict(read_yaml(folder / _RECIPE, expand="none").plain())
    settings = as_dict(recipe.get("search"))
    metric = settings.get("metric") or as_dict(recipe.get("eval")).get("best") or "val_loss"
    is_high = as_dict(recipe.get("script")).get("greater_is_better")
    is_low = lower_is_better(str(metric)) if is_high is None else not is_high
    found = as_dict(read_json(folder / _RESULT)) if (folder / _RESULT).is_file() else {}
    trials = as_list(found.get("trials")) if found else _running_trials(folder)
    best = folder / "best.yaml"
    return {
        "name": name, "metric": str(found.get("metric") or metric), "unit": found.get("unit"),
        "method": found.get("method") or settings.get("method"), "lower_is_better": is_low,
        "finished": bool(found), "importance": as_dict(found.get("importance")), "best": as_dict(found.get("best")),
        "trials": [_trial_json(folders, each) for each in trials if isinstance(each, dict)],
        "recipe": mask_secrets(best.read_text(errors="replace")) if best.is_file() else None,
    }  # fmt: skip


def _running_trials(folder: Path) -> list[dict[str, Any]]:
    if not (folder / _JOURNAL).is_file():
        return []
    try:
        from whet.search.results import read_trials  # imports optuna, which is an extra

        return [asdict(trial) for trial in read_trials(folder)]
    except ImportError:
        raise WhetError("a search that still runs needs optuna: pip install 'whet[search]'") from None
    except Exception as error:  # of a journal that is damaged, or whose last line is being written
        raise WhetError(f"{folder / _JOURNAL}: cannot be read now ({describe_error(error)})") from None


def _trial_json(folders: RunsFolder, trial: dict[str, Any]) -> dict[str, Any]:
    """With the name of its run in the folder, if the page can show it."""
    run = Path(str(trial.get("folder", "")))
    name = str(run.relative_to(folders.root)) if run.is_relative_to(folders.root) else None
    error = mask_secrets(str(trial["error"]))[:500] if trial.get("error") else None
    return {**trial, "run": name, "folder": None, "error": error}
