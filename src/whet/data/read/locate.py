"""From a source's path (file, folder, glob, saved dataset, stdin, hub) to its containers."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import difflib
import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from whet.core.errors import WhetError, first_line
from whet.core.files import cache_dir, hash_json, read_json, temporary_path, user_path
from whet.core.plugins import load_plugin
from whet.data.config import Source
from whet.data.read.arrow_tables import ArrowTable, HubDataset, ParquetTable
from whet.data.read.container import (
    MAX_RECORD_BYTES,
    Container,
    choose_split,
    detect_compression,
    marked_encoding,
    open_bytes,
)
from whet.data.read.excel_files import ExcelFile
from whet.data.read.json_files import JsonArrayFile, JsonLinesFile, JsonObjectFile, is_list_of_records, is_record
from whet.data.read.text_files import CsvFile, TextFile, is_table
from whet.data.read.token_files import TokenFile
from whet.data.read.unsupported_records import find_records_inside

_EXAMPLE_RECORD = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'


def locate_containers(source: Source, example: str = _EXAMPLE_RECORD) -> list[Container]:
    """The containers of a source, in reading order. Raises a WhetError if there is nothing to read; `example` is the
    record that its message shows."""
    if source.path.startswith("hub:"):
        return [HubDataset(source.path, source.subset, source.split)]
    files = _locate_files(source)
    found = [open_container(name, path, source) for name, path in files if path.stat().st_size]
    if not found:
        is_table = all(data_suffix(path) in (*_CSV_DELIMITERS, *_EXCEL_SUFFIXES) for _, path in files)
        content = (
            "a row that names the columns, such as question and answer, and one row for each"
            if is_table
            else f"one JSON object per line, such as {example}"
        )
        raise WhetError(
            f"data.sources: {files[0][0] if len(files) == 1 else source.path}: the file is empty. Write {content}"
        )
    _check_options(source, found)
    return found


def _check_options(source: Source, found: list[Container]) -> None:
    """An option without effect is an error."""
    kinds = {container.kind for container in found}
    takes_split = all(isinstance(container, JsonObjectFile) for container in found) or _is_saved_dataset(source)
    takes_split = takes_split or source.split in splits_in_folder(source)
    for key, fits, what in (
        ("split", takes_split, "hub:, builtin:, folders with files of several splits and JSON objects"),
        ("subset", False, "hub: datasets"),
        ("mask", "tokens" in kinds, ".bin files"),
        ("encoding", all(isinstance(each, (CsvFile, TextFile)) for each in found), ".csv, .tsv and .txt files"),
    ):
        if getattr(source, key) is not None and not fits:
            raise WhetError(f"data.sources: {source.path}: {key} applies to {what} only; remove it")


def _locate_files(source: Source) -> list[tuple[str, Path]]:
    if source.path == "-":
        return [("stdin", spool_stdin())]
    if source.path.startswith("plugin:"):
        return [(source.path, spool_plugin(source.path))]
    path = user_path(source.path)
    tokens = Path(f"{path}.bin")
    if not path.exists() and tokens.is_file():  # GPT-NeoX and Megatron name token files without the suffix
        files = [(f"{source.path}.bin", tokens)]
    elif not path.exists():
        is_glob = glob.has_magic(source.path)
        names = sorted(glob.glob(str(path), recursive=True)) if is_glob else []  # noqa: PTH207
        if not names:
            raise _no_such_file(source.path, is_glob)
        files = []
        for name in names:
            files += _files_in_folder(Path(name), source, name) if Path(name).is_dir() else [(name, Path(name))]
    elif path.is_dir():
        files = _files_in_folder(path, source, source.path)
    else:
        files = [(source.path, path)]
    for name, file in files:
        if not file.is_file():
            raise WhetError(f"data.sources: {name}: not a regular file; to read from a pipe, give -")
        if not os.access(file, os.R_OK):
            raise WhetError(f"data.sources: {name}: permission denied; make the file readable")
    return files


def _no_such_file(name: str, is_glob: bool) -> WhetError:
    what = "no file matches" if is_glob else "no such file"
    similar: list[str] = []
    with contextlib.suppress(OSError):
        files = sorted(file.name for file in Path(name).parent.iterdir())
        similar = difflib.get_close_matches(Path(name).name, files, n=1, cutoff=0.7)
    remedy = "Give the path of a data file, or a built-in dataset such as builtin:orders"
    if Path(name).is_symlink():
        remedy = f"It is a link to {Path(name).readlink()}. {remedy}"
    elif similar:
        remedy = f"Did you mean {Path(name).with_name(similar[0])}?"
    return WhetError(f"data.sources: {name}: {what} (looked in {Path.cwd()}). {remedy}")


def _files_in_folder(folder: Path, source: Source, name: str) -> list[tuple[str, Path]]:
    if (folder / "dataset_dict.json").is_file():
        splits = _read_names(folder / "dataset_dict.json", lambda content: content["splits"])
        split = choose_split(name, splits, source.split)
        folder, name = folder / split, str(Path(name) / split)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        parts = _read_names(
            folder / "state.json", lambda content: [part["filename"] for part in content["_data_files"]]
        )
        return [(str(Path(name) / part), folder / part) for part in parts]
    wanted = (".bin",) if source.format == "tokens" else DATA_SUFFIXES
    paths = sorted(
        path
        for path in folder.rglob("*")
        if data_suffix(path) in wanted
        and path.name not in _DATASET_CARDS
        and path.is_file()
        and not any(part.startswith((".", "~$")) for part in path.relative_to(folder).parts)  # ~$: Excel has it open
    )
    stated = {path: _split_of(path.relative_to(folder)) for path in paths}
    if source.split is not None and (known := _order_splits(stated.values())):
        chosen = choose_split(name, known, source.split)
        paths = [path for path in paths if stated[path] == chosen]
    if not paths:
        raise WhetError(
            f"data.sources: {name}: the folder has no data files ({', '.join(wanted)}, also .gz and .zst). "
            "Give a file or another folder"
        )
    return [(str(Path(name) / path.relative_to(folder)), path) for path in paths]


_SPLIT_WORDS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip


def _split_of(path: Path) -> str | None:
    """The split that the name of a file, or of a folder above it, states, as datasets on the hub do."""
    words = re.split(r"[^a-z]+", str(path.with_name(path.name.partition(".")[0])).lower())
    found = {_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS}
    return found.pop() if len(found) == 1 else None


def splits_in_folder(source: Source) -> list[str]:
    """The splits that the names of a folder's files state; none for anything else."""
    if source.path.startswith(("hub:", "plugin:")) or not user_path(source.path).is_dir() or _is_saved_dataset(source):
        return []
    folder = user_path(source.path)
    files = _files_in_folder(folder, source.model_copy(update={"split": None}), source.path)
    return _order_splits(_split_of(path.relative_to(folder)) for _, path in files)


def _order_splits(found: Iterable[str | None]) -> list[str]:
    return sorted({split for split in found if split}, key=["train", "validation", "test"].index)


def _read_names(file: Path, find: Callable[[Any], Any]) -> list[str]:
    """Names of files or folders beside `file`, which the datasets library wrote."""
    try:
        names = find(read_json(file))
    except (KeyError, TypeError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) and _is_plain_name(name) for name in names):
        raise WhetError(
            f"data.sources: {file}: it does not list the files next to it. Copy or download the folder again"
        )
    return names


def _is_plain_name(name: str) -> bool:
    return Path(name).name == name != ".."


def _is_saved_dataset(source: Source) -> bool:
    return (user_path(source.path) / "dataset_dict.json").is_file()


# A file → its container, by its suffix and, where they are more reliable, its first bytes.

_JSONL_SUFFIXES, _JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines"), (".json",)
_PARQUET_SUFFIXES, _ARROW_SUFFIXES = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_CSV_DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
_EXCEL_SUFFIXES, _ZIP_MAGIC = (".xlsx", ".xlsm"), b"PK\x03\x04"
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")

DATA_SUFFIXES = (
    *_JSONL_SUFFIXES, *_JSON_SUFFIXES, *_PARQUET_SUFFIXES, *_ARROW_SUFFIXES, *_CSV_DELIMITERS, *_EXCEL_SUFFIXES, ".txt",
)  # fmt: skip
"""Suffixes of data files; other files in a folder are ignored."""


_DATASET_CARDS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""What the datasets library writes beside the data of a folder."""


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
    (b"\x80\x04\x95", "a pickle of Python", "Write its records as JSON Lines (.jsonl)"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data itself", "Get the data: git lfs pull"),
)
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


# `-` and plugin:NAME are spooled to a file, because a source is read several times and by several processes.


def spool_stdin() -> Path:
    """The file that holds standard input."""

    def copy(file: IO[bytes]) -> None:
        shutil.copyfileobj(sys.stdin.buffer, file)

    if "WHET_STDIN" not in os.environ and (sys.stdin is None or sys.stdin.isatty()):
        raise WhetError("data.sources: -: standard input is a terminal. Pipe data in: cat chats.jsonl | whet …")
    return _spool("WHET_STDIN", copy)


def spool_plugin(path: str) -> Path:
    """The file that holds the records of plugin:NAME or plugin:NAME:ARGUMENT, a function of an installed package, as
    JSON Lines. It is called once by a command."""
    _, name, argument = [*path.split(":", 2), ""][:3]

    def write(file: IO[bytes]) -> None:
        count, records = 0, load_plugin("sources", name, "data.sources")
        try:
            for record in records(argument):
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
                count += 1
        except WhetError:
            raise
        except Exception as error:  # of the function, or of a value that JSON lacks
            after = f"after {count} records" if count else "before its first record"
            raise WhetError(f"data.sources: {path}: {type(error).__name__} {after}: {first_line(error)}") from error
        if not count:
            raise WhetError(f"data.sources: {path}: it has no records")

    return _spool(f"{_PLUGIN_VARIABLE}{hash_json(path)[:16]}", write)


_PLUGIN_VARIABLE = "WHET_PLUGIN_"


def forget_plugin_records() -> None:
    """Before another command in the same process: a source may have new records by then."""
    for variable in [name for name in os.environ if name.startswith(_PLUGIN_VARIABLE)]:
        del os.environ[variable]


def _spool(variable: str, write: Callable[[IO[bytes]], None]) -> Path:
    """The file whose name is in the environment, for this process and its children, which cannot read the source again;
    else it is written now. The process that wrote it removes it on exit."""
    if variable in os.environ:
        return Path(os.environ[variable])
    folder = cache_dir() / "stdin"
    folder.mkdir(parents=True, exist_ok=True)
    path = temporary_path(folder / variable)
    atexit.register(_remove_spool, path, variable, os.getpid())
    path.touch(mode=0o600)
    with path.open("wb") as file:
        write(file)
    os.environ[variable] = str(path)
    return path


def _remove_spool(path: Path, variable: str, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        os.environ.pop(variable, None)
