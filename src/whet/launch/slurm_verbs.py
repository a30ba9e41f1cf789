"""Verbs and programs as Slurm jobs: submit one, or an array with a job that merges; follow them to their exit code."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from whet.core.console import info
from whet.core.errors import ExitCode, WhetError
from whet.core.files import resolve_path
from whet.core.json_lines import append_json_line
from whet.launch.config import LaunchConfig
from whet.launch.slurm import JOBS, write_script
from whet.launch.slurm_commands import ENDED_STATES, POLL_S, describe_end, run_slurm, sbatch, task_records
from whet.launch.slurm_script import ShellText, SlurmJob, render_script, require_plain_paths


def job_folder(name: str) -> Path:
    """Where a job's script and output go: jobs/NAME, beside runs/."""
    folder = resolve_path(Path("jobs") / name)
    require_plain_paths(folder, "Start whet in another folder: it keeps scripts and output in jobs/")
    return folder


def plain_name(*parts: str) -> str:
    """A name for a job and its folder."""
    return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part), flags=re.ASCII).strip("-.") or "job"


def without_gpus(launch: LaunchConfig) -> LaunchConfig:
    """The settings for work on CPU cores: as many as a node of a run would have, and no GPU."""
    slurm, per_node = launch.slurm, launch.gpus or launch.processes or 1
    cores = None if slurm.cpus is None else slurm.cpus * per_node
    return launch.model_copy(update={"gpus": None, "slurm": slurm.model_copy(update={"cpus": cores, "gpu_type": None})})


def shard_jobs(name: str, command: Sequence[str], launch: LaunchConfig, shards: int) -> tuple[SlurmJob, SlurmJob]:
    """An array of jobs, each of which makes one shard, and the job that merges them. `command`: `prepare` with its
    arguments."""
    folder = job_folder(name)
    shard = ("--shard", ShellText(f"$SLURM_ARRAY_TASK_ID/{shards}"))
    array = SlurmJob(name, folder, (*command, *shard), launch, kind="verb", array=shards)
    return array, SlurmJob(f"{name}-merge", folder, (*command, "--merge"), launch, kind="verb")


def submit_jobs(jobs: Sequence[SlurmJob]) -> list[int]:
    """Write the scripts into the jobs' folder, submit all of them or none, and record their numbers. Each starts when
    the one before has succeeded, and is cancelled if it has failed."""
    submitted: list[int] = []
    env = jobs[0].launch.required_variables()
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        script = write_script(job.folder / script_name(job), render_script(job))
        after = [f"--dependency=afterok:{submitted[-1]}", "--kill-on-invalid-dep=yes"] if submitted else []
        try:
            submitted.append(sbatch([*after, str(script)], env))
        except WhetError:
            if submitted:
                run_slurm("scancel", *map(str, submitted))
            raise
        append_json_line(job.folder / JOBS, {"job": submitted[-1], "submitted": time.time(), "script": script.name})
    return submitted


def script_name(job: SlurmJob) -> str:
    """Of the script in the job's folder."""
    return f"{job.name}.sh"


def follow_jobs(jobs: Sequence[int], folder: Path) -> tuple[int, str]:
    """Wait for the jobs, one after the other; returns the exit code and the end of the first task that failed, or of
    the last job."""
    shown = ""
    for job in jobs:
        while True:
            tasks = task_records(job)
            ended = [task for task in tasks if task["JobState"] in ENDED_STATES]
            if len(ended) == len(tasks):
                break
            line = f"job {job}: {_describe_tasks(tasks)}"
            if line != shown:
                info(line)
                shown = line
            time.sleep(POLL_S)
        if not tasks:
            return ExitCode.FAILED, f"job {job}: Slurm has forgotten how it ended; its output is in {folder}"
        for task in tasks:
            if task["JobState"] != "COMPLETED":
                code = _exit_code(task)
                end = f"exit code {code}" if task["JobState"] == "FAILED" else describe_end(task["JobState"])
                return code, f"job {_task_name(task)}: {end}; its output is in {task.get('StdOut', folder)}"
    return ExitCode.DONE, f"job {jobs[-1]}: completed; its output is in {tasks[-1].get('StdOut', folder)}"


def _describe_tasks(tasks: Sequence[dict[str, str]]) -> str:
    if len(tasks) > 1:
        states = [task["JobState"].lower() for task in tasks]
        return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    [task] = tasks
    waits = task["JobState"] == "PENDING" and task.get("Reason", "None") != "None"
    return task["JobState"].lower() + (f" ({task['Reason']})" if waits else "")


def _task_name(task: dict[str, str]) -> str:
    return f"{task['ArrayJobId']}_{task['ArrayTaskId']}" if "ArrayTaskId" in task else task["JobId"]


def _exit_code(task: dict[str, str]) -> int:
    """The exit code of the command, as a shell has it; 3 where Slurm has ended it."""
    code, _, number = task.get("ExitCode", "0:0").partition(":")
    if task["JobState"] != "FAILED" or not (int(code) or int(number)):
        return ExitCode.FAILED
    return int(code) or 128 + int(number)
