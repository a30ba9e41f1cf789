"""`whet dash`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command
from whet.core.errors import WhetError


@cli_command
def dash(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="RUNS_DIR", help="The folder of the runs; default: runs.", show_default=False),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. One that other machines can reach is protected by a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first that is free from 8765 on.")
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show runs in a browser while they train: curves, conversations behind every point, comparisons, chat.

    The page works offline. Ctrl-C ends it; runs go on.
    """
    from whet.core.console import info, print_json, print_result
    from whet.core.files import user_path
    from whet.dash.server import make_access, open_socket, serve
    from whet.runs.find import RUNS_FOLDER

    root = RUNS_FOLDER if folder is None else user_path(folder)
    if not root.is_dir() and folder is not None:
        raise WhetError(f"{root}: no such folder (in {Path.cwd()}). Give the folder that holds your runs")
    access = make_access(host)
    listener = open_socket(host, port)

    def show(url: str) -> None:
        if as_json:
            print_json({"url": url, "runs": str(root.absolute())})
        else:
            print_result(url)
        info(f"shows the runs in {root}; Ctrl-C ends it")

    try:
        serve(root, listener, access, show)
    except KeyboardInterrupt:
        info("ended")
