"""Messages, warnings and progress bars on stderr; stdout is for results."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_console = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
_quiet = False
_LOG_INTERVAL_S = 20.0


def set_quiet() -> None:
    """Suppress messages from now on: --quiet, or a rank other than 0. Errors are still printed."""
    global _quiet
    _quiet = True


def info(*parts: Any, style: str | None = None, markup: bool = False) -> None:
    """Print a line or a rich renderable."""
    if not _quiet:
        _console.print(*parts, style=style, markup=markup)


def info_item(sign: str, title: str, text: str, style: str = "", always: bool = False) -> None:
    """Print a line with a sign and a title in `style`; terminals wrap it with an indent. `always`: despite --quiet."""
    if _quiet and not always:
        return
    line = Text.assemble((f"{title}: ", style), text)
    if not _console.is_terminal:
        _console.print(Text.assemble((f"{sign} ", style), line), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text(sign, style), line)
    _console.print(grid, soft_wrap=False)


def warn(text: str) -> None:
    """Print a warning."""
    if not _quiet:
        _console.print(f"warning: {text}", style="yellow", markup=False)


def print_error(text: str) -> None:
    """Print the error that a command ends with, despite --quiet."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="bold red", markup=False)


def print_json(value: dict[str, Any]) -> None:
    """Print the result of a command called with --json: one JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


class ProgressBar:
    """A progress bar followed by a note."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._began = self._logged = time.monotonic()
        self._at_start = progress.tasks[task].completed

    def advance(self, n: int = 1, note: str = "") -> None:
        self._progress.update(self._task, advance=n, note=note)
        if not _console.is_terminal and not _quiet and time.monotonic() - self._logged > _LOG_INTERVAL_S:
            self._logged = time.monotonic()
            task = self._progress.tasks[self._task]
            of = f"/{task.total:g}" if task.total else ""
            times = self._format_times(task.completed, task.total)
            _console.print(
                f"{task.description} {task.completed:g}{of} · {times}{f' · {note}' * bool(note)}", markup=False
            )

    def _format_times(self, done: float, total: float | None) -> str:
        """Time since the start of this process, and an estimate of the time left."""
        elapsed, advanced = self._logged - self._began, done - self._at_start
        left = f", {_format_duration(elapsed / advanced * (total - done))} left" if total and advanced else ""
        return f"{_format_duration(elapsed)}{left}"


def _format_duration(seconds: float) -> str:
    """As 0:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def progress(title: str, total: int | None, done: int = 0) -> Iterator[ProgressBar]:
    """A progress bar on a terminal, removed at the end; in a log file, a line every 20 seconds."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=_console, disable=_quiet, transient=_console.is_terminal) as display:
        yield ProgressBar(display, display.add_task(title, total=total, completed=done, note=""))


def silence_libraries() -> None:
    """Turn off progress bars, advice and deprecation warnings of transformers, torch, peft and bitsandbytes."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("torch.distributed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch|transformers|peft")
