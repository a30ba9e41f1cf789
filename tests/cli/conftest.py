"""Recipes on data and models that a test made, and what must not be left behind."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write_data(tmp_path: Path) -> Callable[..., Path]:
    """A JSONL file; texts are written as they are, all else as JSON."""

    def write(*lines: Any) -> Path:
        file = tmp_path / "data.jsonl"
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return file

    return write


@pytest.fixture
def refused(whet: Any, recipe: str, tmp_path: Path) -> Callable[..., str]:
    """Train with these settings, which must be refused: exit 1, one paragraph, nothing written. Gives the paragraph."""

    def train(*settings: str, folder: Path | None = None) -> str:
        folder = folder or tmp_path / "run"
        before = _content(folder)
        ended = whet("train", recipe, f"run.dir={folder}", *settings)
        assert ended.code == 1
        assert ended.out == ""
        assert _content(folder) == before
        assert _half_written(Path(os.environ["WHET_CACHE"])) == []
        return paragraph(ended.err)

    return train


def paragraph(err: str) -> str:
    """The one error on stderr, which is not a traceback."""
    assert "Traceback" not in err
    before, _, error = err.strip().rpartition("error: ")
    assert "error" not in before
    assert error
    assert "\n" not in error
    return error


def _content(folder: Path) -> dict[str, bytes] | None:
    """Every file with its content, None without the folder; who last had the lock is no content."""
    if not folder.exists():
        return None
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _half_written(cache: Path) -> list[str]:
    """Stores without a manifest, temporary folders among them."""
    stores = (entry for entry in (cache / "stores").glob("*") if entry.suffix != ".lock")
    return [store.name for store in stores if store.name.startswith(".") or not (store / "manifest.json").exists()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small file system of memory: `small_disk("size=300k")`."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a failed run may hold files open
