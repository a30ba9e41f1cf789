"""The mapping table: what becomes of each key of another program's configuration.

A kind of file is a dictionary of rows. Most rows are complete as they stand (`copied`, `no_equivalent`, `not_needed`);
keys whose meaning depends on others are marked `by_rule`, and a function of the kind reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from whet.core.yaml import Node

if TYPE_CHECKING:
    from whet.convert.configs.draft import Draft

Type = Literal["number", "integer", "flag", "text", "texts", "any"]
Fate = Literal["copied", "rule", "same", "no equivalent", "not needed"]


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one key."""

    fate: Fate
    to: str = ""
    """copied: the key of whet. same: the key of this table that has the same meaning."""
    type: Type = "any"
    reason: str = ""
    """no equivalent, not needed: why."""


Rows = dict[str, Row]


def copied(type: Type, **targets: str) -> Rows:
    """Keys whose value is taken as it is; in a target, __ stands for a dot."""
    return {key.replace("__", "."): Row("copied", to, type) for key, to in targets.items()}


def same_as(**targets: str) -> Rows:
    """Keys that are other names of keys in this table."""
    return {key.replace("__", "."): Row("same", to) for key, to in targets.items()}


def by_rule(keys: str) -> Rows:
    """Keys that a rule of the kind reads."""
    return {key: Row("rule") for key in keys.split()}


def no_equivalent(reason: str, keys: str) -> Rows:
    """Keys for which whet has nothing, and whose absence may be noticed. Off (false, 0, none, empty) they are not
    needed."""
    return {key: Row("no equivalent", reason=reason) for key in keys.split()}


def not_needed(reason: str, keys: str) -> Rows:
    """Keys that do not change what is learned, and that whet decides by itself or does without."""
    return {key: Row("not needed", reason=reason) for key in keys.split()}


def under(section: str, keys: str) -> str:
    """The keys with their section."""
    return " ".join(f"{section}.{key}" for key in keys.split())


@dataclass(frozen=True)
class Kind:
    """A kind of configuration that can be imported."""

    name: str
    tool: str
    """The program and the version whose keys and defaults these are."""
    rows: Rows
    rules: tuple[Callable[[Draft], None], ...]
    """In order; they read the keys of rows marked `rule` and write settings."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What the program does where the file has no value."""
    arguments: Rows = field(default_factory=dict)
    """Rows of keys that are not in the file itself but in a command line inside it."""
    groups: dict[str, Rows] = field(default_factory=dict)
    """The sections that the file's keys are in, if every key is in one; `rows` has the keys of all, without them."""
    partial: bool = False
    """Whether such a file says only a part of what a run needs, so that it is imported onto a recipe."""
    command: str = ""
    """A word by which the program's command line is recognised, for files that hold one."""

    @functools.cached_property
    def sections(self) -> set[str]:
        """What comes before the dots of the table's keys."""
        return {key[:end] for key in self.rows for end, sign in enumerate(key) if sign == "."}

    def table_name(self, key: str) -> str:
        """A key of a file as the table has it: without its group, with _ for -."""
        group, dot, rest = key.partition(".")
        return (rest if dot and group in self.groups else key).replace("-", "_")

    def knows(self, key: str) -> bool:
        """Whether a file may have this key."""
        name = self.table_name(key)
        group = key.partition(".")[0]
        return name in (self.groups.get(group, {}) if self.groups else self.rows)

    def flatten(self, tree: Node, above: str = "") -> Iterator[tuple[str, Node]]:
        """(key, value) with dots for levels; a mapping that is itself in the table stays whole."""
        assert isinstance(tree.value, dict)
        for name, node in tree.value.items():
            key = f"{above}{name}"
            is_group = not above and name in self.groups
            normal = self.table_name(key)
            is_section = normal in self.sections and normal not in self.rows
            if isinstance(node.value, dict) and (is_group or is_section):
                yield from self.flatten(node, f"{key}.")
            else:
                yield key, node
