"""Trials on the devices of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core.display import mask_secrets
from whet.core.errors import ExitCode, RunFailedError, WhetError
from whet.core.heartbeat import report_texts
from whet.core.launch_env import SearchTrial
from whet.core.resources import available_cores
from whet.core.run_folder import read_owner, read_status
from whet.launch.local import launch_command, make_launch_job
from whet.launch.restart_policy import read_attempt_result
from whet.launch.torchrun_agent import REPORT_VARIABLE
from whet.search.script import ScriptConfig
from whet.search.trials import OWNER_FILE, TrialEnd, TrialRun

_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable that selects the devices of a process, by their kind."""

_OWNER_S = 120.0
"""How long a trial of a killed search may take to save and end."""


@dataclass(frozen=True, slots=True)
class _Running:
    trial: TrialRun
    slot: int
    log: Path
    report: Path | None
    """torchrun's, if the trial has several processes."""
    earlier: frozenset[str]
    """What the run folder said before."""
    status: dict[str, Any]
    """Its status.json before this start."""


_OWN_ERROR = f"{WhetError.__module__}.{WhetError.__name__}: "
"""How the last line of a script begins that ends with an error of WhetCallback."""


class LocalPlace:
    """Starts trials through a server that has torch imported (trial_server.py), each on devices of its own."""

    def __init__(self, logs: Path, concurrent: int | None, per_trial: int, modules: Sequence[str] = ()) -> None:
        """`logs`: the folder for what trials print. `per_trial`: processes, and devices, of a trial. `modules`: to be
        imported once for all."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._per_trial = logs, per_trial
        self._running: dict[int, _Running] = {}
        self._unread, self._stops = b"", False
        env = dict(os.environ)
        env.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // ((concurrent or 1) * per_trial))))
        with (logs / "server.log").open("ab") as errors:
            # in a new session: Ctrl-C in a terminal is for the search, which stops the trials
            self._server = subprocess.Popen(
                [sys.executable, "-m", "whet.search.trial_server", *modules],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, start_new_session=True,
            )  # fmt: skip
        assert self._server.stdout is not None
        self._answers = self._server.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answers, selectors.EVENT_READ)
        self._slots: list[list[str]] | None = None

    @property
    def slots(self) -> int:
        """On a CPU one: trials that run at the same time share its cores."""
        return len(self._device_groups())

    def _device_groups(self) -> list[list[str]]:
        """The devices of each slot; waits until the server has imported torch."""
        while self._slots is None:
            for answer in self._receive(None):
                if answer.get("ready"):
                    self._slots = self._group_devices(answer["device"], answer["devices"])
        return self._slots

    def _group_devices(self, kind: str, count: int) -> list[list[str]]:
        self._variable = _VISIBLE_DEVICES.get(kind)
        if self._variable is None or count == 0:
            return [[]]
        given = os.environ.get(self._variable)
        names = given.split(",") if given else [str(index) for index in range(count)]
        if count < self._per_trial:
            raise RunFailedError(
                f"launch.gpus: a trial needs {self._per_trial} devices, and this machine has {count}. Lower it"
            )
        n = self._per_trial
        return [names[start : start + n] for start in range(0, count - n + 1, n)]

    def start(self, trial: TrialRun) -> None:
        """On the devices that the fewest trials use."""
        _wait_for_owner(trial.folder)
        groups = self._device_groups()
        used = [running.slot for running in self._running.values()]
        slot = min(range(len(groups)), key=used.count)
        log = self._logs / f"{trial.folder.name}.log"
        report: Path | None = None
        request: dict[str, Any] = {"start": trial.number, "log": str(log)}
        if isinstance(trial.config, ScriptConfig):
            stop = trial.folder / "stop"
            stop.unlink(missing_ok=True)  # of a script that was killed
            steps = trial.config.script.steps
            env = SearchTrial(str(trial.folder.absolute()), steps, trial.until).as_env()
            if "WANDB_RUN_ID" not in os.environ:  # each start of a trial continues its run there
                owner = (trial.folder.parent / OWNER_FILE).read_text()
                env |= {"WANDB_RUN_ID": f"{owner}-{trial.number:03d}", "WANDB_RESUME": "allow"}
            env |= trial.config.launch.required_variables()
            request |= {"argv": trial.config.script.argv(), "stop": str(stop)}
        else:
            command = [sys.executable, "-m", "whet", "train", str(trial.recipe), "--until", str(trial.until), "--quiet"]
            launch = trial.config.launch.model_copy(update={"processes": self._per_trial, "gpus": None})
            job = make_launch_job(tuple(command), trial.folder, trial.config.run.name or "", launch)
            report = self._logs / f"{trial.folder.name}.report.json" if job.uses_torchrun else None
            env = {**job.env, **({REPORT_VARIABLE: str(report)} if report else {})}
            request["argv"] = launch_command(job, resume=True)
        if groups[slot] and self._variable:
            env[self._variable] = ",".join(groups[slot])
        self._running[trial.number] = _Running(
            trial, slot, log, report, report_texts(trial.folder), read_status(trial.folder)
        )
        self._send(request | {"env": env})

    def poll(self, seconds: float) -> list[TrialEnd]:
        """The trials that have ended; waits up to `seconds` for one."""
        return [self._end(answer["ended"], answer["code"]) for answer in self._receive(seconds) if "ended" in answer]

    def _end(self, number: int, code: int) -> TrialEnd:
        running = self._running.pop(number)
        if isinstance(running.trial.config, ScriptConfig):
            return self._script_end(running, code)
        if code == ExitCode.DONE:
            return TrialEnd(number, code)
        result = read_attempt_result(
            running.trial.folder, code, running.report, running.earlier, self._stops, by_program=True
        )
        exit_code = {"stopped": ExitCode.STOPPED, "input": ExitCode.INPUT}.get(result.kind, ExitCode.FAILED)
        return TrialEnd(number, exit_code, _last_error(running.log) or result.message)

    def _script_end(self, running: _Running, code: int) -> TrialEnd:
        """By the run folder, which WhetCallback writes: a script that was stopped on request may end with 0, too."""
        trial, status = running.trial, read_status(running.trial.folder)
        is_old = status == running.status  # it failed before its first step: this is how an earlier start ended
        is_stopped = status.get("state") == "stopped" and status.get("exit_code") == ExitCode.STOPPED and not is_old
        reason = str(status.get("reason") or "")
        if self._stops or is_stopped:
            return TrialEnd(trial.number, ExitCode.STOPPED, reason or "stopped")
        if code == ExitCode.DONE and (not status or status.get("step", 0) >= trial.until):
            return TrialEnd(trial.number, code)
        if code == ExitCode.DONE:
            reason = f"it ended after step {status['step']}, before its rung at step {trial.until}. {reason}"
        elif status.get("state") != "failed" or is_old:
            reason = f"exit code {code}: {_last_line(running.log)}"
        # argparse ends so before there is a run folder; WhetCallback refuses a script that it cannot train
        is_usage = (code == ExitCode.USAGE or _OWN_ERROR in reason) and not status
        reason = reason.rpartition(_OWN_ERROR)[2]
        return TrialEnd(trial.number, ExitCode.USAGE if is_usage else ExitCode.FAILED, reason)

    def stop(self) -> None:
        """SIGTERM, or for a script the file `stop`: each saves a checkpoint after its current step."""
        self._stops = True
        self._send({"signal": signal.SIGTERM})

    def kill(self) -> None:
        self._send({"signal": signal.SIGKILL})

    def close(self) -> None:
        """The server ends when its stdin does, after the trials that still run have saved."""
        if self._slots is None:  # it is still importing torch, and has no trial
            self._server.kill()
        self._selector.close()
        for stream in (self._server.stdin, self._server.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._server.wait()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()
        except BrokenPipeError:
            raise self._server_died() from None

    def _receive(self, seconds: float | None) -> list[dict[str, Any]]:
        if not self._selector.select(seconds):
            return []
        received = os.read(self._answers, 1 << 16)
        if not received:
            raise self._server_died()
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def _server_died(self) -> RunFailedError:
        code = self._server.wait()
        return RunFailedError(
            f"the process that starts trials ended (exit code {code}; −9 often means out of memory): "
            f"{self._logs / 'server.log'}. Start the search again with --resume"
        )


def _last_error(log: Path) -> str:
    """The error that a trial has printed last."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    return ""


def _last_line(log: Path) -> str:
    """The last line that a script has printed: of a traceback, the exception."""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return mask_secrets(lines[-1]) if lines else "it printed nothing"
    return "it printed nothing"


def _wait_for_owner(folder: Path) -> None:
    """The processes of a killed search save and end by themselves, which may take a moment."""
    until = time.monotonic() + _OWNER_S
    while (owner := read_owner(folder)) is not None and owner.is_alive(folder):
        if time.monotonic() > until:
            raise RunFailedError(
                f"{folder}: still in use by process {owner.pid} on {owner.host} of an earlier search. End it, and "
                "start the search again with --resume"
            )
        time.sleep(0.1)
