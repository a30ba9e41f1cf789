"""Format detection from the first records of a source; ambiguity is an error, never a guess."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from whet.core.errors import BadRecordError, WhetError
from whet.data.config import Source
from whet.data.read.arrow_tables import TableRow, drop_nulls
from whet.data.read.container import Container, RawRecord, open_bytes
from whet.data.read.formats import FORMATS, has_chat_markers
from whet.data.read.json_files import decode_json
from whet.data.read.record_fields import present_names

# Which format a source has: its first records are looked at, the decision is said, and nothing is guessed.

_WEAKER_THAN_TURNS = {"multiple-choice", "gsm8k", "alpaca", "prompt-completion", "text"}
_SUPERSEDES = {
    "messages": _WEAKER_THAN_TURNS, "sharegpt": _WEAKER_THAN_TURNS, "multiple-choice": {"prompt-completion"},
    "gsm8k": {"prompt-completion"}, "alpaca": {"text"},
}  # fmt: skip
"""A list of turns is what the other fields were made from; a gsm8k answer is an answer with more in it; and Stanford's
own file has its prompt again as `text`."""
_DETECTABLE = [name for name in FORMATS if name != "marked"]
_MAX_SHOWN_KEYS = 12

FormatMatch = tuple[str, tuple[tuple[str, str], ...]]
"""A format, and names for the fields that it needs."""


class DetectedFormat(NamedTuple):
    """A format, a name for each of its fields, and how to say it."""

    format: str
    names: dict[str, str]
    description: str


def detect_format(sample: Sequence[Any], places: Sequence[str], source: Source) -> DetectedFormat:
    """The format of records like these. What the user set is taken; the names of fields are found either way."""
    _check_fields(source)
    fields = source.fields or {}
    if source.format != "auto":
        found = _common_matches([_match_formats(record, [source.format], fields) for record in sample])
        own = [reading for reading in found if all(field == name for field, name in reading[1])]
        chosen = own[0] if own else _require_one_match(found, sample, source) if found else (source.format, ())
        return _make_detected(chosen, sample, source)
    if not sample:  # not one that could be read: each says why when its turn comes
        return DetectedFormat(
            "messages", FORMATS["messages"].resolve_names(fields), "messages (no record could be looked at)"
        )
    candidates = [name for name in _DETECTABLE if fields.keys() <= FORMATS[name].fields.keys()]
    each = [_match_formats(record, candidates, fields) for record in sample]
    found = _common_matches(each)
    if not found and any(each):
        odd = next(number for number in range(len(each)) if each[number] and not _common_matches(each[: number + 1]))
        raise WhetError(
            f"data.sources: {places[odd]}: this record ({_format_names(each[odd])}) is of another format than those before it "
            f"({_format_names(_common_matches(each[:odd]))}), or names its fields differently. Put them into sources of their own, or "
            "set format and fields"
        )
    chosen = _require_one_match(_drop_superseded(found), sample, source)
    if chosen[0] == "text" and any(has_chat_markers(record, dict(chosen[1])["text"]) for record in sample):
        raise WhetError(
            f"data.sources: {source.path}: its texts hold marks of turns. Set format: marked, with data.markers, to "
            "learn the assistant's turns, or format: text to learn everything"
        )
    return _make_detected(chosen, sample, source)


def _match_formats(record: Any, formats: Sequence[str], fields: Mapping[str, str]) -> set[FormatMatch]:
    return {
        (name, tuple(sorted(found.items()))) for name in formats for found in FORMATS[name].recognise(record, fields)
    }


def _common_matches(each: Sequence[set[FormatMatch]]) -> set[FormatMatch]:
    """What holds for all records that can be recognised at all; the others are bad lines, told in their place."""
    recognised = [readings for readings in each if readings]
    return set.intersection(*recognised) if recognised else set()


def _format_names(readings: set[FormatMatch]) -> str:
    return " or ".join(sorted({form for form, _ in readings}))


def _drop_superseded(found: set[FormatMatch]) -> set[FormatMatch]:
    covered = {weaker for form, _ in found for weaker in _SUPERSEDES.get(form, ())}
    return {reading for reading in found if reading[0] not in covered}


def _require_one_match(found: set[FormatMatch], sample: Sequence[Any], source: Source) -> FormatMatch:
    if len(found) == 1:
        return next(iter(found))
    keys = [repr(key) for key in _record_keys(sample)]
    seen = f"its records have {', '.join(keys[:_MAX_SHOWN_KEYS])}" if keys else "its records have no fields"
    if not found:
        raise WhetError(
            f"data.sources: {source.path}: the format is not recognised: {seen}. Say what it is, such as "
            "format: prompt-completion and fields: {prompt: NAME, completion: NAME}; "
            f"formats are {', '.join(FORMATS)}"
        )
    ways = "; or ".join(sorted(_describe_match(reading) for reading in found))
    raise WhetError(
        f"data.sources: {source.path}: it can be read in more than one way: {seen}, so it may be {ways}. "
        "Set format and fields to what you mean"
    )


def _describe_match(reading: FormatMatch) -> str:
    form, names = reading
    return f"{form} with {{{', '.join(f'{field}: {name}' for field, name in names)}}}"


def _make_detected(reading: FormatMatch, sample: Sequence[Any], source: Source) -> DetectedFormat:
    form, fields = reading[0], source.fields or {}
    records = [record for record in sample if isinstance(record, dict)]
    found = dict(reading[1])
    for field, usual in FORMATS[form].fields.items():
        there = {name for record in records for name in present_names(record, field, usual, fields)}
        if field not in found and len(there) > 1:
            raise WhetError(
                f"data.sources: {source.path}: {' and '.join(sorted(there))} may each be its {field}. "
                f"Say which: fields: {{{field}: NAME}}"
            )
        found.setdefault(field, next(iter(there), fields.get(field, usual[0])))
    names = FORMATS[form].resolve_names(found)
    return DetectedFormat(form, names, _describe_format(form, names, _record_keys(sample)))


def _describe_format(form: str, names: Mapping[str, str], keys: Sequence[str]) -> str:
    """Such as: sharegpt (conversations: from, value); not used: id."""
    inner = FORMATS[form].turn_fields
    outer = {field: name for field, name in names.items() if field not in inner and name in keys}
    used = [name if name == field or inner else f"{name} as {field}" for field, name in outer.items()]
    if inner:
        turns = ", ".join(names[field] for field in inner)
        used[:1] = [f"{used[0]}: {turns}" if used else turns]
    unused = [key for key in keys if key not in outer.values()]
    said = form + (f" ({', '.join(used)})" if used else "")
    if unused:
        more = len(unused) - _MAX_SHOWN_KEYS
        said += f"; not used: {', '.join(unused[:_MAX_SHOWN_KEYS])}" + (f" and {more} more" if more > 0 else "")
    return said


def _record_keys(sample: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(str(key) for record in sample if isinstance(record, dict) for key in record))


def _check_fields(source: Source) -> None:
    formats = _DETECTABLE if source.format == "auto" else [source.format]
    known = sorted({field for name in formats for field in FORMATS[name].fields})
    whose = "no format has a" if source.format == "auto" else f"{source.format} has no"
    for field in source.fields or {}:
        if field not in known:
            raise WhetError(
                f"data.sources: {source.path}: fields: {whose} field {field!r}; known are {', '.join(known)}"
            )


# Looking at a source before it is read: a few records of its files tell the format.

_SAMPLED_RECORDS, _MAX_RECORDS_TRIED, _SAMPLED_FILES = 20, 200, 20


def detect_source_format(containers: Sequence[Container], source: Source) -> DetectedFormat:
    """The format, from the first good records and the first one of each of some further files."""
    sample = _sample_records(itertools.chain.from_iterable(each.records() for each in containers), _SAMPLED_RECORDS)
    for each in containers[1:_SAMPLED_FILES]:
        sample += _sample_records(each.records(), 1)
    if not sample and source.format == "auto":
        _refuse_binary(containers[0])
    chosen = detect_format([record for record, _ in sample], [place for _, place in sample], source)
    notes = dict.fromkeys(f", {each.note}" for each in containers if each.note)
    return chosen._replace(description=chosen.description + "".join(notes))


def _sample_records(records: Iterator[RawRecord], wanted: int) -> list[tuple[Any, str]]:
    """Records that can be read, each with its place."""
    found: list[tuple[Any, str]] = []
    for raw in itertools.islice(records, _MAX_RECORDS_TRIED):
        if len(found) == wanted:
            break
        try:
            found.append((_decode_raw(raw), f"{raw.file}:{raw.line}"))
        except (BadRecordError, RecursionError):
            continue
    return found


def _decode_raw(raw: RawRecord) -> Any:
    if isinstance(raw.value, bytes):
        return decode_json(raw.value)
    record = raw.value.decode()  # type: ignore[attr-defined]
    return drop_nulls(record) if isinstance(raw.value, TableRow) else record


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
