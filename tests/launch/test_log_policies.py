"""launch.log_policies: lines of the output that forbid a restart, or a node."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.core.errors import ExitCode
from whet.launch import log_policies
from whet.launch.config import LogPolicy
from whet.launch.log_policies import EXCLUDED_VARIABLE, PolicyMatch, ProcessOutput, excludable_node, exclude_node
from whet.launch.restart_policy import AttemptResult, Finish, decide_restart

GIVE_UP = LogPolicy(pattern="out of memory", action="give_up")
EXCLUDE = LogPolicy(pattern=r"Xid .*: 79", action="exclude_node")


def output_of(script: str, *policies: LogPolicy, stdout: int | None = 2) -> ProcessOutput:
    """Run a shell script as an attempt."""
    output = ProcessOutput(policies, stdout)
    process = subprocess.Popen(["sh", "-c", script], stdout=output.stdout, stderr=output.stderr)
    with output.read():
        while output.wait(process, 0.2) is None:
            pass
    return output


def test_output_is_copied_and_the_first_policy_that_matches_wins(capfd: Any) -> None:
    output = output_of("echo one; echo 'Xid (x): 79, gone' >&2; printf 'CUDA out of memory'", GIVE_UP, EXCLUDE)
    assert output.match == PolicyMatch("out of memory", "give_up", "CUDA out of memory")
    assert capfd.readouterr().err == "one\nXid (x): 79, gone\nCUDA out of memory"
    output = output_of("echo one; echo 'Xid (x): 79, gone'", GIVE_UP, EXCLUDE, stdout=None)
    assert output.match == PolicyMatch(r"Xid .*: 79", "exclude_node", "Xid (x): 79, gone")
    assert capfd.readouterr().out == "one\nXid (x): 79, gone\n"


def test_a_process_that_outlives_the_others_does_not_hold_the_launch_up() -> None:
    assert output_of("sleep 60 & echo out of memory; kill -9 $$", GIVE_UP).match is not None


def test_without_policies_processes_write_to_the_terminal_themselves() -> None:
    output = ProcessOutput([], 2)
    assert (output.stdout, output.stderr) == (2, 2)


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_lines_are_whole_however_they_arrive(parts: list[bytes], data: Any) -> None:
    policy = LogPolicy(pattern="a.?b", action="give_up")
    output = ProcessOutput([policy], 2)
    written = b"".join(parts)
    [pipe] = output._targets
    with Path(os.devnull).open("wb") as nowhere:
        output._targets[pipe] = nowhere.fileno()
        for part in parts:
            os.write(output.stderr, part)
            if data.draw(st.booleans()):
                output._copy(pipe)
        with output.read():
            pass
    lines = (line.decode(errors="replace") for line in re.split(rb"[\r\n]+", written))
    assert (output.match is not None) == any(re.search(policy.pattern, line) for line in lines)


def test_a_pattern_that_takes_too_long_is_dropped(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(log_policies, "_MATCH_S", 0.05)
    slow = LogPolicy(pattern="^(a+)+$", action="give_up")
    output = output_of(f"echo {'a' * 40}!; echo aaa; echo out of memory", slow, GIVE_UP)
    assert output.match is not None
    assert output.match.pattern == "out of memory"
    assert "it ran for more than 0.05 s on one line. It is not used any more" in capsys.readouterr().err


def crash(policy: LogPolicy) -> AttemptResult:
    match = PolicyMatch(policy.pattern, policy.action, "the line")
    return AttemptResult("crashed", ExitCode.FAILED, 7, "lost", 1, "n1", match)


def test_decisions() -> None:
    given_up = decide_restart([crash(GIVE_UP)], 3, 1.0, "n1")
    assert isinstance(given_up, Finish)
    assert (given_up.exit_code, given_up.exclude) == (ExitCode.FAILED, None)
    assert "'out of memory' (give_up) matches the line 'the line'. It is not restarted" in given_up.reason
    excluded = decide_restart([crash(EXCLUDE)], 0, 1.0, "n1")
    assert isinstance(excluded, Finish)
    assert (excluded.exit_code, excluded.exclude) == (ExitCode.STOPPED, "n1")
    alone = decide_restart([crash(EXCLUDE)], 3, 1.0, None)
    assert isinstance(alone, Finish)
    assert (alone.exit_code, alone.exclude) == (ExitCode.FAILED, None)
    assert "There is no other node" in alone.reason


def test_only_a_job_of_slurm_has_other_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv(EXCLUDED_VARIABLE, raising=False)
    assert excludable_node() is None
    monkeypatch.setenv(EXCLUDED_VARIABLE, str(tmp_path / "7.exclude"))
    assert excludable_node() == "n1"
    exclude_node("n1")
    exclude_node("n2")
    assert (tmp_path / "7.exclude").read_text() == "n1\nn2\n"


@pytest.mark.parametrize(
    ("policy", "message"),
    [("{pattern: '(', action: give_up}", "launch.log_policies.0.pattern: '(' is not a regular expression"),
     ("{pattern: 'a*', action: give_up}", "launch.log_policies.0.pattern: 'a*' matches an empty line"),
     ("{pattern: a, action: stop}", "launch.log_policies.0.action: 'stop' is not valid: expected give_up | exclude"),
     ("{action: give_up}", "launch.log_policies.0.pattern")],
)  # fmt: skip
def test_wrong_policies_are_named(whet: Any, recipe: str, policy: str, message: str) -> None:
    ended = whet("launch", recipe, "--dry-run", f"launch.log_policies=[{policy}]")
    assert ended.code == 1
    assert message in ended.err


def test_the_script_queues_a_job_again_without_a_node(whet: Any, recipe: str) -> None:
    policy = "launch.log_policies=[{pattern: Xid, action: exclude_node}]"
    ended = whet("launch", recipe, "--on", "slurm", "--dry-run", "run.dir=/runs/x", policy)
    assert subprocess.run(["bash", "-n"], input=ended.out, text=True, check=False).returncode == 0
    assert f"export {EXCLUDED_VARIABLE}=/runs/x/slurm/$SLURM_JOB_ID.exclude" in ended.out
    assert "ExcNodeList=$nodes" in ended.out
    ended = whet("launch", recipe, "--on", "slurm", "--dry-run", policy, "launch.slurm.max_requeues=0")
    assert "ExcNodeList" not in ended.out
