"""The server of `whet dash`: where it listens, and who may ask."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from whet.core.errors import WhetError
from whet.dash.app import create_app
from whet.dash.security import Access, is_loopback

DEFAULT_PORT = 8765
TOKEN_VARIABLE = "WHET_DASH_TOKEN"
_MIN_TOKEN = 16
_PORTS_TRIED = 20


def make_access(host: str) -> Access:
    """On an address that others can reach, a token: the user's own, or a random one."""
    if is_loopback(host):
        return Access(host)
    own = os.environ.get(TOKEN_VARIABLE, "")
    if own and (len(own) < _MIN_TOKEN or not own.isascii() or not own.replace("-", "").replace("_", "").isalnum()):
        raise WhetError(
            f"{TOKEN_VARIABLE}: a token has at least {_MIN_TOKEN} letters, digits, dashes and underscores. Unset it: "
            "whet dash then makes one"
        )
    return Access(host, own or secrets.token_urlsafe(24))


def open_socket(host: str, port: int | None) -> socket.socket:
    """Listen on an address; without a port, on the first that is free from 8765 on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tried = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED), 0]
    problem: OSError | None = None
    for each in tried:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, each))
            return listener
        except (OSError, OverflowError) as error:
            listener.close()
            problem = error if isinstance(error, OSError) else OSError(str(error))
    reason = problem.strerror if problem is not None and problem.strerror else str(problem)
    place = host if port is None else f"{host}:{port}"
    raise WhetError(f"{place}: whet dash cannot listen there ({reason}). Give another one: --host ADDRESS --port PORT")


def address(listener: socket.socket, access: Access) -> str:
    """What to open in a browser. A random token is a part of it; the user knows their own."""
    port = listener.getsockname()[1]
    host = socket.gethostname() if access.host in ("0.0.0.0", "::") else access.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    is_own = access.token is not None and access.token == os.environ.get(TOKEN_VARIABLE)
    return url if access.token is None or is_own else f"{url}?token={access.token}"


def serve(root: Path, listener: socket.socket, access: Access, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. Nothing is logged: addresses may hold the token."""
    config = uvicorn.Config(
        create_app(root, access), log_config=None, access_log=False, server_header=False, date_header=False,
        timeout_graceful_shutdown=1, timeout_keep_alive=30, limit_concurrency=1000, ws="none",
        h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
    _Server(config, lambda: on_ready(address(listener, access))).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()
