"""Byte streams of files, decompressed where they are compressed; damage is an error, never a shorter file."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from whet.core.errors import WhetError

_GZIP, _ZSTD = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_RATIO = 4  # text compresses about so well; only estimates use it
_SAMPLE = 2**20


def compression(path: Path) -> str | None:
    """gzip, zstd or None, by the first bytes: a name may lie."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(_GZIP):
        return "gzip"
    return "zstd" if head == _ZSTD else None


@contextlib.contextmanager
def open_bytes(path: Path, name: str) -> Iterator[IO[bytes]]:
    """The content of a file for reading, decompressed."""
    packed = compression(path)
    try:
        with _OPENERS[packed](path) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(name, error) from None
    except OSError as error:
        if packed is None or error.errno is not None:
            raise
        raise _damaged(name, error) from None


def _damaged(name: str, error: Exception) -> WhetError:
    return WhetError(
        f"data.sources: {name}: the compressed file is cut off or damaged ({error}). "
        "Copy or download it again; what it holds after this place would be lost"
    )


def _open_zstd(path: Path) -> IO[bytes]:
    pyarrow = need_pyarrow(str(path))
    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(stream, 2**16)


_OPENERS: dict[str | None, Callable[[Path], Any]] = {
    None: lambda path: path.open("rb", buffering=2**18),
    "gzip": gzip.GzipFile,
    "zstd": _open_zstd,
}


def need_pyarrow(name: str) -> Any:
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
    return path.stat().st_size * (1 if compression(path) is None else _RATIO)


def estimate_count(path: Path, name: str, count: Callable[[bytes], int]) -> int:
    """How many records a file holds: `count` of a piece, scaled to the whole."""
    with open_bytes(path, name) as stream:
        head = stream.read(_SAMPLE)
    if len(head) < _SAMPLE:
        return count(head)
    return max(1, count(head)) * content_size(path) // _SAMPLE
