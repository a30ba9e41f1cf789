"""Read a source: each record becomes a conversation, a document, or a bad record with its reason."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.core.errors import BadRecordError, WhetError
from whet.data.builtin.arithmetic import generate_arithmetic
from whet.data.builtin.orders import generate_orders
from whet.data.builtin.spelling import generate_spelling, generate_spelling_bee
from whet.data.builtin.splits import SPLITS, GeneratedSample
from whet.data.config import Source
from whet.data.conversation import (
    BadRecord,
    Conversation,
    FilteredRecord,
    MarkedText,
    Message,
    Origin,
    ParsedRecord,
    PlainText,
    TokenizedDocument,
)
from whet.data.read.arrow_tables import TableRow, drop_nulls
from whet.data.read.container import Container, DecodedRecord, RawRecord
from whet.data.read.detection import detect_source_format
from whet.data.read.formats import parser_of
from whet.data.read.json_files import decode_json
from whet.data.read.locate import locate_containers
from whet.data.read.mask_rules import describe_mask_rules
from whet.data.read.record_filter import RecordFilter

# Sources that need no file: endless and reproducible, with two splits that never share a question.

DEFAULT_BUILTIN_SAMPLES = 1000
"""How many conversations a generator gives when neither max_samples nor stop is set."""


def _order_samples(split: str, _calculator: str) -> Iterator[GeneratedSample]:
    for prompt, answer in generate_orders(split):
        yield GeneratedSample((Message("user", prompt), Message("assistant", answer)))


BUILTIN_GENERATORS: dict[str, Callable[[str, str], Iterator[GeneratedSample]]] = {
    "builtin:orders": _order_samples,
    "builtin:spelling": generate_spelling,
    "builtin:spelling-bee": generate_spelling_bee,
    "builtin:arithmetic": generate_arithmetic,
}
"""By name; each takes the split and what becomes of sums (Source.calculator)."""


class GeneratedContainer(Container):
    """A generator, read like a file without an end."""

    kind = "generated"

    def __init__(self, source: Source) -> None:
        split = source.split or "train"
        if source.path not in BUILTIN_GENERATORS:
            raise WhetError(f"data.sources: there is no {source.path}; built in are: {', '.join(BUILTIN_GENERATORS)}")
        if split not in SPLITS:
            raise WhetError(f"data.sources: {source.path}: there is no split {split!r}; it has {' and '.join(SPLITS)}")
        for key in ("fields", "subset", "mask"):
            if getattr(source, key) is not None:
                raise WhetError(f"data.sources: {source.path}: {key} means nothing for a generator; remove it")
        if source.format != "auto":
            raise WhetError(f"data.sources: {source.path}: a generator has no format; remove it")
        super().__init__(f"{source.path}/{split}", Path(source.path))
        self._make, self._split, self._calculator = BUILTIN_GENERATORS[source.path], split, source.calculator

    def records(self) -> Iterator[RawRecord]:
        for number, sample in enumerate(self._make(self._split, self._calculator), 1):
            yield RawRecord(number, DecodedRecord(sample), self.name)

    def count(self) -> int:
        raise AssertionError("a generator has no end")

    def size(self) -> int:
        raise AssertionError("a generator has no end")


def _parse_generated(sample: Any, _names: Mapping[str, str], origin: Origin) -> Conversation:
    """A sample is a conversation already."""
    return Conversation(sample.messages, origin, sample.tools)


# Reading sources: each record becomes a conversation or a document, or a reason why it cannot.

_CONTENT_OPTIONS = {
    "format",
    "fields",
    "split",
    "subset",
    "start",
    "stop",
    "step",
    "max_samples",
    "where",
    "calculator",
    "mask",
}
"""Options that change what is read."""


class SourceReader:
    """A source that was opened and whose format is known. Any number of them may read the same source."""

    def __init__(self, source: Source) -> None:
        """A WhetError if there is nothing to read, or if it is unclear what it means."""
        self.source = source
        self._where = RecordFilter(source.where) if source.where is not None else None
        self._containers = _open_containers(source)
        self.description: str | None = None
        """What was found, in a line to print; None where there was nothing to find."""
        self._names: Mapping[str, str] = {}
        self._parse: Any
        if source.is_generated:
            self._parse = _parse_generated
        elif _is_pretokenized(self._containers, source):
            self._parse = _parse_tokenized
            self.description = f"{source.path}: {describe_mask_rules(source.mask)}"
        else:
            chosen = detect_source_format(self._containers, source)
            if source.calculator == "calls" and chosen.format != "gsm8k":
                raise WhetError(
                    f"data.sources: {source.path}: calculator: calls is for gsm8k and builtin:arithmetic; this is "
                    f"{chosen.format}, whose tool calls are what the records say"
                )
            self._names, self._parse = chosen.names, parser_of(chosen.format, source.calculator)
            self.description = f"{source.path}: {chosen.description}"

    def records(self) -> Iterator[RawRecord]:
        """The records that are asked for, as they stand in their files."""
        return _slice_records(itertools.chain.from_iterable(each.records() for each in self._containers), self.source)

    def parse(self, raw: RawRecord) -> ParsedRecord:
        """What becomes of a record. Bad content is an answer, too, never an exception."""
        origin, value = Origin(raw.file, raw.line), raw.value
        try:
            if type(value) is bytes:
                return self._parse_record(decode_json(value), origin)
            record = value.decode()  # type: ignore[attr-defined]
            if type(value) is TableRow:
                return self._parse_record(drop_nulls(record), origin, record)
            return self._parse_record(record, origin)
        except BadRecordError as error:
            return BadRecord(origin, error.reason, str(error))
        except RecursionError:
            return BadRecord(origin, "broken JSON", "it is nested too deeply to be read")

    def _parse_record(self, record: Any, origin: Origin, row: Any = None) -> ParsedRecord:
        """The item, unless the filter says no; that sees a table's row as it is, nulls and all."""
        where = self._where
        if where is None:
            return self._parse(record, self._names, origin)
        item = self._parse(record, self._names, origin) if where.needs_parsed_record else None
        if not where(record if row is None else row, *_turns_and_characters(item)):
            return FilteredRecord(origin, "filter")
        return self._parse(record, self._names, origin) if item is None else item


def read_source(source: Source) -> Iterator[ParsedRecord]:
    """What becomes of each record of a source, in order; nothing is skipped silently."""
    reader = SourceReader(source)
    return map(reader.parse, reader.records())


def source_fingerprint(source: Source) -> dict[str, object]:
    """What identifies the content: files by their bytes, generators by their first answers; and what is read of it."""
    options = source.model_dump(mode="json", include=_CONTENT_OPTIONS, exclude_none=True)
    if source.is_generated:
        samples = itertools.islice(GeneratedContainer(source).records(), 9)
        return {**options, "path": source.path, "start": [_sample_key(raw.value.decode()) for raw in samples]}  # type: ignore[attr-defined]
    return {**options, "content": [each.content_key() for each in _open_containers(source)]}


def _sample_key(sample: GeneratedSample) -> str:
    """A sample as text, for store keys. The wording is frozen: a change here would rebuild every store of builtin data."""
    messages = ", ".join(
        f"Message(role={m.role!r}, content={m.content!r}, reasoning={m.reasoning!r}, calls={m.tool_calls!r}, "
        f"learn={m.train!r}, call_id={m.tool_call_id!r}, name={m.name!r})"
        for m in sample.messages
    )
    return f"Ready(value=Sample(messages=({messages}), tools={sample.tools!r}))"


def source_bytes(source: Source) -> int:
    """Bytes of the content; for a generator an estimate from its first conversations."""
    if source.is_generated:
        first = (raw.value for raw in itertools.islice(GeneratedContainer(source).records(), 9))
        largest = max(_turns_and_characters(value.decode())[1] for value in first)  # type: ignore[attr-defined]
        return expected_records(source) * largest
    return sum(each.size() for each in _open_containers(source))


def expected_records(source: Source) -> int:
    """How many records there will be, for the progress bar."""
    if source.is_generated:
        return len([*_slice_records(itertools.count(), source)])
    total = sum(each.count() for each in _open_containers(source))
    chosen = len(range(total)[source.start : source.stop : source.step])
    return min(chosen, source.max_samples or chosen)


def _open_containers(source: Source) -> list[Container]:
    return [GeneratedContainer(source)] if source.is_generated else locate_containers(source)


def _slice_records(records: Iterator[Any], source: Source) -> Iterator[Any]:
    """start, stop and step as Python's slices have them, then max_samples."""
    bound = source.max_samples
    if source.is_generated and bound is None and source.stop is None:
        bound = DEFAULT_BUILTIN_SAMPLES
    return itertools.islice(itertools.islice(records, source.start, source.stop, source.step), bound)


def _is_pretokenized(containers: list[Container], source: Source) -> bool:
    kinds = {each.kind for each in containers}
    if "tokens" not in kinds and source.format != "tokens":
        return False
    if kinds != {"tokens"} or source.format not in ("auto", "tokens"):
        raise WhetError(f"data.sources: {source.path}: format: tokens is for .bin files, and for them alone")
    if source.where is not None or source.fields is not None:
        raise WhetError(f"data.sources: {source.path}: a .bin file has no fields, so where and fields mean nothing")
    return True


def _parse_tokenized(document: TokenizedDocument, _names: Mapping[str, str], origin: Origin) -> TokenizedDocument:
    return TokenizedDocument(document.ids, document.loss, origin)


def _turns_and_characters(item: Any) -> tuple[int, int]:
    """Turns and characters."""
    if isinstance(item, (PlainText, MarkedText)):
        return 1, len(item.text)
    if item is None:
        return 0, 0
    return len(item.messages), sum(len(message.content) for message in item.messages)
