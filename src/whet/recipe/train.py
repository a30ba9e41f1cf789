"""The whole run: prepare, plan, train, evaluate, save, export."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from whet.checkpoint import save as checkpoints
from whet.config import Config
from whet.core.console import be_quiet, say, warn
from whet.core.errors import RunFailedError, WhetError
from whet.core.files import write_json
from whet.core.ranks import Ranks, start_ranks, who_am_i
from whet.core.run import RunFolder, read_status
from whet.data.plan import Plan, efficiency
from whet.infer.tasks import find_task
from whet.model import attention
from whet.model.flops import work_of
from whet.model.flops_table import table
from whet.model.loss import LossModel
from whet.model.peaks import device_name, device_peak
from whet.parallel.apply import apply
from whet.parallel.compile import compiles
from whet.parallel.offload import keep_state_on_host
from whet.parallel.replicate import start_equal
from whet.recipe.data import Data, hush_libraries, prepare_data
from whet.recipe.folder import Files, begin, frozen_date, go_on, run_folder
from whet.recipe.measure import export_model, measure
from whet.recipe.parts import Arithmetic, build_model, choose_arithmetic, make_loader, make_root
from whet.train.loss_scale import LossScale
from whet.train.metrics import Seen
from whet.train.optim import make_optimizer, state_bytes
from whet.train.profiler import make_profiler
from whet.train.schedule import Place
from whet.train.track import Trackers, check_trackers, open_trackers
from whet.train.trainer import RETRY, Cadence, Hooks, Trainer


def train(config: Config, resume: bool, until: int | None = None, keeps: bool = True) -> None:
    """The whole run: prepare, plan, train, evaluate, save, export.

    `until`: pause after that step, with the schedule of the whole run. `keeps`: write checkpoints and the export.
    """
    rank, _ = who_am_i()
    if rank > 0:
        be_quiet()
    hush_libraries()
    for task in config.eval.tasks:
        find_task(task)
    trackers = check_trackers(config.track)
    finished = resume and read_status(config.folder).get("state") == "finished"
    with _terminate_like_ctrl_c(), run_folder(config, resume, first=rank == 0) as folder:
        if finished:
            say(f"{config.folder}: this run is finished; nothing to do")
            return
        data = prepare_data(config, frozen_date(config.folder))
        if folder is not None:
            begin(folder, config, data)
        ranks = start_ranks()  # rank 0 has written the plan: the others may read it now
        try:
            _train(config, data, folder, ranks, trackers, until, keeps)
        except torch.OutOfMemoryError as error:
            raise RunFailedError(
                f"the device has too little memory: {str(error).splitlines()[0]} Lower train.micro_rows or "
                "data.max_length, set parallel.recompute=full or parallel.offload=optimizer, train an adapter instead "
                "of every weight, or use a larger device"
            ) from None
        finally:
            ranks.leave()


@contextlib.contextmanager
def _terminate_like_ctrl_c() -> Iterator[None]:
    """SIGTERM ends preparing, measuring and exporting in good order too; the loop of steps has its own way."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _train(
    config: Config, data: Data, folder: RunFolder | None, ranks: Ranks, trackers: list[str], until: int | None,
    keeps: bool,
) -> None:  # fmt: skip
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses, or varies
        torch.use_deterministic_algorithms(True)
    arithmetic = choose_arithmetic(config, ranks.device)
    model = build_model(config, arithmetic, ranks.device, len(data.tokenizer))
    root = make_root(config, model, arithmetic, ranks.device, len(data.tokenizer))
    if root.alone:
        say("conversations would see each other in this model if they were packed: it gets them one by one")
    compiling = compiles(config.model.compile, ranks.device, arithmetic.compute)
    apply(root.language_model, config.parallel, compiling)  # after the probe, whose short rows would be compiled too
    start_equal(root, ranks)
    optimizer = make_optimizer(root, config.train.optimizer, config.run.seed)
    plan = Plan.load(config.folder / "plan")
    last = min(until or len(plan), len(plan))
    if folder is not None and keeps:
        whole = sum(parameter.nbytes for parameter in model.parameters())
        export = whole if config.export.at_end == "merged" else 0
        checkpoints.need_room(folder.path, root, state_bytes(optimizer), config.checkpoint.keep_last, export)
    if folder is not None:
        write_json(folder.path / "plan.json", _describe_plan(config, data, plan, model, ranks, arithmetic))
    if config.adapter is not None and config.adapter.dropout > 0:
        say("adapter.dropout is on: it falls differently for other train.micro_rows and numbers of processes")
    longest = plan.sizes.longest
    room = getattr(model.config, "max_position_embeddings", longest)
    if longest > room:
        warn(f"the longest conversation has {longest} tokens, but the model was made for {room}; lower data.max_length")
    say(
        f"{len(plan)} steps on {ranks.world} × {ranks.device.type}, {arithmetic.name}: "
        f"{', '.join(f'{n} {unit}' for unit, n in config.train.batch.model_dump(exclude_none=True).items())} a step, "
        f"{plan.sizes.per_epoch} conversations an epoch"
    )
    _learn(config, data, root, optimizer, plan, folder, ranks, arithmetic, trackers, last, keeps)
    if last < len(plan):
        _pause(folder, last, len(plan))
        return
    if folder is not None and keeps and config.export.at_end != "none":
        export_model(config, data, model, config.export.at_end, len(plan), config.export.at_end)
    ranks.wait()
    if folder is not None:
        folder.set_status("finished", len(plan), len(plan), exit_code=0)


def _learn(
    config: Config,
    data: Data,
    root: LossModel,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    folder: RunFolder | None,
    ranks: Ranks,
    arithmetic: Arithmetic,
    trackers: list[str],
    last: int,
    keeps: bool,
) -> None:
    """The steps, from where the newest checkpoint left off."""
    if config.parallel.offload in ("optimizer", "both"):
        keep_state_on_host(optimizer)
    loss_scale = LossScale.for_fp16() if arithmetic.name == "fp16" else LossScale()
    start, seen, kept = go_on(config.folder, root, optimizer, loss_scale, ranks)
    if start > last:
        raise WhetError(f"--until {last}: this run has done {start} steps already. Give a later step, or leave it out")
    cadence = Cadence(
        steps=len(plan),
        last=last,
        evaluate_every=config.eval.every,
        evaluate_at_start=config.eval.at_start and not kept.measured,
        save_every=config.checkpoint.every or max(1, len(plan) // 10),
    )
    peak = device_peak(ranks.device, arithmetic.name)
    if peak is None and ranks.device.type != "cpu":
        name = device_name(ranks.device)
        say(f"mfu is not given: what {name} can do at best in {arithmetic.name} is not known to whet")

    def flops_table() -> str:
        length = plan.sizes.tokens / len(plan.documents)
        supervised = int(data.train.store.targets[plan.documents].sum()) / plan.sizes.tokens
        return table(root.language_model, round(length), supervised)

    profiler = make_profiler(config.profile, config.folder, ranks, len(plan), flops_table)
    if folder is not None:
        folder.set_status("running", start, len(plan))
    with contextlib.ExitStack() as stack:
        files = stack.enter_context(contextlib.closing(Files(folder.path, kept))) if folder is not None else None
        shown = open_trackers(trackers, folder.path, start) if folder is not None else Trackers()
        stack.enter_context(contextlib.closing(shown))
        stack.enter_context(contextlib.closing(profiler))
        run = _Run(config, data, root, optimizer, loss_scale, ranks, arithmetic, len(plan), folder, files, shown)
        Trainer(
            model=root,
            optimizer=optimizer,
            loader=stack.enter_context(contextlib.closing(make_loader(config, data.train.store, plan, ranks))),
            config=config.train,
            cadence=cadence,
            hooks=Hooks(
                log=run.log,
                evaluate=run.evaluate,
                save=run.save if keeps else _keep_nothing,
                stop_requested=run.stop_requested,
            ),
            ranks=ranks,
            work=work_of(root.language_model),
            per_epoch=plan.sizes.per_epoch,
            whole=_end(plan),
            seed=config.run.seed,
            arithmetic=arithmetic.context(ranks.device),
            loss_scale=loss_scale,
            profiler=profiler,
            peak=None if peak is None else peak * ranks.world,
        ).run(start, seen)


def _keep_nothing(step: int, seen: Seen) -> None:
    """What a dry run saves."""


def _pause(folder: RunFolder | None, step: int, steps: int) -> None:
    say(f"paused after step {step} of {steps}, as asked; --resume goes on")
    if folder is not None:
        folder.set_status("stopped", step, steps, exit_code=0)


def _end(plan: Plan) -> Place:
    conversations = len(plan.documents)
    return Place(len(plan), conversations / plan.sizes.per_epoch, conversations, plan.sizes.tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    """The hooks of the training loop, tied to this run's files."""

    config: Config
    data: Data
    root: LossModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    ranks: Ranks
    arithmetic: Arithmetic
    steps: int
    folder: RunFolder | None
    files: Files | None
    trackers: Trackers

    def log(self, line: dict[str, Any]) -> None:
        if self.files is not None and self.folder is not None:
            self.files.metrics.write(line)
            self.trackers.write(line)
            self.folder.beat(line["step"], self.steps)

    def evaluate(self, step: int) -> None:
        results, samples = measure(self.config, self.data, self.root, self.ranks, self.arithmetic)
        broken = {name: value for name, value in results.items() if not math.isfinite(value)}
        if broken:
            raise RunFailedError(
                f"step {step}: the evaluation is not finite ({broken}): the model has diverged. {RETRY}"
            )
        if self.files is not None and results:
            for sample in samples:
                self.files.samples.write({"step": step, **sample.as_dict()})
            line = {"time": time.time(), "step": step, **results}
            self.files.metrics.write(line)
            self.trackers.write(line)
            say(f"step {step}: " + ", ".join(f"{name} {_shown(value)}" for name, value in results.items()))

    def save(self, step: int, seen: Seen) -> None:
        state: dict[str, Any] = {"seen": asdict(seen), "loss_scale": asdict(self.loss_scale)}
        if self.files is not None:
            state |= {"metrics_bytes": self.files.metrics.size(), "samples_bytes": self.files.samples.size()}
        folder = self.config.folder / "checkpoints"
        checkpoints.save(folder, step, self.root, self.optimizer, state, self.ranks)
        if self.folder is not None:
            checkpoints.prune(folder, self.config.checkpoint.keep_last)

    def stop_requested(self) -> bool:
        return self.folder is not None and self.folder.stop_requested()


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _describe_plan(
    config: Config, data: Data, plan: Plan, model: nn.Module, ranks: Ranks, arithmetic: Arithmetic
) -> dict[str, Any]:
    store = data.train.store
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {
        "steps": len(plan),
        "rows": len(plan.rows) - 1,
        "conversations": len(plan.documents),
        "conversations_per_epoch": plan.sizes.per_epoch,
        "epochs": len(plan.documents) / plan.sizes.per_epoch,
        "tokens": plan.sizes.tokens,
        "supervised_tokens": int(store.targets[plan.documents].sum()),
        "efficiency": efficiency(plan, config.row_length),
        "row_length": config.row_length,
        "micro_rows": config.train.micro_rows,
        "world": ranks.world,
        "batch": config.train.batch.model_dump(exclude_none=True),
        "packing": config.data.packing,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trainable_parameters": trainable,
        "device": ranks.device.type,
        "device_name": device_name(ranks.device),
        "peak_flops": device_peak(ranks.device, arithmetic.name),
        "precision": arithmetic.name,
        "attention": attention.serving(model),
        "compiled": compiles(config.model.compile, ranks.device, arithmetic.compute),
        **config.parallel.model_dump(),
    }
