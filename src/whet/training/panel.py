"""The live panel of a training run on a terminal: progress, the curve of the loss, rates, speed and memory.

Where there is no terminal, the plain lines of core/console.py remain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from whet.core.console import ProgressBar, live_console, progress
from whet.core.display import sparkline

_MAX_VALUES = 1024
_MIN_CURVE, _MAX_CURVE = 8, 80


class LossCurve:
    """The losses of a run so far; of a long run, means of neighbours."""

    def __init__(self) -> None:
        self.values: list[float | None] = []
        self._size, self._part = 1, list[float]()

    def add(self, loss: float | None) -> None:
        if loss is None or not math.isfinite(loss):
            if self._size == 1:
                self.values.append(None)
            return
        self._part.append(loss)
        if len(self._part) >= self._size:
            self.values.append(sum(self._part) / len(self._part))
            self._part.clear()
        if len(self.values) >= _MAX_VALUES:
            pairs = zip(self.values[::2], self.values[1::2], strict=False)
            self.values = [a if b is None else b if a is None else (a + b) / 2 for a, b in pairs]
            self._size *= 2


class TrainingPanel:
    """What the panel shows below the progress bar: two lines, cut to the window."""

    def __init__(self) -> None:
        self._curve, self._line = LossCurve(), dict[str, Any]()

    def update(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl with running means."""
        self._curve.add(line.get("loss"))
        self._line = dict(line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._line:
            return
        loss = self._line["mean_loss"]
        head = "loss not measured " if loss is None else f"mean loss {loss:.4f} "
        tail = "".join(f"  {part}" for part in self._learning())
        room = min(_MAX_CURVE, options.max_width - len(head) - len(tail))
        curve = sparkline(self._curve.values, room, options.ascii_only) if room >= _MIN_CURVE else ""
        yield Text(head + curve + tail, no_wrap=True, overflow="ellipsis", style="cyan")
        if speed := self._speed():
            yield Text(" · ".join(speed), no_wrap=True, overflow="ellipsis", style="dim")

    def _learning(self) -> list[str]:
        line = self._line
        parts = [f"lr {line['lr']:.2e}"] if isinstance(line.get("lr"), float) else []
        parts += [f"norm {line['grad_norm']:.3g}"] if isinstance(line.get("grad_norm"), float) else []
        return [*parts, f"skipped: {line['skipped']}"] if line.get("skipped") else parts

    def _speed(self) -> list[str]:
        line = self._line
        forms = {
            "tokens_per_s": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}", "peak_gib": "{:.1f} GiB", "epoch": "epoch {:.2f}",
        }  # fmt: skip
        parts = [form.format(line[key]) for key, form in forms.items() if isinstance(line.get(key), int | float)]
        waited, taken = line.get("data_s"), line.get("step_s")
        if waited and taken and waited > 0.01 * taken:
            parts.append(f"data wait {min(1.0, waited / taken):.0%}")
        return parts


class _PanelProgress(Progress):
    """A progress bar with the panel below."""

    def __init__(self, panel: TrainingPanel, **options: Any) -> None:
        self._panel = panel  # before the first rendering
        super().__init__(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), **options,
        )  # fmt: skip

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield self._panel


class TrainingProgress:
    """Shows each finished step."""

    def __init__(self, bar: ProgressBar, panel: TrainingPanel) -> None:
        self._bar, self._panel = bar, panel

    def finish_step(self, line: Mapping[str, Any], note: str) -> None:
        """`line`: of metrics.jsonl, with running means; `note`: what a log shows of the step."""
        self._panel.update(line)
        self._bar.advance(1, note)


@contextmanager
def training_progress(steps: int, done: int) -> Iterator[TrainingProgress]:
    """The panel on a terminal, removed at the end; in a log, a line every 20 seconds."""
    console, panel = live_console(), TrainingPanel()
    if console is None:
        with progress("training", steps, done) as bar:
            yield TrainingProgress(bar, panel)
        return
    with _PanelProgress(panel, console=console, transient=True) as display:
        task = display.add_task("training", total=steps, completed=done, note="")
        yield TrainingProgress(ProgressBar(display, task), panel)
