"""Batch arithmetic: does a step have rows for every device?

A step's rows are dealt to the data-parallel ranks, `train.micro_rows` to each at a time. The number of ranks is nodes ×
devices ÷ (context × tensor), because the devices of a context- or tensor-parallel group compute the same rows. A step
with fewer rows than ranks × micro_rows leaves devices idle or half empty in every step, which costs as much and learns
no more, so a new run is refused. A resumed one is not: its steps keep their rows on any number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from whet.config import Config
from whet.core import launch_env
from whet.core.errors import WhetError
from whet.run.data import RunData, make_plan
from whet.training.config import BatchConfig

if TYPE_CHECKING:
    from whet.data.plan.planner import Plan


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The rows of a step and the devices that share them."""

    rows: int
    micro_rows: int
    nodes: int
    devices: int
    """Of each node, one process for each."""
    model_parallel: int = 1
    """Devices that compute the same rows: context × tensor."""
    shard: int = 1

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return max(1, self.nodes * self.devices // self.model_parallel)

    @property
    def needed(self) -> int:
        """The rows that give every rank a full micro-batch."""
        return self.ranks * self.micro_rows

    @property
    def fits(self) -> bool:
        """A single rank has all the rows, however few."""
        return self.ranks == 1 or self.rows >= self.needed

    def most_nodes(self, micro_rows: int) -> int:
        """The most nodes, of as many devices, that fit; 0 if one has too many devices."""
        fitting = min(self.nodes, self.rows // micro_rows * self.model_parallel // self.devices)
        return fitting - fitting % (self._mesh_unit // math.gcd(self._mesh_unit, self.devices))

    def most_devices(self, micro_rows: int) -> int:
        """The most devices of a single node that fit."""
        fitting = min(self.devices, max(1, self.rows // micro_rows) * self.model_parallel)
        return fitting - fitting % self._mesh_unit

    @property
    def _mesh_unit(self) -> int:
        """The number of processes is a multiple of it."""
        return self.model_parallel * self.shard


def step_layout(config: Config, rows: int, nodes: int, devices: int, unpacked: bool = False) -> StepLayout:
    """The layout of a configuration. `unpacked`: the model cannot be packed, so that each conversation is a row."""
    parallel = config.parallel
    return StepLayout(
        rows, 1 if unpacked else config.train.least_micro_rows, nodes, devices, parallel.context * parallel.tensor,
        (parallel.shard or 1) * parallel.expert,
    )  # fmt: skip


def most_rows(config: Config) -> int:
    """The rows of a step as far as the configuration tells: packing may put several conversations into a row."""
    return config.rows_per_step or config.train.batch.conversations or 1


def typical_rows(plan: Plan) -> int:
    """The rows of most steps of a plan; the last step may have fewer."""
    return int(np.sort(np.diff(plan.steps))[len(plan) // 2])


def require_rows(config: Config, nodes: int, devices: int | None) -> None:
    """Refuse a new run if its configuration alone shows that a step has too few rows, or that the mesh does not fit.
    `devices`: of each node; None if only the nodes know."""
    if devices is not None:
        config.parallel.replicas(nodes * devices)
    layout = step_layout(config, most_rows(config), nodes, devices or 1)
    if not layout.fits:
        raise WhetError(describe_shortage(config, layout))


def find_shortage(
    config: Config, data: RunData, plan: Plan, nodes: int, devices: int, unpacked: bool, is_new: bool = True
) -> str | None:
    """What is wrong with the steps of a plan on so many devices; None if they have enough rows. `unpacked`: the model
    cannot be packed, so that each conversation is a row, in the plan too."""
    layout = step_layout(config, typical_rows(plan), nodes, devices, unpacked)
    if layout.fits:
        return None
    return describe_shortage(config, layout, rows_by_conversations(config, data, unpacked), is_new)


def describe_shortage(
    config: Config, layout: StepLayout, rows_of: Callable[[int], int] | None = None, is_new: bool = True
) -> str:
    """The arithmetic of a step with too few rows, and settings that fit. `rows_of`: the rows of a step of so many
    conversations, where the data is known. `is_new`: the steps themselves can still be changed."""
    fitting = [*(_fitting_batches(config, layout, rows_of) if is_new else ()), *_fitting_layouts(config, layout)]
    return (
        f"{_describe_step(config, layout.rows)}, fewer than {layout.needed:,}: {_describe_ranks(config, layout)}, with "
        f"{_rows(layout.micro_rows)} each (train.micro_rows), so {_describe_idle(layout)}. Set "
        f"{', or '.join(fitting) or 'fewer devices'}"
    )


def _describe_step(config: Config, rows: int) -> str:
    [(unit, size)] = config.train.batch.model_dump(exclude_none=True).items()
    limit = config.rows_per_step
    if limit is None:
        return f"train.batch.conversations: a step of {size:,} has {'at most ' * (rows == size)}{_rows(rows)}"
    given = (
        f"train.batch.{unit}: a step of {size:,} has {_rows(limit)}"
        if unit == "tokens"
        else (f"train.batch.rows: a step has {_rows(limit)}")
    )
    return given if rows >= limit else f"{given}, but the data fills only {rows:,}"


def _describe_ranks(config: Config, layout: StepLayout) -> str:
    """`192 nodes × 8 devices ÷ 8 (parallel.tensor) = 192 data-parallel ranks`."""
    nodes = f"{layout.nodes:,} nodes × " if layout.nodes > 1 else ""
    sizes = {"context": config.parallel.context, "tensor": config.parallel.tensor}
    divided = "".join(f" ÷ {size} (parallel.{key})" for key, size in sizes.items() if size > 1)
    return f"{nodes}{_count(layout.devices, 'device')}{divided} = {layout.ranks:,} data-parallel ranks"


def _describe_idle(layout: StepLayout) -> str:
    if layout.rows < layout.ranks:
        return f"{layout.ranks - layout.rows:,} of {layout.ranks:,} would have none"
    return f"they would have {layout.rows / layout.ranks:.3g} on average"


def _fitting_batches(config: Config, layout: StepLayout, rows_of: Callable[[int], int] | None) -> Iterator[str]:
    """Overrides with which a step has enough rows, each by itself."""
    batch, needed = config.train.batch, layout.needed
    if batch.conversations is None:
        if layout.rows >= (config.rows_per_step or 0):  # otherwise the data has no more
            size = f"rows={needed}" if batch.rows is not None else f"tokens={needed * config.row_length}"
            yield f"train.batch.{size}"
    elif rows_of is None:  # without the data, only a row for each conversation is certain
        yield f"train.batch.conversations={needed} data.packing=none"
    else:
        if (count := _fitting_conversations(batch.conversations, layout, rows_of)) is not None:
            yield f"train.batch.conversations={count}"
        if batch.conversations >= needed:
            yield "data.packing=none"


def _fitting_layouts(config: Config, layout: StepLayout) -> Iterator[str]:
    """Overrides with which the devices need no more rows than there are, each by itself."""
    per_rank = layout.rows // layout.ranks
    if 0 < per_rank < layout.micro_rows:
        yield f"train.micro_rows={per_rank}"
    if settings := _fitting_devices(config, layout, layout.micro_rows):
        yield settings
    if per_rank == 0 and layout.micro_rows > 1 and (settings := _fitting_devices(config, layout, 1)):
        yield f"train.micro_rows=1 {settings}"


def _fitting_conversations(given: int, layout: StepLayout, rows_of: Callable[[int], int]) -> int | None:
    """How many conversations fill the rows that are needed; None if those of an epoch do not."""
    count, rows = given, layout.rows
    for _ in range(_TRIES):
        count = max(count + 1, layout.needed, -(-count * layout.needed // max(1, rows)))
        try:
            rows = rows_of(count)
        except WhetError:  # the plan would not fit into memory
            return None
        if rows >= layout.needed:
            return count
    return None


_TRIES = 6


def _fitting_devices(config: Config, layout: StepLayout, micro_rows: int) -> str:
    """As many nodes as fit, or as many devices of one node; empty if not even that fits."""
    nodes = layout.most_nodes(micro_rows) if layout.nodes > 1 else 0
    if nodes:
        processes = nodes * layout.devices
        least, most = config.launch.node_range()
        settings = f"launch.nodes={f'{least}-{nodes}' if least < nodes < most else nodes}"
    else:
        processes = layout.most_devices(micro_rows)
        if not processes:
            return ""
        key = "processes" if config.launch.processes else "gpus"
        settings = f"launch.nodes=1 launch.{key}={processes}" if layout.nodes > 1 else f"launch.{key}={processes}"
    if config.parallel.replicate is not None:
        settings += f" parallel.replicate={processes // (layout.model_parallel * layout.shard)}"
    if not nodes and launch_env.world_size() > 1 and not (config.launch.gpus or config.launch.processes):
        settings += f" (torchrun: --nproc-per-node {processes})"
    return settings


def rows_by_conversations(config: Config, data: RunData, unpacked: bool) -> Callable[[int], int]:
    """The typical rows of a step by its number of conversations: plans them."""

    def rows_of(conversations: int) -> int:
        train = config.train.model_copy(update={"batch": BatchConfig(conversations=conversations)})
        plan = make_plan(config.model_copy(update={"train": train}), data)
        return typical_rows(plan.unpacked(data.train.store.lengths) if unpacked else plan)

    return rows_of


def _rows(count: int) -> str:
    return _count(count, "row")


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
