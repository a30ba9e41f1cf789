"""TensorBoard's files, read back by TensorBoard."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import WhetError
from whet.training.trackers import Trackers, check_trackers, open_trackers, scalars_of

HAS_TENSORBOARD = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_numbers_become_curves_and_nothing_else_does() -> None:
    line = {"time": 1.0, "step": 3, "loss": 2.5, "mfu": None, "val_loss/a": 1.0, "val_tokens/a": 7, "task/orders": 0.5}
    assert scalars_of(line) == {"train/loss": 2.5, "val/loss/a": 1.0, "val/tokens/a": 7, "val/task/orders": 0.5}


@HAS_TENSORBOARD
def test_a_continued_run_has_one_curve(tmp_path: Path) -> None:
    first = open_trackers(["tensorboard"], tmp_path, 0)
    first.write({"step": 0, "val_loss": 9.0})
    for step in range(1, 6):
        first.write({"step": step, "loss": float(step)})
    first.close()
    again = open_trackers(["tensorboard"], tmp_path, 3)  # the checkpoint is of step 3
    for step in (4, 5, 6):
        again.write({"step": step, "loss": 10.0 * step})
    again.close()
    assert read(tmp_path) == {
        "val/loss": [(0, 9.0)],
        "train/loss": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)],
    }


@HAS_TENSORBOARD
def test_a_deleted_folder_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run reports it; TensorBoard's own writer has a thread that prints a traceback."""
    folder = tmp_path / "run"
    folder.mkdir()
    trackers = open_trackers(["tensorboard"], folder, 0)
    trackers.write({"step": 1, "loss": 1.0})
    shutil.rmtree(folder)
    for step in range(2, 40):
        trackers.write({"step": step, "loss": 1.0})
    trackers.close()
    assert not folder.exists()
    assert capfd.readouterr() == ("", "")


@HAS_TENSORBOARD
def test_a_full_disk_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trackers = open_trackers(["tensorboard"], tmp_path, 0)
    [service] = trackers._services
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the tracker closes it
    service._stream = service._records._writer = full  # type: ignore[attr-defined]
    for step in (1, 2):
        trackers.write({"step": step, "loss": 1.0})
    trackers.close()
    assert full.closed
    shown = capfd.readouterr().err
    assert shown.count("No space left on device") == 1
    assert "metrics are in metrics.jsonl alone" in shown


def test_off_means_nothing_is_written(tmp_path: Path) -> None:
    trackers = open_trackers(check_trackers([]), tmp_path, 0)
    trackers.write({"step": 1, "loss": 1.0})
    trackers.close()
    Trackers().write({"step": 1, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


@HAS_TENSORBOARD
def test_where_it_is_missing_the_default_is_left_out_and_a_wish_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_trackers(None) == check_trackers(["tensorboard", "tensorboard"]) == ["tensorboard"]
    known = importlib.util.find_spec

    def missing(name: str, *rest: Any) -> Any:
        return None if name == "tensorboard" else known(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert check_trackers(None) == []
    with pytest.raises(WhetError, match=r"track: tensorboard is not installed.*pip install 'whet\[track\]'"):
        check_trackers(["tensorboard"])
