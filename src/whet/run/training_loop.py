"""Connects the trainer to the run's files, checkpoints, evaluation and trackers."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.checkpoint import directory
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.retention import lower_is_better
from whet.checkpoint.save import CheckpointSaver
from whet.config import Config
from whet.core.console import info
from whet.core.distributed import Ranks
from whet.core.errors import RunFailedError, WhetError
from whet.core.run_folder import RunFolder
from whet.core.watchdog import COLLECTIVE_MARGIN_S
from whet.data.loader import Loader
from whet.data.plan.planner import Plan
from whet.model.flops import count_step_flops, flops_table
from whet.model.loss.loss_model import LossModel
from whet.model.peak_flops import device_name, device_peak_flops
from whet.run.assemble import make_loader
from whet.run.data import RunData
from whet.run.evaluation import evaluate_run
from whet.run.fault_report import (
    fault_batch,
    fault_event,
    fault_message,
    read_passed_over,
    write_fault_batch,
    write_passed_over,
)
from whet.run.resume import RunFiles, checkpoint_metadata, read_kept_metrics, restore_newest_checkpoint
from whet.training.guard import Guard
from whet.training.loss_scale import LossScaler
from whet.training.metrics import RunTotals
from whet.training.precision import PrecisionPolicy
from whet.training.profiler import make_profiler
from whet.training.schedule import Position
from whet.training.trackers import Trackers, open_trackers
from whet.training.trainer import LOWER_LR_HINT, Intervals, ResumePoint, StepFault, Trainer

# From the start of the process to the end of the first step: how long, and on what.

_PHASE_LABELS = {
    "import_s": "imports", "prepare_s": "data", "load_s": "model", "measure_s": "measuring", "step_s": "the step",
}  # fmt: skip
_has_run_before = False


class StartupTimer:
    """A watch whose parts follow on each other without a gap, so that they add up to the whole."""

    def __init__(self) -> None:
        """Counts from the start of the process; in a process that has trained already, from now."""
        global _has_run_before
        self._began = self._last = time.monotonic() - (0.0 if _has_run_before else _process_age())
        self._parts = dict.fromkeys(_PHASE_LABELS, 0.0)
        self.is_done = False
        _has_run_before = True

    def end_phase(self, part: str) -> None:
        """All time since the last part ended was this part's."""
        now = time.monotonic()
        self._parts[part] += now - self._last
        self._last = now

    def finish(self) -> dict[str, float]:
        """The first step is done: the seconds until then, and their parts."""
        self.end_phase("step_s")
        self.is_done = True
        return {"first_step_s": self._last - self._began, **self._parts}


def _process_age() -> float:
    """Seconds that this process has lived; 0 where the system does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def startup_summary(seconds: dict[str, float]) -> str:
    """For the console; parts that took no time are left out."""
    parts = [f"{seconds[key]:.1f} s {name}" for key, name in _PHASE_LABELS.items() if seconds[key] >= 0.05]
    return f"first step after {seconds['first_step_s']:.1f} s: {', '.join(parts)}"


# What the training loop calls, tied to a run's files.


@dataclass(frozen=True, slots=True)
class RunHooks:
    """Every rank has them; rank 0 alone has a folder and files."""

    config: Config
    data: RunData
    root: LossModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScaler
    ranks: Ranks
    precision: PrecisionPolicy
    steps: int
    saver: CheckpointSaver | None
    """None: nothing is kept."""
    folder: RunFolder | None
    files: RunFiles | None
    trackers: Trackers
    loader: Loader
    guard: Guard
    first_step: StartupTimer

    def log(self, line: dict[str, Any]) -> None:
        if not self.first_step.is_done:
            self._tell(self.first_step.finish(), line["step"])
            if self.saver is not None:
                self.saver.prepare_staging()
        if self.files is not None and self.folder is not None:
            self.files.metrics.write(line)
            self.files.mark_step_end()
            self.trackers.write(line)
            self.folder.heartbeat(line["step"], self.steps)

    def _tell(self, seconds: dict[str, float], step: int) -> None:
        info(startup_summary(seconds))
        if self.folder is not None:
            self.folder.first_step = {key: round(value, 3) for key, value in seconds.items()}
            self.folder.set_status("running", step, self.steps)

    def evaluate(self, step: int) -> None:
        results, samples = evaluate_run(self.config, self.data, self.root, self.ranks, self.precision)
        if not self.first_step.is_done:
            self.first_step.end_phase("measure_s")
        broken = [name for name, value in results.items() if not math.isfinite(value)]
        if broken:
            raise RunFailedError(
                f"step {step}: {', '.join(broken)} of the evaluation is not finite: the model has diverged. {LOWER_LR_HINT}"
            )
        if self.files is not None and results:
            for sample in samples:
                self.files.samples.write({"step": step, **sample.as_dict()})
            line = {"time": time.time(), "step": step, **results}
            self.files.metrics.write(line)
            self.trackers.write(line)
            if self.saver is not None and self.config.eval.best in results:
                self.saver.add_scores({step: results[self.config.eval.best]})
            info(f"step {step}: " + ", ".join(f"{name} {_format_metric(value)}" for name, value in results.items()))

    def save(self, step: int, seen: RunTotals) -> None:
        if self.saver is None:
            return
        state: dict[str, Any] = {"seen": asdict(seen), "loss_scale": asdict(self.loss_scale)}
        if self.files is not None:
            state |= self.files.sizes
        self.saver.save(step, state)

    def wait_for_save(self) -> None:
        if self.saver is not None:
            self.saver.wait()

    def save_requested(self) -> bool:
        """Rank 0's clock decides. A save that failed asks for the next one, which then says so on every rank."""
        if self.saver is None or not self.ranks.is_main:
            return False
        minutes = self.config.checkpoint.minutes
        is_late = minutes is not None and time.monotonic() - self.saver.last_saved >= 60 * minutes
        return is_late or self.saver.has_failed

    def fault(self, fault: StepFault) -> str:
        """The event and the batch on disk; where the run ends, also the state before this step, if it is sound."""
        file = self.config.folder / "faults" / f"step-{fault.step:06d}.json"
        event = fault_event(fault, self.data, file)
        if self.files is not None:
            scale = self.loss_scale.value
            write_fault_batch(file, fault_batch(fault, self.config, self.data, self.loader, self.precision.name, scale))
            self.files.events.write(event)
        done = fault.step - 1
        self.wait_for_save()
        saved = self.ranks.all_gather(directory.list_steps(self._checkpoints) if self.ranks.is_main else [])
        if fault.verdict.action == "stop" and done > 0 and done not in saved and not fault.findings.nonfinite_weights:
            self.save(done, fault.before)
            self.wait_for_save()
        return fault_message(event)

    def can_roll_back(self) -> bool:
        self.wait_for_save()
        return bool(self.ranks.all_gather(directory.resumable_steps(self._checkpoints) if self.ranks.is_main else []))

    @property
    def _checkpoints(self) -> Path:
        return self.config.folder / "checkpoints"

    def roll_back(self, step: int) -> ResumePoint:
        self.wait_for_save()
        path = self.config.folder
        done = self.ranks.all_gather(directory.resumable_steps(self._checkpoints) if self.ranks.is_main else [])[-1]
        self.guard.excluded.append((done + 1, step))
        if self.folder is not None:  # before anything is undone: a run that dies here passes over them too
            write_passed_over(path, self.guard)
        start, seen, kept = restore_newest_checkpoint(
            self.config, self.root, self.optimizer, self.loss_scale, self.ranks
        )
        if self.files is not None:
            self.files.truncate(kept)
        self.trackers.rewind(start)
        self.guard.restore(read_kept_metrics(path, kept, self.ranks))
        return ResumePoint(start, seen)

    def stop_requested(self) -> bool:
        return self.folder is not None and self.folder.stop_requested()


def _format_metric(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


# The steps of a run, from where its newest checkpoint left off.


@dataclass(frozen=True, slots=True)
class AssembledRun:
    """A run, ready for its first step."""

    config: Config
    data: RunData
    plan: Plan
    ranks: Ranks
    precision: PrecisionPolicy
    model: nn.Module
    """With its adapters."""
    root: LossModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScaler
    folder: RunFolder | None
    """Rank 0's alone."""
    last: int
    """The step after which this process ends."""
    keeps: bool
    """Whether checkpoints are written."""
    first_step: StartupTimer


def train_from_checkpoint(run: AssembledRun, trackers: list[str]) -> None:
    """All steps up to the last, each with what belongs to it."""
    config, folder, ranks = run.config, run.folder, run.ranks
    start, seen, kept = restore_newest_checkpoint(config, run.root, run.optimizer, run.loss_scale, ranks)
    if config.train.start_step >= len(run.plan):
        raise WhetError(
            f"train.start_step: {config.train.start_step}, but this run has only {len(run.plan)} steps. Lower it, or "
            "make the run longer"
        )
    if start > run.last:
        raise WhetError(
            f"--until {run.last}: this run has done {start} steps already. Give a later step, or leave it out"
        )
    lines = read_kept_metrics(config.folder, kept, ranks)
    guard = Guard(config.train.on_nonfinite, config.train.on_spike, read_passed_over(config.folder))
    guard.restore(lines)
    profiler = make_profiler(config.profile, config.folder, ranks, len(run.plan), partial(_flops_table, run))
    if folder is not None:
        folder.set_status("running", start, len(run.plan))
    with contextlib.ExitStack() as stack:
        saver = stack.enter_context(_open_saver(run, lines)) if run.keeps else None
        files = stack.enter_context(contextlib.closing(RunFiles(folder.path, kept))) if folder is not None else None
        shown = open_trackers(trackers, folder.path, start) if folder is not None else Trackers()
        loader = make_loader(config, run.data.train.store, run.plan, ranks)
        if seen == RunTotals():
            seen = _totals_before(loader, start)
        for part in (shown, loader, profiler):
            stack.enter_context(contextlib.closing(part))
        hooks = RunHooks(
            config, run.data, run.root, run.optimizer, run.loss_scale, ranks, run.precision, len(run.plan), saver,
            folder, files, shown, loader, guard, run.first_step,
        )  # fmt: skip
        Trainer(
            model=run.root,
            optimizer=run.optimizer,
            loader=loader,
            config=config.train,
            cadence=Intervals(
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
            work=count_step_flops(run.root.language_model),
            per_epoch=run.plan.stats.per_epoch,
            whole=end_position(run.plan),
            seed=config.run.seed,
            autocast=run.precision.autocast(ranks.device),
            loss_scale=run.loss_scale,
            profiler=profiler,
            peak=_total_peak_flops(run),
            guard=guard,
        ).run(start, seen)


def _totals_before(loader: Loader, steps: int) -> RunTotals:
    """The counts of steps that are taken for done; nothing was computed for them."""
    totals = [loader.totals(step) for step in range(steps)]
    return RunTotals(
        sum(each.conversations for each in totals),
        sum(each.tokens for each in totals),
        sum(each.supervised for each in totals),
    )


def _open_saver(run: AssembledRun, lines: list[dict[str, Any]]) -> CheckpointSaver:
    """It knows from metrics.jsonl how good the checkpoints were that are there."""
    config = run.config
    saver = CheckpointSaver(
        config.folder / "checkpoints", run.root, run.optimizer, run.ranks, config.checkpoint.retention,
        config.checkpoint.optimizer, partial(checkpoint_metadata, config), lower_is_better(config.eval.best),
        60.0 * config.parallel.timeout + COLLECTIVE_MARGIN_S,
    )  # fmt: skip
    saver.add_scores({line["step"]: line[config.eval.best] for line in lines if config.eval.best in line})
    return saver


def _save_every(config: CheckpointConfig, steps: int) -> int | None:
    return config.every if config.every or config.minutes or config.epochs else max(1, steps // 10)


def end_position(plan: Plan) -> Position:
    """The end of a run, in every unit of a schedule."""
    conversations = len(plan.documents)
    return Position(len(plan), conversations / plan.stats.per_epoch, conversations, plan.stats.tokens)


def _total_peak_flops(run: AssembledRun) -> float | None:
    """FLOP/s that all devices could do together."""
    device = run.ranks.device
    peak = device_peak_flops(device, run.precision.name)
    if peak is None and device.type != "cpu":
        name = device_name(device)
        info(f"mfu is not given: what {name} can do at best in {run.precision.name} is not known to whet")
    return None if peak is None else peak * run.ranks.world_size


def _flops_table(run: AssembledRun) -> str:
    """For a conversation of the mean length."""
    length = run.plan.stats.tokens / len(run.plan.documents)
    supervised = int(run.data.train.store.targets[run.plan.documents].sum()) / run.plan.stats.tokens
    return flops_table(run.root.language_model, round(length), supervised)
