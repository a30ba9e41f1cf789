"""Recipes on data and models that a test made, and what must not be left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from whet.model.load.builtin_models import builtin_folder


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


@dataclass(frozen=True, slots=True)
class Checked:
    """What `whet check` found."""

    code: int
    checks: list[dict[str, str]]

    def passed(self) -> None:
        """Every single finding is good."""
        assert [found for found in self.checks if found["level"] != "ok"] == []
        assert self.code == 0

    def texts(self, check: str, level: str) -> str:
        """What one check says at this level, which must be there."""
        texts = [found["text"] for found in self.checks if (found["check"], found["level"]) == (check, level)]
        assert texts, f"no {level} called {check} in {self.checks}"
        return "\n".join(texts)

    def fault(self, check: str, *words: str) -> None:
        """This check is a fault, it says these words, and the command failed."""
        text = self.texts(check, "fault")
        assert [word for word in words if word not in text] == [], text
        assert self.code == 1

    def warning(self, check: str, *words: str) -> None:
        """This check is a warning, it says these words, and no check is a fault."""
        text = self.texts(check, "warning")
        assert [word for word in words if word not in text] == [], text
        assert [found for found in self.checks if found["level"] == "fault"] == []
        assert self.code == 0


CHECKED_RECIPE = """
model: {path: builtin:tiny}
data: {sources: [{path: DATA}], max_length: 512}
train: {batch: {conversations: 4}}
"""


@pytest.fixture
def check(whet: Any, tmp_path: Path) -> Callable[..., Checked]:
    """Run `whet check` on data.jsonl with these settings; it prints one object that does not contradict itself."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(CHECKED_RECIPE.replace("DATA", str(tmp_path / "data.jsonl")))

    def run(*settings: Any) -> Checked:
        ended = whet("check", recipe, *settings, "--json")
        assert "Traceback" not in ended.err
        assert ended.out.count("\n") == 1
        result = json.loads(ended.out)
        levels = [found["level"] for found in result["checks"]]
        assert (result["faults"], result["warnings"]) == (levels.count("fault"), levels.count("warning"))
        assert result["verdict"] == ("fault" if "fault" in levels else "pass")
        assert ended.code == result["exit_code"] == int("fault" in levels)
        return Checked(ended.code, result["checks"])

    return run


def talk(number: int, question: str = "", answer: str = "", **answers: Any) -> dict[str, Any]:
    """A conversation unlike those of other numbers; what else is given goes into the assistant's message."""
    return {
        "messages": [
            {"role": "user", "content": question or f"What is {number} and {number}?"},
            {"role": "assistant", "content": answer or f"It is {2 * number}.", **answers},
        ]
    }


@pytest.fixture(name="talk")
def _talk() -> Callable[..., dict[str, Any]]:
    return talk


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Forty good conversations and these lines, which come first: write({…}, name="other.jsonl", good=range(0))."""

    def make(*lines: Any, name: str = "data.jsonl", good: Iterable[int] = range(40)) -> Path:
        every = [*lines, *map(talk, good)]
        file = tmp_path / name
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in every))
        return file

    return make


@pytest.fixture
def template(tmp_path: Path) -> Callable[[str], str]:
    """A setting that makes this the chat template."""

    def make(text: str) -> str:
        (tmp_path / "mine.jinja").write_text(text)
        return f"data.template={tmp_path / 'mine.jinja'}"

    return make


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """The folder of builtin:tiny, to be changed."""
    return Path(shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model"))
