"""report.html: one self-contained file that needs neither a network nor a server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from whet.core.console import warn
from whet.core.display import escape_controls, mask_secrets
from whet.core.errors import os_error
from whet.core.files import atomic_write, resolve_path
from whet.report.charts import ChartLine, downsample, exponential_average, render_chart, smoothing_beta
from whet.report.formatting import (
    DASH,
    finite_number,
    format_count,
    format_number,
    format_seconds,
    format_share,
    format_time,
)
from whet.report.run_view import (
    LoggedSample,
    RunView,
    SamplePair,
    Series,
    SourceCounts,
    as_dict,
    as_list,
    select_pairs,
)
from whet.report.summary import summarize_run


class Markup(str):
    """Safe HTML; any other text is escaped when it becomes part of the page."""

    __slots__ = ()


def to_html(value: object) -> str:
    """`value` as HTML: markup unchanged, a missing value as a dash, all else as escaped text."""
    if isinstance(value, Markup):
        return value
    return DASH if value is None or value == "" else escape(escape_controls(str(value)))


def element(name: str, *content: object, **attributes: str) -> Markup:
    """An element with attributes; `class_` is written `class`, `data_label` is written `data-label`."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(to_html(part) for part in content)}</{name}>")


def html_section(title: str, *content: object, note: object = None) -> Markup:
    """A section of the page: heading, optional note, content."""
    paragraph = element("p", note, class_="note") if note is not None else Markup("")
    return element("section", element("h2", title), paragraph, *content)


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table whose cells have their column's title as data-label, which narrow screens show."""
    body = [
        element("tr", *[element("td", cell, data_label=title) for title, cell in zip(head, row, strict=True)])
        for row in rows
    ]
    return element(
        "table", element("thead", element("tr", *[element("th", title) for title in head])), element("tbody", *body)
    )


def definition_list(values: Mapping[str, object]) -> Markup:
    """A list of names and values without the missing ones."""
    known = {name: value for name, value in values.items() if value not in (None, "", DASH)}
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in known.items()]
    return element("dl", *rows, class_="facts")


# The sections of the report, each a function from a run to HTML; empty without data.

_EMPTY = Markup("")
_MAX_POINTS = 4000
_SHOWN_SAMPLES = 4
_MAX_FOLDED_SAMPLES = 60
_MAX_PLACES = 5
_MAX_FAULTS = 20


def headline_section(run: RunView) -> Markup:
    """Task scores, and what training them took."""
    scores = []
    for score in run.task_scores:
        early = score.after_step is not None and score.after_step != run.steps
        name = f"{score.task} score" + (f" (step {format_count(score.after_step)})" if early else "")
        scores.append(
            _tile(name, format_share(score.before), element("i", " → "), element("b", format_share(score.after)))
        )
    numbers = [
        _tile(
            "steps" if run.steps in (None, run.step) else f"of {format_count(run.steps)} steps", format_count(run.step)
        ),
        _tile("training time", format_seconds(run.train_seconds)),
        _tile("tokens", format_count(run.tokens)),
        _tile("supervised tokens", format_count(run.supervised_tokens)),
        _tile("tokens per second", format_count(run.tokens_per_s)),
    ]
    return element("section", element("div", *scores, class_="scores"), element("div", *numbers, class_="tiles"))


def _tile(name: str, *value: object) -> Markup:
    return element("div", element("strong", *value), element("span", name), class_="tile")


def damage_section(run: RunView) -> Markup:
    """The files that are damaged: what the page shows of them is incomplete."""
    if not run.damage:
        return _EMPTY
    listed = element("ul", *[element("li", text) for text in run.damage], class_="bad")
    return html_section("Damaged files", listed, note="What this page shows of these files is incomplete.")


def curves_section(run: RunView) -> Markup:
    """Loss, scores, learning rate and gradient norm by step."""
    validation = ChartLine("validation", list(run.val_losses), "validation", joined=False)
    small = [
        render_chart(f"{task} score", [_chart_line(list(points))], small=True) for task, points in run.scores.items()
    ]
    small.append(render_chart("learning rate", [_chart_line(run.series("lr"))], small=True))
    small.append(render_chart("gradient norm", _raw_and_smoothed(run.series("grad_norm")), small=True))
    beta = smoothing_beta(len(run.step_lines))
    return html_section(
        "Training",
        Markup(render_chart("loss by step", [*_raw_and_smoothed(run.series("loss")), validation])),
        element("div", *map(Markup, small), class_="row"),
        note=f"Smoothed lines are exponential moving averages with β = {beta:.2g}." if beta else None,
    )


def validation_section(run: RunView) -> Markup:
    """Metrics on held-out conversations before and after; with several sources, the loss on each."""
    names = {"val_loss": "loss", "val_bpb": "bits per byte", "val_accuracy": "token accuracy"}
    rows = []
    for key, values in run.validation.items():
        source = key.removeprefix("val_loss/")
        name = names.get(key) or (f"loss on {source}" if source != key else None)
        if name is not None:
            show = format_share if key == "val_accuracy" else format_number
            rows.append((name, *map(show, values)))
    part = next((share for _, share in reversed(run.points("val_part"))), None)
    note = None if part is None else f"On {format_share(part)} of the held-out conversations (eval.rows)."
    return html_section("Validation", html_table(("metric", "before", "after"), rows), note=note) if rows else _EMPTY


def faults_section(run: RunView) -> Markup:
    """Steps with a fault: the reason, the action taken, and the cause."""
    if not run.events:
        return _EMPTY
    actions = {
        "stop": "stopped",
        "skip": "skipped",
        "rollback": "rolled back",
        "take": "applied anyway",
        "repeat": "repeated",
    }
    rows = [
        (
            format_count(event.get("step")),
            mask_secrets(str(event.get("reason") or DASH)),
            actions.get(str(event.get("action")), DASH),
            _fault_origin(event),
        )
        for event in run.events[:_MAX_FAULTS]
    ]
    left = len(run.events) - len(rows)
    note = "Replay one with: whet train --replay RUN/faults/step-NNNNNN.json"
    shown = html_table(("step", "reason", "action", "cause"), rows)
    return html_section("Faults", shown, note=note + (f" ({left} more in events.jsonl)" if left > 0 else ""))


def _fault_origin(event: dict[str, Any]) -> str:
    """The conversations that caused a fault, or the weights."""
    if event.get("all"):
        return "the weights: every conversation of the step fails"
    places = [f"{each.get('source')}:{each.get('line')}" for each in event.get("conversations") or ()]
    more = f" and {len(places) - _MAX_PLACES} more" if len(places) > _MAX_PLACES else ""
    layer = f" (first non-finite layer: {event['layer']})" if event.get("layer") else ""
    return (", ".join(places[:_MAX_PLACES]) + more or DASH) + layer


def _chart_line(series: Series) -> ChartLine:
    shown = downsample([value for _, value in series], _MAX_POINTS)
    return ChartLine("value", [series[i] for i in shown], "main")


def _raw_and_smoothed(series: Series) -> list[ChartLine]:
    """The values as dots and, if there are enough, a smoothed line."""
    values = [value for _, value in series]
    shown = downsample(values, _MAX_POINTS)
    beta = smoothing_beta(len(values))
    average = exponential_average(values, beta)
    return [
        ChartLine("training", [series[i] for i in shown], "raw", joined=False),
        ChartLine("smoothed", [(series[i][0], average[i]) for i in shown] if beta else [], "main"),
    ]


def samples_section(run: RunView) -> Markup:
    """The same prompts before and after training."""
    if not run.pairs:
        return _EMPTY
    pairs = select_pairs(run.pairs, _SHOWN_SAMPLES)
    others = [pair for pair in run.pairs if pair not in pairs][:_MAX_FOLDED_SAMPLES]
    more = (
        element("details", element("summary", f"{len(others)} more"), *map(_sample_article, others))
        if others
        else _EMPTY
    )
    wrong = sum(pair.wrong_after for pair in run.pairs)
    scored = sum(bool(pair.after and pair.after.right is not None) for pair in run.pairs)
    note = f"{len(pairs)} of {len(run.pairs)} held-out samples." + (
        f" After training, {wrong} of {scored} answers are wrong; the selection includes wrong ones." if wrong else ""
    )
    return html_section("Before and after", *map(_sample_article, pairs), more, note=note)


def _sample_article(pair: SamplePair) -> Markup:
    columns = [
        element("div", element("h3", "expected"), element("pre", pair.sample.expected)),
        _answer_column("before", pair.before),
        _answer_column("after", pair.after),
    ]
    return element(
        "article", element("pre", pair.sample.prompt, class_="prompt"), element("div", *columns, class_="answers")
    )


def _answer_column(title: str, sample: LoggedSample | None) -> Markup:
    if sample is None:
        return element("div", element("h3", title), element("pre", DASH))
    verdict = {True: "right", False: "wrong", None: ""}[sample.right]
    heading = element("h3", f"{title}, step {sample.step}" if sample.step else title, _verdict(verdict))
    return element("div", heading, element("pre", sample.answer or "(empty)"), class_=verdict)


def _verdict(verdict: str) -> Markup:
    return element("span", {"right": "✓ right", "wrong": "✗ wrong"}[verdict], class_="verdict") if verdict else _EMPTY


def ledger_section(run: RunView) -> Markup:
    """What happened to every conversation."""
    if not run.sources:
        return _EMPTY
    head = ("source", "use", "in", "kept", "truncated", "dropped", "tokens", "supervised", "EOS supervised")
    rows = [
        (
            element("code", mask_secrets(source.name)),
            source.use,
            *map(format_count, (source.total, source.kept, source.truncated, source.dropped, source.tokens)),
            _supervised_cell(source),
            format_share(source.eos_supervised),
        )
        for source in run.sources
    ]
    reasons = [_reason_item(source, reason) for source in run.sources for reason in source.notes]
    listed = element("ul", *reasons, class_="reasons") if reasons else _EMPTY
    return html_section("Data", html_table(head, rows), listed, note=_ledger_balance(run.sources))


def _ledger_balance(sources: tuple[SourceCounts, ...]) -> Markup:
    missing = [source.unaccounted for source in sources]
    known = [number for number in missing if number is not None]
    if len(known) < len(missing):
        return element("span", "The ledger lacks counts, so it is unknown whether every conversation is accounted for.")
    if any(known):
        return element(
            "span", f"{format_count(sum(map(abs, known)))} conversations are not accounted for.", class_="bad"
        )
    return element("span", "✓ Every conversation is accounted for: in = kept + dropped.", class_="good")


def _supervised_cell(source: SourceCounts) -> str:
    text = format_count(source.supervised_tokens)
    if source.supervised_tokens is None or not source.tokens:
        return text
    return f"{text} ({format_share(source.supervised_tokens / source.tokens)})"


def _reason_item(source: SourceCounts, reason: str) -> Markup:
    places = source.first.get(reason, [])
    first: list[object] = [", first at "] if places else []
    for place in places[:_MAX_PLACES]:
        first += [element("code", mask_secrets(place)), " "]
    count, name = format_count(source.notes[reason]), mask_secrets(source.name)
    return element("li", f"{count} × ", element("b", reason), f" in {name}", *first)


def exports_section(run: RunView) -> Markup:
    """The exports and their certificates."""
    if not run.certificates:
        return _EMPTY
    head = (
        "export", "verified", "largest logit difference", "same next token", "conversations compared",
        "trained weights in it", "lost to rounding",
    )  # fmt: skip
    rows = [
        (
            certificate.get("kind"),
            element("span", "✓ verified", class_="good")
            if certificate.get("verified") is True
            else element("span", "✗ not verified", class_="bad"),
            format_number(finite_number(certificate.get("max_logit_difference"))),
            format_share(finite_number(certificate.get("same_next_token"))),
            format_count(finite_number(certificate.get("conversations"))),
            _exported_cell(as_dict(certificate.get("effect"))),
            format_share(finite_number(as_dict(certificate.get("effect")).get("lost_to_rounding"))),
        )
        for certificate in run.certificates
    ]
    return html_section(
        "Exports", html_table(head, rows), note="Every export is loaded again and compared with the trained model."
    )


def _exported_cell(effect: dict[str, Any]) -> str:
    exported, weights = (finite_number(effect.get(key)) for key in ("exported", "weights"))
    return DASH if exported is None else f"{format_count(exported)} of {format_count(weights)}"


def effect_section(run: RunView) -> Markup:
    """What training changed, by kind of weight: those of all layers together."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for each in map(as_dict, as_list(run.effect.get("modules"))):
        kinds.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", str(each.get("module"))), []).append(each)
    if not kinds:
        return _EMPTY
    rows = []
    for name, weights in kinds.items():
        changes = [change for each in weights if (change := finite_number(each.get("change"))) is not None]
        experts = sum(finite_number(each.get("experts")) or 0 for each in weights)
        idle = sum(len(as_list(each.get("untouched_experts"))) for each in weights)
        rows.append(
            (
                name,
                format_count(len(weights)),
                *(_all_of([each.get(key) is True for each in weights]) for key in ("gradient", "moved")),
                f"{min(changes):.1e} to {max(changes):.1e}" if changes else DASH,
                f"{format_count(idle)} of {format_count(experts)}" if experts else DASH,
            )
        )
    head = ("weight", "number", "got a gradient", "moved", "‖ΔW‖ ÷ ‖W‖", "experts without a token")
    return html_section("Effect", html_table(head, rows), note="What training changed; each weight is in effect.json.")


def _all_of(found: list[bool]) -> Markup:
    return element(
        "span", "all" if all(found) else f"{sum(found)} of {len(found)}", class_="good" if all(found) else "bad"
    )


def plan_section(run: RunView) -> Markup:
    """The plan, and the machine that it ran on."""
    plan, status = run.plan, run.status

    def number(key: str) -> float | None:
        return finite_number(plan.get(key))

    trainable, total = number("trainable_parameters"), number("parameters")
    part = f" of {format_count(total)} ({format_share(trainable / total)})" if trainable and total else ""
    batch = plan.get("batch")
    mfu = [value for _, value in run.points("mfu")]
    values: dict[str, object] = {
        "model": mask_secrets(str(run.setting("model", "path"))),
        "trainable parameters": format_count(trainable) + part if trainable is not None else None,
        "device": plan.get("device_name") or plan.get("device"),
        "processes": format_count(number("world")),
        "precision": plan.get("precision"),
        "attention": plan.get("attention"),
        "packing": plan.get("packing"),
        "packing efficiency": format_share(number("efficiency")),
        "rows": format_count(number("rows")),
        "row length": format_count(number("row_length")),
        "rows per micro-batch": format_count(number("micro_rows")),
        "batch": ", ".join(f"{n} {unit}" for unit, n in batch.items()) if isinstance(batch, dict) else batch,
        "epochs": format_number(number("epochs")),
        "conversations trained on": format_count(run.conversations),
        "peak memory": f"{run.peak_gib:.2f} GiB" if run.peak_gib is not None else None,
        "model FLOPs": format_number(run.flops),
        "mean MFU": format_share(sum(mfu) / len(mfu)) if mfu else None,
        "host": status.host,
        "started": format_time(status.started),
        "last heartbeat": format_time(status.heartbeat),
        "exit code": None if status.exit_code is None else str(status.exit_code),
    }
    return html_section("Plan and machine", definition_list(values))


def config_section(run: RunView) -> Markup:
    """The resolved configuration, folded away."""
    return element(
        "section",
        element("details", element("summary", "Resolved configuration"), element("pre", mask_secrets(run.config_text))),
    )


_SECTIONS = (
    damage_section,
    headline_section,
    curves_section,
    faults_section,
    validation_section,
    samples_section,
    ledger_section,
    effect_section,
    exports_section,
    plan_section,
    config_section,
)


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into the run folder and return its path."""
    run = RunView.read(folder)
    for text in run.damage:
        warn(f"{run.folder}/{text}")
    path = run.folder / "report.html"
    try:
        atomic_write(path, render_page(run).encode("utf-8", "replace"))  # JSON can name surrogates
    except OSError as error:
        raise os_error(error, "writing the report", path) or error from None
    return path


def render_page(run: RunView) -> str:
    """The whole report as HTML."""
    sections = [part(run) for part in _SECTIONS]
    return fill_page(run.name, run.status.state, summarize_run(run), sections, run.folder)


def fill_page(name: str, state: str | None, summary: str, sections: Iterable[Markup], folder: Path) -> str:
    """A self-contained page in the style of reports. `folder`: where its content comes from."""
    return Template(_read_asset("report.html")).substitute(
        name=to_html(mask_secrets(name)),
        state=to_html(state),
        summary=to_html(mask_secrets(summary)),
        sections="\n".join(sections),
        written=format_time(time.time()),
        folder=to_html(resolve_path(folder)),
        css=_read_asset("report.css"),
        js=_read_asset("report.js"),
    )


def _read_asset(name: str) -> str:
    return files("whet.report").joinpath(name).read_text(encoding="utf-8")
