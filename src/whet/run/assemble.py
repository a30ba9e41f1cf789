"""Builds a run: model, optimizer, loader, guard, files and checkpoints, restored from the newest checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.directory import lower_is_better, require_checkpoint_space
from whet.checkpoint.save import CheckpointSaver
from whet.config import Config
from whet.core.console import info, warn
from whet.core.display import mask_settings
from whet.core.distributed import Ranks
from whet.core.errors import StoppedError, WhetError
from whet.core.heartbeat import PHASE
from whet.core.launch_env import process_layout
from whet.core.resources import cores_per_process
from whet.core.run_folder import RunFolder
from whet.core.watchdog import COLLECTIVE_MARGIN_S
from whet.data.loader import Loader
from whet.data.plan.planner import Plan
from whet.data.prepare.store import StoreCheck
from whet.evaluation.training_losses import TRAINING_LOSSES
from whet.execution import device_memory
from whet.execution.compile import should_compile
from whet.execution.offload import offload_optimizer_state
from whet.execution.transform import transform_layers
from whet.model.experts.install import experts_modules
from whet.model.experts.routing import ExpertLoad
from whet.model.flops import count_step_flops, device_peak_flops
from whet.model.loss.loss_model import LossModel
from whet.model.quantize import dequantized_bytes
from whet.parallel.ddp import broadcast_weights
from whet.parallel.mesh import Mesh, build_mesh
from whet.parallel.ulysses import apply_ulysses
from whet.run.data import RunData
from whet.run.evaluation import evaluate_run, require_prompts
from whet.run.loader import make_loader
from whet.run.memory_choice import with_previous_choice
from whet.run.models.model_builder import (
    BackgroundModelLoader,
    build_loss_model,
    build_model,
    build_sharded_loss_model,
)
from whet.run.plan_summary import run_flops_table
from whet.run.step_rows import find_shortage
from whet.training.checkpoints import (
    checkpoint_metadata,
    read_excluded_steps,
    restore_newest_checkpoint,
)
from whet.training.config import TrainConfig
from whet.training.effect_meter import EffectMeter
from whet.training.guard import Guard
from whet.training.metrics import RunTotals, StartupTimer
from whet.training.optimizers.factory import build_optimizer, optimizer_state_bytes
from whet.training.output import FolderOutput, RunOutput
from whet.training.precision import LossScaler, PrecisionPolicy, choose_precision
from whet.training.profiler import make_profiler
from whet.training.records import RECORDS, record_file
from whet.training.run_state import Intervals, Run
from whet.training.tracker_backends import TrackedRun
from whet.training.trackers import open_trackers


@contextlib.contextmanager
def assemble(
    config: Config, data: RunData, store_check: StoreCheck, loading: BackgroundModelLoader, folder: RunFolder | None,
    ranks: Ranks, *, is_new: bool, until: int | None, save: bool, startup: StartupTimer, trackers: Sequence[str],
) -> Iterator[Run]:  # fmt: skip
    """The run, restored from its newest checkpoint and ready for its next step. Leaving the block closes its files.

    `folder` is rank 0's alone. `is_new`: whether nothing was here before. `until`: the step after which this process
    ends. `save`: whether to write checkpoints.
    """
    PHASE.enter("loading the model", unbounded=True)
    if data.validation is not None and not data.validation.targets[data.validation_documents].any():
        raise WhetError(
            "data.validation: none of its conversations has anything to learn, so there is nothing to measure. Give "
            "others, or leave it out"
        )
    mesh = build_mesh(config.parallel, ranks)
    ranks = mesh.ranks
    given, config = config, with_previous_choice(config, ranks)
    precision = choose_precision(config, ranks.device)
    plan = Plan.load(config.folder / "plan")
    model = _build_training_model(config, data, loading, mesh, precision)
    require_prompts(config, data, model)
    if model.unpacked:
        plan = plan.unpacked(data.train.store.lengths)
    check_rows(config, data, plan, bool(model.unpacked), is_new)
    config, optimizer = build_run_optimizer(config, model, ranks)
    if config.train.start_step >= len(plan):
        raise WhetError(
            f"train.start_step: {config.train.start_step}, but this run has only {len(plan)} steps. Lower it, or "
            "make the run longer"
        )
    if folder is not None and save:
        _require_disk_space(config, folder, model, optimizer, len(plan))
    loss_scaler = LossScaler.for_fp16() if precision.name == "fp16" else LossScaler()
    startup.end_phase("load_s")

    effect = EffectMeter(model, ranks)  # before a checkpoint replaces the weights
    restored = restore_newest_checkpoint(config, model, optimizer, loss_scaler, ranks)
    step = restored.step
    last = min(until or plan.last_step, plan.last_step)
    if step > last:
        raise WhetError(f"--until {last}: this run has done {step} steps already. Give a later step, or leave it out")
    guard = Guard(
        config.train.on_nonfinite, config.train.on_spike, read_excluded_steps(config.folder, restored.guard["excluded"])
    )
    guard.restore(restored.guard)
    peak = device_peak_flops(ranks.device, precision.name)
    with contextlib.ExitStack() as stack:
        saver = stack.enter_context(_open_saver(given, model, optimizer, ranks, restored.evaluations)) if save else None
        output = RunOutput()
        if folder is not None:
            folder.step_offset = plan.step_offset
            folder.set_status("running", step, plan.last_step)
            opened = open_trackers(trackers, _tracked_run(config, step))
            output = FolderOutput(folder, step, plan.last_step, restored.prefixes, opened)
        stack.enter_context(_closing(output, lambda: run.step >= plan.last_step or run.ends_early()))
        loader = make_loader(config, data.train.store, plan, ranks, model)
        stack.callback(lambda: run.loader.close())
        run = Run(
            config=config,
            ranks=ranks,
            precision=precision,
            plan=plan,
            store=data.train.store,
            store_check=store_check,
            tokenizer=data.tokenizer,
            loader=loader,
            model=model,
            optimizer=optimizer,
            loss_scaler=loss_scaler,
            guard=guard,
            intervals=_intervals(config, plan, last, restored.has_initial_evaluation),
            evaluate=lambda: evaluate_run(run.config, data, model, ranks, precision),
            saver=saver,
            output=output,
            startup=startup,
            effect=effect,
            flops=count_step_flops(model.language_model),
            peak_flops=None if peak is None else peak * ranks.world_size,
            step=step,
            totals=totals_before(loader, config.train) if restored.totals == RunTotals() else restored.totals,
            evaluations=restored.evaluations,
        )
        run.profiler = make_profiler(config.profile, config.folder, ranks, len(plan), partial(run_flops_table, run))
        stack.enter_context(contextlib.closing(run.profiler))
        yield run


@contextlib.contextmanager
def _closing(output: RunOutput, is_finished: Callable[[], bool]) -> Iterator[None]:
    """Close the output with the state in which training ends."""
    state = "failed"
    try:
        yield
        state = "finished" if is_finished() else "stopped"
    except (StoppedError, KeyboardInterrupt):
        state = "stopped"
        raise
    finally:
        output.close(state)


def _tracked_run(config: Config, step: int) -> TrackedRun:
    """What trackers, which others may read, show of the run: the addresses in run.notify often hold a secret."""
    settings = config.unexpanded()
    settings["run"].pop("notify", None)
    name = config.run.name or config.folder.name
    return TrackedRun(config.folder, name, config.run.project or "whet", config.run.tags, mask_settings(settings), step)


def check_rows(config: Config, data: RunData, plan: Plan, unpacked: bool, is_new: bool) -> None:
    """Refuse a new run whose steps have too few rows for its processes; a resumed one keeps its steps."""
    shortage = find_shortage(config, data, plan, *process_layout(), unpacked, is_new)
    if shortage is not None and is_new:
        raise WhetError(shortage)
    if shortage is not None:
        warn(f"{shortage}. Until then the run continues with the same samples, and some devices are idle")


def _build_training_model(
    config: Config, data: RunData, loading: BackgroundModelLoader, mesh: Mesh, precision: PrecisionPolicy
) -> LossModel:
    """The model with its loss, sharded or replicated, with compiled layers, recomputation and CUDA graphs."""
    ranks, device = mesh.ranks, mesh.ranks.device
    tokens = len(data.tokenizer)  # read while the model is loaded
    longest, typical = data.max_document_length, data.typical_length
    base = build_model(config, precision, device, tokens, loading.model, typical)
    if mesh.fsdp_mesh is None:
        model = build_loss_model(config, base, precision, device, tokens, longest)
    else:
        model = build_sharded_loss_model(config, base, precision, mesh, tokens, longest, typical, loading.source)
    if experts_modules(model.language_model):
        model.expert_load = ExpertLoad(model.language_model, device)
    compiles = should_compile(config.model.compile, device, precision.compute)
    apply_ulysses(model, mesh)
    transform_layers(model.language_model, config.parallel, compiles)  # after the packing check and its short rows
    if mesh.fsdp_mesh is None:
        broadcast_weights(model, ranks)
    if config.parallel.offload == "weights":  # the host runs the optimizer, and torchrun gives it one thread
        torch.set_num_threads(cores_per_process())
    return model


def build_run_optimizer(config: Config, model: LossModel, ranks: Ranks) -> tuple[Config, torch.optim.Optimizer]:
    """The optimizer, and the configuration with which it was built: with `micro_rows: auto`, a state for which a device
    has no room is offloaded."""
    optimizer: torch.optim.Optimizer | None = None
    is_offloaded = config.parallel.offload in ("optimizer", "both")
    is_movable = config.parallel.offload in ("none", "activations")
    can_offload = is_movable and config.train.micro_rows == "auto" and device_memory.has_own_memory(ranks.device)
    try:
        optimizer = build_optimizer(model, config.train.optimizer, config.run.seed, is_offloaded)
    except torch.OutOfMemoryError:
        if not can_offload:
            raise
    if can_offload and not all(ranks.all_gather([optimizer is not None])):
        optimizer = None
        device_memory.free_cached(ranks.device, after_failure=True)
        offload = "both" if config.parallel.offload == "activations" else "optimizer"
        info(f"the device has no room for the optimizer's state: parallel.offload={offload}, with the same loss")
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"offload": offload})})
        optimizer = build_optimizer(model, config.train.optimizer, config.run.seed, offloaded=True)
    assert optimizer is not None
    if config.parallel.offload in ("optimizer", "both"):
        offload_optimizer_state(optimizer)
    return config, optimizer


def _require_disk_space(
    config: Config, folder: RunFolder, model: LossModel, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    export = dequantized_bytes(model.language_model) if config.export.at_end in ("merged", "hf", "gguf") else 0
    weights = sum(weight.nbytes for weight in model.trainable_parameters)
    checkpoint = config.checkpoint
    require_checkpoint_space(
        folder.path, weights, optimizer_state_bytes(optimizer), checkpoint.retention, steps,
        checkpoint.optimizer, export,
    )  # fmt: skip


def _open_saver(
    config: Config, model: LossModel, optimizer: torch.optim.Optimizer, ranks: Ranks,
    evaluations: dict[int, dict[str, float]],
) -> CheckpointSaver:  # fmt: skip
    """With the scores of the checkpoints that exist."""
    saver = CheckpointSaver(
        config.folder / "checkpoints", model, optimizer, ranks,
        replace(config.checkpoint.retention, offset=config.train.step_offset),
        config.checkpoint.optimizer, partial(checkpoint_metadata, config), lower_is_better(config.eval.best),
        60.0 * config.parallel.timeout + COLLECTIVE_MARGIN_S,
        [*(record_file(config.folder, name) for name in RECORDS), config.folder / TRAINING_LOSSES],
    )  # fmt: skip
    best = config.eval.best
    saver.add_scores({step: results[best] for step, results in evaluations.items() if best in results})
    return saver


def _intervals(config: Config, plan: Plan, last: int, has_initial_evaluation: bool) -> Intervals:
    return Intervals(
        steps=plan.last_step,
        last=last,
        evaluate_every=config.eval.every,
        evaluate_at_start=config.eval.at_start and not has_initial_evaluation,
        save_every=_save_every(config.checkpoint, len(plan)),
        save_epochs=config.checkpoint.epochs,
        save_evaluated=config.checkpoint.keep_best > 0,
        first=config.train.first_step,
        offset=plan.step_offset,
    )


def _save_every(config: CheckpointConfig, steps: int) -> int | None:
    return config.every if config.every or config.minutes or config.epochs else max(1, steps // 10)


def totals_before(loader: Loader, train: TrainConfig) -> RunTotals:
    """The totals of steps that count as done (train.start_step); nothing was computed for them."""
    totals = [loader.totals(step) for step in range(train.step_offset, train.first_step)]
    return RunTotals(
        sum(each.conversations for each in totals),
        sum(each.tokens for each in totals),
        sum(each.supervised for each in totals),
    )
