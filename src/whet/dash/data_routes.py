"""Routes of the Data and Search tabs."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import FastAPI, Query
from starlette.responses import Response

from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.dash.conversations import RunData
from whet.dash.responses import json_response
from whet.dash.runs_folder import RunsFolder
from whet.dash.searches import describe_search, find_searches
from whet.dash.store_browser import browse, histograms, near_duplicates

RunName = Annotated[str, Query(alias="run", max_length=1000)]
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
            RunData(folders, run, use)
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
