"""The direction of imports, and what the command line may not load to say hello."""

from __future__ import annotations

import ast
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import typer.main

import whet
from whet.cli.app import VERBS, app

SOURCE = Path(whet.__file__).parent

_DATA_AND_MODEL = {"core", "compat", "config", "tokenizer", "data", "model", "registry"}
_DEVICES = {*_DATA_AND_MODEL, "parallel", "execution"}
_ENGINE = {*_DEVICES, "checkpoint", "exporting", "convert", "evaluation", "inference", "training"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": {"compat"},
    "compat": {"core"},
    "config": {"core", "tokenizer"},  # and the packages' config modules
    "tokenizer": {"core", "compat"},
    "data": {"core", "compat", "tokenizer"},
    "registry": {"core"},
    "evaluation": {"core"},
    "model": {"core", "compat", "tokenizer", "registry"},
    "parallel": _DATA_AND_MODEL,
    "execution": {*_DATA_AND_MODEL, "parallel"},
    "inference": {*_DEVICES, "evaluation"},
    "checkpoint": _DEVICES,
    "exporting": {*_DEVICES, "checkpoint"},
    "convert": {*_DEVICES, "checkpoint", "exporting", "training"},
    "training": {*_DEVICES, "evaluation", "checkpoint", "inference"},
    "run": _ENGINE,
    "preflight": {*_ENGINE, "run"},
    "bench": {*_ENGINE, "run"},
    "fit": {*_ENGINE, "run"},
    "launch": {"core", "config"},
    "runs": {"core", "config", "checkpoint", "evaluation", "launch", "report"},
    "search": {*_ENGINE, "run", "launch", "report"},
    "report": {"core"},
    "web": {"core"},
    "dash": {*_ENGINE, "run", "launch", "report", "runs", "search", "web"},
    "serve": {*_ENGINE, "run", "web"},
    "integrations": {"core"},
}
"""cli and api may import anything; the package itself and __main__ hold no code."""


def imported(source: str) -> Iterator[str]:
    """Every module of whet that a source imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "whet")


def owner(path: Path) -> str:
    """The package, or top-level module, that a file belongs to."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def forbidden(mine: str, source: str) -> list[str]:
    """The imports of a source that its package may not have."""
    if mine in ("cli", "api"):
        return []
    wrong = []
    for name in imported(source):
        parts = name.split(".")[1:]
        is_config = mine == "config" and len(parts) > 1 and parts[1] == "config"
        if parts and parts[0] not in {mine, "__version__", *MAY_IMPORT[mine]} and not is_config:
            wrong.append(name)
    return wrong


def test_imports_point_downwards() -> None:
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if owner(path) not in ("__init__", "__main__")]
    wrong = {str(path.relative_to(SOURCE)): forbidden(owner(path), path.read_text()) for path in paths}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_a_lazy_import_against_the_direction_is_found() -> None:
    assert forbidden("model", "def f():\n    from whet.data import batch\n") == ["whet.data.batch"]
    assert forbidden("checkpoint", "import whet.training.step\n") == ["whet.training.step"]
    assert forbidden("config", "from whet.training.step import train_step\n") == ["whet.training.step.train_step"]
    assert forbidden("config", "from whet.training.config import TrainConfig\nfrom whet.core.yaml import Node\n") == []


def test_scripts_that_run_other_tools_do_without_whet() -> None:
    scripts = sorted((SOURCE / "bench" / "peers").glob("*.py"))
    assert {"trl_peer.py", "unsloth_peer.py", "timed_sft.py"} <= {script.name for script in scripts}
    assert [name for script in scripts for name in imported(script.read_text())] == []


def test_the_package_itself_imports_nothing() -> None:
    assert list(imported((SOURCE / "__init__.py").read_text())) == []


def test_the_command_line_starts_without_torch_transformers_and_pydantic(real_python: str) -> None:
    heavy = ("torch", "transformers", "pydantic", "numpy")
    code = f"import sys, whet.cli.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([real_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_shows_the_first_sentence_of_each_verb() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {name: " ".join(command.help.split("\n\n")[0].split()) for name, command in commands.items()}
    assert found == VERBS


def test_help_imports_no_verb(real_python: str) -> None:
    code = (
        "import sys; from whet.cli.app import main; sys.argv[1:] = ['--help']\ntry: main()\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('whet.cli.')])"
    )
    done = subprocess.run([real_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['whet.cli.app']"


def test_help_takes_less_than_a_third_of_a_second(real_python: str) -> None:
    """Of processor time, which other processes of a busy machine do not change much."""

    def seconds() -> float:
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([real_python, "-m", "whet", "--help"], capture_output=True, check=True)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime

    assert min(seconds() for _ in range(5)) < 0.33
