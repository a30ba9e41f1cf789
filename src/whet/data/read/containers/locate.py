"""From a source's path (file, folder, glob, saved dataset, stdin, hub) to its containers."""

from __future__ import annotations

import atexit
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
from whet.data.read.containers.arrow_tables import HubDataset
from whet.data.read.containers.container import SPLIT_WORDS, Container, choose_split
from whet.data.read.containers.file_types import DATA_SUFFIXES, TABLE_SUFFIXES, data_suffix, open_container
from whet.data.read.containers.json_files import JsonObjectFile
from whet.data.read.containers.text_files import CsvFile, TextFile

_EXAMPLE_RECORD = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'

_DATASET_CARDS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""What the datasets library writes beside the data of a folder."""


def locate_containers(source: Source, example: str = _EXAMPLE_RECORD) -> list[Container]:
    """The containers of a source, in reading order. Raises a WhetError if there is nothing to read; `example` is the
    record that its message shows."""
    if source.path.startswith("hub:"):
        return [HubDataset(source.path, source.subset, source.split)]
    files = _locate_files(source)
    found = [open_container(name, path, source) for name, path in files if path.stat().st_size]
    if not found:
        is_table = all(data_suffix(path) in TABLE_SUFFIXES for _, path in files)
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


def _split_of(path: Path) -> str | None:
    """The split that the name of a file, or of a folder above it, states, as datasets on the hub do."""
    words = re.split(r"[^a-z]+", str(path.with_name(path.name.partition(".")[0])).lower())
    found = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
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
