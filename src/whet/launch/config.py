"""Settings of `whet launch`."""

from __future__ import annotations

import os
import re
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from whet.core.config import Section, config_error
from whet.core.errors import WhetError
from whet.core.limits import limited


class SlurmConfig(Section):
    """The job that `whet launch --on slurm` submits. Absent keys leave the choice to the cluster."""

    model_config = ConfigDict(
        coerce_numbers_to_str=True, strict=False
    )  # an account or a time limit may look like a number

    account: str | None = Field(default=None, description="The account to charge (sbatch --account).")
    partition: str | None = Field(default=None, description="The partition, such as standard-g.")
    qos: str | None = Field(default=None, description="The quality of service (sbatch --qos).")
    time: str | None = Field(
        default=None,
        pattern=r"^\d+$|^(\d+-)?\d+(:\d{1,2}){1,2}$|^\d+-\d+$",
        description="Time limit: minutes, HH:MM:SS or D-HH:MM:SS. Before it ends, the run saves and is queued again.",
    )
    warning: int | None = Field(
        default=None,
        ge=60,
        description="Seconds before the time limit at which the run saves and stops. Absent: 300, or a quarter of a "
        "shorter limit, at least 60.",
    )
    max_requeues: int = Field(
        default=20, ge=0, description="How many times a job that reaches its time limit is queued again; 0: never."
    )
    tasks: Literal["node", "gpu"] = Field(
        default="node",
        description="Tasks of srun: one per node, which starts a process per GPU and restarts them after a crash, or "
        "one per GPU, where the site requires it.",
    )
    gpu_type: str | None = Field(default=None, description="The kind of GPU, such as mi250, for --gpus-per-node.")
    cpus: int | None = Field(default=None, ge=1, description="CPU cores per GPU, or per process without GPUs.")
    memory: str | None = Field(default=None, description="Memory per node, such as 64G; 0: all of it.")
    exclusive: bool | Literal["user"] = Field(
        default=False, description="Do not share nodes: with any other job (true), or with other users (user)."
    )
    hint: str | None = Field(default=None, description="How to use cores, such as nomultithread.")
    constraint: str | None = Field(default=None, description="Features that nodes must have.")
    options: list[str] = Field(default=[], description="Further options of sbatch, such as --mail-type=END.")
    srun_options: list[str] = Field(
        default=[], description="Further options of srun, such as --cpu-bind=mask_cpu:fe,fe00."
    )
    modules: list[str] = Field(default=[], description="Environment modules to load.")
    setup: list[str] = Field(default=[], description="Shell lines to run on the first node before training.")
    container: str | None = Field(default=None, description="A Singularity or Apptainer image to run in.")
    binds: list[str] = Field(default=[], description="Folders that the container sees, such as /scratch or A:B.")
    container_options: list[str] = Field(default=[], description="Further options of the container, such as --rocm.")
    python: str | None = Field(
        default=None,
        description="The Python on the nodes that has whet. Absent: the one that runs this command, or `python` in "
        "the container.",
    )


_PATTERN_S = 1.0


class LogPolicy(Section):
    """What a line in the output of a crashed run means for its restart."""

    pattern: str = Field(description="A regular expression, searched in each line that processes print.")
    action: Literal["give_up", "exclude_node"] = Field(
        description="give_up: the run is not restarted. exclude_node: Slurm queues the job again without the node that "
        "printed the line; elsewhere the run is not restarted."
    )

    @model_validator(mode="after")
    def _check_pattern(self) -> LogPolicy:
        try:
            with limited(_PATTERN_S, ValueError):
                matches_all = re.search(self.pattern, "") is not None
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise config_error("pattern", f"{self.pattern!r} is not a regular expression: {error}") from None
        if matches_all:
            raise config_error(
                "pattern", f"{self.pattern!r} matches an empty line, and so every line. Make it narrower"
            )
        return self


_QUANTITY = r"^\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?$"


class KubernetesConfig(Section):
    """The objects that `whet launch --on kubernetes --dry-run` prints."""

    kind: Literal["job", "jobset", "trainjob"] = Field(
        default="job",
        description="A Job, which every cluster has; a JobSet or a TrainJob (Kubeflow Trainer 2.2), where installed.",
    )
    image: str | None = Field(
        default=None, pattern=r"^\S+$", description="The container image, with whet in its Python. Required."
    )
    claim: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",
        description="A PersistentVolumeClaim that holds data and runs. Absent: one is created, with the size in "
        "storage.",
    )
    storage: str = Field(default="100Gi", pattern=_QUANTITY, description="Size of the claim, if one is created.")
    mount: str = Field(
        default="/whet",
        pattern=r"^/[^\s:]+$",
        description="Where pods see the claim; relative paths in the recipe start there.",
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu", pattern=r"^[\w.-]+/[\w.-]+$", description="The resource that launch.gpus counts."
    )
    cpus: int | None = Field(default=None, ge=1, description="CPU cores of a node.")
    memory: str | None = Field(default=None, pattern=_QUANTITY, description="Memory of a node, such as 64Gi.")
    node_selector: dict[str, str] = Field(default={}, description="Labels that nodes must have.")


class LaunchConfig(Section):
    """How `whet launch` starts a run. None of these settings changes the training result."""

    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = (("gpus", "processes"),)

    nodes: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^[1-9]\d*-[1-9]\d*$")] = Field(
        default=1,
        description="Number of machines; run the same `whet launch` on each. With Slurm also a range, such as 1-4.",
    )
    gpus: int | None = Field(
        default=None,
        ge=1,
        description="GPUs to use on each machine, one process for each. Absent: all of them, or one process on a "
        "machine without GPUs.",
    )
    processes: int | None = Field(
        default=None, ge=1, description="Processes on each machine, instead of gpus: for machines without GPUs."
    )
    share_gpu: bool = Field(
        default=False,
        description="Let several processes use one GPU, over Gloo, because NCCL refuses that. For tests: it is slow.",
    )
    rendezvous: str | None = Field(
        default=None,
        pattern=r"^[^\s:]+:\d+$|^\[[0-9a-fA-F:]+\]:\d+$",
        description="HOST:PORT of the rendezvous of several machines: one of them, and a free port on it; the same "
        "value on all.",
    )
    max_restarts: int = Field(
        default=3, ge=0, description="How many times a crashed run is restarted from its newest checkpoint."
    )
    wait: float = Field(
        default=1.0,
        gt=0,
        description="Seconds before the first restart; doubles with each restart, up to 60.",
    )
    log_policies: list[LogPolicy] = Field(
        default=[],
        description="Lines in the output of the processes that, after a crash, forbid a restart, such as [{pattern: "
        "Xid 79, action: exclude_node}].",
    )
    env: dict[str, str] | list[str] = Field(
        default={},
        description="Environment variables for the processes: a mapping of names to values, or only names, which must "
        "be set. The run folder keeps the names, never the values.",
    )

    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    @model_validator(mode="after")
    def _check_policies(self) -> LaunchConfig:
        if self.log_policies and self.slurm.tasks == "gpu":
            raise config_error(
                "log_policies",
                "they need launch.slurm.tasks = node, where whet launch starts the processes and reads their output",
            )
        return self

    def node_range(self) -> tuple[int, int]:
        """The least and the greatest number of machines."""
        least, _, most = str(self.nodes).partition("-")
        return int(least), int(most or least)

    def required_variables(self) -> dict[str, str]:
        """The variables by name; an error if one of them is not set."""
        found = self.variables()
        for name, value in found.items():
            if value is None:
                raise WhetError(
                    f"launch.env: the environment variable {name} is not set. Set it, or remove it from launch.env"
                )
        return {name: value for name, value in found.items() if value is not None}

    def variables(self) -> dict[str, str | None]:
        """The variables by name; those given by name alone come from the environment, None if they are not set."""
        return {name: os.environ.get(name) for name in self.env} if isinstance(self.env, list) else dict(self.env)


class LaunchSettings(Section):
    """A recipe with nothing but the launch section, such as the one of a site, or overrides alone."""

    launch: LaunchConfig = LaunchConfig()
