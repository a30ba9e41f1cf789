"""Pieces of HTML. Every text that enters the page is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from whet.watch.readable import DASH


class Markup(str):
    """HTML that is already safe; any other text is escaped when it becomes part of the page."""

    __slots__ = ()


def safe(value: object) -> str:
    """`value` as HTML: markup as it is, nothing as a dash, all else as escaped text."""
    if isinstance(value, Markup):
        return value
    return DASH if value is None or value == "" else escape(str(value))


def element(name: str, *content: object, **attributes: str) -> Markup:
    """An element with attributes; `class_` is written `class`, `data_label` is written `data-label`."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(safe(part) for part in content)}</{name}>")


def section(title: str, *content: object, note: object = None) -> Markup:
    """A part of the page under a heading, with a remark beside it."""
    remark = element("p", note, class_="note") if note is not None else Markup("")
    return element("section", element("h2", title), remark, *content)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table whose cells carry their column's title, by which they are labelled on a narrow screen."""
    body = [
        element("tr", *[element("td", cell, data_label=title) for title, cell in zip(head, row, strict=True)])
        for row in rows
    ]
    return element(
        "table", element("thead", element("tr", *[element("th", title) for title in head])), element("tbody", *body)
    )


def facts(values: Mapping[str, object]) -> Markup:
    """A list of names and values; what is not known is left out."""
    known = {name: value for name, value in values.items() if value not in (None, "", DASH)}
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in known.items()]
    return element("dl", *rows, class_="facts")
