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
import uvicorn

from whet.dash.app import create_app
from whet.dash.security import Access
from whet.dash.server import open_socket


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
    access: Access

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
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
        own = {"content-type": "application/json", "x-whet-csrf": self.access.csrf}
        return self.request("POST", path, json.dumps(value).encode(), own | (headers or {}))


@pytest.fixture
def dash() -> Iterator[Callable[..., Dash]]:
    """Starts a server for a folder: dash(folder), with a token: dash(folder, "0.0.0.0", "token…")."""
    servers = []

    def start(root: Path, host: str = "127.0.0.1", token: str | None = None) -> Dash:
        listener = open_socket("127.0.0.1", 0)
        access = Access(host, token)
        config = uvicorn.Config(create_app(root, access), log_config=None, ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        servers.append((server, thread))
        return Dash(listener.getsockname()[1], access)

    yield start
    for server, _ in servers:
        server.should_exit = True
    for _, thread in servers:
        thread.join(10)
