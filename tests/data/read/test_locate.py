"""Locating a source: files, folders, globs, standard input, saved datasets and the hub."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation, PlainText
from whet.data.read.containers.container import SPLIT_WORDS
from whet.data.read.sources import expected_records, propose_source, read_source, source_bytes, source_fingerprint

from ..conftest import line
from .test_containers import GOOD, WRITERS, read, to_json_lines


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path: Path) -> None:
    for name in (
        "b.jsonl",
        "a/z.json",
        "a/c.jsonl.gz",
        "c.parquet",
        "README.md",
        "dataset_infos.json",
        ".hidden/a.jsonl",
        "~$a.xlsx",
        ".x.jsonl",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        WRITERS.get(Path(name).name, WRITERS["a.jsonl"])(tmp_path / name, [json.loads(GOOD)])
    (tmp_path / "a/c.jsonl.gz").write_bytes(gzip.compress(GOOD.encode()))
    WRITERS["a.parquet"](tmp_path / "c.parquet", [json.loads(GOOD)])
    (tmp_path / "d.jsonl").touch()  # an empty shard among others is allowed
    items = read(tmp_path)
    assert [str(item.origin) for item in items] == [
        f"{tmp_path}/{name}:1" for name in ("a/c.jsonl.gz", "a/z.json", "b.jsonl", "c.parquet")
    ]
    assert all(isinstance(item, Conversation) for item in items)


def test_a_glob_is_sorted_and_origins_keep_the_users_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x2.jsonl", "x1.jsonl", "y.jsonl"):
        Path(name).write_text(GOOD)
    assert [str(item.origin) for item in read("x*.jsonl")] == ["x1.jsonl:1", "x2.jsonl:1"]
    assert [str(item.origin) for item in read("./x1.jsonl")] == ["./x1.jsonl:1"]
    with pytest.raises(WhetError, match=r"z\*: no file matches"):
        read("z*")
    Path("[1].jsonl").write_text(GOOD)  # an existing file wins over the pattern
    assert len(read("[1].jsonl")) == 1


def test_files_of_different_formats_in_a_folder_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([GOOD] * 30))
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(WhetError, match=r"b\.jsonl:1: .*\(prompt-completion\) differ .*\(messages\)"):
        read(tmp_path)
    assert [type(i) for i in read(tmp_path, format="messages")] == [Conversation] * 30 + [BadRecord]


def test_the_fingerprint_of_a_folder_hashes_its_files_in_order(tmp_path: Path) -> None:
    def of(name: str, **files: str) -> dict[str, object]:
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / f"{file}.jsonl").write_text(text)
        return source_fingerprint(Source(path=str(tmp_path / name)))

    other = line(("user", "x"), ("assistant", "y"))
    assert of("1", a=GOOD, b=other) == of("2", c=GOOD, d=other) != of("3", a=other, b=GOOD)


def test_compression_and_parquet_are_detected_by_magic_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(GOOD.encode()))
    assert [type(item) for item in read(tmp_path / "a.jsonl")] == [Conversation]
    WRITERS["a.parquet"](tmp_path / "data", [json.loads(GOOD)])
    assert [type(item) for item in read(tmp_path / "data")] == [Conversation]


@pytest.mark.parametrize("options", [{"split": "train"}, {"subset": "a"}, {"mask": {"eod": 1}}])
def test_an_option_without_effect_is_rejected(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(WhetError, match=f"{next(iter(options))} applies to .* only; remove it"):
        read(tmp_path / "a.jsonl", **options)


def test_a_named_pipe_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(WhetError, match=r"not a regular file.*give -"):
        read(tmp_path / "pipe.jsonl")


_SCRIPT = """
import os, multiprocessing
from whet.data.config import Source
from whet.data.read.sources import SourceReader, source_fingerprint
source = Source(path="-")
def read(_=None):
    reader = SourceReader(source)
    return [str(reader.parse(raw).origin) for raw in reader.records()], source_fingerprint(source)
if __name__ == "__main__":
    first = read()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(read, [0]) == [first] == [read()]
    print(first[0], os.environ["WHET_STDIN"])
"""


def test_stdin_is_spooled_for_child_processes_and_removed_on_exit(own_cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text(_SCRIPT)
    for data in (to_json_lines([json.loads(GOOD)] * 2), gzip.compress(json.dumps([json.loads(GOOD)] * 2).encode())):
        done = subprocess.run([sys.executable, script], input=data, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode().startswith("['stdin:1', 'stdin:2'] " + str(own_cache))
        assert list((own_cache / "stdin").iterdir()) == []
    empty = subprocess.run([sys.executable, script], input=b"", capture_output=True, check=False)
    assert b"stdin: the file is empty" in empty.stderr


# Datasets


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def test_a_saved_dataset_is_read(tmp_path: Path, hub: Any) -> None:
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
    assert propose_source(str(tmp_path / "two")) == (Source(path=str(tmp_path / "two"), split="train"), False)
    with pytest.raises(WhetError, match="no split 'dev'"):
        read(tmp_path / "two", split="dev")


def test_a_dataset_is_read_through_the_datasets_library(tmp_path: Path, hub: Any) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, count in (("train", 3), ("test", 1)):
        (folder / f"{name}.jsonl").write_bytes(to_json_lines([json.loads(GOOD)] * count))
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


def test_a_dataset_that_cannot_be_loaded_is_named(hub: Any) -> None:
    with pytest.raises(WhetError, match="hub:nobody/nothing: cannot load the dataset"):
        read("hub:nobody/nothing")


@pytest.mark.parametrize(
    ("name", "library"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "pyarrow"), ("hub:x/y", "datasets")]
)
def test_a_missing_library_is_named_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    if name in WRITERS:
        WRITERS[name](tmp_path / name, [json.loads(GOOD)])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(WhetError, match=rf"{library}.*pip install 'whet\[data\]'"):
        read(name if ":" in name else tmp_path / name)


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(WhetError, match=r"no such file \(looked in .*\)\. It is a link to gone\.jsonl\. Give the path"):
        read(tmp_path / "chats.jsonl")


def test_tables_without_rows_are_not_taken_for_binary_files(tmp_path: Path) -> None:
    WRITERS["a.parquet"](tmp_path / "a.parquet", [])
    assert read(tmp_path / "a.parquet") == []


@pytest.mark.parametrize("start", ["", "[\n"])
def test_json_named_txt_is_read_as_json(tmp_path: Path, start: str) -> None:
    """A document of nothing but JSON records would be learned word by word, braces included."""
    file = tmp_path / "chats.txt"
    file.write_text(start + (",\n" if start else "\n").join([GOOD] * 3) + ("\n]" if start else ""))
    assert [type(item) for item in read(file)] == [Conversation] * 3
    assert [type(item) for item in read(file, format="text")] == [PlainText]
    file.write_text("{ is a brace,\nand [ a bracket.\n")
    assert [type(item) for item in read(file)] == [PlainText]


def test_files_of_one_format_with_other_field_names_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "Q?", "completion": "A."}\n')
    (tmp_path / "b.csv").write_text("question,answer\nQ?,A.\n")
    with pytest.raises(WhetError, match=r"b\.csv:2: .* \(.*prompt: question\}\) differ from .* \(.*prompt: prompt\}\)"):
        read(tmp_path)


@pytest.mark.parametrize(
    "names", [("train.jsonl", "dev.jsonl"), ("data/train-0-of-1.jsonl", "data/validation-0.jsonl")]
)
def test_a_folder_with_several_splits_is_not_read_as_one(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text(json.dumps({"prompt": name, "completion": "b"}) + "\n")
    with pytest.raises(WhetError, match=r"state several splits \(train, validation\). Set split to one of them"):
        read(tmp_path / "set")
    [only] = read(tmp_path / "set", split="validation")
    assert only.messages[0].content == names[1]
    assert propose_source(str(tmp_path / "set"))[0].split == "train"
    with pytest.raises(WhetError, match="no split 'test'; set split to one of: train, validation"):
        read(tmp_path / "set", split="test")


@pytest.mark.parametrize("word", sorted(SPLIT_WORDS))
def test_a_word_for_a_split_means_the_same_in_a_file_name_and_in_the_option(tmp_path: Path, word: str) -> None:
    (tmp_path / f"{word}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert read(tmp_path, split=SPLIT_WORDS[word])


def test_names_that_state_one_split_or_none_are_read_together(tmp_path: Path) -> None:
    for name in ("train-1.jsonl", "train-2.jsonl", "contest.jsonl", "latest_trainings.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": name, "completion": "b"}) + "\n")
    assert len(read(tmp_path)) == 4
