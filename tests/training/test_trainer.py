"""What happens between two steps: measuring, saving, stopping, giving up."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from whet.core.distributed import Ranks
from whet.core.errors import RunFailedError, StoppedError
from whet.data.loader import StepTotals
from whet.execution.cuda_graphs import compile_and_capture_count
from whet.model.flops import AttentionCost, StepFlops
from whet.training import micro_batches, trainer
from whet.training.config import OptimizerConfig, ScheduleConfig, TrainConfig
from whet.training.guard import Guard
from whet.training.loss_scale import LossScaler
from whet.training.metrics import RunTotals
from whet.training.optimizers.factory import build_optimizer
from whet.training.profiler import Profiler
from whet.training.schedule import Position
from whet.training.step import StepResult
from whet.training.trainer import Intervals, ResumePoint, Trainer


class NoPasses:
    """Of a step, which may have begun."""

    def __init__(self, model: Any, loader: Any, step: int, **rest: Any) -> None:
        self.step, self.has_begun, self.made_before = step, False, compile_and_capture_count()

    def begin(self) -> None:
        self.has_begun = True


@pytest.fixture
def make_trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Trainer, list[Any]]]:
    """A trainer whose steps cost nothing, and the list of what it did."""

    def make(
        cadence: Intervals, losses: dict[int, float] | None = None, at_step: Callable[[int], None] = lambda step: None,
        guard: Guard | None = None, checkpoint: int | None = None, norm: float = 2.0,
    ) -> tuple[Trainer, list[Any]]:  # fmt: skip
        did: list[Any] = []

        def step(passes: Any, *, stop: bool, **rest: Any) -> StepResult:
            number = passes.step
            at_step(number)
            did.append(("step", number, passes.has_begun))
            did.append(("rate", made.optimizer.param_groups[0]["lr"]))
            if rest["move"] is not None:
                rest["move"](torch.ones(()), torch.ones(()))
                if rest["meanwhile"] is not None:
                    rest["meanwhile"]()
            return StepResult((losses or {}).get(number, 1.0), 0.5, norm, 1.0, stop, 0.0)

        def go_back(step: int) -> ResumePoint:
            assert checkpoint is not None
            made.guard.excluded.append((checkpoint + 1, step))
            return ResumePoint(
                checkpoint, RunTotals(2 * checkpoint, 30 * checkpoint, 10 * checkpoint, 915 * checkpoint)
            )

        monkeypatch.setattr(trainer, "compute_gradients", step)
        monkeypatch.setattr(trainer, "ForwardPasses", NoPasses)
        model: Any = nn.Linear(1, 1)
        hooks: Any = SimpleNamespace(
            log=lambda line: did.append(("log", line)),
            evaluate=lambda number: did.append(("evaluate", number)),
            save=lambda number, seen: did.append(("save", number, seen)),
            wait_for_save=lambda: did.append(("wait",)),
            stop_requested=lambda: False,
            save_requested=lambda: False,
            fault=lambda fault: did.append(("fault", fault.step, fault.verdict)) or f"step {fault.step} is faulty",
            can_roll_back=lambda: checkpoint is not None,
            roll_back=go_back,
        )
        config = TrainConfig(optimizer=OptimizerConfig(lr=4.0), schedule=ScheduleConfig(name="linear", warmup=0))
        loader: Any = SimpleNamespace(
            totals=lambda number: StepTotals(2, 30, 10, np.array([20, 10])), layout=lambda step: [],
            alone=lambda step, most: iter(()), micro_batches=lambda step: iter(()),
        )  # fmt: skip
        made = Trainer(
            model=model, optimizer=build_optimizer(model, config.optimizer, 0), loader=loader, config=config,
            cadence=cadence, hooks=hooks, ranks=Ranks(0, 1, torch.device("cpu")), per_epoch=8,
            whole=Position(cadence.steps, 2 * cadence.steps / 8, 2 * cadence.steps, 30 * cadence.steps), seed=0,
            work=StepFlops(3, 3, (AttentionCost(None, 1, 2),)), autocast=contextlib.nullcontext(), loss_scale=LossScaler(),
            profiler=Profiler(), peak=None, guard=guard or Guard(),
        )  # fmt: skip
        return made, did

    return make


def kinds(did: list[Any], *wanted: str) -> list[Any]:
    return [entry[:2] for entry in did if entry[0] in wanted]


def test_it_measures_and_saves_when_it_should(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(Intervals(steps=7, last=7, evaluate_every=3, evaluate_at_start=True, save_every=2))
    made.run(0, RunTotals())
    assert kinds(did, "evaluate", "save") == [
        ("evaluate", 0), ("save", 2), ("evaluate", 3), ("save", 4), ("save", 6), ("evaluate", 6), ("save", 7),
        ("evaluate", 7),
    ]  # fmt: skip


def test_a_continued_run_goes_on_where_it_was(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(Intervals(steps=4, last=4, evaluate_every=None, evaluate_at_start=True, save_every=100))
    made.run(2, RunTotals(conversations=4, tokens=60, supervised_tokens=20, flops=7))
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


def test_it_pauses_where_it_was_told_to_with_the_rates_of_the_whole_run(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(Intervals(steps=8, last=3, evaluate_every=None, evaluate_at_start=False, save_every=100))
    made.run(0, RunTotals())
    assert kinds(did, "rate", "save", "evaluate") == [
        ("rate", 4.0), ("rate", 3.5), ("rate", 3.0), ("save", 3), ("evaluate", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_stops(make_trainer: Callable[..., Any], number: int) -> None:
    before = signal.getsignal(number)

    def ask(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), number)

    made, did = make_trainer(Intervals(9, 9, None, False, 100), at_step=ask)
    with pytest.raises(StoppedError, match="after step 3 of 9"):
        made.run(0, RunTotals())
    assert kinds(did, "save") == [("save", 3)]
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(
        Intervals(9, 9, None, False, 100), at_step=lambda step: os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        made.run(0, RunTotals())
    assert kinds(did, "save") == []


def test_a_checkpoint_whose_step_was_not_measured_is_measured_first(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(Intervals(steps=4, last=4, evaluate_every=2, evaluate_at_start=True, save_every=2))
    made.run(2, RunTotals())
    assert kinds(did, "evaluate", "save") == [("evaluate", 2), ("save", 4), ("evaluate", 4)]


def test_a_stop_asked_for_in_the_last_step_leaves_measuring_to_the_next_start(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(
        Intervals(2, 2, None, False, 100), at_step=lambda step: os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(StoppedError):
        made.run(0, RunTotals())
    assert kinds(did, "save", "evaluate") == [("save", 2)]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint(
    make_trainer: Callable[..., Any], loss: float
) -> None:
    made, did = make_trainer(Intervals(9, 9, None, False, 1), losses={2: loss})
    with pytest.raises(RunFailedError, match="step 3 is faulty") as raised:
        made.run(0, RunTotals())
    assert raised.value.exit_code == 3
    assert kinds(did, "save") == [("save", 1), ("save", 2)]


def weight_of(made: Trainer) -> list[float]:
    return [float(parameter.detach().sum()) for parameter in made.model.parameters()]


def give_gradient(made: Trainer) -> None:
    for parameter in made.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def test_a_skipped_step_leaves_weights_and_optimizer_and_counts_all_the_same(make_trainer: Callable[..., Any]) -> None:
    states: list[Any] = []

    def look(step: int) -> None:
        states.append((weight_of(made), [float(s["step"]) for s in made.optimizer.state.values()]))
        give_gradient(made)

    made, did = make_trainer(
        Intervals(5, 5, None, False, 100), losses={2: float("nan")}, at_step=look, guard=Guard(on_nonfinite="skip")
    )
    made.run(0, RunTotals())
    assert states[1] != states[2] == states[3] != states[4]
    lines = [entry[1] for entry in did if entry[0] == "log"]
    assert [line.get("skipped") for line in lines] == [None, None, "nonfinite", None, None]
    assert [line["loss"] for line in lines] == [1.0, 1.0, None, 1.0, 1.0]
    assert [line["conversations"] for line in lines] == [2, 4, 6, 8, 10]


class Asked:
    """A device that is asked early, and takes what it is told to."""

    def __init__(self) -> None:
        self.was_asked = False
        self.did: list[str] = []

    def __call__(self, factor: torch.Tensor, fine: torch.Tensor) -> None:
        self.was_asked = True
        self.did.append("asked")

    def take_back(self) -> None:
        self.did.append("taken back")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(trainer, "build_conditional_step", lambda optimizer: asked)
    monkeypatch.setattr(trainer, "optimizer_step", lambda optimizer, factor: asked.did.append("asked late"))
    return asked


def test_a_device_that_was_asked_early_is_not_asked_again(make_trainer: Callable[..., Any], early: Asked) -> None:
    made, _ = make_trainer(Intervals(3, 3, None, False, 100), losses={1: math.nan}, guard=Guard(on_nonfinite="skip"))
    made.run(0, RunTotals())
    assert early.did == ["asked", "asked", "taken back", "asked"]


def test_a_spike_is_looked_into_before_it_is_taken(make_trainer: Callable[..., Any], early: Asked) -> None:
    """Who is to blame is found on the weights that the step had."""
    made, _ = make_trainer(Intervals(22, 22, None, False, 100), losses={20: 9.0}, guard=Guard(on_spike="warn"))
    made.hooks.fault = lambda fault: early.did.append("looked into") or "faulty"
    made.run(0, RunTotals())
    assert early.did == ["asked"] * 21 + ["taken back", "looked into", "asked late", "asked"]


def test_the_steps_of_a_fault_are_taken_back_before_anything_is_saved(
    make_trainer: Callable[..., Any], early: Asked
) -> None:
    made, _ = make_trainer(Intervals(3, 3, None, False, 100), losses={1: math.nan})
    made.hooks.fault = lambda fault: early.did.append("saved") or "faulty"
    with pytest.raises(RunFailedError):
        made.run(0, RunTotals())
    assert early.did == ["asked", "asked", "taken back", "saved"]


def begun(did: list[Any]) -> list[int]:
    """The steps that had begun before they came to their turn."""
    return [entry[1] for entry in did if entry[0] == "step" and entry[2]]


@pytest.mark.usefixtures("early")
def test_a_step_begins_while_the_one_before_is_looked_at(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(Intervals(12, 12, 4, False, 6))
    made.run(0, RunTotals())
    assert [entry[1] for entry in did if entry[0] == "step"] == list(range(12))
    # after the first step whet gets ready to save, after 4 and 8 it evaluates, after 6 it saves
    assert begun(did) == [2, 3, 5, 7, 9, 10, 11]


@pytest.mark.usefixtures("early")
def test_nothing_begins_that_will_be_stopped_or_saved_before(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(Intervals(9, 9, None, False, 100))
    made.hooks.save_requested = lambda: len([entry for entry in did if entry[0] == "step"]) == 3
    made.hooks.stop_requested = lambda: len([entry for entry in did if entry[0] == "step"]) == 6
    tried: list[int] = []
    made.profiler.starts_or_stops_after = lambda done: tried.append(done) or done == 2
    with pytest.raises(StoppedError):
        made.run(0, RunTotals())
    assert begun(did) == [3, 5, 6]
    assert tried == [2, 3, 5, 6]  # not after the first, nor where it is to save or stop


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("policy", ["skip", "warn", "rollback"])
def test_what_began_on_other_weights_is_dropped(make_trainer: Callable[..., Any], policy: Any) -> None:
    made, did = make_trainer(
        Intervals(24, 24, None, False, 100), losses={20: 9.0}, guard=Guard(on_spike=policy), checkpoint=19
    )
    made.run(0, RunTotals())
    assert begun(did) == [step for step in range(2, 24) if step != 21]


@pytest.mark.usefixtures("early")
def test_a_step_that_is_passed_over_does_not_begin(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(Intervals(7, 7, None, False, 100), guard=Guard(excluded=[(4, 5)]))
    made.run(0, RunTotals())
    assert [entry[1] for entry in did if entry[0] == "step"] == [0, 1, 2, 5, 6]
    assert begun(did) == [2, 6]


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(
    "why", ["its scale may move", "large gradients", "asked late", "slices", "parts", "divided weights"]
)
def test_a_step_begins_in_its_turn_where_it_has_to(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "asked late":
        monkeypatch.setattr(trainer, "build_conditional_step", lambda optimizer: None)
    monkeypatch.setattr(trainer, "is_sharded", lambda model: why == "divided weights")
    if why == "large gradients":
        monkeypatch.setattr(trainer, "_MAX_OVERLAP_BYTES", 7)  # a weight and a bias
    made, did = make_trainer(Intervals(5, 5, None, False, 100))
    if why == "its scale may move":
        made.loss_scale.moves = True
    changes = {"slices": {"slices": 2}, "parts": {"tensor": 2}}.get(why, {})
    replace(made, ranks=replace(made.ranks, **changes)).run(0, RunTotals())
    assert begun(did) == []


@pytest.mark.usefixtures("early")
def test_what_is_compiled_for_the_next_step_does_not_make_this_one_cold(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = [0]
    monkeypatch.setattr(micro_batches, "compile_and_capture_count", lambda: compiled[0])

    class Compiling(NoPasses):
        def __init__(self, *given: Any, **rest: Any) -> None:
            super().__init__(*given, **rest)
            self.made_before = compiled[0]

        def begin(self) -> None:
            super().begin()
            compiled[0] += self.step == 3

    made, did = make_trainer(Intervals(6, 6, None, False, 100))
    monkeypatch.setattr(trainer, "ForwardPasses", Compiling)
    made.run(0, RunTotals())
    assert begun(did) == [2, 3, 4, 5]
    lines = [entry[1] for entry in did if entry[0] == "log"]
    assert [line["step"] for line in lines if line["tokens_per_s"] is None] == [4]


def test_skipping_ends_after_ten_in_a_row(make_trainer: Callable[..., Any]) -> None:
    losses = {step: float("inf") for step in [*range(1, 9), *range(20, 40)]}
    made, did = make_trainer(Intervals(50, 50, None, False, 100), losses=losses, guard=Guard(on_nonfinite="skip"))
    with pytest.raises(RunFailedError, match="step 31 is faulty"):
        made.run(0, RunTotals())
    verdict = [entry[2] for entry in did if entry[0] == "fault"][-1]
    assert (verdict.action, "10 steps in a row" in verdict.reason) == ("stop", True)


def test_a_rollback_goes_back_and_passes_over(make_trainer: Callable[..., Any]) -> None:
    ran: list[int] = []
    made, did = make_trainer(
        Intervals(7, 7, 2, False, 100), losses={4: float("nan")}, at_step=ran.append,
        guard=Guard(on_nonfinite="rollback"), checkpoint=2,
    )  # fmt: skip
    made.run(0, RunTotals())
    assert ran == [0, 1, 2, 3, 4, 5, 6]
    lines = [entry[1] for entry in did if entry[0] == "log"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert [line.get("skipped") for line in lines[4:]] == ["passed over"] * 3 + [None, None]
    assert [line["loss"] for line in lines[4:]] == [None, None, None, 1.0, 1.0]
    assert [line["conversations"] for line in lines[4:]] == [6, 8, 10, 12, 14]
    assert [line["flops"] // 915 for line in lines[4:]] == [2, 2, 2, 3, 4]
    assert kinds(did, "evaluate") == [("evaluate", step) for step in (2, 4, 2, 4, 6, 7)]


def test_a_rollback_without_a_checkpoint_stops(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(
        Intervals(7, 7, None, False, 100), losses={1: float("nan")}, guard=Guard(on_nonfinite="rollback")
    )
    with pytest.raises(RunFailedError):
        made.run(0, RunTotals())
    (fault,) = [entry for entry in did if entry[0] == "fault"]
    assert "no checkpoint to go back to" in fault[2].reason


def test_an_overflow_of_fp16_is_no_fault_until_the_scale_is_one(make_trainer: Callable[..., Any]) -> None:
    made, did = make_trainer(Intervals(9, 9, None, False, 100), norm=float("inf"))
    made.loss_scale.value, made.loss_scale.moves = 4.0, True
    with pytest.raises(RunFailedError, match="step 3 is faulty"):
        made.run(0, RunTotals())
    assert [entry[1]["loss_scale"] for entry in did if entry[0] == "log"] == [4.0, 2.0]


def test_a_stop_asked_for_in_a_step_that_is_rolled_back_is_not_lost(make_trainer: Callable[..., Any]) -> None:
    def ask(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    made, did = make_trainer(
        Intervals(9, 9, None, False, 100), losses={3: float("nan")}, at_step=ask, guard=Guard(on_nonfinite="rollback"),
        checkpoint=1,
    )  # fmt: skip
    with pytest.raises(StoppedError, match="back after step 1"):
        made.run(0, RunTotals())
    assert kinds(did, "save") == []


def test_a_signal_in_a_step_that_is_rolled_back_is_not_lost(make_trainer: Callable[..., Any]) -> None:
    def ask(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    made, did = make_trainer(
        Intervals(9, 9, None, False, 100), losses={4: float("nan")}, at_step=ask, guard=Guard(on_nonfinite="rollback"),
        checkpoint=2,
    )  # fmt: skip
    with pytest.raises(StoppedError):
        made.run(0, RunTotals())
    assert [entry[1]["step"] for entry in did if entry[0] == "log"] == [1, 2, 3, 4, 3, 4, 5, 6]
