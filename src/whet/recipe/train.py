"""The whole run: prepare, plan, train, evaluate, save, export."""

from __future__ import annotations

import contextlib
import math
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
from whet.core.errors import RunFailedError
from whet.core.files import write_json
from whet.core.ranks import Ranks, start_ranks, who_am_i
from whet.core.run import RunFolder, read_status
from whet.data.loader import Loader
from whet.data.plan import Plan, efficiency
from whet.infer.tasks import find_task
from whet.model import attention
from whet.model.flops import Work, work_of
from whet.model.lora import language_model
from whet.model.loss import LossModel
from whet.parallel.replicate import start_equal
from whet.recipe.data import Data, hush_libraries, prepare_data
from whet.recipe.fault import batch_of, event_of, message_of, read_passed_over, write_batch, write_passed_over
from whet.recipe.folder import Files, begin, frozen_date, go_on, kept_metrics, run_folder
from whet.recipe.measure import export_model, measure
from whet.recipe.parts import Arithmetic, be_deterministic, build_model, choose_arithmetic, make_loader
from whet.train.guard import Guard
from whet.train.loss_scale import LossScale
from whet.train.metrics import Seen
from whet.train.optim import make_optimizer
from whet.train.trainer import RETRY, Cadence, Fault, Hooks, Place, Trainer


def train(config: Config, resume: bool) -> None:
    """The whole run: prepare, plan, train, evaluate, save, export."""
    rank, _ = who_am_i()
    if rank > 0:
        be_quiet()
    hush_libraries()
    for task in config.eval.tasks:
        find_task(task)
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
            _train(config, data, folder, ranks)
        except torch.OutOfMemoryError as error:
            raise RunFailedError(
                f"the device has too little memory: {str(error).splitlines()[0]} Lower train.micro_rows or "
                "data.max_length, train an adapter instead of every weight, or use a larger device"
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


def _train(config: Config, data: Data, folder: RunFolder | None, ranks: Ranks) -> None:
    be_deterministic(config)
    arithmetic = choose_arithmetic(config, ranks.device)
    model = build_model(config, arithmetic, ranks.device, len(data.tokenizer))
    root = LossModel(language_model(model))
    with arithmetic.context(ranks.device):
        root.check(len(data.tokenizer))
    start_equal(root, ranks)
    plan = Plan.load(config.folder / "plan")
    if folder is not None:
        whole = sum(parameter.nbytes for parameter in model.parameters())
        export = whole if config.export.at_end == "merged" else 0
        checkpoints.need_room(folder.path, root, config.checkpoint.keep_last, export)
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
    _learn(config, data, root, plan, folder, ranks, arithmetic, _work(model, config))
    if folder is not None and config.export.at_end != "none":
        export_model(config, data, model, config.export.at_end, len(plan), config.export.at_end)
    ranks.wait()
    if folder is not None:
        folder.set_status("finished", len(plan), len(plan), exit_code=0)


def _learn(
    config: Config,
    data: Data,
    root: LossModel,
    plan: Plan,
    folder: RunFolder | None,
    ranks: Ranks,
    arithmetic: Arithmetic,
    work: Work,
) -> None:
    """The steps, from where the newest checkpoint left off."""
    optimizer = make_optimizer(root, config.train.optimizer)
    loss_scale = LossScale.for_fp16() if arithmetic.name == "fp16" else LossScale()
    start, seen, kept = go_on(config.folder, root, optimizer, loss_scale, ranks)
    lines = kept_metrics(config.folder, kept, ranks)
    cadence = Cadence(
        steps=len(plan),
        evaluate_every=config.eval.every,
        evaluate_at_start=config.eval.at_start and not kept.measured,
        save_every=config.checkpoint.every or max(1, len(plan) // 10),
    )
    if folder is not None:
        folder.set_status("running", start, len(plan))
    with contextlib.ExitStack() as stack:
        files = stack.enter_context(contextlib.closing(Files(folder.path, kept))) if folder is not None else None
        loader = stack.enter_context(contextlib.closing(make_loader(config, data.train.store, plan, ranks)))
        guard = Guard(config.train.on_nonfinite, config.train.on_spike, read_passed_over(config.folder))
        guard.recall(lines)
        run = _Run(
            config, data, root, optimizer, loss_scale, ranks, arithmetic, len(plan), folder, files, loader, guard
        )
        Trainer(
            model=root,
            optimizer=optimizer,
            loader=loader,
            config=config.train,
            cadence=cadence,
            hooks=Hooks(
                log=run.log,
                evaluate=run.evaluate,
                save=run.save,
                stop_requested=run.stop_requested,
                fault=run.fault,
                can_roll_back=run.can_roll_back,
                roll_back=run.roll_back,
            ),
            ranks=ranks,
            work=work,
            per_epoch=plan.sizes.per_epoch,
            seed=config.run.seed,
            arithmetic=arithmetic.context(ranks.device),
            loss_scale=loss_scale,
            guard=guard,
        ).run(start, seen)


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
    loader: Loader
    guard: Guard

    def log(self, line: dict[str, Any]) -> None:
        if self.files is not None and self.folder is not None:
            self.files.metrics.write(line)
            self.files.step_ended()
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
            self.files.metrics.write({"time": time.time(), "step": step, **results})
            say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in results.items()))

    def save(self, step: int, seen: Seen) -> None:
        state: dict[str, Any] = {"seen": asdict(seen), "loss_scale": asdict(self.loss_scale)}
        if self.files is not None:
            state |= self.files.sizes
        folder = self.config.folder / "checkpoints"
        checkpoints.save(folder, step, self.root, self.optimizer, state, self.ranks)
        if self.folder is not None:
            checkpoints.prune(folder, self.config.checkpoint.keep_last)

    def fault(self, fault: Fault) -> str:
        """The event and the batch on disk; where the run ends, also the state before this step, if it is sound."""
        file = self.config.folder / "faults" / f"step-{fault.step:06d}.json"
        event = event_of(fault, self.data, file)
        if self.files is not None:
            scale = self.loss_scale.value
            write_batch(file, batch_of(fault, self.config, self.data, self.loader, self.arithmetic.name, scale))
            self.files.events.write(event)
        done = fault.step - 1
        saved = checkpoints.steps_in(self.config.folder / "checkpoints")
        if fault.verdict.action == "stop" and done > 0 and done not in saved and not fault.findings.weights:
            self.save(done, fault.before)
        return message_of(event)

    def can_roll_back(self) -> bool:
        return checkpoints.newest(self.config.folder / "checkpoints") is not None

    def roll_back(self, step: int) -> Place:
        path = self.config.folder
        done = checkpoints.steps_in(path / "checkpoints")[-1]
        self.guard.passed_over.append((done + 1, step))
        if self.folder is not None:  # before anything is undone: a run that dies here passes over them too
            write_passed_over(path, self.guard)
        start, seen, kept = go_on(path, self.root, self.optimizer, self.loss_scale, self.ranks)
        if self.files is not None:
            self.files.cut(kept)
        self.guard.recall(kept_metrics(path, kept, self.ranks))
        return Place(start, seen)

    def stop_requested(self) -> bool:
        return self.folder is not None and self.folder.stop_requested()


def _work(model: nn.Module, config: Config) -> Work:
    matrices = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
    )
    return work_of(model.config, matrices, adapters=config.adapter is not None)


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
        "precision": arithmetic.name,
        "attention": attention.choose(config.model.attention, ranks.device, arithmetic.compute),
    }
