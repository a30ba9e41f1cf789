"""The files of the registry: small JSON files that are whole or absent, whoever writes at the same time. No torch.

NAME/versions/3.json            one version, created exclusively and never changed
NAME/aliases/production.json    the version that an alias names, replaced by renaming
NAME/notes/1.json               a note on a version, created exclusively
NAME/removed/3.json             exists once version 3 was removed; its number is not used again
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import whet
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.errors import WhetError, os_error
from whet.core.files import clear_leftovers, fsync_folder, temporary_path, user_path

REGISTRY_FORMAT = 1
"""The version of these files that this code writes, and the newest that it reads."""

_MAX_DIGITS = 9


def registry_folder() -> Path:
    """$WHET_MODELS, else whet/models in the user's data folder ($XDG_DATA_HOME, by default ~/.local/share)."""
    own = os.environ.get("WHET_MODELS")
    if own:
        return user_path(own).absolute()
    data = Path(os.environ.get("XDG_DATA_HOME") or "")
    return (data if data.is_absolute() else Path.home() / ".local" / "share") / "whet" / "models"


def signed(record: dict[str, Any]) -> dict[str, Any]:
    """A record with its format, the time and who writes it."""
    return {"format": REGISTRY_FORMAT, **record, "time": time.time(), "user": _user_name(os.getuid())}


def create_next(folder: Path, record: dict[str, Any], root: Path) -> int:
    """Write a record under the next free number of a folder. Of several writers, each gets a number of its own."""
    with _writing(folder, root):
        _make_folder(folder, root)
        clear_leftovers(folder)
        temporary = _write_temporary(folder / "new", record, root)
        try:
            number = max(list_records(folder), default=0) + 1
            while not _link(temporary, folder / f"{number}.json"):
                number += 1
        finally:
            temporary.unlink(missing_ok=True)
        fsync_folder(folder)
    return number


def create_record(path: Path, record: dict[str, Any], root: Path) -> None:
    """Write a record, unless there is one of this name."""
    with _writing(path, root):
        _make_folder(path.parent, root)
        temporary = _write_temporary(path, record, root)
        try:
            _link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_folder(path.parent)


def replace_record(path: Path, record: dict[str, Any], root: Path) -> None:
    """Write a record in place of the one before: a reader sees the old one or the new one."""
    with _writing(path, root):
        _make_folder(path.parent, root)
        _write_temporary(path, record, root).replace(path)
        fsync_folder(path.parent)


def delete_record(path: Path, root: Path) -> None:
    """Delete a record, if it exists."""
    with _writing(path, root):
        path.unlink(missing_ok=True)
        fsync_folder(path.parent)


def _link(temporary: Path, path: Path) -> bool:
    """Give a complete file its name; False if the name is taken. Atomic on network file systems, too: they may report
    failure after the link was made, so the file itself tells."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return path.exists() and path.samefile(temporary)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        raise WhetError(
            f"{path}: this file system has no hard links ({error.strerror}), by which writers do not overwrite each "
            "other. Choose a folder on another one for the registry of models: WHET_MODELS=FOLDER"
        ) from None
    return True


def _write_temporary(path: Path, record: dict[str, Any], root: Path) -> Path:
    temporary = temporary_path(path)
    write_hashed_json(temporary, record)
    with contextlib.suppress(OSError):
        temporary.chmod(root.stat().st_mode & 0o666)
    return temporary


def _make_folder(folder: Path, root: Path) -> None:
    """With the permissions of the registry's own folder: where a group may write to that, it may write to all of it."""
    root.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        if not each.is_dir():
            each.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):
                each.chmod(stat.S_IMODE(root.stat().st_mode))


# Reading.


def list_records(folder: Path) -> list[int]:
    """The numbers of the records in a folder, in order."""
    names = (entry.removesuffix(".json") for entry in list_entries(folder) if entry.endswith(".json"))
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and len(name) <= _MAX_DIGITS)


def list_entries(folder: Path) -> list[str]:
    """The names in a folder, in order, without hidden ones; none if there is no such folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder, error) from None


def read_record(path: Path, remedy: str, **types: type | tuple[type, ...]) -> dict[str, Any]:
    """The content of a record. Raises a WhetError for one that is damaged or that a newer whet wrote."""
    try:
        record = read_hashed_json(path, remedy)
    except OSError as error:
        raise _unreadable(path, error) from None
    version = record.get("format")
    if isinstance(version, int) and version > REGISTRY_FORMAT:
        raise WhetError(
            f"{path}: this file has format {version}, and whet {whet.__version__} reads formats up to "
            f"{REGISTRY_FORMAT}. Use the whet that wrote it or a newer one: pip install --upgrade whet"
        )
    for key, known in {"format": int, "time": (int, float), "user": str, **types}.items():
        if not isinstance(record.get(key), known):
            raise WhetError(f"{path}: damaged: `{key}` is missing or of a wrong type. {remedy}")
    return record


# What the operating system refuses.

_SET_FOLDER = "Set another one: WHET_MODELS=FOLDER"
_OWN_REGISTRY = "or use a registry of your own: the environment variable WHET_MODELS sets its folder"


@contextlib.contextmanager
def _writing(path: Path, root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise WhetError(
                f"{path}: you cannot write to this registry of models: {error.strerror}{_describe_owner(path)}. Ask "
                f"for permission to write to {root}, {_OWN_REGISTRY}"
            ) from None
        if root.is_file():
            raise WhetError(f"{root}: this is a file, and the registry of models is a folder. {_SET_FOLDER}") from None
        raise os_error(error, "writing to the registry of models", path) or WhetError(
            f"{path}: cannot be written: {error.strerror or error}. {_SET_FOLDER}"
        ) from None


def _unreadable(path: Path, error: OSError) -> WhetError:
    if error.errno == errno.ENOTDIR:
        return WhetError(f"{path}: not a folder, which the registry of models is. {_SET_FOLDER}")
    return WhetError(
        f"{path}: this registry of models cannot be read: {error.strerror or error}{_describe_owner(path)}. Ask for "
        f"permission, {_OWN_REGISTRY}"
    )


def _describe_owner(path: Path) -> str:
    """`; /shared/models belongs to alice (drwxr-xr-x)`, of the first folder above that can be examined."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = each.stat()
            return f"; {each} belongs to {_user_name(found.st_uid)} ({stat.filemode(found.st_mode)})"
    return ""


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in many containers
        return f"user {number}"
