"""`whet fit`: measures settings that do not change the results of a run, on its real model, and picks the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from whet.config import Config
from whet.core import launch_env
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.console import info, warn
from whet.core.costs import Costs
from whet.core.distributed import get_local_device
from whet.core.errors import WhetError, first_line
from whet.core.run_folder import RunFolder
from whet.data.plan.planner import typical_length
from whet.execution import device_memory
from whet.fit.estimate import GIB, LargestBatch, MemoryParts, predict_memory
from whet.fit.measure import Measurement, measure_run
from whet.model.flops import device_name
from whet.parallel.fsdp import has_collectives_in_passes
from whet.run.lifecycle import run_training
from whet.run.memory_choice import (
    MemoryChoice,
    apply_settings,
    choose_memory_settings,
    largest_fitting,
    row_sizes,
    saving_settings,
    write_cache,
)
from whet.run.trial import delete_previous_trial, delete_trial, sibling_config
from whet.training.run_state import Run, set_micro_rows

Metric = Literal["throughput", "memory"]

_SAME_SPEED = 0.99
"""Settings this close to the fastest are as fast, and the one with the least memory is taken."""
_FAST_TOKENS = 8192
"""Micro-batches of so many tokens gain less by being larger than recomputation, a quarter of the time, costs."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """What was measured, what is best, and what it would take to do better."""

    device: str
    world: int
    capacity: int
    """Bytes that this process may use."""
    measured: list[Measurement]
    best: Measurement
    predicted: MemoryParts | None
    """Of the best, on paper; None where the model cannot be traced."""
    proposals: list[str]
    costs: Costs
    """Of the whole run, with the best choice: its steps alone."""

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "world": self.world,
            "capacity_gib": self.capacity / GIB,
            "settings": str(self.best.choice),
            "choice": _entry(self.best),
            "memory_gib": {
                "measured": self.best.memory.gib(),
                "predicted": None if self.predicted is None else self.predicted.gib(),
                "evaluation": self.best.evaluation / GIB,
            },
            "measured": [_entry(each) for each in self.measured],
            "costs": self.costs.as_dict(),
            "proposals": self.proposals,
        }


def _entry(measured: Measurement) -> dict[str, Any]:
    choice = measured.choice
    return {
        "micro_rows": choice.micro_rows, "recompute": choice.recompute, "offload": choice.offload,
        "peak_gib": measured.peak / GIB, "step_s": measured.step_s, "tokens_per_s": measured.tokens_per_s,
    }  # fmt: skip


def fit(config: Config, metric: Metric) -> FitResult:
    """Measure steps of a run with its real model and worst batch, and keep the best choice where the run finds it."""
    device = get_local_device(config.launch.share_gpu, config.run.device)
    if not device_memory.has_own_memory(device):
        raise WhetError(
            "this machine has no GPU whose memory could be measured; on a CPU train.micro_rows: auto is 1. Run `whet "
            "fit` where the run will train, or estimate another machine: whet fit CONFIG --plan 1x1xH200"
        )
    automatic = config.model_copy(update={"train": config.train.model_copy(update={"micro_rows": "auto"})})
    trial, is_main = sibling_config(automatic, "fit"), launch_env.rank() == 0
    results: list[FitResult] = []

    def measure(run: Run) -> None:
        results.append(_measure_choices(run, automatic, metric))
        if is_main:
            write_cache(run, automatic, results[0].best.choice)

    if is_main:
        delete_previous_trial(trial.folder)
    try:
        run_training(trial, resume=False, save=False, measure=measure)
    finally:
        if is_main:
            delete_trial(trial.folder)
    device_memory.free_cached(device, after_failure=True)  # this process may train next
    if is_main:
        _write_into_plan(config, results[0])
    return results[0]


def _measure_choices(run: Run, config: Config, metric: Metric) -> FitResult:
    choose_memory_settings(run, config, use_cache=False)
    device = run.ranks.device
    capacity, sizes, measured = device_memory.capacity(device), row_sizes(run, config), list[Measurement]()
    for choice in _worth_measuring(run, config, metric, sizes):
        if choice.micro_rows != run.loader.micro_rows:
            set_micro_rows(run, choice.micro_rows)
        measured.append(measure_run(run))
        each = measured[-1]
        info(f"{choice}: {each.tokens_per_s:,.0f} tokens/s, {each.peak / GIB:.1f} of {capacity / GIB:.1f} GiB")
    best = pick_best(measured, metric)
    proposals = propose(config, best.choice, best.memory, sizes[-1], run.ranks.world_size)
    predicted = _predict(run, best.choice)
    world = run.ranks.world_size
    costs = Costs.of(best.step_s * len(run.plan), world, price=config.run.price)
    return FitResult(device_name(device), world, capacity, measured, best, predicted, proposals, costs)


def _predict(run: Run, choice: MemoryChoice) -> MemoryParts | None:
    """The memory of a step with this choice, on paper; None for what is not predicted: sharded models, and models that
    cannot be traced."""
    set_micro_rows(run, choice.micro_rows)
    if has_collectives_in_passes(run.model, run.ranks) or run.model.unpacked:
        return None
    parallel = run.config.parallel.model_copy(update={"recompute": choice.recompute, "offload": choice.offload})
    worst = run.loader.worst_batch()
    batch = LargestBatch(len(worst.tokens), len(worst.supervised_at), -(-run.loader.max_rank_rows // choice.micro_rows))
    config, lengths = run.config.model_copy(update={"parallel": parallel}), run.store.lengths[run.plan.documents]
    try:
        return predict_memory(config, run.ranks.device, batch, typical_length(lengths))
    except Exception as error:  # fake tensors do not support every model's code
        warn(f"memory is not predicted: {first_line(error)}")
        return None


def _worth_measuring(run: Run, config: Config, metric: Metric, sizes: list[int]) -> Iterator[MemoryChoice]:
    """What may be the best, one after another.

    For throughput: the largest micro-batch that fits; if memory limits it, the next smaller one, and if both are small,
    the same with recomputation and then offload. For memory: one row with each setting.
    """
    can_save_more = not has_collectives_in_passes(run.model, run.ranks)
    for parallel in saving_settings(run.config.parallel) if can_save_more else [run.config.parallel]:
        apply_settings(run, parallel)
        largest = largest_fitting(run, sizes[:1] if metric == "memory" else sizes)
        if largest is None:
            continue
        yield MemoryChoice.of(run)
        if metric == "memory":
            continue
        if largest == sizes[-1]:
            return
        smaller = [size for size in sizes if size < largest]
        if smaller:
            set_micro_rows(run, smaller[-1])
            yield MemoryChoice.of(run)
        if largest * config.row_length >= _FAST_TOKENS:
            return


def pick_best(measured: list[Measurement], metric: Metric) -> Measurement:
    """The fastest, of equally fast ones that with the least memory; or the one with the least memory."""
    if metric == "memory":
        return min(measured, key=lambda each: (each.peak, each.step_s))
    fastest = max(each.tokens_per_s for each in measured)
    return min((each for each in measured if each.tokens_per_s >= _SAME_SPEED * fastest), key=lambda each: each.peak)


def _write_into_plan(config: Config, result: FitResult) -> None:
    """A run that exists already, and is not running, continues with the choice."""
    file, choice = config.folder / "plan.json", result.best.choice
    if not file.exists():
        return
    try:
        folder = RunFolder(config.folder)
        try:
            changes = {
                "micro_rows": choice.micro_rows, "recompute": choice.recompute, "offload": choice.offload,
                "device_name": result.device, "world": result.world,
            }  # fmt: skip
            write_hashed_json(file, read_hashed_json(file) | changes)
        finally:
            folder.close()
    except WhetError as error:
        warn(f"the choice is not written into the run's plan: {error}")


# Proposals: settings that save memory but change the results or the machines, so `whet fit` does not choose them.

_STATE_BITS = {"adamw": 32, "adamw16bit": 16, "adamw8bit": 8}
_WORTHWHILE = 0.05
"""Of the peak: what saves less is not proposed."""
_MIN_SAVED = 2**28


def propose(config: Config, choice: MemoryChoice, memory: MemoryParts, most_rows: int, world: int) -> list[str]:
    """Sentences with a setting each. None if the run already has micro-batches of `most_rows`, without recomputation
    and offload: more memory would not make it faster."""
    if choice == MemoryChoice(most_rows, "none", "none"):
        return []
    return [*_optimizer_proposals(config, memory), *_sharding_proposals(config, memory, world)]


def _optimizer_proposals(config: Config, memory: MemoryParts) -> Iterator[str]:
    bits = _STATE_BITS.get(config.train.optimizer.name, 8)
    for name, smaller in _STATE_BITS.items():
        saved = memory.optimizer * (bits - smaller) // bits
        if smaller < bits and saved > max(_MIN_SAVED, _WORTHWHILE * memory.total):
            yield (
                f"train.optimizer.name={name}: the optimizer's state in {smaller} bits takes {saved / GIB:.1f} GiB "
                "less; the loss changes slightly"
            )


def _sharding_proposals(config: Config, memory: MemoryParts, world: int) -> Iterator[str]:
    if config.parallel.uses_fsdp:
        return
    devices = max(2, world)
    sharded = memory.gradients + memory.optimizer + (memory.weights if config.quantize is None else 0)
    saved = sharded * (devices - 1) // devices
    if saved > max(_MIN_SAVED, _WORTHWHILE * memory.total):
        machines = "over the devices of this run" if world > 1 else f"on {devices} devices instead of 1"
        yield (
            f"parallel.shard={devices}: {machines}, each holds 1/{devices} of weights, gradients and optimizer state, "
            f"{saved / GIB:.1f} GiB less"
        )
