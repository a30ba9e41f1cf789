"""Several machines: network namespaces with names, addresses and, where needed, file systems of their own."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_options import OPTIONS

pytestmark = pytest.mark.system("iproute2", program="ip")
PORT = 29400


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two machines on one switch: 10.231.77.1 and 10.231.77.2, reached by nobody else."""
    tag = f"{os.getpid() % 100_000:05d}"
    bridge, names = f"wb{tag}", [f"wn{tag}-1", f"wn{tag}-2"]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("link", "add", f"wv{tag}{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"wv{tag}{number}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.231.77.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not available: {error.stderr.strip()}")
    finally:
        for words in [*(("netns", "del", name) for name in names), ("link", "del", bridge)]:
            subprocess.run(["ip", *words], check=False, capture_output=True)


@pytest.fixture
def on_all(machines: list[str], start: Any) -> Callable[..., list[Any]]:
    """Start the same launch on every machine; `first` is a shell command for each, run before it."""

    def run(recipe: Any, *options: str, first: tuple[str, ...] = ("true", "true")) -> list[Any]:
        started = []
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        for number, name in enumerate(machines):
            launch = [sys.executable, "-m", "whet", "launch", str(recipe), *options, f"run.dir={start.folder / 'run'}"]
            launch += ["launch.nodes=2", "launch.processes=1", f"launch.rendezvous=10.231.77.1:{PORT}"]
            launch += ["launch.wait=1.0"]
            script = f"hostname host{number + 1} && {first[number]} && exec {shlex.join(launch)}"
            words = ["taskset", "-c", str(next(cores)), "ip", "netns", "exec", name]
            words += ["unshare", "--uts", "--mount", "sh", "-c", script]
            started.append(start.command(words, "run"))
        return started

    return run


def test_a_run_on_two_machines_restarts_after_a_process_is_killed(
    on_all: Any, recipe: str, whole: Path, assert_same: Any
) -> None:
    one, two = on_all(recipe, *OPTIONS)
    one.wait_for_step(22)
    one.wait_for_checkpoint(20)
    os.kill(one.worker(1), signal.SIGKILL)
    ends = [run.ended() for run in (one, two)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert any("continuing after step 20" in err for _, _, err in ends)
    lines = one.attempts
    assert sorted(line["node"] for line in lines) == ["host1", "host1", "host2", "host2"]
    crashes = [line for line in lines if line["kind"] == "crashed"]
    assert [line["then"] for line in crashes] == ["restart", "restart"]
    assert (1, "killed by SIGKILL") in [(line["rank"], line["message"]) for line in crashes]
    assert_same(one.folder, whole)


@pytest.mark.slow
def test_machines_that_do_not_share_the_run_folder_are_refused(on_all: Any, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    runs = on_all(recipe, *OPTIONS, first=("true", f"mount -t tmpfs none {tmp_path / 'run'}"))
    ends = [run.ended() for run in runs]
    assert [code for code, _, _ in ends] == [1, 1], ends
    for _, _, err in ends:
        assert f"run.dir: {tmp_path / 'run'} is not the same folder on all machines: host" in err
        assert "cannot see what host" in err
        assert "Traceback" not in err
        assert "Restart" not in err


def test_machines_with_other_data_are_refused(on_all: Any, tmp_path: Path) -> None:
    for name in ("data", "other"):
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"from {name}"}]
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 8)
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        f"model: {{path: builtin:tiny}}\ndata: {{sources: [{{path: {tmp_path}/data.jsonl}}], max_length: 128}}\n"
        "train: {steps: 2, batch: {conversations: 4}}\n"
    )
    cache = f"export WHET_CACHE={tmp_path}"
    differs = f"mount --bind {tmp_path}/other.jsonl {tmp_path}/data.jsonl"
    runs = on_all(recipe, first=(f"{cache}/cache1", f"{cache}/cache2 && {differs}"))
    ends = [run.ended() for run in runs]
    assert [code for code, _, _ in ends] == [1, 1], ends
    for _, _, err in ends:
        assert "the train data on host" in err
        assert "their prepared stores hold different conversations" in err
