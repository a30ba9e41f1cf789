"""Names, versions, aliases and notes: what is in the registry, and how it changes. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.registry.records import (
    create_next,
    create_record,
    delete_record,
    list_entries,
    list_records,
    read_record,
    registry_folder,
    replace_record,
    signed,
)

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
class Note:
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
            f"{text!r}: {name!r} cannot be {what}: it begins with a letter or digit, and has letters, digits, dots, "
            "dashes and underscores, at most 100"
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

    def notes(self, name: str, number: int) -> list[Note]:
        """The notes on a version, oldest first."""
        folder = self.root / name / "notes"
        records = (
            read_record(folder / f"{each}.json", "Delete the file", version=int, text=str)
            for each in list_records(folder)
        )
        return [Note(each["text"], each["time"], each["user"]) for each in records if each["version"] == number]

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
