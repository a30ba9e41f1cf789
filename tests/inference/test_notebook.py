"""The notebook runs from its first cell to its last, in Jupyter's own kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebook's packages are not installed")
nbclient = pytest.importorskip("nbclient", reason="the notebook's packages are not installed")

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "before-after.ipynb"


def test_every_cell_runs_and_both_models_answer(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_TUNED", str(tiny_run))
    monkeypatch.setenv("WHET_BASE", "builtin:tiny")
    monkeypatch.setenv("WHET_MAX_NEW_TOKENS", "6")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    shown = ["".join(each.get("text", "") for each in cell.get("outputs", [])) for cell in notebook.cells]
    lines = "".join(shown).splitlines()
    before, after = (
        [line.removeprefix(word) for line in lines if line.startswith(word)] for word in ("before ", "after ")
    )
    assert (len(before), len(after)) == (4, 4)
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert "%" in shown[-1]


def test_it_is_kept_without_outputs_and_opens_anywhere() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
