"""Messages, warnings and progress bars on stderr; stdout is for results.

Everything that whet shows goes through here: control characters of data, answers and file names are shown escaped, and
secrets are masked in messages.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from whet.core.display import escape_controls, escape_json_controls, mask_secrets
from whet.core.errors import ExitCode, WhetError


class SafeConsole(Console):
    """A console that interprets nothing in the text it prints: no markup, no emoji codes, no control characters.

    Escape a text before it becomes a cell of a table, so that the width is right; `render` catches what was forgotten.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"soft_wrap": True, "highlight": False, "markup": False, "emoji": False, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does; rich itself would delete carriage returns and some other control characters."""
        super().print(*(escape_controls(each) if isinstance(each, str) else each for each in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable; those with control codes come from rich, such as cursor movements."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)


class _Stderr:
    """sys.stderr as long as its terminal or pipe exists. After a hangup or `| head`, what follows goes to /dev/null and
    the command goes on: a run must not fail because nobody reads its messages."""

    rich_proxied_file = property(lambda self: self)  # rich would write to what is behind this

    @property
    def _stream(self) -> Any:
        """sys.stderr itself, which rich replaces while it shows a progress bar."""
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError:
            self._detach()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._detach()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _detach(self) -> None:
        _detach(self._stream)


def _detach(stream: Any) -> None:
    """Send what else is written to a stream to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


_stderr: Any = _Stderr()
_console = SafeConsole(file=_stderr, stderr=True, soft_wrap=not sys.stderr.isatty())
_quiet = False
_log: SafeConsole | None = None
_start: Status | None = None
_LOG_INTERVAL_S = 20.0


def show_start() -> None:
    """Show on a terminal that the command has begun, until it prints its first line: imports take seconds."""
    global _start
    if live_console() is not None:
        _start = _console.status("starting")
        _start.start()


def end_start() -> None:
    """Before something else is shown."""
    global _start
    if _start is not None:
        shown, _start = _start, None
        shown.stop()


def set_quiet() -> None:
    """Suppress messages from now on: --quiet, or a rank other than 0. Errors are still printed."""
    global _quiet
    _quiet = True


def open_log(file: Path) -> None:
    """Append every message to this file too, with its time, whatever --quiet says, until `close_log`."""
    global _log
    close_log()
    with contextlib.suppress(OSError):  # a run does not depend on its log
        file.parent.mkdir(parents=True, exist_ok=True)
        _log = SafeConsole(file=file.open("a", buffering=1, encoding="utf-8", errors="replace"), width=120)


def close_log() -> None:
    global _log
    if _log is not None:
        with contextlib.suppress(OSError):
            _log.file.close()
    _log = None


def _write_log(*parts: Any) -> None:
    if _log is not None:
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):
            _log.print(moment, *parts)


def info(*parts: Any, style: str | None = None) -> None:
    """Print a line or a rich renderable."""
    end_start()
    masked = [mask_secrets(part) if isinstance(part, str) else part for part in parts]
    _write_log(*masked)
    if not _quiet:
        _console.print(*masked, style=style)


def info_item(sign: str, title: str, text: str, style: str = "", always: bool = False) -> None:
    """Print a line with a sign and a title in `style`; terminals wrap it with an indent. `always`: despite --quiet."""
    end_start()
    _write_log(f"{sign} {title}: {mask_secrets(text)}")
    if _quiet and not always:
        return
    line = Text.assemble((f"{title}: ", style), escape_controls(mask_secrets(text)))
    if not _console.is_terminal:
        _console.print(Text.assemble((f"{sign} ", style), line), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text(sign, style), line)
    _console.print(grid, soft_wrap=False)


def warn(text: str) -> None:
    """Print a warning."""
    end_start()
    line = f"warning: {mask_secrets(text)}"
    _write_log(line)
    if not _quiet:
        _console.print(line, style="yellow")


def print_error(text: str) -> None:
    """Print the error that a command ends with, despite --quiet."""
    end_start()
    line = mask_secrets(text)
    _write_log(line)
    SafeConsole(file=_stderr, stderr=True).print(line, style="bold red")


def print_traceback() -> None:
    """Print the traceback of the exception being handled, despite --quiet."""
    end_start()
    text = mask_secrets(traceback.format_exc())
    _write_log(text)
    SafeConsole(file=_stderr, stderr=True).print(text)


def result_console() -> SafeConsole:
    """A console on stdout, for results in colour."""
    end_start()
    return SafeConsole()


def _write_result(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _detach(sys.stdout)  # what is buffered would fail again at the exit
        if isinstance(error, BrokenPipeError):  # `| head` has read enough
            sys.exit(ExitCode.INPUT)
        raise WhetError(f"the result cannot be written to stdout: {error.strerror}. Send it elsewhere") from None


def print_result(text: str, end: str = "\n") -> None:
    """Print a result, such as the answer of a model, to stdout. Secrets in it are not masked."""
    end_start()
    _write_result(escape_controls(text) + end)


def print_json(value: dict[str, Any]) -> None:
    """Print the result of a command called with --json: one JSON object on one line of stdout."""
    end_start()
    _write_result(escape_json_controls(json.dumps(value, ensure_ascii=False, allow_nan=False)) + "\n")


class ProgressBar:
    """A progress bar followed by a note."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._began = self._logged = time.monotonic()
        self._at_start = progress.tasks[task].completed

    def advance(self, n: int = 1, note: str = "") -> None:
        self._progress.update(self._task, advance=n, note=escape_controls(note))
        if time.monotonic() - self._logged > _LOG_INTERVAL_S:
            self._logged = time.monotonic()
            task = self._progress.tasks[self._task]
            of = f"/{task.total:g}" if task.total else ""
            times = self._format_times(task.completed, task.total)
            line = f"{task.description} {task.completed:g}{of} · {times}{f' · {note}' * bool(note)}"
            _write_log(line)
            if live_console() is None and not _quiet:
                _console.print(line)

    def track(self, parts: Iterable[Any]) -> Iterator[Any]:
        """The parts, counted as they are taken."""
        known = list(parts)
        self._progress.update(self._task, total=len(known))
        for part in known:
            yield part
            self.advance()

    def finish(self) -> None:
        """All is done: the total, if it was an estimate, is what was done."""
        task = self._progress.tasks[self._task]
        self._progress.update(self._task, total=task.completed)

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


def live_console() -> Console | None:
    """The console, if it is a terminal that can show something live; None in a log, and with --quiet."""
    end_start()
    return _console if _console.is_terminal and not _console.is_dumb_terminal and not _quiet else None


@contextmanager
def progress(title: str, total: int | None, done: int = 0, ends_with_line: bool = True) -> Iterator[ProgressBar]:
    """A progress bar on a terminal, removed at the end; in a log file, a line every 20 seconds and, with
    `ends_with_line`, one at the end."""
    end_start()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[note]}", markup=False),
    )
    is_off = _quiet or not (ends_with_line or _console.is_terminal)
    with Progress(*columns, console=_console, disable=is_off, transient=_console.is_terminal) as display:
        task = display.add_task(escape_controls(mask_secrets(title)), total=total, completed=done, note="")
        yield ProgressBar(display, task)
        display.refresh()  # the last count: rich removes a bar below another one as it was drawn last


@contextmanager
def loading(what: str) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
    """Print what is being loaded; on a terminal, a bar shows that it goes on. Yields a function that passes the parts
    of it on and counts them."""
    info(f"loading {what}")
    if live_console() is None:
        yield iter
        return
    with progress("loading", None) as bar:
        yield bar.track


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
    # peft looks for them among modules alone, not among stacked experts; whet refuses patterns that match nothing
    warnings.filterwarnings("ignore", category=RuntimeWarning, message=r"The following \w+_pattern keys did not match")
