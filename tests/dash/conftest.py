"""A server of `whet dash` in a thread of the test, and a client that sends what it is told."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from whet.dash.app import LIMITS, create_app
from whet.dash.live import Feeds
from whet.web.guard import Guard
from whet.web.server import WebServer, bind


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Dash:
    """A server that runs, and requests to it."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None, **query: Any) -> Answer:
        return self.request("GET", f"{path}?{urlencode(query, doseq=True)}" if query else path, None, headers)

    def post(self, path: str, value: Any, headers: dict[str, str] | None = None) -> Answer:
        """As the page sends it."""
        return self.request("POST", path, json.dumps(value).encode(), self.page_headers() | (headers or {}))

    def page_headers(self) -> dict[str, str]:
        csrf = self.get("/api/session").json["csrf"]
        return {"content-type": "application/json", "x-whet-csrf": csrf, "origin": self.url}


@pytest.fixture
def dash() -> Iterator[Callable[..., Dash]]:
    """Starts a server for a folder: dash(folder), with a token: dash(folder, token)."""
    servers = []

    def start(root: Path, token: str | None = None) -> Dash:
        listener = bind("127.0.0.1", 0)
        listener.listen()  # requests wait until it has started
        feeds = Feeds()
        guard = Guard(create_app(root, feeds), token, LIMITS, frozenset())
        server = WebServer(guard, 1, lambda: None, feeds.close)
        threading.Thread(target=server.run, args=([listener],), daemon=True).start()
        servers.append(server)
        return Dash(listener.getsockname()[1])

    yield start
    for server in servers:
        server.stop()
