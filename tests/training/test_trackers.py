"""Trackers, read back with their own tools; and trackers of the test's own that fail, hang or are slow."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.core.errors import WhetError
from whet.training import trackers as trackers_module
from whet.training.tracker_backends import TensorBoard, TrackedRun, _mlflow_name
from whet.training.trackers import Trackers, check_trackers, open_trackers, scalars_of

HAS_TENSORBOARD = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
CONFIG = {"train": {"lr": 0.5, "batch": {"rows": 2}}, "data": {"sources": [{"path": "a.jsonl"}]}}


def run_in(folder: Path, done: int = 0) -> TrackedRun:
    return TrackedRun(folder, "my run", "my-project", ["sft", "a tag/with@signs"], CONFIG, done)


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
@pytest.mark.parametrize("is_new_process", [True, False])
def test_a_continued_run_has_one_curve(tmp_path: Path, is_new_process: bool) -> None:
    trackers = open_trackers(["tensorboard"], run_in(tmp_path))
    trackers.write({"step": 0, "val_loss": 9.0})
    for step in range(1, 6):
        trackers.write({"step": step, "loss": float(step)})
    if is_new_process:  # the checkpoint is of step 3
        trackers.close("stopped")
        trackers = open_trackers(["tensorboard"], run_in(tmp_path, done=3))
    else:
        trackers.rewind(3)
    for step in (4, 5, 6):
        trackers.write({"step": step, "loss": 10.0 * step})
    trackers.close("finished")
    assert read(tmp_path) == {
        "val/loss": [(0, 9.0)],
        "train/loss": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)],
    }


@HAS_TENSORBOARD
def test_a_deleted_folder_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run reports it; TensorBoard's own writer has a thread that prints a traceback."""
    folder = tmp_path / "run"
    folder.mkdir()
    trackers = open_trackers(["tensorboard"], run_in(folder))
    trackers.write({"step": 1, "loss": 1.0})
    until = time.monotonic() + 30
    while not any(folder.rglob("events.*")):  # a folder deleted before is a warning: nothing is tracked there
        assert time.monotonic() < until
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # what the thread wrote meanwhile
    for step in range(2, 40):
        trackers.write({"step": step, "loss": 1.0})
    trackers.close("failed")
    assert capfd.readouterr() == ("", "")


class Memory:
    """A tracker that keeps what it gets, and behaves as `misbehave` says before each write."""

    def __init__(self, misbehave: Callable[[int], None]) -> None:
        self.steps: list[int] = []
        self.ends: list[str] = []
        self._misbehave = misbehave

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._misbehave(step)
        self.steps.append(step)

    def rewind(self, done: int) -> None: ...

    def close(self, state: str) -> None:
        self.ends.append(state)


@pytest.fixture
def open_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trackers]:
    """Opens trackers of the test's own, by name."""

    def opener(**backends: Callable[[TrackedRun], Any]) -> Trackers:
        known = {name: ("sys", name, backend) for name, backend in backends.items()}
        monkeypatch.setattr(trackers_module, "_BACKENDS", known)
        return open_trackers(list(known), run_in(tmp_path))

    return opener


def write_steps(trackers: Trackers, count: int) -> None:
    for step in range(1, count + 1):
        trackers.write({"step": step, "loss": 1.0})


def test_a_tracker_that_fails_is_one_warning_and_the_others_get_every_line(
    open_with: Callable[..., Trackers], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail_sometimes(step: int) -> None:
        if step % 2:
            raise ConnectionError(f"refused at {step}\nand much more")

    def do_not_open(run: TrackedRun) -> Memory:
        raise SystemExit("no credentials")

    failing, healthy = Memory(fail_sometimes), Memory(lambda step: None)
    trackers = open_with(broken=do_not_open, failing=lambda run: failing, healthy=lambda run: healthy)
    write_steps(trackers, 9)
    trackers.close("finished")
    assert healthy.steps == list(range(1, 10))
    assert failing.steps == [2, 4, 6, 8]  # it is tried again: servers come back
    assert healthy.ends == failing.ends == ["finished"]
    shown = capfd.readouterr().err
    assert shown.count("warning: ") == 2
    assert "track: broken: SystemExit: no credentials. The run is not tracked there" in shown
    assert "track: failing: ConnectionError: refused at 1. The run goes on" in shown
    assert "track: failing: 5 lines are missing there" in shown


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_the_others(
    open_with: Callable[..., Trackers], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here waits but `close`, for its limit; the queue drops what comes after its limit."""
    monkeypatch.setattr(trackers_module, "_MAX_WAITING", 20)
    monkeypatch.setattr(trackers_module, "_CLOSE_EARLY_S", 0.2)
    release = threading.Event()

    def hang(run: TrackedRun) -> Memory:
        release.wait()
        return late

    late, healthy = Memory(lambda step: None), Memory(lambda step: None)
    written = threading.Event()
    healthy._misbehave = lambda step: written.set() if step == 15 else None
    trackers = open_with(late=hang, healthy=lambda run: healthy)
    write_steps(trackers, 15)
    assert written.wait(60)
    write_steps(trackers, 15)
    trackers.close("stopped")
    release.set()
    [thread, _] = trackers._threads
    thread._thread.join(60)
    assert late.steps == [*range(1, 16), *range(1, 6)]
    assert healthy.steps[:15] == list(range(1, 16))
    assert healthy.ends == ["stopped"]
    shown = capfd.readouterr().err
    assert shown.count("warning: ") == 1
    assert "track: late: it is too slow: 20 lines wait for it, and more are left out" in shown


def test_closing_has_a_limit(
    open_with: Callable[..., Trackers], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers_module, "_CLOSE_S", {"finished": 0.1})
    release = threading.Event()
    slow = Memory(lambda step: (release.wait(), None)[1])
    trackers = open_with(slow=lambda run: slow)
    write_steps(trackers, 3)
    trackers.close("finished")
    assert "track: slow: it was not done 0 s after the run" in capfd.readouterr().err
    release.set()


@HAS_TENSORBOARD
def test_a_full_disk_is_a_warning(open_with: Callable[..., Trackers], capfd: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the tracker closes it

    def on_full_disk(run: TrackedRun) -> TensorBoard:
        board = TensorBoard(run)
        board._stream = board._records._writer = full
        return board

    trackers = open_with(tensorboard=on_full_disk)
    write_steps(trackers, 2)
    trackers.close("finished")
    assert full.closed
    shown = capfd.readouterr().err
    assert shown.count("No space left on device") == 1
    assert "metrics.jsonl has every line" in shown


def test_off_means_nothing_is_written(tmp_path: Path) -> None:
    trackers = open_trackers(check_trackers([]), run_in(tmp_path))
    trackers.write({"step": 1, "loss": 1.0})
    trackers.close("finished")
    assert list(tmp_path.iterdir()) == []


@HAS_TENSORBOARD
def test_where_it_is_missing_the_default_is_left_out_and_a_wish_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_trackers(None) == check_trackers(["tensorboard", "tensorboard"]) == ["tensorboard"]
    known = importlib.util.find_spec

    def missing(name: str, *rest: Any) -> Any:
        return None if name in ("tensorboard", "wandb") else known(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert check_trackers(None) == []
    with pytest.raises(WhetError, match=r"track: tensorboard is not installed.*pip install 'whet\[track\]'"):
        check_trackers(["tensorboard"])
    with pytest.raises(WhetError, match=r"track: wandb is not installed.*pip install 'whet\[wandb\]'"):
        check_trackers(["wandb"])


@given(st.text("aZ9_-. :/@é\n%", min_size=1, max_size=12))
def test_every_name_becomes_one_that_mlflow_accepts(name: str) -> None:
    accepted = _mlflow_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_\-./ :]+", accepted)
    assert not accepted.startswith("/")
    assert all(part.strip(". ") for part in accepted.split("/"))


# With the real packages, where they are installed. They are not in the dev extra.


def write_curve(folder: Path, name: str) -> None:
    """Five steps and an evaluation, of which the last two steps are repeated after a restart."""
    first = open_trackers([name], run_in(folder))
    write_steps(first, 4)
    first.close("finished")
    again = open_trackers([name], run_in(folder, done=4))
    again.write({"step": 5, "loss": 0.25})
    again.write({"step": 5, "val_loss/a@b": float("nan")})
    again.close("finished")


def wandb_records(log: bytes) -> Iterator[bytes]:
    """The records of an offline run: a log of LevelDB's form, after a header of seven bytes."""
    at, record = 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:  # no record begins in the last bytes of a block
            at += 32768 - at % 32768
            continue
        length, part = struct.unpack_from("<HB", log, at + 4)
        record += log[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    write_curve(tmp_path, "wandb")
    shown = capfd.readouterr().err
    assert "not logged in, so the run is tracked offline" in shown
    assert "warning" not in shown
    history, runs = list[dict[str, str]](), list[Any]()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    wandb.teardown()  # W&B's own process may write the end of a file after `finish`; a run ends this way
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                history.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
            if record.HasField("run"):
                runs.append(record.run)
    assert [(row["step"], row["train/loss"]) for row in history if "train/loss" in row] == [
        *((str(step), "1") for step in (1, 2, 3, 4)), ("5", "0.25"),
    ]  # fmt: skip
    assert {run.run_id for run in runs} == {(tmp_path / "wandb.id").read_text().strip()}
    assert (runs[0].display_name, runs[0].project) == ("my run", "my-project")


def test_mlflow_in_its_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write_curve(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("my-project").experiment_id])
    run_id = (tmp_path / "mlflow.id").read_text().strip()
    assert (found.info.run_id, found.info.run_name, found.info.status) == (run_id, "my run", "FINISHED")
    assert found.data.params["train.batch.rows"] == "2"
    assert found.data.tags.keys() >= {"sft", "a tag/with_signs", "whet.folder"}
    losses = client.get_metric_history(run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 0.25)]
    assert "val/loss/a_b" in found.data.metrics


def test_trackio(tmp_path: Path, real_python: str) -> None:
    """In a process of its own: trackio reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio", reason="needs the extra trackio")
    import os
    import subprocess

    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import test_trackers as t; "
        "t.write_curve(Path(sys.argv[2]), 'trackio'); import trackio; "
        "[run] = trackio.Api().runs('my-project'); print([run.name, run.config['train']['lr'], "
        "[(p['step'], p['value']) for p in trackio.sqlite_storage.SQLiteStorage.get_metric_values("
        "'my-project', 'my run', 'train/loss')]])"
    )
    done = subprocess.run(
        [real_python, "-c", code, str(Path(__file__).parent), str(tmp_path)],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    curve = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 0.25)]
    assert done.stdout.strip().splitlines()[-1] == str(["my run", 0.5, curve])
