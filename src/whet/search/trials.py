"""Trials: their recipes, their lengths in steps at each rung, their run folders, and where they run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from whet.config import Config, read_config
from whet.core.config import load_config
from whet.core.errors import WhetError
from whet.core.files import atomic_write, hash_json
from whet.core.json_lines import read_json_lines
from whet.core.yaml import Node, Template, dump_yaml
from whet.run.data import make_plan, prepare_data
from whet.run.models.model_reference import resolve_model_reference
from whet.search.script import ScriptConfig, TrialConfig
from whet.search.space import Assignment, Space

if TYPE_CHECKING:
    from numpy.typing import NDArray


OWNER_FILE = "search.id"
"""In the search's folder: which trials of a study that several searches share are those of this folder."""
_TRIAL_SETTINGS: dict[str, dict[str, Any]] = {
    "export": {"at_end": "none"}, "eval": {"at_start": False, "prompts": []}, "checkpoint": {"keep_last": 1},
}  # fmt: skip
"""Settings of a trial that the recipe does not give: nobody exports most of them, and all begin with the same model."""


@dataclass(slots=True)
class Trial:
    """One trial of the search: a run that is stopped at rungs."""

    number: int
    values: Assignment
    config: TrialConfig
    recipe: Path
    rungs: tuple[int, ...]
    """In the unit of the search: steps or tokens."""
    steps: tuple[int, ...]
    """The step at each rung."""
    reached: int = 0
    """How many rungs it has reached."""

    def next_run(self) -> TrialRun:
        """The trial up to its next rung."""
        return TrialRun(self.number, self.recipe, self.config, self.steps[self.reached])


def trial_name(number: int) -> str:
    return f"trial-{number:03d}"


def plain_recipe(node: Node) -> Any:
    """A recipe as plain values, in which environment variables stay names."""
    if isinstance(node.value, dict):
        return {key: plain_recipe(inner) for key, inner in node.value.items()}
    if isinstance(node.value, list):
        return [plain_recipe(inner) for inner in node.value]
    if node.template is None:
        return node.value
    text = Template(node.template)
    text.is_text = isinstance(node.value, str)
    return text


def best_recipe(space: Space, values: Assignment, name: str) -> str:
    """The recipe with these values, for a run of its own."""
    recipe = plain_recipe(space.recipe(values))
    recipe.pop("search", None)
    run = {key: value for key, value in recipe.pop("run", {}).items() if key not in ("name", "dir")}
    return dump_yaml({"run": {"name": name, **run}, **recipe})


def write_trial_recipe(
    space: Space, values: Assignment, folder: Path, number: int, search: str
) -> tuple[Path, TrialConfig]:
    """Write the recipe of a trial beside its run folder; returns its path and its configuration."""
    recipe = plain_recipe(space.recipe(values))
    recipe.pop("search", None)
    name = trial_name(number)
    run = recipe.pop("run", {})
    run |= {"name": f"{search}-{name}", "dir": str(folder / name), "tags": [*run.get("tags", []), f"search:{search}"]}
    run["notify"] = []
    is_script = space.kind is ScriptConfig
    for section, settings in _TRIAL_SETTINGS.items() if not is_script else ():
        given = recipe.get(section)
        recipe[section] = {**settings, **(given if isinstance(given, dict) else {})}
    recipe.get("eval", {}).pop("patience", None)  # the search decides when a trial ends
    file = folder / "recipes" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    atomic_write(file, dump_yaml({"run": run, **recipe}))
    return file, load_config(ScriptConfig, file) if is_script else read_config(file)


# Lengths


@dataclass(frozen=True, slots=True)
class PlannedLength:
    """The plan of a trial: how many steps, and how many tokens after each."""

    tokens: NDArray[np.int64]

    @property
    def steps(self) -> int:
        return len(self.tokens)

    def step_at(self, tokens: int) -> int:
        """The first step after which a trial has seen so many tokens; at most the last."""
        return min(self.steps, int(np.searchsorted(self.tokens, tokens)) + 1)


class LengthTable:
    """The planned lengths of trials. Trials with the same data and batches share a plan."""

    def __init__(self) -> None:
        self._known: dict[str, PlannedLength] = {}

    def of(self, config: Config) -> PlannedLength:
        """Prepares the data if no trial has yet."""
        config = resolve_model_reference(config)
        tree = config.model_dump(mode="json", include={"model", "data"})
        train = config.train.model_dump(mode="json", include={"steps", "epochs", "tokens", "batch", "row_length"})
        key = hash_json([tree, train, config.run.seed])
        if key not in self._known:
            data = prepare_data(config)
            plan = make_plan(config, data)
            ends = np.cumsum(data.train.store.lengths[plan.documents], dtype=np.int64)
            self._known[key] = PlannedLength(ends[plan.rows[plan.steps[1:]] - 1])
        return self._known[key]


def length_in_steps(config: TrialConfig) -> int | None:
    """The length of a trial that is given in steps: then rungs are steps, too, otherwise tokens."""
    return config.script.steps if isinstance(config, ScriptConfig) else config.train.steps


def trial_length(config: TrialConfig, lengths: LengthTable) -> int:
    """The length of a whole trial, in the unit of rungs."""
    steps = length_in_steps(config)
    if steps is not None or isinstance(config, ScriptConfig):
        return steps or 0
    return config.train.tokens or int(lengths.of(config).tokens[-1])


def steps_at_rungs(config: TrialConfig, rungs: tuple[int, ...], lengths: LengthTable) -> tuple[int, ...]:
    """The step at which a trial reaches each rung; the last is its end."""
    if isinstance(config, ScriptConfig) or config.train.steps is not None:
        return rungs
    planned = lengths.of(config)
    return (*(planned.step_at(rung) for rung in rungs[:-1]), planned.steps)


# What a run folder says


def read_value(folder: Path, step: int, metric: str) -> float | None:
    """The metric of a run's evaluation after a step; None if there is none."""
    for line in reversed(read_json_lines(folder / "metrics.jsonl")[0]):
        value = line.get(metric)
        if line.get("step") == step and "loss" not in line and isinstance(value, int | float):
            return float(value) if math.isfinite(value) else None
    return None


def measured_names(folder: Path, step: int) -> list[str]:
    """What a run's evaluation after a step has measured, finite or not."""
    lines = [line for line in read_json_lines(folder / "metrics.jsonl")[0] if line.get("step") == step]
    return [name for line in lines if "loss" not in line for name in line if name.startswith(("val_", "task/"))]


def read_progress(folder: Path) -> tuple[int, int]:
    """The steps and the tokens that a run has been trained for."""
    for line in reversed(read_json_lines(folder / "metrics.jsonl")[0]):
        if "loss" in line and isinstance(line.get("step"), int):
            tokens = line.get("tokens")
            return line["step"], tokens if isinstance(tokens, int) else 0
    return 0, 0


def require_metric(config: TrialConfig, metric: str) -> None:
    """Refuse a metric that evaluations of the trials do not have. What a script measures, its first trial shows."""
    if isinstance(config, ScriptConfig):
        if config.script.greater_is_better is None and not any(word in metric for word in ("loss", "accuracy")):
            raise WhetError(
                f"search.metric: {metric}: it is not known whether higher or lower is better. Set "
                "script.greater_is_better to true or false"
            )
    elif metric.startswith("task/"):
        if metric.removeprefix("task/") not in config.eval.task_names:
            raise WhetError(
                f"search.metric: {metric}, but eval.tasks does not have {metric.removeprefix('task/')}. Add it"
            )
    elif metric not in ("val_loss", "val_bpb", "val_accuracy"):
        raise WhetError(f"search.metric: {metric} is not measured. Use val_loss, val_bpb, val_accuracy or task/NAME")
    elif config.data.validation is None:
        raise WhetError(f"search.metric: {metric}, but there is no validation data. Set data.validation")


# Where trials run: the interface of this machine (local_trials.py) and of Slurm (slurm_trials.py).


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial up to its next rung: `whet train RECIPE --resume --until STEP`, or a script of the user's.

    --resume starts a run that does not exist yet, and continues one that has been stopped at an earlier rung.
    """

    number: int
    recipe: Path
    """The trial's own, with values instead of ranges, and with its run.dir."""
    config: TrialConfig
    """The same, read."""
    until: int
    """The step after which it evaluates, saves a checkpoint and ends. The schedule is that of the whole run."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.config.folder


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """The end of the process or job of a TrialRun."""

    number: int
    exit_code: int
    """Of `whet train` (core/errors.py); negative: the signal that killed it."""
    reason: str = ""
    """Why it failed, in a line, where that is known."""


class Place(Protocol):
    """Runs trials. The search calls it from one thread, and starts at most `slots` trials at a time."""

    @property
    def slots(self) -> int:
        """How many trials can run at the same time if search.concurrent is not set."""

    def start(self, trial: TrialRun) -> None:
        """Start a trial; returns at once."""

    def poll(self, seconds: float) -> list[TrialEnd]:
        """The trials that have ended since the last call; waits up to `seconds` for one."""

    def stop(self) -> None:
        """Request every running trial to save a checkpoint and end. `poll` reports the ends."""

    def kill(self) -> None:
        """End every running trial at once; their last checkpoints stay good."""

    def close(self) -> None:
        """Release what the place holds. No trial is running any more, unless an error is on its way."""
