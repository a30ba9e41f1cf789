"""`whet import config`: a configuration of another program → a recipe, with a comment on each value."""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet import __version__
from whet.config import Config
from whet.convert.configs import axolotl, deepspeed, determined, llamafactory, mindspeed, nanochat, neox, trl
from whet.convert.configs.draft import CATEGORIES, Draft, Note, as_node
from whet.convert.configs.read import read_tree
from whet.convert.configs.table import Kind
from whet.core import console
from whet.core.config import is_search_range, list_settings, merge_trees, validate_config
from whet.core.config import read_tree as read_recipe_tree
from whet.core.display import escape_controls
from whet.core.errors import WhetError
from whet.core.files import require_file_place, write_named_file
from whet.core.yaml import Node, dump_yaml_inline, parse_yaml

KINDS: dict[str, Kind] = {
    module.KIND.name: module.KIND
    for module in (determined, deepspeed, neox, nanochat, mindspeed, trl, axolotl, llamafactory)
}


def import_config(kind: str | None, file: Path, onto: Path | None = None, out: Path | None = None) -> dict[str, Any]:
    """Write the recipe to `out`, or to stdout, and print what has no equivalent or means something else."""
    if out is not None:
        require_file_place("--out", out)
        if os.path.lexists(out):
            raise WhetError(f"{out}: the file exists. Give another name with --out, or delete it")
    known = find_kind(kind) if kind is not None else None
    candidates = [known] if known is not None else KINDS.values()
    tree = read_tree(file, tuple(kind.command for kind in candidates if kind.command))
    chosen = known or recognize(tree, file)
    if known is not None and (better := _best(tree)) and known.name not in better:
        console.warn(f"{file}: looks like {' or '.join(better)} more than {known.name}. Did you mean {better[0]}?")
    recipe = read_recipe_tree(Config, onto) if onto is not None else None
    draft = fill(chosen, tree, recipe)
    result = draft.tree()
    if recipe is not None and onto is not None:
        result = merge_trees(read_recipe_tree(Config, onto, expand="none"), result, Config)
    missing = _validate(draft.tree() if recipe is None else merge_trees(recipe, draft.tree(), Config))
    title = (
        f"Imported by whet {__version__} from {file}, read as a file of {chosen.tool}. The comment on a value says "
        "where it comes from; the comments at the end say what else you should know."
    )
    if missing:
        title += f" Not in the file: {', '.join(missing)}; set them here or on the command line."
    text = write_recipe(result, draft.notes, title)
    if parse_yaml(text, "", expand="none").plain() != result.plain(named=True):
        raise AssertionError(f"the recipe does not read back:\n{text}")
    if out is not None:
        write_named_file("--out", out, text)
    _print_notes(draft, chosen, file, missing, out)
    notes = [
        {
            "category": note.category,
            "key": note.key,
            "place": note.place,
            "value": _finite(note.value),
            "text": note.text,
        }
        for note in draft.notes
    ]
    return {
        "kind": chosen.name, "tool": chosen.tool, "file": str(file), "out": None if out is None else str(out),
        "missing": missing, "config": result.plain(named=True), "notes": notes, "recipe": text,
    }  # fmt: skip


def _finite(value: Any) -> Any:
    """The value without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def fill(kind: Kind, tree: Node, recipe: Node | None = None) -> Draft:
    """The settings and notes of a file. `recipe`: what it is imported onto, which may give the number of processes."""
    draft = Draft(kind, tree, _world(recipe) if recipe is not None else None, recipe)
    for rule in kind.rules:
        rule(draft)
    draft.finish()
    resolve_conflicts(draft)
    draft.settings = dict(sorted(draft.settings.items(), key=lambda item: _position(item[0])))
    return draft


def _position(key: str) -> tuple[int, str]:
    """Where `whet config` lists a key."""
    order, generic = _order_of_settings(), re.sub(r"\.\d+(?=\.|$)", "[]", key)
    return order.get(generic, order.get(generic.partition("[]")[0], len(order))), key


@functools.cache
def _order_of_settings() -> dict[str, int]:
    return {setting.key: number for number, setting in enumerate(list_settings(Config))}


def _world(recipe: Node) -> int | None:
    """The number of processes that a recipe launches; None if it does not say."""
    given = [recipe.at(("launch", key)).value for key in ("nodes", "gpus", "processes")]
    nodes, gpus, processes = (value if isinstance(value, int) else None for value in given)
    each = gpus or processes
    return None if each is None else each * (nodes or 1)


def find_kind(name: str) -> Kind:
    """The kind of this name."""
    if name not in KINDS:
        close = difflib.get_close_matches(name.lower().replace("-", "").replace("_", ""), KINDS, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise WhetError(f"{name!r} is not a kind of configuration. {hint}whet imports {', '.join(KINDS)}")
    return KINDS[name]


def recognize(tree: Node, file: Path) -> Kind:
    """The kind whose table has most of the file's keys."""
    best = _best(tree)
    if len(best) != 1:
        found = f"looks like {' or '.join(best)}" if best else "has no key that whet knows"
        raise WhetError(
            f"{file}: this {found}. Say what it is: whet import config KIND {file}, where KIND is one of "
            f"{', '.join(KINDS)}"
        )
    console.info(f"{file}: read as a file of {KINDS[best[0]].tool}")
    return KINDS[best[0]]


def _best(tree: Node) -> list[str]:
    """The kinds that know most of the file's keys; none if no key is known."""
    known = {name: sum(kind.knows(key) for key, _ in kind.flatten(tree)) for name, kind in KINDS.items()}
    best = [name for name, count in known.items() if count and count == max(known.values())]
    return [name for name in best if KINDS[name].partial] or best  # neox has all keys of deepspeed, and more


_REQUIRED = {"model.path": "builtin:tiny", "data.sources": [{"path": "builtin:orders"}]}


def _validate(tree: Node) -> list[str]:
    """Whether the result is a recipe but for what is missing, which may be given later. The result: what is missing."""
    missing = []
    given = tree.plain()
    for key, stand_in in _REQUIRED.items():
        section, name = key.split(".")
        if not isinstance(given.get(section, {}), dict) or name in given.get(section, {}):
            continue
        missing.append(key)
        tree = merge_trees(tree, as_node({section: {name: stand_in}}, "import"), Config)
    for end in (0, -1):
        validate_config(Config, _with_values(tree, end))
    return missing


def _with_values(node: Node, end: int) -> Node:
    """The recipe with the first or last value of each range that is searched."""
    if is_search_range(node) and isinstance(node.value, dict):
        inside = node.value
        values = inside["values"].value if "values" in inside else [inside[k] for k in ("low", "high") if k in inside]
        return values[end] if isinstance(values, list) and values else node
    if isinstance(node.value, dict):
        return Node({key: _with_values(inner, end) for key, inner in node.value.items()}, node.place)
    if isinstance(node.value, list):
        return Node([_with_values(inner, end) for inner in node.value], node.place)
    return node


def _print_notes(draft: Draft, kind: Kind, file: Path, missing: list[str], out: Path | None) -> None:
    styles = {"decide": "yellow", "unknown": "yellow"}
    for category, meaning in CATEGORIES.items():
        found = [note for note in draft.notes if note.category == category]
        if found and category == "not needed":
            keys = list(dict.fromkeys(note.key for note in found))
            console.info(f"{meaning}: {', '.join(keys) if out is None else f'{len(keys)} keys, listed in {out}'}")
        elif found:
            console.info(f"{meaning}:", style=styles.get(category))
            for note in found:
                console.info(f"- {describe(note)}")
    if missing:
        console.warn(f"not in {file}: {', '.join(missing)}. Add to the recipe, or set on the command line")
    if kind.partial and draft.target is None:
        console.warn(f"a file of {kind.tool} is a part of a configuration: --onto RECIPE adds it to a recipe")
    if out is not None:
        console.info(f"written: {out}")


# What other programs combine and whet does not: one of the two is left out, and the recipe says which.


def resolve_conflicts(draft: Draft) -> None:
    """Leave out what `whet/config.py` would refuse, with a note; wrong values are left for it to refuse."""

    def value(to: str) -> Any:
        return draft.settings[to].plain() if to in draft.settings else None

    def is_split(to: str) -> bool:
        size = value(to)
        return isinstance(size, int) and size > 1

    adapter, quantized = "adapter.method" in draft.settings, "quantize" in draft.settings
    loads_first = value("adapter.method") == "dora" or (
        adapter and bool(value("adapter.also_train") or value("model.add_tokens"))
    )
    whole_layers = value("train.optimizer.name") == "adamw8bit" or value("train.precision") == "fp8"
    if is_split("parallel.tensor") and (adapter or quantized or whole_layers or is_split("parallel.context")):
        text = "tensor parallelism with adapters, context parallelism, fp8 or 8-bit optimizers: left out"
        draft.drop("parallel.tensor", "no equivalent", text)
    if is_split("parallel.shard") and loads_first and not quantized:
        text = "sharding with DoRA, modules trained in full, or new tokens: left out"
        draft.drop("parallel.shard", "no equivalent", text)
    if value("parallel.offload") == "weights" and (quantized or "parallel.shard" not in draft.settings):
        draft.drop("parallel.offload", "no equivalent", "offload of 4-bit weights, or of unsharded ones: left out")
    if quantized and "model.dtype" in draft.settings:
        draft.drop("model.dtype", "no equivalent", "a dtype of weights that have 4 bits: left out")
    _drop_trained_validation(draft)


def _drop_trained_validation(draft: Draft) -> None:
    """Validation on the training data: whet refuses it, because it would measure memorization."""
    tests = "data.validation.sources"
    trained = _sources(draft, "data.sources")
    if not any(source in trained for source in _sources(draft, tests)):
        return
    text = "validation on the training data would measure memorization: left out. Set data.validation.fraction"
    draft.drop(f"{tests}.0.path", "decide", text)
    for to in [to for to in draft.settings if to.startswith(f"{tests}.")]:
        del draft.settings[to]


def _sources(draft: Draft, to: str) -> list[tuple[Any, ...]]:
    """What makes a source the same as another, of each."""
    keys = ("path", "split", "subset")
    found, number = [], 0
    while f"{to}.{number}.path" in draft.settings:
        nodes = [draft.settings.get(f"{to}.{number}.{key}") for key in keys]
        found.append(tuple(None if node is None else node.plain() for node in nodes))
        number += 1
    return found


# The recipe as text: one comment per value that says where it comes from, and what the user should know at the end.

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
