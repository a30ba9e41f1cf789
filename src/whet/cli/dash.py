"""`whet dash`"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Annotated

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command
from whet.core.errors import WhetError

_FIRST_PORT = 8765


@cli_command
def dash(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="RUNS_DIR", help="The folder of the runs; default: runs.", show_default=False),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. One that other machines can reach needs a token: WHET_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free port from 8765 on.")
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show runs in a browser while they train: curves, conversations behind every point, comparisons, chat.

    The page works offline. Ctrl-C ends the server; runs go on.
    """
    from whet.core.console import info, print_json, print_result
    from whet.core.files import user_path
    from whet.dash.app import LIMITS, create_app
    from whet.dash.live import Feeds
    from whet.runs.find import RUNS_FOLDER
    from whet.web.request_guard import RequestGuard
    from whet.web.server import WebServer, bind, require_token, url_of

    root = RUNS_FOLDER if folder is None else user_path(folder)
    if not root.is_dir() and folder is not None:
        raise WhetError(f"{root}: no such folder (in {Path.cwd()}). Give the folder that holds your runs")
    token = require_token(host)
    listener = bind(host, port) if port is not None else _bind_free_port(host)

    def show() -> None:
        url = url_of(listener)
        if as_json:
            print_json({"url": url, "runs": str(root.absolute())})
        else:
            print_result(url)
        info(f"shows the runs in {root}; Ctrl-C ends it")

    feeds = Feeds()
    WebServer(RequestGuard(create_app(root, feeds), token, LIMITS, frozenset()), 2, show, feeds.close).run([listener])


def _bind_free_port(host: str) -> socket.socket:
    """From 8765 on, so that a bookmark or a tunnel finds the page again."""
    from whet.web.server import bind

    for port in range(_FIRST_PORT, _FIRST_PORT + 20):
        with contextlib.suppress(WhetError):
            return bind(host, port)
    return bind(host, 0)
