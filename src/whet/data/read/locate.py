"""From a source's path (file, folder, glob, saved dataset, stdin, hub) to its containers."""

from __future__ import annotations

import atexit
import glob
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import cache_dir, read_json
from whet.data.config import Source
from whet.data.read.arrow_tables import ArrowTable, HubDataset, ParquetTable
from whet.data.read.container import Container, detect_compression, open_bytes
from whet.data.read.json_files import JsonArrayFile, JsonLinesFile, JsonObjectFile
from whet.data.read.text_files import CsvFile, TextFile
from whet.data.read.token_files import TokenFileContainer

# `-`: standard input, kept in a file, because it is read several times and by several processes.

_STDIN_VARIABLE = "WHET_STDIN"
"""Where it is kept, for this process and those that it starts: they cannot read the same input again."""


def spool_stdin() -> Path:
    """The file with what came by standard input; it is removed when the process that read it ends."""
    if _STDIN_VARIABLE in os.environ:
        return Path(os.environ[_STDIN_VARIABLE])
    if sys.stdin is None or sys.stdin.isatty():
        raise WhetError("data.sources: -: nothing is piped in. Write: cat chats.jsonl | whet … data.sources=…")
    folder = cache_dir() / "stdin"
    folder.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=folder)
    path = Path(name)
    atexit.register(_remove_spool, path, os.getpid())
    with os.fdopen(number, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    os.environ[_STDIN_VARIABLE] = name
    return path


def _remove_spool(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        os.environ.pop(_STDIN_VARIABLE, None)


# Which container a file is: by its name, and by its first bytes where those know better.

_JSONL_SUFFIXES, _JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines"), (".json",)
_PARQUET_SUFFIXES, _ARROW_SUFFIXES = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
_MAX_LINE_BYTES = 2**26
_BOM = b"\xef\xbb\xbf"

DATA_SUFFIXES = (*_JSONL_SUFFIXES, *_JSON_SUFFIXES, *_PARQUET_SUFFIXES, *_ARROW_SUFFIXES, *_CSV_DELIMITERS, ".txt")
"""Files that are data wherever they are met; of a folder only these are read."""


def data_suffix(path: Path) -> str:
    """The suffix that tells the kind: `.jsonl` for chats.jsonl.gz."""
    packed = path.suffix.lower() in _COMPRESSED_SUFFIXES
    return Path(path.stem if packed else path.name).suffix.lower()


def open_container(name: str, path: Path, source: Source) -> Container:
    """The container for a file that is there and not empty."""
    suffix = data_suffix(path)
    with path.open("rb") as file:
        head = file.read(6)
    if head.startswith(b"PAR1") or suffix in _PARQUET_SUFFIXES:
        return ParquetTable(name, _require_uncompressed(path, name))
    if head == b"ARROW1" or suffix in _ARROW_SUFFIXES:
        return ArrowTable(name, _require_uncompressed(path, name))
    if suffix == ".bin":
        return TokenFileContainer(name, path, source.mask)
    if suffix in _CSV_DELIMITERS:
        return CsvFile(name, path, _CSV_DELIMITERS[suffix])
    if suffix == ".txt":
        return TextFile(name, path)
    if suffix in _JSON_SUFFIXES or name == "stdin":
        return _open_json(name, path, source.split)
    return JsonLinesFile(name, path)


def _open_json(name: str, path: Path, split: str | None) -> Container:
    """An array, lines, or one object: its first line alone tells, if it is whole and something follows it."""
    with open_bytes(path, name) as stream:
        lines = iter(lambda: stream.readline(_MAX_LINE_BYTES), b"")
        full = (line for line in lines if line.removeprefix(_BOM).strip())
        head = next(full, b"").removeprefix(_BOM).lstrip()
        more = next(full, None) is not None
    if more and _is_valid_json(head):
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
        raise WhetError(
            f"data.sources: {name}: tables are compressed inside and cannot be read from a compressed file; unpack it"
        )
    return path


# From what the user wrote to the files: a file, a folder, a glob, a saved data set, stdin, the hub.

_EXAMPLE_RECORD = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'


def locate_containers(source: Source, example: str = _EXAMPLE_RECORD) -> list[Container]:
    """The containers of a source, in the order in which they are read; a WhetError if there is nothing to read, with an
    `example` of what is wanted."""
    if source.path.startswith("hub:"):
        return [HubDataset(source.path, source.subset, source.split)]
    files = _locate_files(source)
    found = [open_container(name, path, source) for name, path in files if path.stat().st_size]
    if not found:
        raise WhetError(
            f"data.sources: {files[0][0] if len(files) == 1 else source.path}: the file is empty. It needs one JSON "
            f"object on each line, such as {example}"
        )
    _check_options(source, found)
    return found


def _check_options(source: Source, found: list[Container]) -> None:
    """A setting without effect is an error: whoever wrote it expects one."""
    kinds = {container.kind for container in found}
    takes_split = all(isinstance(container, JsonObjectFile) for container in found) or _is_saved_dataset(source)
    for key, fits, what in (
        ("split", takes_split, "generators and data sets (hub:, or saved by datasets)"),
        ("subset", False, "data sets of the hub (hub:)"),
        ("mask", "tokens" in kinds, ".bin files"),
    ):
        if getattr(source, key) is not None and not fits:
            raise WhetError(f"data.sources: {source.path}: {key} is for {what} and means nothing here; remove it")


def _locate_files(source: Source) -> list[tuple[str, Path]]:
    if source.path == "-":
        return [("stdin", spool_stdin())]
    path = Path(source.path).expanduser()
    if not path.exists():
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
            raise WhetError(f"data.sources: {name}: this is no regular file; to read from a pipe give -")
        if not os.access(file, os.R_OK):
            raise WhetError(f"data.sources: {name}: permission denied; make the file readable for you")
    return files


def _no_such_file(name: str, is_glob: bool) -> WhetError:
    what = "no file matches" if is_glob else "no such file"
    return WhetError(
        f"data.sources: {name}: {what} (looked in {Path.cwd()}). "
        "Give the path of a JSONL file, or a built-in generator such as builtin:orders"
    )


def _files_in_folder(folder: Path, source: Source, name: str) -> list[tuple[str, Path]]:
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json")["splits"]
        split = source.split or (splits[0] if len(splits) == 1 else "")
        if split not in splits:
            given = f"no split {split!r}" if split else "more than one split"
            raise WhetError(f"data.sources: {name}: it has {given}; set split to one of: {', '.join(splits)}")
        folder, name = folder / split, str(Path(name) / split)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        parts = [part["filename"] for part in read_json(folder / "state.json")["_data_files"]]
        return [(str(Path(name) / part), folder / part) for part in parts]
    wanted = (".bin",) if source.format == "tokens" else DATA_SUFFIXES
    paths = sorted(
        path
        for path in folder.rglob("*")
        if data_suffix(path) in wanted
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise WhetError(
            f"data.sources: {name}: this folder has no data file in it ({', '.join(wanted)}, also .gz and .zst). "
            "Give a file or another folder"
        )
    return [(str(Path(name) / path.relative_to(folder)), path) for path in paths]


def _is_saved_dataset(source: Source) -> bool:
    return (Path(source.path).expanduser() / "dataset_dict.json").is_file()
