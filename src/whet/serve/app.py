"""The web application: OpenAI's endpoints, health, metrics and the chat page; and how it starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from whet.core.console import warn
from whet.inference.generate import context_length
from whet.inference.kv_cache import probe_kv_cache
from whet.inference.online_engine import OnlineEngine, SerialEngine
from whet.run.models.load_models import LoadedModels
from whet.serve.endpoints import ENDPOINTS, Endpoint, ServedModel, server_sent_event
from whet.serve.requests import parse_request
from whet.serve.service import Generation, GenerationService, Metrics, StepEngine
from whet.web.request_guard import App, Event, Limits, Receive, Rejection, RequestGuard, Scope, Send
from whet.web.server import WebServer

_PAGE_FILES = {
    "/": ("whet.serve", "page.html", "text/html"),
    "/chat.js": ("whet.serve", "chat.js", "text/javascript"),
    "/chat.css": ("whet.serve", "chat.css", "text/css"),
    "/report.css": ("whet.report", "report.css", "text/css"),
}


def make_app(
    models: Sequence[ServedModel], service: GenerationService, metrics: Metrics, token: str | None,
    limits: Limits | None = None,
) -> App:  # fmt: skip
    """The application, behind its guard."""
    by_id = {served.id: served for served in models}

    @contextlib.asynccontextmanager
    async def run_engine(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(lifespan=run_engine, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.exception_handler(Rejection)
    async def rejected(_: Request, error: Rejection) -> Response:
        return Response(error.body(), error.status, error.headers, "application/json")

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        wrong = Rejection(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")
        return Response(wrong.body(), error.status_code, dict(error.headers or {}), "application/json")

    async def generate(request: Request) -> Response:
        handler, kind = ENDPOINTS[request.url.path]
        parsed = parse_request(kind, await request.body())
        served = by_id.get(parsed.model)
        if served is None:
            raise _unknown_model(parsed.model, by_id)
        service.require_room(parsed.n or 1)  # before any work
        endpoint = handler(served, parsed, service)
        await endpoint.prepare()
        return _GeneratedResponse(endpoint, service, metrics, bool(parsed.stream))

    for path in ENDPOINTS:
        app.post(path)(generate)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [served.as_dict() for served in models]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        if name not in by_id:
            raise _unknown_model(name, by_id)
        return by_id[name].as_dict()

    @app.get("/health")
    async def health() -> Response:
        status = 200 if service.is_alive else 503
        state = "ok" if status == 200 else "the engine has stopped"
        return Response(json.dumps({"status": state}), status, media_type="application/json")

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.as_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_page(request: Request) -> Response:
        package, name, kind = _PAGE_FILES[request.url.path]
        return Response(files(package).joinpath(name).read_bytes(), media_type=f"{kind}; charset=utf-8")

    for path in _PAGE_FILES:
        app.get(path)(show_page)
    return _count_responses(RequestGuard(app, token, limits or Limits()), metrics)


def _unknown_model(name: str, known: Iterable[str]) -> Rejection:
    return Rejection(404, f"model: no model {name[:100]!r} here; known: {', '.join(known)}", "model", "model_not_found")


class _GeneratedResponse(Response):
    """Generates while it is sent; a client that leaves cancels the generation."""

    def __init__(self, endpoint: Endpoint, service: GenerationService, metrics: Metrics, streams: bool) -> None:
        super().__init__()
        self._endpoint, self._service, self._metrics, self._streams = endpoint, service, metrics, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.generate(self._endpoint.sequences) as generation:
            sending = self._send_stream if self._streams else self._send_whole
            if not await _unless_disconnected(receive, sending(generation, send)):
                self._metrics.disconnected += 1

    async def _send_whole(self, generation: Generation, send: Send) -> None:
        content = json.dumps(await self._endpoint.result(generation), ensure_ascii=False).encode("utf-8", "replace")
        await Response(content, media_type="application/json")({"type": "http"}, _no_more, send)

    async def _send_stream(self, generation: Generation, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._endpoint.events(generation):
                await send({"type": "http.response.body", "body": server_sent_event(chunk), "more_body": True})
        except Rejection as failed:  # too late for a status
            await send({"type": "http.response.body", "body": b"data: " + failed.body() + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _no_more() -> Event:
    return {"type": "http.disconnect"}


async def _unless_disconnected(receive: Receive, work: Awaitable[None]) -> bool:
    """Await `work`, or until the client leaves; returns whether the work was done."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
            return True
        return False
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _count_responses(app: App, metrics: Metrics) -> App:
    known = {*ENDPOINTS, *_PAGE_FILES, "/v1/models", "/health", "/metrics"}

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def count(event: Event) -> None:
            if event["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in known else "other"
                metrics.responses[path, event["status"]] += 1
            await send(event)

        await app(scope, receive, count)

    return counted


# From loaded models to a running server.

GRACE_SECONDS = 30
_MAX_BATCH_CPU, _MAX_BATCH_GPU = 64, 256


def make_serving_app(loaded: LoadedModels, max_requests: int, token: str | None = None) -> App:
    """The web application for some models."""
    first, _ = next(iter(loaded.models.values()))
    is_cpu = next(first.model.parameters()).device.type == "cpu"
    metrics = Metrics()
    with first.context():
        layers = probe_kv_cache(first.model.eval(), context_length(first.model) or 1)
    engine: StepEngine
    if layers is None:
        warn(f"{first.name}: the KV cache does not support this model, so it answers one request at a time")
        engine = SerialEngine(first.model, loaded.adapters)
    else:
        batch = min(max_requests, _MAX_BATCH_CPU if is_cpu else _MAX_BATCH_GPU)
        engine = OnlineEngine(first.model, layers, batch, loaded.adapters)
    service = GenerationService(engine, max_requests, metrics)
    models = [
        ServedModel(name, model, adapter, has_logprobs=layers is not None)
        for name, (model, adapter) in loaded.models.items()
    ]
    return make_app(models, service, metrics, token)


def run_server(app: App, listener: socket.socket, on_start: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; requests in progress have GRACE_SECONDS to finish."""
    WebServer(app, GRACE_SECONDS, on_start).run(sockets=[listener])
