"""What a request must be before a route sees it: sent to this host, with the token, small, and from this page.

- Host: a page of another site whose name was pointed at this machine (DNS rebinding) has its own name in this header.
- Token: on an address that others can reach, every request needs the cookie that `/?token=…` sets.
- Changes (POST) need a header that only a page of this server can know and send, and a body of JSON.
- Answers forbid the browser to run, load or frame anything but the page's own files.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "whet-dash"
CSRF_HEADER = "x-whet-csrf"
_MAX_BODY = 2**18
_MAX_QUERY = 2**13
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
_HEADERS = {
    "content-security-policy": _CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """Who may use the page. `token`: None on a loopback address."""

    host: str
    token: str | None = None
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def allows_host(self, header: str) -> bool:
        """Whether the Host header is a name of this machine. Ports differ behind a tunnel and do not matter."""
        name = _host_name(header)
        if name in _LOOPBACK or name == self.host.lower():
            return True
        if is_loopback(self.host):
            return False
        try:  # no name server decides what an address in digits means
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return name in (socket.gethostname().lower(), socket.getfqdn().lower())


def _host_name(header: str) -> str:
    """The name in a Host header, without port and brackets; empty if it is none."""
    found = _HOST.fullmatch(header.strip().lower())
    return (found["address"] or found["name"]) if found else ""


class SecurityMiddleware:
    """Refuses requests, and adds headers to answers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        problem = self._problem(scope, headers)
        if problem is not None:
            await _answer(send, *problem)
            return
        if login := self._login(scope):
            await _redirect(send, login)
            return
        body = b""
        if scope["method"] == "POST":
            collected = await _read_body(receive)
            if collected is None:
                await _answer(send, 413, f"the request is larger than {_MAX_BODY:,} bytes")
                return
            body = collected
        await self._app(scope, _replay(body, receive), _with_headers(send))

    def _problem(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Status and reason of a refusal."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self._access.allows_host(headers["host"]):
            return 421, "this host name is not one of this server's"
        if len(scope["query_string"]) > _MAX_QUERY or len(scope["path"]) > _MAX_QUERY:
            return 414, "the address is too long"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "only GET and POST"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and scope["path"] != "/":
            return 403, "requests of other sites are refused"
        if not self._has_token(scope, headers):
            return 401, "open the address that `whet dash` printed: it holds the token"
        if scope["method"] == "POST":
            return self._problem_of_change(headers)
        return None

    def _has_token(self, scope: Scope, headers: dict[str, str]) -> bool:
        if self._access.token is None:
            return True
        given = [cookie_parser(headers.get("cookie", "")).get(COOKIE, ""), *_query_tokens(scope)]
        return any(_same(each, self._access.token) for each in given)

    def _problem_of_change(self, headers: dict[str, str]) -> tuple[int, str] | None:
        origin = headers.get("origin")
        if origin is not None and _host_name(origin.partition("://")[2]) != _host_name(headers["host"]):
            return 403, "requests of other sites are refused"
        if not _same(headers.get(CSRF_HEADER, ""), self._access.csrf):
            return 403, f"the header {CSRF_HEADER} is missing or of another server: reload the page"
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 415, "the body must be application/json"
        if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")) > _MAX_BODY:
            return 413, f"the request is larger than {_MAX_BODY:,} bytes"
        return None

    def _login(self, scope: Scope) -> str | None:
        """The cookie to set for a request of `/?token=…`, whose address should not stay in the browser's history."""
        is_login = self._access.token is not None and scope["path"] == "/" and any(_query_tokens(scope))
        return f"{COOKIE}={self._access.token}; HttpOnly; SameSite=Strict; Path=/" if is_login else None


def _query_tokens(scope: Scope) -> list[str]:
    if scope["path"] != "/":
        return []
    return parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20).get("token", [])


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


async def _read_body(receive: Receive) -> bytes | None:
    """The body; None if it is too large."""
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _MAX_BODY:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A channel that has the body first, then what the client does."""
    sent = False

    async def channel() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return channel


def _encode(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _with_headers(send: Send) -> Send:
    async def channel(message: Message) -> None:
        if message["type"] == "http.response.start":
            own: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
            named = {name.lower() for name, _ in own}
            added = [pair for pair in _encode(_HEADERS) if pair[0] not in named]
            message["headers"] = [*own, *added]
        await send(message)

    return channel


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = {**_HEADERS, "content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    await send({"type": "http.response.start", "status": status, "headers": _encode(headers)})
    await send({"type": "http.response.body", "body": body})


async def _redirect(send: Send, cookie: str) -> None:
    headers = {**_HEADERS, "location": "/", "set-cookie": cookie, "content-length": "0"}
    await send({"type": "http.response.start", "status": 303, "headers": _encode(headers)})
    await send({"type": "http.response.body", "body": b""})
