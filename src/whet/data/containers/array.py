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
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_INSIDE = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)
_BETWEEN = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+", re.DOTALL)
"""What can be passed over: up to the next bracket or, between elements, comma. Strings are passed as a whole, so that
brackets in texts are never seen; one whose end is not in the buffer yet is stopped at."""
_QUOTE, _COMMA = b'",'


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
        passed = (_BETWEEN if depth == 1 else _INSIDE).match(buffer, place)
        place = passed.end() if passed else place
        if place == len(buffer) or buffer[place] == _QUOTE:
            more = stream.read(max(_CHUNK, len(buffer)))  # doubling: a huge text is not passed again and again
            if not more:
                raise WhetError(
                    f"data.sources: {name}: the JSON array ends in the middle, after {number} whole elements: the file "
                    "is cut off. Copy or download it again"
                )
            buffer, place, start = buffer[start:] + more, place - start, 0
            continue
        char = buffer[place]
        depth += (char in b"[{") - (char in b"]}")
        if depth == 0 or (depth == 1 and char == _COMMA):
            element = buffer[start:place].strip()
            start = place + 1
            if element or number or depth:
                number += 1
                yield element
        place += 1
    _nothing_more(buffer[place:], stream, name)


def _nothing_more(rest: bytes, stream: IO[bytes], name: str) -> None:
    while rest:
        if rest.strip():
            raise WhetError(
                f"data.sources: {name}: there is more after the end of the JSON array ({rest.strip()[:20]!r}). "
                "If each line is a record of its own, name the file .jsonl"
            )
        rest = stream.read(_CHUNK)
