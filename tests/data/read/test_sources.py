"""Reading sources: every line is a conversation or a bad record with line and reason; nothing is skipped silently."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.builtin import BUILTIN_GENERATORS, GeneratedSample, generate_orders
from whet.data.config import DEFAULT_BUILTIN_SAMPLES, Source
from whet.data.conversation import BadRecord, Conversation, FilteredRecord, Message, ParsedRecord
from whet.data.read.containers import file_types
from whet.data.read.sources import SourceReader, expected_records, read_source, source_bytes, source_fingerprint

from ..conftest import line

GOOD = line(("user", "Hi"), ("assistant", "Hello"))
Jsonl = Callable[..., Path]
ON_ONE_FILE = settings(
    max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read(path: Path, **options: Any) -> list[ParsedRecord]:
    return list(read_source(Source(path=str(path), **options)))


def test_each_record_has_its_origin(jsonl: Jsonl) -> None:
    path = jsonl(GOOD, line(("user", "Ho"), ("assistant", "Ho ho")))
    first, second = read(path)
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert (str(first.origin), str(second.origin)) == (f"{path}:1", f"{path}:2")
    assert [message.content for message in second.messages] == ["Ho", "Ho ho"]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "broken JSON"),
        (b"nope", "broken JSON"),
        (GOOD.encode() + b",", "broken JSON"),
        (GOOD.encode() * 2, "broken JSON"),
        (b"[1]", "bad message"),
        (b"3", "not an object"),
        (b"NaN", "broken JSON"),
        (b'{"messages": -Infinity}', "broken JSON"),
        (b"{}", "no messages"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "bad text"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "not UTF-8"),
        ("{'messages': []}".encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "broken JSON"),
        (b'{"a":' * 100_000, "broken JSON"),
        (b"1" * 5000, "broken JSON"),
        (b"\x00", "broken JSON"),
        (b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}', "bad text"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "bad content"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value[:20]),
)
def test_a_bad_record_has_line_and_reason_and_its_neighbours_are_read(jsonl: Jsonl, raw: bytes, reason: str) -> None:
    path = jsonl(GOOD, raw, GOOD)
    before, bad, after = read(path)
    assert isinstance(before, Conversation)
    assert isinstance(after, Conversation)
    assert isinstance(bad, BadRecord)
    assert (str(bad.origin), bad.reason) == (f"{path}:2", reason)
    assert bad.explanation


def test_broken_json_is_reported_with_its_column(jsonl: Jsonl) -> None:
    [bad] = read(jsonl('{"messages": x}'))
    assert isinstance(bad, BadRecord)
    assert "column 14" in bad.explanation


def test_columns_count_leading_white_space(jsonl: Jsonl) -> None:
    [bad] = read(jsonl('   {"messages": x}'))
    assert isinstance(bad, BadRecord)
    assert "column 17" in bad.explanation


def test_the_first_line_of_an_array_over_many_lines_gets_a_hint(jsonl: Jsonl) -> None:
    first = read(jsonl("[", GOOD + ",", GOOD), format="messages")[0]  # truncated: no array
    assert isinstance(first, BadRecord)
    assert "name it .json" in first.explanation


def test_an_invalid_byte_is_reported_with_its_offset(jsonl: Jsonl) -> None:
    [bad] = read(jsonl(b'{"\xff": 1}'))
    assert isinstance(bad, BadRecord)
    assert "byte 2 " in bad.explanation


def test_blank_lines_are_skipped_but_counted_as_lines(jsonl: Jsonl) -> None:
    items = read(jsonl("", GOOD, "  \t", GOOD, "", ""))
    assert [item.origin.line for item in items] == [2, 4]


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n{GOOD}\r\n\r\n".encode())
    assert [type(item) for item in read(path)] == [Conversation, Conversation]


def test_a_last_line_without_newline_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}")
    assert len(read(path)) == 2


def test_line_separators_inside_text_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "separators.jsonl"
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False))
    [item] = read(path)
    assert isinstance(item, Conversation)
    assert item.messages[0].content == text


def test_max_samples_counts_bad_records(jsonl: Jsonl) -> None:
    items = read(jsonl(GOOD, "{", GOOD, GOOD), max_samples=3)
    assert [item.origin.line for item in items] == [1, 2, 3]


@ON_ONE_FILE
@given(st.lists(st.binary(max_size=40) | st.just(GOOD.encode()), max_size=6))
def test_any_bytes_give_one_record_per_nonblank_line(tmp_path: Path, lines: list[bytes]) -> None:
    content = b"\n".join(lines)
    others = [b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"PAR1", b"ARROW1", b"PK", b"<", b"\xff\xfe", b"\xfe\xff"]
    if not content or content.lstrip().startswith((*others, *(magic for magic, *_ in file_types._OTHER_FILES))):
        return  # other containers
    path = tmp_path / "any.jsonl"
    path.write_bytes(content)
    wanted = [number for number, raw in enumerate(content.split(b"\n"), 1) if raw.strip()]
    assert [item.origin.line for item in read(path, format="messages")] == wanted


@ON_ONE_FILE
@given(st.lists(st.tuples(st.integers(0, 3 * len(GOOD)), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_valid_file_with_bytes_overwritten_is_still_read_line_by_line(
    tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(f"{GOOD}\n{GOOD}\n{GOOD}\n".encode())
    for place, byte in changes:
        content[place] = byte
    path = tmp_path / "mutated.jsonl"
    path.write_bytes(content)
    wanted = [number for number, raw in enumerate(bytes(content).split(b"\n"), 1) if raw.strip()]
    assert [item.origin.line for item in read(path, format="messages")] == wanted


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(depth=st.integers(1, 3000), shape=st.sampled_from(["[]", "{}"]), where=st.integers(0, 3))
def test_deep_nesting_anywhere_is_a_bad_record(tmp_path: Path, depth: int, shape: str, where: int) -> None:
    deep = "[" * depth + "]" * depth if shape == "[]" else '{"a":' * depth + "1" + "}" * depth
    record = (
        deep,
        f'{{"messages": {deep}}}',
        f'{{"messages": [{{"role": {deep}}}]}}',
        f'{{"messages": [{{"role": "user", "content": {deep}}}]}}',
    )[where]
    path = tmp_path / "deep.jsonl"
    path.write_text(record)
    [item] = read(path, format="messages")
    assert isinstance(item, BadRecord)


# Missing and empty files


def test_a_missing_file_is_named_with_the_folder_and_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WhetError) as caught:
        read(Path("nope.jsonl"))
    assert "nope.jsonl: no such file" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "builtin:orders" in str(caught.value)


def test_an_empty_file_is_named_with_an_example(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(WhetError, match=r"empty\.jsonl: the file is empty.*\"messages\""):
        read(path)


def test_a_folder_without_data_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Data")
    with pytest.raises(WhetError, match=rf"{tmp_path}: the folder has no data files \(.jsonl.*Give a file"):
        read(tmp_path)


def test_a_tilde_is_the_home_folder(jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(GOOD)
    monkeypatch.setenv("HOME", str(path.parent))
    assert len(read(Path("~") / path.name)) == 1


# Built-in datasets


def test_a_builtin_dataset_has_origins_counted_from_1() -> None:
    items = list(read_source(Source(path="builtin:orders", max_samples=3)))
    samples = list(itertools.islice(generate_orders("train"), 3))
    for number, (item, sample) in enumerate(zip(items, samples, strict=True), 1):
        assert isinstance(item, Conversation)
        assert item.messages == sample.messages
        assert [message.role for message in item.messages] == ["user", "assistant"]
        assert str(item.origin) == f"builtin:orders/train:{number}"


def test_a_builtin_dataset_is_endless_so_it_has_a_default_limit() -> None:
    assert len(list(read_source(Source(path="builtin:orders")))) == DEFAULT_BUILTIN_SAMPLES
    assert len(list(read_source(Source(path="builtin:orders", max_samples=1203)))) == 1203


def test_the_splits_of_a_builtin_dataset_differ() -> None:
    train, held = (
        list(read_source(Source(path="builtin:orders", split=s, max_samples=5))) for s in ("train", "held-out")
    )  # type: ignore[arg-type]
    assert {item.messages for item in train}.isdisjoint({item.messages for item in held})  # type: ignore[union-attr]


@pytest.mark.parametrize("function", [source_fingerprint, source_bytes, SourceReader])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source(path="builtin:order"), "there is no builtin:order; known: builtin:orders"),
        (Source(path="builtin:orders", split="test"), "no split 'test'; known: train, held-out"),
        (Source(path="builtin:orders", format="alpaca"), "format does not apply"),
        (Source(path="builtin:orders", fields={"text": "a"}), "fields does not apply"),
        (Source(path="builtin:orders", subset="a"), "subset does not apply"),
    ],
)
def test_a_wrong_builtin_dataset_is_rejected(
    function: Callable[[Source], object], source: Source, message: str
) -> None:
    with pytest.raises(WhetError, match=message):
        function(source)


def test_a_builtin_dataset_can_be_filtered() -> None:
    items = list(read_source(Source(path="builtin:arithmetic", calculator="calls", where="turns == 4")))
    kept = [item for item in items if isinstance(item, Conversation)]
    assert len(items) == DEFAULT_BUILTIN_SAMPLES
    assert 0 < len(kept) < DEFAULT_BUILTIN_SAMPLES
    assert all(len(item.messages) == 4 for item in kept)


# Fingerprint, size, number of records


def test_a_fingerprint_depends_on_the_content_not_on_the_name(jsonl: Jsonl) -> None:
    one, same, other = jsonl(GOOD, name="a"), jsonl(GOOD, name="b"), jsonl(GOOD, GOOD, name="c")
    of = {path: source_fingerprint(Source(path=str(path))) for path in (one, same, other)}
    assert of[one] == of[same]
    assert of[one] != of[other]
    assert of[one] != source_fingerprint(Source(path=str(one), max_samples=1))


def test_the_fingerprint_of_a_builtin_dataset_depends_on_its_split_and_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(path="builtin:orders")
    before = source_fingerprint(source)
    assert before != source_fingerprint(Source(path="builtin:orders", split="held-out"))
    monkeypatch.setitem(
        BUILTIN_GENERATORS, "builtin:orders", lambda *_: iter([GeneratedSample((Message("user", "a"),))] * 9)
    )
    assert source_fingerprint(source) != before


@pytest.mark.parametrize(
    ("name", "split", "digest"),
    [
        ("orders", "train", "b67ee9bdf8f1d03c"), ("orders", "held-out", "9e8ae3bc0d337226"),
        ("spelling", "train", "dcce6db864c9ed1f"), ("spelling", "held-out", "b325cc4f58467195"),
        ("spelling-bee", "train", "86e680262592a3db"), ("spelling-bee", "held-out", "d618b174ef781fa9"),
        ("arithmetic", "train", "5c966be984b0a2f0"), ("arithmetic", "held-out", "23c3d8656e3c9c71"),
    ],
)  # fmt: skip
def test_the_fingerprints_of_builtin_datasets_are_pinned(name: str, split: str, digest: str) -> None:
    """Store keys contain them: another fingerprint would make existing stores unusable."""
    found = source_fingerprint(Source(path=f"builtin:{name}", split=split, calculator="calls"))
    assert hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16] == digest


def test_source_bytes_is_about_the_size_of_the_texts(jsonl: Jsonl) -> None:
    path = jsonl(GOOD)
    assert source_bytes(Source(path=str(path))) == path.stat().st_size
    samples = itertools.islice(generate_orders("train"), 100)
    texts = sum(len(message.content) for sample in samples for message in sample.messages)
    assert texts <= source_bytes(Source(path="builtin:orders", max_samples=100)) <= 2 * texts


def test_expected_records(jsonl: Jsonl, tmp_path: Path) -> None:
    assert expected_records(Source(path=str(jsonl(GOOD, GOOD)), max_samples=1)) == 1
    cut = tmp_path / "cut"
    cut.write_text(f"{GOOD}\n{GOOD}")
    assert expected_records(Source(path=str(cut))) == 2
    assert expected_records(Source(path="builtin:orders")) == DEFAULT_BUILTIN_SAMPLES
    assert expected_records(Source(path="builtin:orders", max_samples=5)) == 5
    assert expected_records(Source(path="builtin:orders", start=5, stop=25, step=2)) == 10
    assert expected_records(Source(path=str(jsonl(*[GOOD] * 10)), start=1, stop=9, step=3)) == 3


# Slices and filters


@ON_ONE_FILE
@given(
    st.none() | st.integers(0, 12), st.none() | st.integers(1, 12), st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 12),
)  # fmt: skip
def test_start_stop_and_step_are_a_python_slice(
    tmp_path: Path, start: int | None, stop: int | None, step: int | None, most: int | None
) -> None:
    path = tmp_path / "ten.jsonl"
    path.write_text("\n\n".join([GOOD] * 9))  # blank lines are not records
    source = Source(path=str(path), start=start, stop=stop, step=step, max_samples=most)
    wanted = [2 * n + 1 for n in range(9)][start:stop:step][:most]
    assert [item.origin.line for item in read_source(source)] == wanted


def test_a_builtin_dataset_is_sliced() -> None:
    def lines(**options: int) -> list[int]:
        return [item.origin.line for item in read_source(Source(path="builtin:orders", **options))]

    assert lines(start=3, stop=9, step=2) == [4, 6, 8]
    assert lines(stop=1500)[-1] == 1500
    assert lines(start=5)[0] == 6
    assert len(lines(start=5)) == DEFAULT_BUILTIN_SAMPLES


def test_readers_give_the_same_records_without_decoding_them(jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(path=str(jsonl(*(line(("user", str(n)), ("assistant", "b")) for n in range(9)))))
    one, two = SourceReader(source), SourceReader(source)
    monkeypatch.setattr("whet.data.read.containers.container.decode_json", lambda raw: pytest.fail("decoded"))
    assert list(one.records()) == list(two.records()) == list(one.records())
    assert all(isinstance(raw.value, bytes) for raw in one.records())


def test_a_filter_drops_records_and_one_it_cannot_evaluate_is_bad(jsonl: Jsonl) -> None:
    records = [{**json.loads(GOOD), **more} for more in ({"lang": "de"}, {"lang": "en"}, {}, {"lang": 3})]
    items = read(jsonl(*map(json.dumps, records)), where="lower(lang) == 'de'")
    assert [type(item) for item in items] == [Conversation, FilteredRecord, BadRecord, BadRecord]
    assert [item.origin.line for item in items] == [1, 2, 3, 4]
    assert [item.reason for item in items[1:]] == ["filter", "where", "where"]  # type: ignore[union-attr]
    assert "no field 'lang'" in items[2].explanation  # type: ignore[union-attr]


def test_filtered_records_are_parsed_only_if_turns_are_counted(jsonl: Jsonl) -> None:
    bad = json.dumps({"messages": [], "lang": "en"})
    good = json.dumps({**json.loads(GOOD), "lang": "de"})
    assert [type(item) for item in read(jsonl(good, bad), where="lang == 'de'")] == [Conversation, FilteredRecord]
    both = read(jsonl(good, bad), where="turns == 2 and characters == 7 and lang == 'de'")
    assert [type(item) for item in both] == [Conversation, BadRecord]


@pytest.mark.parametrize(
    "options",
    [
        {"start": 1}, {"stop": 1}, {"step": 2}, {"max_samples": 1}, {"where": "turns > 1"}, {"calculator": "calls"},
        {"format": "messages"}, {"fields": {"messages": "messages"}},
    ],
)  # fmt: skip
def test_a_fingerprint_depends_on_every_option_that_changes_what_is_read(jsonl: Jsonl, options: dict[str, Any]) -> None:
    path = str(jsonl(GOOD, GOOD))
    assert source_fingerprint(Source(path=path)) != source_fingerprint(Source(path=path, **options))


def test_a_fingerprint_depends_on_the_kind_of_file_but_not_on_epochs(jsonl: Jsonl) -> None:
    of = {
        name: source_fingerprint(Source(path=str(jsonl(GOOD, name=name)))) for name in ("a.jsonl", "a.txt", "b.jsonl")
    }
    assert of["a.jsonl"] == of["b.jsonl"] != of["a.txt"]
    assert of["a.jsonl"] == source_fingerprint(Source(path=str(jsonl(GOOD)), epochs=2.0))
