"""Files of other programs → trees in which every value has its file and line.

A file holds JSON, YAML, or the command line that starts the program.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import read_required_text, user_path
from whet.core.yaml import Node, parse_yaml

_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")


def read_tree(path: Path, commands: tuple[str, ...] = ()) -> Node:
    """The mapping in a file. `commands`: words by which to know the command line, if the file holds one."""
    text = read_required_text(path, "Give the configuration file of the other program").removeprefix("\ufeff")
    command = next((word for word in commands if word in text), commands[0] if commands else "")
    if path.suffix in _SCRIPTS:
        return parse_command(text, str(path), command)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        fault = _json_fault(text)
        if fault and path.suffix == ".json":
            raise WhetError(f"{path}:{fault}")
        if not fault:
            text = text.replace("\t", " ")  # JSON has tabs between values alone; YAML allows none
    try:
        tree = parse_yaml(text, str(path), expand="none")
    except WhetError:
        if path.suffix in (".yaml", ".yml", ".json") or "--" not in text:
            raise
        return parse_command(text, str(path), command)
    if isinstance(tree.value, str) and ("--" in text or command in text):
        return parse_command(text, str(path), command)
    if not isinstance(tree.value, dict):
        found = "empty" if tree.value is None else f"not {type(tree.plain()).__name__}"
        raise WhetError(f"{path}: a configuration is a mapping of keys to values, or a command line; this is {found}")
    return tree


def find_file(name: str, folder: Path) -> Path | None:
    """A file that a configuration names: relative to the configuration's folder, or to this one."""
    for path in (folder / user_path(name), user_path(name)):
        if os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for names that no file can have
            return path
    return None


def _json_fault(text: str) -> str:
    """LINE:COLUMN and what is wrong with a JSON text; empty if nothing is."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        lines = text.splitlines() or [""]
        around = lines[min(error.lineno, len(lines)) - 1].strip()[:60]
        return f"{error.lineno}:{error.colno}: not valid JSON: {error.msg}, at {around!r}"
    except (ValueError, RecursionError) as error:
        return f"1:1: not valid JSON: {error}"
    return ""


# Command lines

LAUNCHER = "launcher."
"""Before the options of torchrun, deepspeed and accelerate that give the number of processes."""

_LAUNCHER_OPTIONS = ("nproc_per_node", "nnodes", "num_gpus", "num_nodes", "num_processes", "num_machines")


def parse_command(text: str, name: str, command: str = "", numbered: bool = True) -> Node:
    """The options of a command as a mapping; of several commands, the one that contains `command`."""
    for start, lines in _commands(text):
        if command and not any(command in line for line in lines):
            continue
        try:
            words = [(word, start + i) for i, line in enumerate(lines) for word in shlex.split(line, comments=True)]
        except ValueError as error:
            raise WhetError(f"{name}:{start}: not a command line: {error}") from None
        options: dict[str, Node] = {}
        for key, values, line in _options(words):
            place = f"{name}:{line}" if numbered else name
            inside = [Node(value, place) for value in values]
            options[key] = inside[0] if len(inside) == 1 else Node(inside or True, place)
        if options or command:
            return Node(options, f"{name}:{start}" if numbered else name)
    wanted = f"with {command}" if command else "with options such as --learning_rate 1e-5"
    raise WhetError(f"{name}: the file holds no command line {wanted}")


def _commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, its lines) of every command; a backslash continues a line."""
    start = 1
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not lines:
            start = number
        continues = line.rstrip().endswith("\\")
        lines.append(line.rstrip().removesuffix("\\"))
        if not continues:
            yield start, lines
            lines = []
    if lines:
        yield start, lines


def _options(words: list[tuple[str, int]]) -> Iterator[tuple[str, list[str], int]]:
    """(key, values, line) of every --key value, --key=value and --key after the program's name, and of the launcher's
    options that give the number of processes."""
    program = max(
        (i for i, (word, _) in enumerate(words) if word.endswith(".py") or (i and words[i - 1][0] == "-m")), default=0
    )
    at = 0
    while at < len(words):
        word, line = words[at]
        at += 1
        if not word.startswith("--") or word == "--":
            continue
        key, equals, value = word.removeprefix("--").partition("=")
        values = [value] if equals else []
        while not equals and at < len(words) and not _is_option(words[at][0]) and at != program:
            values.append(words[at][0])
            at += 1
        if at - 1 < program:
            if key.replace("-", "_") not in _LAUNCHER_OPTIONS:
                continue
            key, values = LAUNCHER + key.replace("-", "_"), values[:1]
        yield key, values, line


def _is_option(word: str) -> bool:
    """-1 is a value."""
    return word.startswith("-") and not word[1:2].isdecimal() and word not in ("-",)
