"""The results of a search: the table of trials, the best recipe, how much each parameter matters, and search.html."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from whet.core.display import mask_secrets
from whet.core.errors import RunFailedError
from whet.core.files import atomic_write, write_json
from whet.report.charts import value_axis
from whet.report.formatting import DASH, format_count, format_number, format_share
from whet.report.html_report import Markup, element, fill_page, html_section, html_table
from whet.search.script import ScriptConfig
from whet.search.search import SearchPlan
from whet.search.space import Assignment, Parameter, Value
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
    folder = search / trial_name(frozen.number)  # also if the search's folder was moved
    if FOLDER in frozen.user_attrs and not folder.is_dir():  # a trial of another search in a shared study
        folder = Path(frozen.user_attrs[FOLDER])
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
    command = shlex.join(["whet", "train", str(plan.folder / "best.yaml")])
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


# search.html: the trials of a search in one picture, in the style of reports.

_VIEW_BOX = 1000
_MAX_PANELS = 6


def write_page(result: SearchResult, plan: SearchPlan) -> Path:
    """Write search.html into the folder of the search."""
    best, names = result.best, short_names([parameter.name for parameter in plan.space.parameters])
    summary = (
        f"{plan.settings.method}: {len(result.trials)} trials with {format_count(result.tokens)} tokens. The best, "
        f"trial {best.number}, has {plan.metric} = {best.value:.4f} after {format_count(best.step)} steps."
    )
    by_importance = sorted(plan.space.parameters, key=lambda each: -result.importance.get(each.name, 0.0))
    panels = [_panel(parameter, names[parameter.name], result, plan) for parameter in by_importance[:_MAX_PANELS]]
    head, rows = table_cells(result, plan)
    sections = [
        html_section(
            f"{plan.metric} by parameter", element("div", *panels, class_="row"),
            note="Orange: the best trial. Blue: complete trials. Light: stopped at a rung, with their last value."
            + _outlier_note(result, plan.minimizes),
        ),
        _importance_section(result, names),
        html_section("Trials", html_table(head, rows)),
        html_section(
            "The best recipe", element("pre", mask_secrets((plan.folder / "best.yaml").read_text())),
            note=f"In {plan.folder / 'best.yaml'}.",
        ),
    ]  # fmt: skip
    path = plan.folder / "search.html"
    atomic_write(path, fill_page(plan.config.run.name or "", "finished", summary, sections, plan.folder))
    return path


def _importance_section(result: SearchResult, names: dict[str, str]) -> Markup:
    if not result.importance:
        return Markup("")
    ranked = sorted(result.importance.items(), key=lambda item: -item[1])
    rows = [(names.get(name, name), format_share(share)) for name, share in ranked]
    note = "How much each parameter decides whether a trial is among the best (PED-ANOVA, by rank)."
    return html_section("Importance", html_table(("parameter", "share"), rows), note=note)


def _panel(parameter: Parameter, title: str, result: SearchResult, plan: SearchPlan) -> Markup:
    """A dot for each trial that has the parameter: its value from left to right, the metric upwards."""
    shown = [trial for trial in result.trials if trial.value is not None and parameter.name in trial.values]
    if not shown:
        return Markup("")
    metrics = [trial.value for trial in shown if trial.value is not None]
    clipped = _without_outliers(metrics, plan.minimizes)
    axis = value_axis(clipped, 3)

    def dots(kind: str, trials: Sequence[TrialResult]) -> str:
        path = "".join(
            f"M{_place(parameter, trial) * _VIEW_BOX:.1f} "
            f"{(1 - min(1.0, max(0.0, axis.place(trial.value or 0.0)))) * _VIEW_BOX:.1f}h.01"
            for trial in trials
        )
        return f'<path class="{kind} dot" d="{path}"/>' if path else ""

    others = [trial for trial in shown if trial.number != result.best.number]
    drawn = (
        dots("raw", [trial for trial in others if trial.state != "complete"])
        + dots("main", [trial for trial in others if trial.state == "complete"])
        + dots("validation", [trial for trial in shown if trial.number == result.best.number])
    )
    heights = "".join(f"M0 {(1 - axis.place(tick)) * _VIEW_BOX:.1f}H{_VIEW_BOX}" for tick in axis.ticks)
    labels = "".join(
        f'<span class="y" style="top:{(1 - axis.place(tick)) * 100:.2f}%">{text}</span>'
        for tick, text in zip(axis.ticks, axis.texts(), strict=True)
    ) + "".join(
        f'<span class="x" style="left:{share * 100:.2f}%">{escape(text)}</span>' for share, text in _ticks(parameter)
    )
    described = escape(f"{plan.metric} of {len(shown)} trials by {parameter.name}")
    return Markup(
        f'<figure class="chart small"><figcaption><b>{escape(title)}</b></figcaption><div class="plot">'
        f'<svg viewBox="0 0 {_VIEW_BOX} {_VIEW_BOX}" preserveAspectRatio="none" role="img" aria-label="{described}">'
        f'<path class="grid" d="{heights}"/>{drawn}</svg>{labels}</div></figure>'
    )


def _without_outliers(values: Sequence[float], minimizes: bool) -> list[float]:
    """The values that an axis shows: a diverged trial would flatten all others. Those beyond are drawn at its edge."""
    ordered = sorted(values, reverse=not minimizes)
    best, middle = ordered[0], ordered[len(ordered) // 2]
    limit = best + 4 * (middle - best)
    kept = [value for value in ordered if (value <= limit if minimizes else value >= limit)]
    return kept or ordered


def _outlier_note(result: SearchResult, minimizes: bool) -> str:
    values = [trial.value for trial in result.trials if trial.value is not None]
    shown = _without_outliers(values, minimizes)
    beyond = sorted(value for value in values if not min(shown) <= value <= max(shown))
    return f" Beyond the axis, drawn at its edge: {', '.join(f'{value:.4g}' for value in beyond)}." if beyond else ""


def _place(parameter: Parameter, trial: TrialResult) -> float:
    """Where a trial stands from left (0) to right (1)."""
    value = trial.values[parameter.name]
    if parameter.kind == "choice":
        return (parameter.values.index(value) + 0.5) / len(parameter.values)
    assert isinstance(value, int | float)
    if parameter.kind == "log":
        return math.log(value / parameter.low) / math.log(parameter.high / parameter.low)
    return (value - parameter.low) / (parameter.high - parameter.low)


def _ticks(parameter: Parameter) -> list[tuple[float, str]]:
    if parameter.kind == "choice":
        count = len(parameter.values)
        return [((index + 0.5) / count, str(value)[:12]) for index, value in enumerate(parameter.values)]
    middle = (
        math.sqrt(parameter.low * parameter.high) if parameter.kind == "log" else (parameter.low + parameter.high) / 2
    )
    return [(0.0, format_number(parameter.low)), (0.5, format_number(middle)), (1.0, format_number(parameter.high))]
