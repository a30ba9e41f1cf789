"""`whet report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import Json, Quiet, verb


@verb
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Write report.html for a run: curves, scores, samples and the ledger on one page that opens offline."""
    from whet.core.console import say
    from whet.watch.report import write_report

    page = write_report(run)
    say(f"report: {page}")
    return {"report": str(page)}
