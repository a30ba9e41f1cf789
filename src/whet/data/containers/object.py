"""A file that is one JSON object: a single record, or a list of records under one of its keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.data.containers.base import Container, Raw, Ready
from whet.data.containers.streams import content_size, open_bytes

_LARGEST = 2**30
_OF_A_MESSAGE = {"role", "from"}


class JsonObject(Container):
    """It is read whole, so it may not be huge; lines and arrays stream."""

    kind = "object"

    def __init__(self, name: str, path: Path, split: str | None = None) -> None:
        super().__init__(name, path)
        self._split = split
        self._records()  # so that a fault, and the decision, come before any work

    def records(self) -> Iterator[Raw]:
        for number, record in enumerate(self._records(), 1):
            yield Raw(number, Ready(record), self.name)

    def count(self) -> int:
        return len(self._records())

    def size(self) -> int:
        return content_size(self.path)

    def _records(self) -> list[Any]:
        whole = self._read()
        lists = {key: value for key, value in whole.items() if _is_list_of_records(value)}
        if self._split is not None:
            if self._split not in lists:
                known = ", ".join(lists) or "none"
                raise WhetError(f"data.sources: {self.name}: no list of records is called {self._split!r} ({known})")
            lists = {self._split: lists[self._split]}
        if not lists:
            return [whole]
        if len(lists) > 1:
            raise WhetError(
                f"data.sources: {self.name}: several of its keys hold lists of records ({', '.join(lists)}): "
                "name one of them by split"
            )
        [(key, records)] = lists.items()
        self.note = f"records under {key!r}"
        return list(records)

    def _read(self) -> dict[str, Any]:
        with open_bytes(self.path, self.name) as stream:
            raw = stream.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise WhetError(
                f"data.sources: {self.name}: a single JSON object of more than {_LARGEST >> 30} GiB cannot be read. "
                "Write one record on each line instead (.jsonl)"
            )
        try:
            whole = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise WhetError(
                f"data.sources: {self.name}: not valid JSON: {error}. If each line is a record of its own, name the "
                "file .jsonl"
            ) from None
        if not isinstance(whole, dict):
            raise WhetError(f"data.sources: {self.name}: this is neither a JSON object nor an array of records")
        return whole


def _is_list_of_records(value: Any) -> bool:
    """Not the messages of one conversation, which are objects in a list too."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) for item in value)
        and _OF_A_MESSAGE.isdisjoint(value[0])
    )
