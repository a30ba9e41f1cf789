"""Read a source: each record becomes a conversation, a document, or a bad record with its reason."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.core.errors import BadRecordError, WhetError
from whet.data.builtin import BUILTIN_GENERATORS, SPLITS, GeneratedSample
from whet.data.config import Source
from whet.data.conversation import (
    BadRecord,
    Conversation,
    FilteredRecord,
    MarkedText,
    Origin,
    ParsedRecord,
    PlainText,
    TokenizedDocument,
    with_system,
)
from whet.data.read.arrow_tables import TableRow
from whet.data.read.container import Container, DecodedRecord, RawRecord
from whet.data.read.detection import detect_source_format, guess_fields
from whet.data.read.formats import parser_of
from whet.data.read.locate import locate_containers
from whet.data.read.record_filter import RecordFilter
from whet.data.read.token_files import describe_mask_rules
from whet.data.read.unsupported_records import reject_unsupported

_CONTENT_OPTIONS = {
    "format", "fields", "split", "subset", "start", "stop", "step", "max_samples", "where", "calculator", "mask",
    "system",
}  # fmt: skip
"""Options of a source that change what is read; part of its fingerprint."""


class SourceReader:
    """An open source with a known format. Several readers may read the same source."""

    def __init__(self, source: Source) -> None:
        """Raises a WhetError if there is nothing to read or the format is ambiguous."""
        self.source = source
        self._where = RecordFilter(source.where) if source.where is not None else None
        self._containers = _open_containers(source)
        self.description: str | None = None
        """The detected format, as a line to print; None for built-in datasets."""
        self._names: Mapping[str, str] = {}
        self._parse: Any
        if source.is_builtin:
            self._parse = _parse_builtin
        elif _is_pretokenized(self._containers, source):
            self._parse = _parse_tokenized
            self.description = f"{source.path}: {describe_mask_rules(source.mask)}"
        else:
            detected = detect_source_format(self._containers, source)
            if source.calculator == "calls" and detected.format != "gsm8k":
                raise WhetError(
                    f"data.sources: {source.path}: calculator: calls applies to gsm8k and built-in datasets only; "
                    f"this source is {detected.format}. Remove it"
                )
            self._names, self._parse = detected.names, parser_of(detected.format, source.calculator)
            self.description = f"{source.path}: {detected.description}"

    def records(self) -> Iterator[RawRecord]:
        """The selected records (start, stop, step, max_samples), undecoded."""
        chosen = self.source.selection
        records = itertools.chain.from_iterable(each.records() for each in self._containers)
        return itertools.islice(records, chosen.start, min(chosen.stop, sys.maxsize), chosen.step)

    def parse(self, raw: RawRecord) -> ParsedRecord:
        """Decode, filter and parse a record. Bad content is returned as a BadRecord, never raised."""
        origin, where = Origin(raw.file, raw.line), self._where
        try:
            record, parsed = raw.decode(), None
            if where is not None:
                row = raw.value.decode_with_nulls() if isinstance(raw.value, TableRow) else record
                parsed = self._parse(record, self._names, origin) if where.needs_parsed_record else None
                if not where(row, *_turns_and_characters(parsed)):
                    return FilteredRecord(origin, "filter")
            parsed = self._parse(record, self._names, origin) if parsed is None else parsed
            reject_unsupported(record, parsed, self._names)
            return self._with_system(parsed)
        except BadRecordError as error:
            return BadRecord(origin, error.reason, str(error))
        except RecursionError:
            return BadRecord(origin, "broken JSON", "the record is nested too deeply")

    def _with_system(self, parsed: ParsedRecord) -> ParsedRecord:
        system = self.source.system
        if not system or not isinstance(parsed, Conversation):
            return parsed
        return replace(parsed, messages=tuple(with_system(parsed.messages, system)))


def read_source(source: Source) -> Iterator[ParsedRecord]:
    """Every record of a source, parsed, in order; nothing is skipped silently."""
    reader = SourceReader(source)
    return map(reader.parse, reader.records())


def propose_source(path: str, guess: bool = True) -> tuple[Source, bool]:
    """A source for a file, and whether its format and fields are guessed from names that mean a question and an answer;
    raises a WhetError if nothing is recognised. `guess`: False makes a guess that error, which has the line to add."""
    source = Source(path=path)
    try:
        SourceReader(source)
        return source, False
    except WhetError:
        near = guess_fields(_open_containers(source)) if guess and not source.is_builtin else None
        if near is None:
            raise
    return Source.model_validate({"path": path, "format": near.format, "fields": near.fields}), True


def source_fingerprint(source: Source) -> dict[str, object]:
    """Identifies what is read: files by the hash of their bytes, built-in datasets by their first samples."""
    options = source.model_dump(mode="json", include=_CONTENT_OPTIONS, exclude_none=True)
    if source.is_builtin:
        samples = itertools.islice(BuiltinDataset(source).records(), 9)
        return {**options, "path": source.path, "start": [_sample_key(raw.decode()) for raw in samples]}
    containers = _open_containers(source)
    return {**options, "content": [each.content_key() for each in containers]}


def source_bytes(source: Source) -> int:
    """Uncompressed bytes of the files; for a built-in dataset an estimate from its first samples."""
    if source.is_builtin:
        first = [raw.decode() for raw in itertools.islice(BuiltinDataset(source).records(), 9)]
        return expected_records(source) * max(_turns_and_characters(sample)[1] for sample in first)
    return sum(each.size() for each in _open_containers(source))


def expected_records(source: Source) -> int:
    """The number of records, for the progress bar; an estimate for some files."""
    if source.is_builtin:
        return len(source.selection)
    total = sum(each.count() for each in _open_containers(source))
    chosen = source.selection
    return len(range(chosen.start, min(chosen.stop, total), chosen.step))


def _open_containers(source: Source) -> list[Container]:
    return [BuiltinDataset(source)] if source.is_builtin else locate_containers(source)


def _is_pretokenized(containers: list[Container], source: Source) -> bool:
    kinds = {each.kind for each in containers}
    if "tokens" not in kinds and source.format != "tokens":
        return False
    if kinds != {"tokens"} or source.format not in ("auto", "tokens"):
        raise WhetError(f"data.sources: {source.path}: .bin files have format: tokens, and no other files have it")
    if source.where is not None or source.fields is not None:
        raise WhetError(f"data.sources: {source.path}: a .bin file has no fields; remove where and fields")
    return True


def _parse_tokenized(document: TokenizedDocument, _names: Mapping[str, str], _origin: Origin) -> TokenizedDocument:
    return document


def _turns_and_characters(parsed: Any) -> tuple[int, int]:
    """The values of `turns` and `characters` in a filter."""
    if isinstance(parsed, (PlainText, MarkedText)):
        return 1, len(parsed.text)
    if parsed is None:
        return 0, 0
    return len(parsed.messages), sum(len(message.content) for message in parsed.messages)


# Built-in datasets, read like files.


class BuiltinDataset(Container):
    """The endless records of a built-in dataset."""

    kind = "generated"

    def __init__(self, source: Source) -> None:
        split = source.split or "train"
        if source.path not in BUILTIN_GENERATORS:
            raise WhetError(f"data.sources: there is no {source.path}; known: {', '.join(BUILTIN_GENERATORS)}")
        if split not in SPLITS:
            raise WhetError(f"data.sources: {source.path}: there is no split {split!r}; known: {', '.join(SPLITS)}")
        for key in ("fields", "subset", "mask"):
            if getattr(source, key) is not None:
                raise WhetError(f"data.sources: {source.path}: {key} does not apply to built-in datasets; remove it")
        if source.format != "auto":
            raise WhetError(f"data.sources: {source.path}: format does not apply to built-in datasets; remove it")
        super().__init__(f"{source.path}/{split}", Path(source.path))
        self._samples, self._split, self._calculator = BUILTIN_GENERATORS[source.path], split, source.calculator

    def records(self) -> Iterator[RawRecord]:
        for number, sample in enumerate(self._samples(self._split, self._calculator), 1):
            yield RawRecord(number, DecodedRecord(sample), self.name)

    def count(self) -> int:
        raise AssertionError("a built-in dataset is endless")

    def size(self) -> int:
        raise AssertionError("a built-in dataset is endless")


def _parse_builtin(sample: GeneratedSample, _names: Mapping[str, str], origin: Origin) -> Conversation:
    return Conversation(sample.messages, origin, sample.tools)


def _sample_key(sample: GeneratedSample) -> str:
    """A sample as text, for store keys. Frozen: another wording would invalidate every store of built-in data."""
    messages = ", ".join(
        f"Message(role={m.role!r}, content={m.content!r}, reasoning={m.reasoning!r}, calls={m.tool_calls!r}, "
        f"learn={m.train!r}, call_id={m.tool_call_id!r}, name={m.name!r})"
        for m in sample.messages
    )
    return f"Ready(value=Sample(messages=({messages}), tools={sample.tools!r}))"
