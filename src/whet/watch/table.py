"""A run's result for the terminal."""

from __future__ import annotations

import unicodedata

from rich import box
from rich.table import Table
from rich.text import Text

from whet.watch.readable import DASH, number_text, share_text
from whet.watch.run import RunView
from whet.watch.samples import Sample, pick

_LONGEST = 200
"""Characters of one text that are shown; the whole text is in samples.jsonl."""


def before_after(run: RunView, limit: int = 3) -> Table:
    """Held-out prompts with the expected answer and the model's, before and after; wrong answers are among them."""
    pairs = pick(run.pairs, limit)
    table = Table(box=box.ROUNDED, show_lines=True, expand=True, caption=_caption(len(pairs), len(run.pairs)))
    for title in ("prompt", "expected", "before", "after"):
        table.add_column(title, overflow="fold", ratio=1)
    for pair in pairs:
        table.add_row(
            _plain(pair.sample.prompt), _plain(pair.sample.expected), _answer(pair.before), _answer(pair.after)
        )
    return table


def score_line(run: RunView) -> Text:
    """The scores before and after in one line; the validation loss if there are no tasks."""
    line = Text()
    for score in run.results:
        _append(line, score.task, share_text(score.before), share_text(score.after), score.after_step, run.steps)
    if not line and run.val_losses:
        before = next((loss for step, loss in run.val_losses if step == run.first), None)
        step, after = next(((s, loss) for s, loss in reversed(run.val_losses) if s > run.first), (None, None))
        _append(line, "validation loss", number_text(before), number_text(after), step, run.steps)
    return line or Text("not evaluated", style="dim")


def _append(line: Text, what: str, before: str, after: str, step: int | None, steps: int | None) -> None:
    line.append("   " if line else "")
    line.append(f"{_visible(what)} ", style="bold").append(before).append(" → ", style="dim")
    line.append(after, style="bold green" if after != DASH else "dim")
    if step is not None and step != steps:
        line.append(f" (after step {step})", style="dim")


def _caption(shown: int, all_of_them: int) -> str | None:
    return f"{shown} of {all_of_them} held-out samples" if shown else "no samples yet"


def _answer(sample: Sample | None) -> Text:
    if sample is None:
        return Text(DASH, style="dim")
    return _plain(sample.answer or "(empty)", {True: "green", False: "red", None: ""}[sample.right])


def _plain(text: str, style: str = "") -> Text:
    """Text as it is: no markup, no control sequence of a model's reaches the terminal."""
    cut = len(text) - _LONGEST
    shown = Text(_visible(text[:_LONGEST]) if text else DASH, style=style if text else "dim")
    return shown.append(f"… {cut} more characters", style="dim") if cut > 0 else shown


def _visible(text: str) -> str:
    return "".join("\ufffd" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text)
