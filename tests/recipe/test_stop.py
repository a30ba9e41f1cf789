"""Stopping: a stop file stops once, and the status says how far the run came."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_a_stop_file_stops_like_a_signal_and_only_once(
    whet: Any, wait_for_lines: Any, recipe: str, tmp_path: Path, tiny_run: Path, exact_of: Callable[[Path], list[Any]]
) -> None:
    folder = tmp_path / "run"

    def ask() -> None:
        wait_for_lines(folder, 4)
        (folder / "stop").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    ended = whet("train", recipe, "train.precision=fp64", f"run.dir={folder}")
    asking.join()
    assert ended.code == 75
    assert "a checkpoint is saved" in ended.err
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert status["step"] == len(exact_of(folder)) - 1  # not the step of the last heartbeat
    assert whet("train", recipe, "train.precision=fp64", f"run.dir={folder}", "--resume").code == 0
    assert exact_of(folder) == exact_of(tiny_run)
