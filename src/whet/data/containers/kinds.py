"""Which container a file is: by its name, and by its first bytes where those know better."""

from __future__ import annotations

import json
from pathlib import Path

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.containers.array import JsonArray
from whet.data.containers.base import Container
from whet.data.containers.document import Document
from whet.data.containers.lines import JsonLines
from whet.data.containers.object import JsonObject
from whet.data.containers.sheets import Sheet
from whet.data.containers.streams import compression, open_bytes
from whet.data.containers.tables import Arrow, Parquet
from whet.data.containers.tokens import TokenRecords

_LINES, _JSON = (".jsonl", ".ndjson", ".jsonlines"), (".json",)
_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_SHEETS = {".csv": ",", ".tsv": "\t"}
_PACKED = (".gz", ".zst", ".zstd")
_LONGEST_LINE = 2**26
_BOM = b"\xef\xbb\xbf"

DATA_SUFFIXES = (*_LINES, *_JSON, *_PARQUET, *_ARROW, *_SHEETS, ".txt")
"""Files that are data wherever they are met; of a folder only these are read."""


def suffix_of(path: Path) -> str:
    """The suffix that tells the kind: `.jsonl` for chats.jsonl.gz."""
    packed = path.suffix.lower() in _PACKED
    return Path(path.stem if packed else path.name).suffix.lower()


def container_of(name: str, path: Path, source: Source) -> Container:
    """The container for a file that is there and not empty."""
    suffix = suffix_of(path)
    with path.open("rb") as file:
        head = file.read(6)
    if head.startswith(b"PAR1") or suffix in _PARQUET:
        return Parquet(name, _seekable(path, name))
    if head == b"ARROW1" or suffix in _ARROW:
        return Arrow(name, _seekable(path, name))
    if suffix == ".bin":
        return TokenRecords(name, path, source.mask)
    if suffix in _SHEETS:
        return Sheet(name, path, _SHEETS[suffix])
    if suffix == ".txt":
        return Document(name, path)
    if suffix in _JSON or name == "stdin":
        return _json(name, path, source.split)
    return JsonLines(name, path)


def _json(name: str, path: Path, split: str | None) -> Container:
    """An array, lines, or one object: its first line alone tells, if it is whole and something follows it."""
    with open_bytes(path, name) as stream:
        lines = iter(lambda: stream.readline(_LONGEST_LINE), b"")
        full = (line for line in lines if line.removeprefix(_BOM).strip())
        head = next(full, b"").removeprefix(_BOM).lstrip()
        more = next(full, None) is not None
    if more and _is_whole(head):
        return JsonLines(name, path)
    if head.startswith(b"["):
        return JsonArray(name, path)
    return JsonObject(name, path, split) if head.startswith(b"{") else JsonLines(name, path)


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _seekable(path: Path, name: str) -> Path:
    if compression(path):
        raise WhetError(
            f"data.sources: {name}: tables are compressed inside and cannot be read from a compressed file; unpack it"
        )
    return path
