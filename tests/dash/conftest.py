"""A server of `whet dash` in a thread of the test, a client that sends what it is told, and a real browser."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from whet.dash.app import LIMITS, create_app
from whet.dash.live import Feeds
from whet.web.request_guard import RequestGuard
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
        guard = RequestGuard(create_app(root, feeds), token, LIMITS, frozenset())
        server = WebServer(guard, 1, lambda: None, feeds.close)
        threading.Thread(target=server.run, args=([listener],), daemon=True).start()
        servers.append(server)
        return Dash(listener.getsockname()[1])

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")  # while Playwright is open, its event loop runs in this thread, and asyncio.run fails
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_page(url, width=1280, scheme="light"): a page whose console must stay empty."""
    messages: list[str] = []
    contexts = []

    def start(url: str, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(url)
        return page

    yield start
    for context in contexts:
        context.close()
    assert messages == []
