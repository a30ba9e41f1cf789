"""`train.micro_rows: auto`: the rows of a micro-batch, and recomputation and offload if one row needs them, chosen by
running the plan's worst batch before step 1. No choice changes the results of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.config import Config
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.console import info, warn
from whet.core.distributed import Ranks
from whet.core.errors import RunFailedError, WhetError
from whet.core.files import cache_dir, hash_json
from whet.core.heartbeat import PHASE
from whet.execution import device_memory
from whet.execution.compile import should_compile
from whet.execution.cuda_graphs import uses_cuda_graphs
from whet.execution.offload import offload_optimizer_state, state_to_host
from whet.execution.transform import transform_layers
from whet.model.flops import device_name
from whet.parallel.config import ParallelConfig
from whet.parallel.dtensor import local_tensor
from whet.parallel.fsdp import has_collectives_in_passes, reshard, set_gradient_sync
from whet.training.checkpoints import package_versions
from whet.training.optimizers.factory import apply_gradients, decides_on_device, forget_decision, retract_step
from whet.training.overlap import starts_early
from whet.training.run_state import Run, set_micro_rows

_SATURATING_TOKENS = 32_768
"""Tokens of a micro-batch beyond which a GPU gets no faster: with 4,096, Llama 8B reaches 97 % of its speed with
16,384 (LoRA, one H200, 2026-11-16)."""
MAX_SHARE = 0.92
"""Of the device's memory that `auto` uses: the rest is for fragments, which grow over a run."""
_MAX_PREDICTED_SHARE = 0.85
"""Where running out of memory would end the run, because other ranks wait in collectives."""


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """What decides the memory of a step and leaves its numbers alone."""

    micro_rows: int
    recompute: str
    offload: str

    @classmethod
    def of(cls, run: Run) -> MemoryChoice:
        return cls(run.loader.micro_rows, run.config.parallel.recompute, run.config.parallel.offload)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> MemoryChoice | None:
        """None if the values are not those of a choice."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            choice = cls(*(found[name] for name in ("micro_rows", "recompute", "offload")))
            ParallelConfig(recompute=choice.recompute, offload=choice.offload)  # type: ignore[arg-type]
            return choice if type(choice.micro_rows) is int and choice.micro_rows >= 1 else None
        return None

    def allowed_by(self, parallel: ParallelConfig) -> ParallelConfig | None:
        """These settings with the choice's recomputation and offload; None if they save more memory already."""
        wanted = {"recompute": self.recompute, "offload": self.offload}
        return next((each for each in saving_settings(parallel) if wanted.items() <= each.model_dump().items()), None)

    def __str__(self) -> str:
        saved = {"recompute": self.recompute, "offload": self.offload}
        extra = [f"parallel.{key}={value}" for key, value in saved.items() if value != "none"]
        return " ".join([f"train.micro_rows={self.micro_rows}", *extra])


def choose_memory_settings(run: Run, config: Config, use_cache: bool = True) -> None:
    """Set the micro-batches of a run, and verify on a device with memory of its own that the worst one fits.

    A given number of rows is reduced only if it does not fit. A resumed run keeps what was chosen before, unless it has
    another card or another number of processes. `use_cache`: look up what runs with this model on this card chose.
    """
    is_auto, was_chosen = config.train.micro_rows == "auto", run.config.train.micro_rows != "auto"
    set_micro_rows(run, run.loader.micro_rows)
    if not device_memory.has_own_memory(run.ranks.device):
        return
    sizes = row_sizes(run, config)
    known = MemoryChoice.of(run) if is_auto and was_chosen else None
    if known is None and is_auto and use_cache:
        known = _read_cache(run, config)
    if known is not None and _verify(run, known):
        info(f"train.micro_rows: auto is {known.micro_rows}, as chosen before on this card")
        return
    if known is not None:
        info(f"{known} was chosen before on this card and does not fit now: the micro-batch is measured again")
    can_save_more = is_auto and not has_collectives_in_passes(run.model, run.ranks)
    for parallel in saving_settings(run.config.parallel) if can_save_more else [run.config.parallel]:
        apply_settings(run, parallel)
        rows = largest_fitting(run, sizes, MAX_SHARE if is_auto else 1.0)
        if rows is not None:
            break
    else:
        raise RunFailedError(
            "the device has too little memory for one row of this run, even with recomputation and offload. `whet fit` "
            "shows what takes it. Lower data.max_length, train an adapter (adapter.rank=16), quantize=nf4, or shard "
            "the model over several devices (parallel.shard)"
        )
    _report(run, config, is_auto)
    if is_auto and run.ranks.is_main:
        write_cache(run, config, MemoryChoice.of(run))


def row_sizes(run: Run, config: Config) -> list[int]:
    """The numbers of rows to choose from, ascending."""
    if run.model.unpacked and not run.model.pads:
        return [1]
    if config.train.micro_rows != "auto":
        return micro_row_sizes(config.train.micro_rows, config.train.micro_rows)
    if run.model.is_stochastic:  # other micro-batches would draw other numbers
        return [1]
    tokens = run.plan.stats.tokens / (len(run.plan.rows) - 1)  # of a row, on average
    return micro_row_sizes(run.loader.max_rank_rows, round(_SATURATING_TOKENS / tokens))


def micro_row_sizes(rows: int, most: int) -> list[int]:
    """The sizes of a micro-batch worth trying for a rank with `rows` rows in a step, ascending, up to `most`.

    For every number of micro-batches the smallest size that needs no more of them: a larger one would add padding only.
    """
    counts = np.arange(1, rows + 1)
    sizes = np.unique(-(-rows // counts))
    return [int(size) for size in sizes if size <= max(1, most)]


def saving_settings(parallel: ParallelConfig) -> list[ParallelConfig]:
    """Recomputation and offload as they are, then what saves more memory, cheapest first."""
    offloads = [parallel.offload]
    if parallel.offload != "weights":
        offloads += ["both" if parallel.offload in ("optimizer", "both") else "activations", "both"]
    saving = [parallel.model_copy(update={"recompute": "full", "offload": offload}) for offload in offloads]
    return [each for number, each in enumerate([parallel, *saving]) if each not in [parallel, *saving][:number]]


def apply_settings(run: Run, parallel: ParallelConfig) -> None:
    """Use other settings of recomputation and offload in a run that is assembled already."""
    before = run.config.parallel
    if parallel == before:
        return
    compiles = should_compile(run.config.model.compile, run.ranks.device, run.precision.compute)
    transform_layers(run.model.language_model, parallel, compiles)
    if parallel.offload in ("optimizer", "both") and before.offload not in ("optimizer", "both"):
        for state in run.optimizer.state.values():
            state_to_host(state)
        offload_optimizer_state(run.optimizer)
        forget_decision(run.optimizer)
    run.config = run.config.model_copy(update={"parallel": parallel})


def largest_fitting(run: Run, sizes: list[int], share: float = MAX_SHARE) -> int | None:
    """The most rows of which the worst batch fits into this share of every rank's device; None: not even the fewest."""
    limit = share * device_memory.capacity(run.ranks.device)
    found: dict[int, WorstBatchMemory] = {}

    def fits(rows: int) -> bool:
        set_micro_rows(run, rows)
        needed = run_worst_batch(run)
        if needed is not None:
            found[rows] = needed
        is_roomy = needed is not None and (share == 1.0 or (needed.peak <= limit and not needed.is_tight))
        return all(run.ranks.all_gather([is_roomy or (needed is not None and rows == sizes[0])]))

    if not has_collectives_in_passes(run.model, run.ranks):
        rows = bisect_largest(sizes, fits)
    elif share == 1.0:  # a given number is tried as it is
        rows = sizes[-1] if fits(sizes[-1]) else None
    else:
        rows = sizes[0] if fits(sizes[0]) else None
        predicted = min(run.ranks.all_gather([_predict_rows(sizes, found[sizes[0]], limit / share)]))
        if predicted > sizes[0] and fits(predicted):
            rows = predicted
    if rows is not None:
        run.worst_batch_gib = found[rows].peak / 2**30
        if rows != run.loader.micro_rows:
            set_micro_rows(run, rows)
    return rows


def _predict_rows(sizes: list[int], smallest: WorstBatchMemory, capacity: float) -> int:
    """The most rows that fit with room to spare, if memory grows with them as it does up to the smallest size."""
    each, room = (smallest.peak - smallest.at_rest) / sizes[0], _MAX_PREDICTED_SHARE * capacity - smallest.at_rest
    return max(rows for rows in sizes if rows == sizes[0] or rows * each <= room)


def bisect_largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of these ascending sizes that fits, if all smaller ones do too; None if none fits. The largest is
    tried first."""
    low, high, attempt = -1, len(sizes), len(sizes) - 1  # sizes[low] fits, sizes[high] does not
    while low + 1 < high:
        if fits(sizes[attempt]):
            low = attempt
        else:
            high = attempt
        attempt = (low + high) // 2
    return sizes[low] if low >= 0 else None


def _verify(run: Run, choice: MemoryChoice) -> bool:
    """Use a choice that was made before, if its worst batch fits."""
    parallel = choice.allowed_by(run.config.parallel)
    if parallel is None:
        return False
    apply_settings(run, parallel)
    set_micro_rows(run, choice.micro_rows)
    needed = run_worst_batch(run)
    run.worst_batch_gib = None if needed is None else needed.peak / 2**30
    return all(run.ranks.all_gather([needed is not None]))


def _report(run: Run, config: Config, is_auto: bool) -> None:
    choice = MemoryChoice.of(run)
    given = config.train.micro_rows
    if given != "auto" and not run.model.unpacked and choice.micro_rows < given:
        warn(
            f"train.micro_rows: {given} rows do not fit into this device's memory; the run uses {choice.micro_rows}, "
            "with the same loss. Set parallel.recompute=full to use more"
        )
    if is_auto and run.model.is_stochastic and not run.model.unpacked:
        info(
            "train.micro_rows: auto is 1, because the model draws random numbers that depend on it. Set "
            "train.micro_rows to use more"
        )
    elif is_auto:
        tokens = choice.micro_rows * config.row_length
        info(f"train.micro_rows: auto is {choice.micro_rows}: up to {tokens:,} tokens at once, the worst batch fits")
    if is_auto and (choice.recompute, choice.offload) != (config.parallel.recompute, config.parallel.offload):
        info(f"one row needs more memory than this device has: {choice} makes it fit, slower, with the same loss")


# What was chosen before: by this run, or by another with the same model on the same card.


def with_previous_choice(config: Config, ranks: Ranks) -> Config:
    """The configuration of a run with `micro_rows: auto` as its last process chose, if that was on the same card and
    number of processes."""
    if config.train.micro_rows != "auto":
        return config
    file, found = config.folder / "plan.json", dict[str, Any]()
    try:
        if ranks.is_main and file.exists():
            found = read_hashed_json(file, "The micro-batch is measured again")
    except WhetError as error:
        warn(str(error))
    [found] = ranks.all_gather([found] if ranks.is_main else [])
    here = {"device_name": device_name(ranks.device), "world": ranks.world_size}
    choice = MemoryChoice.from_json(found)
    if choice is None:
        return config
    if not here.items() <= found.items():
        if device_memory.has_own_memory(ranks.device):
            info(
                f"the run was on {found.get('world')} × {found.get('device_name')} and is now on {here['world']} × "
                f"{here['device_name']}: its micro-batch is measured again"
            )
        return config
    parallel = choice.allowed_by(config.parallel) or config.parallel
    train = config.train.model_copy(update={"micro_rows": choice.micro_rows})
    return config.model_copy(update={"train": train, "parallel": parallel})


def _read_cache(run: Run, config: Config) -> MemoryChoice | None:
    """Rank 0's, for all."""
    choice = None
    if run.ranks.is_main:
        file = cache_file(run, config)
        with contextlib.suppress(WhetError):  # missing or damaged: measured again
            choice = MemoryChoice.from_json(read_hashed_json(file))
    [choice] = run.ranks.all_gather([choice] if run.ranks.is_main else [])
    return choice


def write_cache(run: Run, config: Config, choice: MemoryChoice) -> None:
    """Keep a choice for other runs with this model on this card."""
    file = cache_file(run, config)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_hashed_json(file, asdict(choice))


def cache_file(run: Run, config: Config) -> Path:
    """By model, card and versions, and all settings that a step's memory depends on."""
    model: Any = run.model.language_model
    depends_on = {
        "model": model.config.to_dict() if hasattr(model, "config") else str(model),
        "weights": [sum(weight.numel() for weight in model.parameters()), str(run.precision.weights)],
        "adapter": None if config.adapter is None else config.adapter.model_dump(mode="json"),
        "settings": [
            config.quantize, run.precision.name, config.train.optimizer.name, config.row_length, config.data.packing,
            config.model.attention, config.model.compile, run.loader.max_rank_rows,
            config.parallel.model_dump(mode="json"),
        ],
        "device": [device_name(run.ranks.device), device_memory.capacity(run.ranks.device) >> 30, run.ranks.world_size],
        "versions": package_versions(),
    }  # fmt: skip
    return cache_dir() / "fit" / f"{hash_json(depends_on)}.json"


# The plan's worst micro-batch, computed before step 1 to see whether it fits. Nothing of the run changes.

_SMALL_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class WorstBatchMemory:
    """What the worst micro-batch needed on this rank's device, in bytes."""

    at_rest: int
    """Before it: weights, and optimizer state where it exists already."""
    peak: int
    is_tight: bool
    """Whether the device was so full that cached memory had to be freed for it."""


def run_worst_batch(run: Run) -> WorstBatchMemory | None:
    """Forward and backward passes over the worst micro-batch, and an optimizer step that changes no weight.

    None: the device has too little memory. Weights, optimizer state, random numbers and CUDA graphs are then as before;
    the optimizer's state, which the first step would allocate, may exist now, filled with zeros.
    """
    PHASE.enter("running the worst batch")
    device = run.ranks.device
    device_memory.free_cached(device)
    device_memory.reset_peak(device)
    at_rest, failed = device_memory.allocated(device), device_memory.failed_allocations(device)
    fits = _fits(run)
    peak, is_tight = device_memory.peak_allocated(device), device_memory.failed_allocations(device) > failed
    device_memory.free_cached(device, after_failure=not fits)
    device_memory.reset_peak(device)
    return WorstBatchMemory(at_rest, peak, is_tight) if fits else None


def _fits(run: Run) -> bool:
    """In a function of its own: when it returns, no frame of a failed pass holds tensors any more. Where other ranks
    wait in a collective of the pass, the error is raised and ends the run for all."""
    try:
        with _unchanged(run):
            _compute_worst_batch(run)
    except torch.OutOfMemoryError:
        if has_collectives_in_passes(run.model, run.ranks):
            raise
        return False
    return True


def _compute_worst_batch(run: Run) -> None:
    """Twice if gradients are allocated in the forward pass, those of an earlier micro-batch or, where steps overlap, of
    an earlier step; or if it is captured in CUDA graphs, which happens when its shape comes again."""
    model, device = run.model, run.ranks.device
    reshard(model)
    model.train()
    reserved = _allocate_optimizer_state(run)
    batch = run.loader.worst_batch().to(device)
    keeps_gradients = run.loader.max_rank_rows > run.loader.micro_rows or starts_early(run)
    passes = 2 if keeps_gradients or uses_cuda_graphs(model) else 1
    for number in range(passes):
        set_gradient_sync(model, number == passes - 1)
        if not keeps_gradients:
            _drop_gradients(run)
        with run.autocast:
            loss = model(batch, run.loss_scaler.value / max(1, len(batch.supervised_at)))
        loss.objective.backward()
        del loss
    run_skipped_update(run)
    del reserved


def _allocate_optimizer_state(run: Run) -> torch.Tensor | None:
    """torch's AdamW would allocate its state in the first step, and every later forward pass runs beside it. Where the
    update can be skipped it is allocated now, filled with zeros; elsewhere the result has as many bytes."""
    optimizer, device = run.optimizer, run.ranks.device
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    without = [weight for weight in weights if not optimizer.state.get(weight)]
    if not without or getattr(optimizer, "steps_in_chunks", False) or run.config.parallel.offload == "weights":
        return None
    if not decides_on_device(optimizer):
        needed = sum(2 * local_tensor(weight).nbytes for weight in without)
        return torch.empty(needed, dtype=torch.uint8, device=device)
    for weight in without:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    run_skipped_update(run)
    _drop_gradients(run)
    return None


def run_skipped_update(run: Run) -> None:
    """An optimizer step that changes no weight, where its kernel can skip it."""
    if decides_on_device(run.optimizer):
        one, zero = (torch.full((), value, dtype=torch.float64, device=run.ranks.device) for value in (1.0, 0.0))
        apply_gradients(run.optimizer, one, is_sound=zero)
        retract_step(run.optimizer)


def _drop_gradients(run: Run) -> None:
    for parameter in run.model.trainable_parameters:
        parameter.grad = None


@contextlib.contextmanager
def _unchanged(run: Run) -> Iterator[None]:
    """Restores generators, small buffers (a model may count in them), gradients and CUDA graphs."""
    device = run.ranks.device
    buffers = [buffer for buffer in run.model.buffers() if 0 < buffer.nbytes <= _SMALL_BUFFER_BYTES]
    before = [buffer.clone() for buffer in buffers]
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        try:
            yield
        finally:
            _drop_gradients(run)
            reshard(run.model)
            set_micro_rows(run, run.loader.micro_rows)  # forgets the CUDA graphs and the shapes seen for them
            for buffer, old in zip(buffers, before, strict=True):
                if not torch.equal(buffer, old):
                    buffer.copy_(old)
