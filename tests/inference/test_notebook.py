"""The notebooks run from their first cell to their last, in Jupyter's own kernel, with `import whet` alone."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebook's packages are not installed")
nbclient = pytest.importorskip("nbclient", reason="the notebook's packages are not installed")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NOTEBOOK = NOTEBOOKS / "before-after.ipynb"


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


def test_a_spreadsheet_becomes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_MODEL", "builtin:tiny")
    monkeypatch.setenv("WHET_EPOCHS", "0.3")
    notebook = nbformat.read(NOTEBOOKS / "your-own-data.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = ["".join(each.get("text", "") for each in cell.get("outputs", [])) for cell in notebook.cells]
    assert "ok " in shown[5]
    assert "verified True" in shown[-1]
    assert (tmp_path / "runs/colours/exports/merged/model.safetensors").exists()


@pytest.mark.parametrize("name", ["before-after.ipynb", "your-own-data.ipynb"])
def test_it_is_kept_without_outputs_and_opens_anywhere(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "import whet\n" in code
    assert "from whet" not in code
