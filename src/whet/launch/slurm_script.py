"""The sbatch script of a run: short, readable, and the user's to edit.

The batch shell waits for Slurm's warning, passes it on to the tasks, and queues the job again when they have saved. It
does that outside the container, where Slurm's commands are.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.core.errors import WhetError
from whet.launch.config import LaunchConfig, SlurmConfig

_WARNING_S = 300


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What a script is rendered from."""

    name: str
    folder: Path
    """Of the script and the log: RUN/slurm."""
    command: Sequence[str]
    """The arguments of whet, such as train CONFIG --resume."""
    launch: LaunchConfig
    is_training: bool = True
    """Runs on all nodes and is queued again; other verbs run once on one node."""
    array: int | None = None
    """How many jobs of an array run the command, each with its SLURM_ARRAY_TASK_ID."""


def render_script(job: SlurmJob) -> str:
    """The script, as text."""
    slurm = job.launch.slurm
    parts = [
        ["#!/bin/bash", *(f"#SBATCH {option}" for option in sbatch_options(job))],
        [f"module load {shlex.join(slurm.modules)}"] if slurm.modules else [],
        _variable_lines(job),
        slurm.setup,
        _training_lines(job) if job.is_training else [f"srun {_whet(job, job.command)}"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def sbatch_options(job: SlurmJob) -> list[str]:
    """The options of sbatch, as in its manual."""
    launch, slurm = job.launch, job.launch.slurm
    least, most = launch.node_range() if job.is_training else (1, 1)
    gpus = f"{slurm.gpu_type}:{launch.gpus}" if slurm.gpu_type else launch.gpus
    per_node = launch.gpus or launch.processes or 1
    tasks = per_node if slurm.tasks == "gpu" and job.is_training else 1
    cpus = slurm.cpus and slurm.cpus * (per_node // tasks if job.is_training else 1)
    warning = warning_seconds(slurm)
    values: dict[str, object] = {
        "job-name": job.name,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "nodes": least if least == most else f"{least}-{most}",
        "gpus-per-node": gpus,
        "ntasks-per-node": tasks,
        "cpus-per-task": cpus,
        "mem": slurm.memory,
        "time": slurm.time,
        "hint": slurm.hint,
        "constraint": slurm.constraint,
        "signal": f"B:USR1@{warning}" if slurm.time and job.is_training else None,
        "array": f"0-{job.array - 1}" if job.array else None,
        "output": f"{job.folder}/%{'A_%a' if job.array else 'j'}.out",
        "open-mode": "append",
    }
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if slurm.exclusive:
        options.append("--exclusive=user" if slurm.exclusive == "user" else "--exclusive")
    if job.is_training:
        options.append("--requeue" if slurm.max_requeues else "--no-requeue")
    return [*map(_quote_option, options), *slurm.options]


def _quote_option(option: str) -> str:
    name, _, value = option.partition("=")
    return f'{name}="{value}"' if " " in value else option


def warning_seconds(slurm: SlurmConfig) -> int:
    """How long before the time limit Slurm sends its warning; it may come up to a minute earlier."""
    if slurm.warning is not None:
        return slurm.warning
    return _WARNING_S if slurm.time is None else max(60, min(_WARNING_S, time_limit_seconds(slurm.time) // 4))


def time_limit_seconds(text: str) -> int:
    """Slurm's notation: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes(:seconds)."""
    days, dash, rest = text.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _variable_lines(job: SlurmJob) -> list[str]:
    """What must be in the environment, and where the nodes meet. Values of launch.env are not written down."""
    lines = [f': "${{{name}:?is not set}}"' for name in job.launch.env]
    if not job.is_training:
        return lines
    host = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    address = job.launch.rendezvous or f"{host}:$((20000 + SLURM_JOB_ID % 20000))"
    return [*lines, f"rendezvous={address}"]


def _training_lines(job: SlurmJob) -> list[str]:
    verb, *rest = job.command
    lines = []
    if job.launch.slurm.tasks == "node":
        nodes = ["launch.nodes=$SLURM_JOB_NUM_NODES", "launch.rendezvous=$rendezvous"]
        start = f"srun {_whet(job, ['launch', *rest, *nodes])}"
    else:
        lines = [
            "export MASTER_ADDR=${rendezvous%:*} MASTER_PORT=${rendezvous##*:}",
            "export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE",
        ]
        rank = 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"'
        start = f"srun --kill-on-bad-exit=1 bash -c '{rank}' task {_whet(job, [verb, *rest])}"
    lines += [
        "# Slurm warns the batch shell before the time limit; the run saves, stops with 75, and is queued again.",
        "trap 'warned=yes; kill -USR1 $tasks' USR1",
        f"{start} &",
        "tasks=$!",
        "while kill -0 $tasks 2> /dev/null; do wait $tasks; code=$?; done",
    ]
    limit = job.launch.slurm.max_requeues
    if limit:
        lines += [
            f'if [ "$warned" ] && [ $code -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {limit} ]; then',
            "    scontrol requeue $SLURM_JOB_ID",
            "fi",
        ]
    return [*lines, "exit $code"]


def _whet(job: SlurmJob, words: Sequence[str]) -> str:
    """The command line of whet, in the container if there is one. Words with a `$` are for the shell to expand."""
    slurm = job.launch.slurm
    python = slurm.python or ("python" if slurm.container else sys.executable)
    prefix: list[str] = []
    if slurm.container:
        binds = [f"--bind={','.join(slurm.binds)}"] if slurm.binds else []
        prefix = [_container_program(), "exec", *binds, *slurm.container_options, slurm.container]
    return " ".join([*map(_word, prefix), _word(python), "-m", "whet", *map(_word, words)])


def _word(text: str) -> str:
    return text if "$" in text and "'" not in text and " " not in text else shlex.quote(text)


def _container_program() -> str:
    return "apptainer" if shutil.which("apptainer") else "singularity"


def require_plain_paths(folder: Path) -> None:
    """Slurm expands % in the name of the log."""
    if "%" in str(folder) or " " in str(folder):
        raise WhetError(f"run.dir: {folder}: Slurm cannot take blanks or % in it. Give another folder: run.dir=FOLDER")
