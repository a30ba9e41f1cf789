"""The report of a run: one HTML file that needs nothing else, neither a network nor a server."""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path
from string import Template

from whet.core.errors import disk_error
from whet.core.files import atomic_write
from whet.watch import sections
from whet.watch.markup import safe
from whet.watch.readable import time_text
from whet.watch.run import RunView
from whet.watch.summary import summary

_PARTS = (
    sections.big_numbers,
    sections.curves,
    sections.faults,
    sections.validation,
    sections.samples,
    sections.ledger,
    sections.exports,
    sections.plan,
    sections.config,
)


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into the run directory and return its path."""
    run = RunView.read(folder)
    path = run.folder / "report.html"
    try:
        atomic_write(path, page(run))
    except OSError as error:
        raise disk_error(error, "writing the report", path) or error from None
    return path


def page(run: RunView) -> str:
    """The whole report as HTML."""
    return Template(_file("report.html")).substitute(
        name=safe(run.name),
        state=safe(run.status.state),
        summary=safe(summary(run)),
        sections="\n".join(part(run) for part in _PARTS),
        written=time_text(time.time()),
        folder=safe(run.folder.resolve()),
        css=_file("report.css"),
        js=_file("report.js"),
    )


def _file(name: str) -> str:
    return files("whet.watch").joinpath(name).read_text(encoding="utf-8")
