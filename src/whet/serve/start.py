"""From loaded models to a running server."""

from __future__ import annotations

import socket
from collections.abc import Callable

from whet.core.console import warn
from whet.inference.generate import context_length
from whet.inference.kv_cache import probe_kv_cache
from whet.inference.online_engine import OnlineEngine
from whet.inference.serial_engine import SerialEngine
from whet.run.serve_models import LoadedModels
from whet.serve.app import make_app
from whet.serve.endpoints import ServedModel
from whet.serve.metrics import Metrics
from whet.serve.service import GenerationService, StepEngine
from whet.web.guard import App
from whet.web.server import WebServer

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
