"""`whet runs` on folders made by hand: find, show, logs, stop, cancel, rename, delete, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, write_lock

from whet.core.run_folder import config_was_edited, read_owner, read_status
from whet.core.signals import ignores_signal, is_alive, process_tree
from whet.runs.control import cancel_run, stop_run
from whet.runs.logs import follow_log
from whet.runs.summary import summarize_run_folder

TRAINER = """
import os, signal, sys, time
from pathlib import Path
from whet.core.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
kind, count = sys.argv[2], 0
def interrupt(*_):
    global count
    count += 1
    if count > 1:
        folder.set_ended("stopped", 130, "interrupted")
        os._exit(130)
if kind != "starting":
    folder.set_status("running", 3, 10)
signal.signal(signal.SIGINT, signal.SIG_IGN if kind == "background" else interrupt)
if kind == "starting":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
print("ready", flush=True)
while kind == "hangs" or not folder.stop_requested():
    time.sleep(0.01)
folder.set_status("stopped", 4, 10, 75, "stopped after step 4")
folder.close()
"""
"""A process that owns a folder and behaves as training does."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs in it, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trainer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, kind: str = "runs") -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", TRAINER, folder, kind], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def result(ended: Any) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    assert ended.out.count("\n") == 1
    return dict(json.loads(ended.out))


# Finding runs.


def test_a_run_is_found_by_name_beginning_and_path(whet: Any, home: Path) -> None:
    for name in ("first", "second", "sweep/trial-1"):
        make_run(home / "runs" / name)
    for reference in ("first", "fi", "runs/first", home / "runs/first"):
        assert result(whet("runs", "show", reference, "--json"))["name"] == "first"
    assert result(whet("runs", "show", "trial-1", "--json"))["folder"] == "runs/sweep/trial-1"
    assert [run["name"] for run in result(whet("runs", "--json"))["runs"]] == ["first", "second", "sweep/trial-1"]
    assert "Did you mean first?" in whet("runs", "show", "frist").err
    ended = whet("runs", "stop", "s")
    assert ended.code == 1
    assert "2 runs have a name that begins with this (runs/second, runs/sweep/trial-1)" in ended.err
    (home / "runs" / "loop").symlink_to(home)
    (home / "runs" / "itself").symlink_to("itself")
    assert len(result(whet("runs", "--json"))["runs"]) == 3
    (home / "empty").mkdir()
    assert "not a run: it has neither config.yaml nor status.json" in whet("runs", "show", "empty").err
    assert "It holds runs/first" in whet("runs", "show", "runs").err
    assert whet("runs", "list", "nowhere").code == 1


def test_an_empty_place_is_no_error(whet: Any, home: Path) -> None:
    assert result(whet("runs", "--json")) == {"runs": []}
    assert "no folder runs/ here" in whet("runs").err
    (home / "runs").mkdir()
    assert "no runs in it" in whet("runs").err


def test_projects_group_runs(whet: Any, home: Path) -> None:
    make_run(home / "runs/a", project="one")
    make_run(home / "runs/b", project="true")  # a word that YAML quotes
    make_run(home / "runs/c")
    assert [run["name"] for run in result(whet("runs", "--project", "true", "--json"))["runs"]] == ["b"]
    assert "PROJECT" in whet("runs").out
    assert "Known: one, true" in whet("runs", "--project", "two").err


def test_control_characters_of_names_are_escaped(whet: Any, home: Path) -> None:
    make_run(home / "runs" / "a\x1b[31m\nb", project="p\x07")
    for command in (("runs",), ("runs", "show", "a")):
        ended = whet(*command)
        assert ended.code == 0, ended.err
        assert "\x1b" not in ended.out
        assert "\x07" not in ended.out
        assert "a\\x1b[31m" in ended.out
    assert len(whet("runs").out.splitlines()) == 2


def test_damaged_lines_are_named(whet: Any, home: Path) -> None:
    run = make_run(home / "runs/a")
    (run / "metrics.jsonl").write_text("{\n" + (run / "metrics.jsonl").read_text())
    shown = whet("runs", "show", "a")
    assert "metrics.jsonl: line 1 cannot be read" in shown.err
    assert "step 10 of 20 (50%)" in shown.out


# Logs.


def test_logs_by_rank_and_of_jobs(whet: Any, home: Path) -> None:
    run = make_run(home / "runs/a")
    assert "it has no log" in whet("runs", "logs", "a").err
    (run / "logs").mkdir()
    for rank in (0, 1):
        (run / "logs" / f"rank-{rank}.log").write_text(f"rank {rank}\n\x1b[2J\n")
    assert whet("runs", "logs", "a").out == "rank 0\n\\x1b[2J\n"
    assert result(whet("runs", "logs", "a", "--rank", 1, "--json"))["lines"] == ["rank 1", "\x1b[2J"]
    assert "Ranks with a log: 0, 1" in whet("runs", "logs", "a", "--rank", 7).err
    (run / "slurm").mkdir()
    (run / "slurm/5.out").write_text("module: not found\n")
    (run / "slurm/6.out").write_text("the next job\n")
    (run / "slurm/jobs.jsonl").write_text('{"job": 5, "script": "job.sh"}\n{"job": 6, "script": "then.sh"}\n')
    assert whet("runs", "logs", "a").out == "module: not found\n"
    assert whet("runs", "logs", "a", "--follow", "--json").code == 2


def test_folders_in_the_place_of_files_are_named(whet: Any, home: Path) -> None:
    run = make_run(home / "runs/a")
    (run / "logs" / "rank-0.log").mkdir(parents=True)
    assert "it has no log" in whet("runs", "logs", "a").err
    (run / "lock").mkdir()
    for command in (("runs", "delete", "a", "--yes"), ("runs", "rename", "a", "b")):
        assert "runs/a/lock: this is a folder" in whet(*command).err
    assert run.is_dir()


def test_a_log_is_followed_to_the_end_of_the_run(tmp_path: Path) -> None:
    log, active = tmp_path / "logs/rank-0.log", threading.Event()
    log.parent.mkdir()
    log.write_text("".join(f"line {n}\n" for n in range(50)))
    active.set()
    lines = follow_log(tmp_path, None, active.is_set)
    assert [next(lines) for _ in range(20)] == [f"line {n}" for n in range(30, 50)]
    with log.open("a") as file:
        file.write("new\nhal")
        file.flush()
        assert next(lines) == "new"
        file.write("f\nlast")
    active.clear()
    assert list(lines) == ["half", "last"]


# Stop and cancel.


def test_stop_saves_and_ends(whet: Any, home: Path, trainer: Any) -> None:
    process = trainer(make_run(home / "runs/a", state=None))
    [ended] = result(whet("runs", "stop", "a", "--json"))["runs"]
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("stopped", 75, 10)
    assert process.wait() == 0
    assert not (home / "runs/a/stop").exists()
    again = whet("runs", "stop", "a")
    assert again.code == 1
    assert "not running (stopped)" in again.err
    assert not (home / "runs/a/stop").exists()  # the next start would stop at once


def test_stop_before_the_first_step_and_of_a_process_that_dies(home: Path, trainer: Any) -> None:
    run = make_run(home / "runs/a", state=None)
    process = trainer(run, "starting")
    ended = stop_run(summarize_run_folder(run), lambda _: None)
    assert process.wait() == 75
    assert ended.state.name == "killed"
    trainer(make_run(home / "runs/b", state=None), "hangs")
    pid = read_owner(home / "runs/b").pid  # type: ignore[union-attr]
    ended = stop_run(summarize_run_folder(home / "runs/b"), lambda _: os.kill(pid, signal.SIGKILL))
    assert ended.state.name == "killed"
    assert not (home / "runs/b/stop").exists()


def test_a_request_to_a_machine_that_is_gone_waits_in_the_folder(whet: Any, home: Path) -> None:
    run = make_run(home / "runs/a", state="running", heartbeat=time.time() - 9999)
    write_lock(run, "elsewhere", 4, time.time() - 99999)
    ended = whet("runs", "stop", "a")
    assert ended.code == 0
    assert "elsewhere may never see it" in ended.err
    assert (run / "stop").exists()
    cancelled = whet("runs", "cancel", "a")
    assert cancelled.code == 1
    assert "its process is on elsewhere, which cannot be reached from here" in cancelled.err
    resumed = whet("runs", "resume", "a")
    assert resumed.code == 1
    assert "add --yes" in resumed.err
    for command in (("rename", "a", "b"), ("delete", "a", "--yes")):
        refused = whet("runs", *command)
        assert refused.code == 1
        assert "unreachable on elsewhere" in refused.err


@pytest.mark.parametrize(("kind", "kill"), [("runs", False), ("hangs", True), ("background", False)])
def test_cancel_ends_now(home: Path, trainer: Any, kind: str, kill: bool) -> None:
    run = make_run(home / "runs/a", state=None)
    process = trainer(run, kind)
    assert ignores_signal(read_owner(run).pid, signal.SIGINT) is (kind == "background")  # type: ignore[union-attr]
    ended = cancel_run(summarize_run_folder(run), kill, lambda _: None)
    process.wait()
    assert ended.state.name in ("stopped", "killed")
    status = read_status(run)
    assert (status["state"], status["exit_code"]) == ("stopped", 130)
    assert status["reason"] == ("interrupted" if kind == "runs" else "cancelled")


def test_cancel_ends_the_supervisor_that_would_restart_the_run(home: Path, real_python: str) -> None:
    run = make_run(home / "runs/a", state=None)
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TRAINER!r}, {str(run)!r}, 'hangs'])"
    name = "from whet.core.signals import identify_process as name; os.environ['WHET_LAUNCH_PID'] = name(os.getpid())"
    code = f"import os; {name}\nwhile True: exec({child!r})"
    supervisor = subprocess.Popen([real_python, "-c", code], stdout=subprocess.DEVNULL)
    try:
        while not read_status(run):
            time.sleep(0.01)
        pid = read_owner(run).pid  # type: ignore[union-attr]
        assert read_owner(run).live_supervisor() == supervisor.pid  # type: ignore[union-attr]
        tree = process_tree(supervisor.pid)
        assert pid in tree
        os.kill(pid, signal.SIGKILL)  # it is restarted
        assert summarize_run_folder(run).state.name in ("starting", "running")
        ended = cancel_run(summarize_run_folder(run), True, lambda _: None)
        assert ended.state.name == "stopped"
        supervisor.wait()
        assert not any(map(is_alive, tree))
    finally:
        supervisor.kill()
        supervisor.wait()


def test_nothing_to_cancel(whet: Any, home: Path) -> None:
    make_run(home / "runs/a")
    assert "nothing to cancel" in whet("runs", "cancel", "a").err


# Resume, rename, delete.


def test_resume_refuses_what_runs_and_half_a_run(whet: Any, home: Path, trainer: Any) -> None:
    trainer(make_run(home / "runs/a", state=None))
    assert "running already" in whet("runs", "resume", "a").err
    half = make_run(home / "runs/b")
    (half / "config.yaml").unlink()
    assert "an incomplete run: it has no config.yaml" in whet("runs", "resume", "b").err
    newer = make_run(home / "runs/c", format=99)
    assert "pip install --upgrade whet" in whet("runs", "resume", "c").err
    assert read_owner(newer) is None


def test_rename(whet: Any, home: Path) -> None:
    run = make_run(home / "runs/a")
    make_run(home / "runs/taken")
    for name in ("taken", "x/y", ".x", "", "x@3", "a\x1b", "-x"):
        assert whet("runs", "rename", "a", "--", name).code == 1
        assert run.exists()
    assert result(whet("runs", "rename", "a", "b c: 1", "--json"))["run"] == str(home / "runs/b c: 1")
    assert not config_was_edited(home / "runs/b c: 1")
    assert result(whet("runs", "show", "b", "--json"))["config"]["run"]["name"] == "b c: 1"
    (home / "runs/b c: 1/config.yaml").write_text("x: 1\n" + (home / "runs/b c: 1/config.yaml").read_text())
    whet("runs", "rename", "b", "c")
    assert config_was_edited(home / "runs/c")


def test_delete_asks_and_refuses_what_runs(whet: Any, home: Path, trainer: Any) -> None:
    run = make_run(home / "runs/a")
    refused = whet("runs", "delete", "a")
    assert refused.code == 1
    assert "add --yes" in refused.err
    assert run.exists()
    process = trainer(make_run(home / "runs/b", state=None))
    both = whet("runs", "delete", "a", "b", "--yes")
    assert both.code == 1
    assert "running" in both.err
    assert run.exists()
    os.kill(read_owner(home / "runs/b").pid, signal.SIGKILL)  # type: ignore[union-attr]
    process.wait()
    assert result(whet("runs", "delete", "a", "b", "--yes", "--json"))["deleted"] == ["runs/a", "runs/b"]
    assert list((home / "runs").iterdir()) == []
    (home / "link").symlink_to(make_run(home / "runs/c"))
    assert "this is a link" in whet("runs", "delete", "link", "--yes").err
