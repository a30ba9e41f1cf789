"""What a step of a run was trained on: its conversations, with the loss of each token at that step.

The weights of a step exist only if a checkpoint was saved before it. Otherwise the steps since the checkpoint before it
are computed again (replay_steps.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.checkpoint import directory
from whet.core import launch_env
from whet.core.errors import WhetError
from whet.data.prepare.store import Store
from whet.data.render.detokenize import open_decoder, token_texts
from whet.evaluation.training_losses import losses_of_step, read_training_losses
from whet.run.plan_summary import read_plan_json
from whet.run.replay_steps import for_one_process, open_replay, step_lines
from whet.run.resume import read_run_config
from whet.training.metrics import finite_or_none

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_REPLAY_S = 60.0
"""A longer replay is not worth waiting for: the nearest checkpoint serves."""


@dataclass(frozen=True, slots=True)
class StepConversation:
    """One conversation of a step. All lists have one entry for each token."""

    document: int
    """Its number in the training store."""
    source: str
    line: int
    ids: list[int]
    texts: list[str]
    """What each token adds to the text."""
    supervised: list[bool]
    losses: list[float | None]
    """−log p of each supervised token, with the weights after step `StepConversations.weights`; None for the others."""
    loss: float | None
    """Their mean."""
    recorded_loss: float | None
    """Their mean at the step itself, from losses.bin; None for runs of earlier versions."""


@dataclass(frozen=True, slots=True)
class StepConversations:
    """The conversations of a step, in the order of the plan."""

    run: str
    step: int
    """Counted from 1."""
    weights: int
    """The losses are those of the weights after this step; 0: of the model that the run started from."""
    exact: bool
    """Whether these were the weights of the step: `weights` is `step` − 1."""
    replayed: int
    """How many steps were computed again to get there."""
    replay_s: float | None
    """How long a replay from the checkpoint before the step would take, estimated from the times of its steps; None if
    there is no checkpoint to replay from."""
    conversations: list[StepConversation]

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def step_conversations(run: Path, step: int, max_replay_s: float = MAX_REPLAY_S) -> StepConversations:
    """The conversations of a finished step, counted from 1, with the loss of each token at that step.

    Replays from the checkpoint before the step. If that would take longer than `max_replay_s`, the losses are those of
    the nearest checkpoint, and `weights` says which. A WhetError names what is missing.
    """
    if launch_env.world_size() > 1:
        raise WhetError("whet inspect runs in one process: start it without torchrun")
    config = for_one_process(read_run_config(run))
    lines = step_lines(run)
    start = choose_start(run, step, config.train.first_step, lines, max_replay_s)  # before anything is loaded
    with open_replay(run, config, lines) as replay:
        damaged: list[int] = []
        while not replay.restore(start.weights, with_optimizer=start.replayed > 0):
            damaged.append(start.weights)
            start = choose_start(run, step, config.train.first_step, lines, max_replay_s, damaged)
        weights = start.weights + start.replayed
        if start.replayed:
            replay.train(start.weights, start.replayed, lines)
        losses = replay.token_losses(step, exact=weights == step - 1)
    return StepConversations(
        str(run), step, weights, weights == step - 1, start.replayed, start.replay_s,
        _describe(run, replay.store, step, replay.loader.documents(step - 1), losses),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """Where a replay starts."""

    weights: int
    """After this step: that of a checkpoint, or the one that the run started from."""
    replayed: int
    """Steps to compute again."""
    replay_s: float | None
    """See StepConversations."""


def choose_start(
    run: Path, step: int, first: int, lines: dict[int, dict[str, Any]], max_replay_s: float, damaged: Sequence[int] = ()
) -> ReplayStart:
    """The checkpoint to replay a step from, or the nearest one if that would take too long. `first`: the step that the
    run started after; `lines`: of metrics.jsonl, by step; `damaged`: checkpoints that cannot be loaded."""
    done = max(lines, default=first)
    if not first < step <= done:
        what = f"the run has done steps {first + 1} to {done}" if done > first else "the run has not done a step yet"
        raise WhetError(f"{run}: step {step}: {what}")
    saved = [at for at in directory.list_steps(run / "checkpoints") if at not in damaged]
    resumable = [at for at in directory.resumable_steps(run / "checkpoints") if at not in damaged]
    before = [at for at in (first, *resumable) if at < step]
    seconds = [float(line["step_s"]) for line in lines.values() if line.get("tokens_per_s") and line.get("step_s")]
    world = read_plan_json(run).get("world")
    replay_s = (step - 1 - before[-1]) * median(seconds or [0.0]) * (world if isinstance(world, int) else 1)
    if step - 1 in saved:
        return ReplayStart(step - 1, 0, replay_s)
    if replay_s <= max_replay_s:
        return ReplayStart(before[-1], step - 1 - before[-1], replay_s)
    nearest = min((first, *saved), key=lambda at: (abs(at - (step - 1)), at))
    return ReplayStart(nearest, 0, replay_s)


def _describe(
    run: Path, store: Store, step: int, documents: NDArray[np.integer], losses: list[NDArray[np.float64]]
) -> list[StepConversation]:
    recorded = losses_of_step(read_training_losses(run), step)
    is_recorded = np.array_equal(recorded["document"], documents)
    decoder, found = open_decoder(store.folder), []
    for place, document in enumerate(documents.tolist()):
        ids, supervised = store.ids(document).tolist(), store.loss(document).copy()
        supervised[:1] = False  # the first token has no context to be predicted from
        each: list[float | None] = [None] * len(ids)
        for at, loss in zip(np.flatnonzero(supervised).tolist(), losses[place].tolist(), strict=True):
            each[at] = loss if math.isfinite(loss) else None
        origin = store.origin(document)
        then = finite_or_none(float(recorded["loss"][place])) if is_recorded else None
        texts, mask = token_texts(ids, decoder), supervised.tolist()
        found.append(
            StepConversation(document, origin.source, origin.line, ids, texts, mask, each, _mean(losses[place]), then)
        )
    return found


def _mean(losses: NDArray[np.float64]) -> float | None:
    return finite_or_none(float(losses.mean())) if len(losses) else None
