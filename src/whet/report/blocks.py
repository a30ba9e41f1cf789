"""What reports are made of, whatever they are written as: html_report.py and markdown_report.py render it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from whet.report.charts import ChartLine
from whet.report.samples import LoggedSample, SamplePair


@dataclass(frozen=True, slots=True)
class Styled:
    """Text that is good or bad news, code, or stands out."""

    text: str
    style: Literal["good", "bad", "code", "strong"]


Cell = str | Styled | None
"""None is a missing value."""


@dataclass(frozen=True, slots=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values; missing ones are left out."""

    values: dict[str, Cell]


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of lines, each of several parts."""

    items: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Large numbers before and after, and smaller ones below."""

    changes: Sequence[tuple[str, str, str]]
    """Name, before, after."""
    numbers: Sequence[tuple[str, str]]
    """Name, value."""


@dataclass(frozen=True, slots=True)
class Figure:
    caption: str
    lines: Sequence[ChartLine]


@dataclass(frozen=True, slots=True)
class SmallFigures:
    figures: Sequence[Figure]


@dataclass(frozen=True, slots=True)
class Answers:
    """Prompts with the expected answer and those before and after training."""

    pairs: Sequence[SamplePair]
    folded: Sequence[SamplePair] = ()


@dataclass(frozen=True, slots=True)
class AnswersOverTime:
    """One prompt with the answers of every evaluation."""

    prompt: str
    answers: Sequence[LoggedSample]


@dataclass(frozen=True, slots=True)
class Folded:
    """A long text that is opened on demand."""

    title: str
    text: str


Block = Table | Facts | Bullets | Scores | Figure | SmallFigures | Answers | AnswersOverTime | Folded


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A part of a report; without a title it stands alone."""

    title: str | None
    blocks: Sequence[Block] = field(default_factory=tuple)
    note: Cell = None
