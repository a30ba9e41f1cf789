"""`whet check RUN`: a step of a run, computed again from a checkpoint and in other layouts.

`resume`: the checkpoint brings the run back. Weights and optimizer are restored, the next step is trained again, and
the loss and the gradient of the step after it are those that the run recorded.
`layout`: the same step with other micro-batches, as the shares of two processes, and with each conversation alone has
the same loss of each conversation and the same gradient.

Computations in another order round differently. How much that may change is stated by precision, and measured: twice
the change by one unit of rounding in the embeddings counts as rounding, too: deep models and routers amplify it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.checkpoint import directory
from whet.core import launch_env
from whet.core.checksums import write_hashed_json
from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.run_folder import CHECK_FILE
from whet.data.loader import Loader
from whet.preflight.data_checks import Finding
from whet.run.plan_summary import read_plan_json
from whet.run.replay_steps import Replay, for_one_process, open_replay, step_lines
from whet.run.resume import read_run_config
from whet.training.step import train_step

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHANGEABLE = ("train.precision", "run.device")
"""Settings that may differ from those of the run: in fp64, rounding hides nothing."""
_TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4}
_COARSE_TOLERANCE = 3e-2
"""Of bf16, fp16 and fp8."""
_MAX_ROUNDING = 0.15
"""Differences that are no rounding, however deep the model: those of a wrong computation are of the order of 1."""


def check_run_folder(run: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    """Check a run that has done a step; each finding as soon as it is known. The result goes to check.json in its
    folder."""
    if launch_env.world_size() > 1:
        raise WhetError("whet check RUN runs in one process: start it without torchrun")
    for override in overrides:
        if override.partition("=")[0] not in _CHANGEABLE:
            raise WhetError(f"{override}: a run is checked with its own settings, except {' and '.join(_CHANGEABLE)}")
    config = for_one_process(read_run_config(run, overrides))
    lines, findings = step_lines(run), list[Finding]()
    starts = possible_starts(run, config.train.first_step, lines)
    with open_replay(run, config, lines) as replay:
        for finding in _findings(run, replay, starts, lines):
            findings.append(finding)
            yield finding
    checks = [finding.as_dict() for finding in findings]
    try:
        write_hashed_json(run / CHECK_FILE, {"precision": replay.precision.name, "checks": checks})
    except OSError as error:  # a run of somebody else
        warn(f"{run / CHECK_FILE}: the result cannot be written ({error.strerror}), so report and dash do not show it")


def possible_starts(run: Path, first: int, lines: dict[int, dict[str, Any]]) -> list[tuple[int, int]]:
    """(weights, step): the checkpoints to start from, the newest first, each with the step to compute again: the second
    after it, because the optimizer's state has no effect on the first. If there is none, the first after it. 0 stands
    for the model that the run started from, or the step that it started after."""
    saved = [at for at in directory.resumable_steps(run / "checkpoints") if at > first]
    found = [
        (at, at + after)
        for after in (2, 1)
        for at in (*reversed(saved), first)
        if all(_is_sound(lines.get(at + each)) for each in range(1, after + 1))
    ]
    if not found:
        raise WhetError(f"{run}: the run has not done a step yet. Check its recipe instead: {run / 'config.yaml'}")
    return found


def _is_sound(line: dict[str, Any] | None) -> bool:
    if line is None or line.get("skipped"):
        return False
    return all(isinstance(line.get(key), float) and math.isfinite(line[key]) for key in ("loss", "grad_norm"))


def _findings(
    run: Path, replay: Replay, starts: list[tuple[int, int]], lines: dict[int, dict[str, Any]]
) -> Iterator[Finding]:
    damaged: list[int] = []
    while not replay.restore(starts[0][0], with_optimizer=starts[0][1] > starts[0][0] + 1):
        damaged.append(starts[0][0])
        yield Finding("resume", "fault", f"the checkpoint of step {damaged[-1]} is damaged")
        starts = [each for each in starts if each[0] not in damaged]
        if not starts:  # of a run that started after an imported checkpoint; the initial model is always there
            return
    at, step = starts[0]
    if step > at + 1:
        replay.train(at, step - 1 - at, lines)
    plan, recorded = read_plan_json(run), lines[step]
    replay.root.train()
    with _layouts(replay) as layouts:
        names = list(layouts)
        planned = compute_step(replay, layouts[names[0]], step)
        yield _resume_finding(replay, plan, at, step, planned, recorded)
        if replay.root.is_stochastic:  # its random numbers depend on the layout
            replay.root.eval()
            planned = compute_step(replay, layouts[names[0]], step)
        with _rounded_embeddings(replay.root):
            noise = compute_step(replay, layouts[names[0]], step).difference(planned)
        tolerance = _tolerance(replay.precision.name, max(noise))
        found = {name: compute_step(replay, layouts[name], step).difference(planned) for name in names[1:]}
    yield _layout_finding(run, step, names[0], found, tolerance)


# Layouts


@contextlib.contextmanager
def _layouts(replay: Replay) -> Iterator[dict[str, list[Loader]]]:
    """The loaders of one or several processes for each layout, by name; the run's own first."""
    own, root, plan = replay.loader, replay.root, replay.plan
    rows = own.micro_rows
    layouts = {_row_name(rows): [own]}
    if not root.unpacked or root.pads:
        other = 1 if rows > 1 else 2
        layouts[_row_name(other)] = [own.in_layout(other, plan, 0, 1)]
    if root.router_aux_loss is None:  # it needs the routers' choices of all processes before the first backward pass
        layouts["the shares of two processes"] = [own.in_layout(rows, plan, rank, 2) for rank in range(2)]
    if plan.stats.fullest > 1:
        layouts["each conversation alone"] = [own.in_layout(1, plan.unpacked(replay.store.lengths), 0, 1)]
    try:
        yield layouts
    finally:
        for loader in (each for loaders in list(layouts.values())[1:] for each in loaders):
            loader.close()


def _row_name(rows: int) -> str:
    return f"{rows} {'row' if rows == 1 else 'rows'} a micro-batch"


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The numbers of a step in one layout."""

    loss: float
    grad_norm: float
    losses: NDArray[np.float64]
    """The sum of −log p of each conversation, in the order of the store."""
    gradients: list[Tensor]
    """Of each trained weight, on the host."""

    def difference(self, other: ComputedStep) -> tuple[float, float]:
        """Of the losses of conversations and of the gradients: the norm of the difference ÷ the norm of `other`."""
        losses = float(np.linalg.norm(self.losses - other.losses) / np.linalg.norm(other.losses))
        squares = [
            ((mine.double() - theirs.double()).square().sum(), theirs.double().square().sum())
            for mine, theirs in zip(self.gradients, other.gradients, strict=True)
        ]
        change, whole = (float(sum(each)) for each in zip(*squares, strict=True))
        return losses, math.sqrt(change / whole) if whole else math.sqrt(change)


def compute_step(replay: Replay, loaders: Sequence[Loader], step: int) -> ComputedStep:
    """Losses and gradients of a step, counted from 1. Each loader is that of one process; their sum is the step."""
    parameters, index = replay.root.trainable_parameters, step - 1
    losses, gradients = np.zeros(len(loaders[0].documents(index))), list[Tensor]()
    loss = 0.0
    for loader in loaders:
        result = train_step(replay.passes(index, loader), None, ranks=replay.ranks, clip_norm=math.inf).wait()
        assert result.conversation_losses is not None
        losses, loss = losses + result.conversation_losses, loss + result.loss
        found = (torch.zeros_like(each) if each.grad is None else each.grad for each in parameters)
        part = [(each / replay.loss_scale).cpu() for each in found]
        gradients = part if not gradients else [a + b for a, b in zip(gradients, part, strict=True)]
        for parameter in parameters:
            parameter.grad = None
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients))
    order = np.argsort(loaders[0].documents(index), kind="stable")
    return ComputedStep(loss, norm, losses[order], gradients)


@contextlib.contextmanager
def _rounded_embeddings(root: nn.Module) -> Iterator[None]:
    """Change what the embeddings give by one unit of rounding."""

    def change(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        is_coarse = torch.is_autocast_enabled(output.device.type)
        unit = torch.finfo(torch.bfloat16 if is_coarse else output.dtype).eps
        signs = 1 - 2 * (torch.arange(output.shape[-1], device=output.device) % 2)
        return output * (1 + unit * signs).to(output.dtype)

    hook = root.language_model.get_input_embeddings().register_forward_hook(change)  # type: ignore[operator, union-attr]
    try:
        yield
    finally:
        hook.remove()


# Findings


def _tolerance(precision: str, rounding: float = 0.0) -> float:
    return max(_TOLERANCES.get(precision, _COARSE_TOLERANCE), min(2 * rounding, _MAX_ROUNDING))


def _resume_finding(
    replay: Replay, plan: dict[str, Any], at: int, step: int, planned: ComputedStep, recorded: dict[str, Any]
) -> Finding:
    came = f"from the checkpoint of step {at}" if at > replay.first_step else "from the initial model"
    again = f", step {step - 1} trained again" if step > at + 1 else ""
    if replay.root.is_stochastic and (plan.get("world"), plan.get("micro_rows")) != (1, replay.loader.micro_rows):
        text = (
            f"{came}{again}: not compared with step {step} of the run, because another layout does not repeat its "
            "dropout"
        )
        return Finding("resume", "warning", text)
    both = [(planned.loss, recorded["loss"]), (planned.grad_norm, recorded["grad_norm"])]
    difference = max(abs(mine - theirs) / max(abs(theirs), 1e-12) for mine, theirs in both)
    tolerance = max(map(_tolerance, (replay.precision.name, str(plan.get("precision")))))
    is_same = difference <= tolerance
    how = "as recorded" if is_same else f"recorded were {recorded['loss']:.6g} and {recorded['grad_norm']:.6g}"
    exact = "bit for bit" if planned.loss == recorded["loss"] else f"within {difference:.1e}"
    text = f"{came}{again}: step {step} has loss {planned.loss:.6g} and gradient norm {planned.grad_norm:.6g}, {how}"
    remedy = ". Was the run on other hardware or with other versions? If not, please report it: it is a bug in whet"
    return Finding("resume", "ok", f"{text}, {exact}") if is_same else Finding("resume", "fault", text + remedy)


def _layout_finding(run: Path, step: int, own: str, found: dict[str, tuple[float, float]], tolerance: float) -> Finding:
    if not found:
        return Finding("layout", "warning", f"step {step} has one conversation: there is no other layout of it")
    worst = max(found, key=lambda name: max(found[name]))
    loss, gradient = map(max, zip(*found.values(), strict=True))
    if max(loss, gradient) <= tolerance:
        text = f"step {step} is the same with {own}, {', '.join(found)}: {_described(loss, gradient, tolerance)}"
        return Finding("layout", "ok", text)
    remedy = (
        f"`whet check {run / 'config.yaml'}` shows whether conversations leak; if they do not, please report it: "
        "it is a bug in whet"
    )
    text = f"step {step} is not the same with {own} and {worst}: {_described(*found[worst], tolerance)}. {remedy}"
    return Finding("layout", "fault", text)


def _described(loss: float, gradient: float, tolerance: float) -> str:
    losses = f"losses of conversations differ by {_share(loss)}" if loss else "losses of conversations are equal"
    gradients = f"gradients differ by {_share(gradient)}" if gradient else "gradients are equal"
    return f"{losses}, {gradients} (rounding: up to {_share(tolerance)})"


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1e}"
