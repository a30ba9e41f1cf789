"""The registry of models: names, versions, aliases and notes, in small JSON files. No torch."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import pwd
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import whet
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.errors import WhetError, os_error
from whet.core.files import clear_leftovers, fsync_folder, temporary_path, user_path

PREFIX = "models:"
NEWEST = "latest"
"""As an alias: the newest version. It follows by itself, so it cannot be set."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model."""

    name: str
    number: int
    folder: Path
    """Of the model: an export, which stays where it is."""
    kind: str
    """`merged` or `adapter`, or what else its certificate names."""
    files: str
    """A hash of the hashes of all its files, from the certificate."""
    run: str | None
    """The folder of the run that trained it, if it is known."""
    step: int | None
    lineage: dict[str, Any]
    """Data, configuration, base model, certificate and scores, as they were when it was added."""
    time: float
    user: str

    @property
    def reference(self) -> str:
        return f"{PREFIX}{self.name}@{self.number}"


@dataclass(frozen=True, slots=True)
class VersionNote:
    """A remark on a version."""

    text: str
    time: float
    user: str


def parse_reference(text: str) -> tuple[str, str | None]:
    """(name, version or alias) of NAME or NAME@WHICH, with or without `models:`; None: the newest version."""
    name, at, which = text.removeprefix(PREFIX).partition("@")
    _require_valid(name, "the name of a model", text)
    if at:
        _require_valid(which, "a version or an alias", text)
    return name, which if at else None


def _require_valid(name: str, what: str, text: str) -> None:
    if not _NAME.fullmatch(name):
        raise WhetError(
            f"{text!r}: {name!r} cannot be {what}: it must begin with a letter or digit, and have at most 100 letters, "
            "digits, dots, dashes and underscores"
        )


class Registry:
    """The registry in a folder, which need not exist before the first version."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or registry_folder()

    # Reading.

    def names(self) -> list[str]:
        """The models that have a version."""
        return [name for name in list_entries(self.root) if _NAME.fullmatch(name) and self.versions(name)]

    def versions(self, name: str) -> list[int]:
        """The versions of a model, oldest first, without removed ones."""
        removed = set(list_records(self.root / name / "removed"))
        return [number for number in list_records(self.root / name / "versions") if number not in removed]

    def ever_had(self, name: str, number: int) -> bool:
        """Whether there is such a version, or was one that is removed now."""
        return number in list_records(self.root / name / "versions")

    def find(self, name: str, which: str | None = None) -> int:
        """The number of a version, by number or alias; None: the newest. Errors name what there is."""
        numbers = self.versions(name)
        if not numbers:
            hint = _did_you_mean(name, self.names(), PREFIX)
            raise WhetError(
                f"{PREFIX}{name}: no model of this name in the registry {self.root}.{hint} `whet models list` shows "
                "them all; the environment variable WHET_MODELS sets another registry"
            )
        if which is None or which == NEWEST:
            return numbers[-1]
        known = ", ".join(map(str, numbers[-20:]))
        if _NUMBER.fullmatch(which):
            if int(which) in numbers:
                return int(which)
            what = "this version was removed" if self.ever_had(name, int(which)) else "no such version"
            raise WhetError(f"{PREFIX}{name}@{which}: {what}. Use one of {known}")
        aliases = self.aliases(name)
        if which not in aliases:
            hint = _did_you_mean(which, aliases, f"{PREFIX}{name}@")
            raise WhetError(
                f"{PREFIX}{name}@{which}: no such alias.{hint} Use one of {', '.join([*aliases, known])}, or set it: "
                f"whet models alias {name}@{numbers[-1]} {which}"
            )
        number = self.alias_target(name, which)
        if number not in numbers:
            raise WhetError(
                f"{PREFIX}{name}@{which}: this alias names version {number}, which was removed. Set it again: whet "
                f"models alias {name}@{numbers[-1]} {which}"
            )
        return number

    def version(self, name: str, number: int) -> ModelVersion:
        """What is recorded of a version, also of one that was removed."""
        others = [each for each in self.versions(name) if each != number]
        other = f"use another version, such as {PREFIX}{name}@{others[-1]}, " if others else ""
        remedy = f"Bring it back from a copy, {other}or remove this one: whet models remove {name}@{number}"
        record = read_record(
            self.root / name / "versions" / f"{number}.json", remedy, folder=str, kind=str, files=str,
            run=(str, type(None)), step=(int, type(None)), lineage=dict,
        )  # fmt: skip
        fields = {key: record[key] for key in ("kind", "files", "run", "step", "lineage", "time", "user")}
        return ModelVersion(name, number, Path(record["folder"]), **fields)

    def aliases(self, name: str) -> list[str]:
        """The names of a model's aliases."""
        found = (entry.removesuffix(".json") for entry in list_entries(self.root / name / "aliases"))
        return [alias for alias in found if _NAME.fullmatch(alias)]

    def alias_target(self, name: str, alias: str) -> int:
        """The version that an alias names."""
        remedy = f"Set it again: whet models alias {name}@VERSION {alias}"
        return int(read_record(self.root / name / "aliases" / f"{alias}.json", remedy, version=int)["version"])

    def notes(self, name: str, number: int) -> list[VersionNote]:
        """The notes on a version, oldest first."""
        folder = self.root / name / "notes"
        records = (
            read_record(folder / f"{each}.json", "Delete the file", version=int, text=str)
            for each in list_records(folder)
        )
        return [VersionNote(each["text"], each["time"], each["user"]) for each in records if each["version"] == number]

    # Writing.

    def add(self, name: str, record: dict[str, Any]) -> int:
        """A new version; returns its number."""
        _require_valid(name, "the name of a model", name)
        return create_next(self.root / name / "versions", signed(record), self.root)

    def set_alias(self, name: str, number: int, alias: str) -> None:
        """Let an alias name this version from now on."""
        _require_valid(alias, "an alias", alias)
        if alias == NEWEST or alias.isdecimal():
            what = "always the newest version" if alias == NEWEST else "a version"
            raise WhetError(f"{alias}: this is {what}. Give the alias another name, such as production")
        replace_record(self.root / name / "aliases" / f"{alias}.json", signed({"version": number}), self.root)

    def remove_alias(self, name: str, alias: str) -> None:
        delete_record(self.root / name / "aliases" / f"{alias}.json", self.root)

    def add_note(self, name: str, number: int, text: str) -> None:
        create_next(self.root / name / "notes", signed({"version": number, "text": text}), self.root)

    def remove(self, name: str, number: int) -> None:
        """Remove a version. The file of the version stays, so that runs which were trained from it still find it."""
        create_record(self.root / name / "removed" / f"{number}.json", signed({"version": number}), self.root)


def _did_you_mean(typed: str, known: Iterable[str], before: str) -> str:
    close = difflib.get_close_matches(typed, list(known), n=1, cutoff=0.6)
    return f" Did you mean {before}{close[0]}?" if close else ""


# The files of the registry: whole or absent, also when several processes write at once.
#
# NAME/versions/3.json            one version, created exclusively and never changed
# NAME/aliases/production.json    the version that an alias names, replaced by renaming
# NAME/notes/1.json               a note on a version, created exclusively
# NAME/removed/3.json             exists once version 3 was removed; its number is not used again

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
            f"{path}: this file system has no hard links ({error.strerror}), which keep writers from overwriting each "
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
