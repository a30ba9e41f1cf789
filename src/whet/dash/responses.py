"""Answers of the page's routes: JSON, files, streams, and errors without secrets."""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.dash.runs_folder import NotFoundError
from whet.web.request_guard import CONTENT_SECURITY_POLICY

_POLICY = f"{CONTENT_SECURITY_POLICY}; require-trusted-types-for 'script'; trusted-types"
"""The page makes no HTML of text: a browser that knows trusted types forbids it."""
_HEADERS = {"content-security-policy": _POLICY}


def to_json(value: Any) -> bytes:
    """Compact JSON; lone surrogates, which JSON can name and UTF-8 cannot encode, become question marks, and numbers
    that are not finite, as in a damaged file, null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def json_response(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, _HEADERS, "application/json")


def file_response(content: bytes, media_type: str) -> Response:
    return Response(content, 200, _HEADERS, media_type)


def stream_response(parts: AsyncIterator[bytes], media_type: str) -> Response:
    return StreamingResponse(parts, 200, _HEADERS, media_type)


def lines_response(events: AsyncIterator[dict[str, Any]]) -> Response:
    """One JSON object a line, as they come."""

    async def lines() -> AsyncIterator[bytes]:
        async for event in events:
            yield to_json(event) + b"\n"

    return stream_response(lines(), "application/x-ndjson")


def require_page(csrf: str) -> Callable[[Request], None]:
    """Refuses a change without a header that only a page of this server can know and send."""

    def check(request: Request) -> None:
        if request.method == "GET":
            is_foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
            if is_foreign and request.url.path.startswith("/api/"):  # it could not read the answer, but cost time
                raise HTTPException(403, "requests from other sites are refused")
            return
        if not hmac.compare_digest(request.headers.get("x-whet-csrf", "").encode(), csrf.encode()):
            raise HTTPException(403, "the header x-whet-csrf is missing or belongs to another server: reload the page")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "the body must be application/json")

    return check


def add_error_handlers(app: FastAPI) -> None:
    """Errors as JSON, without secrets and without traces of the code."""

    @app.exception_handler(WhetError)
    def known(_: Request, error: WhetError) -> Response:
        return json_response({"error": mask_secrets(str(error))}, 404 if isinstance(error, NotFoundError) else 400)

    @app.exception_handler(HTTPException)
    def http(_: Request, error: HTTPException) -> Response:
        return json_response({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        named = "; ".join(f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()[:3])
        return json_response({"error": mask_secrets(named)}, 422)

    @app.exception_handler(Exception)
    def unexpected(_: Request, error: Exception) -> Response:
        text = f"{type(error).__name__}: a fault in whet dash; its terminal has the details"
        return json_response({"error": text}, 500)
