"""Start and stop a web server: where it may listen, its token, and what happens at SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from whet.core.errors import WhetError
from whet.web.request_guard import App

TOKEN_VARIABLE = "WHET_TOKEN"
"""Messages and logs mask its value, as that of every variable whose name ends so."""
_MIN_TOKEN = 16
_MAX_CONNECTIONS = 1000
_MAX_IDLE_S = 30.0


def require_token(host: str) -> str | None:
    """The token that requests need, from the environment. On loopback it is optional; on a shared machine set it, too:
    every user of the machine reaches its loopback addresses."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and (len(token) < _MIN_TOKEN or not token.isascii() or not token.isalnum()):
        raise WhetError(f"{TOKEN_VARIABLE}: a token has at least {_MIN_TOKEN} letters and digits. {_NEW_TOKEN}")
    if token is None and not _is_loopback(host):
        raise WhetError(
            f"--host {host}: anyone who reaches this address can use the server, so it needs a token. {_NEW_TOKEN}, or "
            "keep the default address and reach it through a tunnel: ssh -L PORT:localhost:PORT THIS-MACHINE"
        )
    return token


_NEW_TOKEN = f"Make one: export {TOKEN_VARIABLE}=$(openssl rand -hex 24)"


def _is_loopback(host: str) -> bool:
    """Whether every address of a host is reachable from this machine alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, so that an address in use is an error before a model is loaded; port 0: a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WhetError(f"{host}:{port}: cannot listen here ({reason}). Give another --port or --host") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class _TimedProtocol(H11Protocol):
    """Closes a connection on which no request begins for a while: uvicorn would wait for its headers forever, and a
    client that opens many would leave none to others."""

    _idle_since: float | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_if_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self.loop.time()
        elif self.loop.time() - self._idle_since >= _MAX_IDLE_S:
            self.transport.close()
            return
        self._timer = self.loop.call_later(_MAX_IDLE_S / 4, self._close_if_idle)


class WebServer(uvicorn.Server):
    """A server for one application. SIGTERM and Ctrl-C let running requests finish, for at most `grace_seconds`; a
    second signal ends them at once. `on_stop` is called with the first, to end streams that never end by themselves."""

    def __init__(
        self, app: App, grace_seconds: float, on_start: Callable[[], None], on_stop: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=_TimedProtocol, ws="none", lifespan="on", log_config=None, access_log=False,
                server_header=False, date_header=False, limit_concurrency=_MAX_CONNECTIONS,
                timeout_graceful_shutdown=int(grace_seconds), h11_max_incomplete_event_size=32 << 10,
            )
        )  # fmt: skip
        self._on_start, self._on_stop = on_start, on_stop
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the application's threads running
            await self.lifespan.shutdown()

    def stop(self) -> None:
        """Stop as SIGTERM does; another thread may call it."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._on_stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again after a graceful stop, and the exit code would be that of a kill."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()
