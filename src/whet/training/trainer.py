"""The training loop: one step after another, and what happens between two steps."""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import replace
from typing import Any

from whet.core.console import info, warn
from whet.core.errors import RunFailedError, StoppedError, WhetError
from whet.core.heartbeat import PHASE
from whet.core.signals import collect_stop_signals
from whet.execution.cuda_graphs import release_cuda_graphs
from whet.model.experts.routing import StepLoad
from whet.model.weight_effect import list_experts, listed
from whet.training.checkpoints import roll_back, save_checkpoint, save_is_due, wait_for_save
from whet.training.faults import LOWER_LR_HINT, handle_fault
from whet.training.metrics import (
    ProgressMeans,
    RunTotals,
    StepSpeed,
    StepTime,
    excluded_step_metrics,
    progress_note,
    startup_summary,
    step_metrics,
)
from whet.training.optimizers.factory import optimizer_step, set_learning_rates
from whet.training.overlap import Overlap
from whet.training.panel import training_progress
from whet.training.run_state import Run, use_smaller_micro_batches
from whet.training.schedule import step_lr_factor
from whet.training.step import StepResult, train_step

_STEPS_UNTIL_IDLE = 100
"""An expert without a token in so many steps is idle."""


def train(run: Run) -> None:
    """Train to the last step of this process. Raises StoppedError on request, after saving a checkpoint."""
    signals: list[int] = []

    def stop_requested() -> bool:
        return bool(signals) or run.output.stop_requested()

    is_rolled_back = True
    while is_rolled_back:  # a rollback continues from its checkpoint as a resumed run would
        is_rolled_back = False
        if run.intervals.evaluates_before_step(run.step):
            evaluate(run)
        if run.ends_early():
            break
        run.model.train()
        means, overlap = ProgressMeans(), Overlap(run)
        line: dict[str, Any] | None
        offset = run.intervals.offset
        with (
            collect_stop_signals(signals, _announce_stop),
            training_progress(run.intervals.steps - offset, run.step - offset) as bar,
        ):
            while run.step < run.intervals.last:
                number, epochs_before = run.step + 1, run.epochs(run.totals)
                with run.profiler.step(number - run.intervals.offset):
                    if run.guard.excludes(number):
                        line, stop, save = exclude_step(run), False, False
                    else:
                        save = save_is_due(run)
                        totals = run.totals.add(run.loader.totals(run.step), run.flops)
                        rates = set_step_rates(run, totals)
                        pending = train_step(
                            overlap.take(run.step), run.optimizer, ranks=run.ranks, stop_requested=stop_requested,
                            save=save, clip_norm=run.config.train.clip_norm, spike_limit=run.guard.spike_limit(),
                        )  # fmt: skip
                        if not (save or stop_requested()):
                            overlap.launch_next(totals)
                        result = pending.wait()
                        if not result.updated:
                            overlap.discard()
                        stop, save = result.stop_requested, result.save_requested
                        line = finish_step(run, result, totals, rates, overlap.step_time(pending.copied))
                        is_rolled_back = line is None
                        if result.ran_out_of_memory:
                            overlap.discard()
                            use_smaller_micro_batches(run, pending.micro_rows, number)
                            overlap = Overlap(run)  # which may have found no memory to start early
                if run.ranks.world_size == 1:  # several had to agree before they reduced the step's gradients
                    stop = stop_requested()
                if line is None:
                    if stop:
                        raise StoppedError(
                            f"stopped in step {number}, which was faulty; the run is back after step {run.step}. Start "
                            "it again to continue (whet train: with --resume)"
                        )
                    break
                shown = means.add(line)
                bar.finish_step(shown, progress_note(shown))
                is_saved = stop or save or run.intervals.saves_after(run.step, epochs_before, run.epochs(run.totals))
                if is_saved:
                    _save(run)
                if not stop and run.intervals.evaluates_after(run.step):
                    evaluate(run)
                    if run.ends_early():
                        break
                    stop = run.step < run.intervals.last and any(run.ranks.all_gather([stop_requested()]))
                    if stop and not is_saved:
                        _save(run)
                    run.model.train()  # not before every step: a model with adapters has thousands of modules
                if stop:
                    wait_for_save(run)
                    saved = (
                        f"a checkpoint is saved. To continue: whet runs resume {shlex.quote(str(run.config.folder))}"
                    )
                    if run.config.checkpoint.optimizer == "none":
                        saved = "its weights are saved, without the optimizer's state (checkpoint.optimizer: none)"
                    raise StoppedError(f"stopped after step {run.step} of {run.intervals.steps}; {saved}")


def _save(run: Run) -> None:
    PHASE.enter("saving a checkpoint")
    run.output.write_phase(run.step)
    save_checkpoint(run)


def finish_step(
    run: Run, result: StepResult, totals: RunTotals, rates: dict[str, float], step_time: StepTime
) -> dict[str, Any] | None:
    """Judge a step, act on a fault, and write its line; None: the run was rolled back to a checkpoint.

    `totals` are those after the step, `rates` the learning rates that metrics.jsonl shows.
    """
    batch = run.loader.totals(run.step)
    verdict = run.guard.judge(result, batch.supervised, run.loss_scaler.can_shrink())
    if verdict.kind not in ("fine", "overflow"):
        verdict = handle_fault(run, result, verdict)
    if verdict.action == "rollback":
        roll_back(run)
        return None
    if verdict.action == "take" and not result.updated:  # a spike with train.on_spike=warn, diagnosed by now
        optimizer_step(run.optimizer, result.gradient_scale)
    run.loss_scaler.update(verdict.kind == "overflow")
    speed = StepSpeed(step_time, totals.flops - run.totals.flops, run.peak_flops)
    per_epoch = run.plan.stats.per_epoch
    line = step_metrics(run.step + 1, result, rates, totals, batch, per_epoch, speed, run.ranks.device)
    if verdict.action == "skip":
        line["skipped"] = verdict.kind
    if result.conversation_losses is not None:
        documents = run.loader.documents(run.step)
        run.output.write_losses(run.step + 1, documents, run.store.targets[documents], result.conversation_losses)
    if result.expert_load is not None:
        _warn_of_idle_experts(run, result.expert_load)
    if verdict.kind == "fine" and not run.startup.is_done:
        _warn_of_weights_without_gradient(run)
    _end_step(run, totals, line)
    return line


def _warn_of_weights_without_gradient(run: Run) -> None:
    """In the first step; the run lists what never got one at its end (training/effect_meter.py)."""
    if names := run.effect.without_gradient():
        remedy = ": leave it out of adapter.targets" if run.config.adapter is not None else ""
        warn(
            f"step {run.step + 1}: {len(names):,} trained weights got no gradient: {listed(names)}. The loss of this "
            f"step does not depend on them. What no step reaches learns nothing{remedy}"
        )


def _warn_of_idle_experts(run: Run, load: StepLoad) -> None:
    """Once, after enough steps to be sure; at its end the run lists them again (training/effect_meter.py)."""
    counted = run.model.expert_load
    assert counted is not None
    counted.steps += 1
    if counted.steps == _STEPS_UNTIL_IDLE and load.idle_so_far and run.step + 1 < run.intervals.last:
        idle = [f"{name} ({list_experts(experts)})" for name, experts in counted.idle_experts().items()]
        warn(
            f"after {counted.steps} steps, {int(load.idle_so_far):,} of {counted.experts:,} experts have received "
            f"no token: {listed(idle)}"
        )


def exclude_step(run: Run) -> dict[str, Any]:
    """Count a step that a rollback excluded, without computing anything, and write its line."""
    totals = replace(run.totals.add(run.loader.totals(run.step), run.flops), flops=run.totals.flops)
    rates = set_step_rates(run, totals)
    line = excluded_step_metrics(run.step + 1, rates, totals, run.plan.stats.per_epoch, run.ranks.device)
    _end_step(run, totals, line)
    return line


def _end_step(run: Run, totals: RunTotals, line: dict[str, Any]) -> None:
    run.step, run.totals = run.step + 1, totals
    run.guard.record(line)
    if not run.startup.is_done:
        seconds = run.startup.finish()
        compiles = run.ranks.device.type != "cpu" or run.config.model.compile is True
        info(startup_summary(seconds, 0 if compiles else run.plan.last_step - run.step))
        run.output.write_startup(seconds, run.step)
        if run.saver is not None:
            run.saver.prepare_first_save()
    run.output.write_step(line)


def set_step_rates(run: Run, totals: RunTotals) -> dict[str, float]:
    """Set the learning rates of the step that leads to `totals`; returns what metrics.jsonl shows of them."""
    factor = step_lr_factor(run.plan, run.config.train.schedule, run.step, run.totals, totals)
    rates = set_learning_rates(run.optimizer, factor)
    return rates | {"loss_scale": run.loss_scaler.value} if run.loss_scaler.moves else rates


def evaluate(run: Run) -> None:
    """Evaluate the current model, write the results, and score its checkpoint."""
    PHASE.enter("evaluating", run.step)
    run.output.write_phase(run.step)
    release_cuda_graphs(run.model)
    results, samples, losses = run.evaluate()
    if not run.startup.is_done:
        run.startup.end_phase("measure_s")
    broken = [name for name, value in results.items() if not math.isfinite(value)]
    if broken:
        raise RunFailedError(
            f"step {run.step}: {', '.join(broken)} of the evaluation is not finite: the model has diverged. "
            f"{LOWER_LR_HINT}"
        )
    if not results and not samples:
        return
    if results:
        run.evaluations[run.step] = results
    run.output.write_evaluation(run.step, results, samples, losses)
    best = run.config.eval.best
    if run.config.checkpoint.keep_best and "val_loss" in results and best.startswith("val_") and best not in results:
        measured = ", ".join(name for name in results if name.startswith(("val_loss", "val_accuracy", "val_bpb")))
        raise WhetError(f"eval.best: {best} was not measured at step {run.step}. Choose one of: {measured}")
    if run.saver is not None and run.ranks.is_main and best in results:
        run.saver.add_scores({run.step: results[best]})
    if run.ends_early():
        reason = _early_end(run)
        info(f"step {run.step}: {reason}")
        run.output.write_event(
            {"time": time.time(), "step": run.step, "kind": "early-stop", "action": "end", "reason": reason}
        )


def _early_end(run: Run) -> str:
    """Why a run ends before its last step."""
    best, patience = run.best_evaluation(), run.config.eval.patience
    assert best is not None
    metric = run.config.eval.best
    return (
        f"{metric} has not improved in {patience} evaluation{'s' if patience != 1 else ''}: the run ends early. The "
        f"best is {run.evaluations[best][metric]:.4f} after step {best} (eval.patience)"
    )


def _announce_stop() -> None:
    info("stopping when this step is saved; Ctrl-C again stops at once")
