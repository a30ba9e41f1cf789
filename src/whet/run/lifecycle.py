"""The whole run: prepare, plan, assemble, train, evaluate, save, export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from whet.checkpoint.directory import require_checkpoint_space
from whet.config import Config
from whet.core import launch_env
from whet.core.console import info, set_quiet, silence_libraries, warn
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import RunFailedError, StoppedError, WhetError, first_line
from whet.core.files import write_json
from whet.core.heartbeat import PHASE
from whet.core.resources import cores_per_process
from whet.core.run_folder import RunFolder, read_status
from whet.core.signals import raise_on_stop_signals
from whet.core.watchdog import COLLECTIVE_MARGIN_S
from whet.data.plan.planner import Plan, packing_efficiency
from whet.data.prepare.workers import run_while_waiting
from whet.execution.compile import should_compile
from whet.execution.cuda_graphs import enable_cuda_graphs, release_cuda_graphs, uses_cuda_graphs
from whet.execution.offload import offload_optimizer_state
from whet.execution.transform import transform_layers
from whet.exporting.spec import ExportMismatchError
from whet.inference.tasks.load_tasks import load_tasks
from whet.model import attention
from whet.model.fp8.conversion import count_fp8_layers
from whet.model.load.random_models import is_random_model
from whet.model.peak_flops import device_name, device_peak_flops
from whet.model.quantize import (
    MIN_QUANTIZED_SHARE,
    count_weights,
    dequantized_bytes,
    quantized_share,
    require_bitsandbytes,
)
from whet.parallel.ddp import accumulate_in_fp32, broadcast_weights
from whet.parallel.fsdp import is_sharded
from whet.parallel.mesh import Mesh, build_mesh
from whet.parallel.ulysses import apply_ulysses
from whet.run.assemble import (
    BackgroundModelLoader,
    build_loss_model,
    build_model,
    build_sharded_loss_model,
    max_micro_batches,
    require_tensor_parallel_plan,
    set_deterministic,
)
from whet.run.data import RunData, prepare_data
from whet.run.export_run import ExportRequest, export_model
from whet.run.multiprocess import HangDetector, report_failures, require_consistent_ranks, store_digests
from whet.run.resume import open_run_folder, recorded_template_date, write_run_inputs
from whet.run.training_loop import AssembledRun, StartupTimer, end_position, train_from_checkpoint
from whet.training.loss_scale import LossScaler
from whet.training.optimizers.factory import build_optimizer, optimizer_state_bytes
from whet.training.precision import choose_precision
from whet.training.schedule import warmup_fills_run
from whet.training.trackers import check_trackers

# plan.json: what was decided before the first step, for people and for other programs.


def describe_run(run: AssembledRun) -> dict[str, Any]:
    """The run in numbers and names."""
    config, plan, device = run.config, run.plan, run.ranks.device
    parameters = list(run.model.parameters())
    return {
        "steps": len(plan),
        "rows": len(plan.rows) - 1,
        "conversations": len(plan.documents),
        "conversations_per_epoch": plan.stats.per_epoch,
        "epochs": len(plan.documents) / plan.stats.per_epoch,
        "tokens": plan.stats.tokens,
        "supervised_tokens": int(run.data.train.store.targets[plan.documents].sum()),
        "efficiency": packing_efficiency(plan, config.row_length),
        "row_length": config.row_length,
        "micro_rows": config.train.micro_rows,
        "world": run.ranks.world_size,
        "batch": config.train.batch.model_dump(exclude_none=True),
        "packing": config.data.packing,
        "parameters": sum(map(count_weights, parameters)),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "device": device.type,
        "device_name": device_name(device),
        "peak_flops": device_peak_flops(device, run.precision.name),
        "precision": run.precision.name,
        "quantize": config.quantize,
        "eight_bit_layers": count_fp8_layers(run.root),
        "attention": attention.describe_backend(run.root.language_model),
        "compiled": should_compile(config.model.compile, device, run.precision.compute),
        "recorded": uses_cuda_graphs(run.root),
        **config.parallel.model_dump(),
    }


# The whole run: prepare, plan, train, evaluate, save, export.


def run_training(config: Config, resume: bool, until: int | None = None, keeps: bool = True) -> None:
    """The whole run: prepare, plan, train, evaluate, save, export.

    `until`: pause after that step, with the schedule of the whole run. `keeps`: write checkpoints and the export.
    """
    first_step = StartupTimer()
    first_step.end_phase("import_s")
    rank, world = launch_env.rank(), launch_env.world_size()
    if rank > 0:
        set_quiet()
    silence_libraries()
    set_deterministic(config)  # before a thread uses the device
    load_tasks(config.eval)
    trackers = check_trackers(config.track)
    if config.quantize is not None:
        require_bitsandbytes()
    require_tensor_parallel_plan(config)
    finished = resume and read_status(config.folder).get("state") == "finished"
    patience_s = 60.0 * config.parallel.timeout
    PHASE.enter("preparing data", unbounded=True)
    with (
        raise_on_stop_signals(),
        contextlib.closing(HangDetector(config.folder, rank, world, patience_s)) as watch,
        _background_model_loader(config) as loading,
        open_run_folder(config, resume, first=rank == 0) as folder,
    ):
        if finished:
            info(f"{config.folder}: this run is finished; nothing to do")
            return
        if resume and folder is not None and not folder.holds_run():
            info(f"{config.folder}: there is nothing to resume; the run begins at its start")
        with run_while_waiting(loading.start):
            data = prepare_data(config, recorded_template_date(config.folder))
        if folder is not None:
            write_run_inputs(folder, config, data)
        stores = store_digests(data) if world > 1 else {}
        PHASE.enter("joining the others")
        ranks = init_distributed(patience_s + COLLECTIVE_MARGIN_S)
        with _process_group(ranks):
            watch.start()
            with report_failures(config.folder, rank, world):
                require_consistent_ranks(
                    config.folder, stores, ranks
                )  # rank 0 has written the plan: all may read it now
                first_step.end_phase("prepare_s")
                run = _assemble_and_train(config, data, loading, folder, ranks, until, keeps, first_step, trackers)
            watch.close()
        if folder is not None:  # alone: nobody waits for what one process writes
            with report_failures(config.folder, rank, world):
                _finish(run, folder)


@contextlib.contextmanager
def _process_group(ranks: Ranks) -> Iterator[None]:
    """Leave the others at the end. After an error a GPU's group would wait there for those who still compute, so the
    process ends without leaving, which they notice."""
    try:
        yield
    except StoppedError:
        ranks.shutdown()
        raise
    except BaseException:
        if ranks.device.type == "cpu" or ranks.world_size == 1:
            ranks.destroy()
        raise
    ranks.shutdown()


def _assemble_and_train(
    config: Config, data: RunData, loading: BackgroundModelLoader, folder: RunFolder | None, ranks: Ranks, until: int | None,
    keeps: bool, first_step: StartupTimer, trackers: list[str],
) -> AssembledRun:  # fmt: skip
    """All that is done together."""
    try:
        PHASE.enter("loading the model", unbounded=True)
        mesh = build_mesh(config.parallel, ranks)
        run = _assemble(config, data, loading, folder, mesh, until, keeps, first_step)
        first_step.end_phase("load_s")
        train_from_checkpoint(run, trackers)
        return run
    except torch.OutOfMemoryError as error:
        raise RunFailedError(
            f"the device has too little memory: {first_line(error)} Lower train.micro_rows or "
            "data.max_length, set parallel.recompute=full or parallel.offload, train an adapter instead of every "
            "weight, or use a larger device"
        ) from None


@contextlib.contextmanager
def _background_model_loader(config: Config) -> Iterator[BackgroundModelLoader]:
    """The model's thread ends with whatever ends the run."""
    loading = BackgroundModelLoader(config)
    try:
        yield loading
    finally:
        loading.abandon()


def _assemble(
    config: Config, data: RunData, loading: BackgroundModelLoader, folder: RunFolder | None, mesh: Mesh, until: int | None,
    keeps: bool, first_step: StartupTimer,
) -> AssembledRun:  # fmt: skip
    """Everything that the steps need, decided and checked before the first of them."""
    ranks = mesh.ranks
    if data.validation is not None and not data.validation.targets[data.validation_documents].any():
        raise WhetError(
            "data.validation: none of its conversations has anything to learn, so there is nothing to measure. Give "
            "others, or leave it out"
        )
    precision = choose_precision(config, ranks.device)
    tokens = len(data.tokenizer)  # read while the model is loaded
    model = build_model(config, precision, ranks.device, tokens, loading.model, data.typical_length)
    if mesh.fsdp_mesh is None:
        root = build_loss_model(config, model, precision, ranks.device, tokens, data.max_document_length)
    else:
        source, typical = loading.source, data.typical_length
        root = build_sharded_loss_model(
            config, model, precision, mesh, tokens, data.max_document_length, typical, source
        )
    compiling = should_compile(config.model.compile, ranks.device, precision.compute)
    apply_ulysses(root, mesh)
    transform_layers(
        root.language_model, config.parallel, compiling
    )  # after the probe, whose short rows would be compiled too
    if compiling and ranks.device.type == "cuda" and ranks.world_size == 1 and config.parallel.offload == "none":
        enable_cuda_graphs(
            root, config.train.micro_rows * config.row_length, device_peak_flops(ranks.device, precision.name)
        )
    if mesh.fsdp_mesh is None:
        broadcast_weights(root, ranks)
    if config.parallel.offload == "weights":  # torchrun gives each process one thread, and the host takes the steps
        torch.set_num_threads(cores_per_process())
    away = config.parallel.offload in ("optimizer", "both")
    optimizer = build_optimizer(root, config.train.optimizer, config.run.seed, away)
    if away:
        offload_optimizer_state(optimizer)
    plan = Plan.load(config.folder / "plan")
    if mesh.fsdp_mesh is None and precision.weights == torch.bfloat16 and max_micro_batches(config, plan, ranks) > 1:
        accumulate_in_fp32(root)
    run = AssembledRun(
        config=config, data=data, plan=plan, ranks=ranks, precision=precision, model=model, root=root,
        optimizer=optimizer, loss_scale=LossScaler.for_fp16() if precision.name == "fp16" else LossScaler(),
        folder=folder, last=min(until or len(plan), len(plan)), keeps=keeps,
        first_step=first_step,
    )  # fmt: skip
    if folder is not None and keeps:
        export = dequantized_bytes(model) if config.export.at_end in ("merged", "hf", "gguf") else 0
        saved = config.checkpoint
        require_checkpoint_space(
            folder.path, sum(weight.nbytes for weight in root.trainable_parameters), optimizer_state_bytes(optimizer), saved.retention,
            len(plan), saved.optimizer == "all", export,
        )  # fmt: skip
    if folder is not None:
        write_json(folder.path / "plan.json", describe_run(run))
    _print_summary(run)
    return run


def _print_summary(run: AssembledRun) -> None:
    config, plan = run.config, run.plan
    if is_random_model(config.model.path):
        warn(
            f"model.path: {config.model.path}: the weights are random; this run is good for its speed and nothing else"
        )
    if run.root.unpacked:
        info("conversations would see each other in this model if they were packed: it gets them one by one")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in run.root.modules()):
        info("dropout is on: it falls differently for other train.micro_rows and numbers of processes")
    if getattr(run.model.config, "output_router_logits", False):
        warn("the model's configuration asks for an auxiliary loss of its router; whet does not add it")
    if config.quantize is not None and (part := quantized_share(run.model)) < MIN_QUANTIZED_SHARE:
        warn(
            f"quantize: only {part:.0%} of this model's weights are in {config.quantize}: embeddings, and experts "
            "fused into one weight, cannot be in it"
        )
    eight_bits = count_fp8_layers(run.root)
    if eight_bits:
        info(f"{eight_bits} layers multiply in 8 bits; measuring and exporting do not")
    if eight_bits and not should_compile(config.model.compile, run.ranks.device, run.precision.compute):
        warn("train.precision: without compiling, rounding to 8 bits takes longer than it saves; see model.compile")
    room = getattr(run.model.config, "max_position_embeddings", plan.stats.longest)
    if plan.stats.longest > room:
        warn(
            f"the longest conversation has {plan.stats.longest} tokens, but the model was made for {room}; lower "
            "data.max_length"
        )
    schedule = config.train.schedule
    whole = end_position(plan).in_units_of(schedule)
    if warmup_fills_run(whole, schedule):
        warn(
            f"train.schedule.warmup: {schedule.warmup} takes the whole run of {whole:g} {schedule.by}s, so the rate "
            "only rises"
        )
    info(
        f"{len(plan)} {'step' if len(plan) == 1 else 'steps'} on {run.ranks.world_size} × {run.ranks.device.type}, "
        f"{run.precision.name}: "
        f"{', '.join(f'{n} {unit}' for unit, n in config.train.batch.model_dump(exclude_none=True).items())} a step, "
        f"{plan.stats.per_epoch} conversations an epoch"
    )


def _finish(run: AssembledRun, folder: RunFolder) -> None:
    """Ship what was learned; a run that pauses before its end ships nothing yet."""
    steps, kind = len(run.plan), run.config.export.at_end
    if run.last < steps:
        info(f"paused after step {run.last} of {steps}, as asked; --resume goes on")
        folder.set_status("stopped", run.last, steps, exit_code=0)
        return
    if run.keeps and kind != "none":
        _export(run, kind, steps)
    folder.set_status("finished", steps, steps, exit_code=0)


def _export(run: AssembledRun, kind: str, step: int) -> None:
    """From the last checkpoint: what was trained in memory gives it back first."""
    divided = is_sharded(run.root)
    release_cuda_graphs(run.root)
    run.optimizer.state.clear()
    for tensor in () if divided else (*run.root.parameters(), *run.root.buffers()):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    ranks = Ranks(0, 1, torch.device("cpu")) if divided else run.ranks
    try:
        export_model(run.config, run.data, ExportRequest(kind), step, ranks, is_final=True)
    except ExportMismatchError as error:
        raise RunFailedError(str(error)) from error
