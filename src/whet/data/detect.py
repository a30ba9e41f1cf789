"""Which format a source has: its first records are looked at, the decision is said, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.formats.known import FORMATS
from whet.data.formats.pick import present
from whet.data.formats.text import looks_marked

_ANSWERS = {"multiple-choice", "gsm8k", "alpaca", "prompt-completion", "text"}
_COVERS = {
    "messages": _ANSWERS, "sharegpt": _ANSWERS, "multiple-choice": {"prompt-completion"},
    "gsm8k": {"prompt-completion"}, "alpaca": {"text"},
}  # fmt: skip
"""A list of turns is what the other fields were made from; a gsm8k answer is an answer with more in it; and Stanford's
own file has its prompt again as `text`."""
_AUTO = [name for name in FORMATS if name != "marked"]
_SHOWN = 12

Reading = tuple[str, tuple[tuple[str, str], ...]]
"""A format, and names for the fields that it needs."""


class Choice(NamedTuple):
    """A format, a name for each of its fields, and how to say it."""

    format: str
    names: dict[str, str]
    said: str


def detect(sample: Sequence[Any], places: Sequence[str], source: Source) -> Choice:
    """The format of records like these. What the user set is taken; the names of fields are found either way."""
    _check_fields(source)
    fields = source.fields or {}
    if source.format != "auto":
        found = _common([_readings(record, [source.format], fields) for record in sample])
        own = [reading for reading in found if all(field == name for field, name in reading[1])]
        chosen = own[0] if own else _only(found, sample, source) if found else (source.format, ())
        return _choice(chosen, sample, source)
    if not sample:  # not one that could be read: each says why when its turn comes
        return Choice("messages", FORMATS["messages"].names(fields), "messages (no record could be looked at)")
    candidates = [name for name in _AUTO if fields.keys() <= FORMATS[name].fields.keys()]
    each = [_readings(record, candidates, fields) for record in sample]
    found = _common(each)
    if not found and any(each):
        odd = next(number for number in range(len(each)) if each[number] and not _common(each[: number + 1]))
        raise WhetError(
            f"data.sources: {places[odd]}: this record ({_kinds(each[odd])}) is of another format than those before it "
            f"({_kinds(_common(each[:odd]))}), or names its fields differently. Put them into sources of their own, or "
            "set format and fields"
        )
    chosen = _only(_strongest(found), sample, source)
    if chosen[0] == "text" and any(looks_marked(record, dict(chosen[1])["text"]) for record in sample):
        raise WhetError(
            f"data.sources: {source.path}: its texts hold marks of turns. Set format: marked, with data.markers, to "
            "learn the assistant's turns, or format: text to learn everything"
        )
    return _choice(chosen, sample, source)


def _readings(record: Any, formats: Sequence[str], fields: Mapping[str, str]) -> set[Reading]:
    return {
        (name, tuple(sorted(found.items()))) for name in formats for found in FORMATS[name].recognise(record, fields)
    }


def _common(each: Sequence[set[Reading]]) -> set[Reading]:
    """What holds for all records that can be recognised at all; the others are bad lines, told in their place."""
    recognised = [readings for readings in each if readings]
    return set.intersection(*recognised) if recognised else set()


def _kinds(readings: set[Reading]) -> str:
    return " or ".join(sorted({form for form, _ in readings}))


def _strongest(found: set[Reading]) -> set[Reading]:
    covered = {weaker for form, _ in found for weaker in _COVERS.get(form, ())}
    return {reading for reading in found if reading[0] not in covered}


def _only(found: set[Reading], sample: Sequence[Any], source: Source) -> Reading:
    if len(found) == 1:
        return next(iter(found))
    keys = [repr(key) for key in _keys(sample)]
    seen = f"its records have {', '.join(keys[:_SHOWN])}" if keys else "its records have no fields"
    if not found:
        raise WhetError(
            f"data.sources: {source.path}: the format is not recognised: {seen}. Say what it is, such as "
            "format: prompt-completion and fields: {prompt: NAME, completion: NAME}; "
            f"formats are {', '.join(FORMATS)}"
        )
    ways = "; or ".join(sorted(_describe(reading) for reading in found))
    raise WhetError(
        f"data.sources: {source.path}: it can be read in more than one way: {seen}, so it may be {ways}. "
        "Set format and fields to what you mean"
    )


def _describe(reading: Reading) -> str:
    form, names = reading
    return f"{form} with {{{', '.join(f'{field}: {name}' for field, name in names)}}}"


def _choice(reading: Reading, sample: Sequence[Any], source: Source) -> Choice:
    form, fields = reading[0], source.fields or {}
    records = [record for record in sample if isinstance(record, dict)]
    found = dict(reading[1])
    for field, usual in FORMATS[form].fields.items():
        there = {name for record in records for name in present(record, field, usual, fields)}
        if field not in found and len(there) > 1:
            raise WhetError(
                f"data.sources: {source.path}: {' and '.join(sorted(there))} may each be its {field}. "
                f"Say which: fields: {{{field}: NAME}}"
            )
        found.setdefault(field, next(iter(there), fields.get(field, usual[0])))
    names = FORMATS[form].names(found)
    return Choice(form, names, _say(form, names, _keys(sample)))


def _say(form: str, names: Mapping[str, str], keys: Sequence[str]) -> str:
    """Such as: sharegpt (conversations: from, value); not used: id."""
    inner = FORMATS[form].inner
    outer = {field: name for field, name in names.items() if field not in inner and name in keys}
    used = [name if name == field or inner else f"{name} as {field}" for field, name in outer.items()]
    if inner:
        turns = ", ".join(names[field] for field in inner)
        used[:1] = [f"{used[0]}: {turns}" if used else turns]
    unused = [key for key in keys if key not in outer.values()]
    said = form + (f" ({', '.join(used)})" if used else "")
    if unused:
        more = len(unused) - _SHOWN
        said += f"; not used: {', '.join(unused[:_SHOWN])}" + (f" and {more} more" if more > 0 else "")
    return said


def _keys(sample: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(str(key) for record in sample if isinstance(record, dict) for key in record))


def _check_fields(source: Source) -> None:
    formats = _AUTO if source.format == "auto" else [source.format]
    known = sorted({field for name in formats for field in FORMATS[name].fields})
    whose = "no format has a" if source.format == "auto" else f"{source.format} has no"
    for field in source.fields or {}:
        if field not in known:
            raise WhetError(
                f"data.sources: {source.path}: fields: {whose} field {field!r}; known are {', '.join(known)}"
            )
