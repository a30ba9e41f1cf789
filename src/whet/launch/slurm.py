"""Runs as Slurm jobs: submit, chain, follow to the end; warn where limits leave no time to save a checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.config import Config
from whet.core.console import info, warn
from whet.core.errors import ExitCode, WhetError
from whet.core.files import atomic_write, file_lock, hash_bytes, read_json, user_path
from whet.core.json_lines import append_json_line, read_json_lines
from whet.core.run_folder import read_status
from whet.launch.slurm_commands import ENDED_STATES, POLL_S, describe_end, job_record, job_state, run_slurm, sbatch
from whet.launch.slurm_script import SlurmJob, render_script, require_plain_paths, time_limit_seconds, warning_seconds

SCRIPT, RECIPE, JOBS = "job.sh", "recipe.yaml", "jobs.jsonl"


@dataclass(frozen=True, slots=True)
class Submitted:
    """The jobs of a launch: those of the run, then the one after it, if there is one."""

    jobs: tuple[int, ...]
    then: int | None
    script: Path


def job_of_run(config: Config, then: Sequence[str] | None = None, until: int | None = None) -> SlurmJob:
    """The job of a run, up to the step `until`, or of the command that follows it."""
    require_plain_paths(config.folder)
    folder, name = config.folder / "slurm", config.run.name or "whet"
    if then is not None:
        return SlurmJob(f"{name}-then", folder, tuple(then), config.launch, kind="verb")
    last = () if until is None else ("--until", str(until))
    return SlurmJob(name, folder, ("train", str(folder / RECIPE), "--resume", *last), config.launch)


def render_job(config: Config, until: int | None = None) -> str:
    """The script that would be submitted."""
    return render_script(job_of_run(config, until=until))


def submit_run(
    config: Config, chain: int = 1, then: str | None = None, resume: bool = False, until: int | None = None,
    warns: bool = True,
) -> Submitted:  # fmt: skip
    """Write RUN/slurm/job.sh and submit it, `chain` times one after the other, then the command `then`: all of them, or
    none. `warns`: of what defeats the run's survival."""
    require_submittable(config, resume)
    env = config.launch.required_variables()
    job = job_of_run(config, until=until)
    for problem in cluster_problems(config, chain):
        if warns:
            warn(problem)
    jobs: list[int] = []
    with file_lock(
        job.folder / "submitting"
    ):  # of two chains into one folder, submitted at once, the second is refused
        require_submittable(config, resume)
        script = write_script(job.folder / SCRIPT, render_script(job))
        atomic_write(job.folder / RECIPE, config.dump().encode())
        try:
            for _ in range(chain):
                after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
                jobs.append(sbatch([*after, str(script)], env))
            if then is not None:
                words = [word.replace("{run}", str(config.folder)) for word in shlex.split(then)]
                then_script = write_script(job.folder / "then.sh", render_script(job_of_run(config, words)))
                jobs.append(sbatch([f"--dependency=afterok:{jobs[-1]}", str(then_script)], env))
        except WhetError:
            if jobs:
                run_slurm("scancel", *map(str, jobs))
            raise
        for number, name in zip(jobs, [SCRIPT] * chain + ["then.sh"], strict=False):
            append_json_line(job.folder / JOBS, {"job": number, "submitted": time.time(), "script": name})
    return Submitted(tuple(jobs[:chain]), jobs[chain] if then is not None else None, script)


def require_submittable(config: Config, resume: bool) -> None:
    """Refuse a folder with another run, and a run that is queued or running already."""
    folder = config.folder
    if (folder / "config.yaml").exists() and not resume:
        raise WhetError(
            f"{folder}: this folder holds a run already. Continue it with --resume, or give the new run another "
            "folder: run.dir=FOLDER"
        )
    waiting = [each["job"] for each in read_json_lines(folder / "slurm" / JOBS)[0]]
    active = [number for number in waiting if job_state(number) not in (None, *ENDED_STATES)]
    if active:
        raise WhetError(
            f"{folder}: job {', '.join(map(str, active))} of this run is queued or running. Wait for it, or cancel it: "
            f"scancel {' '.join(map(str, active))}"
        )


def write_script(path: Path, text: str) -> Path:
    """Write a script; one that its user has edited stays."""
    record = path.with_suffix(".hash")
    if path.exists() and (not record.exists() or record.read_text() != hash_bytes(path.read_bytes())):
        raise WhetError(f"{path} was edited. Submit it yourself (sbatch {path}), or delete it: whet writes a new one")
    atomic_write(path, text.encode())
    path.chmod(0o755)
    atomic_write(record, hash_bytes(text.encode()).encode())
    return path


def follow_run(folder: Path, jobs: Sequence[int]) -> tuple[int, str]:
    """Wait for the last of the jobs; returns the run's exit code and how the job ended."""
    shown, state, fields = "", "COMPLETED", dict[str, str]()
    for job in jobs:
        while True:
            fields = job_record(job)
            state = fields.get("JobState", "COMPLETED")
            if state in ENDED_STATES or not fields:
                break
            status = read_status(folder) if state == "RUNNING" else {}
            reason = f" ({fields['Reason']})" if state == "PENDING" and fields.get("Reason", "None") != "None" else ""
            steps = f", step {status['step']} of {status['steps']}" if status else ""
            line = f"job {job}: {state.lower()}{reason}{steps}"
            if line != shown:
                info(line)
                shown = line
            time.sleep(POLL_S)
    status = read_status(folder)
    code = status.get("exit_code")
    if code == ExitCode.DONE or (state == "COMPLETED" and code is not None):
        return int(code), str(status.get("reason") or status["state"])
    ended_with = int(fields.get("ExitCode", "0:0").split(":")[0])
    if code == ended_with == ExitCode.STOPPED:  # which is a failure to Slurm
        return int(code), str(status.get("reason") or status["state"])
    output = folder / "slurm" / f"{jobs[-1]}.out"
    if output.exists():
        reason = f"job {jobs[-1]}: {describe_end(state)}; its output is in {output}. Continue it with --resume"
    elif state == "CANCELLED":
        reason = f"job {jobs[-1]}: it was cancelled before it began. Submit it again, with --resume if the run exists"
    else:
        reason = (
            f"job {jobs[-1]}: {describe_end(state)} without output: its first node could not write {output}. Give a "
            "folder that all nodes share: run.dir=FOLDER"
        )
    return int(code or ended_with or ExitCode.FAILED), reason


# What defeats a run's survival.


def cluster_problems(config: Config, chain: int) -> list[str]:
    """Settings of the job or of the cluster with which a run would not survive its time limit or a preemption. Raises
    where nothing could be saved at all."""
    slurm, save = config.launch.slurm, find_save_time(config)
    require_time_to_save(config, save)
    done = run_slurm("scontrol", "show", "config")
    if done.returncode != 0:
        raise WhetError(f"--on slurm: the cluster does not answer ({done.stderr.strip()}). Is slurmctld up?")
    found = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", done.stdout, re.MULTILINE))
    problems: list[str] = []
    if slurm.time is None:
        problems.append("launch.slurm.time is not set, so Slurm gives no warning before the partition's limit")
    elif time_limit_seconds(slurm.time) < warning_seconds(slurm) + 120:
        problems.append(
            f"launch.slurm.time: {slurm.time} is {time_limit_seconds(slurm.time)} s, and the last "
            f"{warning_seconds(slurm)} s are for saving (launch.slurm.warning): too little is left for training. Give "
            "more time"
        )
    preempts, kill_wait = found.get("PreemptMode", "OFF").upper(), found.get("KillWait", "30 sec")
    if "REQUEUE" in preempts and "send_user_signal" not in found.get("PreemptParameters", ""):
        problems.append(
            f"this cluster preempts jobs (PreemptMode={preempts}) and gives them {kill_wait} to end (KillWait): a run "
            "that cannot save in that time continues from its newest checkpoint. Set checkpoint.minutes"
        )
    problems += save_problems(config, save, float((re.findall(r"\d+", kill_wait) or ["30"])[0]))
    if "CANCEL" in preempts and chain == 1:
        problems.append("this cluster cancels the jobs that it preempts instead of queueing them again. Use --chain")
    return problems


# How long a checkpoint takes, and whether the job's limits leave that much time to save.

_BYTES_PER_S = 1e9
"""That a node writes, where nothing has been measured."""
_TRAINED, _ADAPTER = 7.0, 0.1
"""Size of a checkpoint in units of the model's 16-bit weight files: weights and two optimizer states in 32 bits beside
the 16-bit weights, or those of an adapter."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, slots=True)
class SaveTime:
    """Seconds that a checkpoint takes."""

    seconds: float
    is_measured: bool

    def __str__(self) -> str:
        how = "like the last ones of this run" if self.is_measured else "estimated from the model's size, at 1 GB/s"
        return f"{max(1, round(self.seconds))} s ({how})"


def find_save_time(config: Config) -> SaveTime | None:
    """As measured by earlier checkpoints of the run, else an estimate; None where the model is not on this machine."""
    measured = []
    for file in config.folder.glob("checkpoints/step-*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, WhetError, AttributeError):  # resuming will say what is wrong
            seconds = read_json(file).get("save_s")
            if isinstance(seconds, int | float) and 0 < seconds < math.inf:
                measured.append(float(seconds))
    if measured:
        return SaveTime(max(measured), is_measured=True)
    size = sum(file.stat().st_size for pattern in _WEIGHT_FILES for file in _model_folder(config).glob(pattern))
    if not size:
        return None
    nodes, _ = config.launch.node_range()
    share = _ADAPTER if config.adapter is not None else _TRAINED
    return SaveTime(size * share / (_BYTES_PER_S * nodes), is_measured=False)


def _model_folder(config: Config) -> Path:
    """Where the weight files are, also in the hub's cache; it need not exist."""
    folder = user_path(config.model.path)
    if folder.is_dir() or config.model.path.count("/") != 1:
        return folder
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{config.model.path.replace('/', '--')}"
    return max(kept.glob("snapshots/*"), key=lambda each: each.stat().st_mtime, default=kept)


def require_time_to_save(config: Config, save: SaveTime | None) -> None:
    """Refuse a job that would end before a checkpoint is written."""
    limit = config.launch.slurm.time
    if limit is not None and save is not None and time_limit_seconds(limit) <= save.seconds:
        raise WhetError(
            f"launch.slurm.time: {limit} is {time_limit_seconds(limit)} s, and a checkpoint takes {save}: the job "
            "would end before it has saved anything. Give more time"
        )


def save_problems(config: Config, save: SaveTime | None, kill_wait_s: float) -> list[str]:
    """Limits that are shorter than a checkpoint."""
    slurm = config.launch.slurm
    if save is None:
        return []
    problems = []
    if slurm.time is not None and save.seconds > 0.75 * warning_seconds(slurm):
        problems.append(
            f"a checkpoint takes {save}, and Slurm warns {warning_seconds(slurm)} s before the time limit: what was "
            f"trained since the previous checkpoint may be lost. Set launch.slurm.warning={_round_up(2 * save.seconds)}"
        )
    if save.seconds > kill_wait_s:
        problems.append(
            f"a checkpoint takes {save}, and a job that is cancelled or preempted has {kill_wait_s:g} s to end "
            f"(KillWait): it would continue from an older one. Stop it with `touch {config.folder / 'stop'}`, and set "
            "checkpoint.minutes to what you can lose"
        )
    return problems


def _round_up(seconds: float) -> int:
    return max(60, math.ceil(seconds / 60) * 60)
