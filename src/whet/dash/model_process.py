"""A process with models, started when the page needs one and ended when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Any

from whet.core.display import mask_secrets

_IDLE_S = 600.0
"""After that, a process that nobody uses gives its memory back."""
_INTERRUPT_S = 10.0
_MAX_LINE = 2**28


class ModelProcess:
    """`python -m whet.dash.model_worker`; one request at a time, the others wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def events(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a request. A caller that leaves early interrupts it."""
        async with self._lock:
            process = await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            is_done = False
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                while line := await process.stdout.readline():
                    event = json.loads(line)
                    is_done = "end" in event
                    if is_done:
                        return
                    yield event
                yield {"error": f"the process with the model ended: {self._error_report()}"}
            except (BrokenPipeError, ConnectionResetError):
                yield {"error": f"the process with the model ended: {self._error_report()}"}
            finally:
                if not is_done:
                    await asyncio.shield(self._interrupt(process))
                self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self.stop)

    async def _start(self) -> asyncio.subprocess.Process:
        if self._idle is not None:
            self._idle.cancel()
        if self._process is None or self._process.returncode is not None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process lives
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "whet.dash.model_worker", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=self._errors, limit=_MAX_LINE, start_new_session=True,
            )  # fmt: skip
        return self._process

    async def _interrupt(self, process: asyncio.subprocess.Process) -> None:
        """End the request; a process that does not listen is killed, and the next request starts another."""
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(_INTERRUPT_S):
                assert process.stdout is not None
                while line := await process.stdout.readline():
                    if "end" in json.loads(line):
                        return
        except (TimeoutError, ValueError):
            pass
        self.stop()

    def stop(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process = None

    async def close(self) -> None:
        """End the process, and wait for its end."""
        if self._idle is not None:
            self._idle.cancel()
        process = self._process
        self.stop()
        if process is not None:
            await process.wait()

    def _error_report(self) -> str:
        if self._errors is None:
            return "no message"
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
        return mask_secrets(lines[-1]) if lines else "no message"
