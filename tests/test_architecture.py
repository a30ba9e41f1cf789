"""The direction of imports, and what the command line may not load to say hello."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import whet

SOURCE = Path(whet.__file__).parent

_BELOW = {"core", "data", "model", "parallel"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "data": {"core"},
    "model": {"core"},
    "parallel": {"core", "data", "model"},
    "train": _BELOW,
    "checkpoint": _BELOW,
    "infer": _BELOW,
    "watch": {"core"},
    "fleet": {"core"},
    "config": {"core"},  # and the packages' config modules
    "recipe": {*_BELOW, "train", "checkpoint", "infer", "config"},
    "bench": {*_BELOW, "config", "recipe"},
}
"""cli may import anything; the package itself and __main__ hold no code."""


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
    if mine == "cli":
        return []
    wrong = []
    for name in imported(source):
        parts = name.split(".")[1:]
        is_config = mine == "config" and len(parts) > 1 and parts[1] == "config"
        if parts and parts[0] != mine and parts[0] not in MAY_IMPORT[mine] and not is_config:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SOURCE.rglob("*.py")) if owner(path) not in ("__init__", "__main__")],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_imports_point_downwards(path: Path) -> None:
    assert forbidden(owner(path), path.read_text()) == []


def test_a_lazy_import_against_the_direction_is_found() -> None:
    assert forbidden("model", "def f():\n    from whet.data import batch\n") == ["whet.data.batch"]
    assert forbidden("train", "import whet.checkpoint.save\n") == ["whet.checkpoint.save"]
    assert forbidden("config", "from whet.train.step import train_step\n") == ["whet.train.step.train_step"]
    assert forbidden("config", "from whet.train.config import TrainConfig\nfrom whet.core.yaml import Node\n") == []


def test_scripts_that_run_other_tools_do_without_whet() -> None:
    scripts = sorted((SOURCE / "bench" / "peers").glob("*.py"))
    assert {"trl_peer.py", "unsloth_peer.py", "sft_race.py"} <= {script.name for script in scripts}
    assert [name for script in scripts for name in imported(script.read_text())] == []


def test_recipe_is_a_package_and_the_package_itself_imports_nothing() -> None:
    assert (SOURCE / "recipe" / "__init__.py").exists()
    assert list(imported((SOURCE / "__init__.py").read_text())) == []


def test_the_command_line_starts_without_torch_transformers_and_pydantic() -> None:
    heavy = ("torch", "transformers", "pydantic", "numpy")
    code = f"import sys, whet.cli.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_takes_less_than_half_a_second() -> None:
    def seconds() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "whet", "--help"], capture_output=True, check=True)
        return time.perf_counter() - began

    assert min(seconds() for _ in range(5)) < 0.5
