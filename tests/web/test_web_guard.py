"""Requests that a web server of whet must refuse, sent to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.core.errors import WhetError
from whet.web.request_guard import Limits, RequestGuard
from whet.web.server import bind, require_token

TOKEN = "0123456789abcdef0123"
HERE = "http://localhost:8000"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body; fails at /fail."""
    if scope["path"] == "/fail":
        raise RuntimeError(f"secret of the server: {TOKEN}")
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


def request(
    method: str,
    path: str = "/",
    token: str | None = None,
    limits: Limits | None = None,
    base: str = HERE,
    **options: Any,
) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(RequestGuard(echo, token, limits or Limits()))
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "[::1]", "LOCALHOST:1"])
def test_names_of_this_machine_are_served(host: str) -> None:
    assert request("GET", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "evil@localhost", "[::2]", "0.0.0.0", "", "["]
)
def test_a_foreign_name_that_resolves_to_this_machine_is_refused(host: str) -> None:
    answer = request("GET", headers={"host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"


def test_with_a_token_any_name_is_served_and_nothing_without_it() -> None:
    name = {"host": "gpu7.example"}
    assert request("GET", token=TOKEN, headers=name).status_code == 401
    assert request("GET", token=TOKEN, headers={**name, "authorization": f"Bearer {TOKEN}"}).status_code == 200
    for wrong in ("", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", "Bearer é"):
        answer = request("GET", token=TOKEN, headers=[(b"authorization", wrong.encode())])
        assert answer.status_code == 401, wrong
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert TOKEN not in answer.text
    assert request("GET", "/health", token=TOKEN).status_code == 200


def test_a_browser_logs_in_and_gets_a_cookie_that_scripts_and_other_sites_cannot_use() -> None:
    page = request("GET", token=TOKEN, headers={"accept": "text/html"})
    assert page.status_code == 401
    assert "<form" in page.text
    assert TOKEN not in page.text
    assert request("POST", "/login", token=TOKEN, data={"token": "wrong"}).status_code == 401
    done = request("POST", "/login", token=TOKEN, data={"token": TOKEN})
    cookie = done.headers["set-cookie"]
    assert (done.status_code, done.headers["location"]) == (303, "/")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    mine = {"cookie": cookie.partition(";")[0], "origin": HERE}
    assert request("POST", token=TOKEN, headers=mine).status_code == 200
    assert request("POST", token=TOKEN, headers={**mine, "origin": "http://evil.example"}).status_code == 403
    assert request("POST", token=TOKEN, headers={"cookie": mine["cookie"]}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9000"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_page_cannot_press_a_button(headers: dict[str, str]) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert request(method, headers=headers).status_code == 403
    assert request("POST", headers={"origin": HERE, "sec-fetch-site": "same-origin"}).status_code == 200
    assert request("POST").status_code == 200  # curl, openai


def test_a_body_over_the_limit_is_refused_however_it_is_sent() -> None:
    small = Limits(body_bytes=10)
    assert request("POST", limits=small, content=b"x" * 10).text == "x" * 10
    assert request("POST", limits=small, content=b"x" * 11).status_code == 413

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 5

    assert request("POST", limits=small, content=chunks()).status_code == 413
    assert request("POST", limits=small, headers={"content-length": "9" * 40}).status_code == 413


def test_a_client_that_stops_sending_or_reading_is_dropped() -> None:
    sent: list[Any] = []

    async def run(receive: Any, send: Any) -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}
        await RequestGuard(echo, limits=Limits(body_seconds=0.01, send_seconds=0.01))(scope, receive, send)

    async def forever(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def collect(event: Any) -> None:
        sent.append(event)

    async def empty() -> Any:
        return {"type": "http.request", "body": b""}

    asyncio.run(run(forever, collect))
    assert sent[0]["status"] == 408
    asyncio.run(run(empty, forever))


def test_a_failure_tells_the_client_nothing_and_the_log_no_secret(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_TOKEN", TOKEN)
    answer = request("GET", "/fail")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    shown = capfd.readouterr().err
    assert "RuntimeError" in shown
    assert TOKEN not in answer.text + shown


def test_every_response_forbids_scripts_and_frames_from_elsewhere() -> None:
    for answer in (request("GET"), request("GET", headers={"host": "evil"}), request("GET", "/fail")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def collect(event: Any) -> None:
        sent.append(event)

    asyncio.run(RequestGuard(echo)({"type": "websocket"}, None, collect))  # type: ignore[arg-type]
    assert sent[0]["type"] == "websocket.close"


TEXT = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["GET", "POST"]),
    st.lists(
        st.tuples(st.sampled_from(["host", "origin", "cookie", "authorization", "content-length", "accept"]), TEXT),
        max_size=4,
    ),
)
def test_any_headers_get_a_proper_answer_and_none_passes_without_the_token(
    method: str, headers: list[tuple[str, str]]
) -> None:
    sent: list[Any] = []

    async def collect(event: Any) -> None:
        sent.append(event)

    async def empty() -> Any:
        return {"type": "http.request", "body": b""}

    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "path": "/", "headers": pairs}
    asyncio.run(RequestGuard(echo, TOKEN)(scope, empty, collect))
    assert sent[0]["status"] in (401, 413)
    assert b"".join(name for name, _ in sent[0]["headers"])
    if sent[0]["status"] == 401 and not sent[1]["body"].startswith(b"<!doctype"):
        assert json.loads(sent[1]["body"])["error"]["message"]


# Where a server may listen


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("WHET_TOKEN", raising=False)
    return monkeypatch


def test_loopback_needs_no_token_and_any_other_address_does(no_token: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        assert require_token(host) is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "", "no.such.host.invalid"):
        with pytest.raises(WhetError, match="export WHET_TOKEN"):
            require_token(host)
    no_token.setenv("WHET_TOKEN", TOKEN)
    assert require_token("0.0.0.0") == require_token("localhost") == TOKEN


@pytest.mark.parametrize("token", ["short", "has spaces in it, and commas", "ä" * 20])
def test_a_weak_token_is_refused_without_being_shown(no_token: pytest.MonkeyPatch, token: str) -> None:
    no_token.setenv("WHET_TOKEN", token)
    with pytest.raises(WhetError, match="at least 16") as refused:
        require_token("0.0.0.0")
    assert token not in str(refused.value)


def test_an_address_in_use_is_an_error_with_a_remedy() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(WhetError, match="--port"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(WhetError, match="--host"):
        bind("no.such.host.invalid", 0)
