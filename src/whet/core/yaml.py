"""YAML in which every value keeps its file and line.

Scalars follow YAML 1.2 (`1e-6` is a number, `no` is text). `${NAME}` and `${NAME:-default}` in values are replaced from
the environment; `$${` stands for a literal `${`.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from whet.core.errors import WhetError, first_line
from whet.core.files import read_required_text
from whet.core.limits import limited

_MAX_VALUES, _MAX_SECONDS = 100_000, 10.0
Scalar = str | int | float | bool | None
Expand = Literal["all", "set", "none"]
"""Which variables are replaced. all: one that is not set is an error. set: a quoted text with one that is not set stays
as it is. none: every text with a variable becomes a `Template`."""


class Template(str):
    """The text of a value with variables in it, as it stands in a recipe."""

    is_text = True
    """False: a number or a word such as true, which has no quotes."""

    @property
    def names(self) -> list[str]:
        """The names of the variables."""
        return list(dict.fromkeys(match["name"] for match in _VARIABLE.finditer(self) if match["name"]))

    @property
    def unset(self) -> list[str]:
        """The names of variables that have neither a value nor a default."""
        without_default = {match["name"] for match in _VARIABLE.finditer(self) if match["default"] is None}
        return [name for name in self.names if name in without_default and name not in os.environ]


@dataclass(frozen=True, slots=True)
class Node:
    """A YAML value and its place, such as `recipes/tiny.yaml:12`."""

    value: dict[str, Node] | list[Node] | Scalar
    place: str
    template: Template | None = None
    """The text that `value` comes from, if it has variables."""

    def plain(self, named: bool = False) -> Any:
        """The value as plain Python objects. `named`: for messages, with variables by name."""
        if isinstance(self.value, dict):
            return {key: node.plain(named) for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain(named) for node in self.value]
        return self.template if named and self.template is not None else self.value

    def templates(self, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Template]]:
        """The path and text of every value with variables."""
        if self.template is not None:
            yield path, self.template
        if isinstance(self.value, dict):
            for key, node in self.value.items():
                yield from node.templates((*path, key))
        elif isinstance(self.value, list):
            for index, node in enumerate(self.value):
                yield from node.templates((*path, index))

    def at(self, path: tuple[str | int, ...]) -> Node:
        """The node at `path`, or its deepest ancestor that exists."""
        node = self
        for key in path:
            if isinstance(node.value, dict) and key in node.value:
                node = node.value[str(key)]
            elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
                node = node.value[key]
            else:
                break
        return node


def read_yaml(path: Path, expand: Expand = "all") -> Node:
    """The content of a YAML file, which must be a mapping at the top."""
    text = read_required_text(path, "Give the path of a recipe, a YAML file such as recipes/tiny.yaml")
    node = parse_yaml(text, str(path), expand=expand)
    if node.value is None:
        raise WhetError(f"{path}: the file is empty. A recipe needs at least model and data; see recipes/tiny.yaml")
    if not isinstance(node.value, dict):
        raise WhetError(f"{node.place}: a recipe is a mapping of keys to values, not {node.plain()!r}")
    return node


def parse_yaml(text: str, name: str, numbered: bool = True, expand: Expand = "all") -> Node:
    """Parse one YAML document. Errors name `name` as the place, with a line number if `numbered`."""
    try:
        with limited(_MAX_SECONDS, ValueError):
            document = _compose(text)
            if document is None:
                return Node(None, name)
            _refuse_alias_bomb(document)
            return _convert_node(document, name, numbered, expand)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark and numbered else name
        problem = getattr(error, "problem", None) or first_line(error)
        raise WhetError(f"{place}: not valid YAML: {problem}") from None
    except RecursionError:
        raise WhetError(f"{name}: not valid YAML: a value is nested too deeply, or contains itself") from None
    except (ValueError, OverflowError) as error:
        raise WhetError(f"{name}: not valid YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    """Refuses tags: `!!str 5` or `!include x.yaml` would be read as something else than they say."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if tag := getattr(event, "tag", None):
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            problem = f"whet reads no tags, such as {shown}. Remove it; for text write quotes"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


@functools.lru_cache(maxsize=4)
def _compose(text: str) -> yaml.Node | None:
    """PyYAML's nodes. A run reads its config.yaml several times, at 20 ms each."""
    return yaml.compose(text, Loader=_Loader)


def _refuse_alias_bomb(document: yaml.Node) -> None:
    """A few lines of aliases to lists of aliases stand for billions of values. Counts each value as often as it occurs,
    but visits it once."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) not in sizes:
            inner = itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = 1 + sum(size(each) for each in inner)
        return sizes[id(node)]

    if size(document) > _MAX_VALUES:
        raise ValueError(f"its aliases stand for more than {_MAX_VALUES:,} values. Write them out")


def _convert_node(node: yaml.Node, name: str, numbered: bool, expand: Expand) -> Node:
    place = f"{name}:{node.start_mark.line + 1}" if numbered else name
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise WhetError(f"{place}: a key must be plain text")
            key = str(key_node.value)
            if key == "<<" and key_node.style is None:
                raise WhetError(
                    f"{name}:{key_node.start_mark.line + 1}: <<: whet reads no merge keys. Write the keys out; a "
                    "recipe takes those of another file with extends: FILE"
                )
            if Template(key).names:
                raise WhetError(
                    f"{place}: the key {key!r} names an environment variable; only values may. Write it out"
                )
            key, value = key.replace("$${", "${"), _convert_node(value_node, name, numbered, expand)
            key_place = f"{name}:{key_node.start_mark.line + 1}" if numbered else name
            if key in mapping:
                raise WhetError(f"{key_place}: the key '{key}' is given twice (first at {mapping[key].place})")
            mapping[key] = Node(value.value, key_place, value.template)
        return Node(mapping, place)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert_node(item, name, numbered, expand) for item in node.value], place)
    assert isinstance(node, yaml.ScalarNode)
    template, is_text = Template(node.value), node.style in ("'", '"', "|", ">")
    if template.names and (expand == "none" or (expand == "set" and is_text and template.unset)):
        return Node(template, place, template)
    text = _expand_variables(str(node.value), place)
    return Node(text if is_text else _parse_scalar(text), place, template if template.names else None)


_VARIABLE = re.compile(r"\$\$\{|(?<!\$)\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
"""A variable, or the `$${` that stands for `${`."""


def _expand_variables(text: str, place: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match["name"] is None:
            return "${"
        found = os.environ.get(match["name"], match["default"])
        if found is None:
            raise WhetError(
                f"{place}: the environment variable {match['name']} is not set. "
                f"Set it, or give a default: ${{{match['name']}:-value}}"
            )
        return found

    return _VARIABLE.sub(value, text)


_INT = re.compile(r"[-+]?[0-9][0-9_]*\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_KEYWORDS: dict[str, Scalar] = {"": None, "~": None, "null": None, "true": True, "false": False}
_SPECIAL_FLOATS = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


def _parse_scalar(text: str) -> Scalar:
    lowered = text.lower()
    if lowered in _KEYWORDS:
        return _KEYWORDS[lowered]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return _SPECIAL_FLOATS.get(lowered, text)


def dump_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def dump_yaml_inline(value: Any) -> str:
    """The same on one line."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9, default_flow_style=True)
    return text.removesuffix("...\n").rstrip("\n")


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `_parse_scalar` or `_expand_variables` would change."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = isinstance(_parse_scalar(text), str) and "${" not in text and text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text.replace("${", "$${"), style=None if plain else '"')


def _represent_float(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(number), repr(number))
    if "." not in text:  # PyYAML reads 1e-08 as a string and would quote it
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_template(dumper: yaml.SafeDumper, text: Template) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"' if text.is_text else None)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Template, _represent_template)
_Dumper.add_representer(float, _represent_float)
