"""One line about a run: state, progress, loss, speed, where it runs; from its files, its process and Slurm."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whet.core.json_lines import read_json_lines
from whet.core.run_folder import Owner
from whet.launch.slurm_commands import SlurmUnavailableError
from whet.runs.facts import RunFacts, read_all_facts
from whet.runs.slurm_states import FORGOTTEN, Job, query_jobs
from whet.runs.state import State, derive_state, silence_limit

_SCRIPT = "job.sh"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in a line."""

    name: str
    folder: Path
    state: State
    facts: RunFacts
    jobs: tuple[Job, ...]
    """All of its jobs, oldest first, if Slurm answers; what follows a run (--then) is one of them."""
    job: int | None
    """The Slurm job that runs it, will run it, or ran it last."""
    problems: tuple[str, ...]

    @property
    def owner(self) -> Owner | None:
        return self.facts.owner

    @property
    def active_jobs(self) -> list[Job]:
        return [job for job in self.jobs if job.is_active]

    @property
    def was_submitted(self) -> bool:
        """Whether it is a run of Slurm's."""
        return (self.folder / "slurm" / "jobs.jsonl").exists()

    @property
    def step(self) -> int | None:
        """Finished steps: the file that is ahead knows."""
        known = (self.facts.status.get("step"), self.facts.step)
        return max((step for step in known if step is not None), default=None)

    @property
    def steps(self) -> int | None:
        return self.facts.status.get("steps")

    @property
    def progress(self) -> float | None:
        """The share of its steps that the run has finished; None if it is not known."""
        offset = self.facts.status.get("step_offset") or 0
        if self.step is None or self.steps is None or self.steps <= offset:
            return None
        return (self.step - offset) / (self.steps - offset)

    @property
    def host(self) -> str | None:
        """Of the process that worked on it last."""
        return self.owner.host if self.owner is not None else self.facts.status.get("host")

    @property
    def last_sign(self) -> float | None:
        """When the run wrote last that it lives."""
        times = (self.facts.status.get("heartbeat"), self.owner.since if self.owner is not None else None)
        return max((each for each in times if each), default=None)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        facts = self.facts
        return {
            "name": self.name, "folder": str(self.folder), "project": facts.project, "state": self.state.name,
            "note": self.state.note, "step": self.step, "steps": self.steps, "progress": self.progress,
            "loss": facts.loss, "best": facts.best,
            "best_metric": facts.best_metric, "tokens_per_s": facts.tokens_per_s,
            "tokens": facts.tokens, "device_hours": facts.device_hours, "tags": list(facts.tags),
            "started": facts.status.get("started"), "heartbeat": facts.status.get("heartbeat"),
            "exit_code": facts.status.get("exit_code"), "host": self.host,
            "pid": self.owner.pid if self.owner is not None else None, "job": self.job,
            "jobs": [asdict(job) for job in self.jobs], "problems": list(self.problems),
        }  # fmt: skip


def summarize_run_folder(folder: Path) -> RunSummary:
    """The summary of one run."""
    return summarize_run_folders([folder])[0]


def summarize_run_folders(
    folders: Sequence[Path], root: Path | None = None, seconds: float | None = None
) -> list[RunSummary]:
    """The summaries of many runs, with one question to Slurm about all of their jobs. With `root`, the folder that they
    are in, names are relative to it, and an index saves reading what has not changed; what takes longer than `seconds`
    to read lacks its best value."""
    facts = read_all_facts(folders, root, seconds)
    submitted = [_submitted_jobs(*each) for each in zip(folders, facts, strict=True)]
    # in a list, the jobs of finished runs are history: an old cluster has thousands
    queried = [{} if root is not None and read.status.get("state") == "finished" else jobs
               for read, jobs in zip(facts, submitted, strict=True)]  # fmt: skip
    known: Mapping[int, Job] = {}
    problem = None
    try:
        known = query_jobs(number for jobs in queried for number in jobs)
    except SlurmUnavailableError as error:
        problem = f"what became of its jobs is not known: {error.reason}. Use a login node of the cluster"
    found = []
    for folder, read, numbers, wanted in zip(folders, facts, submitted, queried, strict=True):
        jobs = [] if problem else [_match_job(known, number, script) for number, script in wanted.items()]
        name = str(folder.relative_to(root)) if root is not None and folder != root else _base_name(folder)
        problems = (*read.problems, *([problem] if problem and wanted else []))
        found.append(_summarize(name, folder, read, jobs, list(numbers), problems))
    return found


def _match_job(known: Mapping[int, Job], number: int, script: Path) -> Job:
    """What Slurm tells about a job of this script. A cluster that was set up anew gives its number to others."""
    job = known.get(number)
    return job if job is not None and job.runs_script(script) else Job(number, FORGOTTEN, "", "", str(script))


def _base_name(folder: Path) -> str:
    return folder.name if folder.name not in ("", "..") else os.path.basename(os.path.realpath(folder))  # noqa: PTH119


def _summarize(
    name: str, folder: Path, facts: RunFacts, jobs: Sequence[Job], submitted: Sequence[int], problems: tuple[str, ...]
) -> RunSummary:
    training = [job for job in jobs if Path(job.script).name in ("", _SCRIPT)]
    job = next((each for each in training if each.is_active), training[-1] if training else None)
    limit = silence_limit(facts.status, facts.longest_gap_s)
    state = derive_state(facts.status, facts.owner, folder, job, limit, time.time())
    if not facts.is_readable:
        state = State("unreadable")
    elif not facts.status and (folder / "status.json").exists() and not state.is_active:
        state = State("unknown", "status.json is damaged, so how the run ended is not known")
    last = facts.status.get("job") or next(iter(reversed(submitted)), None)
    return RunSummary(name, folder, state, facts, tuple(jobs), job.number if job is not None else last, problems)


def _submitted_jobs(folder: Path, facts: RunFacts) -> dict[int, Path]:
    """The jobs that `whet launch` submitted, or that the run was in, each with its script; oldest first."""
    slurm = folder / "slurm"
    if not os.path.exists(slurm):  # noqa: PTH110 - for each of a thousand runs
        return {}
    lines, _ = read_json_lines(slurm / "jobs.jsonl")
    jobs = {
        each["job"]: slurm / str(each.get("script") or _SCRIPT)
        for each in lines
        if isinstance(each.get("job"), int) and not isinstance(each["job"], bool)
    }
    if facts.owner is not None and facts.owner.job is not None:
        jobs.setdefault(facts.owner.job, slurm / _SCRIPT)  # the script was submitted by hand
    return jobs
