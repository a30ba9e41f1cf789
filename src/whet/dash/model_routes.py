"""Routes that need a model: the loss of each token of a step, chat, feedback on an answer; and the process that has the
models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from whet.checkpoint.directory import list_steps
from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.yaml import read_yaml
from whet.dash.actions import write_feedback
from whet.dash.conversations import MAX_CONVERSATIONS, MAX_TOKENS, RunStore
from whet.dash.responses import json_response, lines_response
from whet.dash.runs_folder import NotFoundError, RunsFolder

Name = Annotated[str, Field(max_length=1000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RunBody(_Body):
    run: Name


class ReplayBody(RunBody):
    step: int = Field(ge=1, le=2**53)


class MessageBody(_Body):
    role: Literal["system", "user", "assistant"]
    content: str


class SamplingBody(_Body):
    """As `whet chat`."""

    temperature: float = Field(0.0, ge=0, le=100)
    top_k: int = Field(50, ge=0, le=10**6)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    seed: int = Field(0, ge=0, le=2**31)
    max_new_tokens: int = Field(256, ge=1, le=4096)


class ChatBody(RunBody):
    """`messages`: a conversation for each model, the tuned one first."""

    step: int | None = Field(None, ge=0, le=2**53)
    with_base: bool = True
    messages: list[list[MessageBody]] = Field(min_length=1, max_length=2)
    sampling: SamplingBody = SamplingBody()


class FeedbackBody(RunBody):
    step: int | None = None
    model: Literal["tuned", "base"]
    good: bool
    messages: list[MessageBody] = Field(min_length=2, max_length=200)


def add_model_routes(app: FastAPI, folders: RunsFolder, replaying: ModelProcess, chatting: ModelProcess) -> None:
    """Replay and chat have a process each: a question does not wait for the other's answer."""

    @app.post("/api/run/replay")
    def replay(body: ReplayBody) -> Response:
        folder = folders.find(body.run)
        RunStore(folders, folder)  # an error that needs no model is an answer at once
        request = {
            "do": "replay", "run": str(folder), "step": body.step, "tokens": MAX_TOKENS,
            "conversations": MAX_CONVERSATIONS,
        }  # fmt: skip
        return lines_response(replaying.events(request))

    @app.get("/api/chat/models")
    def models() -> Response:
        found = []
        for name in folders.names():
            steps = list_steps(folders.root / name / "checkpoints")
            if steps:
                found.append({"run": name, "steps": steps})
        return json_response({"runs": found})

    @app.post("/api/chat")
    def chat(body: ChatBody) -> Response:
        return lines_response(chatting.events(_chat_request(folders, body)))

    @app.post("/api/feedback")
    def feedback(body: FeedbackBody) -> Response:
        messages = [message.model_dump() for message in body.messages]
        file = write_feedback(folders.find(body.run), messages, body.good, body.model, body.step)
        return json_response({"file": str(file)})


def _chat_request(folders: RunsFolder, body: ChatBody) -> dict[str, Any]:
    """A request to the process with the models. It gets references that come from the run's folder alone."""
    folder = folders.find(body.run)
    steps = list_steps(folder / "checkpoints")
    if not steps:
        raise NotFoundError(f"{body.run}: it has no checkpoint yet, so there is nothing to talk to")
    if body.step is not None and body.step not in steps:
        raise NotFoundError(f"{body.run}: no checkpoint of step {body.step}. Use one of {', '.join(map(str, steps))}")
    references = [f"{folder}@{steps[-1] if body.step is None else body.step}"]
    if body.with_base:
        model: Any = read_yaml(folder / "config.yaml", expand="none").plain().get("model")
        base = model.get("path") if isinstance(model, dict) else None
        if not isinstance(base, str):
            raise WhetError(f"{body.run}: config.yaml has no model.path")
        references.append(base)
    if len(body.messages) != len(references):
        raise WhetError(f"messages: {len(references)} conversations are needed, one for each model")
    return {
        "do": "chat", "models": references, "sampling": body.sampling.model_dump(),
        "messages": [[message.model_dump() for message in each] for each in body.messages],
    }  # fmt: skip


# A process with models, started when the page needs one and ended when it does not.

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
