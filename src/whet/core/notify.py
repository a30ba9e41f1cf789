"""Messages about a run to the outside: a POST to a URL, or a shell command. They never stop the run: each is sent in a
thread of its own, for at most half a minute, and a failure is a warning."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from whet.core.console import warn
from whet.core.display import mask_secrets
from whet.core.errors import first_line

RunEvent = Literal["finished", "failed", "stalled"]
_TIMEOUT_S = 30.0


class Notifier:
    """Sends messages about one run to all of its targets (run.notify)."""

    def __init__(self, targets: Sequence[str], run: Path, timeout_s: float = _TIMEOUT_S) -> None:
        self._targets, self._run, self._timeout_s = targets, run, timeout_s
        self._threads: list[threading.Thread] = []

    def send(self, event: RunEvent, text: str, **details: Any) -> None:
        """Tell all targets, in the background. Chat services show `text` (Slack, Mattermost) or `content` (Discord)."""
        told = mask_secrets(f"{self._run.name} {event}: {text}")
        message = {
            "run": str(self._run), "event": event, "text": told, "content": told, "host": socket.gethostname(),
            "time": time.time(), **details,
        }  # fmt: skip
        for target in self._targets:
            thread = threading.Thread(target=self._send_one, args=(target, message), daemon=True, name="whet-notify")
            thread.start()
            self._threads.append(thread)

    def wait(self) -> None:
        """Until all messages are sent or have failed."""
        until = time.monotonic() + self._timeout_s + 5
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _send_one(self, target: str, message: dict[str, Any]) -> None:
        is_url = target.startswith(("http://", "https://"))
        # neither the address nor the command is shown: both often hold a secret
        name = f"the URL at {urlsplit(target).hostname}" if is_url else "the command"
        try:
            failure = self._post(target, message) if is_url else self._execute(target, message)
        except Exception as error:  # whatever it is, the run goes on
            failure = f"{type(error).__name__}: {first_line(error)}"
        if failure:
            warn(f"run.notify: cannot notify {name} that the run {message['event']} ({mask_secrets(failure)})")

    def _post(self, url: str, message: dict[str, Any]) -> str | None:
        body = json.dumps(message).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "whet"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):
                return None
        except urllib.error.HTTPError as error:
            return f"HTTP status {error.code}"
        except urllib.error.URLError as error:
            return str(error.reason)

    def _execute(self, command: str, message: dict[str, Any]) -> str | None:
        variables = {"WHET_RUN": message["run"], "WHET_EVENT": message["event"], "WHET_TEXT": message["text"]}
        process = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, **variables}, start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(json.dumps(message).encode(), timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it took longer than {self._timeout_s:.0f} s"
        tail = errors.decode(errors="replace").strip().splitlines()
        return f"exit code {process.returncode}{': ' + tail[-1] if tail else ''}" if process.returncode else None
