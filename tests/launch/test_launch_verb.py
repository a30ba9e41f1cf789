"""`whet launch … -- WORDS`: the scripts of verbs and programs, their settings, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whet.data.prepare.build as build_module
from whet.launch.config import LaunchConfig
from whet.launch.local import python_script
from whet.launch.slurm_script import SlurmJob, render_script, srun_command
from whet.launch.supervise import _SignalForwarder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry_run(whet: Any, *words: str) -> dict[str, str]:
    ended = whet("launch", "--on", "slurm", "--dry-run", "--json", *words)
    assert ended.code == 0, ended.err
    found = dict(json.loads(ended.out))
    for script in found.values():
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return found


def last_command(script: str) -> str:
    return script.replace(" \\\n    ", " ").splitlines()[-1]


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


# What is refused.


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--"], 2, "nothing follows --"),
        ([], 2, "CONFIG is missing"),
        (["--", "prepair", "x"], 1, "-- prepair: neither a verb of whet nor a program on this machine. Did you mean "
         "prepare?"),
        (["--", "python", "my_trainr.py"], 1, "there is no file my_trainr.py. Check the path; did you mean "
         "my_trainer.py?"),
        (["--", "nowhere/a.py"], 1, "there is no file nowhere/a.py"),
        (["--", "eval", "x"], 2, "run it without launch: whet eval x"),
        (["--wait", "--", "true"], 2, "--wait is for Slurm"),
        (["--on", "slurm", "--", "launch", "x"], 2, "cannot launch itself"),
        (["--on", "slurm", "--", "prepare", "RECIPE", "--shard", "9/8"], 1, "--shard 9/8: write I/N"),
        (["--on", "slurm", "--", "prepare", "RECIPE", "--shard", "auto", "--merge"], 1, "without --merge"),
        (["--on", "slurm", "--", "prepare", "RECIPE", "--shrad", "auto"], 2, "No such option: --shrad"),
        (["--on", "slurm", "--", "prepare"], 2, "Missing argument 'CONFIG'"),
        (["--on", "slurm", "--", "prepare", "none.yaml"], 1, "none.yaml"),
        (["--on", "slurm", "--", "import", "chekpoint"], 2, "-- import chekpoint: no such command"),
        (["--on", "slurm", "--", "import", "checkpoint", "neox"], 2, "-- import checkpoint: Missing argument 'DIR'"),
        (["--on", "slurm", "--", "python", "-c", "\udcff"], 1, "not valid UTF-8"),
        (["--", "./my_trainer.py.orig"], 1, "chmod +x ./my_trainer.py.orig"),
        (["--on", "slurm", "--chain", "2", "--", "eval", "x"], 2, "--chain and --then are for runs"),
        (["--on", "slurm", "train.steps=1", "--", "eval", "x"], 2, "only launch.…=VALUE may be given before --"),
        (["--on", "slurm", "launch.slurm.tim=1", "--", "eval", "x"], 1, "launch.slurm.time"),
        (["--interactive", "--", "eval", "x"], 1, "--interactive needs a terminal"),
        (["--interactive", "--", "prepare", "RECIPE", "--shard", "auto"], 2, "remove --interactive"),
        (["--interactive"], 2, "--interactive takes a verb or a program"),
        (["--interactive", "--on", "local", "--", "eval", "x"], 2, "remove --on local"),
        (["--notebook", "--", "eval", "x"], 2, "--notebook starts Jupyter, not a verb"),
        (["--notebook", "--interactive"], 2, "--interactive takes a verb or a program"),
    ],
)  # fmt: skip
def test_what_is_refused(whet: Any, recipe: str, words: list[str], code: int, message: str, tmp_path: Path) -> None:
    for name in ("my_trainer.py", "my_trainer.py.orig"):
        (tmp_path / name).touch()
    ended = whet("launch", *(recipe if word == "RECIPE" else word for word in words))
    assert (ended.code, ended.out) == (code, ""), ended.err
    assert message in ended.err
    assert not (tmp_path / "jobs").exists()


def test_shards_are_chosen_by_launch_only(whet: Any, recipe: str) -> None:
    ended = whet("prepare", recipe, "--shard", "auto")
    assert ended.code == 1
    assert "whet launch --on slurm -- prepare" in ended.err
    assert "write a date as YYYY-MM-DD" in whet("prepare", recipe, "--date", "17.11.").err


# Scripts of verbs.


def test_a_verb_runs_once_with_the_settings_of_its_run(whet: Any, tmp_path: Path, recipe: str) -> None:
    (tmp_path / "runs/my").mkdir(parents=True)
    text = (
        Path(recipe).with_name("tiny.yaml").read_text()
        + "\nlaunch: {nodes: 4, gpus: 8, slurm: {account: mine, time: 60}}\n"
    )
    (tmp_path / "runs/my/config.yaml").write_text(text)
    script = dry_run(whet, "launch.slurm.time=30", "--", "eval", "runs/my@200", "--tasks", "a b.jsonl")["script"]
    options = options_of(script)
    assert {"--account=mine", "--time=30", "--nodes=1", "--gpus-per-node=8", "--ntasks-per-node=1"} <= {*options}
    assert f"--output={tmp_path}/jobs/eval-my-200/%j.out" in options
    assert last_command(script).endswith("-m whet eval runs/my@200 --tasks 'a b.jsonl'")
    later = dry_run(whet, "--", "eval", "runs/my", "launch.slurm.time=20")["script"]
    assert {"--account=mine", "--time=20"} <= {*options_of(later)}


def test_a_site_has_its_settings_in_a_file(whet: Any, tmp_path: Path, recipe: str) -> None:
    (tmp_path / "site.yaml").write_text("launch: {slurm: {account: mine}}")
    for words in (["--", "eval", "x"], ["--", "true"], ["--", "prepare", recipe, "launch.slurm.account=other"]):
        assert "--account=mine" in options_of(dry_run(whet, "site.yaml", *words)["script"])
    (tmp_path / "site.yaml").write_text("launch: {slurm: {acount: mine}}")
    ended = whet("launch", "site.yaml", "--on", "slurm", "--", "eval", "x")
    assert "site.yaml:1" in ended.err
    assert "launch.slurm.account" in ended.err


def test_shards_are_an_array_and_a_merge_without_gpus(
    whet: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.jsonl").write_text('{"messages": []}\n' * 3000)
    monkeypatch.setattr(build_module, "_SHARD_BYTES_PER_CORE", 100)
    data = ("data.validation=null", "data.sources=[{path: data.jsonl}]")
    found = dry_run(
        whet, "launch.gpus=8", "launch.slurm.cpus=7", "launch.slurm.gpu_type=mi250", "--", "prepare", recipe, *data,
        "--shard", "auto", "--quiet",
    )  # fmt: skip
    array, merge = found["script"], found["merge"]
    assert {"--array=0-8", "--cpus-per-task=56"} <= {*options_of(array)}
    assert not any("gpu" in option or "mi250" in option for option in options_of(array) + options_of(merge))
    assert array.rstrip().endswith("--shard $SLURM_ARRAY_TASK_ID/9")
    assert merge.rstrip().endswith("--merge")
    shard, whole = (shlex.split(last_command(script))[4:] for script in (array, merge))
    assert shard[:-2] == whole[:-1]  # the same recipe and date, on whatever day they start
    assert "data.jsonl" not in " ".join(whole)
    assert not (tmp_path / "jobs").exists()


# Programs.


@given(st.lists(st.text("aß $'\"\\`*;&|<>(){}!#~=-", max_size=6), min_size=1, max_size=4))
def test_the_shell_changes_no_word_of_a_program(words: list[str]) -> None:
    job = SlurmJob("x", Path("/jobs/x"), ("echo", *words), LaunchConfig(processes=2), kind="program")
    assert shlex.split(last_command(render_script(job)))[-len(words) - 2 :] == ["--", "echo", *words]
    assert shlex.split(srun_command(job)[-1]) == ["exec", "echo", *words]


def test_a_program_is_supervised_on_all_nodes(whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_trainer.py").touch()
    settings = ("launch.nodes=2", "launch.gpus=8", "launch.max_restarts=9", "launch.env.HF_TOKEN=hidden")
    script = dry_run(whet, *settings, "launch.slurm.time=60", "--", "python", "my_trainer.py", "--lr", "1e-4")["script"]
    assert "--nodes=2" in options_of(script)
    assert not any("signal" in option for option in options_of(script))  # it would kill a program that expects none
    assert "hidden" not in script
    words = shlex.split(last_command(script))
    assert words[words.index("whet") :] == [
        "whet", "launch", "launch.gpus=8", "launch.max_restarts=9", 'launch.env=["HF_TOKEN"]',
        "launch.nodes=$SLURM_JOB_NUM_NODES", "launch.rendezvous=$rendezvous", "--", "python", "my_trainer.py", "--lr",
        "1e-4",
    ]  # fmt: skip
    warned = dry_run(whet, *settings, "launch.slurm={time: 60, warning: 90}", "--", "my_trainer.py")["script"]
    assert "--signal=B:USR1@90" in options_of(warned)
    assert "scontrol requeue $SLURM_JOB_ID" in warned


@pytest.mark.parametrize(
    ("words", "script"),
    [(["a.py"], "a.py"), (["python3", "-u", "a.py", "b.py"], "a.py"), (["/x/python3.11", "-W", "error", "a"], "a"),
     (["python", "-m", "a"], None), (["python", "-c", "pass"], None), (["python"], None), (["bash", "a.sh"], None)],
)  # fmt: skip
def test_the_script_of_a_command(words: list[str], script: str | None) -> None:
    assert python_script(words) == script


CRASHES = """
import os, sys, time
from pathlib import Path
names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
os.write(1, (" ".join([*map(os.environ.get, names), str(sys.argv[1:])]) + chr(10)).encode())  # in one piece
attempts = [Path(f"attempts-{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
own = attempts[int(os.environ["RANK"])]
own.write_text(own.read_text() + "x" if own.exists() else "x")
assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
number = len(own.read_text())
while not all(each.exists() and len(each.read_text()) >= number for each in attempts):
    time.sleep(0.01)  # whoever fails first has the others killed
sys.exit(7 if number <= int(sys.argv[1]) else 0)
"""


@pytest.mark.parametrize(
    ("crashes", "restarts", "processes", "code"),
    [(1, 0, 1, 7), pytest.param(1, 1, 2, 0, marks=pytest.mark.slow), pytest.param(2, 1, 2, 7, marks=pytest.mark.slow)],
)
def test_a_program_that_crashes_is_restarted_and_its_exit_code_passed_on(
    start: Any, tmp_path: Path, crashes: int, restarts: int, processes: int, code: int
) -> None:
    (tmp_path / "crashes.py").write_text(CRASHES)
    settings = (f"launch.processes={processes}", f"launch.max_restarts={restarts}", "launch.wait=0.01", "--json")
    program = (os.environ["WHET_TEST_PYTHON"], "crashes.py", str(crashes), "$$ ${local_rank}")
    words = [sys.executable, "-m", "whet", "launch", *settings, "--", *program]
    ended, out, err = start.command(words, "run").ended()
    assert ended == code, err
    result = json.loads(out)
    assert (result["exit_code"], result["restarts"]) == (code, restarts)
    for rank in range(processes):
        assert f"{rank} {rank} {processes} ['{crashes}', '$$ ${{local_rank}}']" in err
    assert ("error: no restarts left" in err) is (code == 7)


SHELL = "sleep 1000 & echo $! > child; sleep 1000"
"""A shell that alone gets a signal waits for its child, and what it starts in the background ignores SIGINT."""


def wait_for_text(file: Path) -> str:
    until = time.monotonic() + 300
    while not file.exists() or not file.read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.01)
    return file.read_text().strip()


def assert_gone(pid: str) -> None:
    until = time.monotonic() + 100
    while (command := Path(f"/proc/{pid}/cmdline")).exists() and command.read_bytes():  # a zombie has none
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_signal_reaches_what_a_program_has_started(tmp_path: Path) -> None:
    """As under torchrun, whose workers lead process groups of their own."""
    start = f"subprocess.Popen(['bash', '-c', {SHELL!r}], start_new_session=True).wait()"
    agent = subprocess.Popen([os.environ["WHET_TEST_PYTHON"], "-Sc", f"import subprocess; {start}"])
    try:
        with _SignalForwarder(is_run=False) as signals, signals.forwarded_to(agent, has_workers=True):
            child = wait_for_text(tmp_path / "child")
            os.kill(os.getpid(), signal.SIGINT)
            agent.wait(timeout=30)
        assert_gone(child)
    finally:
        agent.kill()


@pytest.mark.slow
def test_ctrl_c_stops_a_program_and_what_it_has_started(real_python: str, start: Any, tmp_path: Path) -> None:
    run = start.command([real_python, "-m", "whet", "launch", "--", "bash", "-c", SHELL], "run")
    child = wait_for_text(tmp_path / "child")
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.ended()
    assert code == 130, err
    assert "Traceback" not in err
    assert_gone(child)


# Jupyter.

JUPYTER = """#!{python}
import json, os, socket, sys, time
[port] = [word.partition("=")[2] for word in sys.argv if word.startswith("--port=")]
json.dump([sys.argv, os.environ["JUPYTER_TOKEN"]], open("started", "w"))
server = socket.create_server(("127.0.0.1", int(port)))
time.sleep(1000)
"""


def test_the_token_of_jupyter_is_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whet: Any, start: Any
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    ended = whet("launch", "--notebook")
    assert ended.code == 1
    assert "pip install jupyterlab" in ended.err
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/jupyter-lab").write_text(JUPYTER.format(python=os.environ["WHET_TEST_PYTHON"]))
    (tmp_path / "bin/jupyter-lab").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = start.command([sys.executable, "-m", "whet.launch.notebook", str(tmp_path)], "run")
    files, until = [tmp_path / "7.token", tmp_path / "7.json"], time.monotonic() + 300
    while not all(file.exists() for file in files):
        assert time.monotonic() < until
        time.sleep(0.01)
    words, token = json.loads((tmp_path / "started").read_text())
    assert files[0].read_text() == token
    assert len(token) > 40
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    assert token not in " ".join(words)
    assert "--ServerApp.shutdown_no_activity_timeout=3600" in words
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.ended()
    assert code == 143, err
    assert token not in out + err
    assert not any(file.exists() for file in files)
