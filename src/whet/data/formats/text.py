"""The `text` and `marked` formats: {"text": "…"}, or the whole of a .txt file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from whet.data.conversation import Marked, Origin, Text
from whet.data.formats.pick import readings
from whet.data.formats.values import filled, need_field, need_object

FIELDS = {"text": ("text",)}
_MARKERS = re.compile(r"<\|(?:user|assistant|system|im_start|start_header_id)\|>|\[INST\]")


def recognise(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The name under which a record holds a text; none if it is of another format."""
    if isinstance(record, str):
        return [{"text": fields.get("text", "text")}]
    return [names for names in readings(record, FIELDS, ("text",), fields) if isinstance(record[names["text"]], str)]


def looks_marked(record: Any, name: str) -> bool:
    """Whether turns stand in the text, so that learning all of it may not be what is meant."""
    text = record.get(name) if isinstance(record, dict) else record
    return isinstance(text, str) and _MARKERS.search(text) is not None


def parse(record: Any, names: Mapping[str, str], origin: Origin) -> Text:
    """A plain document: every token is learned."""
    return Text(_text(record, names["text"]), origin)


def parse_marked(record: Any, names: Mapping[str, str], origin: Origin) -> Marked:
    """Text whose markers are read when it is rendered (data.markers)."""
    return Marked(_text(record, names["text"]), origin)


def _text(record: Any, name: str) -> str:
    if isinstance(record, str):
        return filled(record, "the text")
    return filled(need_field(need_object(record, '{"text": "…"}'), name), f"'{name}'")
