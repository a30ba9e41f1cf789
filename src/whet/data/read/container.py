"""Containers: streams of undecoded records, and the (decompressed) byte streams below them."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from whet.core.errors import BadRecordError, WhetError
from whet.core.files import hash_file

# What every container gives: raw records that know their place and cost nothing until they are looked at.


class RawRecord(NamedTuple):
    """One record as it stands in its file. Workers skip those of others, so nothing is parsed yet."""

    line: int
    """Its line (in a table its row, in an array its element), from 1."""
    value: object
    """The bytes of a JSON value, or a Lazy."""
    file: str
    """The file, as the user would write it."""


class LazyRecord(Protocol):
    """A record that is made when it is asked for."""

    def decode(self) -> object:
        """The record as Python values; BadRecordError if there is none."""


class DecodedRecord(NamedTuple):
    """A record that had to be made anyway."""

    value: object

    def decode(self) -> object:
        return self.value


class UnreadableRecord(NamedTuple):
    """A place where a record should be and cannot be read."""

    reason: str
    explanation: str

    def decode(self) -> object:
        raise BadRecordError(self.reason, self.explanation)


class Container(ABC):
    """One file (or data set) with records."""

    kind: str
    """A word that, with the bytes, settles what is read; part of the fingerprint."""
    note = ""
    """What was decided about the file, if that needs saying."""

    def __init__(self, name: str, path: Path) -> None:
        """`name` is how the user writes it, `path` where it is."""
        self.name, self.path = name, path

    @abstractmethod
    def records(self) -> Iterator[RawRecord]:
        """All records, in order; a WhetError where the file is damaged, after the records before that place."""

    @abstractmethod
    def count(self) -> int:
        """How many records there are; an estimate where counting would mean reading everything."""

    def content_key(self) -> list[str]:
        """What distinguishes its content, whatever it is called."""
        return [self.kind, hash_file(self.path)]

    def size(self) -> int:
        """Bytes, uncompressed; an estimate where they are compressed."""
        return self.path.stat().st_size


# Byte streams of files, decompressed where they are compressed; damage is an error, never a shorter file.

_GZIP, _ZSTD = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_COMPRESSION_RATIO = 4  # text compresses about so well; only estimates use it
_SAMPLE_BYTES = 2**20


def detect_compression(path: Path) -> str | None:
    """gzip, zstd or None, by the first bytes: a name may lie."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(_GZIP):
        return "gzip"
    return "zstd" if head == _ZSTD else None


@contextlib.contextmanager
def open_bytes(path: Path, name: str) -> Iterator[IO[bytes]]:
    """The content of a file for reading, decompressed."""
    packed = detect_compression(path)
    try:
        with _OPENERS[packed](path) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged_file_error(name, error) from None
    except OSError as error:
        if packed is None or error.errno is not None:
            raise
        raise _damaged_file_error(name, error) from None


def _damaged_file_error(name: str, error: Exception) -> WhetError:
    return WhetError(
        f"data.sources: {name}: the compressed file is cut off or damaged ({error}). "
        "Copy or download it again; what it holds after this place would be lost"
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


def require_pyarrow(name: str) -> Any:
    """The module, or a WhetError that says how to get it."""
    try:
        import pyarrow
    except ImportError:
        raise WhetError(
            f"data.sources: {name}: reading this needs pyarrow, which is not installed: pip install 'whet[data]'"
        ) from None
    return pyarrow


def content_size(path: Path) -> int:
    """Bytes of the content; estimated where the file is compressed."""
    return path.stat().st_size * (1 if detect_compression(path) is None else _COMPRESSION_RATIO)


def estimate_count(path: Path, name: str, count: Callable[[bytes], int]) -> int:
    """How many records a file holds: `count` of a piece, scaled to the whole."""
    with open_bytes(path, name) as stream:
        head = stream.read(_SAMPLE_BYTES)
    if len(head) < _SAMPLE_BYTES:
        return count(head)
    return max(1, count(head)) * content_size(path) // _SAMPLE_BYTES
