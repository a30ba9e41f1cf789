"""The state of a run, from its files, its process and its jobs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import make_run, write_lock

from whet.core.run_folder import FolderLock, read_owner
from whet.runs import facts as facts_module
from whet.runs.find import find_runs
from whet.runs.slurm_states import FORGOTTEN, Job
from whet.runs.state import derive_state, silence_limit
from whet.runs.summary import summarize_run_folder, summarize_run_folders

HOLDER = (
    "import sys, time; from pathlib import Path; from whet.core.run_folder import RunFolder;"
    "f = RunFolder(Path(sys.argv[1])); f.set_status('running', 3, 10); print('ready', flush=True); time.sleep(99)"
)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the run in tmp_path / run and has written its status."""
    make_run(tmp_path / "run", state=None)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def state_of(folder: Path) -> str:
    return summarize_run_folder(folder).state.name


def test_a_process_of_this_machine_is_running_until_it_is_killed(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert state_of(folder) == "running"
    later = time.time() + 3 * 3600
    with monkeypatch.context() as patch:
        patch.setattr("whet.runs.summary.time.time", lambda: later)
        stalled = summarize_run_folder(folder)
    assert stalled.state.name == "stalled"
    assert f"last heartbeat on {socket.gethostname()} 3 h ago" in stalled.state.note
    os.kill(read_owner(folder).pid, 9)  # type: ignore[union-attr]
    holder.wait()
    killed = summarize_run_folder(folder)
    assert killed.state.name == "killed"
    assert "`whet runs resume` continues it" in killed.state.note


def test_a_process_without_a_status_is_starting(tmp_path: Path) -> None:
    make_run(tmp_path / "run", state="stopped")
    lock = FolderLock(tmp_path / "run")
    assert state_of(tmp_path / "run") == "starting"
    lock.release()
    assert state_of(tmp_path / "run") == "stopped"  # it ended without a step, on an error of its input


def test_a_copy_of_a_running_run_is_not_running(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (tmp_path / "run").iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    assert state_of(tmp_path / "run") == "running"
    assert state_of(copy) == "killed"


@pytest.mark.parametrize(
    ("state", "host", "age_s", "expected"),
    [
        ("running", "elsewhere", 5, "running"),
        ("running", "elsewhere", 7000, "unreachable"),
        ("running", socket.gethostname(), 7000, "killed"),  # this machine, before it was booted again
        ("finished", "elsewhere", 7000, "finished"),
        ("failed", "elsewhere", 7000, "failed"),
        (None, "elsewhere", 7000, "unreachable"),
        (None, "elsewhere", 5, "starting"),
    ],
)
def test_a_machine_that_cannot_be_seen(
    tmp_path: Path, state: str | None, host: str, age_s: float, expected: str
) -> None:
    beat = time.time() - age_s
    make_run(tmp_path / "run", state=state, host=host, heartbeat=beat)
    write_lock(tmp_path / "run", host, 4, beat - 1)
    found = summarize_run_folder(tmp_path / "run")
    assert found.state.name == expected
    if expected == "unreachable":
        assert "elsewhere last wrote" in found.state.note


@pytest.mark.parametrize(
    ("state", "job", "expected"),
    [
        (None, "PENDING", "queued"), ("stopped", "PENDING", "queued"), ("running", "PENDING", "queued"),
        ("finished", "PENDING", "finished"), ("running", "RUNNING", "running"), ("stopped", "RUNNING", "stopping"),
        ("running", "COMPLETING", "stopping"), ("running", "NODE_FAIL", "killed"), ("running", "CANCELLED", "killed"),
        ("failed", "FAILED", "failed"),
    ],
)  # fmt: skip
def test_slurm_knows_what_the_run_cannot_write(tmp_path: Path, state: str | None, job: str, expected: str) -> None:
    now = time.time()
    status = (
        {} if state is None else {"state": state, "heartbeat": now - 5, "step": 4, "steps": 9, "job": 12, "host": "n1"}
    )
    write_lock(tmp_path, "n1", 4, now - 50, job=12)
    owner = None if state is None else read_owner(tmp_path)
    known = Job(12, job, "", "n1", "job.sh")
    found = derive_state(status, owner, tmp_path, known, 120, now)
    assert found.name == expected
    assert derive_state(status, owner, tmp_path, known, 1, now).name == (
        "stalled" if expected == "running" else expected
    )


def test_a_job_that_slurm_has_forgotten_is_over_once_the_run_is_silent(tmp_path: Path) -> None:
    now = time.time()
    write_lock(tmp_path, "n1", 4, now - 50, job=12)
    status = {"state": "running", "heartbeat": now - 5, "job": 12, "host": "n1"}
    job = Job(12, FORGOTTEN, "", "", "")
    assert derive_state(status, read_owner(tmp_path), tmp_path, job, 120, now).name == "running"  # of another cluster
    over = derive_state(status, read_owner(tmp_path), tmp_path, job, 1, now)
    assert (over.name, "job 12: Slurm no longer knows it" in over.note) == ("killed", True)


def test_a_job_that_takes_over_is_starting(tmp_path: Path) -> None:
    now = time.time()
    write_lock(tmp_path, "n1", 4, now - 50, job=12)
    status = {"state": "stopped", "heartbeat": now - 5, "job": 12}
    found = derive_state(status, read_owner(tmp_path), tmp_path, Job(13, "RUNNING", "", "n2", ""), 120, now)
    assert found.name == "starting"


def test_the_number_of_a_job_of_another_script_says_nothing() -> None:
    job = Job(1, "RUNNING", "", "n1", "/elsewhere/job.sh")
    assert not job.runs_script(Path("/runs/a/slurm/job.sh"))
    assert job.runs_script(Path("/elsewhere/../elsewhere/job.sh"))


def test_silence_is_judged_by_what_the_run_has_done_before() -> None:
    status = {"step": 5, "steps": 10, "phase": "computing gradients"}
    assert silence_limit(status, 1.0) == 120
    assert silence_limit(status, 600.0) == 1800  # its evaluations take ten minutes
    assert silence_limit(status | {"step_offset": status["step"]}, 1.0) == 1800  # before its first step
    assert silence_limit(status | {"phase": "evaluating"}, 1.0) == 1800
    assert silence_limit(status | {"step": 0}, 0.0) == silence_limit(status | {"step": 10}, 0.0) == 1800


# Damage.


def test_half_a_run_another_version_and_damage_are_named(tmp_path: Path) -> None:
    half = make_run(tmp_path / "half")
    (half / "config.yaml").unlink()
    newer = make_run(tmp_path / "newer", format=99)
    broken = make_run(tmp_path / "broken")
    (broken / "status.json").write_text('{"state": ')
    (broken / "metrics.jsonl").write_bytes((broken / "metrics.jsonl").read_bytes() + b'{"step": 11, "lo\n\xff\xfe\n')
    (tmp_path / "other").mkdir()
    pipe = make_run(tmp_path / "pipe")
    (pipe / "config.yaml").unlink()
    os.mkfifo(pipe / "config.yaml")
    found = {run.name: run for run in summarize_run_folders(find_runs(tmp_path), tmp_path)}
    assert list(found) == ["broken", "half", "newer", "pipe"]
    assert "config.yaml: this is not a file" in found["pipe"].problems[0]
    assert found["half"].state.name == "finished"
    assert "this run is incomplete" in found["half"].problems[0]
    assert found["newer"].state.name == "unreadable"
    assert "pip install --upgrade whet" in found["newer"].problems[0]
    assert found["broken"].state.name == "unknown"
    assert found["broken"].step == 10
    assert "status.json: damaged; `whet runs resume` writes it again" in found["broken"].problems[0]
    assert newer.exists()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["status.json", "metrics.jsonl", "lock", "config.yaml", "slurm/jobs.jsonl"]),
    st.one_of(
        st.binary(max_size=80),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                st.sampled_from(["state", "step", "steps", "heartbeat", "host", "job", "run", "eval", "best", "loss"]),
                inner, max_size=4,
            ),
        ).map(lambda value: json.dumps(value).encode() + b"\n"),
    ),
)  # fmt: skip
def test_whatever_a_file_holds_the_list_goes_on(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    folder = make_run(tmp_path_factory.mktemp("fuzz") / "run", state="running")
    (folder / "slurm").mkdir()
    (folder / name).write_bytes(content)
    found = summarize_run_folder(folder)
    assert found.state.name
    assert found.as_dict()["name"] == "run"


# The index.


def test_the_index_saves_reading_and_may_be_deleted_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    root, old = tmp_path / "runs", time.time() - 60
    for name in "ab":
        for file in make_run(root / name, project="x y").iterdir():
            os.utime(file, (old, old))
    folders = find_runs(root)
    first = [run.as_dict() for run in summarize_run_folders(folders, root)]
    read = []
    monkeypatch.setattr(facts_module, "read_facts", lambda folder: read.append(folder.name))
    assert [run.as_dict() for run in summarize_run_folders(folders, root)] == first
    assert read == []
    monkeypatch.undo()
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    with (root / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 1.0, "time": 1}\n')
    assert [run.step for run in summarize_run_folders(folders, root)] == [11, 10]
    [index] = (tmp_path / "cache" / "runs").glob("*.json")
    for damage in (b"", b"[]", b'{"version": 1, "runs": {"a": {"signature": [], "facts": {}}}}'):
        index.write_bytes(damage)
        assert [run.step for run in summarize_run_folders(folders, root)] == [11, 10]
    assert first[0]["project"] == "x y"


@pytest.mark.slow
def test_a_thousand_runs_are_listed_within_a_second_of_processor_time(
    tmp_path: Path, real_python: str, record_property: pytest.RecordProperty
) -> None:
    run = make_run(tmp_path / "runs" / "run")
    lines = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(lines * 50)
    for number in range(999):
        copy = tmp_path / "runs" / f"run-{number}"
        copy.mkdir()
        for file in run.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    for attempt in ("first", "second"):
        began = os.times()
        done = subprocess.run(
            [real_python, "-m", "whet", "runs"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        ended = os.times()
        seconds = ended.children_user + ended.children_system - began.children_user - began.children_system
        record_property("runs", f"whet runs with 1,000 folders, {attempt}: {seconds:.2f} s of processor time")
        assert len(done.stdout.splitlines()) == 1001
    assert seconds < 1


def test_the_command_imports_neither_torch_nor_numpy(tmp_path: Path, real_python: str) -> None:
    make_run(tmp_path / "runs" / "a")
    code = (
        "import sys; sys.argv = ['whet', 'runs']\nfrom whet.cli.app import main\ntry: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'whet.config') if name in sys.modules])"
    )
    done = subprocess.run([real_python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
