"""The steps of a run computed again in one process: from the same data, with the same random numbers, without changing
the run. `whet inspect --step` shows their losses, `whet check RUN` compares them with what was recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from whet.checkpoint import directory
from whet.checkpoint.directory import DamagedCheckpointError
from whet.checkpoint.load import load_checkpoint
from whet.config import Config
from whet.core.console import progress, silence_libraries, warn
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.json_lines import read_json_lines
from whet.core.run_folder import read_owner
from whet.data.loader import Loader
from whet.data.plan.planner import Plan
from whet.data.prepare.store import Store
from whet.execution import device_memory
from whet.execution.transform import transform_layers
from whet.model.flops import count_step_flops
from whet.model.loss.loss_model import LossModel
from whet.parallel.config import ParallelConfig
from whet.run.assemble import build_run_optimizer, totals_before
from whet.run.data import load_ledger_data
from whet.run.lifecycle import advise_on_out_of_memory
from whet.run.loader import make_loader
from whet.run.memory_choice import with_previous_choice
from whet.run.models.model_builder import build_loss_model, build_model, set_deterministic
from whet.training.metrics import RunTotals
from whet.training.optimizers.factory import set_learning_rates
from whet.training.precision import PrecisionPolicy, choose_precision
from whet.training.records import record_file
from whet.training.schedule import step_lr_factor
from whet.training.step import ForwardPasses, train_step

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
