"""The outcome of a run: loss curve, before/after table and score line in the terminal; one sentence; JSON."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from whet.core.display import escape_controls
from whet.report.formatting import DASH, format_number, format_share, format_time
from whet.report.run_view import RunView
from whet.report.samples import LoggedSample, select_pairs

_BRAILLE_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character: two columns of four dots, top to bottom."""
_BRAILLE_BLANK = 0x2800
_MIN_WIDTH, _MIN_HEIGHT = 24, 4
_SHOWN_PAIRS = 3


def draw_loss_curve(
    points: Sequence[tuple[int, float]],
    width: int = 72,
    height: int = 14,
    frame: Sequence[tuple[int, float]] = (),
) -> str:
    """A line chart of braille characters: `height` lines of `width` characters, including axes.

    A character has 2 × 4 dots. Points in the same column of dots are averaged; values that are not finite are skipped.
    The axes cover the points of `frame` too, so that charts of several curves can be compared.
    """
    width, height = max(width, _MIN_WIDTH), max(height, _MIN_HEIGHT)
    points = sorted((step, loss) for step, loss in points if math.isfinite(loss))
    if not points:
        return "no loss logged".ljust(width)
    framed = [*points, *((step, loss) for step, loss in frame if math.isfinite(loss))]
    low, high = min(loss for _, loss in framed), max(loss for _, loss in framed)
    first, last = min(step for step, _ in framed), max(step for step, _ in framed)
    rows = height - 2
    labels = _y_labels(low, high, rows)
    margin = max(map(len, labels))
    columns = width - margin - 2
    canvas = _draw_braille(_curve_dots(points, (first, last), (low, high), 2 * columns, 4 * rows), columns, rows)
    lines = [f"{label:>{margin}} {'┤' if label else '│'}{row}" for label, row in zip(labels, canvas, strict=True)]
    lines.append(" " * (margin + 1) + "└" + "─" * columns)
    lines.append(_x_labels(first, last, width, margin + 2))
    return "\n".join(lines)


def _y_labels(low: float, high: float, rows: int) -> list[str]:
    """The label of each row: the highest value at the top, the lowest at the bottom, and every third row between."""
    labels = [""] * rows
    if _is_flat(low, high):
        labels[rows // 2] = format_number(low)
        return labels
    gaps = max(1, (rows - 1) // 3)
    places = [round(gap * (rows - 1) / gaps) for gap in range(gaps + 1)]
    shares = [place / (rows - 1) for place in places]
    values = [high * (1 - share) + low * share for share in shares]
    for place, text in zip(places, _distinct_texts(values), strict=True):
        labels[place] = text
    return labels


def _distinct_texts(values: Sequence[float]) -> list[str]:
    """The values with enough digits to be distinct, at most six."""
    for digits in range(3, 7):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _curve_dots(
    points: Sequence[tuple[int, float]], steps: tuple[int, int], losses: tuple[float, float], across: int, down: int
) -> list[tuple[int, int]]:
    """The (column, row) of each dot of the curve, between the ends of both axes; row 0 is the top."""
    (first, last), (low, high) = steps, losses
    by_column = defaultdict(list)
    for step, loss in points:
        column = (step - first) * (across - 1) // (last - first) if last > first else across // 2
        by_column[column].append(_relative_height(loss, low, high))
    corners = [(column, round((1 - fmean(shares)) * (down - 1))) for column, shares in by_column.items()]
    dots = corners[:1]
    for (column, row), (next_column, next_row) in pairwise(corners):
        stretch = max(next_column - column, abs(next_row - row))
        for i in range(1, stretch + 1):
            dots.append(
                (column + round(i * (next_column - column) / stretch), row + round(i * (next_row - row) / stretch))
            )
    return dots


def _draw_braille(dots: Sequence[tuple[int, int]], columns: int, rows: int) -> list[str]:
    cells = [[_BRAILLE_BLANK] * columns for _ in range(rows)]
    for column, row in dots:
        cells[row // 4][column // 2] |= _BRAILLE_BITS[column % 2][row % 4]
    return ["".join(map(chr, row)) for row in cells]


def _x_labels(first: int, last: int, width: int, margin: int) -> str:
    """The line under the axis with the first and the last step; only the last if both do not fit."""
    if first == last:
        return f"{' ' * margin}{f'step {last}':^{width - margin}}"[:width]
    left, right = f"step {first}", str(last)
    room = width - margin - len(left) - len(right)
    return f"{' ' * margin}{left}{' ' * room}{right}" if room > 0 else right[:width].rjust(width)


def _is_flat(low: float, high: float) -> bool:
    return high / 2 - low / 2 == 0


def _relative_height(value: float, low: float, high: float) -> float:
    """`value` rescaled from [low, high] to [0, 1]; halved first, because the difference may overflow."""
    return 0.5 if _is_flat(low, high) else (value / 2 - low / 2) / (high / 2 - low / 2)


_MAX_CHARACTERS = 200  # of a text in the table; samples.jsonl has all of it


def before_after_table(run: RunView) -> Table:
    """Prompts with the expected answer and those of the model before and after training; includes wrong answers."""
    pairs = select_pairs(run.pairs, _SHOWN_PAIRS)
    table = Table(box=box.ROUNDED, show_lines=True, expand=True, caption=_caption(len(pairs), len(run.pairs)))
    for title in ("prompt", "expected", "before", "after"):
        table.add_column(title, overflow="fold", ratio=1)
    for pair in pairs:
        table.add_row(
            _plain_text(pair.sample.prompt),
            _plain_text(pair.sample.expected),
            _answer_text(pair.before),
            _answer_text(pair.after),
        )
    return table


def score_line(run: RunView) -> Text:
    """Task scores before and after in one line; without tasks the validation loss."""
    line = Text()
    for score in run.task_scores:
        _append_change(
            line, score.task, format_share(score.before), format_share(score.after), score.after_step, run.steps
        )
    if not line and run.val_losses:
        before = next((loss for step, loss in run.val_losses if step == run.start_step), None)
        step, after = next(((s, loss) for s, loss in reversed(run.val_losses) if s > run.start_step), (None, None))
        _append_change(line, "validation loss", format_number(before), format_number(after), step, run.steps)
    return line or Text("not evaluated", style="dim")


def _append_change(line: Text, name: str, before: str, after: str, step: int | None, steps: int | None) -> None:
    line.append("   " if line else "")
    line.append(f"{escape_controls(name)} ", style="bold").append(before).append(" → ", style="dim")
    line.append(after, style="bold green" if after != DASH else "dim")
    if step is not None and step != steps:
        line.append(f" (after step {step})", style="dim")


def _caption(shown: int, total: int) -> str | None:
    return f"{shown} of {total} held-out samples" if shown else "no samples yet"


def _answer_text(sample: LoggedSample | None) -> Text:
    if sample is None:
        return Text(DASH, style="dim")
    return _plain_text(sample.answer or "(empty)", {True: "green", False: "red", None: ""}[sample.right])


def _plain_text(text: str, style: str = "") -> Text:
    """Text without interpretation: neither markup nor control sequences of a model reach the terminal."""
    cut = len(text) - _MAX_CHARACTERS
    shown = Text(escape_controls(text[:_MAX_CHARACTERS]) if text else DASH, style=style if text else "dim")
    return shown.append(f"… {cut} more characters", style="dim") if cut > 0 else shown


# The outcome of a run in one sentence, and as JSON.


def summarize_run(run: RunView) -> str:
    """The model, the data, the progress, and how scores or loss changed."""
    model = f"{run.setting('model', 'path') or 'The model'}{_adapter_note(run)}"
    parts = [f"{model} {_progress_note(run)}"]
    results = [
        f"the {score.task} score went from {format_share(score.before)} to {format_share(score.after)}"
        for score in run.task_scores
        if score.before is not None and score.after is not None
    ]
    if results:
        parts.append(", ".join(results))
    elif len(run.losses) > 1:
        parts.append(
            f"the training loss went from {format_number(run.losses[0][1])} to {format_number(run.losses[-1][1])}"
        )
    return "; ".join(parts) + "."


def result_json(run: RunView) -> dict[str, Any]:
    """The result of `whet train --json`. `before` and `after` are scores of the first task; null without tasks."""
    score = next(iter(run.task_scores), None)
    final = run.losses[-1][1] if run.losses else None
    return {
        "run": str(run.folder),
        "steps": run.step,
        "loss": final,
        "val_loss": run.val_losses[-1][1] if run.val_losses else None,
        "before": score.before if score else None,
        "after": score.after if score else None,
        "tokens": _as_int(run.tokens),
        "supervised_tokens": _as_int(run.supervised_tokens),
        "train_s": run.train_seconds,
        "export": str(run.folder / "exports" / run.certificates[-1]["kind"]) if run.certificates else None,
    }


def _as_int(count: float | None) -> int | None:
    return None if count is None else int(count)


def _adapter_note(run: RunView) -> str:
    method = run.setting("adapter", "method")
    if not method:
        return ""
    rank = run.setting("adapter", "rank")
    return f" ({method}, rank {rank})" if rank else f" ({method})"


def _progress_note(run: RunView) -> str:
    done = DASH if run.step is None else f"{run.step:,}"
    of = (f"{done} of {run.steps:,} steps" if run.steps else f"{done} steps") + _data_note(run)
    of += _start_step_note(run)
    match run.status.state:
        case "finished":
            return f"was trained for {done} steps{_data_note(run)}{_start_step_note(run)}"
        case "stopped":
            return f"was stopped after {of}"
        case "failed":
            return f"failed after {of}"
        case "running":
            # the state of a killed process stays "running", so the time of its last heartbeat is part of the sentence
            return f"had completed {of} at its last heartbeat ({format_time(run.status.heartbeat)})"
    return f"has completed {of}" if run.step is not None else "has not been trained yet"


def _start_step_note(run: RunView) -> str:
    return f" (starting at step {run.start_step:,})" if run.start_step else ""


def _data_note(run: RunView) -> str:
    return f", {run.seen_note} conversations seen" if run.seen_note is not None else ""
