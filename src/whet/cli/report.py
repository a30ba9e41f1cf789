"""`whet report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command


@cli_command
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Write report.html for a run: curves, scores, samples and the ledger on one page that works offline."""
    from whet.core.console import info
    from whet.report.html_report import write_report

    page = write_report(run)
    info(f"report: {page}")
    return {"report": str(page)}
