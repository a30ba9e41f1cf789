"""What state a run is in, from its folder, its process and Slurm.

status.json says what the run wrote last. A process that was killed, a machine that is gone or a job that waits cannot
write; who owns the lock, how old the heartbeat is, and what Slurm knows of the jobs complete the picture.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core.heartbeat import format_age
from whet.core.run_folder import Owner
from whet.runs.slurm_states import FORGOTTEN, Job

_ENDED = ("finished", "stopped", "failed")
ACTIVE = ("queued", "starting", "running", "stopping", "stalled")
"""States in which a process or a job of the run exists."""
_SILENCE_S, _LONG_SILENCE_S = 120.0, 1800.0


@dataclass(frozen=True, slots=True)
class State:
    """A run's state, and what a user should know about it."""

    name: str
    note: str = ""

    @property
    def is_active(self) -> bool:
        return self.name in ACTIVE


def silence_limit(status: Mapping[str, Any], longest_gap_s: float) -> float:
    """How old a heartbeat may be. One is written with each step, and when an evaluation or a checkpoint begins, which
    take longer. Before the first step, the model is compiled; after the last one, it is exported."""
    step, steps = status.get("step") or 0, status.get("steps")
    if (
        step <= (status.get("step_offset") or 0)
        or (steps and step >= steps)
        or status.get("phase") in ("evaluating", "saving a checkpoint")
    ):
        return max(_LONG_SILENCE_S, 3 * longest_gap_s)
    return max(_SILENCE_S, 3 * longest_gap_s)


def derive_state(
    status: Mapping[str, Any], owner: Owner | None, folder: Path, job: Job | None, limit_s: float, now: float
) -> State:
    """`status`: the content of status.json, empty without one. `job`: the newest job that Slurm knows of this run.
    `limit_s`: how old a heartbeat may be."""
    written, beat = status.get("state"), float(status.get("heartbeat") or 0.0)
    is_new = owner is not None and owner.since > beat  # it has not written its status yet
    if written == "finished" and not is_new:
        return State("finished")
    alive = owner.is_alive(folder) if owner is not None else None
    if written == "finished" and not alive:
        return State("finished")
    if alive:
        assert owner is not None
        if is_new:
            return State("starting", f"started {format_age(now - owner.since)}; prepares data and loads the model")
        return _running(beat, limit_s, now, str(owner.host)) if written == "running" else State("stopping")
    if job is not None and job.is_active:
        return _state_of_job(status, owner, job, is_new, alive, limit_s, now)
    has_no_end = written == "running" or is_new
    if alive is False and has_no_end and owner is not None and owner.live_supervisor() is not None:
        return State("starting", "its process ended; whet launch restarts it")
    may_be_starting = alive is None and owner is not None and is_new and now - owner.since < _LONG_SILENCE_S
    if written in _ENDED and not may_be_starting:
        return State(str(written), str(status.get("reason") or ""))
    if not written and owner is None:
        return _without_traces(job)
    return _without_end(beat, owner, status, job, alive, is_new, limit_s, now)


def _running(beat: float, limit_s: float, now: float, host: str) -> State:
    if now - beat > limit_s:
        return State("stalled", f"last heartbeat on {host} {format_age(now - beat)}; `whet runs cancel` ends it")
    return State("running")


def _state_of_job(
    status: Mapping[str, Any],
    owner: Owner | None,
    job: Job,
    is_new: bool,
    alive: bool | None,
    limit_s: float,
    now: float,
) -> State:
    """A job waits or runs, and the process is not visible from here, or not yet there."""
    if job.is_queued:
        return State("queued", job.describe())
    if job.state == "COMPLETING" or (status.get("state") in _ENDED and status.get("job") == job.number and not is_new):
        return State("stopping", job.describe())
    owns = owner is not None and owner.job == job.number
    if owns and not is_new and status.get("state") == "running" and alive is None:
        return _running(float(status.get("heartbeat") or 0.0), limit_s, now, f"{status.get('host')} ({job.describe()})")
    return State("starting", job.describe())


def _without_traces(job: Job | None) -> State:
    """No process has worked in this folder."""
    if job is None:
        return State("incomplete", "no process has written here; delete the folder, or start the run again")
    return State("killed", f"{job.describe()}, before the run began; see `whet runs logs`")


def _without_end(
    beat: float, owner: Owner | None, status: Mapping[str, Any], job: Job | None, alive: bool | None, is_new: bool,
    limit_s: float, now: float,
) -> State:  # fmt: skip
    """The run has not written how it ended: its process was killed, or cannot be seen from here."""
    last = owner.since if is_new and owner is not None else beat
    host = owner.host if owner is not None else str(status.get("host") or "an unknown host")
    if job is not None and (job.state != FORGOTTEN or now - last > limit_s):
        return State("killed", f"{job.describe()}; `whet runs resume` continues it")
    if alive is False:
        return State("killed", f"its process on {host} is gone; `whet runs resume` continues it")
    if now - last <= (_LONG_SILENCE_S if is_new else limit_s):
        return State("starting" if is_new else "running")
    if host == socket.gethostname():  # another boot or container of this machine
        return State("killed", f"its process on {host} is gone; `whet runs resume` continues it")
    return State(
        "unreachable",
        f"{host} last wrote {format_age(now - last)}, and cannot be reached from here. If it is gone, `whet runs "
        "resume` continues the run",
    )
