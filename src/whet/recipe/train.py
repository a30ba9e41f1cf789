"""The whole run: prepare, plan, train, evaluate, save, export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from whet.checkpoint.export.certificate import NotTheSameError
from whet.checkpoint.place import need_room
from whet.config import Config
from whet.core.console import be_quiet, say, warn
from whet.core.cores import my_cores
from whet.core.errors import RunFailedError, StoppedError, WhetError
from whet.core.files import write_json
from whet.core.interrupt import terminate_like_ctrl_c
from whet.core.ranks import Ranks, start_ranks, who_am_i
from whet.core.run import RunFolder, read_status
from whet.core.watchdog import MARGIN_S
from whet.core.whereabouts import HERE
from whet.data.plan import Plan
from whet.data.pool import beside
from whet.infer.tasks.find import find_tasks
from whet.model.fp8 import in_fp8
from whet.model.peaks import device_peak
from whet.model.quantize import MOST, need_bitsandbytes, plain_bytes, quantized_part
from whet.model.shapes import is_random
from whet.parallel.apply import apply
from whet.parallel.compile import compiles
from whet.parallel.mesh import Mesh, arrange
from whet.parallel.offload import keep_state_on_host
from whet.parallel.replay import forget, replay_
from whet.parallel.replicate import start_equal, sum_in_fp32
from whet.parallel.shard import is_sharded
from whet.parallel.ulysses import work_together
from whet.recipe.ahead import Loading
from whet.recipe.data import Data, hush_libraries, prepare_data
from whet.recipe.describe import describe_plan
from whet.recipe.first_step import FirstStep
from whet.recipe.folder import begin, frozen_date, run_folder
from whet.recipe.loop import Assembled, end_of, learn
from whet.recipe.parts import (
    be_deterministic,
    build_model,
    choose_arithmetic,
    make_divided_root,
    make_root,
    most_micro_batches,
)
from whet.recipe.ship import Wish, export_model
from whet.recipe.survive import Watch, heard
from whet.recipe.tensor import need_tensor_plan
from whet.recipe.together import check_together, digests
from whet.train.loss_scale import LossScale
from whet.train.optim import make_optimizer, state_bytes
from whet.train.schedule import never_falls
from whet.train.track import check_trackers


def train(config: Config, resume: bool, until: int | None = None, keeps: bool = True) -> None:
    """The whole run: prepare, plan, train, evaluate, save, export.

    `until`: pause after that step, with the schedule of the whole run. `keeps`: write checkpoints and the export.
    """
    first_step = FirstStep()
    first_step.ends("import_s")
    rank, world = who_am_i()
    if rank > 0:
        be_quiet()
    hush_libraries()
    be_deterministic(config)  # before a thread uses the device
    find_tasks(config.eval)
    trackers = check_trackers(config.track)
    if config.quantize is not None:
        need_bitsandbytes()
    need_tensor_plan(config)
    finished = resume and read_status(config.folder).get("state") == "finished"
    patience_s = 60.0 * config.parallel.timeout
    HERE.at("preparing data", long=True)
    with (
        terminate_like_ctrl_c(),
        contextlib.closing(Watch(config.folder, rank, world, patience_s)) as watch,
        _loading(config) as loading,
        run_folder(config, resume, first=rank == 0) as folder,
    ):
        if finished:
            say(f"{config.folder}: this run is finished; nothing to do")
            return
        if resume and folder is not None and not folder.holds_run():
            say(f"{config.folder}: there is nothing to resume; the run begins at its start")
        with beside(loading.begin):
            data = prepare_data(config, frozen_date(config.folder))
        if folder is not None:
            begin(folder, config, data)
        stores = digests(data) if world > 1 else {}
        HERE.at("joining the others")
        ranks = start_ranks(patience_s + MARGIN_S)
        with _joined(ranks):
            watch.begin()
            with heard(config.folder, rank, world):
                check_together(config.folder, stores, ranks)  # rank 0 has written the plan: all may read it now
                first_step.ends("prepare_s")
                run = _work(config, data, loading, folder, ranks, until, keeps, first_step, trackers)
            watch.close()
        if folder is not None:  # alone: nobody waits for what one process writes
            with heard(config.folder, rank, world):
                _finish(run, folder)


@contextlib.contextmanager
def _joined(ranks: Ranks) -> Iterator[None]:
    """Leave the others at the end. After an error a GPU's group would wait there for those who still compute, so the
    process ends without leaving, which they notice."""
    try:
        yield
    except StoppedError:
        ranks.leave_together()
        raise
    except BaseException:
        if ranks.device.type == "cpu" or ranks.world == 1:
            ranks.leave()
        raise
    ranks.leave_together()


def _work(
    config: Config, data: Data, loading: Loading, folder: RunFolder | None, ranks: Ranks, until: int | None,
    keeps: bool, first_step: FirstStep, trackers: list[str],
) -> Assembled:  # fmt: skip
    """All that is done together."""
    try:
        HERE.at("loading the model", long=True)
        mesh = arrange(config.parallel, ranks)
        run = _assemble(config, data, loading, folder, mesh, until, keeps, first_step)
        first_step.ends("load_s")
        learn(run, trackers)
        return run
    except torch.OutOfMemoryError as error:
        raise RunFailedError(
            f"the device has too little memory: {str(error).splitlines()[0]} Lower train.micro_rows or "
            "data.max_length, set parallel.recompute=full or parallel.offload, train an adapter instead of every "
            "weight, or use a larger device"
        ) from None


@contextlib.contextmanager
def _loading(config: Config) -> Iterator[Loading]:
    """The model's thread ends with whatever ends the run."""
    loading = Loading(config)
    try:
        yield loading
    finally:
        loading.give_up()


def _assemble(
    config: Config, data: Data, loading: Loading, folder: RunFolder | None, mesh: Mesh, until: int | None,
    keeps: bool, first_step: FirstStep,
) -> Assembled:  # fmt: skip
    """Everything that the steps need, decided and checked before the first of them."""
    ranks = mesh.ranks
    if data.validation is not None and not data.validation.targets[data.validation_documents].any():
        raise WhetError(
            "data.validation: none of its conversations has anything to learn, so there is nothing to measure. Give "
            "others, or leave it out"
        )
    arithmetic = choose_arithmetic(config, ranks.device)
    tokens = len(data.tokenizer)  # read while the model is loaded
    model = build_model(config, arithmetic, ranks.device, tokens, loading.model, data.typical)
    if mesh.weights is None:
        root = make_root(config, model, arithmetic, ranks.device, tokens, data.longest)
    else:
        source, typical = loading.source, data.typical
        root = make_divided_root(config, model, arithmetic, mesh, tokens, data.longest, typical, source)
    compiling = compiles(config.model.compile, ranks.device, arithmetic.compute)
    work_together(root, mesh)
    apply(root.language_model, config.parallel, compiling)  # after the probe, whose short rows would be compiled too
    if compiling and ranks.device.type == "cuda" and ranks.world == 1 and config.parallel.offload == "none":
        replay_(root, config.train.micro_rows * config.row_length, device_peak(ranks.device, arithmetic.name))
    if mesh.weights is None:
        start_equal(root, ranks)
    if config.parallel.offload == "weights":  # torchrun gives each process one thread, and the host takes the steps
        torch.set_num_threads(my_cores())
    away = config.parallel.offload in ("optimizer", "both")
    optimizer = make_optimizer(root, config.train.optimizer, config.run.seed, away)
    if away:
        keep_state_on_host(optimizer)
    plan = Plan.load(config.folder / "plan")
    if mesh.weights is None and arithmetic.weights == torch.bfloat16 and most_micro_batches(config, plan, ranks) > 1:
        sum_in_fp32(root)
    run = Assembled(
        config=config, data=data, plan=plan, ranks=ranks, arithmetic=arithmetic, model=model, root=root,
        optimizer=optimizer, loss_scale=LossScale.for_fp16() if arithmetic.name == "fp16" else LossScale(),
        folder=folder, last=min(until or len(plan), len(plan)), keeps=keeps,
        first_step=first_step,
    )  # fmt: skip
    if folder is not None and keeps:
        export = plain_bytes(model) if config.export.at_end in ("merged", "hf", "gguf") else 0
        saved = config.checkpoint
        need_room(
            folder.path, sum(weight.nbytes for weight in root.trained), state_bytes(optimizer), saved.retention,
            len(plan), saved.optimizer == "all", export,
        )  # fmt: skip
    if folder is not None:
        write_json(folder.path / "plan.json", describe_plan(run))
    _say_what_matters(run)
    return run


def _say_what_matters(run: Assembled) -> None:
    config, plan = run.config, run.plan
    if is_random(config.model.path):
        warn(
            f"model.path: {config.model.path}: the weights are random; this run is good for its speed and nothing else"
        )
    if run.root.alone:
        say("conversations would see each other in this model if they were packed: it gets them one by one")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in run.root.modules()):
        say("dropout is on: it falls differently for other train.micro_rows and numbers of processes")
    if getattr(run.model.config, "output_router_logits", False):
        warn("the model's configuration asks for an auxiliary loss of its router; whet does not add it")
    if config.quantize is not None and (part := quantized_part(run.model)) < MOST:
        warn(
            f"quantize: only {part:.0%} of this model's weights are in {config.quantize}: embeddings, and experts "
            "fused into one weight, cannot be in it"
        )
    eight_bits = in_fp8(run.root)
    if eight_bits:
        say(f"{eight_bits} layers multiply in 8 bits; measuring and exporting do not")
    if eight_bits and not compiles(config.model.compile, run.ranks.device, run.arithmetic.compute):
        warn("train.precision: without compiling, rounding to 8 bits takes longer than it saves; see model.compile")
    room = getattr(run.model.config, "max_position_embeddings", plan.sizes.longest)
    if plan.sizes.longest > room:
        warn(
            f"the longest conversation has {plan.sizes.longest} tokens, but the model was made for {room}; lower "
            "data.max_length"
        )
    schedule = config.train.schedule
    whole = end_of(plan).counted(schedule)
    if never_falls(whole, schedule):
        warn(
            f"train.schedule.warmup: {schedule.warmup} takes the whole run of {whole:g} {schedule.by}s, so the rate "
            "only rises"
        )
    say(
        f"{len(plan)} {'step' if len(plan) == 1 else 'steps'} on {run.ranks.world} × {run.ranks.device.type}, "
        f"{run.arithmetic.name}: "
        f"{', '.join(f'{n} {unit}' for unit, n in config.train.batch.model_dump(exclude_none=True).items())} a step, "
        f"{plan.sizes.per_epoch} conversations an epoch"
    )


def _finish(run: Assembled, folder: RunFolder) -> None:
    """Ship what was learned; a run that pauses before its end ships nothing yet."""
    steps, kind = len(run.plan), run.config.export.at_end
    if run.last < steps:
        say(f"paused after step {run.last} of {steps}, as asked; --resume goes on")
        folder.set_status("stopped", run.last, steps, exit_code=0)
        return
    if run.keeps and kind != "none":
        _ship(run, kind, steps)
    folder.set_status("finished", steps, steps, exit_code=0)


def _ship(run: Assembled, kind: str, step: int) -> None:
    """From the last checkpoint: what was trained in memory gives it back first."""
    divided = is_sharded(run.root)
    forget(run.root)
    run.optimizer.state.clear()
    for tensor in () if divided else (*run.root.parameters(), *run.root.buffers()):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    ranks = Ranks(0, 1, torch.device("cpu")) if divided else run.ranks
    try:
        export_model(run.config, run.data, Wish(kind), step, ranks, is_final=True)
    except NotTheSameError as error:
        raise RunFailedError(str(error)) from error
