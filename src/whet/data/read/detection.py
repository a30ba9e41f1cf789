"""Format detection from the first records of a source; ambiguity is an error, never a guess."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from whet.core.errors import BadRecordError, WhetError
from whet.core.yaml import dump_yaml_inline
from whet.data.config import Source
from whet.data.conversation import Origin
from whet.data.read.containers.container import Container, RawRecord, marked_encoding, open_bytes
from whet.data.read.containers.text_encoding import unmarked_utf16
from whet.data.read.field_advice import MAX_SHOWN_KEYS, describe_format, name_question_elsewhere
from whet.data.read.records.formats import FORMATS, TURN_LIST_FIELDS, begins_chat, find_chat_marker
from whet.data.read.records.messages import MESSAGES_FIELDS, RECORD_FIELDS
from whet.data.read.records.nested_records import name_swapped_roles
from whet.data.read.records.question_formats import (
    ANSWER_WORDS,
    CONTEXT_WORDS,
    INPUT_WORDS,
    INSTRUCTION_WORDS,
    QUESTION_WORDS,
    SYSTEM_WORDS,
    decode_messages,
    list_choices,
)
from whet.data.read.records.question_shapes import (
    find_context,
    find_names,
    name_addition,
    name_alpaca_addition,
    name_choices_from_one,
)
from whet.data.read.records.record_fields import closest_key, find_optional, present_names, record_keys
from whet.data.read.records.record_shapes import (
    ID_NAME,
    LABELS,
    SPEAKER_NAME,
    find_turns,
    is_known_shape,
    name_competing_answers,
    name_json_text,
    name_people,
    name_preference,
    name_shape,
    name_unanswered,
)

_WEAKER_THAN_TURNS = {"multiple-choice", "gsm8k", "alpaca", "prompt-completion", "transcript", "text"}
_SUPERSEDES = {
    "messages": _WEAKER_THAN_TURNS, "sharegpt": _WEAKER_THAN_TURNS, "multiple-choice": {"prompt-completion"},
    "gsm8k": {"prompt-completion"}, "alpaca": {"transcript", "text"}, "transcript": {"text"},
}  # fmt: skip
"""If a record matches the key, the matches in the set are dropped: a list of turns beats the fields derived from it, a
gsm8k answer is more specific than any answer, and Stanford Alpaca repeats its prompt as `text`."""
_ANSWER_FIELDS = {"messages", "conversations", "completion", "output", "answer", "text"}
_DETECTABLE = [name for name in FORMATS if name != "marked"]
_FORMAT_EXAMPLE = (
    ". Set the format, such as format: prompt-completion and fields: {prompt: NAME, completion: NAME}; formats: "
    + ", ".join(FORMATS)
)
_FIELD_WORDS = {
    "prompt": QUESTION_WORDS.split(),
    "completion": ANSWER_WORDS.split(),
    "instruction": INSTRUCTION_WORDS.split(),
    "input": [*INPUT_WORDS.split(), *CONTEXT_WORDS.split()],
    "output": ANSWER_WORDS.split(),
    "system": SYSTEM_WORDS.split(),
}
_CLEAR_OPTIONAL = ("system", "input")
"""Fields that belong to the question, where a record has them."""
_SUGGESTED_FIRST = sorted(_DETECTABLE, key=lambda name: name == "text")
_COLUMN_NAME = re.compile(r"[^\W\d].{0,30}(?<![?!.])", re.DOTALL)
"""Not a question or a number, as the first row has them if no row names the columns."""
_SAMPLED_RECORDS, _MAX_RECORDS_TRIED, _SAMPLED_FILES = 20, 200, 20

FormatMatch = tuple[str, tuple[tuple[str, str], ...]]
"""A format, and for each field it requires the name in the record."""


class DetectedFormat(NamedTuple):
    """A format, the name of each of its fields, and a line that describes both."""

    format: str
    names: dict[str, str]
    description: str


def detect_source_format(containers: Sequence[Container], source: Source) -> DetectedFormat:
    """The format, from the first readable records of the source and the first one of some further files."""
    sample = _sample_records(itertools.chain.from_iterable(each.records() for each in containers), _SAMPLED_RECORDS)
    for each in containers[1:_SAMPLED_FILES]:
        sample += _sample_records(each.records(), 1)
    sample = [(_decode_turns(record, source), place) for record, place in sample]
    is_text = containers[0].kind not in ("parquet", "arrow", "xlsx")
    if source.format == "auto" and is_text and (not sample or any("\0" in key for key in record_keys([sample[0][0]]))):
        _reject_binary(containers[0])
    try:
        chosen = detect_format([record for record, _ in sample], [place for _, place in sample], source)
    except WhetError as error:
        sheets = [each.note for each in containers if each.kind == "xlsx"]
        raise WhetError(f"{error}. This is {sheets[0]}") if len(sheets) == 1 else error from None
    notes = dict.fromkeys(f", {note}" for each in containers for note in _container_notes(each))
    used, not_used, unused = chosen.description.partition("; not used: ")
    return chosen._replace(description=used + "".join(notes) + not_used + unused)


def _container_notes(container: Container) -> Iterator[str]:
    """What was assumed about a file."""
    if container.note:
        yield container.note
    if (encoding := marked_encoding(container.path)) is not None:
        yield f"read as {encoding}"


def _sample_records(records: Iterator[RawRecord], count: int) -> list[tuple[Any, str]]:
    """The first readable records, each with its file:line."""
    found: list[tuple[Any, str]] = []
    for raw in itertools.islice(records, _MAX_RECORDS_TRIED):
        if len(found) == count:
            break
        try:
            found.append((raw.decode(), f"{raw.file}:{raw.line}"))
        except (BadRecordError, RecursionError):
            continue
    return found


def _decode_turns(record: Any, source: Source) -> Any:
    """The record, its lists of turns decoded where they are JSON in a text, as tables have them."""
    if not isinstance(record, dict):
        return record
    fields, decoded = source.fields or {}, dict(record)
    for name in {*MESSAGES_FIELDS["messages"], *map(fields.get, TURN_LIST_FIELDS)} - {fields.get("text")}:
        with contextlib.suppress(BadRecordError):  # reported when it is read
            decoded |= {name: decode_messages(record[name])} if name in record else {}
    return decoded


def _reject_binary(container: Container) -> None:
    """Report a binary file once, instead of every record of it."""
    with open_bytes(container.path, container.name) as stream:
        head = stream.read(4096)
    if b"\0" in head:
        what = "UTF-16 without a byte order mark; save it as UTF-8" if unmarked_utf16(head) else "binary data, not text"
        raise WhetError(
            f"data.sources: {container.name}: the file is {what}. whet reads JSONL, JSON, CSV, Parquet, Arrow and .txt "
            "by suffix, also compressed (.gz, .zst)"
        )


def detect_format(sample: Sequence[Any], places: Sequence[str], source: Source) -> DetectedFormat:
    """The format of the sampled records. Options of the source win; the names of fields are detected either way."""
    _check_fields(source)
    fields = source.fields or {}
    if source.format != "auto":
        found = _common_matches([_match_formats(record, [source.format], fields) for record in sample])
        own = [match for match in found if all(field == name for field, name in match[1])]
        chosen = own[0] if own else _require_one_match(found, sample, source) if found else (source.format, ())
        detected = _make_detected(chosen, sample, source)
        if shape := _name_unanswered(chosen, sample) if found else _name_misfit(detected, sample):
            raise WhetError(f"data.sources: {source.path}: the records are not {source.format}: {shape}")
        return detected
    if not sample:  # no readable record: each is reported as a bad record later
        return DetectedFormat(
            "messages", FORMATS["messages"].resolve_names(fields), "messages (assumed: no record is readable)"
        )
    named = not fields.keys().isdisjoint(_ANSWER_FIELDS)
    if not named and (shape := name_preference(sample) or name_competing_answers(sample)):
        raise WhetError(f"data.sources: {source.path}: {shape}")
    candidates = [name for name in _DETECTABLE if fields.keys() <= FORMATS[name].fields.keys()]
    each = [_match_formats(record, candidates, fields) for record in sample]
    found = _common_matches(each)
    if not found and any(each):
        odd = next(number for number in range(len(each)) if each[number] and not _common_matches(each[: number + 1]))
        this, before = each[odd], _common_matches(each[:odd])
        describe = _format_names if _format_names(this) != _format_names(before) else _describe_matches
        raise WhetError(
            f"data.sources: {places[odd]}: the format or the field names of this record ({describe(this)}) differ "
            f"from those before it ({describe(before)}). Make one source per format, or set format and fields"
        )
    found = _drop_superseded(found)
    if {form for form, _ in found} <= {"text"} and (shape := name_shape(sample, bool(found))):
        unknown = "" if found else "the format is not recognised: "
        raise WhetError(f"data.sources: {source.path}: {unknown}{shape}")
    chosen = _require_one_match(found, sample, source)
    if shape := _name_misread(chosen, {**fields, **dict(chosen[1])}, sample):
        raise WhetError(f"data.sources: {source.path}: {shape}")
    marks = [find_chat_marker(record, dict(chosen[1])["text"]) for record in sample] if chosen[0] == "text" else []
    if any(marks):
        raise WhetError(
            f"data.sources: {source.path}: the texts are chats with {next(filter(None, marks))}. To train on the "
            "assistant's turns, write them as messages, or set format: marked and data.markers, such as {user: {text: "
            "'<<<|user|>>>', id: 7}, assistant: {text: '<<<|assistant|>>>', id: 8}} with the ids of your tokenizer; "
            "to train on every token, set format: text"
        )
    return _make_detected(chosen, sample, source)


def _name_misread(chosen: FormatMatch, names: Mapping[str, str], sample: Sequence[Any]) -> str | None:
    """What reading the records in the format that they have would lose or turn round."""
    match chosen[0]:
        case "alpaca":
            shape = name_alpaca_addition(sample, names)
        case "multiple-choice":
            shape = name_choices_from_one(sample, names)
        case "prompt-completion":
            shape = name_addition(sample, names)
        case "text":
            shape = name_json_text(sample[0], names["text"])
        case _:
            shape = _name_unanswered(chosen, sample) or _name_people(chosen, sample)
            shape = shape or _name_swapped_roles(chosen, sample)
    return shape or name_question_elsewhere(chosen[0], names, sample)


def _name_misfit(detected: DetectedFormat, sample: Sequence[Any]) -> str | None:
    """The known shape of records of which none has the configured format."""
    for record in sample:
        try:
            FORMATS[detected.format].parse(record, detected.names, Origin("", 0))
            return None
        except BadRecordError:
            continue
    return name_preference(sample) or name_shape(sample, recognised=True)  # others are bad records, line by line


def _name_unanswered(chosen: FormatMatch, sample: Sequence[Any]) -> str | None:
    turns = next((name for field, name in chosen[1] if field in TURN_LIST_FIELDS), None)
    return None if turns is None else name_unanswered(sample, turns)


def _name_swapped_roles(chosen: FormatMatch, sample: Sequence[Any]) -> str | None:
    turns = next((name for field, name in chosen[1] if field in TURN_LIST_FIELDS), None)
    return None if turns is None else name_swapped_roles(sample, turns)


def _name_people(chosen: FormatMatch, sample: Sequence[Any]) -> str | None:
    names = dict(chosen[1])
    return name_people(sample, names["conversations"], names["from"]) if chosen[0] == "sharegpt" else None


def _match_formats(record: Any, formats: Sequence[str], fields: Mapping[str, str]) -> set[FormatMatch]:
    return {
        (name, tuple(sorted(found.items()))) for name in formats for found in FORMATS[name].recognise(record, fields)
    }


def _common_matches(each: Sequence[set[FormatMatch]]) -> set[FormatMatch]:
    """The matches common to all records that match anything; the others are reported as bad records later."""
    recognised = [matches for matches in each if matches]
    return set.intersection(*recognised) if recognised else set()


def _format_names(matches: set[FormatMatch]) -> str:
    return " or ".join(sorted({form for form, _ in matches}))


def _drop_superseded(found: set[FormatMatch]) -> set[FormatMatch]:
    superseded = {weaker for form, _ in found for weaker in _SUPERSEDES.get(form, ())}
    return {match for match in found if match[0] not in superseded}


def _require_one_match(found: set[FormatMatch], sample: Sequence[Any], source: Source) -> FormatMatch:
    if len(found) == 1:
        return next(iter(found))
    keys = [repr(key) for key in record_keys(sample)]
    seen = f"the records have {', '.join(keys[:MAX_SHOWN_KEYS])}" if keys else "the records have no fields"
    if not found:
        raise WhetError(
            f"data.sources: {source.path}: the format is not recognised: {seen}{_advise_fields(sample, source)}"
        )
    raise WhetError(
        f"data.sources: {source.path}: the format is ambiguous: {seen}, so it may be {_describe_matches(found)}. "
        "Set format and fields"
    )


def _advise_fields(sample: Sequence[Any], source: Source) -> str:
    """What to write so that the records are recognised, as the rest of a sentence."""
    if near := suggest_fields(sample, source.fields or {}):
        named = {field: key for field, key in near.fields.items() if field not in (source.fields or {})}
        means = " and ".join(f"{field} for {key!r}" for field, key in named.items())
        return (
            f". Did you mean {means}? `whet init {shlex.quote(source.path)}` writes a recipe with these names. Or "
            f"rename the columns, or write under data: {near.line(source.path)}"
        )
    is_table = any(suffix in source.path.lower() for suffix in (".csv", ".tsv", ".xlsx"))
    header = ". The first row must name the columns, such as question and answer: add or change it" if is_table else ""
    if both := suggest_two_columns(sample):
        prompt, completion = both.fields.values()
        return f"{header}. If {prompt!r} is the question and {completion!r} the answer, write under data: " + both.line(
            source.path
        )
    return header + _FORMAT_EXAMPLE


class SuggestedFields(NamedTuple):
    """A format that a record would have if fields of it had other names."""

    format: str
    fields: dict[str, str]

    def line(self, path: str) -> str:
        """The source with these fields, in YAML."""
        return f"sources: {dump_yaml_inline([{'path': path, 'format': self.format, 'fields': self.fields}])}"


def guess_fields(containers: Sequence[Container]) -> SuggestedFields | None:
    """Format and fields of records that no format recognises by itself, from the names and texts of their columns."""
    records = itertools.chain.from_iterable(each.records() for each in containers)
    sample = [record for record, _ in _sample_records(records, _SAMPLED_RECORDS)]
    turns = [find_turns(record) for record in sample if isinstance(record, dict)]
    if turns and turns[0] is not None and turns == turns[:1] * len(turns) and name_preference(sample) is None:
        return SuggestedFields("sharegpt", turns[0])
    if is_known_shape(sample):
        return None
    near = suggest_fields(sample, {})
    if (near is None or near.format == "prompt-completion") and (context := find_context(sample)) is not None:
        system = {"system": near.fields["system"]} if near and "system" in near.fields else {}
        return SuggestedFields("alpaca", context | system)
    return near or suggest_two_columns(sample)


def suggest_fields(sample: Sequence[Any], fields: Mapping[str, str]) -> SuggestedFields | None:
    """What the records have but for the case, the language or a typing error in their keys."""
    return next(filter(None, (_suggest_for_record(record, fields) for record in sample)), None)


def _suggest_for_record(record: Any, fields: Mapping[str, str]) -> SuggestedFields | None:
    for name in _SUGGESTED_FIRST if isinstance(record, dict) else ():
        form, near = FORMATS[name], dict[str, str]()
        for field, known in form.fields.items():
            words = _FIELD_WORDS.get(field, ())
            others = [key for key in record if key not in near.values()]
            key = (
                None if field in fields or any(each in record for each in known) else closest_key(known, others, words)
            )
            if key is not None:
                near[field] = key
        for field in list(near):  # what the format does not require must be named by its very word, in any case
            words = _FIELD_WORDS.get(field, ())
            is_clear = field in _CLEAR_OPTIONAL and closest_key(form.fields[field], [near[field]], words, cutoff=1.0)
            if not is_clear and form.recognise(record, {**fields, **near} | {field: fields.get(field, "\0")}):
                del near[field]
        if near and form.recognise(record, {**fields, **near}):
            return SuggestedFields(name, {**fields, **near})
    return None


def suggest_two_columns(sample: Sequence[Any]) -> SuggestedFields | None:
    """For records with exactly two texts: the first may be the question, the second its answer, unless the name of one
    says otherwise or the first is a label."""
    keys = record_keys(sample)
    texts = [
        key
        for key in keys
        if all(isinstance(r.get(key), str) and r[key].strip() for r in sample if isinstance(r, dict))
    ]
    if len(texts) != 2 or not all(_COLUMN_NAME.fullmatch(key) and not ID_NAME.fullmatch(key) for key in texts):
        return None
    if any(SPEAKER_NAME.fullmatch(key) for key in texts):
        return None  # who says what
    question, answer = find_names(dict.fromkeys(texts))
    if question == texts[1] and answer is None:
        return None  # the first is no answer by its name
    texts.sort(key=lambda key: (key == answer, key.lower() in LABELS))
    if texts[0] in RECORD_FIELDS["system"] or any(begins_chat(r.get(texts[1])) for r in sample if isinstance(r, dict)):
        return None
    if any(isinstance(r, dict) and (r.get("label") is not None or _has_lists(r)) for r in sample):
        return None  # two sentences and how they relate, a question and its choices
    if all(r[texts[0]].strip().isdigit() for r in sample if isinstance(r, dict)):
        return None
    return SuggestedFields("prompt-completion", {"prompt": texts[0], "completion": texts[1]})


def _has_lists(record: Mapping[str, Any]) -> bool:
    return any(isinstance(value, list) and value for value in record.values())


def _describe_matches(found: set[FormatMatch]) -> str:
    return "; or ".join(sorted(_describe_match(match) for match in found))


def _describe_match(match: FormatMatch) -> str:
    form, names = match
    return f"{form} with {{{', '.join(f'{field}: {name}' for field, name in names)}}}"


def _make_detected(match: FormatMatch, sample: Sequence[Any], source: Source) -> DetectedFormat:
    form, fields = match[0], source.fields or {}
    records = [record for record in sample if isinstance(record, dict)]
    found = dict(match[1])
    for field, known in FORMATS[form].required.items():
        present = {name for record in records for name in present_names(record, field, known, fields)}
        if field not in found and len(present) > 1:
            raise WhetError(
                f"data.sources: {source.path}: {' and '.join(sorted(present))} may each be the field {field}. "
                f"Choose one: fields: {{{field}: NAME}}"
            )
        found.setdefault(field, next(iter(present), fields.get(field, known[0])))
    names = FORMATS[form].resolve_names({**fields, **found})
    for record, (field, known) in itertools.product(records, FORMATS[form].optional.items()):
        try:
            find_optional(record, field, known, names)
        except BadRecordError as error:
            raise WhetError(f"data.sources: {source.path}: {error}") from None
    return DetectedFormat(form, names, describe_format(form, names, [*map(list_choices, sample)]))


def _check_fields(source: Source) -> None:
    formats = _DETECTABLE if source.format == "auto" else [source.format]
    known = sorted({field for name in formats for field in FORMATS[name].fields})
    subject = "no format has a" if source.format == "auto" else f"{source.format} has no"
    for field in source.fields or {}:
        if field not in known:
            raise WhetError(
                f"data.sources: {source.path}: fields: {subject} field {field!r}; known: {', '.join(known)}"
            )
