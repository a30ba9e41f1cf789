"""Containers: every kind of file gives the same records; a truncated file is an error, never a shorter file."""

from __future__ import annotations

import collections
import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation, Message, ParsedRecord, PlainText, ToolCall
from whet.data.read.containers import json_files
from whet.data.read.containers.json_files import split_array
from whet.data.read.sources import SourceReader, expected_records, read_source, source_bytes

from ..conftest import line

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

GOOD = line(("user", "Hi"), ("assistant", "Hello"))
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")).filter(str.strip)
TALK = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXT), min_size=1, max_size=3)
FAST = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: object, **options: Any) -> list[ParsedRecord]:
    return list(read_source(Source(path=str(path), **options)))


def write_zstd(path: Path, data: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(data)


def to_json_lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def to_csv(records: list[Any], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(["messages"])
    writer.writerows([json.dumps(record["messages"], ensure_ascii=False)] for record in records)
    return text.getvalue().encode()


def write_arrow(path: Path, records: list[Any], *, file: bool) -> None:
    table = pa.Table.from_pylist(records)
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITERS: dict[str, Callable[[Path, list[Any]], object]] = {
    "a.jsonl": lambda path, records: path.write_bytes(to_json_lines(records)),
    "a.ndjson": lambda path, records: path.write_bytes(
        b"\xef\xbb\xbf" + to_json_lines(records).replace(b"\n", b"\r\n")
    ),
    "a.json": lambda path, records: path.write_text(json.dumps(records)),
    "pretty.json": lambda path, records: path.write_text(json.dumps(records, indent=2, ensure_ascii=False)),
    "object.json": lambda path, records: path.write_text(json.dumps({"version": 1, "data": records})),
    "a.jsonl.gz": lambda path, records: path.write_bytes(gzip.compress(to_json_lines(records))),
    "a.json.gz": lambda path, records: path.write_bytes(gzip.compress(json.dumps(records).encode())),
    "a.jsonl.zst": lambda path, records: write_zstd(path, to_json_lines(records)),
    "a.csv": lambda path, records: path.write_bytes(b"\xef\xbb\xbf" + to_csv(records)),
    "a.tsv.gz": lambda path, records: path.write_bytes(gzip.compress(to_csv(records, "\t"))),
    "a.parquet": lambda path, records: pa.parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=3),
    "a.arrow": lambda path, records: write_arrow(path, records, file=False),
    "a.feather": lambda path, records: write_arrow(path, records, file=True),
}


@FAST
@given(st.lists(TALK, min_size=1, max_size=5))
def test_every_container_gives_the_same_conversations(tmp_path: Path, talks: list[list[tuple[str, str]]]) -> None:
    talks = [[("user", "a"), ("assistant", "b")], *talks]  # else the roles may seem to be swapped
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    wanted = [tuple(Message(role, text) for role, text in talk) for talk in talks]
    for name, write in WRITERS.items():
        path = tmp_path / name
        write(path, records)
        items = read(path)
        assert [getattr(item, "messages", item) for item in items] == wanted, name
        assert {item.origin.source for item in items} == {str(path)}, name
        if "csv" not in name and "tsv" not in name:  # a record may span lines
            assert [item.origin.line for item in items] == [*range(1, len(talks) + 1)], name


@pytest.mark.parametrize("name", WRITERS)
def test_size_and_count_are_about_right_and_slices_work(tmp_path: Path, name: str) -> None:
    records = [json.loads(line(("user", f"{n} " * 20), ("assistant", "b"))) for n in range(300)]
    path = tmp_path / name
    WRITERS[name](path, records)
    source = Source(path=str(path))
    assert expected_records(source) == 300
    assert expected_records(Source(path=str(path), start=10, max_samples=7)) == 7
    assert source_bytes(source) > 300 * 20 / 4
    texts = [item.messages[0].content for item in read(path, start=200, step=30)]  # type: ignore[union-attr]
    assert texts == [f"{n} " * 20 for n in range(200, 300, 30)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.json"])
def test_a_large_file_is_estimated(tmp_path: Path, name: str) -> None:
    records = [json.loads(line(("user", os.urandom(250).hex()), ("assistant", "b"))) for _ in range(4000)]
    WRITERS[name](tmp_path / name, records)
    assert 2000 < expected_records(Source(path=str(tmp_path / name))) < 12000


# Truncated and corrupt files


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.parquet", "a.arrow", "a.feather"]
)
@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_an_error(tmp_path: Path, name: str, keep: float) -> None:
    path = tmp_path / name
    WRITERS[name](path, [json.loads(line(("user", os.urandom(90).hex()), ("assistant", "b"))) for _ in range(900)])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(WhetError, match=rf"{name}.*truncated.*[Cc]opy"):
        read(path)


def test_records_before_the_truncation_are_read(tmp_path: Path) -> None:
    records = [json.loads(line(("user", os.urandom(90).hex()), ("assistant", "b"))) for _ in range(900)]
    for name, data in (("a.jsonl.gz", gzip.compress(to_json_lines(records))), ("a.json", json.dumps(records).encode())):
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        items = read_source(Source(path=str(tmp_path / name)))
        given: list[ParsedRecord] = []
        with pytest.raises(WhetError):
            collections.deque(map(given.append, items), maxlen=0)
        assert 300 < len(given) < 500


def test_a_flipped_byte_in_gzip_is_an_error(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(to_json_lines([json.loads(GOOD)] * 50), compresslevel=0))
    data[len(data) // 2] ^= 1
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(WhetError, match="CRC"):
        read(tmp_path / "a.jsonl.gz")


def test_an_arrow_stream_without_end_marker_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, [json.loads(GOOD)] * 5, file=False)
    path.write_bytes(path.read_bytes()[:-8])  # between two batches: Arrow itself reports nothing
    with pytest.raises(WhetError, match="end-of-stream marker is missing"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 and rubbish", "not Parquet data"),
        ("a.parquet", b"rubbish that is long enough", "not Parquet data"),
        ("a.arrow", b"rubbish that is long enough", "not Arrow data"),
        ("a.arrow", b"ARROW1\0\0 and rubbish", "not Arrow data"),
        ("a.parquet.gz", gzip.compress(b"x", mtime=0), "decompress the file"),
        ("a.json", b'[{"a": 1}] [', "after the end of the JSON array"),
        ("a.json", b'{"a": ', "not valid JSON"),
        ("a.json", b'{\n"a": NaN,\n', "not valid JSON"),
        ("a.json", b'{"a": [{"b": 1}], "c": [{"b": 1}]}', r"several keys hold lists of records \(a, c\)"),
        ("a.jsonl", "\n".join([GOOD] * 3).encode("utf-16-le"), "UTF-16 without a byte order mark; save it as UTF-8"),
        ("a.jsonl", GOOD.encode("utf-16")[:-1], "not valid UTF-16"),
        ("a.jsonl", bytes(range(256)) * 20, "binary data"),
        ("a.csv", b"a,a\n1,2\n", "'a' twice"),
        ("a.bin", b"\0\0", "a.idx is missing next to it"),
        ("empty.jsonl", b"", "the file is empty"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_rejected(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WhetError, match=f"{name}.*{message}"):
        read(tmp_path / name)


# JSON arrays


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('"\\[]{},: aé\n'), max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ), max_size=5),
    st.integers(1, 40), st.none() | st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_any_array_is_split_at_any_chunk_size(
    values: list[Any], chunk: int, indent: int | None, ascii_only: bool
) -> None:
    data = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "_ARRAY_CHUNK_BYTES", chunk)
        assert [json.loads(element) for element in split_array(io.BytesIO(data), "a")] == values
        for cut in (len(data) - 1, len(data) // 2):
            if cut:
                with pytest.raises(WhetError, match="truncated"):
                    list(split_array(io.BytesIO(data[:cut]), "a"))


def test_an_array_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "_ARRAY_CHUNK_BYTES", 64)
    stream = io.BytesIO(b"[" + b",".join([b'{"a": 1}'] * 1000) + b"]")
    found = split_array(stream, "a")
    assert [next(found) for _ in range(10)] == [b'{"a": 1}'] * 10
    assert stream.tell() < 1000


def test_a_bad_element_is_one_bad_record_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'[{GOOD}, {{"messages": NaN}}, {{"messages" 3}}, {GOOD}, ]')
    items = read(tmp_path / "a.json")
    assert [type(item) for item in items] == [Conversation, BadRecord, BadRecord, Conversation, BadRecord]
    assert str(items[2].origin) == f"{tmp_path}/a.json:3"


def test_a_json_file_of_lines_is_read_to_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f"{GOOD}\n{GOOD}\n{{\n")
    assert [type(item) for item in read(path)] == [Conversation, Conversation, BadRecord]
    bare = json.dumps(json.loads(GOOD)["messages"])
    path.write_text(f"{bare}\n{bare}\n")
    assert [type(item) for item in read(path)] == [Conversation, Conversation]


def test_a_json_object_is_one_record_or_holds_a_list_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(json.loads(GOOD), indent=1))
    assert [type(item) for item in read(path)] == [Conversation]
    path.write_text(json.dumps({"train": [json.loads(GOOD)] * 2, "test": [json.loads(GOOD)]}))
    assert len(read(path, split="train")) == 2
    assert len(read(path, split="test")) == 1
    with pytest.raises(WhetError, match="has the key 'dev'; known: train, test"):
        read(path, split="dev")
    path.write_text(json.dumps({"data": [json.loads(GOOD)] * 2}))
    assert "records under 'data'" in str(SourceReader(Source(path=str(path))).description)


# Tables


def test_a_null_in_a_table_is_an_absent_field(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"city": "Riga", "day": None}}]
    turns = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": "b", "tool_calls": calls},
    ]
    pa.parquet.write_table(pa.Table.from_pylist([{"messages": turns, "lang": None}]), tmp_path / "a.parquet")
    [item] = read(tmp_path / "a.parquet")
    assert isinstance(item, Conversation)
    assert item.messages[1].tool_calls == (ToolCall("f", {"city": "Riga"}),)
    [kept] = read(tmp_path / "a.parquet", where="lang == None")
    assert isinstance(kept, Conversation)


def test_two_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    pq.write_table(pa.Table.from_arrays(columns, ["prompt", "completion", "completion"]), tmp_path / "a.parquet")
    with pytest.raises(WhetError, match="two columns have the name 'completion'"):
        SourceReader(Source(path=str(tmp_path / "a.parquet")))


def test_an_explicit_null_in_json_is_kept(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"city": None}}]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": [{"role": "assistant", "content": "b", "tool_calls": calls}]})
    )
    [item] = read(tmp_path / "a.jsonl")
    assert isinstance(item, Conversation)
    assert item.messages[0].tool_calls == (ToolCall("f", {"city": None}),)


def test_a_row_with_invalid_utf8_is_bad_and_its_neighbours_are_read(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff", b"fine"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    items = read(tmp_path / "a.parquet", format="text")
    assert [type(item) for item in items] == [PlainText, BadRecord, PlainText]
    assert items[1].reason == "not UTF-8"  # type: ignore[union-attr]


def test_rows_are_converted_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS["a.parquet"](tmp_path / "a.parquet", [json.loads(GOOD)] * 10)
    reader = SourceReader(Source(path=str(tmp_path / "a.parquet")))
    monkeypatch.setattr(
        "whet.data.read.containers.arrow_tables.RowBatch.rows", property(lambda _: pytest.fail("converted"))
    )
    assert len(list(reader.records())) == 10


def test_csv_records_have_line_numbers_and_bad_ones_reasons(tmp_path: Path) -> None:
    rows = b'prompt,completion\n"a\nb",c\n\nonly one\nd,\xc3\xa9\nf,\xff\n"x"y,z\ng,h\n'
    (tmp_path / "a.csv").write_bytes(rows)
    items = read(tmp_path / "a.csv")
    assert [(type(item), item.origin.line) for item in items] == [
        (Conversation, 2), (BadRecord, 5), (Conversation, 6), (BadRecord, 7), (BadRecord, 8), (Conversation, 9),
    ]  # fmt: skip
    assert [item.reason for item in items if isinstance(item, BadRecord)] == ["broken CSV", "not UTF-8", "broken CSV"]
    assert items[0].messages[0].content == "a\nb"  # type: ignore[union-attr]


def test_a_csv_field_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,completion\na,{'b' * 200_000}\n")
    [item] = read(tmp_path / "a.csv")
    assert len(item.messages[1].content) == 200_000  # type: ignore[union-attr]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne\n\nTwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"Three"))
    items = read(tmp_path)
    assert [item.text for item in items] == ["One\n\nTwo\n", "Three"]  # type: ignore[union-attr]
    (tmp_path / "c.txt").write_bytes(b"a\xff")
    assert [type(item) for item in read(tmp_path)] == [PlainText, PlainText, BadRecord]
