"""Slurm's commands: run one, submit a script, tell the state of a job."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from whet.core.errors import WhetError

POLL_S = 2.0
ENDED_STATES = (
    "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
)  # fmt: skip

_NEVER = re.compile(
    "PartitionNodeLimit|PartitionTimeLimit|PartitionConfig|BadConstraints|PartitionInactive|InvalidAccount|InvalidQOS"
    "|can't_use_this_partition"
)
"""Why Slurm keeps a job in its queue that it will not start as things are."""
_REFUSALS = {
    r"invalid ?account|account_not|account.*partition": (
        "launch.slurm.account", "`sacctmgr show associations user=$USER` lists yours",
    ),
    r"invalid partition|use_this_partition": ("launch.slurm.partition", "`sinfo -s` lists the partitions"),
    r"invalid ?qos": ("launch.slurm.qos", "`sacctmgr show qos` lists them"),
    r"time ?limit": ("launch.slurm.time", "`sinfo -o '%P %l'` shows the limit of each partition"),
    r"feature|BadConstraints": ("launch.slurm.constraint", "`sinfo -o '%P %f'` shows the features of nodes"),
    r"node count|too many nodes|PartitionNodeLimit": ("launch.nodes", "`sinfo -s` shows how many nodes there are"),
    r"PartitionInactive|PartitionConfig": ("launch.slurm.partition", "`scontrol show partition` shows its limits"),
    r"node configuration|generic resource|gres": (
        "launch.gpus, launch.slurm.cpus or launch.slurm.memory", "`sinfo -o '%P %D %c %m %G'` shows what nodes have",
    ),
}  # fmt: skip


class SlurmUnavailableError(WhetError):
    """Slurm cannot be used here. `reason`: why; the message adds what who launches a job can do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"--on slurm: {reason}. {remedy}")
        self.reason = reason


def run_slurm(
    program: str, *arguments: str, env: Mapping[str, str] = MappingProxyType({}), timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises SlurmUnavailableError where there is none, or no answer."""
    try:
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", check=False, timeout=timeout_s,
            env={**_plain_output(), **env},
        )  # fmt: skip
    except OSError:
        raise SlurmUnavailableError(
            f"{program} is not installed here",
            "Run this on a login node of the cluster; --dry-run prints the script anywhere",
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailableError(f"{program} did not answer within {timeout_s:g} s", "Is slurmctld up?") from None


def _plain_output() -> dict[str, str]:
    """Without what changes the output or the options of Slurm's commands."""
    changing = ("SQUEUE_", "SBATCH_", "SINFO_", "SACCT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(changing)}


def sbatch(arguments: Sequence[str], env: Mapping[str, str] = MappingProxyType({})) -> int:
    """Submit a script; returns the job's number. A job that would wait forever is refused too. `env`: variables for the
    job, which has the environment of whoever submits it."""
    done = run_slurm("sbatch", "--parsable", *arguments, env=env)
    if done.returncode == 0:
        job = int(done.stdout.strip().split(";")[0].splitlines()[-1])
        reason = _pending_reason(job)
        if not _NEVER.search(reason):
            return job
        run_slurm("scancel", str(job))
    else:
        reason = done.stderr.strip().removeprefix("sbatch: error: ")
    for pattern, (key, remedy) in _REFUSALS.items():
        if re.search(pattern, reason, re.IGNORECASE):
            raise WhetError(f"{key}: Slurm refused the job ({reason}). {remedy}")
    raise WhetError(f"Slurm refused the job: {reason}")


def _pending_reason(job: int) -> str:
    """Why a new job waits, as far as the scheduler tells within two seconds."""
    for _ in range(10):
        fields = job_record(job)
        if fields.get("JobState") != "PENDING" or fields.get("Reason") not in ("None", "PartitionConfig"):
            break
        time.sleep(0.2)
    return fields.get("Reason", "")


def task_records(job: int) -> list[dict[str, str]]:
    """What `scontrol show job` tells of a job, or of each task of an array; tasks that wait are one record."""
    done = run_slurm("scontrol", "show", "job", str(job), "--oneliner")
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    records = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    return sorted(
        (record for record in records if "JobState" in record),
        key=lambda record: int(re.match(r"\d*", record.get("ArrayTaskId", ""))[0] or 0),  # type: ignore[index]
    )


def job_record(job: int) -> dict[str, str]:
    """What `scontrol show job` tells of a job that is no array; empty for one that Slurm has forgotten."""
    return next(iter(task_records(job)), {})


def job_state(job: int) -> str | None:
    """Such as PENDING or COMPLETED; None for a job that Slurm has forgotten."""
    return job_record(job).get("JobState")


def describe_end(state: str) -> str:
    """Why Slurm has ended a job."""
    reasons = {
        "NODE_FAIL": "a node failed", "TIMEOUT": "its time limit ended it", "CANCELLED": "it was cancelled",
        "OUT_OF_MEMORY": "it used more memory than launch.slurm.memory", "PREEMPTED": "it was preempted",
    }  # fmt: skip
    return reasons.get(state, state.lower())
