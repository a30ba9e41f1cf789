"""From the bytes of a JSON value to Python values, quickly where all is well and with a precise reason where not."""

from __future__ import annotations

import json
from typing import Any

from whet.data.conversation import BadRecordError


def _refuse_constant(name: str) -> Any:
    raise BadRecordError("broken JSON", f"{name} is not JSON; write null or a number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_scan = _DECODER.scan_once  # type: ignore[attr-defined]  # what decode() calls, without its search for white space


def decode(raw: bytes) -> Any:
    """The value, or a BadRecordError with the place within the line."""
    try:
        text = raw.decode().strip()
        value, end = _scan(text, 0)
        if end == len(text):
            return value
    except (ValueError, StopIteration, RecursionError):
        pass
    return _decode_slowly(raw)


def _decode_slowly(raw: bytes) -> Any:
    try:
        return _DECODER.decode(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRecordError("not UTF-8", f"byte {error.start} is not valid UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadRecordError(
            "broken JSON", f"not valid JSON: {error.msg} at column {error.colno}{_hint(raw)}"
        ) from None
    except RecursionError:
        raise BadRecordError("broken JSON", "JSON that is nested too deeply to be read") from None
    except ValueError as error:
        raise BadRecordError("broken JSON", f"JSON that cannot be read: {error}") from None


def _hint(raw: bytes) -> str:
    """The first line of an array that goes over many lines."""
    first = raw.removeprefix(b"\xef\xbb\xbf").strip()
    return ". If the file is one JSON array, name it .json" if first in (b"[", b"[{") else ""
