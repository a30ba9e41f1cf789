"""A web server in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.web.request_guard import App
from whet.web.server import WebServer, bind, url_of

if TYPE_CHECKING:
    import httpx


@contextlib.contextmanager
def running(app: App) -> Iterator[str]:
    """The URL of a server of `app`, which a thread runs inside this context."""
    is_up = threading.Event()
    server = WebServer(app, 5, is_up.set)
    with bind("127.0.0.1", 0) as listener:
        url = url_of(listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert is_up.wait(60)
            yield url
        finally:
            server.stop()
            thread.join(60)
            assert not thread.is_alive()


def http_client(url: str) -> httpx.Client:
    """A client for plain HTTP; reading certificates would take longer than the requests."""
    import httpx

    return httpx.Client(base_url=url, timeout=60, verify=False)
