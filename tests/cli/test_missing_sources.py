"""A run's stores outlive the files they came from: what was trained can be measured, shipped and looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("validation", ["fraction", "sources"])
def test_a_run_can_be_used_when_its_files_are_gone(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, validation: str
) -> None:
    def write(name: str, first: int) -> Path:
        path = tmp_path / name
        turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(20)]
        path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns[first:]))
        return path

    files = [write("train.jsonl", 8), write("held.jsonl", 14)]
    held = {"fraction": "data.validation.fraction=0.2", "sources": f"data.validation.sources=[{{path: {files[1]}}}]"}
    run = tmp_path / "run"
    options = ["train.steps=2", "export.at_end=none", "data.sources.0.max_samples=12", held[validation]]
    ended = whet("train", recipe, f"run.dir={run}", f"data.sources.0.path={files[0]}", *options)
    assert ended.code == 0, ended.err

    def result(*words: Any) -> dict[str, Any]:
        ended = whet(*words, "--json")
        assert ended.code == 0, ended.err
        found: dict[str, Any] = json.loads(ended.out)
        return found

    before = [result("eval", run), result("inspect", run, "--validation", "--limit", 9)]
    for file in files:
        file.unlink()
    assert [result("eval", run), result("inspect", run, "--validation", "--limit", 9)] == before
    assert result("export", run, "--to", "merged")["certificate"]["verified"]
