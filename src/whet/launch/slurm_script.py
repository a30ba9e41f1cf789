"""The sbatch script of a run, a program or a verb: short, readable, and the user's to edit.

The batch shell waits for Slurm's warning, passes it on to the tasks, and queues the job again when they have saved. It
does that outside the container, where Slurm's commands are.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.core.errors import WhetError
from whet.launch.config import LaunchConfig, SlurmConfig
from whet.launch.log_policies import EXCLUDED_VARIABLE
from whet.launch.supervise import GIVEN_UP_VARIABLE

_WARNING_S = 300
_LINE_LENGTH = 120
_RESTARTS = '[ "${SLURM_RESTART_COUNT:-0}"'


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What a script is rendered from."""

    name: str
    folder: Path
    """Of the script and the log: RUN/slurm."""
    command: Sequence[str]
    """The arguments of whet, such as train CONFIG --resume, or the words of a program."""
    launch: LaunchConfig
    kind: Literal["run", "program", "verb", "module"] = "run"
    """A run is on all nodes, is warned and queued again. A program is on all nodes. Other verbs, and modules such as
    whet.launch.notebook, run once on one node."""
    array: int | None = None
    """How many jobs of an array run the command, each with its SLURM_ARRAY_TASK_ID."""

    @property
    def on_all_nodes(self) -> bool:
        return self.kind in ("run", "program")

    @property
    def excludes_nodes(self) -> bool:
        """Whether a log policy may have the job queued again without a node."""
        policies = self.launch.log_policies
        can_requeue = self.on_all_nodes and self.launch.slurm.max_requeues > 0
        return can_requeue and any(each.action == "exclude_node" for each in policies)

    @property
    def is_warned(self) -> bool:
        """Slurm's warning would kill a program that does not know it: only where launch.slurm.warning is set."""
        slurm = self.launch.slurm
        return slurm.time is not None and (self.kind == "run" or (self.kind == "program" and slurm.warning is not None))


class ShellText(str):
    """A word of a command that the shell expands."""


def render_script(job: SlurmJob) -> str:
    """The script, as text."""
    options = [*map(_quote_option, sbatch_options(job)), *job.launch.slurm.options]
    parts = [
        ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)],
        *_setup_parts(job),
        _training_lines(job) if job.on_all_nodes else [_wrap(_srun(job, []), _command_line(job))],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def srun_command(job: SlurmJob) -> list[str]:
    """srun with the settings of the script, for a command in the user's terminal."""
    lines = [line for part in _setup_parts(job, in_terminal=True) for line in part]
    slurm = job.launch.slurm
    options = [option for each in (*slurm.options, *slurm.srun_options) for option in shlex.split(each)]
    script = "\n".join([*lines, f"exec {_command_line(job)}"])
    return ["srun", *sbatch_options(job, in_terminal=True), *options, "--pty", "bash", "-c", script]


def _setup_parts(job: SlurmJob, in_terminal: bool = False) -> list[list[str]]:
    modules, setup = job.launch.slurm.modules, job.launch.slurm.setup
    nodes = _node_lines(job) if job.on_all_nodes and not in_terminal else []
    # values of launch.env are not written down
    variables = [f': "${{{name}:?is not set}}"' for name in job.launch.env]
    return [[f"module load {shlex.join(modules)}"] if modules else [], [*variables, *nodes], setup]


def sbatch_options(job: SlurmJob, in_terminal: bool = False) -> list[str]:
    """The options of sbatch, or of srun in a terminal, as in their manuals; without launch.slurm.options."""
    launch, slurm = job.launch, job.launch.slurm
    least, most = launch.node_range() if job.on_all_nodes else (1, 1)
    is_range = least != most
    gpus = f"{slurm.gpu_type}:{launch.gpus}" if slurm.gpu_type else launch.gpus
    per_node = launch.gpus or launch.processes or 1
    tasks = per_node if slurm.tasks == "gpu" and job.on_all_nodes else 1
    cpus = slurm.cpus and slurm.cpus * (per_node // tasks if job.on_all_nodes else 1)
    values: dict[str, object] = {
        "job-name": job.name,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "nodes": f"{least}-{most}" if is_range else least,
        "gpus-per-node": gpus,
        # of a range, Slurm would take only as many nodes as the tasks of the least need: srun has the number of tasks
        "ntasks-per-node": None if is_range else tasks,
        "mincpus": tasks * (cpus or 1) if is_range and tasks > 1 else None,
        "cpus-per-task": cpus,
        "mem": slurm.memory,
        "time": slurm.time,
        "hint": slurm.hint,
        "constraint": slurm.constraint,
    }
    if not in_terminal:
        values |= {
            "signal": f"B:USR1@{warning_seconds(slurm)}" if job.is_warned else None,
            "array": f"0-{job.array - 1}" if job.array else None,
            "chdir": Path.cwd(),  # paths may be relative, and the script may be submitted again from elsewhere
            "output": f"{job.folder}/%{'A_%a' if job.array else 'j'}.out",
            "open-mode": "append",
        }
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if slurm.exclusive:
        options.append("--exclusive=user" if slurm.exclusive == "user" else "--exclusive")
    if job.kind == "run" or job.excludes_nodes:
        options.append("--requeue" if slurm.max_requeues else "--no-requeue")
    return options


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


def _node_lines(job: SlurmJob) -> list[str]:
    """Where the nodes meet, and which ones to leave out the next time."""
    if job.launch.rendezvous:
        lines = [f"rendezvous={job.launch.rendezvous}"]
    else:  # by the address under which Slurm reaches the node: its name need not resolve
        lines = [
            'first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "address=$(scontrol show node $first_node | grep -oP 'NodeAddr=\\K\\S+')",
            "rendezvous=${address:-$first_node}:$((20000 + SLURM_JOB_ID % 20000))",
        ]
    if job.excludes_nodes:
        file = f"{job.folder}/$SLURM_JOB_ID.exclude"
        limit = f"{_RESTARTS} -lt {job.launch.slurm.max_requeues} ]"
        lines.append(f"{limit} && export {EXCLUDED_VARIABLE}={file} && rm -f {file}")
    return lines


def _training_lines(job: SlurmJob) -> list[str]:
    least, most = job.launch.node_range()
    per_node = job.launch.gpus or job.launch.processes or 1
    tasks = 1 if job.launch.slurm.tasks == "node" else per_node
    kills_all = job.launch.slurm.tasks == "gpu" or job.kind == "program"  # a run tells its other nodes by itself
    options = [f"--ntasks-per-node={tasks}"] * (least != most) + ["--kill-on-bad-exit=1"] * kills_all
    lines = _shared_folder_lines(job) if job.kind == "run" and most > 1 else []
    if job.kind == "program" and most > 1 and job.launch.slurm.tasks == "node":
        lines.append(f'export {GIVEN_UP_VARIABLE}="{job.folder}/$SLURM_JOB_ID.given-up.json"')
    if job.launch.slurm.tasks == "node":
        start = _wrap(_srun(job, options), _agent_line(job))
    else:
        lines += [
            "export MASTER_ADDR=${rendezvous%:*} MASTER_PORT=${rendezvous##*:}",
            f"export WORLD_SIZE=$((SLURM_JOB_NUM_NODES * {per_node})) LOCAL_WORLD_SIZE={per_node}",
        ]
        rank = 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"'
        start = _wrap(_srun(job, options), f"bash -c '{rank}' task", _command_line(job))
    if not job.is_warned and job.kind == "program" and not job.excludes_nodes:
        return [*lines, start]
    lines += [
        "# Slurm warns the batch shell before the time limit; the run saves, stops with 75, and is queued again.",
        "trap 'warned=yes; kill -USR1 $tasks' USR1",
        f"{start} &",
        "tasks=$!",
        "while kill -0 $tasks 2> /dev/null; do wait $tasks; code=$?; done",
    ]
    return [*lines, *_requeue_lines(job), "exit $code"]


def _shared_folder_lines(job: SlurmJob) -> list[str]:
    """A node that does not see the run folder would end at once, and the others would wait for it."""
    file = job.command[1]
    message = f"error: run.dir: $SLURMD_NODENAME does not see {file}. Give a folder that all nodes share"
    return [
        "# Every node must see the run folder.",
        "srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 bash -c \\",
        f"    '[ -r {file} ] || {{ echo \"{message}\" >&2; exit 1; }}' || exit 1",
    ]


def _requeue_lines(job: SlurmJob) -> list[str]:
    limit = job.launch.slurm.max_requeues
    if not limit:
        return []
    if not job.excludes_nodes:
        return [
            f'if [ "$warned" ] && [ $code -eq 75 ] && {_RESTARTS} -lt {limit} ]; then',
            "    scontrol requeue $SLURM_JOB_ID",
            "fi",
        ]
    return [
        f"if {_RESTARTS} -lt {limit} ]; then",
        f'    if [ -s "${EXCLUDED_VARIABLE}" ]; then',
        "        # A log policy excludes nodes. Requeueing ends this script, which must finish first.",
        "        trap '' TERM",
        f"        nodes=$( (squeue -h -j $SLURM_JOB_ID -o %x; cat ${EXCLUDED_VARIABLE}) | grep . | paste -sd,)",
        "        scontrol requeuehold $SLURM_JOB_ID",
        "        scontrol update JobId=$SLURM_JOB_ID ExcNodeList=$nodes",
        "        scontrol release $SLURM_JOB_ID",
        '    elif [ "$warned" ] && [ $code -eq 75 ]; then',
        "        scontrol requeue $SLURM_JOB_ID",
        "    fi",
        "fi",
    ]


def _srun(job: SlurmJob, options: Sequence[str]) -> str:
    """srun with its options. Since Slurm 22.05 it does not take over --cpus-per-task from sbatch."""
    cores = [option for option in sbatch_options(job) if option.startswith("--cpus-per-task=")]
    return " ".join(["srun", *options, *cores, *(_word(_site_text(each)) for each in job.launch.slurm.srun_options)])


def _wrap(*parts: str) -> str:
    """A command in one line, or each part in its own where that is too long to read."""
    line = " ".join(parts)
    return line if len(line) <= _LINE_LENGTH else " \\\n    ".join(parts)


def _agent_line(job: SlurmJob) -> str:
    """`whet launch` on each node: starts the processes of the node and restarts them."""
    nodes = [ShellText("launch.nodes=$SLURM_JOB_NUM_NODES"), ShellText("launch.rendezvous=$rendezvous")]
    if job.kind == "run":
        return _python_line(job, ["whet", "launch", *job.command[1:], *nodes])
    kept = job.launch.model_dump(exclude={"slurm", "nodes", "rendezvous", "env"}, exclude_defaults=True, mode="json")
    if job.launch.env:
        kept["env"] = list(job.launch.env)
    settings = [f"launch.{key}={json.dumps(value)}" for key, value in kept.items()]
    return _python_line(job, ["whet", "launch", *settings, *nodes, "--", *job.command])


def _command_line(job: SlurmJob) -> str:
    """The command itself, in the container if there is one."""
    if job.kind == "program":
        return " ".join(map(_word, [*_container_prefix(job), *job.command]))
    return _python_line(job, job.command if job.kind == "module" else ["whet", *job.command])


def _python_line(job: SlurmJob, words: Sequence[str]) -> str:
    """python -m, with the Python that has whet."""
    slurm = job.launch.slurm
    python = _site_text(slurm.python or ("python" if slurm.container else sys.executable))
    return " ".join(map(_word, [*_container_prefix(job), python, "-m", *words]))


def _container_prefix(job: SlurmJob) -> list[str]:
    slurm = job.launch.slurm
    if not slurm.container:
        return []
    binds = [f"--bind={','.join(slurm.binds)}"] if slurm.binds else []
    return [_container_program(), "exec", *map(_site_text, [*binds, *slurm.container_options, slurm.container])]


def _site_text(text: str) -> str:
    """A setting in which the shell of the job expands variables, such as $SCRATCH/image.sif."""
    return ShellText(text) if "$" in text and "'" not in text and " " not in text else text


def _word(text: str) -> str:
    return text if isinstance(text, ShellText) else shlex.quote(text)


def _container_program() -> str:
    return "apptainer" if shutil.which("apptainer") else "singularity"


def require_plain_paths(folder: Path, remedy: str = "Give another folder: run.dir=FOLDER") -> None:
    """Slurm expands % in the name of the log."""
    if "%" in str(folder) or " " in str(folder):
        raise WhetError(f"{folder}: Slurm does not accept spaces or % in this path. {remedy}")
