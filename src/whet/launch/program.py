"""Programs of the user's that `whet launch` starts: a script, or anything that the shell would find."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from whet.core.errors import WhetError

_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def resolve_program(words: Sequence[str], python: str, verbs: Collection[str], is_here: bool = True) -> tuple[str, ...]:
    """The command of a program. A script by itself is run by `python`. `is_here`: its files can be looked for on this
    machine, because it does not run in a container. `verbs` of whet, one of which may have been meant."""
    program, script = words[0], python_script(words)
    command = (python, *words) if program == script else tuple(words)
    if not is_here:
        return command
    if script is not None and not Path(script).expanduser().is_file():
        raise WhetError(f"-- {' '.join(words[:3])}: there is no file {script}. Check the path{_near_files(script)}")
    if program != script and "/" in program and Path(program).is_file() and shutil.which(program) is None:
        raise WhetError(f"-- {program}: the file is not executable. Make it so: chmod +x {program}")
    if program != script and shutil.which(program) is None:
        near = difflib.get_close_matches(program, verbs, n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]}?" if near else f"The verbs are {', '.join(verbs)}"
        raise WhetError(f"-- {program}: neither a verb of whet nor a program on this machine. {hint}")
    return command


def python_script(words: Sequence[str]) -> str | None:
    """The script that a command runs with Python: the command itself, or the first argument of the interpreter."""
    if words[0].endswith(".py"):
        return words[0]
    if not Path(words[0]).name.startswith("python"):
        return None
    rest = iter(words[1:])
    for word in rest:
        if word in _OPTIONS_WITH_VALUE:
            next(rest, None)
        elif word.startswith(("-m", "-c")) or word == "-":
            return None
        elif not word.startswith("-"):
            return word
    return None


def program_name(words: Sequence[str]) -> str:
    """A short name for what runs."""
    return Path(python_script(words) or words[0]).stem


def _near_files(script: str) -> str:
    folder = Path(script).expanduser().parent
    names = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    near = difflib.get_close_matches(Path(script).name, names, n=1, cutoff=0.6)
    return f"; did you mean {folder / near[0]}?" if near else ""
