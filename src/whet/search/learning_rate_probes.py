"""`whet search --lr`: trains the probes of learning_rate.py in RUN-lr, all from one checkpoint, and keeps the result of
each in probes.jsonl, so that a killed search measures none twice."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from whet.checkpoint import directory
from whet.checkpoint.load import load_checkpoint
from whet.config import Config, read_config
from whet.core import launch_env
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.config import read_tree
from whet.core.console import info, progress
from whet.core.errors import WhetError
from whet.core.files import hash_json
from whet.core.json_lines import append_json_line, read_json_lines
from whet.evaluation.validation_losses import ConversationLosses
from whet.execution.cuda_graphs import release_cuda_graphs
from whet.run.lifecycle import run_training
from whet.run.memory_choice import choose_memory_settings
from whet.run.models.model_reference import resolve_model_reference
from whet.run.resume import changed_settings
from whet.run.trial import delete_previous_trial, delete_weights, sibling_config
from whet.search.learning_rate import (
    MIN_STEPS,
    LearningRateResult,
    Probe,
    ValidationBaseline,
    find_learning_rate,
    horizons,
)
from whet.search.space import read_space
from whet.training.checkpoints import save_checkpoint, saved_steps, wait_for_save
from whet.training.optimizers.factory import set_learning_rates
from whet.training.run_state import Run
from whet.training.schedule import end_position, in_fractions, lr_factor
from whet.training.step import ForwardPasses, train_step

_LR = "train.optimizer.lr"
RESULT, PROBES = "learning_rate.json", "probes.jsonl"
_GROUP_RATES = ("lr", "embedding_lr", "head_lr", "matrix_lr", "scalar_lr")


def read_probe_recipe(recipe: Path, overrides: Sequence[str]) -> tuple[Config, tuple[float, float] | None]:
    """The configuration to start from and, where the recipe gives a range for the learning rate, its ends."""
    ranges = read_space(read_tree(Config, recipe, overrides)).parameters
    given = next((each for each in ranges if each.name == _LR), None)
    other = next((each for each in ranges if each is not given), None)
    if other is not None:
        raise WhetError(
            f"{other.place}: {other.name}: --lr searches only the learning rate. Give one value: {other.name}=VALUE"
        )
    if given is None:
        return resolve_model_reference(read_config(recipe, overrides)), None
    ends = [float(each) for each in given.ends() if isinstance(each, int | float)]
    low, high = min(ends), max(ends)
    start = math.sqrt(max(low, high * 1e-4) * high)
    return resolve_model_reference(read_config(recipe, [*overrides, f"{_LR}={start:.3g}"])), (low, high)


def search_learning_rate(config: Config, limits: tuple[float, float] | None) -> dict[str, Any]:
    """Probe learning rates around train.optimizer.lr, within `limits`, and propose one; returns what --json prints."""
    if config.data.validation is None:
        raise WhetError(
            "data.validation is missing: --lr compares learning rates by their validation losses. Add it, such as "
            "data.validation.fraction=0.05"
        )
    probing = _probe_config(config)
    is_main = launch_env.rank() == 0
    if is_main and _is_other_search(probing):
        delete_previous_trial(probing.folder)
    run_training(probing, resume=True, measure=functools.partial(_probe, limits=limits))
    if not is_main:
        return {}
    delete_weights(probing.folder)
    result = read_hashed_json(probing.folder / RESULT)
    _print_result(result)
    return result


def _probe_config(config: Config) -> Config:
    """Without what a probe does not need."""
    changed = {
        "eval": config.eval.model_copy(update={"tasks": [], "every": None, "best": "val_loss"}),
        "checkpoint": config.checkpoint.model_copy(update={"keep_best": 0, "optimizer": "newest"}),
        "export": config.export.model_copy(update={"at_end": "none"}),
        "track": [],
        "profile": None,
    }
    return sibling_config(config.model_copy(update=changed), "lr")


def _is_other_search(config: Config) -> bool:
    """Whether the folder has the probes of other settings, or a search that is finished."""
    if not (config.folder / "config.yaml").exists():
        return False
    return (config.folder / RESULT).exists() or bool(changed_settings(config.folder, config))


def _probe(run: Run, limits: tuple[float, float] | None) -> None:
    """Measure and propose; in place of training."""
    steps = run.plan.last_step - run.step
    if steps < MIN_STEPS:
        raise WhetError(
            f"train.steps: the run has {steps} steps, too few for --lr: a probe takes 1/14 of them. Make it at "
            f"least {MIN_STEPS} steps long, or search with whole runs (search.method: grid)"
        )
    choose_memory_settings(run, run.config)
    branch = Branches(run)
    losses = branch.evaluate()
    if losses is None:
        raise WhetError("the validation loss before training is not finite. `whet check` finds the reason")
    validation = ValidationBaseline(losses.tokens, losses.nats)
    record = _Record(run, losses)
    short, long = horizons(steps)
    info(f"probes take {short} and {long} of the run's {steps} steps; validation loss before: {validation.before:.4f}")

    def measure(lr: float, length: int) -> Probe:
        probe = record.find(lr, length)
        if probe is None:
            probe = branch.train(lr, length)
            record.add(probe)
        found = "diverges" if probe.nats is None else f"{probe.nats.sum() / validation.tokens.sum():.4f}"
        info(f"lr {lr:.3g}, {length} steps: {found}")
        return probe

    start = run.config.train.optimizer.lr
    finding = find_learning_rate(measure, validation, steps, start, *([] if limits is None else [limits]))
    if run.ranks.is_main:
        write_hashed_json(run.config.folder / RESULT, _result(run, finding, record.tokens))


class Branches:
    """Trains the model of a run from the checkpoint of its first step, again and again."""

    def __init__(self, run: Run) -> None:
        self._run, self._first = run, run.step
        if run.step not in saved_steps(run):
            save_checkpoint(run)
            wait_for_save(run)
        self._checkpoint = run.config.folder / "checkpoints" / directory.checkpoint_name(run.step)
        end = end_position(run.plan).in_units_of(run.config.train.schedule)
        self._schedule = in_fractions(run.config.train.schedule, end)

    def evaluate(self) -> ConversationLosses | None:
        """The validation losses of the model as it is; None: not finite."""
        release_cuda_graphs(self._run.model)
        losses = self._run.evaluate().losses
        return losses if losses is not None and np.isfinite(losses.nats).all() else None

    def train(self, lr: float, steps: int) -> Probe:
        """Train `steps` with the whole schedule, scaled to them. All groups of weights keep their ratio to `lr`."""
        run = self._run
        state = load_checkpoint(self._checkpoint, run.model, run.optimizer, run.ranks)["state"]
        run.loss_scaler.restore(state["loss_scale"])
        run.model.train()
        scale, tokens = lr / run.config.train.optimizer.lr, 0
        with progress(f"lr {lr:.3g}", steps) as bar:
            for step in range(steps):
                factor = lr_factor(step, step + 1, steps, self._schedule)
                set_learning_rates(run.optimizer, factor * scale)
                batch = run.loader.totals(self._first + step)
                tokens += batch.tokens
                if batch.supervised and not self._train_step(self._first + step):
                    return Probe(lr, steps, tokens, None)
                bar.advance()
        losses = self.evaluate()
        return Probe(lr, steps, tokens, None if losses is None else losses.nats)

    def _train_step(self, step: int) -> bool:
        """False: loss or gradient are not finite, and no smaller loss scale would help."""
        run = self._run
        forward = ForwardPasses(
            run.model, run.loader, step, device=run.ranks.device, seed=run.config.run.seed, autocast=run.autocast,
            loss_scale=run.loss_scaler.value,
        )  # fmt: skip
        result = train_step(forward, run.optimizer, ranks=run.ranks, clip_norm=run.config.train.clip_norm).wait()
        overflows = not result.finite and run.loss_scaler.can_shrink()
        run.loss_scaler.update(overflows)
        return result.finite or overflows


class _Record:
    """probes.jsonl: the probes that were measured, also before the search was killed."""

    def __init__(self, run: Run, losses: ConversationLosses) -> None:
        self._ranks, self._file = run.ranks, run.config.folder / PROBES
        self._validation = hash_json([losses.conversations.tolist(), losses.tokens.tolist()])
        self.tokens = 0
        """Trained on by all of them."""
        lines = run.ranks.all_gather(read_json_lines(self._file)[0] if run.ranks.is_main else [])
        self._known = {
            (line["lr"], line["steps"]): line for line in lines if line.get("validation") == self._validation
        }

    def find(self, lr: float, steps: int) -> Probe | None:
        line = self._known.get((lr, steps))
        if line is None:
            return None
        self.tokens += line["tokens"]
        nats = None if line["nats"] is None else np.array(line["nats"], dtype=np.float64)
        return Probe(lr, steps, line["tokens"], nats)

    def add(self, probe: Probe) -> None:
        self.tokens += probe.tokens
        line = dataclasses.asdict(probe) | {"nats": None if probe.nats is None else probe.nats.tolist()}
        self._known[probe.lr, probe.steps] = line
        if self._ranks.is_main:
            append_json_line(self._file, line | {"validation": self._validation})


def _result(run: Run, finding: LearningRateResult, tokens: int) -> dict[str, Any]:
    return {
        "lr": finding.lr,
        "verdict": "cannot tell" if finding.lr is None else "proposal",
        "reason": finding.reason,
        "set": [] if finding.lr is None else _overrides(run.config, finding.lr),
        "probes": [
            {
                "lr": each.probe.lr,
                "steps": each.probe.steps,
                "tokens": each.probe.tokens,
                "loss": each.loss,
                "difference": None if each.difference is None else each.difference.mean,
                "p": None if each.difference is None else each.difference.p,
            }
            for each in finding.comparisons
        ],
        "tokens": tokens,
        "run_tokens": int(run.plan.stats.tokens),
        "folder": str(run.config.folder),
    }


def _overrides(config: Config, lr: float) -> Sequence[str]:
    """What to give `whet train`. Groups with a rate of their own keep their ratio."""
    given = config.train.optimizer.model_dump()
    scaled = {key: given[key] * lr / given["lr"] for key in _GROUP_RATES if given[key] is not None}
    return [f"train.optimizer.{key}={rate:.3g}" for key, rate in scaled.items()]


def _print_result(result: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("learning rate", "steps", "validation loss", "against the best", "p"):
        table.add_column(title, justify="right", no_wrap=True)
    for probe in result["probes"]:
        loss = "diverges" if probe["loss"] is None else f"{probe['loss']:.4f}"
        difference = "" if probe["difference"] is None else f"{probe['difference']:+.4f}"
        if probe["loss"] is not None and probe["difference"] is None:
            difference = "best"
        p = "" if probe["p"] is None else f"{probe['p']:.2g}"
        table.add_row(f"{probe['lr']:.3g}", str(probe["steps"]), loss, difference, p)
    info(table)
    share = result["tokens"] / max(1, result["run_tokens"])
    info(f"the probes took {result['tokens']:,} tokens, {share:.0%} of one whole run")
    if result["lr"] is None:
        info(f"cannot tell: {result['reason']}")
    else:
        info(f"proposal: {' '.join(result['set'])}")
        info(f"why: {result['reason']}")
