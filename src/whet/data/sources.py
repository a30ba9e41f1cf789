"""Reading sources: each record becomes a conversation or a document, or a reason why it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from whet.core.errors import WhetError
from whet.data import generated
from whet.data.config import Source
from whet.data.containers.base import Container, Raw
from whet.data.containers.locate import locate
from whet.data.containers.tables import Row, without_nulls
from whet.data.conversation import BadLine, BadRecordError, Item, LeftOut, Marked, Origin, Text, Tokens
from whet.data.decode import decode
from whet.data.formats.known import parser
from whet.data.generated import BUILTIN_SAMPLES, Generated
from whet.data.look import look
from whet.data.mask_rules import explain
from whet.data.where import Where

_READ = {"format", "fields", "split", "subset", "start", "stop", "step", "max_samples", "where", "calculator", "mask"}
"""Options that change what is read."""


class Reader:
    """A source that was opened and whose format is known. Any number of them may read the same source."""

    def __init__(self, source: Source) -> None:
        """A WhetError if there is nothing to read, or if it is unclear what it means."""
        self.source = source
        self._where = Where(source.where) if source.where is not None else None
        self._containers = _containers(source)
        self.decision: str | None = None
        """What was found, in a line to print; None where there was nothing to find."""
        self._names: Mapping[str, str] = {}
        self._parse: Any
        if source.is_generated:
            self._parse = generated.parse
        elif _are_tokens(self._containers, source):
            self._parse = _tokens
            self.decision = f"{source.path}: {explain(source.mask)}"
        else:
            chosen = look(self._containers, source)
            if source.calculator == "calls" and chosen.format != "gsm8k":
                raise WhetError(
                    f"data.sources: {source.path}: calculator: calls is for gsm8k and builtin:arithmetic; this is "
                    f"{chosen.format}, whose tool calls are what the records say"
                )
            self._names, self._parse = chosen.names, parser(chosen.format, source.calculator)
            self.decision = f"{source.path}: {chosen.said}"

    def records(self) -> Iterator[Raw]:
        """The records that are asked for, as they stand in their files."""
        return _sliced(itertools.chain.from_iterable(each.records() for each in self._containers), self.source)

    def parse(self, raw: Raw) -> Item:
        """What becomes of a record. Bad content is an answer, too, never an exception."""
        origin, value = Origin(raw.file, raw.line), raw.value
        try:
            if type(value) is bytes:
                return self._make(decode(value), origin)
            record = value.record()  # type: ignore[attr-defined]
            if type(value) is Row:
                return self._make(without_nulls(record), origin, record)
            return self._make(record, origin)
        except BadRecordError as error:
            return BadLine(origin, error.reason, str(error))
        except RecursionError:
            return BadLine(origin, "broken JSON", "it is nested too deeply to be read")

    def _make(self, record: Any, origin: Origin, row: Any = None) -> Item:
        """The item, unless the filter says no; that sees a table's row as it is, nulls and all."""
        where = self._where
        if where is None:
            return self._parse(record, self._names, origin)
        item = self._parse(record, self._names, origin) if where.counts else None
        if not where(record if row is None else row, *_counts(item)):
            return LeftOut(origin, "filter")
        return self._parse(record, self._names, origin) if item is None else item


def read_source(source: Source) -> Iterator[Item]:
    """What becomes of each record of a source, in order; nothing is skipped silently."""
    reader = Reader(source)
    return map(reader.parse, reader.records())


def fingerprint(source: Source) -> dict[str, object]:
    """What identifies the content: files by their bytes, generators by their first answers; and what is read of it."""
    options = source.model_dump(mode="json", include=_READ, exclude_none=True)
    if source.is_generated:
        samples = itertools.islice(Generated(source).records(), 9)
        return {**options, "path": source.path, "start": [repr(raw.value) for raw in samples]}
    return {**options, "content": [each.identity() for each in _containers(source)]}


def size_of(source: Source) -> int:
    """Bytes of the content; for a generator an estimate from its first conversations."""
    if source.is_generated:
        first = (raw.value for raw in itertools.islice(Generated(source).records(), 9))
        largest = max(_counts(value.record())[1] for value in first)  # type: ignore[attr-defined]
        return expected(source) * largest
    return sum(each.size() for each in _containers(source))


def expected(source: Source) -> int:
    """How many records there will be, for the progress bar."""
    if source.is_generated:
        return len([*_sliced(itertools.count(), source)])
    total = sum(each.count() for each in _containers(source))
    chosen = len(range(total)[source.start : source.stop : source.step])
    return min(chosen, source.max_samples or chosen)


def _containers(source: Source) -> list[Container]:
    return [Generated(source)] if source.is_generated else locate(source)


def _sliced(records: Iterator[Any], source: Source) -> Iterator[Any]:
    """start, stop and step as Python's slices have them, then max_samples."""
    bound = source.max_samples
    if source.is_generated and bound is None and source.stop is None:
        bound = BUILTIN_SAMPLES
    return itertools.islice(itertools.islice(records, source.start, source.stop, source.step), bound)


def _are_tokens(containers: list[Container], source: Source) -> bool:
    kinds = {each.kind for each in containers}
    if "tokens" not in kinds and source.format != "tokens":
        return False
    if kinds != {"tokens"} or source.format not in ("auto", "tokens"):
        raise WhetError(f"data.sources: {source.path}: format: tokens is for .bin files, and for them alone")
    if source.where is not None or source.fields is not None:
        raise WhetError(f"data.sources: {source.path}: a .bin file has no fields, so where and fields mean nothing")
    return True


def _tokens(document: Tokens, _names: Mapping[str, str], origin: Origin) -> Tokens:
    return Tokens(document.ids, document.loss, origin)


def _counts(item: Any) -> tuple[int, int]:
    """Turns and characters."""
    if isinstance(item, (Text, Marked)):
        return 1, len(item.text)
    if item is None:
        return 0, 0
    return len(item.messages), sum(len(message.content) for message in item.messages)
