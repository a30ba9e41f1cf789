"""search.html: the trials of a search in one picture, in the style of reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from whet.core.display import mask_secrets
from whet.core.files import atomic_write
from whet.report.charts import value_axis
from whet.report.formatting import format_count, format_number, format_share
from whet.report.html_report import Markup, element, fill_page, html_section, html_table
from whet.search.results import SearchResult, TrialResult, short_names, table_cells
from whet.search.search import SearchPlan
from whet.search.space import Parameter

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
            note="Orange: the best trial. Blue: complete trials. Light: stopped at a rung, with their last value.",
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
