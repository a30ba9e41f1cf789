"""The command that starts a job's processes on this machine."""

from __future__ import annotations

import shlex
import sys

from whet.fleet.job import Job

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What torchrun passes on to its processes. Without SIGUSR1 in it, Slurm's warning kills torchrun and orphans them."""


def command(job: Job, resume: bool) -> list[str]:
    """One process is started as it is; several by torchrun, which restarts nothing: it knows neither growing waits nor
    failures that repeat."""
    train = ["whet", "train", str(job.recipe), *job.overrides]
    train += ["--resume"] * resume + ["--quiet"] * job.quiet
    if job.nodes * job.processes == 1:
        return [sys.executable, "-m", *train]
    return [
        sys.executable, "-m", "whet.fleet.agent", *_meeting(job), "--nproc-per-node", str(job.processes),
        "--max-restarts", "0", "--signals-to-handle", _SIGNALS, "-m", *train,
    ]  # fmt: skip


def _meeting(job: Job) -> list[str]:
    if job.meeting is None:
        return ["--standalone", "--nnodes", "1"]
    return [
        "--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", job.meeting.endpoint, "--rdzv-id",
        job.name, "--rdzv-conf", f"is_host={str(job.meeting.is_host).lower()}", "--local-addr", job.meeting.address,
    ]  # fmt: skip


def shown(job: Job, resume: bool) -> str:
    """As one would type it."""
    set_first = ["env", *(f"{name}={value}" for name, value in job.env.items())] if job.env else []
    return shlex.join([*set_first, *command(job, resume)])
