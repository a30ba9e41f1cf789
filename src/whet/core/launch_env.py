"""The environment a process starts in: the launcher's variables (rank, world size, address of the store), bytecode.
No torch.

torchrun and `whet launch` set these variables for each process they start; without them the process is alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from whet.core.errors import WhetError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Removed from the environment of a subprocess that works alone. LOCAL_RANK stays: it names this process's device."""


def rank() -> int:
    """The number of this process among all processes of the run."""
    return _number("RANK", 0)


def world_size() -> int:
    """How many processes the run has."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    """The value of a variable; `require_possible_rank` refuses one that is not a number."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def require_possible_rank() -> None:
    """Raise if this process cannot be one of the run's: such a process would work, and write nothing."""
    for name in ("RANK", "WORLD_SIZE"):
        if not (os.environ.get(name) or "0").isdecimal():
            raise WhetError(f"the environment variable {name} is {os.environ[name]!r}, not a number. Unset it")
    if not 0 <= rank() < world_size():
        raise WhetError(
            f"the environment variable RANK is {rank()}, and WORLD_SIZE {world_size()}, which no launcher sets so. "
            "For one process: unset RANK WORLD_SIZE; for several: whet launch"
        )


def local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size(default: int = 1) -> int:
    """How many processes of the run share this machine; `default` where the launcher does not set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", default))


def gpus_bound_by_slurm(visible: int) -> bool:
    """Whether Slurm shows each task of this machine only its own GPUs (--gpus-per-task, --gpu-bind): fewer are visible
    than there are processes, yet the job has one for each."""
    return visible < local_world_size() <= int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))


def process_layout() -> tuple[int, int]:
    """(machines, processes on each); machines with different numbers count as one."""
    everyone = world_size()
    each = local_world_size(everyone)
    return (everyone // each, each) if everyone % each == 0 else (1, everyone)


def cpus_of_task() -> int | None:
    """The CPU cores that Slurm gives this process, where each process of the machine is a task of its own."""
    env = os.environ
    tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 8(x192): of the first machine
    is_own = tasks is not None and int(tasks[0]) == local_world_size() and env.get("SLURM_LOCALID") == str(local_rank())
    cpus = env.get("SLURM_CPUS_PER_TASK", "")
    return int(cpus) if is_own and cpus.isdecimal() and int(cpus) > 0 else None


def store_address() -> tuple[str, int]:
    """Host and port of the TCPStore at which all processes meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise WhetError(
                f"the environment variable WORLD_SIZE is {world_size()}, but {name} is not set, so the processes "
                "cannot meet. For one process: unset WORLD_SIZE; for several: whet launch"
            )
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def slurm_job() -> int | None:
    """The number of the Slurm job that this process is in."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return int(job) if job.isdecimal() else None


def started_by_torchrun() -> bool:
    """Whether torchrun started this process. It puts each worker in a session of its own, so a signal to torchrun's
    process group does not reach them, and they would outlive it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def has_agent_store() -> bool:
    """Whether torchrun's agent keeps a store that exists before the process group and outlives every worker."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def error_file() -> Path | None:
    """The file that torchrun reads a failed worker's error from."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file else None


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """What `whet search` tells a script that it starts."""

    folder: str
    """The trial's run folder."""
    steps: int
    """The length of the whole trial."""
    until: int
    """The step after which the script evaluates, saves a checkpoint and ends."""

    def as_env(self) -> dict[str, str]:
        """With names for the script's own W&B runs."""
        folder = Path(self.folder)
        names = {"WANDB_NAME": folder.name, "WANDB_RUN_GROUP": folder.parent.name}
        return {_TRIAL: json.dumps(asdict(self)), **{key: os.environ.get(key, name) for key, name in names.items()}}


_TRIAL = "WHET_TRIAL"


def search_trial() -> SearchTrial | None:
    """The trial of a search that this process is; None outside one."""
    given = os.environ.get(_TRIAL)
    return SearchTrial(**json.loads(given)) if given else None


def keep_bytecode(package: str = "torch") -> None:
    """Keep compiled Python modules in whet's cache if `package` has none beside its source and Python writes none.

    Many containers set PYTHONDONTWRITEBYTECODE: every start then compiles the source of torch and transformers again,
    which takes seconds. Child processes inherit this. Only for processes that are whet alone.
    """
    spec = None if sys.pycache_prefix else importlib.util.find_spec(package)
    if spec is None or spec.cached is None or os.path.exists(spec.cached):  # noqa: PTH110 - pathlib takes longer
        return
    if not sys.dont_write_bytecode and os.access(Path(spec.cached).parent.parent, os.W_OK):
        return
    from whet.core.files import cache_dir  # takes 0.04 s

    sys.dont_write_bytecode, sys.pycache_prefix = False, str(cache_dir() / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
