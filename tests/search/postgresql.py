"""A PostgreSQL of its own: Debian's programs, a data folder below /tmp, a free port, an unprivileged user."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_USER = "nobody"


def find_programs() -> Path | None:
    """The folder with initdb and postgres, which Debian keeps out of PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


@contextlib.contextmanager
def postgresql(programs: Path) -> Iterator[str]:
    """Start a server; yields the URL of an empty database."""
    folder = Path(tempfile.mkdtemp(prefix="whet-pg-", dir="/tmp"))
    as_user: dict[str, Any] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        shutil.chown(folder, _USER)
        as_user = {"user": _USER, "cwd": "/tmp"}
    options = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **as_user}
    subprocess.run([programs / "initdb", "-D", folder / "data", "-U", "whet", "-A", "trust", "--no-sync"], **options)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [programs / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-h", "127.0.0.1", "-F"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **as_user,
    )  # fmt: skip
    try:
        ask = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
        until = time.monotonic() + 60
        while subprocess.run(ask, check=False, stdout=subprocess.DEVNULL).returncode:
            assert server.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        yield f"postgresql://whet@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)  # at once: SIGTERM would wait for every client to disconnect
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
