"""Reports as Markdown, for pull requests, wikis and model cards: the sections of the page, with curves as text."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from whet.core.display import escape_controls, mask_secrets, sparkline
from whet.core.files import resolve_path
from whet.report.blocks import (
    Answers,
    AnswersOverTime,
    Block,
    Bullets,
    Cell,
    Facts,
    Figure,
    Folded,
    ReportSection,
    Scores,
    SmallFigures,
    Styled,
    Table,
)
from whet.report.charts import ChartLine
from whet.report.formatting import DASH, format_number, format_time
from whet.report.samples import LoggedSample, SamplePair
from whet.report.terminal_report import draw_loss_curve

_SPECIAL = re.compile(r"([\\`*_\[\]|~]|^[#>+=-])")
"""What has a meaning inside a line, and at its start."""
_WIDTH, _SPARKLINE = 88, 40


def render_markdown(title: str, state: str, summary: str, sections: Iterable[ReportSection], folder: Path) -> str:
    """A whole report. `folder`: where its content comes from."""
    parts = [f"# {_text(mask_secrets(title))}", f"*{_text(state)}*. {_text(mask_secrets(summary))}"]
    for section in sections:
        parts += [f"## {_text(section.title)}"] if section.title is not None else []
        parts += [_cell(section.note)] if section.note is not None else []
        parts += [part for block in section.blocks if (part := _render_block(block))]
    parts.append(f"Written {format_time(time.time())} from {_code(str(resolve_path(folder)))}")
    return "\n\n".join(parts) + "\n"


def _render_block(block: Block) -> str:
    match block:
        case Table(head, rows):
            return _table(head, rows)
        case Facts(values):
            known = {name: value for name, value in values.items() if value not in (None, "", DASH)}
            return _table(("", ""), list(known.items()))
        case Bullets(items):
            return "\n".join(f"- {''.join(map(_cell, item))}" for item in items)
        case Scores(changes, numbers):
            rows = [(name, f"{before} → {after}") for name, before, after in changes] + list(numbers)
            return _table(("", ""), rows)
        case Figure(caption, lines):
            return "\n\n".join([f"**{_text(caption)}**", *map(_curve, _drawable(lines))])
        case SmallFigures(figures):
            rows = [(each.caption, *_small_curve(lines[0])) for each in figures if (lines := _drawable(each.lines))]
            return _table(("", "", "first", "last"), rows) if rows else ""
        case Answers(pairs):
            return "\n\n".join(map(_sample, pairs))
        case AnswersOverTime(prompt, answers):
            return "\n\n".join([_labelled("prompt", prompt), *map(_answer, answers)])
        case Folded(title, text):
            return f"<details><summary>{_text(title)}</summary>\n\n{_fence(text)}\n\n</details>"


def _drawable(lines: Sequence[ChartLine]) -> list[ChartLine]:
    """A smoothed line replaces the raw one."""
    known = [line for line in lines if line.known]
    names = {line.name for line in known}
    return [line for line in known if not (line.name == "training" and "smoothed" in names)]


def _curve(line: ChartLine) -> str:
    return f"{_text(line.name)}:\n\n{_fence(draw_loss_curve(line.known, _WIDTH))}"


def _small_curve(line: ChartLine) -> tuple[Cell, Cell, Cell]:
    values: list[float | None] = [value for _, value in line.known]
    return Styled(sparkline(values, _SPARKLINE), "code"), format_number(values[0]), format_number(values[-1])


def _sample(pair: SamplePair) -> str:
    answers = [("before", pair.before), ("after", pair.after)]
    shown = [_labelled(name, DASH if each is None else each.answer or "(empty)", each) for name, each in answers]
    return "\n\n".join([_labelled("prompt", pair.sample.prompt), _labelled("expected", pair.sample.expected), *shown])


def _answer(sample: LoggedSample) -> str:
    return _labelled(f"step {sample.step}" if sample.step else "before", sample.answer or "(empty)")


def _labelled(name: str, text: str, sample: LoggedSample | None = None) -> str:
    verdict = "" if sample is None else {True: " ✓", False: " ✗", None: ""}[sample.right]
    return f"**{name}**{verdict}\n\n{_fence(text)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    written = [f"| {' | '.join(_text(title) if title else ' ' for title in head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*written, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(value: Cell) -> str:
    if isinstance(value, Styled):
        if value.style == "code":
            return _code(value.text)
        return f"**{_text(value.text)}**" if value.style in ("bad", "strong") and value.text else _text(value.text)
    return DASH if value is None or value == "" else _text(value)


def _text(value: str | None) -> str:
    """Plain text on one line: neither Markdown nor HTML of a name or of data has an effect."""
    shown = escape_controls(" ".join((value or DASH).split("\n")))
    return _SPECIAL.sub(r"\\\1", shown.replace("&", "&amp;").replace("<", "&lt;"))


def _code(text: str) -> str:
    """Inline code, whatever is in it; a | would end the cell of a table even there."""
    shown = escape_controls(" ".join(text.split())).replace("|", "¦") or DASH
    ticks = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def _fence(text: str) -> str:
    """A block of text, whatever is in it."""
    shown = escape_controls(text.rstrip("\n"))
    ticks = "`" * max(3, max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    return f"{ticks}text\n{shown or DASH}\n{ticks}"
