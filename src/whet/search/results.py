"""What a search has found: the table of trials, the best one's recipe, how much each parameter matters."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from whet.core.errors import RunFailedError
from whet.core.files import atomic_write, write_json
from whet.report.formatting import DASH, format_count, format_number
from whet.search.script import ScriptConfig
from whet.search.search import SearchPlan
from whet.search.space import Assignment, Value
from whet.search.study import BRACKET, ERROR, FOLDER, JOURNAL, counts, parameter_importance
from whet.search.trials import best_recipe, read_progress, trial_name

_STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "stopped", TrialState.RUNNING: "running"}


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A row of the table."""

    number: int
    state: str
    """complete, stopped (at a rung), crashed, running."""
    value: float | None
    """At the last rung that it has reached."""
    step: int
    tokens: int
    values: Assignment
    bracket: int
    rungs: dict[int, float]
    """The value at each rung, by its length in the unit of the search."""
    folder: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All trials, the best first."""

    trials: list[TrialResult]
    importance: dict[str, float]
    invalid: int
    """Combinations that were replaced."""

    @property
    def best(self) -> TrialResult:
        return self.trials[0]

    @property
    def is_tied(self) -> bool:
        """Whether all trials that came as far as the best have its value."""
        alike = [trial.value for trial in self.trials if max(trial.rungs, default=0) == max(self.best.rungs)]
        return len(alike) > 1 and set(alike) == {self.best.value}

    @property
    def tokens(self) -> int:
        return sum(trial.tokens for trial in self.trials)


def collect_results(study: Study, plan: SearchPlan) -> SearchResult:
    """Read the trials from the study and their run folders. Raises a WhetError if none has a value."""
    every = study.get_trials(deepcopy=False)
    trials = [read_trial(frozen, plan.folder) for frozen in every if counts(frozen)]
    sign = 1.0 if plan.minimizes else -1.0

    def rank(trial: TrialResult) -> tuple[int, float, float]:
        """Complete ones first, then those that came furthest; a short trial's value does not compare with a long's."""
        longest = max(trial.rungs, default=0)
        return (
            0 if trial.state == "complete" else 1,
            -longest,
            math.inf if trial.value is None else sign * trial.value,
        )

    trials.sort(key=rank)
    if not trials or trials[0].value is None:
        crashed = next((trial for trial in trials if trial.error), None)
        raise RunFailedError(
            f"{plan.folder}: none of {len(trials)} trials reached an evaluation"
            + (f"; trial {crashed.number} failed with: {crashed.error}" if crashed else "")
            + f". What they printed is in {plan.folder / 'logs'}"
        )
    return SearchResult(trials, parameter_importance(study), len(every) - len(trials))


def read_trials(folder: Path) -> list[TrialResult]:
    """The trials of a search that may still run, from its journal, which is not changed."""
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    studies = storage.get_all_studies()
    frozen = storage.get_all_trials(studies[0]._study_id, deepcopy=False) if studies else []
    return [read_trial(each, folder) for each in frozen if counts(each)]


def read_trial(frozen: FrozenTrial, search: Path) -> TrialResult:
    """A trial, with what its run folder tells."""
    folder = Path(frozen.user_attrs.get(FOLDER) or search / trial_name(frozen.number))
    step, tokens = read_progress(folder)
    rungs = {rung: value for rung, value in sorted(frozen.intermediate_values.items()) if math.isfinite(value)}
    error = frozen.user_attrs.get(ERROR)
    state = "crashed" if error else _STATES.get(frozen.state, "running")
    value = list(rungs.values())[-1] if rungs else None
    return TrialResult(
        frozen.number, state, value, step, tokens, dict(frozen.params), int(frozen.user_attrs.get(BRACKET, 0)), rungs,
        str(folder), error,
    )  # fmt: skip


def write_results(result: SearchResult, plan: SearchPlan) -> dict[str, Any]:
    """Write best.yaml and search.json; returns what --json prints."""
    name = f"{plan.config.run.name}-best"
    best = plan.space.config(result.best.values)
    command = f"whet train {plan.folder / 'best.yaml'}"
    if isinstance(best, ScriptConfig):
        command = shlex.join(best.script.argv())
    head = (
        f"# The best of {len(result.trials)} trials by {plan.metric} = {result.best.value:.6g} (trial "
        f"{result.best.number}, {result.best.step} steps).\n# {command}\n"
    )
    atomic_write(plan.folder / "best.yaml", head + best_recipe(plan.space, result.best.values, name))
    found = {
        "search": str(plan.folder), "method": plan.settings.method, "metric": plan.metric, "unit": plan.unit,
        "best": {
            "trial": result.best.number, "value": result.best.value, "values": result.best.values, "command": command,
            "config": str(plan.folder / "best.yaml"), "run": result.best.folder,
        },
        "importance": result.importance, "tokens": result.tokens, "invalid": result.invalid,
        "trials": [asdict(trial) for trial in result.trials], "page": str(plan.folder / "search.html"),
    }  # fmt: skip
    write_json(plan.folder / "search.json", found)
    return found


def short_names(names: list[str]) -> dict[str, str]:
    """Parameters by the last parts of their names, as many as tell them apart."""
    shortened = {}
    for name in names:
        parts = name.split(".")
        endings = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        shortened[name] = next(
            (end for end in endings if sum(f".{other}".endswith(f".{end}") for other in names) == 1), name
        )
    return shortened


def format_value(value: Value) -> str:
    return format_number(value) if isinstance(value, float) else DASH if value is None else str(value)


def table_cells(result: SearchResult, plan: SearchPlan) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table of trials."""
    names = short_names([parameter.name for parameter in plan.space.parameters])
    head = ["trial", "state", plan.metric, "step", "tokens", *names.values()]
    rows = [
        [
            str(trial.number), trial.state, format_number(trial.value) if trial.value is None else f"{trial.value:.4f}",
            format_count(trial.step), format_count(trial.tokens),
            *(format_value(trial.values[name]) if name in trial.values else DASH for name in names),
        ]
        for trial in result.trials
    ]  # fmt: skip
    return head, rows
