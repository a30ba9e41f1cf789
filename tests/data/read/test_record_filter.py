"""Filters: expressions over a record's fields, and nothing else of Python."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import BadRecordError, WhetError
from whet.data.read.sources import RecordFilter

RECORD = {"lang": "De", "score": 3, "ok": True, "none": None, "tags": ["a", "b"], "meta": {"lang": "fr", "n": {"x": 1}},
          "turns": 99, "two words": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lang == 'De'", True), ("lang == 'de'", False), ("lower(lang) == 'de'", True), ("lang != 'De'", False),
        ("score > 2", True), ("score >= 3", True), ("score < 3", False), ("score <= 3", True),
        ("2 < score < 4", True), ("2 < score < 3", False), ("4 > score < 2", False), ("score == 3.0", True),
        ("score > 2 and ok", True), ("score > 5 or ok", True), ("score > 5 and ok", False), ("not ok", False),
        ("'a' in tags", True), ("'c' in tags", False), ("'c' not in tags", True), ("lang in ['De', 'En']", True),
        ("lang in ('En',)", False), ("'e' in lang", True), ("len(tags) == 2", True), ("len(lang) + 1 == score", True),
        ("meta.lang == 'fr'", True), ("meta['lang'] == 'fr'", True), ("meta.n.x == 1", True), ("tags[1] == 'b'", True),
        ("tags[-1] == 'b'", True), ("none is None", True), ("none is not None", False), ("none == None", True),
        ("turns == 4", True), ("record['turns'] == 99", True), ("characters == 70", True),
        ("'lang' in record and lang == 'De'", True), ("'nope' in record and nope == 1", False),
        ("'nope' not in record or nope == 1", True), ("record['two words'] == 1", True),
        ("score - 1 == 2", True), ("score * 2 == 6", True), ("score / 2 == 1.5", True), ("score // 2 == 1", True),
        ("score % 2 == 1", True), ("-score == -3", True), ("lang + 'x' == 'Dex'", True), ("  ok\nand\n1", True),
        ("1", True), ("True", True), ("''", False),
    ],
)  # fmt: skip
def test_expressions(text: str, expected: bool) -> None:
    assert RecordFilter(text)(RECORD, turns=4, characters=70) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score == 4", True), ("score != 4", False), ("score >= 3.5", True), ("5 > score", True), ("score > 9", False),
        ("score in [3, 4]", True), ("score not in [3, 4]", False), ("score == '4.0'", True), ("score == '4'", False),
        ("score % 2 == 0", True), ("id == 12345678901234567891", True), ("id == 12345678901234567890", False),
        ("bad", False), ("not bad", True), ("bad == False", True), ("bad != False", False), ("good and score", True),
        ("zero or bad", False), ("empty == 0", False), ("empty", False), ("lang", True), ("lang == 0", False),
        ("lang != 0", True), ("good == True", True), ("'e' in lang", True),
    ],
)  # fmt: skip
def test_numbers_and_flags_of_tables_are_no_texts(text: str, expected: bool) -> None:
    """`score != 4` and `good` kept every row of a CSV file, `not bad` none."""
    row = {"score": "4.0", "bad": "False", "good": "TRUE", "zero": "0", "empty": "", "lang": "De"}
    assert RecordFilter(text)({**row, "id": "12345678901234567891"}) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lang ==", "column 8"), ("", "data.sources: where: ''"), ("lang = 'de'", "where"), ("a; b", "column 2"),
        ("open('x')", r"open\(…\) at column 1"), ("ok and len(tags, 1)", r"len\(…\) at column 8"),
        ("lang.lower() == 'de'", "lang.lower"), ("__import__('os')", "__import__"),
        ("2 ** 9", r"'2 \*\* 9' at column 1"),
        ("[x for x in tags]", "at column 1"), ("lambda: 1", "at column 1"), ("f'{lang}'", "at column 1"),
        ("score if ok else 1", "at column 1"), ("1 << 99", "at column 1"), ("(a := 1)", "at column 2"),
        ("tags[0:1]", "column"), ("b'x'", "at column 1"), ("{1: 2}", "at column 1"), ("score @ 2", "at column 1"),
        ("(" * 900 + ")" * 900, "where"), ("x" * 3000, "longer than"), ("9" * 1990, "where|never"),
        ("a\0b", "where"), ("~score", "at column 1"), ("len(x=tags)", r"len\(…\)"), ("1j", "at column 1"),
    ],
)  # fmt: skip
def test_an_invalid_expression_is_rejected_by_the_constructor(text: str, message: str) -> None:
    if message == "where|never":  # fewer digits than Python's limit
        RecordFilter(text)
        return
    with pytest.raises(WhetError, match=message) as caught:
        RecordFilter(text)
    assert str(caught.value).startswith("data.sources: where: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope == 1", "the record has no field 'nope'.*'nope' in record and"),
        ("meta.nope == 1", "no field 'nope'.*'nope' in meta and"),
        ("lang < 3", "be evaluated"), ("lang.x == 1", "lang is text and has no 'x'"), ("len(score) > 1", "evaluated"),
        ("lower(score) == 'a'", "be evaluated"), ("tags[5] == 1", "be evaluated"), ("score / 0 > 1", "be evaluated"),
        ("lang * 9 == 1", "not a number"), ("'%999999999d' % score == ''", "not a number"),
        ("tags + tags == 1", "not a number"),
        ("lang in 3", "be evaluated"), ("[] in meta", "be evaluated"), ("meta[tags] == 1", "be evaluated"),
        ("-lang == 1", "not a number"),
    ],
)  # fmt: skip
def test_a_record_without_a_result_is_bad(text: str, message: str) -> None:
    with pytest.raises(BadRecordError, match=message) as caught:
        RecordFilter(text)(RECORD)
    assert caught.value.reason == "where"


def test_turns_and_characters_need_the_parsed_record() -> None:
    assert RecordFilter("turns > 1").needs_parsed_record
    assert RecordFilter("ok and 3 < characters").needs_parsed_record
    assert not RecordFilter("lang == 'turns' and meta.turns").needs_parsed_record


def test_a_record_that_is_a_list_has_no_fields() -> None:
    assert RecordFilter("len(record) == 2 and turns == 2")([1, 2], turns=2)
    with pytest.raises(BadRecordError):
        RecordFilter("lang == 'de'")([1, 2])


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.sampled_from(
        ["lang", "score", "tags", "meta", "record", "turns", "len(", "lower(", "(", ")", "[", "]", ".", "==", "<", "in",
         "not", "and", "or", "+", "*", "%", "/", "1", "0", "'a'", "None", ",", "x", "**", "if", "else", "lambda", ":"]
    ), max_size=9),
)  # fmt: skip
def test_any_text_is_a_filter_or_rejected(words: list[str]) -> None:
    try:
        where = RecordFilter(" ".join(words))
    except WhetError:
        return
    record: Any
    for record in (RECORD, {}, [], 3):
        try:
            assert where(record) in (True, False)
        except BadRecordError:
            continue
