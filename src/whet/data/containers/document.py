"""A .txt file: one document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whet.data.containers.base import Container, Raw
from whet.data.containers.streams import content_size, open_bytes
from whet.data.conversation import BadRecordError


class Document(Container):
    """The whole file is one record: lines of prose are no units. One document a line is JSON lines with `text`."""

    kind = "document"

    def records(self) -> Iterator[Raw]:
        yield Raw(1, _Content(self.path, self.name), self.name)

    def count(self) -> int:
        return 1

    def size(self) -> int:
        return content_size(self.path)


class _Content(NamedTuple):
    path: Path
    name: str

    def record(self) -> object:
        with open_bytes(self.path, self.name) as stream:
            raw = stream.read()
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadRecordError(
                "not UTF-8", f"byte {error.start} is not valid UTF-8; save the file as UTF-8"
            ) from None
