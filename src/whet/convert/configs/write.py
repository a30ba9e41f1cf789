"""The recipe as text: one comment per value that says where it comes from, and what the user should know at the end."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from whet.convert.configs.draft import CATEGORIES, Note
from whet.core.config import is_search_range
from whet.core.display import escape_controls
from whet.core.yaml import Node, dump_yaml_inline

_WIDTH = 110


def write_recipe(tree: Node, notes: list[Note], title: str) -> str:
    """YAML that reads back as `tree`."""
    lines = [*_comment(title), "", *(_lines(tree, "") if tree.value else ["{}"])]
    for category, meaning in CATEGORIES.items():
        found = [note for note in notes if note.category == category]
        if found:
            lines += ["", f"# {meaning[0].upper()}{meaning[1:]}:"]
            if category == "not needed":
                lines += _comment(", ".join(dict.fromkeys(note.key for note in found)))
            else:
                for note in found:
                    lines += _comment(f"- {describe(note)}", "  ")
    return "\n".join(lines) + "\n"


def describe(note: Note) -> str:
    """`sft.yaml:12 streaming: true: no equivalent …`."""
    value = dump_yaml_inline(note.value)
    value = f"{value[:57]}…" if len(value) > 60 else value
    place = "" if note.place.endswith(f" {note.key}") else f"{note.key}: {value}: "
    return f"{note.place} {place}{note.text}"


def _lines(node: Node, indent: str) -> Iterator[str]:
    """The lines of a mapping or a list; short lists and mappings of scalars stay on one line."""
    if isinstance(node.value, dict):
        for key, inner in node.value.items():
            name = dump_yaml_inline(key)
            if _is_branch(inner):
                yield f"{indent}{name}:"
                yield from _lines(inner, f"{indent}  ")
            else:
                yield f"{indent}{name}: {dump_yaml_inline(_plain(inner))}  # {_one_line(inner.place)}"
    else:
        assert isinstance(node.value, list)
        for item in node.value:
            first, *rest = list(_lines(item, f"{indent}  "))
            yield f"{indent}- {first.lstrip()}"
            yield from rest


def _is_branch(node: Node) -> bool:
    """Whether the node takes lines of its own: mappings whose values come from different places, lists of mappings."""
    if isinstance(node.value, dict):
        return bool(node.value) and not is_search_range(node)
    return isinstance(node.value, list) and bool(node.value) and all(
        isinstance(each.value, dict) and each.value for each in node.value
    )  # fmt: skip


def _plain(node: Node) -> object:
    """As `Node.plain`, with variables by name."""
    return node.plain(named=True)


def _comment(text: str, indent: str = "") -> list[str]:
    wrapped = textwrap.wrap(_one_line(text), _WIDTH, subsequent_indent=indent, break_long_words=False)
    return [f"# {line}" for line in wrapped]


_PLACE = re.compile(r"(?:[^\s/]*/)+([^\s/]+:\d+)(?=[ ,]|: |$)")
"""A file with its folders and a line."""


def _one_line(text: str) -> str:
    return _PLACE.sub(r"\1", " ".join(escape_controls(text).split()))
