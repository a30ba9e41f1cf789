"""The routes of the page. Each is a few lines: it checks what the request names, and calls the package that knows."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import AsyncIterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query
from starlette.responses import Response

import whet
from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.run_folder import parse_run_reference
from whet.dash.actions import resume, stop
from whet.dash.conversations import RunStore, conversations_of_step, loss_histories, one_document
from whet.dash.curves import AxisName, MetricsFile, read_curves
from whet.dash.live import Feeds, TooManyClientsError, poll_list, poll_run
from whet.dash.model_routes import ModelProcess, RunBody, add_model_routes
from whet.dash.responses import add_error_handlers, file_response, json_response, require_page, stream_response
from whet.dash.run_details import describe_run, ledger_lines, log_tail, summary_json
from whet.dash.runs_folder import NotFoundError, RunsFolder
from whet.dash.searches import describe_search, find_searches
from whet.dash.store_browser import browse, histograms, near_duplicates
from whet.evaluation.training_losses import LossPattern
from whet.registry.registry import Registry
from whet.report.charts import smoothing_beta
from whet.report.run_view import RunView
from whet.runs.compare import ComparedRun, compare_runs
from whet.runs.text import format_difference
from whet.web.request_guard import Limits

RunName = Annotated[str, Query(alias="run", max_length=1000)]
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

LIMITS = Limits(body_bytes=2**18)
_LIST_S = 0.3
_MAX_ANSWERS = 16
_MAX_FILES = 64
"""Runs whose metrics are kept in memory."""


class MetricsFiles:
    """The metrics of the runs that were looked at last."""

    def __init__(self) -> None:
        self._files: dict[Path, MetricsFile] = {}
        self._lock = threading.Lock()

    def get(self, folder: Path) -> MetricsFile:
        with self._lock:
            file = self._files.pop(folder, None) or MetricsFile(folder / "metrics.jsonl")
            self._files[folder] = file
            while len(self._files) > _MAX_FILES:
                del self._files[next(iter(self._files))]
            return file


def create_app(root: Path, feeds: Feeds) -> FastAPI:
    """The application that shows the runs in a folder; `whet.web.request_guard` decides who may send it requests."""
    csrf = secrets.token_urlsafe(24)
    processes = ModelProcess(), ModelProcess()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for process in processes:
            await process.close()

    app = FastAPI(
        openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan, dependencies=[Depends(require_page(csrf))]
    )
    folders, metrics = RunsFolder(root), MetricsFiles()
    add_error_handlers(app)

    @app.get("/api/session")
    def session() -> Response:
        return json_response({"csrf": csrf, "root": _short_path(folders.root), "version": whet.__version__})

    @app.get("/api/runs")
    def runs() -> Response:
        found = folders.summaries(_LIST_S)  # what is missing comes as a live event
        return json_response({"runs": [summary_json(run) for run in found], "models": registered_models()})

    @app.get("/api/run")
    def run(name: RunName) -> Response:
        file = metrics.get(folders.find(name))
        with file.lock:
            file.refresh(0.5)
            return json_response(describe_run(folders, name, file))

    @app.get("/api/run/curves")
    def curves(
        name: RunName,
        x: AxisName = "step",
        low: float | None = None,
        high: float | None = None,
        points: Annotated[int, Query(ge=10, le=20_000)] = 1000,
        smoothing: Annotated[float | None, Query(ge=0, le=0.999)] = None,
    ) -> Response:
        file = metrics.get(folders.find(name))
        with file.lock:
            is_complete = file.refresh(0.5)
            query = (x, low, high, points, smoothing)
            if (kept := file.answers.get(query)) is not None:
                return json_response(kept)
            beta = smoothing_beta(file.steps.rows) if smoothing is None else smoothing
            charts = read_curves(file, x, low, high, points, beta)
            answer = {"charts": charts, "complete": is_complete, "rows": file.steps.rows, "smoothing": beta}
            if len(file.answers) < _MAX_ANSWERS:
                file.answers[query] = answer
            return json_response(answer)

    @app.get("/api/run/ledger")
    def ledger(
        name: RunName,
        outcome: Annotated[str | None, Query(max_length=50)] = None,
        reason: Annotated[str | None, Query(max_length=500)] = None,
        start: Annotated[int, Query(ge=0, le=10**9)] = 0,
    ) -> Response:
        return json_response(ledger_lines(folders.find(name), outcome, reason, start))

    @app.get("/api/run/step")
    def step(name: RunName, step: Annotated[int, Query(ge=0, le=2**53)]) -> Response:
        return json_response(conversations_of_step(folders, folders.find(name), step))

    @app.get("/api/run/losses")
    def losses(
        name: RunName,
        pattern: LossPattern | None = None,
        sort: Annotated[str, Query(max_length=20)] = "last",
        ascending: bool = False,
        start: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> Response:
        return json_response(loss_histories(folders, folders.find(name), pattern, sort, ascending, start, limit))

    @app.get("/api/run/conversation")
    def conversation(
        name: RunName, document: Annotated[int, Query(ge=0, le=2**53)], use: Literal["train", "validation"] = "train"
    ) -> Response:
        return json_response(one_document(folders, folders.find(name), use, document))

    @app.get("/api/run/log")
    def log(name: RunName, rank: Annotated[int, Query(ge=0, le=10**6)] = 0) -> Response:
        file = folders.require_inside(folders.find(name) / "logs" / f"rank-{rank}.log")
        if not file.is_file():
            raise NotFoundError(f"{name}: there is no log of rank {rank}")
        lines, end = log_tail(file, None)
        return json_response({"lines": lines, "end": end})

    @app.get("/api/compare")
    def compare_runs(run: Annotated[list[str], Query(max_length=20)]) -> Response:
        return json_response(compare(folders, run))

    @app.post("/api/run/stop")
    def stop_run(body: RunBody) -> Response:
        return json_response(stop(folders.summary(body.run)))

    @app.post("/api/run/resume")
    def resume_run(body: RunBody) -> Response:
        return json_response(resume(folders.summary(body.run)))

    @app.get("/api/live")
    async def live(
        name: Annotated[str | None, Query(alias="run", max_length=1000)] = None,
        rank: Annotated[int, Query(ge=0, le=10**6)] = 0,
    ) -> Response:
        if name is None:
            events = feeds.events(("",), lambda: poll_list(folders))
        else:
            file = metrics.get(folders.find(name))
            events = feeds.events((name, str(rank)), lambda: poll_run(folders, name, file, rank))
        return await _stream(events)

    add_data_routes(app, folders)
    add_model_routes(app, folders, *processes)

    @app.get("/")
    def page() -> Response:
        return _static("index.html")

    @app.get("/static/{path:path}")
    def static(path: str) -> Response:
        return _static(path)

    return app


async def _stream(events: AsyncIterator[bytes]) -> Response:
    """A stream of events, after its first one: an error before it is an answer of its own."""
    try:
        first = await anext(events)
    except TooManyClientsError:
        return json_response({"error": "too many pages are open"}, 503)

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for event in events:
            yield event

    return stream_response(body(), "text/event-stream")


@lru_cache
def _assets() -> dict[str, tuple[bytes, str]]:
    """The page's own files by path. Nothing else can be requested."""
    found = {"report.css": (files("whet.report").joinpath("report.css").read_bytes(), _TYPES[".css"])}
    root = Path(str(files("whet.dash").joinpath("static")))
    for file in root.rglob("*"):
        if file.suffix in _TYPES:
            found[str(file.relative_to(root))] = (file.read_bytes(), _TYPES[file.suffix])
    return found


def _static(path: str) -> Response:
    asset = _assets().get(path)
    if asset is None:
        return json_response({"error": "no such file"}, 404)
    return file_response(*asset)


def _short_path(path: Path) -> str:
    """With ~ for the user's folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path != home and path.is_relative_to(home) else str(path)


# Runs side by side, as `whet runs compare` shows them.

MAX_RUNS = 12


def compare(folders: RunsFolder, references: list[str]) -> dict[str, Any]:
    """Settings that differ, final metrics, and paired differences from the first run. NAME@best and NAME@STEP work."""
    if not 2 <= len(references) <= MAX_RUNS:
        raise WhetError(f"compare needs 2 to {MAX_RUNS} runs, not {len(references)}")
    runs = [_compared(folders, reference) for reference in references]
    result = compare_runs(runs)
    settings = {key: [_masked(value) for value in values] for key, values in result["settings"].items()}
    sentences = [mask_secrets(format_difference(found)) for found in result["paired"]]
    return {**result, "settings": settings, "sentences": sentences}


def _compared(folders: RunsFolder, reference: str) -> ComparedRun:
    path, which = parse_run_reference(reference) if "@" in reference else (reference, "latest")
    name = str(path)
    folder = folders.find(name)
    return ComparedRun(reference, RunView.read(folder), folders.summary(name).state.name, which)


def _masked(value: Any) -> Any:
    return mask_secrets(value) if isinstance(value, str) else value


# The registry of models, for the list of runs.

_MAX_MODELS = 200


def registered_models() -> list[dict[str, Any]]:
    """Each model with its newest version, its aliases, and the run that trained it."""
    registry, found = Registry(), list[dict[str, Any]]()
    try:
        names = registry.names()[:_MAX_MODELS]
    except WhetError as error:
        return [{"problem": mask_secrets(str(error))}]
    for name in names:
        try:
            versions, aliases = registry.versions(name), registry.aliases(name)
            newest = registry.version(name, versions[-1])
        except WhetError as error:
            found.append({"name": name, "problem": mask_secrets(str(error))})
            continue
        found.append({
            "name": name, "versions": len(versions), "newest": newest.number, "aliases": aliases, "kind": newest.kind,
            "run": newest.run, "step": newest.step, "time": newest.time, "user": newest.user,
        })  # fmt: skip
    return found


# Routes of the Data and Search tabs.

Use = Literal["train", "validation"]


def add_data_routes(app: FastAPI, folders: RunsFolder) -> None:
    """What runs were trained on, and searches."""

    @app.get("/api/data")
    def documents(
        name: RunName,
        use: Use = "train",
        start: Annotated[int, Query(ge=0, le=2**53)] = 0,
        query: Annotated[str, Query(max_length=500)] = "",
    ) -> Response:
        return json_response(browse(folders, folders.find(name), use, start, query))

    @app.get("/api/data/histograms")
    def distributions(name: RunName, use: Use = "train") -> Response:
        return json_response(histograms(folders, folders.find(name), use))

    @app.get("/api/data/problem")
    def problem(name: RunName, use: Use = "train") -> Response:
        """Why the data of a run cannot be shown, before the page asks for it; null if it can."""
        run, found = folders.find(name), None
        try:
            RunStore(folders, run, use)
        except WhetError as error:
            found = mask_secrets(str(error))
        return json_response({"problem": found})

    @app.get("/api/data/duplicates")
    def duplicates(name: RunName, use: Use = "train") -> Response:
        return json_response(near_duplicates(folders, folders.find(name), use))

    @app.get("/api/searches")
    def searches() -> Response:
        return json_response({"searches": find_searches(folders)})

    @app.get("/api/search")
    def search(name: Annotated[str, Query(max_length=1000)]) -> Response:
        return json_response(describe_search(folders, name))
