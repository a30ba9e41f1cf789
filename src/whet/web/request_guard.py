"""An ASGI layer around a web application: only the user may send requests, and none may overload the server.

Whoever reaches a server by a browser may be another page that the user has open, so a request is checked in this order:

1. Host: without a token, only names of this machine. A foreign name that resolves to 127.0.0.1 (DNS rebinding) is
   refused.
2. Token, if there is one: `Authorization: Bearer …`, or the cookie that the login page sets (HttpOnly, SameSite).
3. Origin: a browser's request that changes something must come from a page of this server.
4. Size and time: a body over the limit or slower than the limit ends the request; so does a client that reads nothing.

Every response forbids scripts, styles and frames from elsewhere. Errors have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from whet.core.console import print_traceback

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_SECURITY_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_COOKIE = "whet_token"
_HOST = re.compile(r"(\[[0-9a-fA-F:]+\]|[a-zA-Z0-9.-]+)(?::[0-9]+)?")
_READING_METHODS = ("GET", "HEAD", "OPTIONS")
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_LOGIN_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>whet</title></head>
<body><h1>whet</h1><p>{}</p>
<form method="post" action="/login"><label>Token <input type="password" name="token" autofocus></label>
<button>Log in</button></form></body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take."""

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    """For all of the body: a client that sends a byte a minute does not keep its connection."""
    send_seconds: float = 60.0
    """For one part of the response: a client that stopped reading is disconnected."""


class Rejection(Exception):  # noqa: N818 - an answer, not a failure
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers: dict[str, str] = {}

    def body(self) -> bytes:
        """The error as OpenAI's API writes it."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


class ClientGoneError(Exception):
    """The client left or does not read: nobody is there to tell."""


@dataclass(frozen=True, slots=True)
class RequestGuard:
    """The application, checked and limited. `public` paths need no token."""

    app: App
    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    public: frozenset[str] = frozenset({"/health"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        response = _Response(send, self.limits.send_seconds)
        try:
            await self._handle(_Request(scope), receive, response)
        except Rejection as rejected:
            await response.finish(rejected.status, rejected.body(), "application/json", rejected.headers)
        except ClientGoneError:
            pass
        except Exception:
            print_traceback()
            failed = Rejection(500, "the server failed on this request; its log has the reason")
            await response.finish(500, failed.body(), "application/json")
        return None

    async def _handle(self, request: _Request, receive: Receive, response: _Response) -> None:
        if self.token is None and not _is_this_machine(request.host):
            raise Rejection(403, f"Host: {request.host!r} is not a name of this machine; use localhost")
        if self.token is not None and request.path == "/login" and request.method == "POST":
            request.require_same_origin()
            return await self._log_in(await _read_body(request, receive, self.limits), response)
        is_bearer = self.token is not None and _equal(request.bearer, self.token)
        allowed = self.token is None or is_bearer or _equal(request.cookie, self.token) or request.path in self.public
        if not allowed:
            if request.method == "GET" and "text/html" in request.header("accept"):
                return await response.finish(401, _LOGIN_PAGE.format("This server needs a token."), "text/html")
            refused = Rejection(
                401, "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`", code="invalid_api_key"
            )
            refused.headers["www-authenticate"] = "Bearer"
            raise refused
        if request.method not in _READING_METHODS and not is_bearer:  # a page elsewhere cannot know the token
            request.require_same_origin()
        body = await _read_body(request, receive, self.limits)
        pending: list[Event] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Event:
            return pending.pop() if pending else await receive()

        return await self.app(request.scope, replay, response)

    async def _log_in(self, body: bytes, response: _Response) -> None:
        given = parse_qs(body.decode("utf-8", "replace"), max_num_fields=8).get("token", [""])[0]
        assert self.token is not None
        if not _equal(given, self.token):
            return await response.finish(401, _LOGIN_PAGE.format("This token is wrong."), "text/html")
        cookie = f"{_COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        return await response.finish(303, b"", "text/plain", {"location": "/", "set-cookie": cookie})


class _Request:
    """What the checks read of a request."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.method, self.path = scope, str(scope["method"]), str(scope["path"])
        self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

    def header(self, name: str) -> str:
        return self._headers.get(name, "")

    @property
    def host(self) -> str:
        return self.header("host")

    @property
    def bearer(self) -> str:
        scheme, _, token = self.header("authorization").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""

    @property
    def cookie(self) -> str:
        pairs = (part.strip().partition("=") for part in self.header("cookie").split(";"))
        return next((value for name, _, value in pairs if name == _COOKIE), "")

    def require_same_origin(self) -> None:
        """Browsers say where a request comes from; programs such as curl send none of these headers."""
        origin, site = self.header("origin"), self.header("sec-fetch-site")
        elsewhere = site not in ("", "same-origin", "none") or (origin and origin.partition("://")[2] != self.host)
        if elsewhere or (self.header("cookie") and not (origin or site)):
            raise Rejection(403, f"a page of {origin or 'another site'} may not send requests to this server")


class _Response:
    """Sends a response with the security headers; each part within a time limit."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds, self._started = send, seconds, False

    async def __call__(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self._started = True
            given = {name.lower() for name, _ in event.get("headers", ())}
            added = [(name, value) for name, value in _SECURITY_HEADERS if name not in given]
            event = {**event, "headers": [*event.get("headers", ()), *added]}
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(event)
        except TimeoutError:
            raise ClientGoneError from None

    async def finish(self, status: int, body: bytes | str, kind: str, headers: dict[str, str] | None = None) -> None:
        """Send a whole response, unless one has begun."""
        if self._started:
            return
        content = body.encode() if isinstance(body, str) else body
        sent = {"content-type": f"{kind}; charset=utf-8", "content-length": str(len(content)), **(headers or {})}
        pairs = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in sent.items()]
        await self({"type": "http.response.start", "status": status, "headers": pairs})
        await self({"type": "http.response.body", "body": content})


async def _read_body(request: _Request, receive: Receive, limits: Limits) -> bytes:
    """The whole body; a Rejection if it is over the limit of size or time."""
    too_large = Rejection(413, f"the request has more than {limits.body_bytes:,} bytes; send less")
    length = request.header("content-length")
    if length.isdecimal() and int(length[:20]) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ClientGoneError
                body += event.get("body", b"")
                if len(body) > limits.body_bytes:
                    raise too_large
                if not event.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise Rejection(408, f"the request did not arrive within {limits.body_seconds:g} s; send it again") from None


def _is_this_machine(host: str) -> bool:
    """Whether a Host header is a loopback name or address, with or without a port."""
    parts = _HOST.fullmatch(host)
    name = parts[1].strip("[]") if parts else ""
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _equal(given: str, expected: str | None) -> bool:
    """Compares in constant time; nothing equals a missing token."""
    return bool(expected) and hmac.compare_digest(given.encode("utf-8", "replace"), (expected or "").encode())
