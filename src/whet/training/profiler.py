"""Profiles steps with torch.profiler: a trace, a table of operations, and the model's FLOPs by module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from whet.compat.torch_private import dump_memory_history, start_memory_history
from whet.core.console import info
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.training.config import ProfileConfig

_TABLE_ROWS = 60  # of the table
_MAX_MEMORY_EVENTS = 200_000  # allocations in a memory snapshot


class Profiler:
    """A profiler that is off."""

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surrounds a step, counted from 1."""
        yield

    def starts_or_stops_after(self, step: int) -> bool:
        """Whether it starts or stops between this step and the next, which takes time."""
        return False

    def close(self) -> None:
        """Write the results, unless they are written."""


class StepProfiler(Profiler):
    """Profiles from the first configured step to the last, or to the end of the run."""

    def __init__(self, config: ProfileConfig, folder: Path, ranks: Ranks, flops_table: Callable[[], str]) -> None:
        self._config, self._ranks, self._flops_table = config, ranks, flops_table
        self._folder = folder
        self._running: profile | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        first, last = self._config.steps
        if first <= step <= last and self._running is None:
            self._start()
        yield
        if step == last:
            self.close()

    def starts_or_stops_after(self, step: int) -> bool:
        first, last = self._config.steps
        return step in (first - 1, last)

    def close(self) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._ranks.rank}"
        if self._takes_snapshot:
            dump_memory_history(self._folder / f"{name}.memory.pickle")
        running.export_chrome_trace(str(self._folder / f"{name}.trace.json.gz"))
        (self._folder / f"{name}.table.txt").write_text(self._table(running))
        if self._ranks.rank == min(self._config.ranks):
            (self._folder / "flops.txt").write_text(self._flops_table())
        info(f"profile: {self._folder}; the trace opens in https://ui.perfetto.dev")

    @property
    def _takes_snapshot(self) -> bool:
        return self._config.memory and self._ranks.device.type == "cuda"

    def _start(self) -> None:
        config = self._config
        if self._takes_snapshot:
            start_memory_history(_MAX_MEMORY_EVENTS)
        activities = [ProfilerActivity.CPU]
        if self._ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(
            activities=activities, record_shapes=config.shapes, profile_memory=config.memory, with_stack=config.stack
        )
        self._running.start()

    def _table(self, seen: profile) -> str:
        """Operations, the most expensive first."""
        try:
            averages = seen.key_averages(
                group_by_input_shape=self._config.shapes, group_by_stack_n=5 if self._config.stack else 0
            )
        except UnicodeDecodeError:  # with stacks, torch 2.13 sometimes reads a frame's name that is gone by then
            return "torch could not read the names of all frames, so there is no table; the trace is complete\n"
        device = "cpu" if self._ranks.device.type == "cpu" else "device"
        return averages.table(sort_by=f"self_{device}_time_total", row_limit=_TABLE_ROWS)


def make_profiler(
    config: ProfileConfig | None, folder: Path, ranks: Ranks, steps: int, flops_table: Callable[[], str]
) -> Profiler:
    """The profiler of this rank by the section `profile`, for a run of `steps` steps."""
    if config is None:
        return Profiler()
    if config.steps[1] > steps:
        raise WhetError(
            f"profile.steps: {list(config.steps)}, but the run has {steps} steps. Give [first, last] within them"
        )
    beyond = [rank for rank in config.ranks if rank >= ranks.world_size]
    if beyond:
        raise WhetError(
            f"profile.ranks: {beyond[0]}, but there are {ranks.world_size} processes here, counted from 0. Leave it out"
        )
    if ranks.rank not in config.ranks:
        return Profiler()
    return StepProfiler(config, folder / "profile", ranks, flops_table)
