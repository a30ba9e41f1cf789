"""Containers: the same records whatever they are kept in, and damage is never a shorter file."""

from __future__ import annotations

import collections
import csv
import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whet.core.errors import WhetError
from whet.data.config import MaskRules, Source
from whet.data.conversation import (
    BadRecord,
    Conversation,
    Message,
    ParsedRecord,
    PlainText,
    TokenizedDocument,
    ToolCall,
)
from whet.data.indexed_dataset import IndexedWriter
from whet.data.read import json_files
from whet.data.read.json_files import split_array
from whet.data.read.sources import SourceReader, expected_records, read_source, source_bytes, source_fingerprint

from .conftest import line

GOOD = line(("user", "Hi"), ("assistant", "Hello"))
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")).filter(str.strip)
TALK = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXT), min_size=1, max_size=3)
FAST = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: object, **options: Any) -> list[ParsedRecord]:
    return list(read_source(Source(path=str(path), **options)))


def zst(path: Path, data: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(data)


def as_lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def as_csv(records: list[Any], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(["messages"])
    writer.writerows([json.dumps(record["messages"], ensure_ascii=False)] for record in records)
    return text.getvalue().encode()


def as_stream(path: Path, records: list[Any], *, file: bool) -> None:
    table = pa.Table.from_pylist(records)
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITERS: dict[str, Callable[[Path, list[Any]], object]] = {
    "a.jsonl": lambda path, records: path.write_bytes(as_lines(records)),
    "a.ndjson": lambda path, records: path.write_bytes(b"\xef\xbb\xbf" + as_lines(records).replace(b"\n", b"\r\n")),
    "a.json": lambda path, records: path.write_text(json.dumps(records)),
    "pretty.json": lambda path, records: path.write_text(json.dumps(records, indent=2, ensure_ascii=False)),
    "object.json": lambda path, records: path.write_text(json.dumps({"version": 1, "data": records})),
    "a.jsonl.gz": lambda path, records: path.write_bytes(gzip.compress(as_lines(records))),
    "a.json.gz": lambda path, records: path.write_bytes(gzip.compress(json.dumps(records).encode())),
    "a.jsonl.zst": lambda path, records: zst(path, as_lines(records)),
    "a.csv": lambda path, records: path.write_bytes(b"\xef\xbb\xbf" + as_csv(records)),
    "a.tsv.gz": lambda path, records: path.write_bytes(gzip.compress(as_csv(records, "\t"))),
    "a.parquet": lambda path, records: pa.parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=3),
    "a.arrow": lambda path, records: as_stream(path, records, file=False),
    "a.feather": lambda path, records: as_stream(path, records, file=True),
}


@FAST
@given(st.lists(TALK, min_size=1, max_size=5))
def test_every_container_gives_the_same_conversations(tmp_path: Path, talks: list[list[tuple[str, str]]]) -> None:
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    wanted = [tuple(Message(role, text) for role, text in talk) for talk in talks]
    for name, write in WRITERS.items():
        path = tmp_path / name
        write(path, records)
        items = read(path)
        assert [getattr(item, "messages", item) for item in items] == wanted, name
        assert {item.origin.source for item in items} == {str(path)}, name
        if "csv" not in name and "tsv" not in name:  # there a record may go over lines
            assert [item.origin.line for item in items] == [*range(1, len(talks) + 1)], name


@pytest.mark.parametrize("name", WRITERS)
def test_size_and_count_are_about_right_and_slices_are_the_same(tmp_path: Path, name: str) -> None:
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


# Damage


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.parquet", "a.arrow", "a.feather"]
)
@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path, name: str, keep: float) -> None:
    path = tmp_path / name
    WRITERS[name](path, [json.loads(line(("user", os.urandom(90).hex()), ("assistant", "b"))) for _ in range(900)])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(WhetError, match=rf"{name}.*(cut off|damaged).*[Cc]opy"):
        read(path)


def test_what_stands_before_the_damage_is_given_first(tmp_path: Path) -> None:
    records = [json.loads(line(("user", os.urandom(90).hex()), ("assistant", "b"))) for _ in range(900)]
    for name, data in (("a.jsonl.gz", gzip.compress(as_lines(records))), ("a.json", json.dumps(records).encode())):
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        items = read_source(Source(path=str(tmp_path / name)))
        given: list[ParsedRecord] = []
        with pytest.raises(WhetError):
            collections.deque(map(given.append, items), maxlen=0)
        assert 300 < len(given) < 500


def test_a_flipped_byte_in_gzip_is_an_error(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(as_lines([json.loads(GOOD)] * 50), compresslevel=0))
    data[len(data) // 2] ^= 1
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(WhetError, match="CRC"):
        read(tmp_path / "a.jsonl.gz")


def test_an_arrow_stream_whose_end_is_missing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    as_stream(path, [json.loads(GOOD)] * 5, file=False)
    path.write_bytes(path.read_bytes()[:-8])  # exactly between two batches: Arrow itself sees no fault
    with pytest.raises(WhetError, match="end is missing"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.parquet", b"PAR1 and rubbish", "no Parquet file"),
        ("a.parquet", b"rubbish that is long enough", "no Parquet file"),
        ("a.arrow", b"rubbish that is long enough", "no Arrow file"),
        ("a.arrow", b"ARROW1\0\0 and rubbish", "no Arrow file"),
        ("a.parquet.gz", gzip.compress(b"x", mtime=0), "unpack it"),
        ("a.json", b'[{"a": 1}] [', "more after the end"),
        ("a.json", b'{"a": ', "not valid JSON"),
        ("a.json", b'{\n"a": NaN,\n', "not valid JSON"),
        ("a.json", b'{"a": [{"b": 1}], "c": [{"b": 1}]}', r"several of its keys hold lists of records \(a, c\)"),
        ("a.jsonl", "\n".join([GOOD] * 3).encode("utf-16"), "UTF-16; save it as UTF-8"),
        ("a.jsonl", bytes(range(256)) * 20, "binary data"),
        ("a.csv", b"a,a\n1,2\n", "'a' twice"),
        ("a.csv", b"a,\n1,2\n", "a column without a name"),
        ("a.bin", b"\0\0", "a.idx is missing beside it"),
        ("empty.jsonl", b"", "the file is empty"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_it_says_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WhetError, match=f"{name}.*{says}"):
        read(tmp_path / name)


# JSON arrays


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('"\\[]{},: aé\n'), max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ), max_size=5),
    st.integers(1, 40), st.none() | st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_the_elements_of_any_array_are_found_wherever_the_pieces_are_cut(
    values: list[Any], piece: int, indent: int | None, ascii_only: bool
) -> None:
    data = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "_ARRAY_CHUNK_BYTES", piece)
        assert [json.loads(element) for element in split_array(io.BytesIO(data), "a")] == values
        for cut in (len(data) - 1, len(data) // 2):
            if cut:
                with pytest.raises(WhetError, match="cut off"):
                    list(split_array(io.BytesIO(data[:cut]), "a"))


def test_an_array_is_read_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "_ARRAY_CHUNK_BYTES", 64)
    stream = io.BytesIO(b"[" + b",".join([b'{"a": 1}'] * 1000) + b"]")
    found = split_array(stream, "a")
    assert [next(found) for _ in range(10)] == [b'{"a": 1}'] * 10
    assert stream.tell() < 1000


def test_a_bad_element_is_one_bad_line_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'[{GOOD}, {{"messages": NaN}}, {{"messages" 3}}, {GOOD}, ]')
    items = read(tmp_path / "a.json")
    assert [type(item) for item in items] == [Conversation, BadRecord, BadRecord, Conversation, BadRecord]
    assert str(items[2].origin) == f"{tmp_path}/a.json:3"


def test_a_json_file_of_lines_is_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f"{GOOD}\n{GOOD}\n{{\n")
    assert [type(item) for item in read(path)] == [Conversation, Conversation, BadRecord]
    bare = json.dumps(json.loads(GOOD)["messages"])
    path.write_text(f"{bare}\n{bare}\n")
    assert [type(item) for item in read(path)] == [Conversation, Conversation]


def test_a_single_object_is_one_record_or_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(json.loads(GOOD), indent=1))
    assert [type(item) for item in read(path)] == [Conversation]
    path.write_text(json.dumps({"train": [json.loads(GOOD)] * 2, "test": [json.loads(GOOD)]}))
    assert len(read(path, split="train")) == 2
    assert len(read(path, split="test")) == 1
    with pytest.raises(WhetError, match=r"called 'dev' \(train, test\)"):
        read(path, split="dev")
    path.write_text(json.dumps({"data": [json.loads(GOOD)] * 2}))
    assert "records under 'data'" in str(SourceReader(Source(path=str(path))).description)


# Tables


def test_a_null_in_a_table_is_a_field_that_is_not_there(tmp_path: Path) -> None:
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


def test_an_explicit_null_in_json_stays(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"city": None}}]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": [{"role": "assistant", "content": "b", "tool_calls": calls}]})
    )
    [item] = read(tmp_path / "a.jsonl")
    assert isinstance(item, Conversation)
    assert item.messages[0].tool_calls == (ToolCall("f", {"city": None}),)


def test_a_row_of_invalid_text_is_bad_and_its_neighbours_are_read(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff", b"fine"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    items = read(tmp_path / "a.parquet", format="text")
    assert [type(item) for item in items] == [PlainText, BadRecord, PlainText]
    assert items[1].reason == "not UTF-8"  # type: ignore[union-attr]


def test_rows_are_made_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS["a.parquet"](tmp_path / "a.parquet", [json.loads(GOOD)] * 10)
    reader = SourceReader(Source(path=str(tmp_path / "a.parquet")))
    monkeypatch.setattr("whet.data.read.arrow_tables.RowBatch.rows", property(lambda _: pytest.fail("made")))
    assert len(list(reader.records())) == 10


def test_csv_rows_know_their_lines_and_bad_ones_their_reasons(tmp_path: Path) -> None:
    rows = b'prompt,completion\n"a\nb",c\n\nonly one\nd,e\nf,\xff\n"x"y,z\ng,h\n'
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


# Folders, globs, stdin


def test_a_folder_is_read_in_order_with_all_that_is_data(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.json", "a/c.jsonl.gz", "c.parquet", "README.md", ".hidden/a.jsonl", ".x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        WRITERS.get(Path(name).name, WRITERS["a.jsonl"])(tmp_path / name, [json.loads(GOOD)])
    (tmp_path / "a/c.jsonl.gz").write_bytes(gzip.compress(GOOD.encode()))
    WRITERS["a.parquet"](tmp_path / "c.parquet", [json.loads(GOOD)])
    (tmp_path / "d.jsonl").touch()  # an empty shard among others is no fault
    items = read(tmp_path)
    assert [str(item.origin) for item in items] == [
        f"{tmp_path}/{name}:1" for name in ("a/c.jsonl.gz", "a/z.json", "b.jsonl", "c.parquet")
    ]
    assert all(isinstance(item, Conversation) for item in items)


def test_a_glob_is_sorted_and_named_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x2.jsonl", "x1.jsonl", "y.jsonl"):
        Path(name).write_text(GOOD)
    assert [str(item.origin) for item in read("x*.jsonl")] == ["x1.jsonl:1", "x2.jsonl:1"]
    assert [str(item.origin) for item in read("./x1.jsonl")] == ["./x1.jsonl:1"]
    with pytest.raises(WhetError, match=r"z\*: no file matches"):
        read("z*")
    Path("[1].jsonl").write_text(GOOD)  # a file of that name is that file
    assert len(read("[1].jsonl")) == 1


def test_files_of_different_formats_in_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([GOOD] * 30))
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(WhetError, match=r"b\.jsonl:1: .*\(prompt-completion\) is of another format .*\(messages\)"):
        read(tmp_path)
    assert [type(i) for i in read(tmp_path, format="messages")] == [Conversation] * 30 + [BadRecord]


def test_a_fingerprint_of_a_folder_is_of_its_files_in_order(tmp_path: Path) -> None:
    def of(name: str, **files: str) -> dict[str, object]:
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / f"{file}.jsonl").write_text(text)
        return source_fingerprint(Source(path=str(tmp_path / name)))

    other = line(("user", "x"), ("assistant", "y"))
    assert of("1", a=GOOD, b=other) == of("2", c=GOOD, d=other) != of("3", a=other, b=GOOD)


def test_a_misnamed_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(GOOD.encode()))
    assert [type(item) for item in read(tmp_path / "a.jsonl")] == [Conversation]
    WRITERS["a.parquet"](tmp_path / "data", [json.loads(GOOD)])
    assert [type(item) for item in read(tmp_path / "data")] == [Conversation]


@pytest.mark.parametrize("options", [{"split": "train"}, {"subset": "a"}, {"mask": {"eod": 1}}])
def test_a_setting_without_effect_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(WhetError, match=f"{next(iter(options))} is for .* remove it"):
        read(tmp_path / "a.jsonl", **options)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(WhetError, match=r"no regular file.*give -"):
        read(tmp_path / "pipe.jsonl")


_ASK = """
import os, multiprocessing
from whet.data.config import MaskRules, Source
from whet.data.read.sources import SourceReader, source_fingerprint
source = Source(path="-")
def ask(_=None):
    reader = SourceReader(source)
    return [str(reader.parse(raw).origin) for raw in reader.records()], source_fingerprint(source)
if __name__ == "__main__":
    first = ask()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(ask, [0]) == [first] == [ask()]
    print(first[0], os.environ["WHET_STDIN"])
"""


def test_stdin_is_kept_for_as_long_as_it_is_needed(own_cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(_ASK)
    for data in (as_lines([json.loads(GOOD)] * 2), gzip.compress(json.dumps([json.loads(GOOD)] * 2).encode())):
        done = subprocess.run([sys.executable, script], input=data, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode().startswith("['stdin:1', 'stdin:2'] " + str(own_cache))
        assert list((own_cache / "stdin").iterdir()) == []
    empty = subprocess.run([sys.executable, script], input=b"", capture_output=True, check=False)
    assert b"stdin: the file is empty" in empty.stderr


# Data sets


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def test_a_saved_data_set_is_read(tmp_path: Path, hub: Any) -> None:
    data = hub.Dataset.from_list([json.loads(line(("user", str(n)), ("assistant", "b"))) for n in range(5)])
    data.select([3, 1]).save_to_disk(tmp_path / "one")
    items = read(tmp_path / "one")
    assert [item.messages[0].content for item in items] == ["3", "1"]  # type: ignore[union-attr]
    assert str(items[1].origin) == f"{tmp_path}/one/data-00000-of-00001.arrow:2"

    hub.DatasetDict({"train": data, "test": data.select([4])}).save_to_disk(tmp_path / "two")
    assert len(read(tmp_path / "two", split="train")) == 5
    assert len(read(tmp_path / "two", split="test")) == 1
    with pytest.raises(WhetError, match="more than one split; set split to one of: train, test"):
        read(tmp_path / "two")
    with pytest.raises(WhetError, match="no split 'dev'"):
        read(tmp_path / "two", split="dev")


def test_a_data_set_is_read_through_the_datasets_library(tmp_path: Path, hub: Any) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, count in (("train", 3), ("test", 1)):
        (folder / f"{name}.jsonl").write_bytes(as_lines([json.loads(GOOD)] * count))
    source = Source(path=f"hub:{folder}", split="train")
    items = list(read_source(source))
    assert [type(item) for item in items] == [Conversation] * 3
    assert str(items[2].origin) == f"hub:{folder}/train:3"
    assert (expected_records(source), source_bytes(source) > 0) == (3, True)
    assert (
        source_fingerprint(source)
        == source_fingerprint(source)
        != source_fingerprint(Source(path=f"hub:{folder}", split="test"))
    )
    with pytest.raises(WhetError, match="more than one split; set split to one of: train, test"):
        read(f"hub:{folder}")
    assert len(read(f"hub:{folder}/test.jsonl")) == 1


def test_a_data_set_that_cannot_be_loaded_is_named(hub: Any) -> None:
    with pytest.raises(WhetError, match="hub:nobody/nothing: the data set cannot be loaded"):
        read("hub:nobody/nothing")


@pytest.mark.parametrize(
    ("name", "library"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "pyarrow"), ("hub:x/y", "datasets")]
)
def test_a_missing_library_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    if name in WRITERS:
        WRITERS[name](tmp_path / name, [json.loads(GOOD)])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(WhetError, match=rf"{library}.*pip install 'whet\[data\]'"):
        read(name if ":" in name else tmp_path / name)


# Tokens


def write_tokens(prefix: Path, *documents: list[int]) -> None:
    writer = IndexedWriter(prefix, np.uint16)
    for document in documents:
        writer.add(np.array(document), np.array([len(document)], np.int32))
    writer.finish()


def test_tokens_are_handed_on_as_they_are_with_their_mask(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [1, 2, 3, 4], [5, 3], [6])
    source = Source(path=str(tmp_path / "a.bin"), mask=MaskRules(individual=[3]))
    items = list(read_source(source))
    assert all(isinstance(item, TokenizedDocument) for item in items)
    assert [(item.ids.tolist(), item.loss.tolist(), str(item.origin)) for item in items] == [
        ([1, 2, 3, 4], [0, 1, 0, 1], f"{tmp_path}/a.bin:1"),
        ([5, 3], [0, 0], f"{tmp_path}/a.bin:2"),
        ([6], [0], f"{tmp_path}/a.bin:3"),
    ]
    assert "individual" in (SourceReader(source).description or "")
    assert "every token is learned" in (SourceReader(Source(path=source.path)).description or "")
    assert expected_records(source) == 3
    before = source_fingerprint(source)
    assert before != source_fingerprint(Source(path=source.path))
    write_tokens(tmp_path / "a", [1, 2, 3, 4, 5, 3], [6])
    assert before != source_fingerprint(source)
    for options in ({"format": "text"}, {"where": "turns > 1"}, {"fields": {"text": "a"}}):
        with pytest.raises(WhetError, match=r"a\.bin"):
            read(tmp_path / "a.bin", **options)
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(WhetError, match=r"format: tokens is for \.bin files"):
        read(tmp_path / "a.jsonl", format="tokens")
    (tmp_path / "a.jsonl").unlink()
    assert len(read(tmp_path, format="tokens")) == 2
