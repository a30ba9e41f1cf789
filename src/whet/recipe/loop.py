"""The steps of a run, from where its newest checkpoint left off."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.retention import lower_is_better
from whet.checkpoint.save import Saver
from whet.config import Config
from whet.core.console import say
from whet.core.errors import WhetError
from whet.core.ranks import Ranks
from whet.core.run import RunFolder
from whet.core.watchdog import MARGIN_S
from whet.data.loader import Loader
from whet.data.plan import Plan
from whet.model.flops import work_of
from whet.model.flops_table import table
from whet.model.loss import LossModel
from whet.model.peaks import device_name, device_peak
from whet.recipe.about import about
from whet.recipe.data import Data
from whet.recipe.fault import read_passed_over
from whet.recipe.first_step import FirstStep
from whet.recipe.folder import Files, go_on, kept_metrics
from whet.recipe.hooks import RunHooks
from whet.recipe.parts import Arithmetic, make_loader
from whet.train.guard import Guard
from whet.train.loss_scale import LossScale
from whet.train.metrics import Seen
from whet.train.profiler import make_profiler
from whet.train.schedule import Position
from whet.train.track import Trackers, open_trackers
from whet.train.trainer import Cadence, Trainer


@dataclass(frozen=True, slots=True)
class Assembled:
    """A run, ready for its first step."""

    config: Config
    data: Data
    plan: Plan
    ranks: Ranks
    arithmetic: Arithmetic
    model: nn.Module
    """With its adapters."""
    root: LossModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    folder: RunFolder | None
    """Rank 0's alone."""
    last: int
    """The step after which this process ends."""
    keeps: bool
    """Whether checkpoints are written."""
    first_step: FirstStep


def learn(run: Assembled, trackers: list[str]) -> None:
    """All steps up to the last, each with what belongs to it."""
    config, folder, ranks = run.config, run.folder, run.ranks
    start, seen, kept = go_on(config, run.root, run.optimizer, run.loss_scale, ranks)
    if config.train.start_step >= len(run.plan):
        raise WhetError(
            f"train.start_step: {config.train.start_step}, but this run has only {len(run.plan)} steps. Lower it, or "
            "make the run longer"
        )
    if start > run.last:
        raise WhetError(
            f"--until {run.last}: this run has done {start} steps already. Give a later step, or leave it out"
        )
    lines = kept_metrics(config.folder, kept, ranks)
    guard = Guard(config.train.on_nonfinite, config.train.on_spike, read_passed_over(config.folder))
    guard.recall(lines)
    profiler = make_profiler(config.profile, config.folder, ranks, len(run.plan), partial(_flops_table, run))
    if folder is not None:
        folder.set_status("running", start, len(run.plan))
    with contextlib.ExitStack() as stack:
        saver = stack.enter_context(_saver(run, lines)) if run.keeps else None
        files = stack.enter_context(contextlib.closing(Files(folder.path, kept))) if folder is not None else None
        shown = open_trackers(trackers, folder.path, start) if folder is not None else Trackers()
        loader = make_loader(config, run.data.train.store, run.plan, ranks)
        if seen == Seen():
            seen = _passed(loader, start)
        for part in (shown, loader, profiler):
            stack.enter_context(contextlib.closing(part))
        hooks = RunHooks(
            config, run.data, run.root, run.optimizer, run.loss_scale, ranks, run.arithmetic, len(run.plan), saver,
            folder, files, shown, loader, guard, run.first_step,
        )  # fmt: skip
        Trainer(
            model=run.root,
            optimizer=run.optimizer,
            loader=loader,
            config=config.train,
            cadence=Cadence(
                steps=len(run.plan),
                last=run.last,
                evaluate_every=config.eval.every,
                evaluate_at_start=config.eval.at_start and not kept.measured,
                save_every=_save_every(config.checkpoint, len(run.plan)),
                save_epochs=config.checkpoint.epochs,
                save_measured=config.checkpoint.keep_best > 0,
                first=config.train.start_step,
            ),
            hooks=hooks,
            ranks=ranks,
            work=work_of(run.root.language_model),
            per_epoch=run.plan.sizes.per_epoch,
            whole=end_of(run.plan),
            seed=config.run.seed,
            arithmetic=run.arithmetic.context(ranks.device),
            loss_scale=run.loss_scale,
            profiler=profiler,
            peak=_peak(run),
            guard=guard,
        ).run(start, seen)


def _passed(loader: Loader, steps: int) -> Seen:
    """The counts of steps that are taken for done; nothing was computed for them."""
    totals = [loader.totals(step) for step in range(steps)]
    return Seen(
        sum(each.conversations for each in totals),
        sum(each.tokens for each in totals),
        sum(each.supervised for each in totals),
    )


def _saver(run: Assembled, lines: list[dict[str, Any]]) -> Saver:
    """It knows from metrics.jsonl how good the checkpoints were that are there."""
    config = run.config
    saver = Saver(
        config.folder / "checkpoints", run.root, run.optimizer, run.ranks, config.checkpoint.retention,
        config.checkpoint.optimizer, partial(about, config), lower_is_better(config.eval.best),
        60.0 * config.parallel.timeout + MARGIN_S,
    )  # fmt: skip
    saver.score({line["step"]: line[config.eval.best] for line in lines if config.eval.best in line})
    return saver


def _save_every(config: CheckpointConfig, steps: int) -> int | None:
    return config.every if config.every or config.minutes or config.epochs else max(1, steps // 10)


def end_of(plan: Plan) -> Position:
    """The end of a run, in every unit of a schedule."""
    conversations = len(plan.documents)
    return Position(len(plan), conversations / plan.sizes.per_epoch, conversations, plan.sizes.tokens)


def _peak(run: Assembled) -> float | None:
    """FLOP/s that all devices could do together."""
    device = run.ranks.device
    peak = device_peak(device, run.arithmetic.name)
    if peak is None and device.type != "cpu":
        name = device_name(device)
        say(f"mfu is not given: what {name} can do at best in {run.arithmetic.name} is not known to whet")
    return None if peak is None else peak * run.ranks.world


def _flops_table(run: Assembled) -> str:
    """For a conversation of the mean length."""
    length = run.plan.sizes.tokens / len(run.plan.documents)
    supervised = int(run.data.train.store.targets[run.plan.documents].sum()) / run.plan.sizes.tokens
    return table(run.root.language_model, round(length), supervised)
