"""Small files that stand for gigabytes: an error that names the place, and little memory."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.read.containers.container import MAX_RECORD_BYTES
from whet.data.read.sources import read_source

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

GOOD = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}'
LONG = b"0" * (MAX_RECORD_BYTES + 2**20)


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def gz(content: bytes) -> bytes:
    return gzip.compress(content, 1)


def read_all(path: Path) -> int:
    return sum(1 for _ in read_source(Source(path=str(path))))


@pytest.mark.parametrize(
    ("name", "pack", "start", "end", "line"),
    [
        ("a.jsonl", bytes, GOOD + b'\n{"a": "', b'"}\n' + GOOD, 2),
        ("a.jsonl.gz", gz, GOOD + b'\n{"a": "', b'"}\n' + GOOD, 2),
        ("a.json.zst", zstd, b"[" + GOOD + b',\n{"a": "', b'"}]', 2),
        ("a.csv.zst", zstd, b"prompt,completion\na,b\nc,", b"\n", 3),
    ],
)
def test_a_record_without_end_is_named(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes], start: bytes, end: bytes, line: int
) -> None:
    path = tmp_path / name
    path.write_bytes(pack(start + LONG + end))
    with pytest.raises(WhetError, match=f"{path}:{line}: longer than 64 MiB. Split it"):
        read_all(path)


@pytest.mark.parametrize(("name", "start", "end"), [("a.json.zst", b'{"data": "', b'"}'), ("a.txt.zst", b"", b"")])
def test_a_whole_file_that_was_compressed_too_well_is_refused(
    tmp_path: Path, name: str, start: bytes, end: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(zstd(start + LONG + end))
    with pytest.raises(WhetError, match=rf"{path}: it has more than 64 MiB, decompressed. Write one"):
        read_all(path)


def test_a_line_of_just_that_length_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for more in (0, 1):
        padding = b" " * (MAX_RECORD_BYTES - len(GOOD) - 1 + more)
        path.write_bytes(padding + GOOD + b"\n" + GOOD)
        if more:
            with pytest.raises(WhetError, match=":1: longer than"):
                read_all(path)
        else:
            assert read_all(path) == 2


MEASURED = """
import resource, sys
from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.read.sources import read_source
try:
    print(sum(1 for _ in read_source(Source(path=sys.argv[1]))))
except WhetError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def test_a_table_of_gigabytes_in_a_few_kilobytes_is_refused(tmp_path: Path, real_python: str) -> None:
    path = tmp_path / "a.parquet"
    text = pyarrow.array(["x" * 2**24])
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4096, pyarrow.int32()), text)
    parquet.write_table(pyarrow.table({"text": rows}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2**16
    ended = subprocess.run([real_python, "-c", MEASURED, path], capture_output=True, text=True, check=True)
    message, peak = ended.stdout.splitlines()
    assert message.startswith(f"data.sources: {path}:1: the rows from here cannot be read: it needs more than 2 GiB")
    assert int(peak) < 3000, "MiB"


def test_rows_of_a_few_megabytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [os.urandom(2**20).hex() for _ in range(6)]
    parquet.write_table(pyarrow.table({"text": rows}), path)
    assert read_all(path) == 6


@pytest.mark.parametrize(
    "content", [{}, [], {"_data_files": 3}, {"_data_files": [{"filename": "../../b.arrow"}]}, {"_data_files": ["x"]}]
)
def test_a_saved_dataset_names_only_files_beside_it(tmp_path: Path, content: object) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps(content))
    with pytest.raises(WhetError, match=r"state\.json: it does not list the files next to it"):
        read_all(tmp_path)
