"""The recipe in the making: values of the other program's file, settings of whet with their origin, and notes."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from whet.convert.configs.table import Kind, Row, Rows
from whet.core.errors import WhetError
from whet.core.yaml import Node, Template

Category = Literal["decide", "unknown", "no equivalent", "different", "not needed"]
CATEGORIES: dict[Category, str] = {
    "decide": "to decide before you train",
    "unknown": "keys that whet does not know",
    "different": "does not mean what it says, or means something else in whet",
    "no equivalent": "has no equivalent in whet",
    "not needed": "not needed",
}


@dataclass(frozen=True, slots=True)
class Note:
    """What the user should know about a key: it has no equivalent, or it means something else than it says."""

    category: Category
    key: str
    place: str
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A value of the other program's file."""

    key: str
    """As it is written there."""
    node: Node


class Draft:
    """Rules read values by the names of the kind's table and write settings; the draft keeps what came from where."""

    def __init__(self, kind: Kind, tree: Node, world: int | None = None, target: Node | None = None) -> None:
        self.kind = kind
        self.given = tree
        """The file's content."""
        self.file = Path(tree.place.rpartition(":")[0] or tree.place)
        """The file that is imported; paths in it may be relative to its folder."""
        self.world = world
        """The number of processes, if it is known."""
        self.target = target
        """The recipe that the import goes onto."""
        self.settings: dict[str, Node] = {}
        """Settings of whet by dotted key; `place` is where the value comes from."""
        self.notes: list[Note] = []
        self.entries: dict[str, Entry] = {}
        self._origins: dict[str, tuple[str, ...]] = {}
        """Of each setting: the keys that it comes from."""
        self._noted: set[str] = set()
        self._read: set[str] = set()
        """Keys that were taken into account without being named."""
        for key, node in kind.flatten(tree):
            self.add(key, node)

    # Reading

    def add(self, key: str, node: Node, argument: bool = False) -> None:
        """Take a value of the file in, under the table's name for it. `argument`: of a command line in the file."""
        rows, name = self.kind.arguments if argument else self.kind.rows, self.kind.table_name(key)
        if node.value is None and (name in self.kind.sections or key in self.kind.groups):
            self._note("not needed", Entry(key, node), "empty")
            return
        if key.startswith(("_", "#", "//")):
            self._note("not needed", Entry(key, node), "a comment")
            return
        if not (name in rows if argument else self.kind.knows(key)):
            self._note_unknown(key, node, rows)
            return
        row = rows[name]
        entry = Entry(key, node)
        if row.fate == "same":
            name = row.to
        if node.value is None:
            self._note("not needed", entry, "empty")
        elif name in self.entries:
            other = self.entries[name]
            self._note("different", entry, f"has no effect: {other.key} at {other.node.place} wins")
        else:
            self.entries[name] = entry

    def _note_unknown(self, key: str, node: Node, rows: Rows) -> None:
        name = self.kind.table_name(key)
        close = [known for known, row in rows.items() if row.fate == "same" and row.to == name]
        close = close or difflib.get_close_matches(name, rows, n=1, cutoff=0.75)
        hint = f" Did you mean {close[0]}?" if close else ""
        if self.kind.groups and name in self.kind.rows:
            hint = (
                f" Did you mean {next(group for group, inside in self.kind.groups.items() if name in inside)}.{name}?"
            )
        elif self.kind.groups and name == key:
            hint = f" Its sections are {', '.join(self.kind.groups)}."
        why = "takes a section of keys here" if name in self.kind.sections else f"is not a key of {self.kind.tool}"
        value = without_secrets(node.plain(named=True), key)
        self.notes.append(Note("unknown", key, node.place, value, f"{why}; it was left out.{hint}"))

    def row(self, name: str) -> Row:
        """The row of a key that the file, or a command line in it, may have."""
        return self.kind.rows.get(name) or self.kind.arguments.get(name) or Row("rule")

    def has(self, *keys: str) -> bool:
        """Whether the file has a value for one of these."""
        return any(key in self.entries for key in keys)

    def raw(self, key: str) -> Any:
        """The value as it stands in the file, else the program's default."""
        entry = self.entries.get(key)
        return self.kind.defaults.get(key) if entry is None else entry.node.plain()

    def number(self, key: str) -> float | None:
        """A number; of a default, too. None: neither given nor has it a default."""
        return self._convert(key, "number")

    def integer(self, key: str) -> int | None:
        """As `number`, for whole numbers."""
        return self._convert(key, "integer")

    def flag(self, key: str) -> bool:
        """Whether something is on; False if it is not given."""
        return bool(self._convert(key, "flag"))

    def text(self, key: str) -> str | None:
        """As `number`, for text."""
        return self._convert(key, "text")

    def texts(self, key: str) -> list[str]:
        """A list of texts; one text with commas counts as a list."""
        return self._convert(key, "texts") or []

    def _convert(self, key: str, type: str) -> Any:
        entry = self.entries.get(key)
        if entry is None:
            return self.kind.defaults.get(key)
        return convert(entry.node, entry.key, type)

    # Writing

    def put(self, to: str, value: Any, *keys: str, why: str = "") -> None:
        """Write a setting that comes from these keys. `why`: how it comes about, or what it means."""
        self._origins[to] = keys
        entries = [self.entries[key] for key in keys if key in self.entries]
        origin = ", ".join(f"{entry.node.place} {entry.key}" for entry in entries) or f"default of {self.kind.tool}"
        self.settings[to] = as_node(value, f"{origin}: {why}" if why else origin)

    def origins(self, to: str) -> tuple[str, ...]:
        """The keys that a setting comes from."""
        return self._origins.get(to, ())

    def note(self, category: Category, key: str, text: str) -> None:
        """Tell the user about a key; where the file has no value for it, about the program's default."""
        self._noted.add(key)
        entry = self.entries.get(key)
        if entry is None:
            default = self.kind.defaults.get(key)
            self.notes.append(Note(category, key, f"default of {self.kind.tool}", default, text))
        else:
            self._note(category, entry, text)

    def _note(self, category: Category, entry: Entry, text: str) -> None:
        value = without_secrets(entry.node.plain(named=True), entry.key)
        self.notes.append(Note(category, entry.key, entry.node.place, value, text))

    def drop(self, to: str, category: Category, text: str) -> None:
        """Take a setting back, with a note in its place."""
        node = self.settings.pop(to)
        self.notes.append(Note(category, to, node.place, node.plain(), text))

    def fail(self, key: str, text: str) -> WhetError:
        """The error about a value of the file."""
        entry = self.entries[key]
        return WhetError(f"{entry.node.place}: {entry.key}: {_shorten(entry.node)} {text}")

    def use(self, *keys: str) -> None:
        """Mark keys that were taken into account, and are named by no setting and no note of their own."""
        self._read.update(keys)

    def finish(self) -> None:
        """Apply the rows that need no rule; what a rule left aside has no effect in the other program either."""
        landed = {key for to in self.settings for key in self._origins.get(to, ())}
        for name, entry in self.entries.items():
            row = self.row(name)
            if name in self._noted or (name in landed and row.fate in ("rule", "copied")):
                continue
            if name in self._read:
                text = "taken into account by other settings"
                self.notes.append(Note("not needed", entry.key, entry.node.place, None, text))
            elif row.fate == "copied":
                self.put(row.to, convert(entry.node, entry.key, row.type), name)
            elif row.fate == "rule":
                self._note("not needed", entry, "has no effect with the other settings of this file")
            else:
                self._note(self._category(row, entry), entry, row.reason)
        for name, default in self.kind.defaults.items():
            row = self.row(name)
            if row.fate == "copied" and name not in self.entries and row.to not in self.settings:
                self.put(row.to, default, name)

    def _category(self, row: Row, entry: Entry) -> Category:
        return "no equivalent" if row.fate == "no equivalent" and not is_off(entry.node.plain()) else "not needed"

    def include(self, other: Draft) -> None:
        """Take over the settings and notes of a file that this one names, such as a DeepSpeed configuration."""
        for to in other.settings.keys() & self._origins.keys():
            for key in self._origins.pop(to):
                if key in self.entries and other.settings[to].plain() != self.settings[to].plain():
                    self.note(
                        "different", key, f"{other.file.name} replaces it: {to} is {other.settings[to].plain()!r}"
                    )
        self.settings |= other.settings
        self.notes.extend(other.notes)

    def tree(self) -> Node:
        """The settings as a tree; digits in a key are the index of a list."""
        root: dict[str, Any] = {}
        for key, node in self.settings.items():
            place, *rest = key.split(".")
            inner = root
            for name in rest:
                inner = inner.setdefault(place, {})
                place = name
            inner[place] = node
        return _as_tree(root, self.kind.tool)


def _as_tree(value: Any, place: str) -> Node:
    if isinstance(value, Node):
        return value
    inside = {key: _as_tree(each, place) for key, each in value.items()}
    is_list = bool(inside) and all(key.isdecimal() for key in inside)
    return Node([inside[key] for key in sorted(inside, key=int)] if is_list else inside, place)


def as_node(value: Any, place: str) -> Node:
    """A plain value as a tree whose nodes all have this place."""
    if isinstance(value, dict):
        return Node({str(key): as_node(each, place) for key, each in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([as_node(each, place) for each in value], place)
    return Node(value, place, value if isinstance(value, Template) else None)


_SECRET = re.compile(
    r"((?<![a-z])token(?![a-z])|api_key|access_key|account_key|secret|password|passwd"
    r"|credential|connection_string|registry_auth)\w*\Z", re.IGNORECASE,
)  # fmt: skip
_VOCABULARY = re.compile(r"((special|eot|eos|bos|pad|unk|add|num|max|eval)_token|token_(embedding|id|type))\w*\Z")
"""Keys about tokens of the tokenizer, or their number."""


def is_secret(name: str) -> bool:
    """Whether a key or an environment variable holds a secret, by its name."""
    by_word = _SECRET.search(name) is not None and _VOCABULARY.search(name) is None
    return by_word or (name.isupper() and name.endswith(("_TOKEN", "_KEY")))


_ASSIGNED = re.compile(r"(?P<name>(?<![\w-])--[\w-]+(?:=|\s+)|(?<!\w)\w+=)(?P<value>[^\s,;]+)")
"""`--name value`, `--name=value` and `NAME=value` in a command line or a list of variables."""


def without_secrets(value: Any, name: str = "") -> Any:
    """The value of this key with `***` for every secret in it, for messages and comments."""
    if is_secret(name) and not is_off(value) and value is not True:
        return "***"
    if isinstance(value, dict):
        return {key: without_secrets(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [without_secrets(each) for each in value]
    return _ASSIGNED.sub(_without_secret, value) if isinstance(value, str) else value


def _without_secret(found: re.Match[str]) -> str:
    name = found["name"].strip("-= \t\n").replace("-", "_")
    return f"{found['name']}***" if is_secret(name) else found[0]


def environment(variables: dict[str, Any]) -> dict[str, Any]:
    """Environment variables for launch.env; secrets stay in the environment of the user."""
    return {
        name: Template(f"${{{name}}}") if is_secret(name) and re.fullmatch(r"[A-Za-z_]\w*", name) else str(value)
        for name, value in variables.items()
    }


def is_off(value: Any) -> bool:
    """Whether a value turns something off."""
    return not value or (isinstance(value, str) and value.lower() in ("no", "none", "false", "off", "null"))


_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def convert(node: Node, key: str, type: str) -> Any:
    """The value of a node as a number, integer, flag, text or list of texts, as the other programs would read it."""
    value = node.value
    if type == "flag":
        found = _FLAGS.get(str(value).lower()) if isinstance(value, bool | int | str) else None
        if found is not None:
            return found
    elif type in ("number", "integer"):
        number = _parse_number(value)
        if number is not None and (type == "number" or number == int(number)):
            return number if type == "number" else int(number)
    elif type == "text":
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return value if isinstance(value, str) else str(value)
    elif type == "texts":
        items = [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else node.plain()
        if isinstance(items, list) and all(isinstance(each, str) for each in items):
            return items
    else:
        return node.plain()
    names = {"flag": "true or false", "integer": "an integer", "number": "a number", "texts": "a list of texts"}
    raise WhetError(f"{node.place}: {key}: {_shorten(node)} is not {names.get(type, type)}")


def _shorten(node: Node) -> str:
    text = repr(node.plain(named=True))
    return text if len(text) <= 80 else f"{text[:79]}…"


def _parse_number(value: Any) -> float | int | None:
    """Also of text: PyYAML reads 1e-5 as text, and the programs that use it convert it."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
