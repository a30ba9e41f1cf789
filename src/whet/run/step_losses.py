"""What a step of a run was trained on: its conversations, with the loss of each token at that step.

The weights of a step exist only if a checkpoint was saved before it. Otherwise the steps since the checkpoint before it
are computed again, from the same data with the same random numbers, in this process and without changing the run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from whet.checkpoint import directory
from whet.checkpoint.directory import DamagedCheckpointError
from whet.checkpoint.load import load_checkpoint
from whet.config import Config
from whet.core import launch_env
from whet.core.checksums import read_hashed_json
from whet.core.console import progress, silence_libraries, warn
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.files import read_json_lines
from whet.core.run_folder import read_owner
from whet.data.loader import Loader
from whet.data.plan.planner import Plan
from whet.data.prepare.store import Store
from whet.data.render.detokenize import open_decoder, token_texts
from whet.evaluation.training_losses import losses_of_step, read_training_losses
from whet.execution import device_memory
from whet.execution.transform import transform_layers
from whet.model.flops import count_step_flops
from whet.model.loss.loss_model import LossModel
from whet.parallel.config import ParallelConfig
from whet.run.assemble import build_run_optimizer, totals_before
from whet.run.data import load_ledger_data
from whet.run.lifecycle import advise_on_out_of_memory
from whet.run.memory_choice import with_previous_choice
from whet.run.models.model_builder import build_loss_model, build_model, make_loader, set_deterministic
from whet.run.resume import read_run_config
from whet.training.metrics import RunTotals, finite_or_none
from whet.training.optimizers.factory import set_learning_rates
from whet.training.precision import PrecisionPolicy, choose_precision
from whet.training.records import record_file
from whet.training.schedule import step_lr_factor
from whet.training.step import ForwardPasses, train_step

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


@contextlib.contextmanager
def open_replay(run: Path, config: Config, lines: dict[int, dict[str, Any]]) -> Iterator[Replay]:
    """Model, data and optimizer of a run on this machine's device, to compute its steps again."""
    silence_libraries()
    set_deterministic(config)
    ranks = init_distributed(kind=config.run.device)
    require_free_memory(run, lines, ranks.device)
    with advise_on_out_of_memory():
        replay = Replay(config, ranks)
        with contextlib.closing(replay.loader):
            yield replay


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


def step_lines(run: Path) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl about steps, by step."""
    file = record_file(run, "metrics")
    lines = read_json_lines(file)[0] if file.is_file() else []
    return {line["step"]: line for line in lines if "loss" in line and type(line.get("step")) is int}


def for_one_process(config: Config) -> Config:
    """The same computation on one device, without compilation, which would take longer than a few steps."""
    offload = "none" if config.parallel.offload == "weights" else config.parallel.offload
    parallel = ParallelConfig(recompute=config.parallel.recompute, offload=offload)
    model = config.model.model_copy(update={"compile": False})
    return config.model_copy(update={"parallel": parallel, "model": model})


def require_free_memory(run: Path, lines: dict[int, dict[str, Any]], device: torch.device) -> None:
    """Leave a device alone on which the run itself is training: it could run out of memory."""
    owner = read_owner(run)
    if owner is None or not owner.is_alive(run) or not device_memory.has_own_memory(device):
        return
    needed = max((float(line.get("peak_gib") or 0) for line in lines.values()), default=0.0)
    free = device_memory.capacity(device) / 2**30
    if free < needed:
        raise WhetError(
            f"{run}: the run is training, and its device has {free:.0f} GiB free of the {needed:.0f} GiB that a step "
            "needs. Wait for its end, or use another device (CUDA_VISIBLE_DEVICES)"
        )


class Replay:
    """The model, the optimizer and the data of a run, in this process."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config, self.ranks = with_previous_choice(config, ranks), ranks
        self.precision: PrecisionPolicy = choose_precision(config, ranks.device)
        data = load_ledger_data(config, config.folder / "ledger.json")
        self.store: Store = data.train.store
        tokens = len(data.tokenizer)
        model = build_model(config, self.precision, ranks.device, tokens, typical=data.typical_length)
        self.root: LossModel = build_loss_model(
            config, model, self.precision, ranks.device, tokens, data.max_document_length
        )
        transform_layers(self.root.language_model, self._config.parallel, compile=False)
        self.plan = Plan.load(config.folder / "plan")
        if self.root.unpacked:
            self.plan = self.plan.unpacked(self.store.lengths)
        self.loader: Loader = make_loader(self._config, self.store, self.plan, ranks, self.root)
        self.first_step = config.train.first_step
        """The step that the run started after."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._totals = totals_before(self.loader, config.train)
        self.loss_scale = 1.0

    def restore(self, step: int, with_optimizer: bool) -> bool:
        """Load the checkpoint of a step, or keep the initial model for the step that the run started after. False: the
        checkpoint is damaged."""
        if with_optimizer and self._optimizer is None:
            self._config, self._optimizer = build_run_optimizer(self._config, self.root, self.ranks)
        checkpoint = self._config.folder / "checkpoints" / directory.checkpoint_name(step)
        if step == self._config.train.first_step and not checkpoint.exists():
            return True
        optimizer = self._optimizer if with_optimizer else None
        try:
            state = load_checkpoint(checkpoint, self.root, optimizer, self.ranks)["state"]
        except DamagedCheckpointError as error:
            warn(f"{error}. Another checkpoint takes its place")
            return False
        self._totals, self.loss_scale = RunTotals(**state["seen"]), float(state["loss_scale"]["value"])
        return True

    def train(self, start: int, count: int, lines: dict[int, dict[str, Any]]) -> None:
        """Compute `count` steps again. Steps that the run skipped change nothing now either."""
        flops = count_step_flops(self.root.language_model)
        self.root.train()
        with progress("replaying", count) as bar:
            for step in range(start, start + count):
                after = self._totals.add(self.loader.totals(step), flops)
                line = lines.get(step + 1, {})
                if not line.get("skipped"):
                    assert self._optimizer is not None
                    factor = step_lr_factor(self.plan, self._config.train.schedule, step, self._totals, after)
                    set_learning_rates(self._optimizer, factor)
                    self.loss_scale = float(line.get("loss_scale") or self.loss_scale)
                    clip = self._config.train.clip_norm
                    train_step(self.passes(step), self._optimizer, ranks=self.ranks, clip_norm=clip).wait()
                self._totals = after
                bar.advance()

    @torch.no_grad()
    def token_losses(self, step: int, exact: bool) -> list[NDArray[np.float64]]:
        """−log p of the supervised tokens of each conversation of a step, counted from 1, in the order of the plan.
        `exact`: with the dropout of the step; otherwise without any."""
        self.root.train(exact)
        index = step - 1
        found = [np.empty(0)] * len(self.loader.documents(index))
        batches = [batch.place_at.numpy() for _, batch in self.loader.micro_batches(index)]
        for places, loss in zip(batches, self.passes(index), strict=True):
            nll = loss.nll.double().cpu().numpy()
            for place in np.unique(places):
                found[place] = nll[places == place]
        return found

    def passes(self, step: int, loader: Loader | None = None) -> ForwardPasses:
        """The forward passes of a step, counted from 0; `loader`: in another layout than the run's."""
        return ForwardPasses(
            self.root, loader or self.loader, step, device=self.ranks.device, seed=self._config.run.seed,
            autocast=self.precision.autocast(self.ranks.device), loss_scale=self.loss_scale,
        )  # fmt: skip


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


def read_plan_json(run: Path) -> dict[str, Any]:
    """plan.json; empty if it is missing or damaged, because only the estimated time depends on it."""
    with contextlib.suppress(WhetError):
        return read_hashed_json(run / "plan.json")
    return {}
