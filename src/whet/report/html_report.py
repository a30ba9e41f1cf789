"""Reports as HTML: one self-contained file that needs neither a network nor a server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from whet.core.display import escape_controls, mask_secrets
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
from whet.report.charts import render_chart
from whet.report.formatting import DASH, format_time
from whet.report.samples import LoggedSample, SamplePair


class Markup(str):
    """Safe HTML; any other text is escaped when it becomes part of the page."""

    __slots__ = ()


def to_html(value: object) -> str:
    """`value` as HTML: markup unchanged, a missing value as a dash, all else as escaped text."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, Styled):
        name = {"code": "code", "strong": "b"}.get(value.style)
        return element(name, value.text) if name else element("span", value.text, class_=value.style)
    return DASH if value is None or value == "" else escape(escape_controls(str(value)))


def element(name: str, *content: object, **attributes: str) -> Markup:
    """An element with attributes; `class_` is written `class`, `data_label` is written `data-label`."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(to_html(part) for part in content)}</{name}>")


def html_section(title: str | None, *content: object, note: object = None) -> Markup:
    """A section of the page: heading, optional note, content."""
    heading = element("h2", title) if title is not None else Markup("")
    paragraph = element("p", note, class_="note") if note is not None else Markup("")
    return element("section", heading, paragraph, *content)


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table whose cells have their column's title as data-label, which narrow screens show."""
    body = [
        element("tr", *[element("td", cell, data_label=title) for title, cell in zip(head, row, strict=True)])
        for row in rows
    ]
    return element(
        "table", element("thead", element("tr", *[element("th", title) for title in head])), element("tbody", *body)
    )


def definition_list(values: Mapping[str, Cell]) -> Markup:
    """A list of names and values without the missing ones."""
    known = {name: value for name, value in values.items() if value not in (None, "", DASH)}
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in known.items()]
    return element("dl", *rows, class_="facts")


def render_html(title: str, state: str, summary: str, sections: Iterable[ReportSection], folder: Path) -> str:
    """A whole page. `folder`: where its content comes from."""
    made = [html_section(each.title, *map(_render_block, each.blocks), note=each.note) for each in sections]
    return fill_page(title, state, summary, made, folder)


def _render_block(block: Block) -> Markup:
    match block:
        case Table(head, rows):
            return html_table(head, rows)
        case Facts(values):
            return definition_list(values)
        case Bullets(items):
            return element("ul", *[element("li", *item) for item in items], class_="reasons")
        case Scores(changes, numbers):
            arrow = element("i", " → ")
            scores = [_tile(name, before, arrow, element("b", after)) for name, before, after in changes]
            tiles = [_tile(name, value) for name, value in numbers]
            return Markup(element("div", *scores, class_="scores") + element("div", *tiles, class_="tiles"))
        case Figure(caption, lines):
            return Markup(render_chart(caption, lines))
        case SmallFigures(figures):
            drawn = [Markup(render_chart(each.caption, each.lines, small=True)) for each in figures]
            return element("div", *drawn, class_="row")
        case Answers(pairs, folded):
            more = element("details", element("summary", f"{len(folded)} more"), *map(_sample_article, folded))
            return Markup("".join(map(_sample_article, pairs)) + (more if folded else ""))
        case AnswersOverTime(prompt, answers):
            return _answers_over_time(prompt, answers)
        case Folded(title, text):
            return element("details", element("summary", title), element("pre", text))


def _tile(name: str, *value: object) -> Markup:
    return element("div", element("strong", *value), element("span", name), class_="tile")


def _sample_article(pair: SamplePair) -> Markup:
    columns = [
        element("div", element("h3", "expected"), element("pre", pair.sample.expected)),
        _answer_column("before", pair.before),
        _answer_column("after", pair.after),
    ]
    return element(
        "article", element("pre", pair.sample.prompt, class_="prompt"), element("div", *columns, class_="answers")
    )


def _answer_column(title: str, sample: LoggedSample | None) -> Markup:
    if sample is None:
        return element("div", element("h3", title), element("pre", DASH))
    verdict = {True: "right", False: "wrong", None: ""}[sample.right]
    shown = {"right": "✓ right", "wrong": "✗ wrong"}.get(verdict)
    mark = element("span", shown, class_="verdict") if shown else Markup("")
    heading = element("h3", f"{title}, step {sample.step}" if sample.step else title, mark)
    return element("div", heading, element("pre", sample.answer or "(empty)"), class_=verdict)


_SHOWN_ANSWERS = 3


def _answers_over_time(prompt: str, answers: Sequence[LoggedSample]) -> Markup:
    """The first, the middle and the last answer, and the others folded away."""
    last = len(answers) - 1
    places = sorted({round(last * i / (_SHOWN_ANSWERS - 1)) for i in range(_SHOWN_ANSWERS)})
    columns = [_answer_column(f"step {answers[i].step}" if answers[i].step else "before", answers[i]) for i in places]
    others = [each for i, each in enumerate(answers) if i not in places]
    rest = [part for each in others for part in (element("h3", f"step {each.step}"), element("pre", each.answer))]
    more = element("details", element("summary", f"{len(others)} more evaluations"), *rest) if others else Markup("")
    return element("article", element("pre", prompt, class_="prompt"), element("div", *columns, class_="answers"), more)


def fill_page(name: str, state: str | None, summary: str, sections: Iterable[Markup], folder: Path) -> str:
    """A self-contained page in the style of reports. `folder`: where its content comes from."""
    return Template(_read_asset("report.html")).substitute(
        name=to_html(mask_secrets(name)),
        state=to_html(state),
        summary=to_html(mask_secrets(summary)),
        sections="\n".join(sections),
        written=format_time(time.time()),
        folder=to_html(resolve_path(folder)),
        css=_read_asset("report.css"),
        js=_read_asset("report.js"),
    )


def _read_asset(name: str) -> str:
    return files("whet.report").joinpath(name).read_text(encoding="utf-8")
