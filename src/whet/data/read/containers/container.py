"""Containers: streams of undecoded records, and the (decompressed) byte streams below them."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from whet.core.errors import BadRecordError, WhetError
from whet.core.files import hash_file

# Records. Every worker iterates over all records and decodes only its own, so a raw record must cost next to nothing.


class LazyRecord(Protocol):
    """A record that is decoded on demand."""

    def decode(self) -> Any:
        """The record as Python values; raises BadRecordError if it is unreadable."""


class RawRecord(NamedTuple):
    """One undecoded record and its place."""

    line: int
    """Its line (in a table its row, in an array its element), counted from 1."""
    value: bytes | LazyRecord
    """The bytes of a JSON value, or an object that decodes itself."""
    file: str
    """The file, spelled as the user spelled it."""

    def decode(self) -> Any:
        """The record as Python values; raises BadRecordError if it is unreadable."""
        return decode_json(self.value) if isinstance(self.value, bytes) else self.value.decode()


class DecodedRecord(NamedTuple):
    """A record whose container had to decode it anyway."""

    value: object

    def decode(self) -> Any:
        return self.value


class UnreadableRecord(NamedTuple):
    """A record that its container cannot read."""

    reason: str
    explanation: str

    def decode(self) -> Any:
        raise BadRecordError(self.reason, self.explanation)


def _reject_constant(name: str) -> Any:
    raise BadRecordError("broken JSON", f"{name} is not JSON; write null or a number")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, for `object_pairs_hook`: json.loads keeps the last of several values of a key. Takes 3 µs a record."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key in found if sum(key == each for each, _ in pairs) > 1)
        raise BadRecordError("broken JSON", f"an object has the key {twice!r} twice; remove one of them")
    return found


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=unique_keys)
_scan_once = _DECODER.scan_once  # type: ignore[attr-defined]  # JSONDecoder.decode without its regex for white space


def decode_json(raw: bytes) -> Any:
    """The value, or a BadRecordError with the column of the error."""
    try:
        text = raw.decode().strip()
        value, end = _scan_once(text, 0)
        if end == len(text):
            return value
    except (ValueError, StopIteration, RecursionError):
        pass
    return _decode_or_explain(raw)


def _decode_or_explain(raw: bytes) -> Any:
    try:
        return _DECODER.decode(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRecordError("not UTF-8", f"byte {error.start} is not valid UTF-8; {SAVE_AS_UTF8}") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise BadRecordError("broken JSON", f"not valid JSON: {reason}{json_hint(error)}") from None
    except RecursionError:
        raise BadRecordError("broken JSON", "the JSON is nested too deeply") from None
    except ValueError as error:
        raise BadRecordError("broken JSON", f"not readable as JSON: {error}") from None


SAVE_AS_UTF8 = (
    "save the file as UTF-8 (it is probably Windows-1252 or Latin-1: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW)"
)
_PYTHON_CONSTANTS = ("None", "True", "False")


def json_hint(error: json.JSONDecodeError) -> str:
    """What to do about a common mistake in JSON, as the rest of a sentence; empty for any other."""
    text, rest, before = error.doc.strip(), error.doc[error.pos :].lstrip(), error.doc[: error.pos].rstrip()
    if not text:
        return ". There is nothing between two commas, or after the last one: remove a comma"
    if text in ("[", "[{", "{"):
        return (
            ". If the file is one JSON array or object over several lines, name it .json; if it has several objects, "
            "write each into one line: jq -c . OLD > NEW.jsonl"
        )
    if text.startswith(("//", "#", "/*")):
        return ". JSON has no comments: remove the line"
    if text.startswith(("<<<<<<<", "=======", ">>>>>>>")):
        return ". It is a marker of a merge conflict: remove the line, and one of the two versions around it"
    if before.endswith(",") and rest[:1] in ("}", "]"):
        return f". Remove the comma before {rest[0]}"
    if error.msg == "Extra data" and rest.strip() == ",":
        return ". Remove the comma after the record; if the file is one JSON array, name it .json"
    if error.msg == "Extra data" and rest[:1] in ("{", "["):
        return ". Another record follows: write one record a line (.jsonl): jq -c . OLD > NEW.jsonl"
    if rest.startswith(_PYTHON_CONSTANTS) or rest[:1] == "'":
        return ". This is Python, not JSON: write it with json.dumps, which uses double quotes, null, true and false"
    if rest[:1] in ("“", "”", "„", "‘", "’"):
        return '. Use straight double quotes: "'
    if error.msg.startswith("Invalid control character") and rest:
        return ". A line break or tab inside a string must be written \\n or \\t"
    if not rest or error.msg.startswith("Unterminated string"):
        return ". The record ends too early: the file is truncated, or a line break cuts the record in two"
    return ""


class SeveralSplitsError(WhetError):
    """A dataset has several splits, and the source names none of them."""

    def __init__(self, message: str, splits: Iterable[str]) -> None:
        super().__init__(message)
        self.splits = tuple(splits)


SPLIT_WORDS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip
"""How files, folders and fields name splits."""


def choose_split(place: str, splits: Sequence[str], split: str | None) -> str:
    """The split that a source names, or the only one."""
    known = f"set split to one of: {', '.join(splits)}"
    if split and split not in splits:
        raise WhetError(f"data.sources: {place}: there is no split {split!r}; {known}")
    if not split and len(splits) != 1:
        raise SeveralSplitsError(f"data.sources: {place}: there is more than one split; {known}", splits)
    return split or splits[0]


class Container(ABC):
    """One file or dataset of records."""

    kind: str
    """The type of the container. Part of the fingerprint of a source, so these strings never change."""
    note = ""
    """What was detected about the file, if the user should know."""
    blank = 0
    """Empty lines or rows between the records that were read last. They are not records."""

    def __init__(self, name: str, path: Path) -> None:
        """`name` is the path as the user spelled it."""
        self.name, self.path = name, path

    @abstractmethod
    def records(self) -> Iterator[RawRecord]:
        """All records, in order. A corrupt file raises a WhetError after the last good record."""

    @abstractmethod
    def count(self) -> int:
        """The number of records; an estimate where the exact number would mean reading everything."""

    def content_key(self) -> list[str]:
        """Identifies the content, whatever the file is called."""
        return [self.kind, hash_file(self.path)]

    def size(self) -> int:
        """Uncompressed bytes; an estimate for compressed files."""
        return content_size(self.path)


# Byte streams. A truncated compressed file is an error, never a shorter file, and a small compressed file cannot fill
# the memory: a few KB may hold a line of gigabytes.

MAX_RECORD_BYTES = 2**26
"""Of a line, or of an element of an array: 64 MiB."""
_MAX_WHOLE_BYTES, _MAX_RATIO = 2**30, 100
"""Of a file that is read as a whole; text is compressed to a fifth, not to a hundredth."""

_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_COMPRESSION_RATIO = 4  # typical for text; used for estimates only
_SAMPLE_BYTES = 2**20
_TRANSCODED_BYTES = 2**16


def detect_compression(path: Path) -> str | None:
    """gzip, zstd or None, by the magic bytes: the name may be wrong."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    return "zstd" if head == _ZSTD_MAGIC else None


@contextlib.contextmanager
def open_bytes(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed if it is compressed, as UTF-8 if a byte order mark says that it is UTF-16
    or UTF-32."""
    compression = detect_compression(path)
    try:
        with _OPENERS[compression](path) as stream:
            encoding = _marked_encoding(stream.peek(4)[:4])
            yield stream if encoding is None else io.BufferedReader(_Transcoder(stream, encoding, name), 2**18)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged_file_error(name, error) from None
    except OSError as error:
        if compression is None or error.errno is not None:
            raise
        raise _damaged_file_error(name, error) from None


_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip


def _marked_encoding(head: bytes) -> str | None:
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if head.startswith(mark)), None)


def marked_encoding(path: Path) -> str | None:
    """UTF-16 or UTF-32, if the file begins with its byte order mark: what a spreadsheet saves as "Unicode text"."""
    try:
        with _OPENERS[detect_compression(path)](path) as stream:
            return _marked_encoding(stream.peek(4)[:4])
    except (EOFError, OSError, zlib.error, WhetError):
        return None  # a damaged file, which is reported when it is read


class _Transcoder(io.RawIOBase):
    """A UTF-16 or UTF-32 stream as UTF-8."""

    def __init__(self, stream: IO[bytes], encoding: str, name: str) -> None:
        self._stream, self._encoding, self._name = stream, encoding, name
        self._decoder, self._ready = codecs.getincrementaldecoder(encoding)(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = b"-"
        while not self._ready and block:
            block = self._stream.read(_TRANSCODED_BYTES)
            try:
                self._ready = self._decoder.decode(block, final=not block).encode()
            except UnicodeDecodeError as error:
                raise WhetError(
                    f"data.sources: {self._name}: not valid {self._encoding} ({error.reason}), though it begins with "
                    "its byte order mark. Save it as UTF-8"
                ) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def read_whole(path: Path, name: str, remedy: str) -> bytes:
    """The content of a file, decompressed; a WhetError with the remedy for one that is too large."""
    limit = _MAX_WHOLE_BYTES
    if detect_compression(path):
        limit = min(limit, max(MAX_RECORD_BYTES, _MAX_RATIO * path.stat().st_size))
    with open_bytes(path, name) as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        raise WhetError(f"data.sources: {name}: it has more than {limit >> 20:,} MiB, decompressed. {remedy}")
    return raw


def record_too_long(place: str) -> WhetError:
    """`place` is FILE:LINE, or the number of the element."""
    return WhetError(
        f"data.sources: {place}: longer than {MAX_RECORD_BYTES >> 20} MiB. Split it into several records; if a line is "
        "not a record in this file, give it the suffix of its format"
    )


def _damaged_file_error(name: str, error: Exception) -> WhetError:
    return WhetError(
        f"data.sources: {name}: the compressed file is truncated or corrupt ({error}). Copy or download it again"
    )


def _open_zstd(path: Path) -> IO[bytes]:
    pyarrow = require_pyarrow(str(path))
    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(stream, 2**16)


_OPENERS: dict[str | None, Callable[[Path], Any]] = {
    None: lambda path: path.open("rb", buffering=2**18),
    "gzip": gzip.GzipFile,
    "zstd": _open_zstd,
}


def content_size(path: Path) -> int:
    """Uncompressed bytes; estimated if the file is compressed."""
    return path.stat().st_size * (1 if detect_compression(path) is None else _COMPRESSION_RATIO)


def estimate_count(path: Path, name: str, count: Callable[[bytes], int]) -> int:
    """The number of records: `count` of the first MiB, scaled to the file."""
    with open_bytes(path, name) as stream:
        head = stream.read(_SAMPLE_BYTES)
    if len(head) < _SAMPLE_BYTES:
        return count(head)
    return max(1, count(head)) * content_size(path) // _SAMPLE_BYTES


def require_pyarrow(name: str) -> Any:
    """The module, or a WhetError with the command that installs it."""
    try:
        import pyarrow
    except ImportError:
        raise WhetError(
            f"data.sources: {name}: reading this file needs pyarrow, which is not installed: pip install 'whet[data]'"
        ) from None
    return pyarrow
