"""From what the user wrote to the files: a file, a folder, a glob, a saved data set, stdin, the hub."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import read_json
from whet.data.config import Source
from whet.data.containers.base import Container
from whet.data.containers.hub import HubSet
from whet.data.containers.kinds import DATA_SUFFIXES, container_of, suffix_of
from whet.data.containers.object import JsonObject
from whet.data.containers.stdin import spooled

_CONVERSATION = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'


def locate(source: Source, example: str = _CONVERSATION) -> list[Container]:
    """The containers of a source, in the order in which they are read; a WhetError if there is nothing to read, with an
    `example` of what is wanted."""
    if source.path.startswith("hub:"):
        return [HubSet(source.path, source.subset, source.split)]
    files = _files(source)
    found = [container_of(name, path, source) for name, path in files if path.stat().st_size]
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
    takes_split = all(isinstance(container, JsonObject) for container in found) or _is_saved(source)
    for key, fits, what in (
        ("split", takes_split, "generators and data sets (hub:, or saved by datasets)"),
        ("subset", False, "data sets of the hub (hub:)"),
        ("mask", "tokens" in kinds, ".bin files"),
    ):
        if getattr(source, key) is not None and not fits:
            raise WhetError(f"data.sources: {source.path}: {key} is for {what} and means nothing here; remove it")


def _files(source: Source) -> list[tuple[str, Path]]:
    if source.path == "-":
        return [("stdin", spooled())]
    path = Path(source.path).expanduser()
    if not path.exists():
        is_glob = glob.has_magic(source.path)
        names = sorted(glob.glob(str(path), recursive=True)) if is_glob else []  # noqa: PTH207
        if not names:
            raise _nothing(source.path, is_glob)
        files = []
        for name in names:
            files += _of_folder(Path(name), source, name) if Path(name).is_dir() else [(name, Path(name))]
    elif path.is_dir():
        files = _of_folder(path, source, source.path)
    else:
        files = [(source.path, path)]
    for name, file in files:
        if not file.is_file():
            raise WhetError(f"data.sources: {name}: this is no regular file; to read from a pipe give -")
        if not os.access(file, os.R_OK):
            raise WhetError(f"data.sources: {name}: permission denied; make the file readable for you")
    return files


def _nothing(name: str, is_glob: bool) -> WhetError:
    what = "no file matches" if is_glob else "no such file"
    return WhetError(
        f"data.sources: {name}: {what} (looked in {Path.cwd()}). "
        "Give the path of a JSONL file, or a built-in generator such as builtin:orders"
    )


def _of_folder(folder: Path, source: Source, name: str) -> list[tuple[str, Path]]:
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
        if suffix_of(path) in wanted
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise WhetError(
            f"data.sources: {name}: this folder has no data file in it ({', '.join(wanted)}, also .gz and .zst). "
            "Give a file or another folder"
        )
    return [(str(Path(name) / path.relative_to(folder)), path) for path in paths]


def _is_saved(source: Source) -> bool:
    return (Path(source.path).expanduser() / "dataset_dict.json").is_file()
