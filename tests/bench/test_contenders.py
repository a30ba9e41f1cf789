"""Contenders and where they are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from whet.bench.contenders import parse_peers
from whet.core.errors import WhetError

trl = pytest.importorskip("trl")


def package(folder: Path, name: str, version: str, code: str = "") -> Path:
    """A folder with a package in it, as pip lays it out."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def test_the_default_is_the_python_of_whet() -> None:
    found, unsloth = parse_peers("trl, unsloth")
    assert (found.python, found.versions["trl"]) == (sys.executable, trl.__version__)
    assert "unsloth" not in unsloth.versions


def test_folders_are_prepended_to_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    one, two = package(tmp_path / "one", "trl", "9.8.7"), tmp_path / "two"
    two.mkdir()
    (found,) = parse_peers(f"trl={one}:{two}")
    assert found.versions["trl"] == "9.8.7"
    assert found.environment()["PYTHONPATH"] == f"{one}:{two}:/before"


def test_a_tool_may_have_its_own_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    (found,) = parse_peers(f"trl={python}")
    assert found.python == str(python)


def test_no_peers() -> None:
    assert parse_peers("") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("axolotl", "unknown tool axolotl; supported are: trl, unsloth"),
        ("trl,trl", "given twice"),
        ("trl=/no/such/place", "/no/such/place is neither a folder of packages nor an executable Python"),
        ("trl=/bin/false", "this Python does not work"),
    ],
)
def test_invalid_peers_are_errors(text: str, reason: str) -> None:
    with pytest.raises(WhetError, match=f"--peers .*{reason}"):
        parse_peers(text)
