"""`whet report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command


@cli_command
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    to: Annotated[
        str, typer.Option(metavar="html|md|FILE", help="HTML, Markdown, or a file whose name ends with .html or .md.")
    ] = "html",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Write a one-page offline report: curves, scores, answers before and after, the ledger, costs.

    The report of one run goes into its folder, that of several runs into the folder that holds them.
    """
    from whet.core.console import info
    from whet.report.run_reports import write_reports

    page = write_reports(runs, to)
    info(f"report: {page}")
    return {"report": str(page)}
