"""Read a source: filter records (`where`); each becomes a conversation, a document, or a bad record with its reason."""

from __future__ import annotations

import ast
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
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
from whet.data.read.containers.arrow_tables import TableRow
from whet.data.read.containers.container import Container, DecodedRecord, RawRecord, SeveralSplitsError
from whet.data.read.containers.locate import locate_containers, splits_in_folder
from whet.data.read.containers.token_files import describe_mask_rules
from whet.data.read.detection import detect_source_format, guess_fields
from whet.data.read.records.formats import parser_of
from whet.data.read.records.question_formats import parse_detected_prompt_completion
from whet.data.read.records.record_fields import as_number, closest_key, describe_type, shorten
from whet.data.read.records.unsupported_records import reject_unsupported

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
            _require_one_split(source)
            detected = detect_source_format(self._containers, source)
            if source.calculator == "calls" and detected.format != "gsm8k":
                raise WhetError(
                    f"data.sources: {source.path}: calculator: calls applies to gsm8k and built-in datasets only; "
                    f"this source is {detected.format}. Remove it"
                )
            self._names, self._parse = detected.names, parser_of(detected.format, source.calculator)
            if source.format == "auto" and detected.format == "prompt-completion":
                self._parse = parse_detected_prompt_completion
            self.description = f"{source.path}: {detected.description}"

    def records(self) -> Iterator[RawRecord]:
        """The selected records (start, stop, step, max_samples), undecoded."""
        chosen = self.source.selection
        records = itertools.chain.from_iterable(each.records() for each in self._containers)
        return itertools.islice(records, chosen.start, min(chosen.stop, sys.maxsize), chosen.step)

    def describe_blank(self) -> str | None:
        """The empty lines or rows between the records that `records` has read so far, which are not records: `5 empty
        rows are not counted`; None without any."""
        number = sum(each.blank for each in self._containers)
        what = "row" if any(each.kind.startswith(("xlsx", "csv", "tsv")) for each in self._containers) else "line"
        if not number:
            return None
        return f"1 empty {what} is not counted" if number == 1 else f"{number:,} empty {what}s are not counted"

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


def _require_one_split(source: Source) -> None:
    """A folder with files of several splits is not read as one: that would train on the test data."""
    splits = splits_in_folder(source)
    if source.split is None and len(splits) > 1:
        raise SeveralSplitsError(
            f"data.sources: {source.path}: the names of the files state several splits ({', '.join(splits)}). Set "
            "split to one of them; to train on several, make one source for each",
            splits,
        )


def read_source(source: Source) -> Iterator[ParsedRecord]:
    """Every record of a source, parsed, in order; nothing is skipped silently."""
    reader = SourceReader(source)
    return map(reader.parse, reader.records())


def propose_source(path: str, guess: bool = True, split: str | None = None) -> tuple[Source, bool]:
    """A source for a file, and whether its format and fields are guessed from names that mean a question and an answer;
    of several splits it takes `train`. Raises a WhetError if nothing is recognised. `guess`: False makes a guess that
    error, which has the line to add."""
    source = Source(path=path, split=split)
    try:
        SourceReader(source)
        return source, False
    except SeveralSplitsError as error:
        if not guess or "train" not in error.splits:
            raise
        return propose_source(path, split="train")
    except WhetError:
        near = guess_fields(_open_containers(source)) if guess and not source.is_builtin else None
        if near is None:
            raise
    named = {"format": near.format, "fields": near.fields}
    return Source.model_validate({**source.model_dump(exclude_none=True), **named}), True


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


# The `where` of a source: an expression over a record's fields, parsed by `ast` and never executed as Python.
#
# Names are fields of the record; `meta.lang` and `meta["lang"]` are nested fields. `record` is the whole record,
# `turns` the number of messages, `characters` the length of their texts. Supported are literals, lists, comparisons,
# `and`, `or`, `not`, `in`, `+ - * / // %` on numbers, `+` on strings, `len(x)` and `lower(x)`. A text counts as the
# number, true or false that it is, as tables have them, where the expression has one of these. A record without a field
# that the expression reads is a bad record: a misspelled name would otherwise keep or drop everything. For optional
# fields, write `"lang" in record and lang == "de"`.

_MAX_CHARACTERS = 2000
_COMPUTED_NAMES = ("turns", "characters")

Variables = Mapping[str, Any]
Expression = Callable[[Variables], Any]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: _is_in(a, b), ast.NotIn: lambda a, b: not _is_in(a, b),
    ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"len": len, "lower": str.lower}


class RecordFilter:
    """A compiled filter; errors in the expression are raised by the constructor."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.needs_parsed_record = False
        """Whether it reads turns or characters, so that the record must be parsed first."""
        if len(text) > _MAX_CHARACTERS:
            raise WhetError(f"data.sources: where: longer than {_MAX_CHARACTERS} characters; filter the file instead")
        try:
            self._predicate = self._compile(ast.parse(text.replace("\n", " ").strip(), mode="eval").body)
        except SyntaxError as error:
            raise self._error(f"{error.msg} at column {error.offset or len(text) + 1}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._error(str(error) or "too deeply nested") from None

    def __call__(self, record: Any, turns: int = 0, characters: int = 0) -> bool:
        """Whether to keep a record; raises BadRecordError if the expression cannot be evaluated on it."""
        values = {**record} if isinstance(record, dict) else {}
        try:
            return _is_true(self._predicate({**values, "record": record, "turns": turns, "characters": characters}))
        except (TypeError, ValueError, ArithmeticError, IndexError) as error:
            raise BadRecordError("where", f"where: {self._text} cannot be evaluated: {error}") from None

    def _error(self, fault: str) -> WhetError:
        return WhetError(
            f"data.sources: where: {self._text!r}: {fault}. Write, for example: turns <= 6 and lang == 'de'"
        )

    def _unsupported(self, node: ast.expr | ast.keyword, what: str) -> WhetError:
        return self._error(f"{what} at column {node.col_offset + 1} is not supported in a filter")

    def _compile(self, node: ast.expr) -> Expression:
        match node:
            case ast.Constant(value=str() | int() | float() | bool() | None):
                return lambda _, value=node.value: value  # type: ignore[misc]
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=inner, attr=name):
                return self._lookup(inner, lambda _: name)
            case ast.Subscript(value=inner, slice=index):
                return self._lookup(inner, self._compile(index))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                terms = [self._compile(item) for item in items]
                return lambda values: [term(values) for term in terms]
            case ast.BoolOp(op=op, values=parts):
                terms, how = [self._compile(part) for part in parts], all if isinstance(op, ast.And) else any
                return lambda values: how(_is_true(term(values)) for term in terms)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner_term = self._compile(operand)
                return lambda values: not _is_true(inner_term(values))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner_term = self._compile(operand)
                return lambda values: -_require_number(inner_term(values))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _binary_operation(type(op), self._compile(left), self._compile(right))
            case ast.Compare():
                return self._comparison(node)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                function, inner_term = _FUNCTIONS[name], self._compile(argument)
                return lambda values: function(inner_term(values))
            case ast.Call(func=ast.Name(id=name)):
                raise self._unsupported(node, f"{name}(…)")
            case _:
                raise self._unsupported(node, shorten(ast.unparse(node)))

    def _name(self, name: str) -> Expression:
        self.needs_parsed_record = self.needs_parsed_record or name in _COMPUTED_NAMES

        def value(values: Variables) -> Any:
            if name not in values:
                raise _missing_field(name, "record", values["record"])
            return values[name]

        return value

    def _lookup(self, inner: ast.expr, index: Expression) -> Expression:
        outer = self._compile(inner)

        def value(values: Variables) -> Any:
            whole, key = outer(values), index(values)
            if isinstance(whole, dict):
                if key not in whole:
                    raise _missing_field(key, ast.unparse(inner), whole)
                return whole[key]
            if isinstance(whole, list) and isinstance(key, int):
                return whole[key]
            raise TypeError(f"{ast.unparse(inner)} is {describe_type(whole)} and has no {shorten(key)}")

        return value

    def _comparison(self, node: ast.Compare) -> Expression:
        first, others = self._compile(node.left), [self._compile(other) for other in node.comparators]
        compare = [_COMPARISONS[type(op)] for op in node.ops]

        def compare_all(values: Variables) -> bool:
            left = first(values)
            for how, other in zip(compare, others, strict=True):
                right = other(values)
                if not how(*_alike(left, right)):
                    return False
                left = right
            return True

        return compare_all


def _missing_field(name: Any, whole: str, value: Any) -> BadRecordError:
    near = closest_key([str(name)], value) if isinstance(value, dict) else None
    hint = "" if near is None else f" Did you mean {near}?"
    return BadRecordError(
        "where",
        f"where: the record has no field {shorten(name)}.{hint} If it is optional, write: {name!r} in {whole} and …",
    )


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Both, a text as the number, true or false that it is if the other is one."""
    if isinstance(other, (int, float)):
        return as_number(one), other
    return (one, as_number(other)) if isinstance(one, (int, float)) else (one, other)


def _is_in(one: Any, others: Any) -> bool:
    return any(operator.eq(*_alike(one, other)) for other in others) if isinstance(others, list) else one in others


def _is_true(value: Any) -> bool:
    return bool(as_number(value))


def _require_number(value: Any) -> Any:
    value = as_number(value)
    if not isinstance(value, (int, float)):
        raise TypeError(f"{shorten(value)} is {describe_type(value)}, not a number")
    return value


def _binary_operation(op: type[ast.operator], left: Expression, right: Expression) -> Expression:
    """Arithmetic on numbers, and `+` on strings; `%` and `*` on strings could fill the memory."""

    def value(values: Variables) -> Any:
        a, b = left(values), right(values)
        if op is ast.Add and isinstance(a, str) and isinstance(b, str):
            return a + b
        return _ARITHMETIC[op](_require_number(a), _require_number(b))

    return value
