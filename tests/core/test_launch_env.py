"""What the launcher's environment variables mean, that reading them needs no torch, and where bytecode is kept."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
from pathlib import Path

import pytest

from whet.core import launch_env
from whet.core.errors import WhetError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*_VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("alone")
def test_a_process_without_a_launcher_is_alone() -> None:
    assert (launch_env.rank(), launch_env.world_size()) == (0, 1)
    assert (launch_env.local_rank(), launch_env.local_world_size(), launch_env.local_world_size(4)) == (0, 1, 4)
    assert not launch_env.started_by_torchrun()
    assert not launch_env.has_agent_store()
    assert launch_env.error_file() is None


@pytest.mark.parametrize(
    ("variables", "possible"),
    [
        ({"RANK": "1"}, False),
        ({"RANK": "2", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
        ({}, True),
    ],
)
def test_a_rank_that_no_launcher_sets_is_refused(
    alone: pytest.MonkeyPatch, variables: dict[str, str], possible: bool
) -> None:
    for name, value in variables.items():
        alone.setenv(name, value)
    if possible:
        launch_env.require_possible_rank()
        alone.setenv("RANK", "x")
        with pytest.raises(WhetError, match="RANK is 'x', not a number"):
            launch_env.require_possible_rank()
        return
    with pytest.raises(WhetError, match="unset RANK WORLD_SIZE"):
        launch_env.require_possible_rank()


def test_a_world_without_an_address_is_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("WORLD_SIZE", "2")
    alone.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(WhetError, match="WORLD_SIZE is 2, but MASTER_ADDR is not set"):
        launch_env.store_address()


def test_torchruns_variables_are_read(alone: pytest.MonkeyPatch) -> None:
    for name, value in zip(_VARIABLES, ("5", "8", "1", "4", "id", "/tmp/error.json"), strict=True):
        alone.setenv(name, value)
    alone.setenv("MASTER_ADDR", "node")
    alone.setenv("MASTER_PORT", "29500")
    assert (launch_env.rank(), launch_env.world_size()) == (5, 8)
    assert (launch_env.local_rank(), launch_env.local_world_size(9)) == (1, 4)
    assert launch_env.store_address() == ("node", 29500)
    assert launch_env.started_by_torchrun()
    assert str(launch_env.error_file()) == "/tmp/error.json"


def test_the_agent_store_is_detected_by_its_variable(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert not launch_env.has_agent_store()
    alone.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert launch_env.has_agent_store()


@pytest.mark.parametrize("module", ["launch_env", "run_folder", "heartbeat", "signals", "files"])
def test_modules_of_the_launcher_import_no_heavy_library(real_python: str, module: str) -> None:
    code = f"import sys, whet.core.{module}; print([m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules])"
    done = subprocess.run([real_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


_PRINT_BYTECODE = """
import json, os, subprocess, sys
from whet.core.launch_env import keep_bytecode
keep_bytecode("heavy")
import heavy
child = subprocess.run([sys.executable, "-c", "import heavy; print(heavy.__cached__)"], capture_output=True, text=True)
print(json.dumps([heavy.__cached__, child.stdout.strip()]))
"""


@pytest.mark.parametrize("is_compiled", [False, True], ids=["without bytecode", "with bytecode"])
def test_bytecode_is_kept_in_the_cache_where_python_writes_none(
    tmp_path: Path, is_compiled: bool, real_python: str
) -> None:
    source, cache = tmp_path / "site" / "heavy.py", tmp_path / "cache"
    source.parent.mkdir()
    source.write_text("answer = 42\n")
    if is_compiled:
        py_compile.compile(str(source))
    environment = os.environ | {
        "PYTHONDONTWRITEBYTECODE": "1", "WHET_CACHE": str(cache),
        "PYTHONPATH": f"{source.parent}{os.pathsep}{Path(launch_env.__file__).parents[2]}",
    }  # fmt: skip
    environment.pop("PYTHONPYCACHEPREFIX", None)
    ended = subprocess.run(
        [real_python, "-c", _PRINT_BYTECODE], env=environment, capture_output=True, text=True, check=True
    )
    own, child = map(Path, json.loads(ended.stdout))
    assert own == child
    assert own.is_relative_to(source.parent if is_compiled else cache / "bytecode")
    assert own.exists()
    assert (source.parent / "__pycache__").exists() is is_compiled
