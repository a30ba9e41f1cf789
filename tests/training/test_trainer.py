"""What happens between two steps: evaluating, saving, stopping, faults, and the overlap of steps."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from whet.config import Config
from whet.core.config import validate_config
from whet.core.distributed import Ranks
from whet.core.errors import RunFailedError, StoppedError
from whet.core.yaml import parse_yaml
from whet.data.loader import StepTotals
from whet.execution.cuda_graphs import compile_and_capture_count
from whet.model.flops import AttentionCost, StepFlops
from whet.training import faults, overlap, trainer
from whet.training.guard import Guard
from whet.training.metrics import RunTotals, StartupTimer
from whet.training.optimizers.factory import build_optimizer
from whet.training.output import RunOutput
from whet.training.precision import LossScaler
from whet.training.profiler import Profiler
from whet.training.run_state import Intervals, Run
from whet.training.step import StepResult
from whet.training.trainer import train

CONFIG = """
data: {sources: [{path: "builtin:orders"}]}
model: {path: "builtin:tiny"}
train: {optimizer: {lr: 4.0}, schedule: {name: linear, warmup: 0}}
"""


class NoForward:
    """The forward passes of a step, which may have started."""

    def __init__(self, model: Any, loader: Any, step: int, **rest: Any) -> None:
        self.step, self.has_started, self.compilations = step, False, compile_and_capture_count()

    def launch_first(self) -> None:
        self.has_started = True


class Recorded(RunOutput):
    """Writes to a list."""

    def __init__(self, did: list[Any]) -> None:
        super().__init__()
        self.did = did

    def write_step(self, line: dict[str, Any]) -> None:
        self.did.append(("log", line))


@pytest.fixture
def make_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, list[Any]]]:
    """A run whose steps cost nothing, and the list of what it did. `on_device`: the optimizer decides there."""

    def make(
        intervals: Intervals, losses: dict[int, float] | None = None,
        at_step: Callable[[int], None] = lambda step: None, guard: Guard | None = None,
        checkpoint: int | None = None, norm: float = 2.0, on_device: bool = False,
    ) -> tuple[Run, list[Any]]:  # fmt: skip
        did: list[Any] = []

        def step(
            forward: Any, optimizer: Any, *, stop_requested: Any, spike_limit: float, save: bool, **rest: Any
        ) -> Any:  # fmt: skip
            at_step(forward.step)
            did.append(("step", forward.step, forward.has_started))
            did.append(("rate", run.optimizer.param_groups[0]["lr"]))
            loss = (losses or {}).get(forward.step, 1.0)
            updated = math.isfinite(loss) and math.isfinite(norm) and loss <= spike_limit
            if updated:
                did.append(("update", forward.step))
                optimizer.step()
            result = StepResult(loss, 0.5, norm, 1.0, stop_requested(), 0.0, save, updated)
            return SimpleNamespace(copied=None, wait=lambda: did.append(("read", forward.step)) or result)

        def update_late(optimizer: Any, scale: float) -> None:
            did.append(("update late", run.step))
            optimizer.step()

        def event(run: Run, result: Any, verdict: Any, diagnosis: Any, file: Any) -> dict[str, Any]:
            did.append(("fault", run.step + 1, verdict))
            return {"step": run.step + 1}

        def roll_back(run: Run) -> None:
            assert checkpoint is not None
            run.guard.excluded.append((checkpoint + 1, run.step + 1))
            run.step = checkpoint
            run.totals = RunTotals(2 * checkpoint, 30 * checkpoint, 10 * checkpoint, 915 * checkpoint)

        monkeypatch.setattr(trainer, "train_step", step)
        monkeypatch.setattr(trainer, "optimizer_step", update_late)
        monkeypatch.setattr(trainer, "roll_back", roll_back)
        for module in (trainer, faults):
            monkeypatch.setattr(
                module, "save_checkpoint", lambda run: did.append(("save", run.step, run.totals)), raising=False
            )
        monkeypatch.setattr(faults, "resumable_steps", lambda run: [] if checkpoint is None else [checkpoint])
        monkeypatch.setattr(faults, "saved_steps", lambda run: [run.step])
        monkeypatch.setattr(faults, "fault_event", event)
        monkeypatch.setattr(faults, "fault_batch", lambda *given: {})
        monkeypatch.setattr(faults, "write_fault_batch", lambda file, batch: None)
        monkeypatch.setattr(faults, "fault_message", lambda event: f"step {event['step']} is faulty")
        monkeypatch.setattr(overlap, "EarlyForwardPasses", NoForward)
        monkeypatch.setattr(overlap, "decides_on_device", lambda optimizer: on_device)
        model: Any = nn.Linear(1, 1)
        model.router_aux_loss = None
        config = validate_config(Config, parse_yaml(CONFIG, "test"))
        loader: Any = SimpleNamespace(
            totals=lambda number: StepTotals(2, 30, 10, np.array([20, 10])), layout=lambda step: [],
            single_document_batches=lambda step, most: iter(()), micro_batches=lambda step: iter(()),
        )  # fmt: skip
        stats = SimpleNamespace(per_epoch=8, tokens=30 * intervals.steps)
        nothing: Any = SimpleNamespace()
        run = Run(
            config=config, ranks=Ranks(0, 1, torch.device("cpu")),
            precision=SimpleNamespace(name="fp32", autocast=lambda device: contextlib.nullcontext()),  # type: ignore[arg-type]
            plan=FakePlan(intervals.steps, stats), store=nothing, store_check=nothing, tokenizer=nothing,  # type: ignore[arg-type]
            loader=loader, model=model,
            optimizer=build_optimizer(model, config.train.optimizer, 0), loss_scaler=LossScaler(),
            guard=guard or Guard(), intervals=intervals,
            evaluate=lambda: did.append(("evaluate", run.step)) or ({}, [], None),
            saver=None, output=Recorded(did), startup=SimpleNamespace(is_done=True), effect=nothing,  # type: ignore[arg-type]
            flops=StepFlops(3, 3, (AttentionCost(None, 1, 2),)), peak_flops=None,
        )  # fmt: skip
        return run, did

    return make


class FakePlan:
    """Two conversations a step."""

    def __init__(self, steps: int, stats: Any) -> None:
        self._steps, self.stats, self.documents = steps, stats, range(2 * steps)
        self.step_offset, self.last_step = 0, steps

    def __len__(self) -> int:
        return self._steps


def kinds(did: list[Any], *wanted: str) -> list[Any]:
    return [entry[:2] for entry in did if entry[0] in wanted]


def test_it_evaluates_and_saves_on_schedule(make_run: Callable[..., Any]) -> None:
    run, did = make_run(Intervals(steps=7, last=7, evaluate_every=3, evaluate_at_start=True, save_every=2))
    train(run)
    assert kinds(did, "evaluate", "save") == [
        ("evaluate", 0), ("save", 2), ("evaluate", 3), ("save", 4), ("save", 6), ("evaluate", 6), ("save", 7),
        ("evaluate", 7),
    ]  # fmt: skip


def test_weights_without_a_gradient_are_named_after_the_first_step(
    make_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run(Intervals(steps=3, last=3, evaluate_every=None, evaluate_at_start=False, save_every=100))
    run.effect = SimpleNamespace(without_gradient=lambda: [f"layers.{layer}.dt_proj.weight" for layer in range(5)])
    run.startup = StartupTimer()
    train(run)
    named = "step 1: 5 trained weights got no gradient: layers.0.dt_proj.weight, layers.1.dt_proj.weight, layers.2"
    assert "".join(capsys.readouterr().err.split()).count("".join(named.split())) == 1


def test_with_an_offset_intervals_and_profiled_steps_count_from_it(make_run: Callable[..., Any]) -> None:
    run, did = make_run(
        Intervals(
            steps=107, last=107, evaluate_every=3, evaluate_at_start=True, save_every=2, first=100, offset=100,
        )
    )  # fmt: skip
    run.step, profiled = 100, []

    class Recording(Profiler):
        @contextlib.contextmanager
        def step(self, step: int) -> Iterator[None]:
            profiled.append(step)
            yield

    run.profiler = Recording()
    train(run)
    assert kinds(did, "evaluate", "save") == [
        ("evaluate", 100), ("save", 102), ("evaluate", 103), ("save", 104), ("save", 106), ("evaluate", 106),
        ("save", 107), ("evaluate", 107),
    ]  # fmt: skip
    assert profiled == [1, 2, 3, 4, 5, 6, 7]


def test_a_resumed_run_continues_where_it_stopped(make_run: Callable[..., Any]) -> None:
    run, did = make_run(Intervals(steps=4, last=4, evaluate_every=None, evaluate_at_start=True, save_every=100))
    run.step, run.totals = 2, RunTotals(conversations=4, tokens=60, supervised_tokens=20, flops=7)
    train(run)
    assert kinds(did, "rate", "evaluate") == [("rate", 2.0), ("rate", 1.0), ("evaluate", 4)]
    lines = [entry[1] for entry in did if entry[0] == "log"]
    assert [line["step"] for line in lines] == [3, 4]
    assert [line["conversations"] for line in lines] == [6, 8]
    assert [line["tokens"] for line in lines] == [90, 120]
    assert [line["supervised_tokens"] for line in lines] == [30, 40]
    assert [line["flops"] for line in lines] == [7 + 915, 7 + 2 * 915]
    assert [line["epoch"] for line in lines] == [6 / 8, 1.0]
    assert [line["lr"] for line in lines] == [2.0, 1.0]
    ((_, step, seen),) = [entry for entry in did if entry[0] == "save"]
    assert (step, seen) == (4, RunTotals(8, 120, 40, 7 + 2 * 915))


def test_until_pauses_with_the_learning_rates_of_the_whole_run(make_run: Callable[..., Any]) -> None:
    run, did = make_run(Intervals(steps=8, last=3, evaluate_every=None, evaluate_at_start=False, save_every=100))
    train(run)
    assert kinds(did, "rate", "save", "evaluate") == [
        ("rate", 4.0), ("rate", 3.5), ("rate", 3.0), ("save", 3), ("evaluate", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_stops(make_run: Callable[..., Any], number: int) -> None:
    before = signal.getsignal(number)

    def ask(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), number)

    run, did = make_run(Intervals(9, 9, None, False, 100), at_step=ask)
    with pytest.raises(StoppedError, match="after step 2 of 9"):
        train(run)
    assert kinds(did, "save") == [("save", 2)]
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait(make_run: Callable[..., Any]) -> None:
    def ask_twice(step: int) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    run, did = make_run(Intervals(9, 9, None, False, 100), at_step=ask_twice)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert kinds(did, "save") == []


def test_a_checkpoint_whose_step_was_not_evaluated_is_evaluated_first(make_run: Callable[..., Any]) -> None:
    run, did = make_run(Intervals(steps=4, last=4, evaluate_every=2, evaluate_at_start=True, save_every=2))
    run.step = 2
    train(run)
    assert kinds(did, "evaluate", "save") == [("evaluate", 2), ("save", 4), ("evaluate", 4)]


def test_a_stop_requested_in_the_last_step_leaves_evaluation_to_the_next_start(make_run: Callable[..., Any]) -> None:
    def ask(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run, did = make_run(Intervals(2, 2, None, False, 100), at_step=ask)
    with pytest.raises(StoppedError):
        train(run)
    assert kinds(did, "save", "evaluate") == [("save", 2)]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint(make_run: Callable[..., Any], loss: float) -> None:
    run, did = make_run(Intervals(9, 9, None, False, 1), losses={2: loss})
    with pytest.raises(RunFailedError, match="step 3 is faulty") as raised:
        train(run)
    assert raised.value.exit_code == 3
    assert kinds(did, "save") == [("save", 1), ("save", 2)]


def weight_of(run: Run) -> list[float]:
    return [float(parameter.detach().sum()) for parameter in run.model.parameters()]


def give_gradient(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def test_a_skipped_step_leaves_weights_and_optimizer_and_counts_all_the_same(make_run: Callable[..., Any]) -> None:
    states: list[Any] = []

    def look(step: int) -> None:
        states.append((weight_of(run), [float(s["step"]) for s in run.optimizer.state.values()]))
        give_gradient(run)

    run, did = make_run(
        Intervals(5, 5, None, False, 100), losses={2: float("nan")}, at_step=look, guard=Guard(on_nonfinite="skip")
    )
    train(run)
    assert states[1] != states[2] == states[3] != states[4]
    lines = [entry[1] for entry in did if entry[0] == "log"]
    assert [line.get("skipped") for line in lines] == [None, None, "nonfinite", None, None]
    assert [line["loss"] for line in lines] == [1.0, 1.0, None, 1.0, 1.0]
    assert [line["conversations"] for line in lines] == [2, 4, 6, 8, 10]


def test_a_spike_is_diagnosed_before_its_update(make_run: Callable[..., Any]) -> None:
    """On the weights that caused it, also if train.on_spike=warn then takes the step."""
    run, did = make_run(Intervals(22, 22, None, False, 100), losses={20: 9.0}, guard=Guard(on_spike="warn"))
    train(run)
    order = [entry[0] for entry in did if entry[0] in ("update", "fault", "update late")]
    assert order == ["update"] * 20 + ["fault", "update late", "update"]


def test_a_step_that_was_not_updated_is_not_updated_late(make_run: Callable[..., Any]) -> None:
    run, did = make_run(Intervals(3, 3, None, False, 100), losses={1: math.nan}, guard=Guard(on_nonfinite="skip"))
    train(run)
    assert kinds(did, "update", "update late") == [("update", 0), ("update", 2)]


def started_early(did: list[Any]) -> list[int]:
    """The steps whose first forward pass was launched before the step."""
    return [entry[1] for entry in did if entry[0] == "step" and entry[2]]


def test_a_step_starts_before_the_numbers_of_the_one_before_are_read(make_run: Callable[..., Any]) -> None:
    run, did = make_run(Intervals(12, 12, 4, False, 6), on_device=True)
    train(run)
    assert [entry[1] for entry in did if entry[0] == "step"] == list(range(12))
    # after step 1 staging memory is allocated, after 4 and 8 it evaluates, after 6 it saves
    assert started_early(did) == [2, 3, 5, 7, 9, 10, 11]


def test_no_step_starts_early_before_a_stop_a_save_or_the_profiler(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, did = make_run(Intervals(9, 9, None, False, 100), on_device=True)

    def steps_done() -> int:
        return len([entry for entry in did if entry[0] == "step"])

    monkeypatch.setattr(trainer, "save_is_due", lambda run: steps_done() == 3)
    run.output.stop_requested = lambda: steps_done() == 7
    asked: list[int] = []
    run.profiler.starts_or_stops_after = lambda done: asked.append(done) or done == 2
    with pytest.raises(StoppedError):
        train(run)
    assert started_early(did) == [3, 5, 6]
    assert asked == [2, 3, 5, 6]  # neither after the first step nor before a save or a stop


@pytest.mark.parametrize("policy", ["skip", "warn", "rollback"])
def test_what_started_early_on_other_weights_is_discarded(make_run: Callable[..., Any], policy: Any) -> None:
    run, did = make_run(
        Intervals(24, 24, None, False, 100), losses={20: 9.0}, guard=Guard(on_spike=policy), checkpoint=19,
        on_device=True,
    )  # fmt: skip
    train(run)
    assert started_early(did) == [step for step in range(2, 24) if step != 21]


def test_an_excluded_step_does_not_start_early(make_run: Callable[..., Any]) -> None:
    run, did = make_run(Intervals(7, 7, None, False, 100), guard=Guard(excluded=[(4, 5)]), on_device=True)
    train(run)
    assert [entry[1] for entry in did if entry[0] == "step"] == [0, 1, 2, 5, 6]
    assert started_early(did) == [2, 6]


@pytest.mark.parametrize(
    "why", ["dynamic loss scale", "large gradients", "host decides", "context parallel", "tensor parallel", "sharded"]
)
def test_no_step_starts_early_where_it_may_not(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr("whet.parallel.fsdp.is_sharded", lambda model: why == "sharded")
    if why == "large gradients":
        monkeypatch.setattr(overlap, "_MAX_GRADIENT_BYTES", 7)  # a weight and a bias
    run, did = make_run(Intervals(5, 5, None, False, 100), on_device=why != "host decides")
    if why == "dynamic loss scale":
        run.loss_scaler.moves = True
    sizes = {"context parallel": {"context_size": 2}, "tensor parallel": {"tensor_size": 2}}.get(why, {})
    run.ranks = replace(run.ranks, **sizes)
    train(run)
    assert started_early(did) == []


def test_without_memory_for_it_no_step_starts_early_again(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    class Hungry(NoForward):
        def launch_first(self) -> None:
            tried.append(self.step)
            raise torch.OutOfMemoryError("no")

    run, did = make_run(Intervals(6, 6, None, False, 100), on_device=True)
    monkeypatch.setattr(overlap, "EarlyForwardPasses", Hungry)
    train(run)
    assert [entry[1:] for entry in did if entry[0] == "step"] == [(step, False) for step in range(6)]
    assert tried == [2]


def test_compiling_for_the_next_step_does_not_mark_this_one(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = [0]
    monkeypatch.setattr(overlap, "compile_and_capture_count", lambda: compiled[0])

    class Compiling(NoForward):
        def __init__(self, *given: Any, **rest: Any) -> None:
            super().__init__(*given, **rest)
            self.compilations = compiled[0]

        def launch_first(self) -> None:
            super().launch_first()
            compiled[0] += self.step == 3

    run, did = make_run(Intervals(6, 6, None, False, 100), on_device=True)
    monkeypatch.setattr(overlap, "EarlyForwardPasses", Compiling)
    train(run)
    lines = [entry[1] for entry in did if entry[0] == "log"]
    assert [line["step"] for line in lines if line["tokens_per_s"] is None] == [4]


def test_skipping_ends_after_ten_in_a_row(make_run: Callable[..., Any]) -> None:
    losses = {step: float("inf") for step in [*range(1, 9), *range(20, 40)]}
    run, did = make_run(Intervals(50, 50, None, False, 100), losses=losses, guard=Guard(on_nonfinite="skip"))
    with pytest.raises(RunFailedError, match="step 31 is faulty"):
        train(run)
    verdict = [entry[2] for entry in did if entry[0] == "fault"][-1]
    assert (verdict.action, "10 steps in a row" in verdict.reason) == ("stop", True)


def test_a_rollback_returns_to_the_checkpoint_and_excludes_the_steps_since(make_run: Callable[..., Any]) -> None:
    ran: list[int] = []
    run, did = make_run(
        Intervals(7, 7, 2, False, 100), losses={4: float("nan")}, at_step=ran.append,
        guard=Guard(on_nonfinite="rollback"), checkpoint=2,
    )  # fmt: skip
    train(run)
    assert ran == [0, 1, 2, 3, 4, 5, 6]
    lines = [entry[1] for entry in did if entry[0] == "log"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert [line.get("skipped") for line in lines[4:]] == ["passed over"] * 3 + [None, None]
    assert [line["loss"] for line in lines[4:]] == [None, None, None, 1.0, 1.0]
    assert [line["conversations"] for line in lines[4:]] == [6, 8, 10, 12, 14]
    assert [line["flops"] // 915 for line in lines[4:]] == [2, 2, 2, 3, 4]
    assert kinds(did, "evaluate") == [("evaluate", step) for step in (2, 4, 2, 4, 6, 7)]


def test_a_rollback_without_a_checkpoint_stops(make_run: Callable[..., Any]) -> None:
    run, did = make_run(
        Intervals(7, 7, None, False, 100), losses={1: float("nan")}, guard=Guard(on_nonfinite="rollback")
    )
    with pytest.raises(RunFailedError):
        train(run)
    (fault,) = [entry for entry in did if entry[0] == "fault"]
    assert "no checkpoint to go back to" in fault[2].reason


def test_an_overflow_of_fp16_is_no_fault_until_the_scale_is_one(make_run: Callable[..., Any]) -> None:
    run, did = make_run(Intervals(9, 9, None, False, 100), norm=float("inf"))
    run.loss_scaler.value, run.loss_scaler.moves = 4.0, True
    with pytest.raises(RunFailedError, match="step 3 is faulty"):
        train(run)
    assert [entry[1]["loss_scale"] for entry in did if entry[0] == "log"] == [4.0, 2.0]


def test_a_stop_requested_in_a_step_that_is_rolled_back_is_not_lost(make_run: Callable[..., Any]) -> None:
    def ask(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run, did = make_run(
        Intervals(9, 9, None, False, 100), losses={3: float("nan")}, at_step=ask, guard=Guard(on_nonfinite="rollback"),
        checkpoint=1,
    )  # fmt: skip
    with pytest.raises(StoppedError, match="back after step 1"):
        train(run)
    assert kinds(did, "save") == []
