"""Trials as Slurm jobs, submitted by `launch`. Jobs outlive the search: one that is resumed finds them again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from whet.config import Config
from whet.core.errors import ExitCode
from whet.core.json_lines import read_json_lines
from whet.core.run_folder import read_status
from whet.launch.slurm import JOBS, submit_run
from whet.launch.slurm_commands import ENDED_STATES, POLL_S, describe_end, run_slurm
from whet.search.trials import TrialEnd, TrialRun

_SLOTS = 16
_LOST_STATES = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT")
"""Ends that say nothing about the trial: it continues from its checkpoint in another job."""


@dataclass(slots=True)
class _Submitted:
    trial: TrialRun
    job: int
    attempts: int = 1


class SlurmPlace:
    """Each trial is a job with the settings of launch.slurm, from one rung to the next."""

    def __init__(self) -> None:
        self._running: dict[int, _Submitted] = {}
        self._asked, self._stops = 0.0, False

    @property
    def slots(self) -> int:
        """As many as Determined runs: the queue decides how many of them have a node."""
        return _SLOTS

    def start(self, trial: TrialRun) -> None:
        """Submit a job, or follow that of an earlier search that is queued or running."""
        records = read_json_lines(trial.folder / "slurm" / JOBS)[0]
        states = (job_states() if records else None) or {}
        known = [each["job"] for each in records if states.get(each["job"], "COMPLETED") not in ENDED_STATES]
        self._running[trial.number] = _Submitted(trial, known[-1] if known else self._submit(trial))

    def _submit(self, trial: TrialRun) -> int:
        assert isinstance(trial.config, Config)
        (trial.folder / "stop").unlink(missing_ok=True)
        submitted = submit_run(trial.config, resume=True, until=trial.until, warns=not self._running)
        return submitted.jobs[0]

    def poll(self, seconds: float) -> list[TrialEnd]:
        """The trials whose jobs have ended. One query to Slurm for all of them, every other second."""
        wait = min(max(0.0, self._asked + POLL_S - time.monotonic()), seconds)
        if wait >= seconds:
            time.sleep(seconds)
            return []
        time.sleep(wait)
        self._asked = time.monotonic()
        states = job_states()
        if states is None:  # the controller does not answer: jobs go on without it
            return []
        ends = []
        for number, each in list(self._running.items()):
            state = states.get(each.job, "")
            if state not in ENDED_STATES and state:
                continue
            end = self._end(each, state)
            if end is not None:
                del self._running[number]
                ends.append(end)
        return ends

    def _end(self, each: _Submitted, state: str) -> TrialEnd | None:
        """How a trial ended; None: another job continues it. `state`: empty if Slurm has forgotten the job."""
        trial, status = each.trial, read_status(each.trial.folder)
        number = trial.number
        code = status.get("exit_code") if status.get("job") in (each.job, None) else None
        if state == "COMPLETED" or (not state and code == ExitCode.DONE):
            return TrialEnd(number, ExitCode.DONE)
        if self._stops:
            return TrialEnd(number, ExitCode.STOPPED, "stopped with the search")
        if state in _LOST_STATES and each.attempts <= trial.config.launch.max_restarts:
            each.job, each.attempts = self._submit(trial), each.attempts + 1
            return None
        why = f"job {each.job}: {describe_end(state) if state else 'Slurm has forgotten how it ended'}"
        if state in ("FAILED", "") and code not in (None, ExitCode.DONE):
            return TrialEnd(number, int(code), str(status.get("reason") or why))
        return TrialEnd(
            number, ExitCode.FAILED, f"{why}; its output is in {trial.folder / 'slurm' / f'{each.job}.out'}"
        )

    def stop(self) -> None:
        """Running jobs save a checkpoint after their step; those that wait in the queue are cancelled."""
        self._stops = True
        states = job_states() or {}
        for each in self._running.values():
            if states.get(each.job) == "PENDING":
                run_slurm("scancel", str(each.job))
            else:
                each.trial.folder.mkdir(parents=True, exist_ok=True)
                (each.trial.folder / "stop").touch()

    def kill(self) -> None:
        """Cancel all jobs."""
        if self._running:
            run_slurm("scancel", *(str(each.job) for each in self._running.values()))

    def close(self) -> None:
        """Nothing: jobs that still run, after an error of the search, are found again when it is resumed."""


def job_states() -> dict[int, str] | None:
    """The state of each of this user's jobs that Slurm knows; None if it does not answer."""
    done = run_slurm("squeue", "--noheader", "--me", "--states=all", "--format=%A %T")
    if done.returncode != 0:
        return None
    return {int(job): state for job, state in (line.split() for line in done.stdout.splitlines() if line.strip())}
