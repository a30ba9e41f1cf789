"""The run directory: who owns it, what is in it, how it ended."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

import whet.core.run_folder as run_module
from whet.core import run_folder
from whet.core.errors import WhetError
from whet.core.run_folder import RUN_FORMAT, FolderLock, RunFolder, read_status, record_failure


def test_a_folder_is_made_and_owned(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    assert (tmp_path / "runs" / "a").is_dir()
    with pytest.raises(WhetError, match="in use by"):
        RunFolder(tmp_path / "runs" / "a")
    folder.close()
    RunFolder(tmp_path / "runs" / "a").close()


def test_a_folder_in_use_names_its_owner_and_the_last_heartbeat(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    owner = rf"in use by {socket.gethostname()} pid {os.getpid()} since \d{{4}}-\d\d-\d\dT[\d:]+\+00:00 \(\d s ago\)"
    with pytest.raises(WhetError, match=rf"{owner}\. .*touch {tmp_path}/stop.*run\.dir=FOLDER"):
        RunFolder(tmp_path)
    folder.set_status("running", 3, 10)
    status = read_status(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({**status, "heartbeat": status["heartbeat"] - 7300}))
    with pytest.raises(WhetError, match=rf"{owner}; its last heartbeat was 2 h ago\. "):
        RunFolder(tmp_path)
    folder.close()


def test_a_lock_that_a_dead_process_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("elsewhere pid 1 since 2026-01-01T00:00:00+00:00\n")
    folder = RunFolder(tmp_path)
    assert f"pid {os.getpid()} since" in (tmp_path / "lock").read_text()
    folder.close()


def test_a_process_that_does_not_own_the_folder_can_record_a_failure(tmp_path: Path) -> None:
    record_failure(tmp_path, "rank 1 hangs", 3)
    assert read_status(tmp_path) == {}
    folder = RunFolder(tmp_path)
    folder.set_status("running", 3, 10)
    record_failure(tmp_path, "rank 1 hangs", 3, step=5)
    status = read_status(tmp_path)
    assert (status["state"], status["exit_code"], status["step"], status["reason"]) == ("failed", 3, 5, "rank 1 hangs")
    folder.close()


def test_a_path_that_is_a_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(WhetError, match=rf"run\.dir: {tmp_path}/f cannot be used as a folder: .*run\.dir=FOLDER"):
        RunFolder(tmp_path / "f")
    with pytest.raises(WhetError, match=rf"{tmp_path}/f/below: a part of the path is not a folder .*run\.dir for runs"):
        RunFolder(tmp_path / "f" / "below")


@pytest.mark.parametrize("name", ["status.json", "effect.json", "lock", "checkpoints/latest"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_run_starts(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(
        WhetError, match=rf"{tmp_path / name}: this is a folder, and .* file of this name\. Move it away"
    ):
        RunFolder(tmp_path)
    (tmp_path / name).rmdir()
    RunFolder(tmp_path).close()


def test_a_link_to_checkpoints_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    with pytest.raises(
        WhetError, match=rf"checkpoints: this link leads to {tmp_path}/scratch, .*is its disk mounted\?"
    ):
        RunFolder(tmp_path)
    (tmp_path / "scratch").mkdir()
    RunFolder(tmp_path).close()


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "no", str(self))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(WhetError, match="permission denied while opening the run folder"):
        RunFolder(tmp_path / "a")


def test_a_folder_holds_a_run_once_its_config_is_there(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.holds_run()
    (tmp_path / "config.yaml").touch()
    assert folder.holds_run()
    folder.close()


def test_a_folder_with_other_files_is_refused_and_some_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.require_empty()
    for name in "dcba":
        (tmp_path / name).touch()
    with pytest.raises(WhetError, match=r"not belong to a run \(a, b, c\)\. .*run\.dir=FOLDER"):
        folder.require_empty()
    folder.close()


def test_a_status_has_state_step_host_and_pid(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_status(tmp_path) == {}
    folder.set_status("running", 3, 10)
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["steps"], status["exit_code"]) == ("running", 3, 10, None)
    assert (status["host"], status["pid"]) == (socket.gethostname(), os.getpid())
    assert status["started"] <= status["heartbeat"]
    folder.set_status("stopped", 4, 10, 75)
    assert read_status(tmp_path)["exit_code"] == 75
    folder.close()


def test_the_time_of_the_first_start_survives_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunFolder(tmp_path)
    first.set_status("running", 1, 2)
    first.close()
    started = read_status(tmp_path)["started"]
    monkeypatch.setattr(run_module.time, "time", lambda: started + 1000)
    second = RunFolder(tmp_path)
    second.set_status("running", 2, 2)
    second.close()
    assert read_status(tmp_path)["started"] == started
    assert read_status(tmp_path)["heartbeat"] == started + 1000


def test_heartbeats_are_written_every_few_seconds_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(run_module.time, "time", lambda: now)
    folder = RunFolder(tmp_path)
    steps = []
    for step, wait in enumerate([0, 1, 3, 2, 4.9, 0.2], 1):
        now += wait
        folder.heartbeat(step, 9)
        steps.append(read_status(tmp_path)["step"])
    assert steps == [1, 1, 1, 4, 4, 6]
    folder.close()


def test_the_end_is_written_at_the_last_step_that_was_reached(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.set_status("running", 0, 9)
    folder.heartbeat(4, 9)  # too soon to be written
    assert read_status(tmp_path)["step"] == 0
    folder.set_ended("stopped", 75)
    folder.close()
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["steps"], status["exit_code"]) == ("stopped", 4, 9, 75)


def test_a_run_that_never_began_gets_no_status(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.set_ended("failed", 1)
    folder.close()
    assert read_status(tmp_path) == {}


def test_a_stop_file_requests_a_stop_and_is_deleted_at_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.stop_requested()
    (tmp_path / "stop").touch()
    assert folder.stop_requested()
    folder.close()
    assert not (tmp_path / "stop").exists()


def begun(path: Path) -> RunFolder:
    """A run that has written what comes before the first step."""
    folder = RunFolder(path)
    folder.set_status("running", 0, 1)
    for name in ("config.yaml", "ledger.json", "plan.json", "metrics.jsonl"):
        (path / name).touch()
    (path / "plan").mkdir()
    (path / "plan" / "rows.npy").touch()
    return folder


def test_an_abandoned_run_without_a_step_is_deleted(tmp_path: Path) -> None:
    begun(tmp_path / "runs" / "a").abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_before_stays_and_is_free_again(tmp_path: Path) -> None:
    begun(tmp_path).abandon()
    assert list(tmp_path.iterdir()) == []
    RunFolder(tmp_path).close()


def test_runs_beside_an_abandoned_one_stay(tmp_path: Path) -> None:
    folder = begun(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "b").mkdir()
    folder.abandon()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["b"]


def test_an_abandoned_run_with_a_step_stays(tmp_path: Path) -> None:
    folder = begun(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
    folder.abandon()
    assert (tmp_path / "a" / "config.yaml").exists()
    RunFolder(tmp_path / "a").close()


def test_an_earlier_run_stays_when_its_successor_is_abandoned(tmp_path: Path) -> None:
    begun(tmp_path).close()
    RunFolder(tmp_path).abandon()
    assert (tmp_path / "config.yaml").exists()
    assert (tmp_path / "plan" / "rows.npy").exists()


@pytest.mark.parametrize("name", ["checkpoints", "plan", "metrics.jsonl"])
def test_files_with_the_names_of_a_runs_files_are_not_deleted(tmp_path: Path, name: str) -> None:
    """A typing error in a recipe must not cost anyone their checkpoints."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious.pt").touch()
    folder = RunFolder(tmp_path)
    with pytest.raises(WhetError, match=rf"not belong to a run \({name}\)"):
        folder.require_empty()
    folder.abandon()
    assert (tmp_path / name / "precious.pt").exists()


def test_other_files_stay_when_a_run_is_abandoned(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    begun(tmp_path).abandon()
    assert (tmp_path / "thesis.tex").exists()
    RunFolder(tmp_path).close()


def test_any_flipped_bit_makes_a_status_count_as_missing(tmp_path: Path) -> None:
    """One in the format would make the folder that of a newer whet, one in the state a run that is not finished."""
    folder = RunFolder(tmp_path)
    folder.set_status("finished", 3, 3, 0)
    folder.close()
    file = tmp_path / "status.json"
    content = file.read_bytes()
    status = read_status(tmp_path)
    assert status["state"] == "finished"
    for at in range(0, len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        found = read_status(tmp_path)
        assert found in ({}, status) or at > content.index(b'"hash"') - 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\0" * 300, b"\xff\xfe", b"[]", b"7", b"null", b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": "x"}', b'{"step": null, "heartbeat": []}', b'{"state": ["finished"]}', b'{"started": {}}'],
)  # fmt: skip
def test_a_damaged_status_is_reported_and_stops_nothing(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(run_folder, "warn", warnings.append)
    (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path) == {}
    record_failure(tmp_path, "killed", 3)
    folder = RunFolder(tmp_path)
    assert warnings == [
        f"{tmp_path / 'status.json'}: damaged, so how this run ended is unknown. Checkpoints do not depend on it"
    ]
    with pytest.raises(WhetError, match="in use by"):
        RunFolder(tmp_path)
    folder.set_status("running", 1, 2)
    folder.close()
    assert read_status(tmp_path)["state"] == "running"


def test_a_status_is_json_that_others_can_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.set_status("running", 1, 2)
    folder.close()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"


# The format version


def test_a_status_carries_the_format_of_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.set_status("running", 1, 2)
    record_failure(tmp_path, "rank 1 hangs", 3)
    folder.close()
    assert read_status(tmp_path)["format"] == RUN_FORMAT == 1


def test_a_folder_without_a_format_has_the_first(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "stopped", "step": 3, "steps": 9}')
    assert read_status(tmp_path)["step"] == 3
    folder = RunFolder(tmp_path)
    folder.heartbeat(4, 9)
    folder.close()
    assert read_status(tmp_path)["format"] == 1


@pytest.mark.parametrize("version", [2, 17, "x", None])
def test_a_newer_format_is_refused_and_the_folder_is_untouched(tmp_path: Path, version: object) -> None:
    status = json.dumps({"format": version, "state": "stopped", "step": 3})
    (tmp_path / "status.json").write_text(status)
    expected = rf"{tmp_path}: this run folder has format {version!r} .*reads formats up to 1\. .*pip install --upgrade"
    for read in (read_status, RunFolder):
        with pytest.raises(WhetError, match=expected):
            read(tmp_path)
    record_failure(tmp_path, "killed", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert (tmp_path / "status.json").read_text() == status


# The lock

_HOLD = """
import sys, time
from pathlib import Path
from whet.core.run_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_belongs_to_one_process_and_is_free_when_that_dies(real_python: str, tmp_path: Path) -> None:
    with subprocess.Popen([real_python, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(WhetError) as caught:
                FolderLock(tmp_path)
            assert str(caught.value).startswith(f"{tmp_path}: in use by {socket.gethostname()} pid {holder.pid} since ")
            assert "run.dir=FOLDER" in str(caught.value)
        finally:
            holder.kill()
            holder.wait()
    FolderLock(tmp_path).release()
    assert (tmp_path / "lock").read_text().startswith(f"{socket.gethostname()} pid {os.getpid()} since 20")


def test_a_lock_is_exclusive_within_a_process_too_until_it_is_released(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(WhetError, match="in use by"):
        FolderLock(tmp_path)
    first.release()
    FolderLock(tmp_path).release()


def test_the_owner_of_a_lock_is_written_once(tmp_path: Path) -> None:
    for _ in range(3):
        FolderLock(tmp_path).release()
    assert len((tmp_path / "lock").read_text().splitlines()) == 2


def test_what_a_start_left_that_was_killed_before_its_config_is_no_other_file(tmp_path: Path) -> None:
    for name in ("checkpoints", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / ".config.yaml.elsewhere-12").write_text("half")
    folder = RunFolder(tmp_path)
    folder.require_empty()
    folder.close()
    (tmp_path / "checkpoints" / "mine").touch()
    folder = RunFolder(tmp_path)
    with pytest.raises(WhetError, match=r"not belong to a run \(checkpoints\)"):
        folder.require_empty()
    folder.close()


def test_a_run_is_cleared_with_its_config_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.yaml", "ledger.json", "zebra"):
        (tmp_path / name).touch()
    (tmp_path / "plan").mkdir()
    deleted: list[str] = []
    folder = RunFolder(tmp_path)
    monkeypatch.setattr(run_module, "delete_atomically", lambda path: deleted.append(path.name))
    folder.clear()
    assert sorted(deleted) == ["config.yaml", "ledger.json", "plan", "zebra"]
    assert deleted[-1] == "config.yaml"
    folder.close()


@pytest.mark.parametrize("how", ["deleted", "moved", "emptied", "made again"])
def test_a_folder_that_is_gone_is_noticed(how: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = RunFolder(path)
    (path / "config.yaml").touch()
    folder.set_status("running", 1, 9)
    if how == "moved":
        path.rename(tmp_path / "other")
    elif how == "emptied":
        (path / "config.yaml").unlink()
    else:
        shutil.rmtree(path)
    if how == "made again":
        path.mkdir()
        (path / "config.yaml").touch()
    for write in (folder.require_present, lambda: folder.set_status("finished", 9, 9)):
        with pytest.raises(WhetError, match=rf"{path}: the run folder was deleted or moved .* start the run again"):
            write()
    folder.release()


def test_a_lock_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "lock").unlink()
    folder.require_present()
    with pytest.raises(WhetError, match=f"in use by {socket.gethostname()} pid {os.getpid()}"):
        RunFolder(tmp_path)
    folder.close()


def test_a_folder_whose_lock_was_deleted_and_taken_by_another_process_is_left_to_that(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "lock").unlink()
    other = RunFolder(tmp_path)
    for write in (folder.require_present, lambda: folder.set_status("running", 1, 9)):
        with pytest.raises(WhetError, match=rf"{tmp_path}/lock: deleted while .* in use by .* pid {os.getpid()}"):
            write()
    folder.release()
    other.set_status("running", 1, 9)
    other.close()


def test_a_stop_request_may_be_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "stop").mkdir()
    assert folder.stop_requested()
    folder.close()
    assert not (tmp_path / "stop").exists()
