"""A JSON array, split into its elements without parsing them and without holding more than one."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import IO

from whet.core.errors import WhetError
from whet.data.containers.base import Container, Raw
from whet.data.containers.streams import content_size, estimate_count, open_bytes

_CHUNK = 2**18
_BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[\[\]{}]', re.DOTALL)
_TOP = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[\[\]{},]', re.DOTALL)
"""A string (its group is empty where the buffer ends within it), a bracket and, between elements, a comma. Since a
string is one token, brackets inside texts are never seen."""


class JsonArray(Container):
    """A file `[…, …]`; each element is a record."""

    kind = "array"

    def records(self) -> Iterator[Raw]:
        with open_bytes(self.path, self.name) as stream:
            for number, element in enumerate(elements(stream, self.name), 1):
                yield Raw(number, element, self.name)

    def count(self) -> int:
        return estimate_count(self.path, self.name, _count)

    def size(self) -> int:
        return content_size(self.path)


def _count(head: bytes) -> int:
    number = 0
    try:
        for _ in elements(io.BytesIO(head), ""):
            number += 1
    except WhetError:  # of a piece the end is missing
        pass
    return number


def elements(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """The bytes of each element. What is wrong inside an element is found when that is parsed."""
    buffer = stream.read(_CHUNK).removeprefix(_BOM).lstrip()
    assert buffer.startswith(b"["), "only arrays come here"
    place, start, depth, number = 1, 1, 1, 0
    while depth:
        token = (_TOP if depth == 1 else _TOKEN).search(buffer, place)
        if token is None or token.group(1) == b"":
            place = token.start() - start if token else len(buffer) - start
            more = stream.read(max(_CHUNK, len(buffer)))  # doubling: a huge element is not scanned again and again
            if not more:
                raise WhetError(
                    f"data.sources: {name}: the JSON array ends in the middle, after {number} whole elements: the file "
                    "is cut off. Copy or download it again"
                )
            buffer, start = buffer[start:] + more, 0
            continue
        place = token.end()
        char = buffer[token.start()]
        if char in b"[{":
            depth += 1
        elif char in b"]}":
            depth -= 1
        if (depth == 1 and char == _COMMA) or depth == 0:
            element = buffer[start : token.start()].strip()
            start = place
            if element or number or depth:
                number += 1
                yield element
    _nothing_more(buffer[place:], stream, name)


_COMMA = ord(",")


def _nothing_more(rest: bytes, stream: IO[bytes], name: str) -> None:
    while rest:
        if rest.strip():
            raise WhetError(
                f"data.sources: {name}: there is more after the end of the JSON array ({rest.strip()[:20]!r}). "
                "If each line is a record of its own, name the file .jsonl"
            )
        rest = stream.read(_CHUNK)
