"""What every container gives: raw records that know their place and cost nothing until they are looked at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from whet.core.files import hash_file
from whet.data.conversation import BadRecordError


class Raw(NamedTuple):
    """One record as it stands in its file. Workers skip those of others, so nothing is parsed yet."""

    line: int
    """Its line (in a table its row, in an array its element), from 1."""
    value: object
    """The bytes of a JSON value, or a Lazy."""
    file: str
    """The file, as the user would write it."""


class Lazy(Protocol):
    """A record that is made when it is asked for."""

    def record(self) -> object:
        """The record as Python values; BadRecordError if there is none."""


class Ready(NamedTuple):
    """A record that had to be made anyway."""

    value: object

    def record(self) -> object:
        return self.value


class Unreadable(NamedTuple):
    """A place where a record should be and cannot be read."""

    reason: str
    explanation: str

    def record(self) -> object:
        raise BadRecordError(self.reason, self.explanation)


class Container(ABC):
    """One file (or data set) with records."""

    kind: str
    """A word that, with the bytes, settles what is read; part of the fingerprint."""
    note = ""
    """What was decided about the file, if that needs saying."""

    def __init__(self, name: str, path: Path) -> None:
        """`name` is how the user writes it, `path` where it is."""
        self.name, self.path = name, path

    @abstractmethod
    def records(self) -> Iterator[Raw]:
        """All records, in order; a WhetError where the file is damaged, after the records before that place."""

    @abstractmethod
    def count(self) -> int:
        """How many records there are; an estimate where counting would mean reading everything."""

    def identity(self) -> list[str]:
        """What distinguishes its content, whatever it is called."""
        return [self.kind, hash_file(self.path)]

    def size(self) -> int:
        """Bytes, uncompressed; an estimate where they are compressed."""
        return self.path.stat().st_size
