"""Files of other programs → trees in which every value has its file and line.

A file holds JSON, YAML, or the command line that starts the program.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import read_required_text, user_path
from whet.core.yaml import Node, parse_yaml

_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_CODE = (".py", ".ipynb")


def read_tree(path: Path, commands: tuple[str, ...] = ()) -> Node:
    """The mapping in a file. `commands`: words by which to know the command line, if the file holds one."""
    if path.suffix in _CODE:
        raise WhetError(
            f"{path}: whet imports configurations, not Python code. Of scripts with TRL, Unsloth or Trainer it imports "
            "the arguments: let the script write trainer.args.to_json_string() to args.json, then run whet import "
            "config trl args.json. Set the model, the data and the adapter in the recipe"
        )
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
    """The options of a command as a mapping; of several commands, the one that starts the program `command`."""
    started, named = [], []
    for each in _commands(text, name, command):
        program, has_options = _program(each, command), any(word.startswith("--") for word, _ in each)
        if command in each[program][0] and (has_options or _is_script(each, program)):
            started.append(each)
        elif has_options and any(command in word for word, _ in each):
            named.append(each)
    found = (started or named) if command else started[:1]
    if not found:
        wanted = f"with {command}" if command else "with options such as --learning_rate 1e-5"
        raise WhetError(
            f"{name}: the file holds no command line {wanted}. If a command names a file with the settings, import that"
        )
    if len(found) > 1:
        raise WhetError(
            f"{name}:{found[0][0][1]}: {command} is in another command too, in line {found[1][0][1]}, and whet imports "
            "one. Write the one to import into a file of its own"
        )

    def place(line: int) -> str:
        return f"{name}:{line}" if numbered else name

    options: dict[str, Node] = {}
    for key, values, line in _options(found[0], _program(found[0], command), place):
        inside = [Node(value, place(line)) for value in values]
        options[key] = inside[0] if len(inside) == 1 else Node(inside or True, place(line))
    return Node(options, place(found[0][0][1]))


Word = tuple[str, int]
"""A word of a command and its line."""

_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\([^()]*\)"""
_WORD = rf"""(?:{_QUOTED}|[^\s'"\\;|&<>])+"""
_TOKEN = re.compile(
    rf"(?P<ignored>\s+|\#.*|\d*(?:&>|[<>])[<>&]*\s*(?:{_WORD})?)|(?P<word>{_WORD})|(?P<end>[;|&]+)"
)  # redirections are ignored


def _commands(text: str, name: str, command: str) -> Iterator[list[Word]]:
    """The words of every command. What cannot be split into words is an error where `command` is in it."""
    for lines in _logical_lines(text):
        words: list[list[Word]] = [[]]
        for number, line in lines:
            at = 0
            while at < len(line) and (token := _TOKEN.match(line, at)):
                at = token.end()
                if token["word"]:
                    words[-1].append((shlex.split(token["word"])[0], number))
                elif token["end"]:
                    words.append([])
            if at < len(line):
                if any(command in each for _, each in lines):
                    raise WhetError(f"{name}:{lines[0][0]}: not a command line: No closing quotation")
                words = []
                break
        yield from (each for each in words if each and not each[0][0].startswith("-"))  # else lines of a long text


def _logical_lines(text: str) -> Iterator[list[tuple[int, str]]]:
    """Lines with their numbers; a backslash continues a line, but not a comment."""
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.rstrip()
        lines.append((number, stripped.removesuffix("\\")))
        if not stripped.endswith("\\") or stripped.lstrip().startswith("#"):
            yield lines
            lines = []
    if lines:
        yield lines


def _is_script(words: list[Word], at: int) -> bool:
    return words[at][0].endswith(".py") or (at > 0 and words[at - 1][0] == "-m")


def _program(words: list[Word], command: str) -> int:
    """Where the program's name is: a script or module, the one with `command` in its name if there is one."""
    scripts = [at for at in range(len(words)) if _is_script(words, at)]
    named = [at for at in scripts or range(len(words)) if command in words[at][0]]
    return named[0] if named and command else scripts[-1] if scripts else 0


def _options(words: list[Word], program: int, place: Callable[[int], str]) -> Iterator[tuple[str, list[str], int]]:
    """(key, values, line) of every --key value, --key=value and --key after the program's name, and of the launcher's
    options that give the number of processes. Any other word may stand for options, so it is an error."""
    at, is_script = 0, _is_script(words, program)
    while at < len(words):
        word, line = words[at]
        at += 1
        is_subcommand = not is_script and word.isidentifier() and not words[at - 2][0].startswith("-")
        if at - 1 > program and not word.startswith("--") and not is_subcommand:
            raise WhetError(f"{place(line)}: {_unread(word)}")
        if not word.startswith("--") or word == "--":
            continue
        key, equals, value = word.removeprefix("--").partition("=")
        values = [value] if equals else []
        while not equals and at < len(words) and not _is_option(words[at][0]) and at != program:
            if at > program and values and "$" in words[at][0]:
                raise WhetError(f"{place(words[at][1])}: {_unread(words[at][0])}")
            values.append(words[at][0])
            at += 1
        if at - 1 < program:
            if key.replace("-", "_") not in _LAUNCHER_OPTIONS:
                continue
            key, values = LAUNCHER + key.replace("-", "_"), values[:1]
        elif key == "config" and values:
            raise WhetError(f"{place(line)}: {_unread(values[0])}")
        yield key, values, line


def _unread(word: str) -> str:
    """Why a word of a command cannot be read."""
    if "$" in word:
        return f"{word} may hold options, and whet does not run scripts. Write the options out"
    if word.endswith((".yaml", ".yml", ".json")):
        return f"the settings are in {word}. Import that file, and make the changes of this command in the recipe"
    return f"{word!r} is not an option such as --learning_rate 1e-5. Remove it, or write the option out"


def _is_option(word: str) -> bool:
    """-1 is a value."""
    return word.startswith("-") and not word[1:2].isdecimal() and word not in ("-",)
