"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "before-after.ipynb"


def test_every_cell_runs_and_both_models_speak(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells are plain Python without magic, so that running them one after the other is what Jupyter does."""
    monkeypatch.setenv("WHET_TUNED", str(tiny_run))
    monkeypatch.setenv("WHET_BASE", "builtin:tiny")
    monkeypatch.setenv("WHET_MAX_NEW_TOKENS", "6")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    programs = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, program in enumerate(programs, 1):
        exec(compile(program, f"{NOTEBOOK.name}, program {number}", "exec"), space)
    shown = capsys.readouterr().out
    assert len(space["answers"]) == 3
    assert all(answer["answer"] != answer["against"]["answer"] for answer in space["answers"])
    assert space["talked"]["answer"] in shown
    assert len(space["explained"]["explain"]) >= 1
    lines = shown.splitlines()
    assert [sum(line.startswith(word) for line in lines) for word in ("before  ", "after   ")] == [4, 4]


def test_it_is_kept_without_outputs_and_opens_anywhere() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("code", "markdown")
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert isinstance(cell["source"], list)
