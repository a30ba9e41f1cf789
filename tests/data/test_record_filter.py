"""Filters: an expression over a record's fields, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.core.errors import BadRecordError, WhetError
from whet.data.read.record_filter import RecordFilter

RECORD = {"lang": "De", "score": 3, "ok": True, "none": None, "tags": ["a", "b"], "meta": {"lang": "fr", "n": {"x": 1}},
          "turns": 99, "two words": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
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
def test_an_expression_holds_or_not(text: str, holds: bool) -> None:
    assert RecordFilter(text)(RECORD, turns=4, characters=70) is holds


@pytest.mark.parametrize(
    ("text", "says"),
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
def test_what_is_no_filter_is_refused_when_it_is_read(text: str, says: str) -> None:
    if says == "where|never":  # as many digits as Python reads
        RecordFilter(text)
        return
    with pytest.raises(WhetError, match=says) as caught:
        RecordFilter(text)
    assert str(caught.value).startswith("data.sources: where: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope == 1", "no field 'nope' in this record.*'nope' in record and"),
        ("meta.nope == 1", "no field 'nope'.*'nope' in meta and"),
        ("lang < 3", "no answer here"), ("lang.x == 1", "lang is text and has no 'x'"), ("len(score) > 1", "no answer"),
        ("lower(score) == 'a'", "no answer"), ("tags[5] == 1", "no answer"), ("score / 0 > 1", "no answer"),
        ("lang * 9 == 1", "not a number"), ("'%999999999d' % score == ''", "not a number"),
        ("tags + tags == 1", "not a number"),
        ("lang in 3", "no answer"), ("[] in meta", "no answer"), ("meta[tags] == 1", "no answer"),
        ("-lang == 1", "not a number"),
    ],
)  # fmt: skip
def test_a_record_that_allows_no_answer_is_bad(text: str, says: str) -> None:
    with pytest.raises(BadRecordError, match=says) as caught:
        RecordFilter(text)(RECORD)
    assert caught.value.reason == "where"


def test_a_filter_knows_whether_it_counts() -> None:
    assert RecordFilter("turns > 1").needs_parsed_record
    assert RecordFilter("ok and 3 < characters").needs_parsed_record
    assert not RecordFilter("lang == 'turns' and meta.turns").needs_parsed_record


def test_a_record_that_is_a_list_has_no_fields() -> None:
    assert RecordFilter("len(record) == 2 and turns == 2")([1, 2], turns=2)
    with pytest.raises(BadRecordError):
        RecordFilter("lang == 'de'")([1, 2])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(
        ["lang", "score", "tags", "meta", "record", "turns", "len(", "lower(", "(", ")", "[", "]", ".", "==", "<", "in",
         "not", "and", "or", "+", "*", "%", "/", "1", "0", "'a'", "None", ",", "x", "**", "if", "else", "lambda", ":"]
    ), max_size=9),
)  # fmt: skip
def test_any_text_is_a_filter_or_refused(words: list[str]) -> None:
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
