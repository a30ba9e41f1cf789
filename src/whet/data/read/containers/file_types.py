"""From a file to its container: by its suffix and, where they are more reliable, its first bytes."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.read.containers.arrow_tables import ArrowTable, ParquetTable
from whet.data.read.containers.container import (
    MAX_RECORD_BYTES,
    Container,
    detect_compression,
    marked_encoding,
    open_bytes,
)
from whet.data.read.containers.excel_files import ExcelFile
from whet.data.read.containers.json_files import (
    JsonArrayFile,
    JsonLinesFile,
    JsonObjectFile,
)
from whet.data.read.containers.text_files import CsvFile, TextFile, is_table
from whet.data.read.containers.token_files import TokenFile
from whet.data.read.records.formats import is_list_of_records, is_record
from whet.data.read.records.record_shapes import find_records_inside

_JSONL_SUFFIXES, _JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines"), (".json",)
_PARQUET_SUFFIXES, _ARROW_SUFFIXES = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_CSV_DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
_EXCEL_SUFFIXES, _ZIP_MAGIC = (".xlsx", ".xlsm"), b"PK\x03\x04"
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
TABLE_SUFFIXES = (*_CSV_DELIMITERS, *_EXCEL_SUFFIXES)

DATA_SUFFIXES = (
    *_JSONL_SUFFIXES, *_JSON_SUFFIXES, *_PARQUET_SUFFIXES, *_ARROW_SUFFIXES, *TABLE_SUFFIXES, ".txt",
)  # fmt: skip
"""Suffixes of data files; other files in a folder are ignored."""


def data_suffix(path: Path) -> str:
    """The suffix without that of the compression: `.jsonl` for chats.jsonl.gz."""
    compressed = path.suffix.lower() in _COMPRESSED_SUFFIXES
    return Path(path.stem if compressed else path.name).suffix.lower()


def open_container(name: str, path: Path, source: Source) -> Container:
    """The container of a file that exists and is not empty."""
    suffix = data_suffix(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    _reject_other_files(name, suffix, head)
    if detect_compression(path):
        with open_bytes(path, name) as stream:
            _reject_archive(name, stream.read(_HEAD_BYTES))
    return _open_by_suffix(name, path, source, suffix, head)


_HEAD_BYTES = 1024
_OTHER_FILES = (
    (b"\xd0\xcf\x11\xe0", "an old or encrypted Excel file", "Save it as .xlsx without a password, or as CSV UTF-8"),
    (b"BZh", "compressed by bzip2", "Decompress it, or compress it by gzip or zstd"),
    (b"\xfd7zXZ", "compressed by xz", "Decompress it, or compress it by gzip or zstd"),
    (b"%PDF", "a PDF file", "Write its text as JSON Lines (.jsonl)"),
    (b"SQLite format 3", "an SQLite database", "Export the table as CSV"),
    (b"\x93NUMPY", "a NumPy array", "Write its records as JSON Lines (.jsonl)"),
    (b"{\\rtf", "a document in Rich Text Format", "Save its text as plain text (.txt) to train on every word"),
    *((start, "a pickle of Python", "Write its records as JSON Lines (.jsonl)")
      for start in (b"\x80\x02", b"\x80\x03", b"\x80\x04\x95", b"\x80\x05\x95")),
    (b"\x89HDF", "an HDF5 file", "Write its records as JSON Lines (.jsonl)"),
    (b"Obj\x01", "an Avro file", "Write its records as JSON Lines (.jsonl)"),
    (b"7z\xbc\xaf", "a 7z archive", "Unpack it, and give the files in it"),
    (b"Rar!", "a RAR archive", "Unpack it, and give the files in it"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "Decompress it, or compress it by gzip or zstd"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data itself", "Get the data: git lfs pull"),
)  # fmt: skip
"""What people give whet by mistake: first bytes, what the file is, and what to do."""


def _reject_other_files(name: str, suffix: str, head: bytes) -> None:
    for magic, what, remedy in _OTHER_FILES:
        if head.startswith(magic):
            raise WhetError(f"data.sources: {name}: the file is {what}. {remedy}")
    _reject_archive(name, head)
    if head.startswith(_ZIP_MAGIC) and not _is_workbook(suffix, head):
        if b"opendocument" in head or suffix in (".ods", ".xlsb", ".numbers"):
            raise WhetError(f"data.sources: {name}: the file is a spreadsheet. Save it as .xlsx or as CSV UTF-8")
        if suffix in (".docx", ".odt", ".pages", ".pptx"):
            raise WhetError(
                f"data.sources: {name}: the file is a document. Save its text as .txt to train on every word; "
                "questions and answers belong in a table: .xlsx or CSV UTF-8"
            )
        raise WhetError(f"data.sources: {name}: the file is a zip archive. Unpack it, and give the files in it")
    if suffix != ".txt" and head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise WhetError(
            f"data.sources: {name}: the file is a web page: the download gave a login or error page instead of the "
            "data. Download it again"
        )


def _reject_archive(name: str, head: bytes) -> None:
    if head[257:262] == b"ustar":
        raise WhetError(f"data.sources: {name}: the file is a tar archive. Unpack it, and give the files in it")


def _reject_other_content(name: str, path: Path, suffix: str) -> None:
    """JSON named as a table, or a table named as JSON: each line of it would be a bad record."""
    first, _ = _first_lines(name, path)
    if suffix in _CSV_DELIMITERS and first.startswith((b"{", b"[")) and _is_valid_json(first):
        raise WhetError(f"data.sources: {name}: the file is JSON, not a table. Rename it to .jsonl")
    is_json = first.startswith((b"{", b"[")) or b"\0" in first
    if suffix in (*_JSONL_SUFFIXES, *_JSON_SUFFIXES) and not is_json and is_table(path, name):
        raise WhetError(f"data.sources: {name}: the file is a table, not JSON. Rename it to .csv")


def _is_workbook(suffix: str, head: bytes) -> bool:
    return head.startswith(_ZIP_MAGIC) and (
        suffix in _EXCEL_SUFFIXES or b"xl/" in head or b"[Content_Types].xml" in head
    )


def _open_by_suffix(name: str, path: Path, source: Source, suffix: str, head: bytes) -> Container:
    if head.startswith(b"PAR1") or suffix in _PARQUET_SUFFIXES:
        return ParquetTable(name, _require_uncompressed(path, name))
    if head.startswith(b"ARROW1") or suffix in _ARROW_SUFFIXES:
        return ArrowTable(name, _require_uncompressed(path, name))
    if _is_workbook(suffix, head):
        return ExcelFile(name, path)
    if suffix == ".bin":
        if not path.with_suffix(".idx").exists():
            raise WhetError(
                f"data.sources: {name}: {path.with_suffix('.idx').name} is missing next to it; it holds the "
                "boundaries of the documents. Copy it there"
            )
        return TokenFile(name, path, source.mask)
    _reject_other_content(name, path, suffix)
    if suffix in _CSV_DELIMITERS:
        return CsvFile(name, path, _CSV_DELIMITERS[suffix], source.encoding)
    if suffix == ".txt":
        if source.format not in ("text", "transcript", "marked"):
            if is_table(path, name):
                return CsvFile(name, path, "\t", source.encoding)
            if _holds_conversations(name, path):
                return _open_json(name, path, source.split)
        return TextFile(name, path, source.encoding)
    if suffix in _JSON_SUFFIXES or name == "stdin":
        return _open_json(name, path, source.split)
    if suffix not in _JSONL_SUFFIXES and not _may_be_json(name, path):
        raise WhetError(
            f"data.sources: {name}: whet does not read files of this kind. Write questions and answers as JSON Lines "
            "(.jsonl) or CSV; to train on every word of a text, name its file .txt"
        )
    if _is_array_in_lines(name, path):
        array = JsonArrayFile(name, path)
        array.note = "one JSON array"
        return array
    return JsonObjectFile(name, path, source.split) if _is_object_of_records(name, path) else JsonLinesFile(name, path)


def _may_be_json(name: str, path: Path) -> bool:
    """False for other text. Binary files are reported later, broken lines one by one."""
    first, second = _first_lines(name, path)
    return b"\0" in first or first.startswith((b"{", b"[")) or (second or b"").lstrip().startswith((b"{", b"["))


def _holds_conversations(name: str, path: Path) -> bool:
    """Whether a .txt file is JSON: its first line must be a conversation, so that no document is taken for one."""
    first, _ = _first_lines(name, path)
    if first.startswith(b"["):
        return _is_array_in_lines(name, path)
    return first.startswith(b"{") and _is_valid_json(first) and is_record(json.loads(first))


def _is_array_in_lines(name: str, path: Path) -> bool:
    """Whether a file named as JSON Lines is one array of objects. A line that is a list may be a conversation itself,
    and a broken one does not make an array: the file must begin with `[{` and end with `]`."""
    first, second = _first_lines(name, path)
    if not first.startswith(b"["):
        return False
    if second is None:
        return _is_valid_json(first) and is_list_of_records(json.loads(first))
    begins = (first[1:].strip() or second.strip()).startswith(b"{")
    return begins and not _is_valid_json(first) and _last_bytes(path).rstrip().endswith(b"]")


def _is_object_of_records(name: str, path: Path) -> bool:
    """Whether a file named as JSON Lines is one line with a list of records under a key, as `{"data": [{…}, {…}]}`."""
    only, second = _first_lines(name, path)
    if second is not None or not only.startswith(b"{") or not _is_valid_json(only):
        return False
    record = json.loads(only)
    return not is_record(record) and find_records_inside(record) is not None


def _last_bytes(path: Path) -> bytes:
    """The end of a file that is neither compressed nor UTF-16, of which nothing is known without reading all."""
    if detect_compression(path) or marked_encoding(path):
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _HEAD_BYTES))
        return file.read()


def _first_lines(name: str, path: Path) -> tuple[bytes, bytes | None]:
    """The first two lines that are not blank, the first without white space before it."""
    with open_bytes(path, name) as stream:
        lines = iter(lambda: stream.readline(MAX_RECORD_BYTES), b"")
        nonblank = (line for line in lines if line.removeprefix(codecs.BOM_UTF8).strip())
        return next(nonblank, b"").removeprefix(codecs.BOM_UTF8).lstrip(), next(nonblank, None)


def _open_json(name: str, path: Path, split: str | None) -> Container:
    """JSON Lines if the first line is valid JSON and more lines follow; otherwise an array or an object."""
    head, second = _first_lines(name, path)
    if second is not None and _is_valid_json(head):
        return JsonLinesFile(name, path)
    if head.startswith(b"["):
        return JsonArrayFile(name, path)
    return JsonObjectFile(name, path, split) if head.startswith(b"{") else JsonLinesFile(name, path)


def _is_valid_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _require_uncompressed(path: Path, name: str) -> Path:
    if detect_compression(path):
        raise WhetError(f"data.sources: {name}: Parquet and Arrow files cannot be read compressed; decompress the file")
    return path
