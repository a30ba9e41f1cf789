"""Runs side by side, by `whet runs compare`."""

from __future__ import annotations

from typing import Any

from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.run_folder import parse_run_reference
from whet.dash.runs_folder import RunsFolder
from whet.report.run_view import RunView
from whet.runs.compare import ComparedRun, compare_runs
from whet.runs.compare_text import format_difference

MAX_RUNS = 12


def compare(folders: RunsFolder, references: list[str]) -> dict[str, Any]:
    """Settings that differ, final metrics, and paired differences from the first run. NAME@best and NAME@STEP work."""
    if not 2 <= len(references) <= MAX_RUNS:
        raise WhetError(f"compare needs 2 to {MAX_RUNS} runs, not {len(references)}")
    runs = [_compared(folders, reference) for reference in references]
    result = compare_runs(runs)
    settings = {key: [_masked(value) for value in values] for key, values in result["settings"].items()}
    sentences = [mask_secrets(format_difference(found)) for found in result["paired"]]
    return {**result, "settings": settings, "sentences": sentences}


def _compared(folders: RunsFolder, reference: str) -> ComparedRun:
    path, which = parse_run_reference(reference) if "@" in reference else (reference, "latest")
    name = str(path)
    folder = folders.find(name)
    return ComparedRun(reference, RunView.read(folder), folders.summary(name).state.name, which)


def _masked(value: Any) -> Any:
    return mask_secrets(value) if isinstance(value, str) else value
