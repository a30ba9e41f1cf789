"""JSON lines: one record a line."""

from __future__ import annotations

from collections.abc import Iterator

from whet.data.containers.base import Container, Raw
from whet.data.containers.streams import compression, content_size, estimate_count, open_bytes

_CHUNK = 2**20


class JsonLines(Container):
    """Lines end at a newline byte alone: JSON text may hold every other line separator."""

    kind = "lines"

    def records(self) -> Iterator[Raw]:
        name = self.name
        with open_bytes(self.path, name) as stream:
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield Raw(number, line, name)

    def count(self) -> int:
        if compression(self.path):
            return estimate_count(self.path, self.name, count_lines)
        lines, last = 0, b""
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                lines, last = lines + chunk.count(b"\n"), chunk
        return lines + (not last.endswith(b"\n"))

    def size(self) -> int:
        return content_size(self.path)


def count_lines(text: bytes) -> int:
    """Lines, whether or not the last one ends."""
    return text.count(b"\n") + (not text.endswith(b"\n"))
