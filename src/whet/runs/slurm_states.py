"""The Slurm jobs of runs: the states of many at once, from squeue and sacct."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.launch.slurm_commands import SlurmUnavailableError, run_slurm

COMMAND_S = 20.0
"""How long `whet runs` waits for an answer of Slurm."""
_ACTIVE = (
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
    "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD",
)  # fmt: skip
FORGOTTEN = "FORGOTTEN"
"""The state of a job that Slurm no longer knows, or never did: it may be one of another cluster."""
_QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


@dataclass(frozen=True, slots=True)
class Job:
    """A job that Slurm knows."""

    number: int
    state: str
    """Such as PENDING or COMPLETED."""
    reason: str
    """Why it waits; empty if it does not."""
    nodes: str
    script: str
    """The script it runs; empty where only the accounting knows the job."""

    @property
    def is_active(self) -> bool:
        return self.state in _ACTIVE

    @property
    def is_queued(self) -> bool:
        return self.state in _QUEUED

    def runs_script(self, script: Path) -> bool:
        """Whether it is the job of this script. A cluster that was set up anew gives the same numbers to other jobs."""
        return not self.script or os.path.realpath(self.script) == os.path.realpath(script)

    def describe(self) -> str:
        """Such as `job 12: pending (Priority)`."""
        if self.state == FORGOTTEN:
            return f"job {self.number}: Slurm no longer knows it"
        return f"job {self.number}: {self.state.lower()}" + (f" ({self.reason})" if self.reason else "")


def query_jobs(numbers: Iterable[int]) -> dict[int, Job]:
    """What Slurm tells about these jobs: squeue first, then sacct, where a site keeps accounts. A job that both have
    forgotten is missing. Raises SlurmUnavailableError."""
    wanted = sorted(set(numbers))
    if not wanted:
        return {}
    found: dict[int, Job] = {}
    for part in _parts(wanted):
        done = run_slurm(
            "squeue", "--noheader", "--all", "--states=all", f"--jobs={part}", "--format=%A|%T|%r|%N|%o",
            timeout_s=COMMAND_S,
        )  # fmt: skip
        if done.returncode != 0 and "Invalid job id" not in done.stderr:
            raise SlurmUnavailableError(f"squeue failed ({_first_line(done.stderr)})", "Is slurmctld up?")
        for fields in _rows(done.stdout, 5):
            number, state, reason, nodes, script = fields
            found[int(number)] = Job(int(number), state, "" if reason == "None" else reason, nodes, script)
    for part in _parts([number for number in wanted if number not in found]):
        try:
            done = run_slurm(
                "sacct", "--noheader", "--parsable2", "-X", f"--jobs={part}", "--format=JobIDRaw,State,NodeList",
                timeout_s=COMMAND_S,
            )  # fmt: skip
        except SlurmUnavailableError:  # not every site has it
            break
        for number, state, nodes in _rows(done.stdout, 3):
            found[int(number)] = Job(int(number), state.split()[0] if state else "UNKNOWN", "", nodes, "")
    return found


def _parts(numbers: Sequence[int]) -> list[str]:
    """Comma-separated lists of at most 1000 jobs: a command line has a limit."""
    return [",".join(map(str, numbers[start : start + 1000])) for start in range(0, len(numbers), 1000)]


def _rows(text: str, count: int) -> list[list[str]]:
    rows = [line.split("|", count - 1) for line in text.splitlines()]
    return [row for row in rows if len(row) == count and row[0].isdecimal()]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
