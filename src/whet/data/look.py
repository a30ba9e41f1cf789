"""Looking at a source before it is read: a few records of its files tell the format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.containers.base import Container, Raw
from whet.data.containers.streams import open_bytes
from whet.data.containers.tables import Row, without_nulls
from whet.data.conversation import BadRecordError
from whet.data.decode import decode
from whet.data.detect import Choice, detect

_GOOD, _TRIED, _FILES = 20, 200, 20


def look(containers: Sequence[Container], source: Source) -> Choice:
    """The format, from the first good records and the first one of each of some further files."""
    sample = _good(itertools.chain.from_iterable(each.records() for each in containers), _GOOD)
    for each in containers[1:_FILES]:
        sample += _good(each.records(), 1)
    if not sample and source.format == "auto":
        _refuse_binary(containers[0])
    chosen = detect([record for record, _ in sample], [place for _, place in sample], source)
    notes = dict.fromkeys(f", {each.note}" for each in containers if each.note)
    return chosen._replace(said=chosen.said + "".join(notes))


def _good(records: Iterator[Raw], wanted: int) -> list[tuple[Any, str]]:
    """Records that can be read, each with its place."""
    found: list[tuple[Any, str]] = []
    for raw in itertools.islice(records, _TRIED):
        if len(found) == wanted:
            break
        try:
            found.append((_record(raw), f"{raw.file}:{raw.line}"))
        except (BadRecordError, RecursionError):
            continue
    return found


def _record(raw: Raw) -> Any:
    if isinstance(raw.value, bytes):
        return decode(raw.value)
    record = raw.value.record()  # type: ignore[attr-defined]
    return without_nulls(record) if isinstance(raw.value, Row) else record


def _refuse_binary(container: Container) -> None:
    """Not one record could be read, so say it once if the file as a whole is at fault."""
    with open_bytes(container.path, container.name) as stream:
        head = stream.read(4096)
    if b"\0" in head:
        what = "UTF-16; save it as UTF-8" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary data, no text"
        raise WhetError(
            f"data.sources: {container.name}: this is {what}. whet reads JSONL, JSON, CSV, Parquet, Arrow and .txt, "
            "by these suffixes, also as .gz and .zst"
        )
