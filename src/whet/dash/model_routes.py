"""Routes that need a model: the loss of each token of a step, chat, and what a user thinks of an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from whet.checkpoint.directory import list_steps
from whet.core.errors import WhetError
from whet.core.yaml import read_yaml
from whet.dash.actions import write_feedback
from whet.dash.conversations import MAX_CONVERSATIONS, MAX_TOKENS, RunData
from whet.dash.model_process import ModelProcess
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
        RunData(folders, folder)  # an error that needs no model is an answer at once
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
    """What the process with the models is asked. It gets references that come from the run's folder alone."""
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
