"""Configuration: typed sections, recipes that extend recipes, KEY=VALUE overrides, errors with file and line.

Each package declares its own sections (`Section`), one sentence per setting; `whet/config.py` joins them.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from whet.core.display import is_valid_text
from whet.core.errors import WhetError
from whet.core.files import resolve_path
from whet.core.yaml import Expand, Node, Template, dump_yaml_inline, parse_yaml, read_yaml

ConfigPath = tuple[str | int, ...]
"""The keys and list indices that lead to a value."""


class Section(BaseModel):
    """A group of settings. Unknown keys are errors, types are not coerced, instances are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of keys of which at most one may be set. A recipe that sets one drops the others that it inherits."""

    _templates: dict[ConfigPath, tuple[Template, Any]] = PrivateAttr(default={})
    """Of the root: the values that came from environment variables, each with its text and what it became."""

    @model_validator(mode="after")
    def _check_alternatives(self) -> typing.Self:
        for group in self.alternatives:
            given = [key for key in group if getattr(self, key) is not None]
            if len(given) > 1:
                raise config_error(given[1], f"{' and '.join(given)} are alternatives: give one of them")
        return self


def config_error(key: str, reason: str) -> PydanticCustomError:
    """For validators: values that are valid alone and invalid together. `key` is where the error is reported."""
    return PydanticCustomError("impossible", "{reason}", {"key": key, "reason": reason})


AnySection = TypeVar("AnySection", bound=Section)


def load_config(root: type[AnySection], path: Path | None, overrides: Sequence[str] = ()) -> AnySection:
    """Read a recipe and the recipes it extends, apply KEY=VALUE overrides, validate."""
    return validate_config(root, read_tree(root, path, overrides))


def read_tree(root: type[Section], path: Path | None, overrides: Sequence[str] = (), expand: Expand = "all") -> Node:
    """A recipe with the recipes it extends and KEY=VALUE overrides, not validated: every value has its place."""
    tree = _read_with_parents(path, root, (), {}, expand) if path else Node({}, "defaults")
    return apply_overrides(root, tree, overrides)


def apply_overrides(root: type[Section], tree: Node, overrides: Sequence[str]) -> Node:
    """The tree with KEY=VALUE overrides."""
    given = Node({}, "command line")
    for text in overrides:  # merged first: two alternatives on one command line are an error, the last does not win
        given = merge_trees(given, _parse_override(text), None)
    return merge_trees(tree, given, root)


def is_search_range(node: Node) -> bool:
    """Whether a range stands where a value would, such as `{search: log, low: 1e-6, high: 1e-4}`. The section `search`
    of a recipe is a mapping instead."""
    return isinstance(node.value, dict) and "search" in node.value and not isinstance(node.value["search"].value, dict)


def validate_config(root: type[AnySection], tree: Node) -> AnySection:
    """The typed section of a tree, or one WhetError that lists every error with its file and line."""
    if impossible := list(_impossible_values(tree, ())):
        raise WhetError("\n".join(impossible))
    try:
        config = root.model_validate(tree.plain())
    except ValidationError as error:
        found = dict.fromkeys(_describe_error(root, tree, detail) for detail in error.errors(include_url=False))
        raise WhetError("\n".join(found)) from None
    dumped = config.model_dump(exclude_none=True, mode="json")
    config._templates = {path: (text, value_at(dumped, path)) for path, text in tree.templates()}
    return config


def value_at(tree: Any, path: ConfigPath) -> Any:
    """The value at `path` of plain objects; None where there is none."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        else:
            tree = tree[key] if isinstance(tree, list) and isinstance(key, int) and key < len(tree) else None
    return tree


_MAX_INTEGER = 2**63 - 1
_MAX_DEPTH = 32
"""Of keys inside each other, and of recipes that extend each other."""


def _impossible_values(node: Node, path: tuple[str | int, ...]) -> Iterator[str]:
    """What no setting can be: integers that no library takes, text that no file system and no tokenizer takes."""
    if isinstance(node.value, dict | list):
        inside = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for key, inner in inside:
            if isinstance(key, str):
                yield from _impossible_values(Node(key, inner.place), (*path, "a key"))
            yield from _impossible_values(inner, (*path, key))
    elif isinstance(node.value, int) and abs(node.value) > _MAX_INTEGER:
        yield f"{node.place}: {_format_path(path)}: {node.value} is too large: integers have at most 63 bits"
    elif isinstance(node.value, str) and not is_valid_text(node.value):
        yield (
            f"{node.place}: {_format_path(path)}: {node.value!a} contains NUL or a character that is not valid "
            "UTF-8. Remove it; a file with such a name must be renamed"
        )


def _read_with_parents(
    path: Path, root: type[Section], seen: tuple[Path, ...], read: dict[Path, Node], expand: Expand
) -> Node:
    """`seen`: the recipes that extend this one. `read`: what has been read, because several may extend the same one."""
    tree = read_yaml(path, expand)
    assert isinstance(tree.value, dict)
    parents = tree.value.pop("extends", None)
    if parents is None:
        return tree
    names = parents.plain() if isinstance(parents.value, list) else [parents.value]
    base = Node({}, tree.place)
    for name in names:
        if not isinstance(name, str):
            raise WhetError(f"{parents.place}: extends takes the path of a recipe, or a list of them, not {name!r}")
        parent = resolve_path(path.parent / name)
        below = (*seen, resolve_path(path))
        if parent in below:
            raise WhetError(f"{parents.place}: circular extends: {name} extends itself")
        if len(below) > _MAX_DEPTH:
            raise WhetError(f"{parents.place}: extends {name}: more than {_MAX_DEPTH} recipes extend each other")
        if not parent.exists():
            raise WhetError(f"{parents.place}: extends {name}: no such file ({parent}). Paths are relative to {path}")
        if parent not in read:
            read[parent] = _read_with_parents(parent, root, below, read, expand)
        base = merge_trees(base, read[parent], root)
    return merge_trees(base, tree, root)


def _parse_override(text: str) -> Node:
    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys) or len(keys) > _MAX_DEPTH:
        raise WhetError(f"command line: '{text}' is not of the form KEY=VALUE, such as train.steps=100, without spaces")
    place = f"command line, {text}"
    node = Node("-", place) if value == "-" else parse_yaml(value, place, numbered=False)  # stdin, not an empty list
    for name in reversed(keys):
        node = Node({name: node}, place)
    return node


def merge_trees(base: Node, over: Node, section: type[Section] | None) -> Node:
    """`base` updated with `over`: mappings merge key by key, other values are replaced, integer keys index lists."""
    if isinstance(base.value, list) and isinstance(over.value, dict) and _are_indices(over.value):
        items = list(base.value)
        for key, node in over.value.items():
            if int(key) >= len(items):
                raise WhetError(f"{node.place}: there is no item {key}: the list has {len(items)} (counted from 0)")
            items[int(key)] = merge_trees(items[int(key)], node, section)
        return Node(items, base.place)
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)) or is_search_range(over):
        return over
    merged = dict(base.value)
    for group in section.alternatives if section else ():
        if any(key in over.value for key in group):
            merged = {key: node for key, node in merged.items() if key not in group or key in over.value}
    for key, node in over.value.items():
        field = section.model_fields.get(key) if section else None
        merged[key] = merge_trees(merged[key], node, _section_type(field)) if key in merged else node
    return Node(merged, base.place)


def _are_indices(keys: dict[str, Node]) -> bool:
    return bool(keys) and all(key.isascii() and key.isdecimal() and len(key) < 10 for key in keys)


def _section_type(field: FieldInfo | None) -> type[Section] | None:
    """The section type of a field, also inside an optional or a list."""
    options = [field.annotation] if field else []
    while options:
        option = options.pop()
        if isinstance(option, type) and issubclass(option, Section):
            return option
        options.extend(typing.get_args(option))
    return None


# Error messages


def _describe_error(root: type[Section], tree: Node, detail: ErrorDetails) -> str:
    path = tuple(detail["loc"])
    context = detail.get("ctx", {})
    for above in (path[:length] for length in range(1, len(path) + 1)):
        if is_search_range(node := tree.at(above)):
            return (
                f"{node.place}: {_format_path(above)}: {node.plain(named=True)!r} is a range to search. Run `whet "
                f"search CONFIG`, or give one value: {_format_path(above)}=VALUE"
            )
    if detail["type"] == "impossible":
        path = (*path, *context["key"].split("."))
        return f"{tree.at(path).place}: {_format_path(path)}: {context['reason']}"
    if detail["type"] == "missing":
        return f"{tree.at(path).place}: {_format_path(path)} is missing. {_description(_find_field(root, path))}"
    section = _section_at(root, path[:-1])
    if detail["type"] == "extra_forbidden" and section is not None:
        node, hint = tree.at(path), _suggest_key(root, section, path)
        return f"{node.place}: unknown key {_format_path(path)} (value {node.plain(named=True)!r}). {hint}"
    while path and _find_field(root, path) is None:  # pydantic adds the branch of a union to the path
        path = path[:-1]
    field, node = _find_field(root, path), tree.at(path)
    if detail["type"] == "value_error":  # raised by a validator of ours, in its own words
        return f"{node.place}: {_format_path(path)}: {node.plain(named=True)!r}: {context['error']}"
    expected = describe_type(field.annotation) if field else "something else"
    if (given := _as_section(field, node.plain(named=True))) is not None:
        expected = given if isinstance(path[-1], int) else f"[{given}]"
    limit = f" ({detail['msg'][:1].lower()}{detail['msg'][1:]})" if _is_range_error(detail["type"]) else ""
    return (
        f"{node.place}: {_format_path(path)}: {node.plain(named=True)!r} is not valid{limit}: expected {expected}. "
        f"{_description(field)}"
    )


def _as_section(field: FieldInfo | None, value: Any) -> str | None:
    """How a text is written as an item of a list of sections that require one key; None for other fields and values."""
    section = _section_type(field)
    required = [name for name, each in section.model_fields.items() if each.is_required()] if section else []
    is_list = field is not None and typing.get_origin(_without_none(field.annotation)) is list
    return dump_yaml_inline({required[0]: value}) if is_list and len(required) == 1 and isinstance(value, str) else None


def _is_range_error(kind: str) -> bool:
    return kind.startswith(("greater_than", "less_than", "too_short", "too_long", "multiple_of", "finite"))


def _format_path(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path) or "the recipe"


def _description(field: FieldInfo | None) -> str:
    return (field.description or "") if field else ""


def _find_field(root: type[Section], path: tuple[str | int, ...]) -> FieldInfo | None:
    section, field = root, None
    for key in path:
        if isinstance(key, int):
            continue
        if key not in section.model_fields:
            return None
        field = section.model_fields[key]
        section = _section_type(field) or Section
    return field


def _section_at(root: type[Section], path: tuple[str | int, ...]) -> type[Section] | None:
    return _section_type(_find_field(root, path)) if path else root


def _suggest_key(root: type[Section], section: type[Section], path: tuple[str | int, ...]) -> str:
    wrong, above = str(path[-1]), path[:-1]
    close = difflib.get_close_matches(wrong, section.model_fields, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {_format_path((*above, close[0]))}?"
    elsewhere = [setting.key for setting in list_settings(root) if setting.key.rpartition(".")[2] == wrong]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    if not section.model_fields:
        return "This takes no keys."
    return f"Known here: {', '.join(section.model_fields)}. `whet config` explains them all."


# Reference: what `whet config` and docs/config.md list


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration."""

    key: str
    type: str
    default: str
    description: str


def list_settings(root: type[Section], above: str = "") -> Iterator[Setting]:
    """Every setting below `root`, in order of declaration; the items of lists are listed under `[]`."""
    for name, field in root.model_fields.items():
        key, sub = f"{above}{name}", _section_type(field)
        if sub is None:
            yield Setting(key, describe_type(field.annotation), _format_default(field), _description(field))
        else:
            is_list = typing.get_origin(_without_none(field.annotation)) is list
            if field.description:
                yield Setting(
                    key, "list of sections" if is_list else "section", _format_default(field), field.description
                )
            yield from list_settings(sub, f"{key}[]." if is_list else f"{key}.")


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, Section):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if not isinstance(value, tuple) else str(list(value))


def _without_none(annotation: Any) -> Any:
    options = [option for option in typing.get_args(annotation) if option is not type(None)]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return options[0] if is_union and len(options) == 1 else annotation


_TYPE_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "true or false"}


def describe_type(annotation: Any) -> str:
    """A type in the words of the docs: `auto | integer`."""
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(str(option) for option in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(describe_type(option) for option in arguments if option is not type(None))
    if origin is list:
        return f"list of {_describe_types(arguments[0])}"
    if origin is dict:
        return f"mapping of names to {_describe_types(arguments[1])}"
    if origin is tuple:
        return "[" + ", ".join(describe_type(argument) for argument in arguments) + "]"
    if origin is typing.Annotated:
        return describe_type(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"a section with {', '.join(annotation.model_fields)}"
    return str(annotation)


def _describe_types(annotation: Any) -> str:
    """The plural of `describe_type`, for the items of lists and mappings."""
    text = describe_type(annotation)
    return f"{text}s" if text in ("string", "integer", "number") else text.replace("a section with", "sections with")
