"""`whet report`: of one run, or of several compared; as HTML or Markdown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.core.console import warn
from whet.core.costs import counted_costs
from whet.core.display import escape_controls, mask_secrets
from whet.core.errors import UsageError
from whet.core.files import require_file_place, resolve_path, write_named_file
from whet.report.blocks import Cell, Figure, ReportSection, Table
from whet.report.charts import ChartLine
from whet.report.formatting import DASH, format_count, format_number, format_seconds, format_share
from whet.report.html_report import render_html
from whet.report.markdown_report import render_markdown
from whet.report.run_view import RunView
from whet.report.sections import run_sections, smoothed
from whet.report.terminal_report import summarize_run

_KINDS = {".html": "html", ".md": "md"}
_MAX_DIFFERENCES = 40
_NOT_COMPARED = ("run.name", "run.dir", "run.notify", "launch.")


def write_report(folder: str | Path, to: str = "html") -> Path:
    """Write the report of a run; see `write_reports`."""
    return write_reports([Path(folder)], to)


def write_reports(folders: Sequence[Path], to: str = "html") -> Path:
    """Write one report of all these runs and return its path.

    `to`: `html` or `md`, into the run's folder or, of several, into the folder that holds them; or the name of a file
    with that ending.
    """
    runs = [RunView.read(folder) for folder in folders]
    for run in runs:
        for text in run.damage:
            warn(f"{run.folder}/{text}")
    path = report_path([run.folder for run in runs], to)
    render = render_markdown if path.suffix == ".md" else render_html
    if len(runs) == 1:
        run = runs[0]
        text = render(run.name, run.status.state, summarize_run(run), run_sections(run), run.folder)
    else:
        names = _distinct_names(runs)
        sections, folder = comparison_sections(runs, names), _common_folder(folders)
        text = render(f"{len(runs)} runs", "compared", ", ".join(names), sections, folder)
    write_named_file("--to", path, text.encode("utf-8", "replace"))  # JSON can name surrogates
    return path


def report_path(folders: Sequence[Path], to: str) -> Path:
    """Where the report goes."""
    if to in _KINDS.values():
        folder = folders[0] if len(folders) == 1 else _common_folder(folders)
        return folder / f"report.{to}"
    path = Path(to)
    if path.suffix not in _KINDS:
        raise UsageError(f"--to {to}: give html, md, or the name of a file that ends with .html or .md")
    require_file_place("--to", path)
    return path


def _common_folder(folders: Sequence[Path]) -> Path:
    parents = [resolve_path(folder).parent for folder in folders]
    return Path(os.path.commonpath(parents))


def _distinct_names(runs: Sequence[RunView]) -> list[str]:
    """The names of the runs; with their folders where two have the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)]


def comparison_sections(runs: Sequence[RunView], names: Sequence[str]) -> list[ReportSection]:
    """The runs beside each other, then each by itself."""
    kinds = ("main", "second", "third", "fourth", "fifth", "sixth")
    lines = [
        ChartLine(escape_controls(mask_secrets(name)), smoothed(run.series("loss")), kinds[number % len(kinds)])
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    parts = [
        ReportSection("Runs", [Table(*_overview(runs, names))]),
        ReportSection("Training", [Figure("loss by step", lines)]),
    ]
    differences = _config_differences(runs)
    if differences:
        shown, left = differences[:_MAX_DIFFERENCES], len(differences) - _MAX_DIFFERENCES
        note = f"{left} more settings differ." if left > 0 else None
        parts.append(ReportSection("Settings that differ", [Table(("setting", *names), shown)], note))
    for run, name in zip(runs, names, strict=True):
        parts.append(ReportSection(f"{name}: the run", [], summarize_run(run)))
        parts += [
            part if part.title is None else replace(part, title=f"{name}: {part.title}") for part in run_sections(run)
        ]
    return parts


def _overview(runs: Sequence[RunView], names: Sequence[str]) -> tuple[tuple[str, ...], list[list[Cell]]]:
    tasks = list(dict.fromkeys(task for run in runs for task in run.scores))
    head = ("run", "state", "steps", "loss", "validation loss", *tasks, "tokens", "training time", "used")
    rows: list[list[Cell]] = []
    for run, name in zip(runs, names, strict=True):
        scores = {score.task: score for score in run.task_scores}
        before, after = run.validation.get("val_loss", (None, None))
        costs = counted_costs(run.folder)
        rows.append(
            [
                name, run.status.state, format_count(run.step),
                format_number(run.losses[-1][1] if run.losses else None), _change(before, after, format_number),
                *(_change(s.before, s.after, format_share) if (s := scores.get(task)) else DASH for task in tasks),
                format_count(run.tokens), format_seconds(run.train_seconds), None if costs is None else str(costs),
            ]
        )  # fmt: skip
    return head, rows


def _change(before: float | None, after: float | None, show: Any) -> str:
    return f"{show(before)} → {show(after)}"


def _config_differences(runs: Sequence[RunView]) -> list[tuple[Cell, ...]]:
    """(setting, value of each run) of settings that are not the same in all."""
    flat = [dict(_leaves(run.config)) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each if not key.startswith(_NOT_COMPARED))
    rows: list[tuple[Cell, ...]] = []
    for key in keys:
        values = [each.get(key) for each in flat]
        if any(value != values[0] for value in values):
            rows.append((key, *(None if value is None else mask_secrets(str(value)) for value in values)))
    return rows


def _leaves(tree: Any, above: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict | list) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for key, value in items for leaf in _leaves(value, f"{above}{key}.")]
    return [(above.rstrip("."), tree)]
